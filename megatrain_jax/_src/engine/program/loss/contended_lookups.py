"""Lookups of few rows by many indices, with a matrix product as their gradient.

JAX's gradient of a lookup adds the cotangents of all indices to the rows of a table. On a GPU,
threads that add to the same row wait for each other. If thousands of indices share a row, that
takes seconds.

Example: the bias of a T5's attention by relative position, 32 rows of 32 numbers that 512 x 512
pairs of tokens look up, in bfloat16 on an H100::

    scatter-add zeros indices cotangents          # 3 s
    dot_general (one_hot indices) cotangents      # 537 MFLOP and 34 MB: less than 0.1 ms
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.fp32_products import is_open

# A product takes over from so many indices per row on, if the table has at most so many rows for
# each number of a row. Its zeros and ones then take at most a few times the cotangents' memory.
_INDICES_PER_ROW, _MOST_ROWS = 64, 4
# Several products are added if each of them still sums at least so many numbers per row.
_SHORT = 4


def evaluate(jaxpr: Any, args: Sequence[Any], differentiated: Collection[Any]) -> list[Any]:
    """Evaluates an open jaxpr, for derivatives with products in place of contended scatters.

    Args:
        jaxpr: The jaxpr.
        args: Values of its constants and inputs.
        differentiated: The inputs that it will be differentiated by.
    """
    if not any(jx.contains(eqn, is_contended) for eqn in jaxpr.eqns):
        return jx.evaluate(jaxpr, args)
    active = jx.dependent(jaxpr, differentiated)

    def compute(_: int, eqn: Any, value: Any) -> list[Any]:
        if is_contended(eqn) and eqn.invars[0] in active:
            return [_looked_up(eqn, *map(value, eqn.invars))]
        if is_open(eqn) and jx.contains(eqn, is_contended):
            inner = jx.called(eqn)
            assert inner is not None
            pairs = zip(inner.jaxpr.invars, eqn.invars, strict=True)
            own = [v for v, atom in pairs if not jx.is_literal(atom) and atom in active]
            return evaluate(inner.jaxpr, [*inner.consts, *map(value, eqn.invars)], own)
        return jx.bind(eqn, [value(atom) for atom in eqn.invars])

    return jx.evaluate_by(jaxpr, args, compute)


def is_contended(eqn: Any) -> bool:
    """Whether an equation looks up whole rows of a small table, each by many indices."""
    if eqn.primitive.name != "gather":
        return False
    (table, indices), out = (v.aval for v in eqn.invars), eqn.outvars[0].aval
    numbers, rank = eqn.params["dimension_numbers"], len(table.shape)
    if (
        not jx.is_float(table)
        or numbers.collapsed_slice_dims != (0,)
        or numbers.start_index_map != (0,)
        or numbers.operand_batching_dims
        or eqn.params["slice_sizes"] != (1, *table.shape[1:])
        or numbers.offset_dims != tuple(range(len(out.shape) - rank + 1, len(out.shape)))
    ):
        return False
    rows, count = table.shape[0], math.prod(indices.shape[:-1])
    width = math.prod(table.shape[1:])
    return _INDICES_PER_ROW * rows <= count and rows <= _MOST_ROWS * width


def _looked_up(eqn: Any, table: Any, indices: Any) -> jax.Array:
    """The rows of a table, with a product as the gradient of the table."""
    shape, dtype = table.shape, table.dtype
    clips = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP

    @jax.custom_vjp
    def look_up(table, indices):
        return jx.bind(eqn, [table, indices])[0]

    def forward(table, indices):
        return look_up(table, indices), indices

    def backward(indices, cotangent):
        places = jnp.clip(indices, 0, shape[0] - 1) if clips else indices
        # An index out of bounds has no row, as in a scatter that drops it.
        ones = (places == jnp.arange(shape[0], dtype=places.dtype)).astype(dtype)
        # float32 products would be rounded to TF32.
        precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
        axes = tuple(range(indices.ndim - 1))
        # Products of few rows and columns with a long sum would keep most of a GPU idle, so there
        # is one for each index of the first axis.
        apart = 1 if len(axes) > 1 and _SHORT * shape[0] * len(indices) <= indices.size else 0
        numbers = (axes[apart:], axes[apart:]), (axes[:apart], axes[:apart])
        sums = jax.lax.dot_general(ones, cotangent, numbers, precision=precision)
        sums = jnp.sum(sums, axis=0) if apart else sums
        return sums, np.zeros(indices.shape, jax.dtypes.float0)

    look_up.defvjp(forward, backward)
    return look_up(table, indices)
