"""The devices of this machine: their number, and their peak memory."""

import jax

import megatrain_jax as mt


def num_gpus() -> int | None:
    """The number of GPUs that a run here uses; None if there is none."""
    return None if mt.this_machine() is None else jax.device_count()


def peak_device_bytes() -> int | None:
    """The first device's peak memory in use; None if it is not reported."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use") or None
