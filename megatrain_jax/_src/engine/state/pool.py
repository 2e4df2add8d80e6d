"""Reserves JAX's pools of pinned host memory in a few large allocations.

On GPUs, JAX allocates `pinned_host` arrays from one pool per device. A pool fragments if it grows
on demand, and the kernel kills a process that takes too much memory, without a message. So
`reserve` first checks the need against the available memory, and then grows the pools at once. The
pools' limit must be set before JAX's backend starts; see `pool_limit`.

A low `RLIMIT_MEMLOCK` is no reason to refuse a run: it is small in most containers, and CUDA's
driver on native Linux is not known to obey it. If pinning fails, the error names it as a possible
reason.

Threads prefault the pages of host memory while the GPU's driver pins it.

The driver maps a piece of memory and pins its pages in one thread, which waits while the kernel
finds (allocates) and clears each page. Further threads can ask for the same pages in parallel. The
kernel's `MADV_POPULATE_WRITE` (Linux 5.14) finds pages without changing their contents. It refuses
addresses that are not mapped, so it is safe even if the driver frees the memory in the meantime.

Example: the driver pins 64 GiB on a machine with 17 cores::

    driver        maps bytes 0 to 64 GiB, and pins page 0, 1, 2, ...
    one thread    sees the mapping in /proc/self/maps
    thread 0      finds the pages of bytes 0 to 4 GiB
    thread 1      finds the pages of bytes 4 to 8 GiB
    ...

While the driver pins, the kernel keeps the process's list of mappings locked against changes. A
thread that needs more memory then has to wait, and so does every later call that uses the list. So
all threads are started before the driver begins, and each prefaults its part in one call.
"""

import ctypes
import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from megatrain_jax._src.common.host_memory import (
    available_bytes,
    read_text,
    resident_bytes,
    total_bytes,
)
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.state.placement import Placement
from megatrain_jax._src.engine.state.pool_limit import (
    LIMIT_VARIABLE,
    POOL_BYTES_PER_LIST_BYTE,
    beside_bytes,
    driver_bytes,
    limit_bytes,
    limit_in_force,
    process_budget,
    process_budget_now,
)

# Pools are pinned in shared memory, which has its own setting.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_KERNEL = Path("/proc/sys/kernel/osrelease")
_GIB = 2**30
# Reported by users, regardless of the machine's memory.
_PINNED_BY_WSL = _GIB
# Measured: 1 to 2 GiB per second; with huge pages two to three times as much or more.
_SMALL_PAGES_PER_SECOND = 1.5 * _GIB
# A shorter wait needs no advice.
_SECONDS_TO_EXPLAIN = 10.0


def pins_small_pages(setting: Path = _HUGE_PAGES) -> bool:
    """Whether the kernel pins memory in small pages although it supports huge ones.

    Args:
        setting: The kernel's file of choices, with the current choice in brackets.
    """
    text = read_text(setting) or ""
    # With "advise" the allocating code, the GPU's driver, would have to ask for huge pages.
    return any(f"[{word}]" in text for word in ("never", "advise", "deny"))


def advice_on_pages(num_bytes: int, setting: Path = _HUGE_PAGES) -> str | None:
    """Returns advice to enable huge pages before a large amount of memory is pinned.

    Args:
        num_bytes: Bytes that are about to be pinned.
        setting: See `pins_small_pages`.

    Returns:
        The advice; None if the wait is short or huge pages are enabled.
    """
    seconds = num_bytes / _SMALL_PAGES_PER_SECOND
    if seconds < _SECONDS_TO_EXPLAIN or not pins_small_pages(setting):
        return None
    return (
        f"pinning {sized(num_bytes)} of host memory: the kernel finds the pages 4 KiB at a time, "
        f"for about {seconds:.0f} s. With huge pages it takes half of that or much less: before "
        f"the next run, `echo always | sudo tee {setting}`"
    )


class PinningRefusedError(MemoryError):
    """Raised if the system refuses to pin as much host memory as training needs.

    Attributes:
        num_pinned: Bytes that it has pinned for a device.
    """

    def __init__(self, message: str, num_pinned: int):
        """Makes the error with its message."""
        super().__init__(message)
        self.num_pinned = num_pinned


def pinnable_bytes(kernel: Path) -> int | None:
    """Returns the known limit of memory that this system can pin in total.

    Args:
        kernel: The kernel's file with its release, which names Windows' subsystem for Linux.

    Returns:
        Bytes; None if no limit is known.
    """
    return _PINNED_BY_WSL if "microsoft" in (read_text(kernel) or "").lower() else None


