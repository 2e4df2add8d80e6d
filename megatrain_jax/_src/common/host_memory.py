"""Host memory that this process may use, from its limits and the kernel's memory table.

Example: a container on a machine with 125 GiB, of which the kernel reports 100 as available::

    memory.max 64 GiB, memory.current 40 GiB, inactive_file 10 GiB of that
    total_bytes()        64 GiB
    available_bytes()    34 GiB: 64 - (40 - 10), less than 100

After `ulimit -v 20971520` (20 GiB of addresses) in a process that has taken 3 GiB, the total is
20 GiB, with 17 GiB available.
"""

import ctypes
import gc
import os
import resource
import socket
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 control groups write "no limit" as the largest multiple of a page below 2**63.
_UNLIMITED_BYTES = 2**60

# Limits of a process's own memory, and the kernel's name for the bytes that count towards each.
_OWN_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))


@dataclass(frozen=True, kw_only=True)
class KernelFiles:
    """The kernel's files about memory.

    Attributes:
        root: The folder where control groups are mounted.
        membership: Names of this process's groups.
        meminfo: The memory table.
        status: Figures of this process, with the bytes that count towards its own limits.
        boot: The random id of the machine's last start.
        namespace: A link to this process's namespace of control groups, which containers have of
            their own.
    """

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")
    meminfo: Path = Path("/proc/meminfo")
    status: Path = Path("/proc/self/status")
    boot: Path = Path("/proc/sys/kernel/random/boot_id")
    namespace: Path = Path("/proc/self/ns/cgroup")


_SYSTEM = KernelFiles()


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """One limit of this process's memory, and the unreclaimable bytes counted in it."""

    limit_bytes: int
    used_bytes: int


def cgroup_memory(files: KernelFiles) -> tuple[MemoryLimit, ...]:
    """Finds the finite memory limits of this process's control groups, version 1 and 2.

    Returns:
        One entry per group with a limit, from the process's own group up to the root; all of them
        apply. Inside a container the named path may not be visible; then only the root is found,
        which is the container's own group.
    """
    found = []
    for line in (read_text(files.membership) or "").splitlines():
        _, _, rest = line.partition(":")
        # A line is `number:controllers:path`; version 2 has one, without controllers.
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, names = files.root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = files.root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(parts), -1, -1):
            group = _group_memory(base.joinpath(*parts[:depth]), *names)
            found += [] if group is None else [group]
    return tuple(found)


def process_limits(files: KernelFiles = _SYSTEM) -> tuple[MemoryLimit, ...]:
    """Finds the finite limits of this process alone, set by `ulimit -v` and `ulimit -d`."""
    found = []
    for limit, counted in _OWN_LIMITS:
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY:
            used = _kernel_bytes(files.status, counted) or 0
            found.append(MemoryLimit(limit_bytes=allowed, used_bytes=used))
    return tuple(found)


def total_bytes(files: KernelFiles = _SYSTEM) -> int | None:
    """Returns the total host memory that this process may use, in bytes.

    A control group's limit counts even if the kernel reports much less memory: virtual machines
    with memory on demand start with little of it.

    Returns:
        The smallest limit, or the machine's memory if that is less; `None` if both are unknown.
    """
    limits = [group.limit_bytes for group in cgroup_memory(files)]
    total = _kernel_bytes(files.meminfo, "MemTotal")
    if total is not None and not (limits and _grows(total, min(limits))):
        limits.append(total)
    limits += [limit.limit_bytes for limit in process_limits(files)]
    return min(limits, default=None)


def available_bytes(files: KernelFiles = _SYSTEM) -> int:
    """Returns the host memory that can still be taken, in bytes.

    Returns:
        The minimum of three numbers: the bytes left in each limited control group, where
        reclaimable file cache counts as free; the bytes left under the process's own limits; and
        the kernel's available memory, unless it grows on demand. `sys.maxsize` if all are unknown.
    """
    groups = cgroup_memory(files)
    left = [limit.limit_bytes - limit.used_bytes for limit in (*groups, *process_limits(files))]
    limit = min((group.limit_bytes for group in groups), default=0)
    available = _kernel_bytes(files.meminfo, "MemAvailable")
    if available is not None and not _grows(_kernel_bytes(files.meminfo, "MemTotal"), limit):
        left.append(available)
    return max(0, min(left, default=sys.maxsize))


def memory_owner(files: KernelFiles = _SYSTEM) -> str:
    """Identifies what this process's memory belongs to: equal in processes that share it.

    Names of machines may be equal, and those of containers on one machine differ.

    Returns:
        The machine; of a container with a limit of its own, also the container.
    """
    machine = (read_text(files.boot) or socket.gethostname()).strip()
    limits = [group.limit_bytes for group in cgroup_memory(files)]
    total = _kernel_bytes(files.meminfo, "MemTotal")
    if not limits or total is not None and min(limits) >= total:
        return machine
    try:
        return f"{machine} {os.readlink(files.namespace)}"
    except OSError:
        return machine


def resident_bytes() -> int:
    """Returns the resident memory of this process, including pinned pages; 0 if unknown."""
    # In pages; the second number is resident.
    text = read_text(Path("/proc/self/statm"))
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") if text else 0


def return_freed_memory() -> None:
    """Returns memory that was freed to the system, where the C library can.

    The compiler's threads leave gaps that the library would keep.
    """
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def read_text(path: Path) -> str | None:
    """Returns the text of one of the kernel's files; None if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return None


def _grows(total: int | None, limit: int) -> bool:
    # A machine sized to its limit reports a little less, because the kernel keeps some memory; a
    # machine that reports far less has not grown to its full size yet.
    return total is None or total < 0.9 * limit


def _group_memory(folder: Path, limit: str, usage: str, cache: str) -> MemoryLimit | None:
    limit_text, usage_text = read_text(folder / limit), read_text(folder / usage)
    if limit_text is None or usage_text is None or limit_text.strip() == "max":
        return None
    if int(limit_text) >= _UNLIMITED_BYTES:
        return None
    stat = dict(line.split()[:2] for line in (read_text(folder / "memory.stat") or "").splitlines())
    # Inactive file cache counts as used, but the kernel reclaims it before it refuses memory.
    reclaimable = int(stat.get(cache, 0))
    return MemoryLimit(
        limit_bytes=int(limit_text), used_bytes=max(0, int(usage_text) - reclaimable)
    )


def _kernel_bytes(table: Path, key: str) -> int | None:
    """A number from one of the kernel's tables with lines of `key: number kB`, in bytes."""
    for line in (read_text(table) or "").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None
