"""The allocator of device memory that JAX uses, and its share of a GPU."""

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec

from megatrain_jax._src.engine.startup.driver_memory import GpuMemory, gpu_memories

VARIABLE = "XLA_PYTHON_CLIENT_ALLOCATOR"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses to have both
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
CUDA_POOL = "cuda_async"
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_JAXS_OWN = ("default", "bfc")
# The shares of a small and of a large GPU. CUDA's context, the code and workspaces of its
# libraries, and buffers for communication stay outside of JAX's share; they don't grow with the
# GPU. A desktop has its windows on a small GPU.
_SMALLEST_SHARE, _LARGEST_SHARE = 0.85, 0.93
_OUTSIDE_BYTES = 3.6 * 2**30
# The most memory of the driver on an unused GPU; included in the bytes outside.
_DRIVER_BYTES = 0.7 * 2**30


def fraction() -> float:
    """The share of a GPU's memory that JAX takes in a process that imports this library."""
    given = _given()
    return _SMALLEST_SHARE if given is None else given


def share_of(device_bytes: int) -> float:
    """JAX's share of a GPU of this size, for plans here and elsewhere."""
    given, share = _given(), _default_share(device_bytes)
    # A share of this machine's GPU may be too large for a smaller card.
    return share if given is None else min(given, share)


def _given() -> float | None:
    given = os.environ.get(FRACTION) or os.environ.get(OLD_FRACTION)
    return float(given) if given else None


def _default_share(device_bytes: int, by_others: float = 0.0) -> float:
    share = 1 - (_OUTSIDE_BYTES + by_others) / device_bytes
    return min(max(share, _SMALLEST_SHARE), _LARGEST_SHARE)


def _share_here(gpus: Sequence[GpuMemory]) -> float:
    """JAX's share of each of these GPUs, beside the memory of running programs."""
    by_others = [max(0.0, gpu.total - gpu.free - _DRIVER_BYTES) for gpu in gpus]
    shares = (_default_share(gpu.total, used) for gpu, used in zip(gpus, by_others, strict=True))
    return min(shares, default=_SMALLEST_SHARE)


def keeps_lists() -> bool:
    """Whether JAX's own allocator takes its share of a GPU at once, and lists it in host memory.

    If it takes memory as it needs it, its lists are shorter, and no plan counts them.
    """
    return _preallocates() and os.environ.get(VARIABLE, "").lower() in _JAXS_OWN


def bytes_taken_at_once() -> int:
    """The memory of all visible GPUs that JAX's own allocator takes, and lists, when it starts.

    Returns:
        Bytes; 0 if CUDA allocates, or without a driver.
    """
    return int(fraction() * sum(gpu.total for gpu in gpu_memories())) if keeps_lists() else 0


def _preallocates() -> bool:
    return os.environ.get(PREALLOCATE) not in ("false", "False", "0")


def choose() -> None:
    """Lets CUDA's own memory pool allocate 85 to 93% of a GPU, unless a user chose otherwise.

    XLA's default allocator fails with memory left when none of its gaps is large enough; this was
    seen on a GPU of 10 GiB with 7.9 GiB planned. CUDA's pool maps pages from several gaps. Without
    preallocation CUDA's pool reports no limit, so an automatic budget can't be found. JAX's default
    share is 75%. A share of 85% leaves 1.5 of 10 GiB for CUDA and a desktop; 93% leaves 5.6 of 80
    GiB. Has an effect only before JAX's backend starts.
    """
    # Without CUDA there is nothing to set, and `environ` stays as it is.
    if not any(map(find_spec, _CUDA_PLUGINS)):
        return
    if _preallocates():
        os.environ.setdefault(VARIABLE, CUDA_POOL)
    if not {FRACTION, OLD_FRACTION} & os.environ.keys():
        # Rounded down to few digits, for messages and result files.
        share = math.floor(10_000 * _share_here(gpu_memories())) / 10_000
        os.environ[FRACTION] = str(share)
