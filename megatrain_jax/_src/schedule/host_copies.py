"""The copies of parts in host memory during steps, and the memory that they take with gaps.

XLA's allocator of pinned memory (`BFCAllocator`) gives an array the smallest free piece that is
large enough. It splits the piece only if at least half of it, or 128 MiB, would be left. So arrays
of several sizes that come and go leave gaps between them that later arrays don't fit into. Example,
in MiB: masters of 70, an activation of 130::

    masters are stored three times                     70 70 70
    the first two are replaced                         (140) 70 70 70
    an activation waits in the gap, which stays whole  130+10 70 70 70

With four GPUs and 17 GiB for each GPU's arrays, of which a step needed 15.4, a pool had no place
for 155 MB after five steps. It then grew by 16 GiB, which took ten seconds.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from megatrain_jax._src.common.keys import LASTING, Key
from megatrain_jax._src.schedule.instructions import WAITS, Instruction, Op
from megatrain_jax._src.schedule.tasks import Task
from megatrain_jax._src.schedule.workload import Workload

List = tuple[Sequence[Task], Sequence[Instruction]]
"""Tasks with their instructions."""

# XLA's constants, in bytes.
_ALIGNMENT, _LEAST_SPLIT = 256, 2**27
# The size of a pool without a limit.
_ENDLESS = 2**60
# Gaps were seen to grow for up to 15 steps of simulated runs. Steps of many waves are few, because
# each has as many instructions.
_STEADY_STEPS, _INSTRUCTIONS, _LEAST_STEPS = 16, 2**14, 2


class Change(NamedTuple):
    """A change of the copies in the host.

    Attributes:
        key: A part; None if a task has been computed.
        task: The task that offloads the part, makes its copy stale, or has been computed.
        is_new: Whether the host gets a copy, instead of losing it.
    """

    key: Key | None
    task: int
    is_new: bool = False


def host_changes(lists: Iterable[List]) -> Iterator[Change]:
    """The changes of the copies in the host, in the driver's order.

    Args:
        lists: Lists of tasks with their instructions, in the order of running.
    """
    before = 0  # tasks of earlier lists
    for tasks, instructions in lists:
        computations = (c for task in tasks for c in task.computations)
        for instruction in instructions:
            op, key, task = instruction.op, instruction.key, before + (instruction.task or 0)
            if op is Op.OFFLOAD:
                yield Change(key, task, is_new=True)
            elif op in WAITS:
                yield Change(None, task)
            # A fetched part's host copy is dropped when a computation consumes or changes the part.
            elif key is None:
                computation = next(computations)  # all lists have the tasks' order
                for gone in (*computation.kills, *computation.dirties):
                    yield Change(gone, task)
        before += len(tasks)


def bytes_with_gaps(
    workload: Workload, cold: List, steady: List, arrays: Callable[[Key], Sequence[int]]
) -> int:
    """The pinned memory of one device that never has to grow, by a simulation of XLA's allocator.

    Args:
        workload: The workload of the steps.
        cold: A training step that starts at rest.
        steady: A training step that follows a training step.
        arrays: The bytes of the arrays of a part.

    Returns:
        Bytes, at least those of the state at rest.
    """
    pool, held = _EndlessPool(), dict[Key, list[int]]()
    leaving: list[tuple[int, list[int]]] = []  # arrays that are read until a task has been computed

    def put(key: Key) -> None:
        held[key] = [pool.allocate(size) for size in arrays(key)]

    for group in range(len(workload.sizes)):
        for kind in LASTING:
            put(Key(kind, group))
    steps = min(_STEADY_STEPS, max(_LEAST_STEPS, _INSTRUCTIONS // len(steady[1])))
    for key, task, is_new in host_changes((cold, *repeat(steady, steps))):
        if key is None:
            for _, places in (row for row in leaving if row[0] <= task):
                for place in places:
                    pool.free(place)
            leaving = [row for row in leaving if row[0] > task]
        else:
            leaving.append((task, held.pop(key, [])))
            if is_new:
                put(key)
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
