"""A mixture of experts by grouped products: rows sorted by expert once, no blocks, no loop.

Every product has all rows, and each expert's matrix is read where it lies. A tile of the kernels
has 128 rows of one expert, so an expert's last tile may be partly empty; tiles of 64 rows were
slower even for 160 rows. Blocks of 64 rows are added to the gradients of matrices. The operations
of all products in forward and backward, as a multiple of the operations that the rows need::

    rows per expert    160      320      512     640      1,024    2,048
    computed           1.54     1.20     1.13    1.10     1.07     1.03
    with 512 experts, 10 for each token (Qwen3-Next):
    tokens             8,192    16,384           32,768
    with 128 experts, 8 for each token (Qwen3-30B-A3B):
    tokens                               8,192            16,384   32,768
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from megatrain_jax._src.common.kernel_primitives import float0_cotangents
from megatrain_jax._src.lm.models import grouped_products
from megatrain_jax._src.lm.models.expert_functions import Expert, Weights
from megatrain_jax._src.lm.models.grouped_products import product_within

# Above this share of operations, padded sizes cost more than the loop's partly empty blocks.
_MOST_PADDING = 1.15


def fits(x: Array | jax.ShapeDtypeStruct, num_rows: int, weights: Weights) -> bool:
    """Whether the kernels support these tokens and weights, with little padding.

    Args:
        x: The tokens, (tokens, width).
        num_rows: Number of tokens times the experts of each.
        weights: The weights of all experts.
    """
    arrays = jax.tree.leaves(weights)
    if x.dtype not in grouped_products.DTYPES or any(a.dtype != x.dtype for a in arrays):
        return False
    if num_rows < grouped_products.LEAST_ROWS or len(arrays[0]) > grouped_products.MOST_GROUPS:
        return False
    matrices = [a.shape for a in arrays if a.ndim == 3]
    return grouped_products.padded_share(matrices) <= _MOST_PADDING


class _Rows(NamedTuple):
    """The places of tokens' assignments to experts, sorted by expert.

    Attributes:
        assignments: The assignment of each row; a number past the end for rows of padding.
        places: The row of each assignment.
        sizes: Number of rows of each expert; the last expert has the padding.
    """

    assignments: Int[Array, " rows"]
    places: Int[Array, " assignments"]
    sizes: Int[Array, " num"]

    def given(self, values: Float[Array, "..."], each: int) -> Float[Array, "rows ..."]:
        """Gives each row its token's value; a token has `each` assignments."""
        return values.at[self.assignments // each].get(mode="fill", fill_value=0)

    def summed(
        self,
        rows: Float[Array, "rows width"],
        shares: Float[Array, "tokens each"] | None,
        each: int,
    ) -> Float[Array, "tokens width"]:
        """Adds the rows of each token's `each` assignments in fp32, multiplied by shares if given.

        One assignment at a time, because XLA would write all gathered rows in fp32 before it
        adds them.
        """
        places = self.places.reshape(-1, each)
        total = jnp.zeros((), jnp.float32)
        for at in range(each):
            row = rows[places[:, at]].astype(jnp.float32)
            total = total + (row if shares is None else row * shares[:, at, None])
        return total


def sort(chosen: Int[Array, "tokens per_token"], num: int) -> _Rows:
    """Sorts the assignments of tokens to `num` experts."""
    owner = chosen.reshape(-1)
    size = owner.size
    # Stable, so that results don't depend on how a device sorts equal numbers.
    order = jnp.argsort(owner, stable=True).astype(jnp.int32)
    places = (
        jnp.zeros(size, jnp.int32)
        .at[order]
        .set(jnp.arange(size, dtype=jnp.int32), unique_indices=True)
    )
    sizes = jnp.sum(owner[:, None] == jnp.arange(num), axis=0, dtype=jnp.int32)
    padding = -size % grouped_products.ROW_MULTIPLE
    order = jnp.pad(order, (0, padding), constant_values=size)
    return _Rows(order, places, sizes.at[-1].add(padding))


# JAX's own derivative would keep all rows between the products, and scatter gradients of tokens.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mixed(
    expert: Expert,
    x: Float[Array, "tokens width"],
    shares: Float[Array, "tokens per_token"],
    weights: Weights,
    rows: _Rows,
) -> Float[Array, "tokens width"]:
    """Passes tokens through their experts and adds the results, weighted by shares."""
    each = shares.shape[1]
    product = product_within(rows.sizes)
    out = expert(rows.given(x, each), weights, product).by(product)
    return rows.summed(out, shares, each).astype(x.dtype)


def _forward(expert, x, shares, weights, rows):
    return mixed(expert, x, shares, weights, rows), (x, shares, weights, rows)


def _backward(expert, saved, cotangents):
    x, shares, weights, rows = saved
    each = shares.shape[1]

    def experts(given, weights, shares):
        last = expert(given, weights, product_within(rows.sizes))
        return last.by(product_within(rows.sizes, shares))

    by_row = rows.given(shares.reshape(-1).astype(jnp.float32), 1)
    _, transposed = jax.vjp(experts, rows.given(x, each), weights, by_row)
    drows, dweights, dby_row = transposed(rows.given(cotangents, each))
    dx = rows.summed(drows, None, each).astype(x.dtype)
    dshares = dby_row[rows.places].reshape(shares.shape).astype(shares.dtype)
    return dx, dshares, dweights, float0_cotangents(rows)


mixed.defvjp(_forward, _backward)
