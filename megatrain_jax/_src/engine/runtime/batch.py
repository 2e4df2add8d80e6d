"""Puts batches on the devices, and joins the shapes of all processes' parts."""

from typing import Any

import jax

from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.state.placement import Placement


def put_batch(batch: Any, step: BoundStep, placement: Placement) -> list[jax.Array]:
    """Puts the arrays of a batch on the devices, divided among them if microbatches allow.

    Args:
        batch: A pytree of arrays with examples as first axis: this process's part of them.
        step: The step that will read it.
        placement: The devices.
    """
    # Arrays that are divided have equally many examples, as checked before.
    leaves = jax.tree.leaves(batch)
    examples = leaves[0].shape[0] * placement.processes.count
    sharding = placement.batch(examples // step.microbatches)
    if placement.processes.count == 1:
        return jax.device_put(leaves, sharding)
    return [placement.put_parts(leaf, sharding) for leaf in leaves]


def joined_shapes(batch: Any, num_processes: int) -> Any:
    """The shapes and dtypes of a whole batch, in equal parts on all processes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] * num_processes, *x.shape[1:]), x.dtype), batch
    )
