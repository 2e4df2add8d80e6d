"""Refuses a run that can't fit on the device, with numbers, before anything is allocated."""

import math
from collections.abc import Sequence

import jax

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.program.tiling.tiled import FACTORS
from megatrain_jax._src.engine.report.plan import Plan

# Tiling a shorter axis would save little memory.
_LONG = 128


def check_device(
    plan: Plan, free_bytes: int | None, values: Sequence[jax.ShapeDtypeStruct] = ()
) -> None:
    """Refuses a plan that can't fit on the device.

    Args:
        plan: A plan with functions that have been compiled for the device.
        free_bytes: Free device memory; None if unknown.
        values: The values between stages; stages are tiled along their axes.

    Raises:
        MemoryError: If the plan needs more than `free_bytes`.
    """
    if free_bytes is None or plan.device_bytes <= free_bytes:
        return
    excess = f"; {plan.device_excess}" if plan.device_excess else ""
    raise MemoryError(
        f"Training needs {sized(plan.device_bytes)} of device memory, {sized(free_bytes)} "
        f"available: {sized(plan.device_state_bytes)} for state and activations (less with "
        f'device_budget="minimum"), {sized(plan.device_temporary_bytes or 0)} for the '
        f"temporary buffers of one function{excess}. Nothing was allocated. Use more "
        "`microbatches`, smaller batches, a loss that makes fewer logits at a time (a smaller "
        "`chunk` of `losses.next_token`), or fewer bytes per parameter (Precision.compact(), an "
        "optimizer with less state)."
        f"{_undivided(values)}"
    )


def _undivided(values: Sequence[jax.ShapeDtypeStruct]) -> str:
    """A sentence on an axis length that no tile count divides, with the remedy; "" if none."""
    largest = max(values, key=lambda value: math.prod(value.shape), default=None)
    if largest is None:
        return ""
    lengths = [n for n in largest.shape if n >= _LONG and all(n % k for k in FACTORS)]
    if not lengths:
        return ""
    length, factors = max(lengths), ", ".join(map(str, FACTORS))
    return (
        f" Nothing is computed in tiles along a length of {length:,}, which none of {factors} "
        f"divides: pad it to a multiple of {_LONG}, such as {-(-length // _LONG) * _LONG:,}."
    )
