"""The compute capability of an NVIDIA GPU, which tells what its units can do."""

from typing import Any


def compute_capability(device: Any) -> float | None:
    """The compute capability of a JAX device, such as 7.5 or 9.0; None if it has none.

    From 8.0 on, GPUs have bfloat16, and JAX calls cuDNN's attention on them.
    """
    if device.platform != "gpu":
        return None
    try:
        return float(getattr(device, "compute_capability", ""))
    except ValueError:  # other vendors' GPUs have names of architectures
        return None
