"""Refusing what can't fit the device, in words with numbers, before anything is allocated."""

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.report.plan import Plan


def check_device(plan: Plan, free_bytes: int | None) -> None:
    """Refuses what can't fit the device, before anything is allocated.

    Args:
        plan: A plan whose functions have been compiled for the device.
        free_bytes: Device memory that there is; None if unknown.

    Raises:
        MemoryError: If the plan needs more.
    """
    if free_bytes is None or plan.device_bytes <= free_bytes:
        return
    raise MemoryError(
        f"Training needs {sized(plan.device_bytes)} of device memory, {sized(free_bytes)} "
        f"available: {sized(plan.device_state_bytes)} for state and activations (least with "
        f'device_budget="least"), {sized(plan.device_temporary_bytes or 0)} for what one '
        "compiled function needs. Nothing was allocated. Use more `microbatches`, smaller batches "
        "or a loss that makes fewer logits at a time (a smaller `chunk` of `losses.next_token`)."
    )
