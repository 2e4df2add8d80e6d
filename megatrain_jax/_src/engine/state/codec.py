"""Codecs: encode a slab's numbers into the arrays that store them, and decode these arrays.

Kernels decode their inputs and encode their outputs; the rest of the program only stores and sends
the arrays. `Plain` stores the numbers themselves, `Rounded` stores a narrower dtype.

Example: 1 + 2^-9 stored in bfloat16, where its two neighbours are 1 and 1 + 2^-7::

    nearest       always 1: many small updates of a parameter are all lost
    stochastic    1 + 2^-7 in one of four updates, else 1: the mean is right
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from megatrain_jax._src.engine.state.draws import Draw, random_bits

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
        return False

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
