"""The pinned-host pool: its limit, and reserving it from the system in a few large allocations.

JAX serves `pinned_host` on GPUs from a pool for each device whose limit must be set before its
backend starts, and which fragments when it grows on demand; a process that takes too much is
killed without a message. So the limit is set on import, and the need is checked before anything is
allocated.
"""

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.state.host_memory import available_bytes, resident_bytes, total_bytes
from megatrain_jax._src.state.pinning import refusal
from megatrain_jax._src.state.placement import Placement
from megatrain_jax._src.state.pool_limit import (
    LIMIT_VARIABLE,
    POOLS_OF_A_LIST,
    beside_bytes,
    driver_bytes,
    limit_bytes,
    limit_in_force,
    process_budget,
)

_GIB = 2**30
# How often what was taken is shown.
_SECONDS_AT_A_TIME = 0.2
# Memory that has to be available once all is pinned, for compilation and the system.
_LEAST_LEFT = _GIB
# JAX's own limit of a pool, unless the variable says otherwise.
_DEFAULT_LIMIT = 64 * _GIB
# A fresh pool's size is found to so many binary places.
_PIECE_BITS = 9
# JAX's pool grows by regions of 2 MiB times a power of two.
_SMALLEST_REGION_BITS = 21


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """The size of one device's pool, in bytes: what was shown to fit, and what likely fits."""

    proven_bytes: int = 0
    likely_bytes: int = 0


# Pools belong to the process and can't be asked for their sizes, so their sizes are kept here.
_pools: dict[Any, _Pool] = {}


def free_device_bytes(placement: Placement) -> int | None:
    """Returns the memory of each device that JAX can still get.

    Args:
        placement: The devices; of several, the fullest one counts.

    Returns:
        Bytes; None where JAX doesn't tell, as on a CPU.
    """
    free = []
    for device in placement.local_devices:
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")  # 0 where the allocator takes memory as it needs it
        if not limit:
            return None
        free.append(limit - stats["bytes_in_use"])
    return min(free)


