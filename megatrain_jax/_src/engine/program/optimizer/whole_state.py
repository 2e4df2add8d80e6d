"""Optax's own state, assembled from the pieces that a cut optimizer keeps by group."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program.layers.index import Index, joined
from megatrain_jax._src.engine.program.optimizer.cut import OptimizerCut


def assemble_state(
    cut: OptimizerCut, per_group: Sequence[Sequence[Any]], global_state: Sequence[Any]
) -> Any:
    """Assembles Optax's own state, as NumPy arrays.

    Args:
        cut: The cut, with the place of each array.
        per_group: Arrays of each group, in the order of `cut.state`.
        global_state: Arrays in the order of `cut.globals`.
    """
    rows: list[list[tuple[Index, Any]]] = [[] for _ in cut.state_shapes]
    described = [*zip(cut.state, per_group, strict=True), (cut.globals, global_state)]
    for owned, arrays in described:
        for leaf, array in zip(owned, arrays, strict=True):
            rows[leaf.leaf].append((leaf.index, array))
    whole = [_whole(row, shape.shape) for row, shape in zip(rows, cut.state_shapes, strict=True)]
    return jax.tree.unflatten(cut.state_def, whole)


def _whole(row: list[tuple[Index, Any]], shape: tuple[int, ...]) -> Any:
    """One array of Optax's state from its slices; a random key is never sliced."""
    _, value = row[0]
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value if is_key else joined(row, shape)
