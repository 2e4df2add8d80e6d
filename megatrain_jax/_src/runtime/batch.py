"""A batch's way to the devices, and its shapes once all processes' parts are joined."""

from typing import Any

import jax

from megatrain_jax._src.build.bound_step import BoundStep
from megatrain_jax._src.state.placement import Placement


def put_batch(batch: Any, step: BoundStep, placement: Placement) -> list[jax.Array]:
    """Puts the arrays of a batch on the devices, which share it if its microbatches divide.

    Args:
        batch: A pytree of arrays whose first axes are of examples: this process's part of them.
        step: The step that is to read it.
        placement: The devices.
    """
    # All arrays have as many examples, as has been checked; a microbatch is what devices divide.
    leaves = jax.tree.leaves(batch)
    examples = leaves[0].shape[0] * placement.processes.count
    sharding = placement.batch(examples // step.microbatches)
    if placement.processes.count == 1:
        return jax.device_put(leaves, sharding)
    return [placement.put_parts(leaf, sharding) for leaf in leaves]


def joined_shapes(batch: Any, num_processes: int) -> Any:
    """The shapes and dtypes of a batch of which each process has an equal part."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] * num_processes, *x.shape[1:]), x.dtype), batch
    )
