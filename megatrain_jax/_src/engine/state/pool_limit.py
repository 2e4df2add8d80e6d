"""The limit of JAX's pinned-host pools, and the host memory that a process takes with them.

JAX reads the limit when its backend starts, so the package sets it on import. This file does not
import JAX, because the rest of the package is imported lazily.

Example: pools of 234 GiB on a host with 251.8 GiB and an H100, as measured:

    pools                                                      234.0 GiB
    JAX's lists of free memory in them, 1/32 of their size       7.3
    interpreter, CUDA, XLA, compiled functions                   1.7
    the process                                                243.0
    the driver's records of pinned pages, 1/80 of the pools      2.9 GiB, beside the process
    the system, unrelated programs, the driver                   2.3
    still available                                              3.6

JAX makes its lists after it has pinned the pages. If too little memory is left for them, the kernel
kills the process without a message.
"""

import bisect
import os
import sys

from megatrain_jax._src.common.host_memory import total_bytes
from megatrain_jax._src.engine.startup import allocator

LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_GIB = 2**30
# XLA's allocator keeps a number of 8 bytes for every 256 bytes of its pool (BFCAllocator,
# kMinAllocationSize and ChunkHandle).
POOL_BYTES_PER_LIST_BYTE = 32
# Measured in processes of one and two H100s or H200s with CUDA's memory pool: 1.9 GiB beside pools
# of 8 GiB, lists included, 2.1 at 16, 2.2 at 24, 3.0 at 60, 5.1 at 115, 8.6 at 218 and 9.0 at 234.
_LEAST_BESIDE, _FIXED_BESIDE = 15 * _GIB // 8, 3 * _GIB // 2
# Memory of the driver, outside of the process. It grows with the GPUs that the process sees, since
# each one maps all pinned pages: measured on a host of four H200s (`VmallocUsed` of /proc/meminfo)
# 1.18% of the pools with one GPU, 1.57 with two and 2.36 with four, with small and huge pages.
_POOL_BYTES_PER_DRIVER_BYTE = 80
_POOL_BYTES_PER_BYTE_OF_FURTHER_GPU = 256
# Memory that processes leave to the system. The system and the driver's fixed part take about
# 1.5 GiB of it, 3/8; the rest is a safety margin. A small machine leaves a share of its memory.
_SYSTEM, _SYSTEM_SHARE = 4 * _GIB, 4


def set_limit() -> None:
    """Sets the limit of JAX's pinned-host pools to the maximum on this machine.

    Has an effect only before JAX's backend starts, and keeps a limit that the user has set.
    """
    if (total := total_bytes()) is not None:
        lists = allocator.bytes_taken_at_once() // POOL_BYTES_PER_LIST_BYTE
        num_devices = max(1, len(allocator.gpu_memories()))
        os.environ.setdefault(LIMIT_VARIABLE, str(limit_bytes(total, num_devices, lists) // _GIB))


def limit_in_force() -> int:
    """Returns the limit of each of JAX's pools in bytes, set by the user or by `set_limit`."""
    given = os.environ.get(LIMIT_VARIABLE, "")
    return int(given) * _GIB if given.isdecimal() else sys.maxsize


def limit_bytes(total: int | None, num_devices: int = 1, list_bytes: int = 0) -> int:
    """Returns the limit that `set_limit` chooses.

    Args:
        total: The machine's memory in bytes; None if unknown.
        num_devices: Number of the process's devices.
        list_bytes: See `beside_bytes`.

    Returns:
        Bytes.
    """
    if total is None:
        return sys.maxsize
    return max(1, _pools_of(total, num_devices, list_bytes) // _GIB) * _GIB


def process_budget(total: int, num_devices: int = 1) -> int:
    """Returns the total bytes of a machine's memory that processes can take.

    Solves ``pools + beside + driver + system = total`` for the process, ``pools + beside``.

    Args:
        total: The machine's memory in bytes.
        num_devices: Number of devices of each process.
    """
    return _beside_driver(total - min(_SYSTEM, total // _SYSTEM_SHARE), num_devices)


def process_budget_now(total: int, free: int, num_devices: int) -> int:
    """Returns the total bytes that processes can take while unrelated programs run.

    Args:
        total: The machine's memory in bytes.
        free: Bytes that are available, or that these processes have taken already. The system's own
            memory is not among them.
        num_devices: Number of devices of each process.
    """
    kept = min(5 * _SYSTEM // 8, free // _SYSTEM_SHARE)
    return min(process_budget(total, num_devices), _beside_driver(free - kept, num_devices))


def _beside_driver(left: int, num_devices: int) -> int:
    """The part of `left` that processes can take; the driver takes the rest for their pools."""
    driver = driver_bytes(_GIB, num_devices) / _GIB
    pools = (left - _FIXED_BESIDE) / (1 + 1 / POOL_BYTES_PER_LIST_BYTE + driver)
    return left - driver_bytes(max(0, int(pools)), num_devices)


def pools_within(budget: int) -> int:
    """Returns the maximum bytes of pools in a process that takes `budget` bytes in total."""
    by_lists = int((budget - _FIXED_BESIDE) / (1 + 1 / POOL_BYTES_PER_LIST_BYTE))
    return max(0, min(by_lists, budget - _LEAST_BESIDE))


def driver_bytes(pools: int, num_devices: int = 1) -> int:
    """Returns the bytes that the driver takes outside of a process for its pools.

    Args:
        pools: Bytes of all pools of the process.
        num_devices: Number of GPUs that the process sees.
    """
    further = (num_devices - 1) * pools // _POOL_BYTES_PER_BYTE_OF_FURTHER_GPU
    return pools // _POOL_BYTES_PER_DRIVER_BYTE + further


def machine_bytes(total: int | None, num_devices: int, list_bytes: int = 0) -> int | None:
    """Returns a machine's memory, or less if the limit in force keeps pools from using it all.

    Args:
        total: The machine's memory in bytes; None if unknown.
        num_devices: Number of the process's devices, each with a pool.
        list_bytes: See `beside_bytes`.
    """
    if total is None or limit_in_force() >= limit_bytes(total, num_devices, list_bytes):
        return total
    more = num_devices * limit_in_force() + _GIB
    # The largest machine whose limit would be these pools, since limits are whole GiB.
    mib = bisect.bisect_left(
        range(total >> 20), more, key=lambda mib: _pools_of(mib << 20, num_devices, list_bytes)
    )
    return min(total, mib - 1 << 20)


def _pools_of(total: int, num_devices: int, list_bytes: int) -> int:
    """The bytes of pools that a machine with `total` bytes of memory has room for."""
    return pools_within(process_budget(total, num_devices) - list_bytes)


def beside_bytes(pools: int, list_bytes: int = 0) -> int:
    """Returns the host memory that a process takes in addition to its pools, in bytes.

    Args:
        pools: Bytes of the pools.
        list_bytes: Bytes of JAX's lists of its devices' memory; see `Hardware.list_bytes`.
    """
    return max(_LEAST_BESIDE, _FIXED_BESIDE + pools // POOL_BYTES_PER_LIST_BYTE) + list_bytes
