"""Codecs on tiles: the numbers of whole blocks, decoded and encoded within a GPU's kernel.

A tile has one block of 128 numbers per row. The results are those of the codecs (`state.codec`,
`state.blockwise`) with two differences for the sake of speed. The place of a number among the
levels is found by scaling it to one decade, in a quarter of the operations. It differs in the last
bits, but is as far from a rounding border as the codecs' own, so unchanged numbers keep their
codes. And a number halfway between two levels is rounded up, unless rounding is random.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.engine.kernels.tiles import pallas
from megatrain_jax._src.engine.state.codec import Blockwise, Plain, Rounded, round_stochastically

BLOCK = Blockwise.block
# Bits of the smallest normal number of fp32, and of infinity. Bits of positive numbers have the
# order of the numbers.
_SMALLEST, _INFINITY = np.int32(0x00800000), np.int32(0x7F800000)


def has_tiles(codec: Plain) -> bool:
    """Whether this file encodes and decodes a codec's numbers."""
    return type(codec) in (Plain, Rounded, Blockwise) and codec.block in (1, BLOCK)


def levels_of(codec: Plain) -> np.ndarray | None:
    """The level of each code without its sign, as an unsigned integer; None without codes."""
    if not isinstance(codec, Blockwise):
        return None
    return np.roll(codec.levels(), 2 ** (codec.bits - 1)) if codec.signed else codec.levels()


def by_block(x: jax.Array, per: int) -> jax.Array:
    """An array at rest with one block of numbers per row; `per` numbers share an element."""
    return x if per == BLOCK else x.reshape(-1, BLOCK // per)


def read_tile(
    codec: Plain, refs: Sequence[Any], first: jax.Array, shape: tuple[int, int], dtype: Any
) -> jax.Array:
    """The numbers of a tile.

    Args:
        codec: Their codec.
        refs: The arrays at rest, by block, and the levels of codes or None.
        first: The tile's first block.
        shape: Blocks of the tile, and numbers of a block.
        dtype: Dtype of the numbers.
    """
    pl, triton = pallas()
    rows = pl.ds(first, shape[0])
    if not isinstance(codec, Blockwise):
        return refs[0][rows, :].astype(dtype)
    codes, scales, levels = refs
    if codec.bits == 8:
        # Negative codes are the upper half of the levels.
        found = codes[rows, :].astype(jnp.uint8).astype(jnp.int32)
    else:
        row, lane = iotas(shape)
        pairs = triton.load(codes.at[first + row, lane >> 1]).astype(jnp.int32)
        found = pairs >> ((lane & 1) * 4) & 15
    numbers = triton.load(levels.at[found]) * scales[rows][:, None]
    return numbers.astype(dtype)


def write_tile(codec: Plain, refs: Sequence[Any], first: jax.Array, arrays: Sequence[Any]) -> None:
    """Writes the arrays of `encode_tile`; see `read_tile`."""
    pl, _ = pallas()
    for ref, x in zip(refs, arrays, strict=True):
        at = pl.ds(first, x.shape[0])
        if x.ndim == 1:
            ref[at] = x
            continue
        if isinstance(codec, Blockwise) and codec.bits == 4:
            _, lane = iotas(x.shape)
            halves = (x & 15) << ((lane & 1) * 4)
            x = jnp.sum(halves.reshape(x.shape[0], -1, 2), axis=2)
        ref[at, :] = x.astype(ref.dtype)


def iotas(shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """The row and the column of each number of a tile."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row, lane


def encode_tile(codec: Plain, x: jax.Array, bits: jax.Array | None) -> tuple[jax.Array, ...]:
    """The tile of each array at rest that encodes numbers of shape (blocks, 128).

    Codes of 4 bits are not packed.

    Args:
        codec: The codec.
        x: The numbers.
        bits: Random uint32 of the same shape, or None to round to nearest.
    """
    if isinstance(codec, Blockwise):
        return _coded(codec, x.astype(jnp.float32), bits if codec.stochastic else None)
    if isinstance(codec, Rounded) and codec.stochastic and bits is not None:
        return (round_stochastically(x, bits),)
    (part,) = codec.parts(x.dtype.name)
    return (x.astype(part.dtype),)


def _coded(codec: Blockwise, x: jax.Array, bits: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Codes as int32, and scales; see `Blockwise.encode`, which has the reasons."""
    sizes = jax.lax.bitcast_convert_type(x, jnp.int32) & np.int32(0x7FFFFFFF)
    largest = jnp.max(sizes, axis=1)
    usual = (largest >= _SMALLEST) & (largest < _INFINITY)
    scales = jnp.where(usual, jax.lax.bitcast_convert_type(largest, jnp.float32), 0)
    shift = jnp.where(scales > 1, np.float32(2.0**-4), np.float32(1))
    # One division per block. Numbers of an unusual block become zeros.
    inverse = jnp.where(usual, 1 / jnp.where(usual, scales * shift, 1), 0)
    shares = jax.lax.bitcast_convert_type(sizes, jnp.float32) * shift[:, None] * inverse[:, None]
    place, excess = _place(codec, shares)
    if bits is None:
        part = np.float32(0.5)
    else:
        # A number from 1 to 2 by its bits; the same odd multiples of 2^-16 as in `encode`.
        part = jnp.uint32(0x3F800080) | bits >> 9 & 0x7FFF00
        part = jax.lax.bitcast_convert_type(part, jnp.float32)
        excess += 1
    # Places are larger than -1, so that this rounds down or to zero.
    codes = (place + (part - np.float32(excess))).astype(jnp.int32)
    if codec.code == "dynamic":
        codes = jnp.maximum(codes, jnp.minimum(sizes >> 23, 1))  # zero if subnormal
    codes = jnp.where(x < 0, -codes if codec.signed else 0, codes)
    # A block with an infinity has codes of zero with `encode`, and so decodes to NaN. Here it has a
    # scale of NaN.
    scales = jnp.where(largest < _INFINITY, scales, np.float32(np.nan))
    return codes, scales


def _place(codec: Blockwise, x: jax.Array) -> tuple[jax.Array, int]:
    """The fractional level number of values from 0 to 1, plus an integer; and that integer.

    Below the first level of a dynamic code, the number lies between -1 and 1.

    A dynamic code has half as many levels in each decade as in the one above. So a number x in the
    decade that ends at 10^-k has the place of 10^k x in the decade that ends at 1, plus 1, divided
    by 2^k, minus 1.
    """
    bits = codec.bits - codec.signed
    if codec.code == "linear":
        return x * np.float32(2**bits - 1), 0
    divisor = jnp.ones_like(x)
    for k in (4, 2, 1) if bits > 4 else (2, 1):
        below = x <= np.float32(10.0**-k)
        x = jnp.where(below, x * np.float32(10.0**k), x)
        divisor = jnp.where(below, divisor * np.float32(2.0**-k), divisor)
    # Computed from the upper end, so that the value there gets exactly a whole number.
    line = np.float32(2**bits) - (1 - x) * np.float32(2 ** (bits - 1) / 0.9)
    return line * divisor, 1