def warning_of_little(num_bytes: int, kernel: Path = _KERNEL) -> str | None:
    """Returns a warning if training pins more than `pinnable_bytes`; None otherwise."""
    limit = pinnable_bytes(kernel)
    if limit is None or num_bytes <= limit:
        return None
    return (
        f"training pins {sized(num_bytes)} of host memory or more, and Windows' subsystem for "
        f"Linux was seen to pin about {sized(limit)} in all: if the system refuses the rest, it "
        "rests in ordinary memory, and copies take longer. A Linux system of its own has no such "
        "limit"
    )


def refusal(num_pinned: int, num_refused: int, needed: int, kernel: Path = _KERNEL) -> str:
    """Returns an error message for a system that refuses to pin all the memory training needs.

    Args:
        num_pinned: Bytes that the system has pinned.
        num_refused: Bytes that the system then refused to pin.
        needed: Bytes that training needs.
        kernel: See `pinnable_bytes`.
    """
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if pinnable_bytes(kernel) is not None:
        why = "Windows' subsystem for Linux pins little, a Linux system of its own more."
    elif locked != resource.RLIM_INFINITY:
        why = (
            f"This process may lock {sized(locked)} (`ulimit -l`): if the driver obeys that, give "
            "the container more, as with `--ulimit memlock=-1`."
        )
    else:
        why = "A limit of the container, or what other programs have pinned, may be the reason."
    return (
        f"The system pinned {sized(num_pinned)} of host memory and refused {sized(num_refused)} "
        f"more; training needs {sized(needed)} pinned. {why} Or train what pins less: give a "
        f"smaller `host_budget`, with which less waits in the host, or store fewer bytes a "
        "parameter (Precision.compact(), an optimizer with less state such as adafactor or lion)."
    )


# ---- threads that prefault pages

# The kernel's number; Python's `mmap` has no name for it.
_MADV_POPULATE_WRITE = 23
# The kernel's name of shared memory without a file, as the driver maps it.
_SHARED = b"/dev/zero"
_SECONDS_BETWEEN_LOOKS = 0.01
# Pages of smaller mappings are found quickly.
_LEAST_BYTES = 2**28
# The largest huge page: no two threads ask for the same one.
_PAGE_BYTES = 2**21
_MOST_THREADS = 16

Mapping = tuple[int, int]
"""The first address of a mapping, and the address after its last."""


def num_threads() -> int:
    """Returns the number of threads that prefault pages; one core is left for the driver."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))


@contextmanager
def prefaulting(
    threads: int, num_mappings: int = 1, least_bytes: int = _LEAST_BYTES
) -> Iterator[None]:
    """A context in which threads prefault the pages of new mappings of shared memory.

    Its end waits for the threads, which is short if the memory is pinned by then.

    Args:
        threads: Number of threads.
        num_mappings: Number of mappings that are pinned at a time.
        least_bytes: Minimum size of a mapping to prefault.
    """
    parts: SimpleQueue[Mapping | None] = SimpleQueue()
    lister, ended = MappingLister(), threading.Event()
    known = set(lister.shared())

    def watch() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            for mapping in set(lister.shared()) - known:
                known.add(mapping)
                if mapping[1] - mapping[0] >= least_bytes:
                    for part in parts_of(mapping, max(1, threads // num_mappings)):
                        parts.put(part)

    # Daemons, so that a process can exit without waiting for them.
    targets = [watch, *[lambda: _prefault(parts)] * threads]
    started = [threading.Thread(target=run, name="pages found", daemon=True) for run in targets]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for _ in range(threads):
            parts.put(None)
        for thread in started:
            thread.join()


class MappingLister:
    """Lists this process's mappings; only the first listing may ask the kernel for memory."""

    def __init__(self, maps: Path = Path("/proc/self/maps")):
        """Remembers the kernel's file of mappings."""
        self._maps, self._text = maps, bytearray(2**20)

    def shared(self) -> list[Mapping]:
        """Returns the mappings of shared memory; none if the kernel doesn't list them."""
        end = self._read()
        found, at = [], self._text.find(_SHARED, 0, end)
        while at >= 0:
            line = self._text.rfind(b"\n", 0, at) + 1
            # "7f0000000000-7f1000000000 rw-s 00000000 00:01 42   /dev/zero (deleted)"
            first, last = self._text[line:at].split(maxsplit=1)[0].split(b"-")
            found.append((int(first, 16), int(last, 16)))
            at = self._text.find(_SHARED, at + 1, end)
        return found

    def _read(self) -> int:
        """Reads the file; returns its length."""
        end = 0
        try:
            with self._maps.open("rb", buffering=0) as file:
                while count := file.readinto(memoryview(self._text)[end:]):
                    end += count
                    if end == len(self._text):
                        self._text += bytes(end)
        except OSError:
            return 0
        return end


