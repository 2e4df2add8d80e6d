"""The limit of JAX's pinned-host pools, which has to be set before JAX's backend starts.

Without JAX, so that the package sets it at once and imports the rest when it is asked for.
"""

import os
import sys

from megatrain_jax._src.state.host_memory import total_bytes

LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_HEAD_ROOM_BYTES = 10 * 2**30
_GIB = 2**30


def set_limit() -> None:
    """Lets JAX's pinned-host pool grow to this machine's memory less head room.

    Has an effect only before JAX's backend starts, and leaves a limit the user set alone.
    """
    if (total := total_bytes()) is not None:
        os.environ.setdefault(LIMIT_VARIABLE, str(limit_bytes(total) // _GIB))


def limit_bytes(total: int | None) -> int:
    """Returns the bytes that `set_limit` allows the pool on a machine with so much memory."""
    return sys.maxsize if total is None else max(1, (total - _HEAD_ROOM_BYTES) // _GIB) * _GIB
