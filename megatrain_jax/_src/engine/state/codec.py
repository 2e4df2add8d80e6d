"""Codecs: encode a slab's numbers into the arrays that store them, and decode these arrays.

Kernels decode their inputs and encode their outputs; the rest of the program only stores and sends
the arrays. `Plain` stores the numbers themselves, `Rounded` stores a narrower dtype.

Example: 1 + 2^-9 stored in bfloat16, where its two neighbours are 1 and 1 + 2^-7::

    nearest       always 1: many small updates of a parameter are all lost
    stochastic    1 + 2^-7 in one of four updates, else 1: the mean is right

`Blockwise` stores numbers in 8 or 4 bits, with one scale per block of 128.

A block's scale is its largest absolute value, so that scaled numbers lie between -1 and 1. The
*dynamic* code (Dettmers et al., arXiv 2110.02861) has half of its levels above 0.1, half of the
rest above 0.01 and so on: large numbers are precise to a percent, and small numbers are not lost.
The *linear* code has levels at equal distances, for numbers that are summed up in matrix products.

Example: the 4-bit dynamic code without signs has 16 levels::

    0   .001   .0055 .01   .0325 .055 .0775 .1   .2125 .325 .4375 .55 .6625 .775 .8875 1

A block with the numbers 8, 0.8, 0.3 and 0 has the scale 8. The scaled numbers are 1, 0.1, 0.0375
and 0; their codes are 15, 7, 4 and 0, and decode to 8, 0.8, 0.26 and 0. With random rounding, 0.3
gets the code 5 in one of 4.5 cases, which decodes to 0.44, so that the mean is right.

Level numbers are piecewise linear between powers of ten, so that arithmetic finds a code. In the
example the lines end at (1.0, 15), (0.1, 7), (0.01, 3), (0.001, 1) and (0, 0).

`Nf4` stores matrices in 4 bits, for a frozen base below adapters (QLoRA, arXiv 2305.14314).

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

Random bits for rounding are a hash of the element's number, keyed by run, step, group and slab.

A counter-based generator has no state to store or fetch: the same update draws the same bits under
any schedule, and after a resume. This generator takes a few integer operations per element. The
compiler fuses them into the code that uses the bits, so that no array of bits exists.

Example: the draws of an update of group 3 by the gradient of step 7::

    draw = draw_of(key, 7, 3)
    masters, state = part_of(draw, 0), part_of(draw, 1)
    part_of(state, s)       # for slab number s of the state
    part_of(masters, n)     # for segment n, if a slab has segments with several codecs
    random_bits(masters, numbers)    # one integer per element, by its number in its segment
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Draw = tuple[jax.Array, jax.Array]
"""Two 32-bit words that seed random bits."""


def draw_of(key: jax.Array, step: jax.Array, group: jax.Array) -> Draw:
    """The draw of one group's update.

    Args:
        key: The run's random key.
        step: Number of the gradient's step.
        group: Number of the group.
    """
    words = jax.random.key_data(key).reshape(-1)
    # The halves of SplitMix64's constant, 2^64 over the golden ratio. Any start value with both
    # ones and zeros would do.
    draw = jnp.uint32(0x9E3779B9), jnp.uint32(0x7F4A7C15)
    for word in (*(words[i] for i in range(words.size)), step, group):
        draw = _folded(draw, word.astype(jnp.uint32))
    return draw


def derived_draw(draw: Draw, number: int | jax.Array) -> Draw:
    """An independent draw, derived from a draw and a number."""
    return _folded(draw, jnp.uint32(number))


def random_bits(draw: Draw, numbers: jax.Array) -> jax.Array:
    """Uniform uint32 integers for elements with these numbers, in the same shape."""
    # With a single word, two draws that differ in their lower bits would have the same random bits
    # in a different order of elements.
    first, second = draw
    return _mixed(_mixed(numbers ^ first) ^ second)


def halves_of_bits(draw: Draw, numbers: jax.Array, count: int) -> list[jax.Array]:
    """Uniform uint32 integers for `count` arrays of such elements, at a third of the operations.

    Only the upper 16 bits of each integer are random, and the integers of different arrays are
    uncorrelated, but not independent.
    """
    first, second = draw
    # Different draws give different sequences, not one sequence in different orders of elements.
    word = _mixed(numbers * (first | 1) + second)
    odd = (0x9E3779B1 + 0x3C6EF372 * n for n in range(count))  # golden ratio, and twice that
    found = [word, word << 16, *(word * jnp.uint32(x & 0xFFFFFFFF | 1) for x in odd)]
    return found[:count]


def _folded(draw: Draw, word: jax.Array) -> Draw:
    first = _mixed(draw[0] ^ word)
    return first, _mixed(draw[1] + first)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit integers that mixes all bits (lowbias32, C. Wellons)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


Array = Any
"""A NumPy or JAX array, traced or not."""

Draws = tuple[Draw, Array]
"""A draw, and the numbers of the elements to draw bits for: uint32 of shape (n,)."""


def numpy_of(x: Array) -> Any:
    """The module that computes on an array: NumPy or `jax.numpy`."""
    return jnp if isinstance(x, jax.Array) else np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One of the arrays that encode the numbers of a leaf.

    Attributes:
        name: Name of the array below the leaf's in checkpoints; "" if it is the only one.
        dtype: Name of its dtype.
        per: Count of numbers that one element of the array encodes.
    """

    name: str
    dtype: str
    per: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """Numbers stored in their compute dtype.

    Attributes:
        block: Count of numbers that are encoded together; a leaf begins at a multiple of it.
        by_leaf: Whether a leaf is encoded as a whole, because its blocks share a number.
    """

    block: ClassVar[int] = 1
    by_leaf: ClassVar[bool] = False

    @property
    def draws(self) -> bool:
        """Whether encoding draws random bits."""
        return getattr(self, "stochastic", False)

    def parts(self, dtype: str) -> tuple[Part, ...]:
        """The arrays at rest of numbers of this dtype."""
        return (Part(name="", dtype=dtype),)

    def read_dtype(self, dtype: str) -> str:
        """The narrowest dtype that holds the stored numbers exactly; `dtype` is that of slabs."""
        return dtype

    def encode(self, x: Array, draws: Draws | None) -> tuple[Array, ...]:
        """The arrays at rest of numbers of shape (n,); `n` is a multiple of `block`."""
        return (x,)

    def encode_leaf(self, x: Array) -> tuple[Array, ...]:
        """The arrays at rest of one leaf of shape (n,), in whole blocks, rounded to nearest."""
        pad = jnp.pad if isinstance(x, jax.Array) else np.pad
        return self.encode(pad(x, (0, -x.size % self.block)), None)

    def decode(self, arrays: Sequence[Array], dtype: DTypeLike) -> Array:
        """The numbers that arrays at rest encode, in this dtype."""
        return _cast(arrays[0], dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounded(Plain):
    """Numbers rounded to a narrower dtype.

    Attributes:
        dtype: Name of that dtype.
        stochastic: Whether to round up or down at random, so that the mean is right; only for fp32
            stored in bfloat16. Without a draw, as for initial values, rounds to nearest.
    """

    dtype: str
    stochastic: bool = False

    def __post_init__(self):
        assert not self.stochastic or self.dtype == "bfloat16"

    def parts(self, dtype: str) -> tuple[Part, ...]:
        """The one array of the narrower dtype."""
        return (Part(name="", dtype=self.dtype),)

    def read_dtype(self, dtype: str) -> str:
        """The narrower dtype."""
        return self.dtype

    def encode(self, x: Array, draws: Draws | None) -> tuple[Array, ...]:
        """The rounded numbers; see `Plain.encode`."""
        if self.stochastic and draws is not None:
            return (round_stochastically(x, random_bits(*draws)),)
        return (_cast(x, self.dtype),)


def round_stochastically(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds fp32 to one of its two neighbours in bfloat16, to the nearer one more often.

    The upper 16 bits of an fp32 number are a bfloat16 number, and the lower 16 bits are the
    distance to it, as a fraction of the gap to the next one. Adding 16 random bits carries with
    this fraction as its probability. Numbers that bfloat16 represents exactly don't change,
    including zeros, infinities and NaN. Finite numbers beyond bfloat16's largest, 3.39e38, become
    that number.

    Args:
        x: fp32 of shape (n,).
        bits: Uniform 32-bit integers of shape (n,); only the upper halves are used.

    Returns:
        bfloat16 of shape (n,).
    """
    # With integers, because a sum in fp32 would itself be rounded.
    given = jax.lax.bitcast_convert_type(x, jnp.uint32)
    size = given & 0x7FFFFFFF
    is_finite = size < 0x7F800000
    # The largest possible sum makes a NaN with bits in the lower half only one with bits in the
    # upper half, and leaves infinity as it is.
    size = size + jnp.where(is_finite, bits >> 16, jnp.uint32(0xFFFF))
    size = jnp.minimum(size, jnp.where(is_finite, jnp.uint32(0x7F7FFFFF), jnp.uint32(0x7FFFFFFF)))
    upper = (size | given & jnp.uint32(0x80000000)) >> 16
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)


def _cast(x: Array, dtype: DTypeLike) -> Array:
    return x if x.dtype == dtype else x.astype(dtype)


# ---- blockwise codes

Code = Literal["dynamic", "linear"]
# Some processors flush smaller (subnormal) numbers to zero.
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blockwise(Plain):
    """Numbers as codes of 8 or 4 bits, with one scale per block.

    A block's largest number is exact, zero stays zero, and encoding decoded numbers gives the same
    codes. The dynamic code never rounds a nonzero number to zero, because an optimizer may divide
    by it or its root. A block with an infinity or a NaN becomes all NaN.

    Attributes:
        block: Count of numbers that share a scale.
        code: The spacing of the levels; see the head of this file.
        bits: Bits of a code, 8 or 4.
        signed: Whether numbers may be negative; unsigned numbers get twice as many levels.
        stochastic: Whether to round up or down at random, so that the mean is right. Without a
            draw, as for initial values, rounds to nearest.
    """

    block: ClassVar[int] = 128
    code: Code
    bits: int = 8
    signed: bool = True
    stochastic: bool = False

    def parts(self, dtype: str) -> tuple[Part, ...]:
        """Codes and scales; two codes of 4 bits share a byte."""
        held = "int8" if self.signed and self.bits == 8 else "uint8"
        return (
            Part(name="codes", dtype=held, per=8 // self.bits),
            Part(name="scales", dtype="float32", per=self.block),
        )

    def read_dtype(self, dtype: str) -> str:
        """float32, the dtype of levels times scales."""
        return "float32"

    @property
    def coding(self) -> dict[str, Any]:
        """The code as JSON, for checkpoints."""
        about = {"code": self.code, "bits": self.bits, "signed": self.signed}
        return about | {"block": self.block}

    def encode(self, x: Array, draws: Draws | None) -> tuple[Array, ...]:
        """Codes and scales of numbers of shape (n,); see `Plain.encode`."""
        xp = numpy_of(x)
        rows = x.astype(np.float32).reshape(-1, self.block)
        # Bits of positive floats have the same order as the numbers, with NaN above infinity. XLA's
        # maximum of floats may drop a NaN; a maximum of integers can't.
        magnitudes = rows.view(np.int32) & np.int32(0x7FFFFFFF)
        largest = xp.max(magnitudes, axis=1, keepdims=True).view(np.float32)
        scales = xp.where(largest < _SMALLEST, xp.zeros_like(largest), largest)
        usual = (scales > 0) & (scales < np.inf)
        # A compiler may multiply by the reciprocal, which is subnormal for a large scale.
        shift = xp.where(scales > 1, np.float32(2.0**-4), np.float32(1))
        sizes = xp.where(usual, xp.abs(rows) * shift, 0) / xp.where(usual, scales * shift, 1)
        place = _place(sizes, _nodes(self.code, self._magnitude_bits))
        if self.stochastic and draws is not None:
            # Odd multiples of 2^-16. The largest, added to 255 in fp32, stays below 256. The
            # smallest lifts a place that division has rounded down, so that an unchanged number
            # keeps its code.
            part = (random_bits(*draws) >> 17 << 1 | 1).astype(np.float32) * np.float32(2.0**-16)
            place = xp.floor(place + part.reshape(rows.shape))
        else:
            place = xp.rint(place)
        # Numbers in the linear code enter products only, so nothing divides by them.
        if self.code == "dynamic":
            place = xp.maximum(place, usual & (xp.abs(rows) >= _SMALLEST))
        place = xp.where(rows < 0, -place if self.signed else 0, place)
        return self._packed(place.reshape(-1).astype(np.int32)), scales.reshape(-1)

    def decode(self, arrays: Sequence[Array], dtype: DTypeLike) -> Array:
        """The numbers that codes and scales encode; see `Plain.decode`."""
        codes, scales = arrays
        levels = self.levels()
        places = self._unpacked(codes).astype(np.int32) + (len(levels) // 2 if self.signed else 0)
        values = _table(levels, places)
        # If a leaf is read alone, its last block may be cut off.
        rows = _in_rows(values, self.block) * scales[:, None]
        return rows.reshape(-1)[: values.size].astype(dtype)

    def levels(self) -> np.ndarray:
        """The unscaled numbers that codes represent, ascending; fp32."""
        return _levels(self.code, self._magnitude_bits, self.signed)

    @property
    def _magnitude_bits(self) -> int:
        return self.bits - self.signed

    def _packed(self, places: Array) -> Array:
        """Codes as stored; of two 4-bit codes, the first is in the lower half of the byte."""
        if self.bits == 8:
            return places.astype(np.int8 if self.signed else np.uint8)
        pairs = (places & 15).reshape(-1, 2)
        return (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)

    def _unpacked(self, codes: Array) -> Array:
        if self.bits == 8:
            return codes
        xp = numpy_of(codes)
        halves = xp.stack([codes & 15, codes >> 4], axis=1).reshape(-1).astype(np.int32)
        return xp.where(halves > 7, halves - 16, halves) if self.signed else halves


@functools.cache
def _nodes(code: Code, bits: int) -> tuple[tuple[float, int], ...]:
    """Ends of a code's linear pieces as (value, level number), descending."""
    if code == "linear":
        return (1.0, 2**bits - 1), (0.0, 0)
    return *((10.0**-k, 2 ** (bits - k) - 1) for k in range(bits)), (0.0, 0)


def _place(x: Array, nodes: Sequence[tuple[float, int]]) -> Array:
    """The fractional level number of values from 0 to 1."""
    xp, found = numpy_of(x), None
    for (top, number), (bottom, below) in zip(nodes, nodes[1:], strict=False):
        slope = np.float32((number - below) / (top - bottom))
        # Computed from the upper end, so that the value there gets exactly a whole number.
        line = np.float32(number) - (np.float32(top) - x) * slope
        found = line if found is None else xp.where(x <= np.float32(top), line, found)
    return found


@functools.cache
def _levels(code: Code, bits: int, signed: bool) -> np.ndarray:
    values, numbers = zip(*reversed(_nodes(code, bits)), strict=True)
    levels = np.interp(np.arange(2**bits), numbers, values)
    if signed:
        # Two's complement has one more negative code, which encoding never produces.
        levels = np.concatenate([[-1.0], -levels[:0:-1], levels])
    levels = levels.astype(np.float32)
    levels.flags.writeable = False
    return levels


# ---- NF4

_BLOCK, _SCALES = 64, 256
# The table in bitsandbytes; the last digits differ from the paper's.
_NUMBERS = """
    -1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725
    0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
    0.7229568362236023 1
"""
_LEVELS = np.array(_NUMBERS.split(), np.float32)
# The smallest divisor: a block of zeros has the scale 0. Processors flush smaller numbers to zero.
_LEAST_DIVISOR = np.finfo(np.float32).tiny


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
        inverse = np.float32(1) / xp.maximum(scales, _LEAST_DIVISOR)
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
        places = off / xp.maximum(largest, _LEAST_DIVISOR)[:, None]
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
