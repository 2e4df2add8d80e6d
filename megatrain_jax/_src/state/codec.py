"""Codecs: encode a slab's numbers into the arrays that hold them at rest, and decode these.

Kernels compute on what a codec decodes and give what it encodes; all else only stores and sends
the arrays. `Plain` is the numbers themselves, `Rounded` a narrower dtype.

A worked example, 1 + 2^-9 held in bfloat16, whose neighbours there are 1 and 1 + 2^-7::

    nearest       1 always: many small updates of a parameter are all lost
    stochastic    1 + 2^-7 in one of four updates, else 1: right in the mean
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from megatrain_jax._src.state.draws import Draw, random_bits

Array = Any
"""An array of numpy's or JAX's, traced or not."""

Draws = tuple[Draw, Array]
"""A draw, and the number of each element that bits are drawn for: uint32 of shape (n,)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One of the arrays that stand for the numbers of a leaf.

    Attributes:
        name: Name of the array below the leaf's, as checkpoints have it; "" if it is the only one.
        dtype: Name of its dtype.
        per: The count of numbers that each of its elements stands for.
    """

    name: str
    dtype: str
    per: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """Numbers that are held as they are computed on.

    Attributes:
        block: The count of numbers that are coded together; a leaf begins at a multiple of it.
    """

    block: ClassVar[int] = 1

    @property
    def draws(self) -> bool:
        """Whether encoding draws random bits."""
        return False

    def parts(self, dtype: str) -> tuple[Part, ...]:
        """The arrays at rest of numbers of this dtype."""
        return (Part(name="", dtype=dtype),)

    def read_dtype(self, dtype: str) -> str:
        """The dtype in which numbers, computed on in `dtype`, are read without loss."""
        return dtype

    def encode(self, x: Array, draws: Draws | None) -> tuple[Array, ...]:
        """The arrays at rest of numbers of shape (n,); `n` is a multiple of `block`."""
        return (x,)

    def decode(self, arrays: Sequence[Array], dtype: DTypeLike) -> Array:
        """The numbers that arrays at rest stand for, in this dtype."""
        return _cast(arrays[0], dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounded(Plain):
    """Numbers rounded to a narrower dtype.

    Attributes:
        dtype: Name of that dtype.
        stochastic: Whether to round up or down at random, so that the mean is right; only for
            fp32 held in bfloat16. Without a draw, as for initial values, to nearest all the same.
    """

    dtype: str
    stochastic: bool = False

    def __post_init__(self):
        assert not self.stochastic or self.dtype == "bfloat16"

    @property
    def draws(self) -> bool:
        """Whether encoding draws random bits."""
        return self.stochastic

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

    The upper 16 bits of an fp32 number are a bfloat16 number, the lower ones how far it is on the
    way to the next. Adding 16 random bits carries in as many cases as that is far. Numbers that
    bfloat16 has exactly stay, zeros, infinities and NaN among them. Finite numbers beyond the
    largest one of bfloat16, 3.39e38, become that one.

    Args:
        x: fp32 of shape (n,).
        bits: Uniform 32-bit integers of shape (n,), of which the upper half is used.

    Returns:
        bfloat16 of shape (n,).
    """
    # As integers, since fp32's sum with its random part would be rounded itself.
    given = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = ((given + (bits >> 16)) >> 16).astype(jnp.uint16)
    # The number below an infinity's bits is the largest finite one's.
    upper -= ((upper & 0x7FFF) == 0x7F80).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    # A NaN whose bits are in the lower half would become an infinity, one of all bits a zero.
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _cast(x: Array, dtype: DTypeLike) -> Array:
    return x if x.dtype == dtype else x.astype(dtype)
