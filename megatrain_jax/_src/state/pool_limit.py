"""The limit of JAX's pinned-host pools, which has to be set before JAX's backend starts.

Without JAX, so that the package sets it at once and imports the rest when it is asked for.
"""

import os
import sys

from megatrain_jax._src.state.host_memory import total_bytes

LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_GIB = 2**30
_HEAD_ROOM_BYTES = 10 * _GIB
# What the interpreter, CUDA and XLA take beside the pools, as processes of one and two H100s or
# H200s were seen to with CUDA's memory pool: 2.5 GiB at 16 GiB of pools, 3.0 at 60, 5.1 at 115 and
# 8.6 at 218. The driver keeps notes of each page that it pins.
_LEAST_BESIDE, _FIXED_BESIDE, _POOLS_OF_A_BYTE_BESIDE = 5 * _GIB // 2, 6 * _GIB // 5, 30
# Share of a large machine's memory that the process may take in all.
_SHARE = 0.99


def set_limit() -> None:
    """Lets JAX's pinned-host pool grow to this machine's memory less head room.

    Has an effect only before JAX's backend starts, and leaves a limit the user set alone.
    """
    if (total := total_bytes()) is not None:
        os.environ.setdefault(LIMIT_VARIABLE, str(limit_bytes(total) // _GIB))


def limit_bytes(total: int | None) -> int:
    """Returns the bytes that `set_limit` allows the pool on a machine with so much memory."""
    if total is None:
        return sys.maxsize
    # From 250 GiB on, what the process takes beside the pool is more than the head room.
    per_byte = 1 + 1 / _POOLS_OF_A_BYTE_BESIDE
    most = min(total - _HEAD_ROOM_BYTES, int((_SHARE * total - _FIXED_BESIDE) / per_byte))
    return max(1, most // _GIB) * _GIB


def beside_bytes(pools: int) -> int:
    """Returns the host memory that a process takes beside its pools of so many bytes."""
    return max(_LEAST_BESIDE, _FIXED_BESIDE + pools // _POOLS_OF_A_BYTE_BESIDE)
