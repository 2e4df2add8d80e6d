"""What a store at rest holds, as arrays in host memory that share its bytes."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.program.index import Index, joined
from megatrain_jax._src.program.optimizer.cut import assemble_state
from megatrain_jax._src.runtime.engine import Engine
from megatrain_jax._src.state.placement import Placement


def parameters(spec: RunSpec, engine: Engine) -> list[np.ndarray]:
    """The parameters in the order of the model's; only those stacked over layers are copies."""
    rows: list[list[tuple[Index, np.ndarray]]] = [[] for _ in spec.adapted.shapes]
    views: dict[int, np.ndarray] = {}
    for g, leaves in enumerate(spec.grouping.leaves):
        (slab,) = engine.host["P", g]
        views.update(zip(leaves, spec.layouts[g].master.views(slab), strict=True))
    for i, leaf in enumerate(spec.leaves):
        rows[leaf.parameter].append((leaf.index, views[i]))
    shapes = (shape.shape for shape in spec.adapted.shapes)
    return [joined(row, shape) for row, shape in zip(rows, shapes, strict=True)]


def optimizer_state(spec: RunSpec, engine: Engine) -> Any:
    """Optax's state in Optax's own structure."""
    groups = [
        layout.state.views(engine.host.get(("O", g), ())) for g, layout in enumerate(spec.layouts)
    ]
    return assemble_state(spec.optimizer, groups, on_host(engine.globals, engine.placement))


def on_host(arrays: Iterable[jax.Array], placement: Placement) -> list[Any]:
    """Small state as numpy arrays; typed keys, which numpy doesn't know, on the device."""
    return [
        jax.device_put(x, placement.small_on_device)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else np.asarray(x)
        for x in arrays
    ]
