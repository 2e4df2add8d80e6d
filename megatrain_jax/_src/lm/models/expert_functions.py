"""Gated MLPs as experts: functions of rows, weights, and a way to multiply rows by matrices.

The same function computes one expert's rows with its own matrices, or the rows of all experts,
sorted by expert, with all matrices. Only the products differ, so they are an argument.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models.activation_functions import Activation


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
def gated(activation: Activation) -> Expert:
    """Returns a gated MLP with this activation of the gate; its weights are gate, up and down."""

    def expert(x, matrices, product):
        gate, up, down = matrices
        return LastProduct(activation(product(x, gate)) * product(x, up), down)

    return expert


@cache
def gated_fused(activation: Activation, *, out_first: bool = True) -> Expert:
    """Returns a gated MLP with gate and up matrices joined in one; the second weight is down."""

    def expert(x, matrices, product):
        both, down = matrices
        gate, up = jnp.split(product(x, both, out_first=out_first), 2, axis=-1)
        return LastProduct(activation(gate) * up, down, out_first=out_first)

    return expert
