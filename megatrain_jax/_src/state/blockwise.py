"""Blockwise codes: numbers in 8 or 4 bits, with one scale for each block of 128.

A scale is its block's largest absolute value, so that what is coded lies between -1 and 1. The
*dynamic* code (Dettmers et al., arXiv 2110.02861) has half of its levels above 0.1, half of the
rest above 0.01 and so on: large numbers are precise to a percent, and small ones are not lost. The
*linear* code has levels at equal distances, for numbers that act together rather than each alone,
as those of a matrix do in a product.

A worked example, the 4-bit dynamic code without signs, whose 16 levels are::

    0   .001   .0055 .01   .0325 .055 .0775 .1   .2125 .325 .4375 .55 .6625 .775 .8875 1

A block with the numbers 8, 0.8, 0.3 and 0 has the scale 8. Divided by it they are 1, 0.1, 0.0375
and 0; the codes are 15, 7, 4 and 0, and they stand for 8, 0.8, 0.26 and 0. Rounded at random, 0.3
has the code 5 in one of 4.5 cases, which stands for 0.44: right in the mean.

Levels are where straight lines through powers of ten have whole numbers, so that a code is found
by arithmetic: (1.0, 15), (0.1, 7), (0.01, 3), (0.001, 1) and (0, 0) in the example.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from megatrain_jax._src.state.codec import Array, Draws, Part, Plain
from megatrain_jax._src.state.draws import random_bits

Code = Literal["dynamic", "linear"]
# A number below the smallest normal one is zero to some processors, and not to others.
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blockwise(Plain):
    """Numbers as codes of 8 or 4 bits, with a scale for each block.

    A block's largest number is exact, zero stays zero, and decoded numbers have the same codes
    again. In the dynamic code other numbers never become zero, since an optimizer may divide by
    them or their roots. A block with an infinity or a NaN is NaN as a whole.

    Attributes:
        block: The count of numbers that share a scale.
        code: The levels' distances; see the head of this file.
        bits: Bits of a code, 8 or 4.
        signed: Whether numbers may be below zero; those that never are get twice the levels.
        stochastic: Whether to round up or down at random, so that the mean is right. Without a
            draw, as for initial values, to nearest all the same.
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
        """Codes, of which two of 4 bits share a byte, and scales."""
        held = "int8" if self.signed and self.bits == 8 else "uint8"
        return (
            Part(name="codes", dtype=held, per=8 // self.bits),
            Part(name="scales", dtype="float32", per=self.block),
        )

    def read_dtype(self, dtype: str) -> str:
        """The dtype of levels times scales."""
        return "float32"

    def encode(self, x: Array, draws: Draws | None) -> tuple[Array, ...]:
        """Codes and scales of numbers of shape (n,); see `Plain.encode`."""
        xp = _numpy_of(x)
        rows = x.astype(np.float32).reshape(-1, self.block)
        # Bits of positive numbers are ordered as the numbers are, with NaN above infinity. XLA's
        # maximum of floats may drop a NaN, which that of integers can't.
        magnitudes = rows.view(np.int32) & np.int32(0x7FFFFFFF)
        largest = xp.max(magnitudes, axis=1, keepdims=True).view(np.float32)
        scales = xp.where(largest < _SMALLEST, xp.zeros_like(largest), largest)
        usual = (scales > 0) & (scales < np.inf)
        # A compiler may divide by multiplying, and the reciprocal of a large scale is no normal
        # number.
        shift = xp.where(scales > 1, np.float32(2.0**-4), np.float32(1))
        sizes = xp.where(usual, xp.abs(rows) * shift, 0) / xp.where(usual, scales * shift, 1)
        place = _place(sizes, _nodes(self.code, self._magnitude_bits))
        if self.stochastic and draws is not None:
            # Odd multiples of 2^-16. The last one is still below 256 when it is added to 255 in
            # fp32. The first one lifts a whole place that division has rounded down, so that a
            # number that has not changed keeps its code.
            part = (random_bits(*draws) >> 17 << 1 | 1).astype(np.float32) * np.float32(2.0**-16)
            place = xp.floor(place + part.reshape(rows.shape))
        else:
            place = xp.rint(place)
        # The linear code is for numbers that a product mixes: nothing divides by one of them.
        if self.code == "dynamic":
            place = xp.maximum(place, usual & (xp.abs(rows) >= _SMALLEST))
        place = xp.where(rows < 0, -place if self.signed else 0, place)
        return self._packed(place.reshape(-1).astype(np.int32)), scales.reshape(-1)

    def decode(self, arrays: Sequence[Array], dtype: DTypeLike) -> Array:
        """The numbers that codes and scales stand for; see `Plain.decode`."""
        codes, scales = arrays
        xp, levels = _numpy_of(codes), self.levels()
        places = self._unpacked(codes).astype(np.int32) + (len(levels) // 2 if self.signed else 0)
        # Every code that its bits can hold has a level, so that nothing is out of bounds.
        if xp is np:
            values = levels[places]
        else:
            values = jnp.asarray(levels).at[places].get(mode="promise_in_bounds")
        # The last block of an array that is read alone may be cut off.
        missing = -values.size % self.block
        rows = xp.pad(values, (0, missing))
        rows = rows.reshape(-1, self.block) * scales[:, None]
        return rows.reshape(-1)[: values.size].astype(dtype)

    def levels(self) -> np.ndarray:
        """The numbers that codes stand for before they are scaled, ascending; fp32."""
        return _levels(self.code, self._magnitude_bits, self.signed)

    @property
    def _magnitude_bits(self) -> int:
        return self.bits - self.signed

    def _packed(self, places: Array) -> Array:
        """Codes as they are held: of 4 bits, the first of two in the lower half of their byte."""
        if self.bits == 8:
            return places.astype(np.int8 if self.signed else np.uint8)
        pairs = (places & 15).reshape(-1, 2)
        return (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)

    def _unpacked(self, codes: Array) -> Array:
        if self.bits == 8:
            return codes
        xp = _numpy_of(codes)
        halves = xp.stack([codes & 15, codes >> 4], axis=1).reshape(-1).astype(np.int32)
        return xp.where(halves > 7, halves - 16, halves) if self.signed else halves


def _numpy_of(x: Array) -> Any:
    return jnp if isinstance(x, jax.Array) else np


@functools.cache
def _nodes(code: Code, bits: int) -> tuple[tuple[float, int], ...]:
    """Ends of the lines that a code's levels are on, as values and numbers of a level, falling."""
    if code == "linear":
        return (1.0, 2**bits - 1), (0.0, 0)
    return *((10.0**-k, 2 ** (bits - k) - 1) for k in range(bits)), (0.0, 0)


def _place(x: Array, nodes: Sequence[tuple[float, int]]) -> Array:
    """The place of a value from 0 to 1 among the levels, in fractions of the way to the next."""
    xp, found = _numpy_of(x), None
    for (top, number), (bottom, below) in zip(nodes, nodes[1:], strict=False):
        slope = np.float32((number - below) / (top - bottom))
        # Seen from the upper end, so that a value there has a whole number for its place exactly.
        line = np.float32(number) - (np.float32(top) - x) * slope
        found = line if found is None else xp.where(x <= np.float32(top), line, found)
    return found


@functools.cache
def _levels(code: Code, bits: int, signed: bool) -> np.ndarray:
    values, numbers = zip(*reversed(_nodes(code, bits)), strict=True)
    levels = np.interp(np.arange(2**bits), numbers, values)
    if signed:
        # Two's complement has one code more on the lower side, as which nothing is encoded.
        levels = np.concatenate([[-1.0], -levels[:0:-1], levels])
    levels = levels.astype(np.float32)
    levels.flags.writeable = False
    return levels
