"""Experts of a decoder's layers: settings, routing, load balancing, and their functions.

A gated MLP as an expert is a function of rows, weights, and a way to multiply rows by matrices. The
same function computes one expert's rows with its own matrices, or the rows of all experts, sorted
by expert, with all matrices. Only the products differ, so they are an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from megatrain_jax._src.common import checks

Tokens = Float[Array, "tokens width"]
Chosen = Int[Array, "tokens per_token"]
Shares = Float[Array, "tokens per_token"]
Scores = Float[Array, "tokens num"]
Routed = tuple[Chosen, Shares, Scores]
"""The experts chosen for each token; their shares in fp32; all probabilities in fp32."""
Tally = Float[Array, "3 num"]
"""A layer's load; see `tally`."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a decoder.

    Attributes:
        num: Number of experts of a layer.
        per_token: Number of experts that a token passes through.
        intermediate_size: The width inside an expert.
        normalize: Whether the chosen experts' probabilities are divided by their sum.
        layers: Numbers of the layers with experts, ascending from 0; all remaining layers have an
            MLP.
        shared_size: The width inside one more expert that all tokens pass through, or None.
        balance_weight: Factor of the balancing loss in a loss; not applied here.
    """

    num: int
    per_token: int
    intermediate_size: int
    normalize: bool
    layers: tuple[int, ...]
    shared_size: int | None = None
    balance_weight: float = 0.0

    def __post_init__(self):
        """Checks each field, and that a token has enough experts to pass through."""
        checks.numbers(self, Experts)
        checks.ascending("layers", self.layers)
        if not 1 <= self.per_token <= self.num:
            raise ValueError(
                f"`per_token` of Experts must be from 1 to `num`, {self.num}, "
                f"but is {self.per_token}"
            )


def route(logits: Scores, experts: Experts) -> Routed:
    """Chooses the experts of each token.

    Args:
        logits: Logits of the router.
        experts: The layer's experts: how many are chosen, and whether shares are normalised.

    Returns:
        The chosen experts; their shares in fp32; and all probabilities in fp32.
    """
    # In fp32 for any model dtype, as in Transformers.
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    shares, chosen = jax.lax.top_k(probabilities, experts.per_token)
    if experts.normalize:
        shares = shares / shares.sum(-1, keepdims=True)
    return chosen, shares, probabilities


def route_biased(
    scores: Scores, bias: Float[Array, " num"], experts: Experts, *, least: float = 0.0
) -> tuple[Chosen, Shares]:
    """Chooses the experts of each token by scores and a bias; their shares are scores alone.

    Args:
        scores: Positive scores in fp32.
        bias: A number for each expert, to balance loads.
        experts: The layer's experts: how many are chosen, and whether shares are normalised.
        least: Lower bound of the sum by which shares are divided.

    Returns:
        The chosen experts, and their shares.
    """
    _, chosen = jax.lax.top_k(scores + bias.astype(jnp.float32), experts.per_token)
    shares = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.normalize:
        shares = shares / jnp.maximum(shares.sum(-1, keepdims=True), least)
    return chosen, shares


def tally(chosen: Chosen, probabilities: Scores, counted: Bool[Array, " tokens"] | None) -> Tally:
    """Returns one layer's expert load, to be summed over layers for `balancing_loss`.

    Args:
        chosen: From `route`.
        probabilities: From `route`.
        counted: Whether each token counts; None for all.

    Returns:
        In fp32: each expert's number of tokens, its summed probabilities, and the token count.
    """
    num = probabilities.shape[-1]
    one = jnp.ones(chosen.shape[0], jnp.float32) if counted is None else counted.astype(jnp.float32)
    hits = jax.nn.one_hot(chosen, num, dtype=jnp.float32).sum(1)
    return jnp.stack([one @ hits, one @ probabilities, jnp.broadcast_to(one.sum(), (num,))])


def balancing_loss(tallies: Tally) -> Float[Array, ""]:
    """Returns the load-balancing loss of summed tallies, in fp32.

    Equations 4 to 6 of Switch Transformer (https://arxiv.org/abs/2101.03961), over all layers'
    tokens together as in Transformers. An even load gives `per_token`.
    """
    hits, probabilities, tokens = tallies
    tokens = jnp.maximum(tokens, 1.0)
    return hits.shape[0] * jnp.sum(hits / tokens * (probabilities / tokens))


class LowRank(NamedTuple):
    """Matrices with low-rank terms: `weight + b @ a`, which is never formed.

    Attributes:
        weight: The matrix of each expert, or of one.
        a: The factor applied first.
        b: The factor applied second.
    """

    weight: Float[Array, "*num out in"]
    a: Float[Array, "*num rank in"]
    b: Float[Array, "*num out rank"]


Matrix = Float[Array, "*num out in"] | LowRank
Weights = Any
"""The weights of all experts of a layer, or of one: arrays or matrices in a tuple."""


class Product(Protocol):
    """Multiplies rows by an expert's matrix, or by the matrix of each row's expert."""

    def __call__(
        self, x: Array, matrix: Matrix, bias: Array | None = None, *, out_first: bool = True
    ) -> Array:
        """Returns the product plus the bias; `out_first` says that matrices are (out, in)."""
        ...


class LastProduct(NamedTuple):
    """The operands of an expert's last product; see `Product`.

    Experts return them in place of the result, because rows are scaled by tokens' shares: the
    gradient of a share can then be taken before the product, and needs no result.
    """

    x: Array
    matrix: Matrix
    bias: Array | None = None
    out_first: bool = True

    def by(self, product: Product) -> Array:
        """Computes the product."""
        return product(self.x, self.matrix, self.bias, out_first=self.out_first)


Expert = Callable[[Float[Array, "rows width"], Weights, Product], LastProduct]
"""Experts: maps rows to their last product, given weights and the product before it."""


def with_low_rank(x: Array, matrix: LowRank, product: Product) -> Array:
    """Returns the product of rows and a matrix with low-rank terms."""
    return product(x, matrix.weight) + product(product(x, matrix.a), matrix.b)


@cache
def gated(activation: Callable[[Array], Array]) -> Expert:
    """Returns a gated MLP with this activation of the gate; its weights are gate, up and down."""

    def expert(x, matrices, product):
        gate, up, down = matrices
        return LastProduct(activation(product(x, gate)) * product(x, up), down)

    return expert


@cache
def plain(activation: Callable[[Array], Array]) -> Expert:
    """Returns two products with this activation between them; the second weight is down."""

    def expert(x, matrices, product):
        up, down = matrices
        return LastProduct(activation(product(x, up)), down)

    return expert


@cache
def gated_fused(activation: Callable[[Array], Array], *, out_first: bool = True) -> Expert:
    """Returns a gated MLP with gate and up matrices joined in one; the second weight is down."""

    def expert(x, matrices, product):
        both, down = matrices
        gate, up = jnp.split(product(x, both, out_first=out_first), 2, axis=-1)
        return LastProduct(activation(gate) * up, down, out_first=out_first)

    return expert
