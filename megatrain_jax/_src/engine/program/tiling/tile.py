"""Computes one operation on one tile, and sums the results of tiles.

Example: tile i of 4 for `y = iota(0..7) + x`, x f32[8]::

    iota    dimension 0, shape (8,)  ->  shape (2,), then + 2 i
    add     of tiles with 2 entries: unchanged
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.axes import ADDED_INTO, Division, Label, params_of_part
from megatrain_jax._src.engine.program.layers.sliced_values import FOLDS
from megatrain_jax._src.engine.program.primitives import PRODUCTS
from megatrain_jax._src.engine.program.tiling.random_bits import tile_of_bits


def take(split: Any, label: Label, tile: Any) -> Any:
    """A tile of an array that has a separate axis for the tiles."""
    part = lax.dynamic_index_in_dim(split, tile, label.axis + 1, keepdims=False)
    before, after = part.shape[: label.axis], part.shape[label.axis + 2 :]
    return part.reshape(*before, label.outer * label.inner, *after)


def put(split: Any, part: Any, label: Label, tile: Any) -> Any:
    """The array with a tile written into it."""
    part = part.reshape(label.split(part.shape, 1))
    return lax.dynamic_update_index_in_dim(split, part, tile, label.axis + 1)


def start_of_sum(eqn: Any, division: Division, operands: Sequence[Any]) -> Any:
    """The initial value to which an operation's tiles are added."""
    aval = eqn.outvars[0].aval
    if division.kind == ADDED_INTO:
        return lax.convert_element_type(operands[0], _summing_dtype(eqn))
    if eqn.primitive.name in PRODUCTS:
        return jnp.zeros(aval.shape, _summing_dtype(eqn))
    # Reducing an empty array gives the reduction's neutral element.
    shape = list(eqn.invars[0].aval.shape)
    for axis in eqn.params["axes"]:
        shape[axis] = 0
    return jx.bind(eqn, [jnp.zeros(shape, _summing_dtype(eqn))])[0]


def add_tile(eqn: Any, division: Division, total: Any, operands: Sequence[Any]) -> Any:
    """Adds one more tile to the sum, or another reduction, of the tiles so far.

    Narrow floats are summed in fp32.
    """
    name = eqn.primitive.name
    if division.kind == ADDED_INTO:
        # Not bound, because the addition is a jaxpr among its parameters, in the operands' dtype.
        return lax.scatter_add(
            total,
            operands[1],
            lax.convert_element_type(operands[2], total.dtype),
            eqn.params["dimension_numbers"],
            indices_are_sorted=eqn.params["indices_are_sorted"],
            unique_indices=eqn.params["unique_indices"],
            mode=eqn.params["mode"],
        )
    if name in PRODUCTS:
        params = {**eqn.params, "preferred_element_type": total.dtype}
        return total + jx.bind(eqn.replace(params=params), operands)[0]
    operand = lax.convert_element_type(operands[0], total.dtype)
    return FOLDS[name](total, jx.bind(eqn, [operand])[0])


def _summing_dtype(eqn: Any) -> Any:
    aval = eqn.outvars[0].aval
    is_narrow = jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
    adds = eqn.primitive.name not in FOLDS or eqn.primitive.name == "reduce_sum"
    return jnp.dtype(jnp.float32) if is_narrow and adds else aval.dtype


def on_tile(
    eqn: Any, division: Division, tile: Any, num_tiles: int, operands: Sequence[Any]
) -> list[Any]:
    """The results of an operation on one tile.

    Args:
        eqn: The equation.
        division: The operation's division, in which each tile makes a tile of the results.
        tile: Number of the tile.
        num_tiles: Number of tiles.
        operands: Tiles of the operands that have a label, and the remaining operands whole.
    """
    name, label = eqn.primitive.name, division.results[0]
    assert label is not None
    # Two primitives make an array without a divisible operand: their tiles depend on the tile's
    # number instead.
    if name == "random_bits":
        return [tile_of_bits(eqn, label, tile, num_tiles, operands[0])]
    if name == "iota":
        return [_counter(eqn, label, tile, num_tiles)]
    operand, length = division.operands[0], label.outer * label.inner
    params = params_of_part(eqn, label.axis, operand and operand.axis, length)
    return jx.bind(eqn.replace(params=params), operands)


def _counter(eqn: Any, label: Label, tile: Any, num_tiles: int) -> Any:
    params = eqn.params
    shape = _shape_of_tile(params["shape"], label)
    if params["dimension"] != label.axis:
        return jx.bind(eqn.replace(params={**params, "shape": shape}), [])[0]
    entry = lax.iota(jnp.int32, label.outer * label.inner)
    entry = entry // label.inner * (num_tiles * label.inner) + entry % label.inner
    entry = (entry + tile * label.inner).astype(params["dtype"])
    return lax.broadcast_in_dim(entry, shape, (label.axis,))


def _shape_of_tile(shape: Sequence[int], label: Label) -> tuple[int, ...]:
    return tuple(label.outer * label.inner if a == label.axis else n for a, n in enumerate(shape))
