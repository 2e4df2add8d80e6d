"""The pinned-host pool: how much host memory there is, and taking it in one piece.

JAX serves `pinned_host` on GPUs from a pool whose limit must be set before its backend starts,
and which fragments when it grows on demand; a process that takes too much is killed without a
message. So the limit is set on import, and the need is checked before anything is allocated.
"""

import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.state.placement import Placement

LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

# What the interpreter, CUDA and XLA were seen to need beside the pool on a one-GPU machine with
# CUDA's memory pool; 3.8 GiB more with JAX's own allocator, and its kernel 2.5 GiB more.
_PROCESS_BYTES = 29 * 2**30 // 10
_HEAD_ROOM_BYTES = 10 * 2**30

_GIB = 2**30
# Version 1 control groups write "no limit" as the largest multiple of a page below 2**63.
_UNLIMITED_BYTES = 2**60
# The ends of a fresh pool's pieces that may stay empty, in largest arrays.
_SPARE_ARRAYS = 3
# JAX's pool grows by regions of 2 MiB times a power of two.
_SMALLEST_REGION_BITS = 21

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class CgroupMemory:
    """One control group's memory: its limit, and what of it can't be reclaimed, in bytes."""

    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Pool:
    """The size of one platform's pool, in bytes: what was shown to fit, and what likely fits."""

    proven_bytes: int = 0
    likely_bytes: int = 0


# The pool belongs to the process and can't be asked for its size, so its size is kept here.
_pools: dict[str, _Pool] = {}


def cgroup_memory(
    root: Path = _CGROUP_ROOT, membership: Path = _CGROUP_MEMBERSHIP
) -> tuple[CgroupMemory, ...]:
    """Finds the finite memory limits of this process's control groups, version 1 and 2.

    Args:
        root: Where the control groups are mounted.
        membership: The file that names this process's groups.

    Returns:
        One entry for each group that has a limit, from the process's own up to the root, as
        each of them binds. Inside a container the named path may not be visible; then only
        the root, which is the container's own group, is found.
    """
    found = []
    for line in (_read(membership) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(parts), -1, -1):
            group = _group_memory(base.joinpath(*parts[:depth]), *names)
            found += [] if group is None else [group]
    return tuple(found)


def free_device_bytes(placement: Placement) -> int | None:
    """Returns the memory of each device that JAX can still get.

    Args:
        placement: The devices; of several, the fullest one counts.

    Returns:
        Bytes; None where JAX doesn't tell, as on a CPU.
    """
    free = []
    for device in placement.devices:
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")  # 0 where the allocator takes memory as it needs it
        if not limit:
            return None
        free.append(limit - stats["bytes_in_use"])
    return min(free)


def total_bytes(
    *,
    root: Path = _CGROUP_ROOT,
    membership: Path = _CGROUP_MEMBERSHIP,
    meminfo: Path = _MEMINFO,
) -> int | None:
    """Returns the host memory this process may use in all, in bytes.

    A control group's limit counts even where the kernel reports much less than that: virtual
    machines that get their memory on demand start with little of it.

    Args:
        root: Where the control groups are mounted.
        membership: The file that names this process's groups.
        meminfo: The kernel's memory table.

    Returns:
        The tightest limit or the machine's memory; `None` where the system tells neither.
    """
    limits = [group.limit_bytes for group in cgroup_memory(root, membership)]
    total = _meminfo_bytes(meminfo, "MemTotal")
    if not limits:
        return total
    return min(limits) if _grows(total, min(limits)) else min([*limits, total or 0])


def available_bytes(
    *,
    root: Path = _CGROUP_ROOT,
    membership: Path = _CGROUP_MEMBERSHIP,
    meminfo: Path = _MEMINFO,
) -> int:
    """Returns the host memory that can still be taken, in bytes.

    Args:
        root: Where the control groups are mounted.
        membership: The file that names this process's groups.
        meminfo: The kernel's memory table.

    Returns:
        The least of what each control group with a limit has left, not counting file cache
        that the kernel gives back, and, unless the machine's memory grows on demand, of what
        the kernel calls available; `sys.maxsize` where the system tells neither.
    """
    groups = cgroup_memory(root, membership)
    left = [group.limit_bytes - group.used_bytes for group in groups]
    limit = min((group.limit_bytes for group in groups), default=0)
    available = _meminfo_bytes(meminfo, "MemAvailable")
    if available is not None and not _grows(_meminfo_bytes(meminfo, "MemTotal"), limit):
        left.append(available)
    return max(0, min(left, default=sys.maxsize))