def reserve(
    placement: Placement,
    num_bytes: int,
    array_bytes: int = 0,
    shown: Callable[[int, int], object] = lambda taken, of: None,
) -> None:
    """Makes sure that pinned host memory for `num_bytes` more is there, or says why not.

    On a GPU each device's pool takes its share of the memory from the system here, in few large
    pieces, as one that grows array by array can't be filled; finding the pages takes up to a second
    per GiB, and half of that for two devices at once. Room that earlier arrays have left in a pool
    is used first. On a CPU nothing is taken.

    Args:
        placement: Placement of the slabs that are to rest there.
        num_bytes: Bytes that this process is about to allocate there: its state and the arrays it
            has in flight.
        array_bytes: The largest part that one device has of these arrays: it lies in one piece,
            whose end may stay empty.
        shown: Is told before the wait, and now and then within it, how many bytes were taken from
            the system, and of how many.

    Raises:
        MemoryError: If the machine, or the limit of JAX's pools, has less.
    """
    if placement.platform == "cpu":
        return
    gc.collect()  # an earlier run's arrays may only be waiting for their cycle to be found
    devices = placement.local_devices
    share = -(-num_bytes // len(devices))
    in_use = _pinned_bytes_in_use(devices)
    pools = {d: _pools.get(d, _Pool()) for d in devices}
    wanting = [d for d in devices if share > pools[d].proven_bytes - in_use[d]]
    # All ask each other, also those that need nothing: one that didn't would hold up the others.
    if not any(placement.processes.gather("asking for host memory", bool(wanting))):
        return
    rooms = {d: _room(share, array_bytes, pools[d], in_use[d]) for d in wanting}
    growth = sum(growth for _, growth in rooms.values())
    # All look before any takes, and what processes of one host need adds up.
    number = placement.processes.num_here
    # JAX's lists and the driver's notes come with the pages.
    beside = growth // POOLS_OF_A_LIST + driver_bytes(growth)
    _check(number * num_bytes, number * growth, share, number * beside)
    placement.processes.gather("taking host memory")
    shown(0, growth)
    # JAX doesn't say how far it is; the pages that this process has do.
    before = resident_bytes()
    with ThreadPoolExecutor(max(1, len(wanting))) as threads:
        waited = [
            threads.submit(_take, d, rooms[d][0], share, pools[d].likely_bytes) for d in wanting
        ]
        while wait(waited, _SECONDS_AT_A_TIME).not_done:
            shown(min(resident_bytes() - before, growth), growth)
        for future in waited:
            future.result()
    shown(growth, growth)
    if (left := available_bytes()) < _LEAST_LEFT:
        raise MemoryError(
            f"{sized(left)} of host memory are available after {sized(growth)} were pinned, and "
            f"less than {sized(_LEAST_LEFT)} may get this process killed: another program has "
            "taken memory meanwhile. End it, or give a smaller `host_budget`."
        )
    for device, (_, growth) in rooms.items():
        likely = pools[device].likely_bytes + growth
        _pools[device] = _Pool(proven_bytes=in_use[device] + share, likely_bytes=likely)


def _room(num_bytes: int, array_bytes: int, pool: _Pool, in_use: int) -> tuple[list[int], int]:
    """Returns the sizes to take from a pool for so many bytes more, and by how much it grows."""
    limit = limit_in_force()
    if num_bytes <= pool.likely_bytes - in_use:
        return [num_bytes], 0
    if pool.likely_bytes:
        return [num_bytes], _region_bytes(num_bytes, pool.likely_bytes, limit)
    return _fresh(num_bytes, array_bytes, limit)


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
    pools = pool_bytes(num_bytes, array_bytes, total, num_devices)
    return pools + beside_bytes(pools)


def pool_bytes(num_bytes: int, array_bytes: int, total: int | None, num_devices: int = 1) -> int:
    """Returns the pinned memory of all fresh pools that `reserve` makes; see `process_bytes`."""
    share = -(-num_bytes // num_devices)
    _, growth = _fresh(share, array_bytes, limit_bytes(total))
    return num_devices * growth


def most_process_bytes(total: int, num_devices: int = 1, num_processes: int = 1) -> int:
    """Returns the most host memory that a process can take by `process_bytes` on such a machine.

    Args:
        total: The machine's host memory.
        num_devices: Number of the process's devices.
        num_processes: Number of processes that share the memory.
    """
    most = num_devices * limit_bytes(total)
    return min(process_budget(total) // num_processes, most + beside_bytes(most))


def usable_bytes(
    budget: int | None, total: int | None, num_devices: int = 1, num_processes: int = 1
) -> int | None:
    """Returns the host memory that a process may take: its budget, and at most its share.

    Args:
        budget: The user's limit for the process; None if there is none.
        total: The machine's host memory; None if unknown.
        num_devices: See `most_process_bytes`.
        num_processes: See `most_process_bytes`.

    Returns:
        Bytes; None if there is no budget and the machine's memory is unknown.
    """
    share = None if total is None else most_process_bytes(total, num_devices, num_processes)
    return min((limit for limit in (budget, share) if limit is not None), default=None)


def available_process_bytes(num_processes: int = 1) -> int | None:
    """Returns the host memory that this process may take in all, from what is available now.

    Args:
        num_processes: Number of processes on this machine that are about to take as much.
    """
    total = total_bytes()
    if total is None:
        return None
    # What this process has is at its disposal, such as a pool that an earlier run has left.
    return process_budget(min(total, num_processes * resident_bytes() + available_bytes())) // (
        num_processes
    )


def _fresh(num_bytes: int, array_bytes: int, limit: int) -> tuple[list[int], int]:
    """Returns the sizes to take from a fresh pool, and the bytes it takes from the system for them.

    For 40 GiB in arrays of at most 1 GiB these are pieces of 1, 8 and 32 GiB, 41 in all; one
    region would take 64 GiB.
    """
    growth = _region_bytes(num_bytes, 0, limit)
    exact = _pieces(num_bytes, array_bytes, limit)
    return (exact, sum(exact)) if exact and sum(exact) < growth else ([num_bytes], growth)


def _pieces(num_bytes: int, array_bytes: int, limit: int) -> list[int]:
    """Returns sizes that a fresh pool takes exactly: powers of two, each larger than the last.

    No array lies across two pieces, so a piece holds a whole number of the largest arrays, and its
    end may stay empty. One array more than needed has room, as arrays of several sizes leave gaps.
    Returns the fewest bytes that will do, to an eighth of a percent; none if the limit is lower.
    """
    granule = 1 << max(_SMALLEST_REGION_BITS, num_bytes.bit_length() - _PIECE_BITS)
    needed, unit = num_bytes + array_bytes, max(1, array_bytes)
    for total in range(-(-needed // granule) * granule, limit + 1, granule):
        pieces = [1 << bit for bit in range(total.bit_length()) if total >> bit & 1]
        if sum(piece // unit for piece in pieces) * unit >= needed:
            return pieces
    return []


def _region_bytes(num_bytes: int, pool_bytes: int, limit: int) -> int:
    """Returns the bytes that the pool will take from the system for one piece of this size."""
    region = 1 << max(_SMALLEST_REGION_BITS, (num_bytes - 1).bit_length())
    # Regions double: the next is as large as all before it together, but stays in the limit.
    return max(num_bytes, min(max(region, pool_bytes), limit - pool_bytes))


def _check(num_bytes: int, growth: int, share: int, beside: int = 0) -> None:
    """Refuses what the machine has no memory for; a `share` of it is each device's."""
    available = available_bytes()
    if growth + beside <= available:
        return
    need = f"Training needs {sized(num_bytes)} in host memory"
    if num_bytes + beside > available:
        also = f" and {sized(beside)} to manage it" if beside else ""
        raise MemoryError(
            f"{need}{also}, {sized(available)} available. Nothing was allocated. Give a "
            "`host_budget` that is available, use a smaller model or an optimizer with less state "
            "(adafactor, lion, mu_dtype=bfloat16), end other programs, drop earlier trainers, or "
            "give this process or container more memory."
        )
    raise MemoryError(
        f"{need}, and JAX's pool would take {sized(growth)} to hold that, as it grows by powers "
        f"of two up to its limit; {sized(available)} available. Nothing was allocated. Set "
        f"{LIMIT_VARIABLE}={-(-share // _GIB)} before Python starts, end other programs, or give "
        "a smaller `host_budget`."
    )


def _take(device: Any, pieces: list[int], num_bytes: int, pool_bytes: int) -> None:
    """Has a pool of so many bytes take these pieces from the system."""
    held, taken = [], 0
    target = SingleDeviceSharding(device, memory_kind="pinned_host")
    try:
        # All are held until the last one is there: a piece that was given back would be taken again
        # in place of new memory.
        for size in pieces:
            # Pages of zeros that were never written cost no memory of their own.
            held.append(jax.device_put(np.zeros(size, np.uint8), target))
            held[-1].block_until_ready()
            taken += size
    # NumPy's error where the process has no room for the zeros, JAX's where there is none to pin.
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        if pool_bytes + taken + size <= min(_DEFAULT_LIMIT, limit_in_force()):
            raise MemoryError(refusal(taken, size, num_bytes)) from error
        raise MemoryError(
            f"Training needs {sized(num_bytes)} in host memory, more than JAX's pinned-host pool "
            "may still take. Its limit is fixed when JAX's backend starts, to 64 GiB unless "
            f"{LIMIT_VARIABLE} says otherwise: import megatrain_jax before the first JAX "
            f"computation, or set {LIMIT_VARIABLE} to at least {-(-num_bytes // _GIB)} before "
            "Python starts, with room for other pinned arrays."
        ) from error
    finally:
        # Only the arrays go: the pool keeps what it has taken from the system.
        for piece in held:
            piece.delete()


def _pinned_bytes_in_use(devices: Sequence[Any]) -> dict[Any, int]:
    found = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        if array.sharding.memory_kind == "pinned_host":
            for shard in array.addressable_shards:
                if shard.device in found:
                    found[shard.device] += shard.data.nbytes
    return found
