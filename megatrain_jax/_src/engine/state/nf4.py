"""NF4: matrices in 4 bits, for a frozen base below adapters (QLoRA, arXiv 2305.14314).

The 16 levels are quantiles of a normal distribution. Each block of 64 numbers has a scale, its
largest absolute value. The scales are stored in 8 bits: the mean of a matrix's scales is
subtracted, and each block of 256 differences has a scale in fp32. A number takes 4.13 bits.

Codes and numbers are the ones of `bitsandbytes.functional.quantize_4bit(..., quant_type="nf4",
compress_statistics=True)`, with two exceptions. The mean of the scales is summed up in another
order and may differ in its last bit. A few scales lie almost halfway between two levels:
bitsandbytes' CPU kernel rounds them to the farther level.

Example: a matrix of (128, 256) numbers has 512 blocks and 2 blocks of scales::

    codes          uint8[16384]    two codes per byte, the first in the upper half
    scales         uint8[512]
    scale_scales   float32[2]
    scale_means    float32[2]      the same mean twice
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from megatrain_jax._src.engine.state.codec import Array, Draws, Part, Plain, numpy_of

_BLOCK, _SCALES = 64, 256
# The table in bitsandbytes; the last digits differ from the paper's.
_LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
# The smallest divisor: a block of zeros has the scale 0. Processors flush smaller numbers to zero.
_SMALLEST = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nf4(Plain):
    """Numbers as the 16 levels of NF4, with scales in 8 bits.

    If a matrix has an infinity or a NaN, none of its numbers stays finite.

    Attributes:
        block: Count of numbers that share a scale of scales; a leaf begins at a multiple of it.
        by_leaf: A matrix's scales have one mean, so a leaf is encoded as a whole.
    """

    block: ClassVar[int] = _BLOCK * _SCALES
    by_leaf: ClassVar[bool] = True

    def parts(self, dtype: str) -> tuple[Part, ...]:
        """Codes, their scales, and scales and means of the scales."""
        return (
            Part(name="codes", dtype="uint8", per=2),
            Part(name="scales", dtype="uint8", per=_BLOCK),
            Part(name="scale_scales", dtype="float32", per=self.block),
            Part(name="scale_means", dtype="float32", per=self.block),
        )

    def read_dtype(self, dtype: str) -> str:
        """float32, the dtype of levels times scales."""
        return "float32"

    @property
    def coding(self) -> dict[str, Any]:
        """The code as JSON, for checkpoints."""
        return {"code": "nf4", "bits": 4, "signed": True, "block": _BLOCK}

    def encode(self, x: Array, draws: Draws | None) -> tuple[Array, ...]:
        """Codes and scales of one matrix; see `encode_leaf`."""
        return self.encode_leaf(x)

    def encode_leaf(self, x: Array) -> tuple[Array, ...]:
        """Codes and scales of one matrix, of shape (n,), padded with zeros to whole blocks."""
        xp, blocks = numpy_of(x), -(-x.size // _BLOCK)
        flat = xp.pad(x.astype(np.float32), (0, -x.size % self.block))
        rows = flat.reshape(-1, _BLOCK)
        # As integers, whose maximum can't drop a NaN.
        magnitudes = rows.view(np.int32) & np.int32(0x7FFFFFFF)
        scales = xp.max(magnitudes, axis=1).view(np.float32)
        inverse = np.float32(1) / xp.maximum(scales, _SMALLEST)
        scaled = xp.clip(rows * inverse[:, None], -1, 1)
        codes = xp.zeros(rows.shape, np.uint8)
        for border in _borders(_LEVELS):
            codes += scaled > border
        pairs = codes.reshape(-1, 2)
        mean = _product(_sum(scales[:blocks]), np.float32(1 / max(blocks, 1)))
        # Blocks behind the matrix's end don't count.
        behind = np.arange(scales.size) >= blocks
        off = xp.where(behind, np.float32(0), scales - mean).reshape(-1, _SCALES)
        largest = xp.max(xp.abs(off), axis=1)
        places = off / xp.maximum(largest, _SMALLEST)[:, None]
        coarse = xp.searchsorted(_borders(_dynamic()), places.reshape(-1)).astype(np.uint8)
        means = xp.broadcast_to(mean, largest.shape)
        return (pairs[:, 0] << 4 | pairs[:, 1]).astype(np.uint8), coarse, largest, means

    def decode(self, arrays: Sequence[Array], dtype: DTypeLike) -> Array:
        """The numbers that codes and scales encode; see `Plain.decode`."""
        codes, coarse, largest, means = arrays
        xp = numpy_of(codes)
        # If a leaf is read alone, its last blocks may be cut off.
        rows = _in_rows(_table(_dynamic(), coarse), _SCALES)
        scales = (_product(rows, largest[:, None]) + means[:, None]).reshape(-1)
        halves = xp.stack([codes >> 4, codes & 15], axis=1).reshape(-1)
        values = _in_rows(_table(_LEVELS, halves), _BLOCK)
        numbers = values * scales[: values.shape[0], None]
        return numbers.reshape(-1)[: halves.size].astype(dtype)


def _product(x: Array, y: Array) -> Array:
    """A product that is rounded before it is used.

    Compilers fuse products with sums, which NumPy and bitsandbytes don't. A choice between two
    values stops them; barriers and `reduce_precision` don't.
    """
    xp = numpy_of(x)
    return xp.where(x == 0, np.float32(0), x * y)


def _table(levels: np.ndarray, places: Array) -> Array:
    if not isinstance(places, jax.Array):
        return levels[places]
    # Every code has a level, so that no index is out of bounds.
    return jnp.asarray(levels).at[places.astype(np.int32)].get(mode="promise_in_bounds")


def _in_rows(x: Array, width: int) -> Array:
    return numpy_of(x).pad(x, (0, -x.size % width)).reshape(-1, width)


def _sum(x: Array) -> Array:
    """The sum of fp32 numbers, added in one order by NumPy and XLA, over any number of devices."""
    xp = numpy_of(x)
    while x.size > 1:
        x = xp.pad(x, (0, x.size % 2))
        x = x[0::2] + x[1::2]
    return x[0] if x.size else np.float32(0)


@functools.cache
def _dynamic() -> np.ndarray:
    """The 256 levels of scales: bitsandbytes' `create_dynamic_map()`, ascending."""
    values = [0.0, 1.0]
    for i in range(7):
        scaled = np.float32(10.0 ** (i - 6)) * _borders(_linspace(2**i + 1))
        values += [*scaled.tolist(), *(-scaled).tolist()]
    levels = np.sort(np.array(values, np.float32))
    levels.flags.writeable = False
    return levels


def _linspace(count: int) -> np.ndarray:
    """Numbers from 0.1 to 1 at equal distances, with the bits of `torch.linspace`."""
    first, number = np.float32(0.1), np.arange(count)
    step = np.float64((np.float32(1) - first) / np.float32(count - 1))
    up, down = np.float64(first) + step * number, 1 - step * (count - 1 - number)
    return np.where(number < count // 2, up, down).astype(np.float32)


def _borders(levels: np.ndarray) -> np.ndarray:
    """The numbers halfway between two levels; a number on a border belongs to the lower one."""
    return (levels[:-1] + levels[1:]) / np.float32(2)