def set_limit() -> None:
    """Lets JAX's pinned-host pool grow to this machine's memory less head room.

    Has an effect only before JAX's backend starts, and leaves a limit the user set alone.
    """
    if (total := total_bytes()) is not None:
        os.environ.setdefault(LIMIT_VARIABLE, str(_limit_bytes(total) // _GIB))


def reserve(placement: Placement, num_bytes: int, array_bytes: int = 0) -> None:
    """Makes sure that pinned host memory for `num_bytes` more is there, or says why not.

    On a GPU the pool takes the memory from the system here, in few large pieces, as one that
    grows array by array can't be filled; finding the pages takes up to a second per GiB. Room
    that earlier arrays have left in the pool is used first. On a CPU nothing is taken.

    Args:
        placement: Placement of the slabs that are to rest there.
        num_bytes: Bytes that the caller is about to allocate there: its state and the arrays it has
            in flight.
        array_bytes: The largest of these arrays: one lies in one piece, whose end may stay empty.

    Raises:
        MemoryError: If the machine, or the limit of JAX's pool, has less.
    """
    platform = placement.platform
    if platform == "cpu":
        _check(num_bytes, num_bytes)
        return
    gc.collect()  # an earlier run's arrays may only be waiting for their cycle to be found
    pool, in_use = _pools.get(platform, _Pool()), _pinned_bytes_in_use()
    if num_bytes <= pool.proven_bytes - in_use:
        return
    growth, pieces, limit = 0, [num_bytes], _limit_bytes(total_bytes())
    if num_bytes > pool.likely_bytes - in_use:
        if pool.likely_bytes:
            growth = _region_bytes(num_bytes, pool.likely_bytes, limit)
        else:
            pieces, growth = _fresh(num_bytes, array_bytes, limit)
        _check(num_bytes, growth)
    _take(placement, pieces, num_bytes)
    proven, likely = in_use + num_bytes, pool.likely_bytes + growth
    _pools[platform] = _Pool(proven_bytes=proven, likely_bytes=likely)


def process_bytes(num_bytes: int, array_bytes: int, total: int | None) -> int:
    """Returns the host memory a process takes once `reserve` has made room in a fresh pool.

    That is the pool, with the ends of its pieces that stay empty, and what the process needs
    beside it.

    Args:
        num_bytes: See `reserve`.
        array_bytes: See `reserve`.
        total: The machine's host memory; None if unknown.
    """
    _, growth = _fresh(num_bytes, array_bytes, _limit_bytes(total))
    return growth + _PROCESS_BYTES


def _fresh(num_bytes: int, array_bytes: int, limit: int) -> tuple[list[int], int]:
    """Returns the sizes to take from a fresh pool, and the bytes it takes from the system for them.

    No array lies across two pieces, so these need spare room, and one region may be smaller.
    For 40 GiB in arrays of at most 1 GiB these are pieces of 4, 8 and 32 GiB, 44 in all; one
    region would take 64 GiB.
    """
    growth = _region_bytes(num_bytes, 0, limit)
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


def _limit_bytes(total: int | None) -> int:
    """Returns the bytes that `set_limit` allows the pool on a machine with so much memory."""
    return sys.maxsize if total is None else max(1, (total - _HEAD_ROOM_BYTES) // _GIB) * _GIB


def _region_bytes(num_bytes: int, pool_bytes: int, limit: int) -> int:
    """Returns the bytes that the pool will take from the system for one piece of this size."""
    region = 1 << max(_SMALLEST_REGION_BITS, (num_bytes - 1).bit_length())
    # Regions double: the next is as large as all before it together, but stays in the limit.
    return max(num_bytes, min(max(region, pool_bytes), limit - pool_bytes))


def _check(num_bytes: int, growth: int) -> None:
    available = available_bytes()
    if growth <= available:
        return
    need = f"Training needs {sized(num_bytes)} in host memory"
    if num_bytes > available:
        raise MemoryError(
            f"{need}, {sized(available)} available. Nothing was allocated. Use a smaller model or "
            "an optimizer with less state (adafactor, lion, mu_dtype=bfloat16), end other "
            "programs, drop earlier trainers, or give this process or container more memory."
        )
    raise MemoryError(
        f"{need}, and JAX's pool would take {sized(growth)} to hold that, as it grows by powers "
        f"of two up to its limit; {sized(available)} available. Nothing was allocated. Set "
        f"{LIMIT_VARIABLE}={-(-num_bytes // _GIB)} before Python starts, or end other programs."
    )


def _take(placement: Placement, pieces: list[int], num_bytes: int) -> None:
    held = []
    # All devices of a process share one pool.
    target = SingleDeviceSharding(placement.devices[0], memory_kind="pinned_host")
    try:
        for size in pieces:
            # Pages of zeros that were never written cost no memory of their own.
            held.append(jax.device_put(np.zeros(size, np.uint8), target))
            held[-1].block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"Training needs {sized(num_bytes)} in host memory, more than JAX's pinned-host pool "
            "may still take. Its limit is fixed when JAX's backend starts, to 64 GiB unless "
            f"{LIMIT_VARIABLE} says otherwise: import megatrain_jax before the first JAX "
            f"computation, or set {LIMIT_VARIABLE} to at least {-(-num_bytes // _GIB)} before "
            "Python starts, with room for other pinned arrays."
        ) from error
    # Only the arrays go: the pool keeps what it has taken from the system.
    for piece in held:
        piece.delete()


def _pinned_bytes_in_use() -> int:
    return sum(
        array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind == "pinned_host"
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _grows(total: int | None, limit: int) -> bool:
    # A machine made to fit its limit reports a little less than it, for the kernel keeps some;
    # one that reports far less is not at its full size yet.
    return total is None or total < 0.9 * limit


def _group_memory(folder: Path, limit: str, usage: str, cache: str) -> CgroupMemory | None:
    limit_text, usage_text = _read(folder / limit), _read(folder / usage)
    if limit_text is None or usage_text is None or limit_text.strip() == "max":
        return None
    if int(limit_text) >= _UNLIMITED_BYTES:
        return None
    stat = dict(line.split()[:2] for line in (_read(folder / "memory.stat") or "").splitlines())
    reclaimable = int(stat.get(cache, 0))
    return CgroupMemory(
        limit_bytes=int(limit_text), used_bytes=max(0, int(usage_text) - reclaimable)
    )


def _meminfo_bytes(meminfo: Path, key: str) -> int | None:
    for line in (_read(meminfo) or "").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None
