"""Sizes of a pinned-host pool: by how much it grows for what is taken from it.

JAX's pool takes regions of 2 MiB times a power of two from the system, each at least as large as
the last one, and no array lies across two.
"""

import sys

_GIB = 2**30
# What the interpreter, CUDA and XLA were seen to need beside the pool on a one-GPU machine with
# CUDA's memory pool; 3.8 GiB more with JAX's own allocator, and its kernel 2.5 GiB more.
_PROCESS_BYTES = 29 * 2**30 // 10
_HEAD_ROOM_BYTES = 10 * 2**30
# The ends of a fresh pool's pieces that may stay empty, in largest arrays.
_SPARE_ARRAYS = 3
# JAX's pool grows by regions of 2 MiB times a power of two.
_SMALLEST_REGION_BITS = 21


def process_bytes(num_bytes: int, array_bytes: int, total: int | None, num_devices: int = 1) -> int:
    """Returns the host memory a process takes once `reserve` has made room in fresh pools.

    That is the pools, with the ends of their pieces that stay empty, and what the process needs
    beside them.

    Args:
        num_bytes: See `reserve`.
        array_bytes: See `reserve`.
        total: The machine's host memory; None if unknown.
        num_devices: Number of the process's devices.
    """
    share = -(-num_bytes // num_devices)
    _, growth = fresh(share, array_bytes, limit_bytes(total))
    return num_devices * growth + _PROCESS_BYTES


def fresh(num_bytes: int, array_bytes: int, limit: int) -> tuple[list[int], int]:
    """Returns the sizes to take from a fresh pool, and the bytes it takes from the system for them.

    No array lies across two pieces, so these need spare room, and one region may be smaller.
    For 40 GiB in arrays of at most 1 GiB these are pieces of 4, 8 and 32 GiB, 44 in all; one
    region would take 64 GiB.
    """
    growth = region_bytes(num_bytes, 0, limit)
    exact = _pieces(num_bytes + _SPARE_ARRAYS * array_bytes, limit)
    return (exact, sum(exact)) if exact and sum(exact) < growth else ([num_bytes], growth)


def _pieces(num_bytes: int, limit: int) -> list[int]:
    """Returns sizes that a fresh pool takes exactly: powers of two, each larger than the last.

    As few as an eighth more memory allows, or more if that would exceed the limit; none if all do.
    """
    for bits in (4, 5, 6, 7, 8):
        granule = 1 << max(_SMALLEST_REGION_BITS, num_bytes.bit_length() - bits)
        rounded = -(-num_bytes // granule) * granule
        if rounded <= limit:
            return [1 << bit for bit in range(rounded.bit_length()) if rounded >> bit & 1]
    return []


def limit_bytes(total: int | None) -> int:
    """Returns the bytes that `set_limit` allows the pool on a machine with so much memory."""
    return sys.maxsize if total is None else max(1, (total - _HEAD_ROOM_BYTES) // _GIB) * _GIB


def region_bytes(num_bytes: int, pool_bytes: int, limit: int) -> int:
    """Returns the bytes that the pool will take from the system for one piece of this size."""
    region = 1 << max(_SMALLEST_REGION_BITS, (num_bytes - 1).bit_length())
    # Regions double: the next is as large as all before it together, but stays in the limit.
    return max(num_bytes, min(max(region, pool_bytes), limit - pool_bytes))
