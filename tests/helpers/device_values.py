"""What a step holds on a device."""

import dataclasses

import jax

from inside import spec_of, store_of
from megatrain_jax._src.common.keys import Kind


def state_on_device(trainer):
    """Bytes of live device arrays that are slabs, found without asking the engine."""
    sizes = {
        (layout.size, layout.dtype)
        for group in spec_of(trainer).layouts
        for layout in (
            group.master,
            dataclasses.replace(group.master, dtype="bfloat16"),  # of some gradients
            *group.state.layouts,
        )
    }
    return sum(
        x.nbytes
        for x in jax.live_arrays()
        if x.sharding.memory_kind == "device"
        and x.ndim == 1
        and (x.size, str(x.dtype)) in sizes
        and x.size >= 64
    )


def values_on_device(trainer, step):
    """Bytes of residuals, and of live device arrays that look like values, but for cotangents."""
    plan = spec_of(trainer).first
    avals = (plan.program.values[i] for i in plan.workload.activations)
    shapes = {(aval.shape, aval.dtype) for aval in avals}
    cotangents = {id(x) for row in step.cotangents for x in row.values()} if step else set()
    held = store_of(trainer).on_device.items() if step else ()
    residuals = {id(x): x for key, xs in held if key.kind is Kind.RESIDUALS for x in xs}
    return sum(x.nbytes for x in residuals.values()) + sum(
        x.nbytes
        for x in jax.live_arrays()
        if x.sharding.memory_kind == "device"
        and (x.shape, x.dtype) in shapes
        and id(x) not in cotangents
        and id(x) not in residuals
    )
