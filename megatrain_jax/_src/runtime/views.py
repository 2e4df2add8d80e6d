"""Parameters and Optax state of a store at rest, in their own trees, without copies."""

from typing import Any

import numpy as np

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.program.layers.index import Index, joined
from megatrain_jax._src.program.optimizer.whole_state import assemble_state
from megatrain_jax._src.runtime.store import Store
from megatrain_jax._src.spec.run_spec import RunSpec


def parameters(spec: RunSpec, store: Store) -> list[np.ndarray]:
    """The parameters in the model's order; only parameters stacked over layers are copies."""
    rows: list[list[tuple[Index, np.ndarray]]] = [[] for _ in spec.adapted.shapes]
    views: dict[int, np.ndarray] = {}
    for g, leaves in enumerate(spec.grouping.leaves):
        views.update(zip(leaves, store.leaves(Key(Kind.MASTERS, g)), strict=True))
    for i, leaf in enumerate(spec.leaves):
        rows[leaf.parameter].append((leaf.index, views[i]))
    shapes = (shape.shape for shape in spec.adapted.shapes)
    return [joined(row, shape) for row, shape in zip(rows, shapes, strict=True)]


def optimizer_state(spec: RunSpec, store: Store) -> Any:
    """Optax's state in Optax's own structure."""
    groups = [store.leaves(Key(Kind.OPTIMIZER_STATE, g)) for g in range(len(store.layouts))]
    return assemble_state(spec.optimizer, groups, store.on_host(store.globals))
