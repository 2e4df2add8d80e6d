"""Blockwise codes: numbers in 8 or 4 bits, with one scale per block of 128.

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
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from megatrain_jax._src.engine.state.codec import Array, Draws, Part, Plain, numpy_of
from megatrain_jax._src.engine.state.draws import random_bits

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

    @property
    def draws(self) -> bool:
        """Whether encoding draws random bits."""
        return self.stochastic

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
        xp, levels = numpy_of(codes), self.levels()
        places = self._unpacked(codes).astype(np.int32) + (len(levels) // 2 if self.signed else 0)
        # Every code has a level, so that no index is out of bounds.
        if xp is np:
            values = levels[places]
        else:
            values = jnp.asarray(levels).at[places].get(mode="promise_in_bounds")
        # If a leaf is read alone, its last block may be cut off.
        missing = -values.size % self.block
        rows = xp.pad(values, (0, missing))
        rows = rows.reshape(-1, self.block) * scales[:, None]
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
