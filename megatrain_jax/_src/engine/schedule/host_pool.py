"""The pool of pinned memory that holds one device's copies, with the gaps between them.

XLA's allocator of pinned memory (`BFCAllocator`) puts an array into the smallest free piece that is
large enough. It splits the piece only if at least half of it, or 128 MiB, would be left. So arrays
of several sizes that come and go leave gaps that later arrays don't fit into. Example, in MiB, with
gaps in parentheses::

    three arrays of masters                                     70 70 70
    two are freed, after their new versions have been written   (140) 70 70 70
    an activation gets the whole gap, and 10 MiB are lost       130+10 70 70 70

On four GPUs, arrays took 14 of the 17 GiB of each pool. No gap was large enough for 155 MB, so each
pool grew by 16 GiB, in ten seconds.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.schedule.host_copies import host_changes
from megatrain_jax._src.engine.schedule.schedule import Schedule
from megatrain_jax._src.engine.schedule.tasks import TaskLists

# XLA's constants, in bytes.
_ALIGNMENT, _LEAST_SPLIT = 256, 2**27
# The size of a pool without a limit.
_ENDLESS = 2**60
# A run trains some steps, comes to rest, evaluates or saves, and trains on. Gaps hardly grow after
# eight such cycles of five steps. Steps of many waves have many instructions, so fewer of them are
# simulated.
_CYCLES, _STEADY_STEPS, _INSTRUCTIONS = 8, 4, 2**15


def bytes_with_gaps(
    lists: TaskLists, schedule: Schedule, arrays: Callable[[Key], Sequence[int]]
) -> int:
    """The size of one device's pool in a simulated run on XLA's allocator.

    Args:
        lists: The tasks of the schedule.
        schedule: The schedule, with all its waves.
        arrays: The bytes of the arrays of a part.

    Returns:
        Bytes, at least as many as the state at rest takes.
    """
    pool, held, on_disk = _EndlessPool(), dict[Key, list[int]](), lists.workload.on_disk
    for key in {number: key for key, number in on_disk.items()}.values():
        for size in lists.workload.slots(key) * [*arrays(key)]:
            pool.allocate(size)
    leaving: list[tuple[int, int]] = []  # arrays that are read until a task has been computed

    def put(key: Key) -> None:
        held[key] = [pool.allocate(size) for size in arrays(key) if size]

    def free_until(task: float) -> None:
        for last, start in leaving:
            if last <= task:
                pool.free(start)
        leaving[:] = [row for row in leaving if row[0] > task]

    def run(name: str) -> None:
        tasks = getattr(lists, name)
        for key, task, is_new in host_changes(tasks, getattr(schedule, name)):
            if key is None:
                free_until(task)
                continue
            leaving.extend((task, start) for start in held.pop(key, ()))
            if is_new and key not in on_disk:
                put(key)
        if name in ("flush", "evaluation"):  # everything comes to rest
            free_until(math.inf)
        # Tasks of an earlier list have negative numbers.
        leaving[:] = [(task - len(tasks), start) for task, start in leaving]

    for group in range(len(lists.workload.sizes)):
        for kind in (Kind.MASTERS, Kind.OPTIMIZER_STATE):
            if Key(kind, group) not in on_disk:
                put(Key(kind, group))
    steady = min(_STEADY_STEPS, max(1, _INSTRUCTIONS // len(schedule.steady)))
    cycle = ("cold", *["steady"] * steady, "flush", "evaluation")
    length = sum(len(getattr(schedule, name)) for name in cycle)
    for _ in range(min(_CYCLES, max(1, _INSTRUCTIONS // length))):
        for name in cycle:
            run(name)
    return pool.highest


class _EndlessPool:
    """Memory without a limit in which arrays are placed as by XLA's `BFCAllocator`.

    Attributes:
        highest: The largest end of an array so far.
    """

    def __init__(self):
        self.highest = 0
        self._taken: dict[int, int] = {}  # sizes of pieces with an array, by their start
        # Sizes and starts of free pieces, and the same by start and by end.
        self._free = [(_ENDLESS, 0)]
        self._by_start, self._by_end = {0: _ENDLESS}, {_ENDLESS: 0}

    def allocate(self, num_bytes: int) -> int:
        """Returns the start of a new array."""
        needed = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        size, start = self._free[bisect_left(self._free, (needed, 0))]
        self._remove(size, start)
        left = size - needed
        if left >= needed or left >= _LEAST_SPLIT:
            self._add(left, start + needed)
            size = needed
        self._taken[start] = size
        self.highest = max(self.highest, start + size)
        return start

    def free(self, start: int) -> None:
        """Frees an array, and joins the free pieces on both sides of it."""
        size = self._taken.pop(start)
        if (after := self._by_start.get(start + size)) is not None:
            self._remove(after, start + size)
            size += after
        if (before := self._by_end.get(start)) is not None:
            self._remove(start - before, before)
            start, size = before, size + start - before
        self._add(size, start)

    def _add(self, size: int, start: int) -> None:
        insort(self._free, (size, start))
        self._by_start[start], self._by_end[start + size] = size, start

    def _remove(self, size: int, start: int) -> None:
        del self._free[bisect_left(self._free, (size, start))]
        del self._by_start[start], self._by_end[start + size]
