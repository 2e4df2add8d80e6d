"""The compute capability of an NVIDIA GPU, which numbers the generations of its hardware."""

from typing import Any

import jax


def compute_capability(device: Any) -> float | None:
    """The compute capability of a JAX device, such as 7.5 or 9.0; None if it has none.

    From 8.0 on, GPUs have bfloat16, and JAX calls cuDNN's attention on them.
    """
    if device.platform != "gpu":
        return None
    try:
        return float(getattr(device, "compute_capability", ""))
    except ValueError:  # AMD's GPUs have the name of an architecture
        return None


def capability_here() -> float | None:
    """The compute capability of JAX's first device; None if it is no NVIDIA GPU."""
    return compute_capability(jax.devices()[0])
