"""`Past`: the tokens before the new ones; layers get it in place of `segments` in generation.

All code that mixes tokens reads `segments`, or else packed documents would leak into each other. So
this is also the place where generation adds its caches: `attention`, `gated_delta_rule`,
`short_convolution` and `positions_in` call the method of the same purpose here, and layers stay as
they are. Any use of a `Past` that has no method for it is refused.
"""

from typing import Any, NamedTuple, Never

import jax
from jaxtyping import Array, Float, Int


class LatentHeads(NamedTuple):
    """What latent attention reads: heads of queries and keys without and with a rotated part.

    Attributes:
        q: The part of the queries that isn't rotated.
        q_rotated: The rotated part of the queries.
        latent: What the other part of the keys, and the values, are computed from.
        k_rotated: The rotated part of the keys, one for all heads.
    """

    q: Float[Array, "rows length heads plain_dim"]
    q_rotated: Float[Array, "rows length heads rotated_dim"]
    latent: Float[Array, "rows length latent_rank"]
    k_rotated: Float[Array, "rows length 1 rotated_dim"]


class Past:
    """The tokens before a layer's new ones, passed as `segments`; subclasses hold the cache.

    Attributes:
        kind: The name of the layer's class, for errors.
    """

    kind: str

    def positions(self, length: int) -> Int[Array, "rows length"]:
        """Returns the positions of new tokens in their texts, perhaps as one row for all."""
        self.refuse()

    def attend(
        self, q: Array, k: Array, v: Array, **options: Any
    ) -> Float[Array, "rows length heads head_dim"]:
        """Computes `attention` of new tokens to the texts so far and to themselves."""
        self.refuse()

    def attend_latent(
        self, attention: Any, given: LatentHeads, chosen: Any
    ) -> Float[Array, "rows length heads value_dim"]:
        """Computes `LatentAttention.attend` of new tokens to the texts so far."""
        self.refuse()

    def choose_keys(self, q: Array, weights: Array, k: Array, most: int) -> Any:
        """Computes `choose_keys`, for `attend_latent` of this layer or a later one."""
        self.refuse()

    def convolve(
        self, x: Float[Array, "rows length channels"], weight: Float[Array, "channels 1 taps"]
    ) -> Float[Array, "rows length channels"]:
        """Computes `short_convolution` of new tokens and the last ones before them."""
        self.refuse()

    def delta_rule(
        self, q: Array, k: Array, v: Array, log_decay: Array, rate: Array | None
    ) -> Float[Array, "rows length heads value_dim"]:
        """Computes `gated_delta_rule` of new tokens, from the state after the texts so far."""
        self.refuse()

    def refuse(self, *_: Any) -> Never:
        """Raises the error of a layer that reads `segments` in a way that has no cache.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"generate knows no cache for layers of kind {self.kind} yet")

    __jax_array__ = __getitem__ = __eq__ = __ne__ = refuse  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        """Refuses an attribute that only arrays have."""
        if name in jax.Array.__dict__ or name in ("shape", "dtype", "ndim"):
            self.refuse()
        raise AttributeError(name)
