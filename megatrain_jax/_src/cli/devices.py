"""The devices that are here: how many there are, and the most memory that they have held."""

import jax

import megatrain_jax as mt


def num_gpus() -> int | None:
    """The number of GPUs that a run here takes; None if there is none."""
    return None if mt.this_machine() is None else jax.device_count()


def peak_device_bytes() -> int | None:
    """The most memory that was in use of the first device; None if it doesn't tell."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use") or None
