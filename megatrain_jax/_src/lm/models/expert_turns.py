"""Turns over blocks of rows that belong to one expert each: a loop's arrays, and its sums.

A turn computes several blocks with copies of their experts' weights, and adds their gradients to
the sums of their experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from megatrain_jax._src.lm.models.expert_functions import (
    Expert,
    LowRank,
    Matrix,
    Weights,
    with_low_rank,
)


class BlockAssignments(NamedTuple):
    """The places of tokens' assignments to experts, in blocks.

    Attributes:
        slots: The row of each assignment.
        assignments: The assignment of each row; a number past the end if it has none.
        experts: The expert of each block of rows, ascending.
    """

    slots: Int[Array, " assignments"]
    assignments: Int[Array, " rows"]
    experts: Int[Array, "turns blocks"]

    def blocks(self, values: Float[Array, "..."], each: int) -> Float[Array, "turns blocks ..."]:
        """Gives each row of the blocks its token's value; a token has `each` assignments.

        Rows without an assignment get zeros.
        """
        rows = values.at[self.assignments // each].get(mode="fill", fill_value=0)
        return rows.reshape(*self.experts.shape, -1, *values.shape[1:])

    def collected(self, blocks: Float[Array, "turns blocks ..."], each: int) -> Float[Array, "..."]:
        """Gives each token the values of its `each` assignments."""
        rows = blocks.reshape(-1, *blocks.shape[3:])
        return rows[self.slots].reshape(-1, each, *rows.shape[1:])


def vmapped_expert(expert: Expert) -> Callable[..., Float[Array, "blocks rows width"]]:
    """Returns the function of blocks of rows, each with its own matrices."""
    return jax.vmap(lambda rows, weights: expert(rows, weights, _product).by(_product))


def _product(
    x: Float[Array, "rows in"], matrix: Matrix, bias: Array | None = None, *, out_first: bool = True
) -> Float[Array, "rows out"]:
    if isinstance(matrix, LowRank):
        return with_low_rank(x, matrix, _product)
    y = x @ (matrix.T if out_first else matrix)
    return y if bias is None else y + bias


def weights_of(weights: Weights, numbers: Int[Array, " blocks"]) -> Weights:
    """Copies the weights of each block's expert."""

    def one(array):
        # A model's parameters may be NumPy arrays outside a run.
        return jnp.asarray(array).at[numbers].get(mode="promise_in_bounds")

    return jax.tree.map(one, weights)


def add_by_expert(
    numbers: Int[Array, " blocks"], sums: Float[Array, "num ..."], terms: Float[Array, "blocks ..."]
) -> Float[Array, "num ..."]:
    """Adds each block's term to its expert's sum, in a deterministic order.

    A scatter of terms with equal numbers would add them in any order on a GPU. So an expert's terms
    are first summed by a product with zeros and ones, in the place of the first of them. For
    numbers [3, 3, 4] the rows of zeros and ones are [1, 1, 0], [0, 0, 0] and [0, 0, 1]. A term that
    is not finite turns all sums of its turn into NaN. Numbers out of bounds are not added.
    """
    place, first = jnp.arange(numbers.size), jnp.searchsorted(numbers, numbers)
    of_first = (first == place[:, None]).astype(terms.dtype)
    totals = jax.lax.dot_general(
        of_first,
        terms,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=sums.dtype,
    )
    # All later places point past the last expert, so nothing is added there.
    num = sums.shape[0]
    at = jnp.where((first == place) & (0 <= numbers) & (numbers < num), numbers, num + place)
    return sums.at[at].add(totals, mode="drop", unique_indices=True)
