"""Products of sorted rows with their groups' matrices, computed by kernels on a Hopper GPU.

Rows belong to groups in order: with sizes [2, 0, 3], two rows are multiplied by the first matrix
and three by the last. Two primitives are all that products and their gradients need::

    grouped_product  rows[i] @ matrices[group of row i]         (or the transposed matrix)
    grouped_outer    rows_of_group.T @ other_rows_of_group      for each group; zeros if it is empty

As primitives, each is one equation of a trace: losses can be cut, and their operations counted,
without looking into the kernels. On a GPU they are lowered to the kernels of `jla.ops`, elsewhere
to `jax.lax.ragged_dot`, and tests compare both. Sums are in fp32; results have the dtype of the
rows.

For a mixture of experts, rows are sorted by expert once: no blocks, no loop. Every product has all
rows, and each expert's matrix is read where it lies. A tile of the kernels has 128 rows of one
expert, so an expert's last tile may be partly empty; tiles of 64 rows were slower even for 160
rows. Blocks of 64 rows are added to the gradients of matrices. The operations of all products in
forward and backward, as a multiple of the operations that the rows need::

    rows per expert    160      320      512     640      1,024    2,048
    computed           1.54     1.20     1.13    1.10     1.07     1.03
    with 512 experts, 10 for each token (Qwen3-Next):
    tokens             8,192    16,384           32,768
    with 128 experts, 8 for each token (Qwen3-30B-A3B):
    tokens                               8,192            16,384   32,768
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from megatrain_jax._src.common.kernel_primitives import KernelCosts, define, float0_cotangents
from megatrain_jax._src.lm.models.moe import (
    Chosen,
    Expert,
    LowRank,
    Matrix,
    Product,
    Shares,
    Tokens,
    Weights,
    with_low_rank,
)

DTYPES = (jnp.bfloat16, jnp.float16)
# The kernels' limits. Rows and sizes are padded to multiples.
LEAST_ROWS, MOST_GROUPS = 128, 512
ROW_MULTIPLE, SIZE_MULTIPLE = 8, 128
Sizes = Int[Array, " groups"]
PerRow = Float[Array, " rows"]


def product_within(sizes: Sizes, shares: PerRow | None = None) -> Product:
    """Returns the product of sorted rows and the matrices of their groups.

    Args:
        sizes: Number of rows of each group; their sum is the number of rows.
        shares: Factors of the products' rows, in fp32; None for 1. Their gradient is computed
            without the products.
    """

    def product(x: Array, matrix: Matrix, bias: Array | None = None, *, out_first: bool = True):
        if isinstance(matrix, LowRank):
            return with_low_rank(x, matrix, product)
        into, out = (-1, -2) if out_first else (-2, -1)
        width = matrix.shape[out]
        if bias is not None:
            # One more input, 1 for every row: the gradient is a product, too.
            x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
            bias = jnp.expand_dims(bias.astype(matrix.dtype), into)
            matrix = jnp.concatenate([matrix, bias], axis=into)
        x = jnp.pad(x, ((0, 0), (0, _missing(x.shape[1]))))
        matrix = jnp.pad(matrix, [(0, 0)] + [(0, _missing(n)) for n in matrix.shape[1:]])
        y: Array = _product(x, matrix, shares, sizes, out_first)
        return y[:, :width]

    return product


def padded_share(shapes: list[tuple[int, ...]]) -> float:
    """Returns the operations on padded matrices (groups, m, n), as a multiple of the unpadded."""
    padded = sum((m + _missing(m)) * (n + _missing(n)) for _, m, n in shapes)
    return padded / sum(m * n for _, m, n in shapes)


def _missing(size: int) -> int:
    return -size % SIZE_MULTIPLE


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _product(
    x: Float[Array, "rows a"],
    matrices: Float[Array, "groups b c"],
    shares: PerRow | None,
    sizes: Sizes,
    out_first: bool,
) -> Float[Array, "rows d"]:
    y = _product_p.bind(x, matrices, sizes, out_first=out_first)
    return _scaled(y, shares)


def _scaled(rows: Array, shares: Array | None) -> Array:
    if shares is None:
        return rows
    return (rows.astype(jnp.float32) * shares[:, None]).astype(rows.dtype)


def _forward(x, matrices, shares, sizes, out_first):
    return _product(x, matrices, shares, sizes, out_first), (x, matrices, shares, sizes)


def _backward(out_first, saved, cotangent):
    x, matrices, shares, sizes = saved
    before = _product_p.bind(cotangent, matrices, sizes, out_first=not out_first)
    dshares = None
    if shares is not None:
        dshares = jnp.sum(x.astype(jnp.float32) * before.astype(jnp.float32), axis=1)
    # A factor of either row scales their outer product; the narrower row takes less memory traffic.
    if x.shape[1] < cotangent.shape[1]:
        x = _scaled(x, shares)
    else:
        cotangent = _scaled(cotangent, shares)
    pair = (cotangent, x) if out_first else (x, cotangent)
    dmatrices = _outer_p.bind(*pair, sizes)
    return _scaled(before, shares), dmatrices, dshares, float0_cotangents(sizes)


_product.defvjp(_forward, _backward)


def grouped_product(x: Any, matrices: Any, sizes: Any, *, out_first: bool) -> Any:
    """Multiplies rows by their group's matrix, (out, in) or (in, out); no derivative."""
    return _product_p.bind(x, matrices, sizes, out_first=out_first)