def parts_of(mapping: Mapping, number: int) -> list[Mapping]:
    """Divides a mapping into at most `number` parts that begin a whole number of pages apart."""
    first, end = mapping
    size = -(-(end - first) // number // _PAGE_BYTES) * _PAGE_BYTES
    return [(at, min(at + size, end)) for at in range(first, end, size)]


def _prefault(parts: "SimpleQueue[Mapping | None]") -> None:
    """Prefaults the pages of parts of mappings until the queue gives None."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    while part := parts.get():
        first, end = part
        # Errors don't matter: the driver waits for the pages that are left.
        advise(first, end - first, _MADV_POPULATE_WRITE)


# ---- pools

# Seconds between updates of the progress display.
_SECONDS_AT_A_TIME = 0.2
# Memory that must remain available after pinning, for compilation and the system.
_LEAST_LEFT = _GIB
# JAX's default limit of a pool, unless the variable sets another.
_DEFAULT_LIMIT = 64 * _GIB
# Number of significant bits in a fresh pool's size.
_PIECE_BITS = 9
# JAX's pool grows by regions of 2 MiB times a power of two.
_SMALLEST_REGION_BITS = 21


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """The size of one device's pool in bytes: a proven lower bound, and the likely size."""

    proven_bytes: int = 0
    likely_bytes: int = 0


# Pools belong to the process and don't report their sizes, so the sizes are recorded here.
_pools: dict[Any, _Pool] = {}


def free_device_bytes(placement: Placement) -> int | None:
    """Returns the memory that JAX can still allocate on each device.

    Args:
        placement: The devices; the fullest one counts.

    Returns:
        Bytes; None if JAX doesn't report it, as on a CPU.
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
    least_bytes: int | None = None,
) -> None:
    """Reserves pinned host memory for `num_bytes` more bytes, or explains why it can't.

    On a GPU, each device's pool takes its share from the system in few large pieces, because a pool
    that grows array by array can't be filled. Threads prefault the pages for the driver. Memory
    that is free in a pool is used first. On a CPU this does nothing.

    Args:
        placement: Placement of the slabs.
        num_bytes: Bytes that this process is about to allocate: its state, arrays in flight, and
            the gaps between them.
        array_bytes: Bytes of the largest array on one device. An array lies within one piece, and
            the end of a piece may stay empty.
        shown: Called before and during the wait with the bytes taken so far and their total.
        least_bytes: Bytes without gaps; None for `num_bytes`. Gaps are left out where they would
            make the pools of an earlier run grow, or take more than the available memory.

    Raises:
        MemoryError: If the machine has less memory, or JAX's pools have a lower limit.
    """
    if placement.platform == "cpu":
        return
    gc.collect()  # frees an earlier run's arrays that are held by a reference cycle
    devices, number = placement.local_devices, placement.processes.num_here
    in_use = _pinned_bytes_in_use(devices)
    pools = {d: _pools.get(d, _Pool()) for d in devices}

    def growth_for(num_bytes: int) -> int:
        share = -(-num_bytes // len(devices))
        return sum(_allocation(share, array_bytes, pools[d], in_use[d])[1] for d in devices)

    if least_bytes is not None:
        growth = growth_for(num_bytes)
        fits = number * (growth + _beside(growth, len(devices))) <= available_bytes()
        grows = any(pools[d].likely_bytes for d in devices) and growth > growth_for(least_bytes)
        if not all(placement.processes.gather("asking for gaps", fits and not grows)):
            num_bytes = least_bytes
    share = -(-num_bytes // len(devices))
    wanting = [d for d in devices if share > pools[d].proven_bytes - in_use[d]]
    # Every process takes part, even if it needs nothing, because its peers wait for it.
    if not any(placement.processes.gather("asking for host memory", bool(wanting))):
        return
    rooms = {d: _allocation(share, array_bytes, pools[d], in_use[d]) for d in wanting}
    growth = sum(more for _, more in rooms.values())
    # Every process checks before any takes memory, and the needs of one host's processes add up.
    beside = number * _beside(growth, len(devices))
    _check(number * num_bytes, number * growth, share, beside)
    placement.processes.gather("taking host memory")
    shown(0, growth)
    # JAX reports no progress, so the pages of this process are counted.
    before = resident_bytes()
    pages = prefaulting(num_threads(), max(1, len(wanting)))
    with pages, ThreadPoolExecutor(max(1, len(wanting))) as threads:
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


def _beside(growth: int, num_devices: int) -> int:
    """Bytes of JAX's free lists and the driver's records, which grow with the pools' pages."""
    return growth // POOL_BYTES_PER_LIST_BYTE + driver_bytes(growth, num_devices)


def _allocation(
    num_bytes: int, array_bytes: int, pool: _Pool, in_use: int
) -> tuple[list[int], int]:
    """Returns the sizes to allocate for `num_bytes` more bytes, and the growth of the pool."""
    limit = limit_in_force()
    if num_bytes <= pool.likely_bytes - in_use:
        return [num_bytes], 0
    if pool.likely_bytes:
        return [num_bytes], _region_bytes(num_bytes, pool.likely_bytes, limit)
    return _fresh(num_bytes, array_bytes, limit)


def process_bytes(
    num_bytes: int, array_bytes: int, total: int | None, num_devices: int = 1, list_bytes: int = 0
) -> int:
    """Returns the host memory of a process after `reserve` has grown fresh pools.

    It consists of the pools, including the unused ends of their pieces, and the process's memory
    beside them.

    Args:
        num_bytes: See `reserve`.
        array_bytes: See `reserve`.
        total: The machine's host memory; None if unknown.
        num_devices: Number of the process's devices.
        list_bytes: See `beside_bytes`.
    """
    pools = pool_bytes(num_bytes, array_bytes, total, num_devices, list_bytes)
    return pools + beside_bytes(pools, list_bytes)


def pool_bytes(
    num_bytes: int, array_bytes: int, total: int | None, num_devices: int, list_bytes: int = 0
) -> int:
    """Returns the pinned memory of all fresh pools that `reserve` makes; see `process_bytes`."""
    share = -(-num_bytes // num_devices)
    _, growth = _fresh(share, array_bytes, limit_bytes(total, num_devices, list_bytes))
    return num_devices * growth


def most_process_bytes(
    total: int,
    num_devices: int = 1,
    num_processes: int = 1,
    list_bytes: int = 0,
    unpinned_bytes: int = 0,
) -> int:
    """Returns the maximum of `process_bytes` on a machine with `total` bytes of host memory.

    Args:
        total: The machine's host memory.
        num_devices: Number of the process's devices.
        num_processes: Number of processes that share the memory.
        list_bytes: See `beside_bytes`.
        unpinned_bytes: Bytes of the process for batches and communication.
    """
    pools = num_devices * limit_bytes(total, num_devices, list_bytes)
    with_full_pools = pools + beside_bytes(pools, list_bytes) + unpinned_bytes
    return min(process_budget(total, num_devices) // num_processes, with_full_pools)


def usable_bytes(
    budget: int | None,
    total: int | None,
    num_devices: int = 1,
    num_processes: int = 1,
    list_bytes: int = 0,
    unpinned_bytes: int = 0,
) -> int | None:
    """Returns the host memory that a process may take: the lesser of its budget and its share.

    Args:
        budget: The user's limit for the process; None if there is none.
        total: The machine's host memory; None if unknown.
        num_devices: See `most_process_bytes`.
        num_processes: See `most_process_bytes`.
        list_bytes: See `beside_bytes`.
        unpinned_bytes: See `most_process_bytes`.

    Returns:
        Bytes; None if there is no budget and the machine's memory is unknown.
    """
    run = num_devices, num_processes, list_bytes, unpinned_bytes
    share = None if total is None else most_process_bytes(total, *run)
    return min((limit for limit in (budget, share) if limit is not None), default=None)


def available_process_bytes(num_processes: int = 1, num_devices: int = 1) -> int | None:
    """Returns the total host memory that this process may take, given the available memory.

    Args:
        num_processes: Number of processes on this machine that are about to take equal amounts.
        num_devices: Number of this process's devices.
    """
    total = total_bytes()
    if total is None:
        return None
    # The process can reuse its own memory, such as the pool of an earlier run.
    free = num_processes * resident_bytes() + available_bytes()
    return process_budget_now(total, free, num_devices) // num_processes


def _fresh(num_bytes: int, array_bytes: int, limit: int) -> tuple[list[int], int]:
    """Returns the sizes to allocate in a fresh pool, and the bytes that it takes from the system.

    For 40 GiB in arrays of at most 1 GiB these are pieces of 1, 8 and 32 GiB, 41 in total; one
    region would take 64 GiB.
    """
    growth = _region_bytes(num_bytes, 0, limit)
    exact = _pieces(num_bytes, array_bytes, limit)
    return (exact, sum(exact)) if exact and sum(exact) < growth else ([num_bytes], growth)


def _pieces(num_bytes: int, array_bytes: int, limit: int) -> list[int]:
    """Returns sizes that a fresh pool takes exactly: powers of two in ascending order.

    An array never spans two pieces, so a piece is counted as a whole number of the largest arrays,
    and its end may stay empty. The pieces have space for one more array than needed, because gaps
    are an estimate. The total is minimal to an eighth of a percent; the list is empty if the limit
    is too low.
    """
    granule = 1 << max(_SMALLEST_REGION_BITS, num_bytes.bit_length() - _PIECE_BITS)
    needed, unit = num_bytes + array_bytes, max(1, array_bytes)
    for total in range(-(-needed // granule) * granule, limit + 1, granule):
        pieces = [1 << bit for bit in range(total.bit_length()) if total >> bit & 1]
        if sum(piece // unit for piece in pieces) * unit >= needed:
            return pieces
    return []


def _region_bytes(num_bytes: int, pool_bytes: int, limit: int) -> int:
    """Returns the bytes that the pool takes from the system for one piece of `num_bytes`."""
    region = 1 << max(_SMALLEST_REGION_BITS, (num_bytes - 1).bit_length())
    # Regions double: the next one is as large as all earlier ones together, up to the limit.
    return max(num_bytes, min(max(region, pool_bytes), limit - pool_bytes))


def _check(num_bytes: int, growth: int, share: int, beside: int = 0) -> None:
    """Refuses a need that exceeds the available memory; each device needs `share` bytes."""
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
    """Allocates and frees pieces, so that a pool of `pool_bytes` takes them from the system."""
    held, taken = [], 0
    target = SingleDeviceSharding(device, memory_kind="pinned_host")
    # Compiled now, because a compilation would have to wait while the driver pins a piece.
    makers = [_maker(size, target) for size in pieces]
    try:
        # All pieces are held until the last is allocated; otherwise the pool would reuse a freed
        # piece and not grow.
        for size, make in zip(pieces, makers, strict=True):
            held.append(make())
            held[-1].block_until_ready()
            taken += size
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        if pool_bytes + taken + size <= min(_DEFAULT_LIMIT, limit_in_force()):
            raise PinningRefusedError(refusal(taken, size, num_bytes), taken) from error
        raise MemoryError(
            f"Training needs {sized(num_bytes)} in host memory, more than JAX's pinned-host pool "
            "may still take. Its limit is fixed when JAX's backend starts, to 64 GiB unless "
            f"{LIMIT_VARIABLE} says otherwise: import megatrain_jax before the first JAX "
            f"computation, or set {LIMIT_VARIABLE} to at least {-(-num_bytes // _GIB)} before "
            "Python starts, with room for other pinned arrays."
        ) from error
    finally:
        # Frees the arrays; the pool keeps the memory.
        for piece in held:
            piece.delete()


def _maker(num_bytes: int, target: SingleDeviceSharding) -> Callable[[], jax.Array]:
    """A compiled function that makes an array of so many bytes."""
    return unfilled(num_bytes, target).lower().compile()


def unfilled(shape: int | tuple[int, ...], target: Sharding, dtype: Any = jnp.uint8) -> Any:
    """A function that makes an array without spending time on filling it."""
    shape = (shape,) if isinstance(shape, int) else shape
    return jax.jit(partial(jax.lax.empty, shape, dtype), out_shardings=target)


def _pinned_bytes_in_use(devices: Sequence[Any]) -> dict[Any, int]:
    found = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        if array.sharding.memory_kind == "pinned_host":
            for shard in array.addressable_shards:
                if shard.device in found:
                    found[shard.device] += shard.data.nbytes
    return found
