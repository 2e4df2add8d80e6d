"""A batch's way to the devices."""

from typing import Any

import jax

from megatrain_jax._src.build.bound_step import BoundStep
from megatrain_jax._src.state.placement import Placement


def put_batch(batch: Any, step: BoundStep, placement: Placement) -> list[jax.Array]:
    """Puts the arrays of a batch on the devices, which share it if its microbatches divide.

    Args:
        batch: A pytree of arrays whose first axes are of examples.
        step: The step that is to read it.
        placement: The devices.
    """
    leaves = jax.tree.leaves(batch)
    return jax.device_put(leaves, placement.batch(leaves[0].shape[0] // step.microbatches))