def grouped_outer(left: Any, right: Any, sizes: Any) -> Any:
    """Sums the outer products of each group's rows: (groups, left, right); no derivative."""
    return _outer_p.bind(left, right, sizes)


def _product_shape(x, matrices, sizes, *, out_first):
    return x.update(shape=(x.shape[0], matrices.shape[1 if out_first else 2]), weak_type=False)


def _outer_shape(left, right, sizes):
    shape = (sizes.shape[0], left.shape[1], right.shape[1])
    return left.update(shape=shape, weak_type=False)


def _product_elsewhere(x, matrices, sizes, *, out_first):
    matrices = jnp.swapaxes(matrices, 1, 2) if out_first else matrices
    return jax.lax.ragged_dot(x, matrices, sizes, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


_BY_ROW = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
)


def _outer_elsewhere(left, right, sizes):
    return jax.lax.ragged_dot_general(
        left, right, sizes, _BY_ROW, preferred_element_type=jnp.float32
    ).astype(left.dtype)


# Jitted so that equal products are lowered once for a function.
@partial(jax.jit, static_argnames="out_first")
def _product_on_gpu(x, matrices, sizes, *, out_first):
    from jla.ops.mosaic_gpu import ragged_dot  # pyright: ignore[reportMissingImports]

    # The public function takes matrices as (in, out) only. The kernel behind it reads both, since
    # the gradient of one is the product of the other, and a copy of all matrices takes a fifth of
    # a product's time. Its gradient would call the same kernel, and lower two more for nothing. If
    # another version has no such function, `kernel_checks` finds that and leaves these kernels.
    wide, out = (2, 1) if out_first else (1, 2)
    config = ragged_dot.select_config(matrices.shape[wide], matrices.shape[out])
    return ragged_dot._ragged_dot_kernel(x, matrices, sizes, transpose_rhs=out_first, cfg=config)


@jax.jit
def _outer_on_gpu(left, right, sizes):
    from jla.ops.mosaic_gpu import ragged_dot  # pyright: ignore[reportMissingImports]

    return ragged_dot.transposed_ragged_dot(left, right, sizes)


def _product_flops(eqn: Any) -> int:
    rows, matrices = (v.aval.shape for v in eqn.invars[:2])
    return 2 * rows[0] * math.prod(matrices[1:])  # however rows and matrices are paired


def _outer_flops(eqn: Any) -> int:
    left, right = (v.aval.shape for v in eqn.invars[:2])
    return 2 * left[0] * left[1] * right[1]


_product_p = define(
    "grouped_product",
    _product_shape,
    _product_on_gpu,
    _product_elsewhere,
    KernelCosts(purpose="experts", flops=_product_flops, reads_weights=True),
)
_outer_p = define(
    "grouped_outer",
    _outer_shape,
    _outer_on_gpu,
    _outer_elsewhere,
    KernelCosts(purpose="experts", flops=_outer_flops, reads_weights=True),
)
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
    if x.dtype not in DTYPES or any(a.dtype != x.dtype for a in arrays):
        return False
    if num_rows < LEAST_ROWS or len(arrays[0]) > MOST_GROUPS:
        return False
    matrices = [a.shape for a in arrays if a.ndim == 3]
    return padded_share(matrices) <= _MOST_PADDING


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
    ) -> Tokens:
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


def sort(chosen: Chosen, num: int) -> _Rows:
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
    padding = -size % ROW_MULTIPLE
    order = jnp.pad(order, (0, padding), constant_values=size)
    return _Rows(order, places, sizes.at[-1].add(padding))


# JAX's own derivative would keep all rows between the products, and scatter gradients of tokens.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(expert: Expert, x: Tokens, shares: Shares, weights: Weights, rows: _Rows) -> Tokens:
    """Passes tokens through their experts and adds the results, weighted by shares."""
    each = shares.shape[1]
    product = product_within(rows.sizes)
    out = expert(rows.given(x, each), weights, product).by(product)
    return rows.summed(out, shares, each).astype(x.dtype)


def _mixed_forward(expert, x, shares, weights, rows):
    return mixed(expert, x, shares, weights, rows), (x, shares, weights, rows)


def _mixed_backward(expert, saved, cotangents):
    return *_mixed_gradients(expert, saved, cotangents), float0_cotangents(saved[-1])


@partial(jax.jit, static_argnums=0)
def _mixed_gradients(expert, saved, cotangents):
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
    return dx, dshares, dweights


_mixed.defvjp(_mixed_forward, _mixed_backward)
mixed = jax.jit(_mixed, static_argnums=0)  # traced once for all layers
