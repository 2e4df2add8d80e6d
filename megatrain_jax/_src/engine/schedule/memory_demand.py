"""The minimum device memory that tasks need.

While a task computes, the device holds four sets of parts: the parts that the task uses, the parts
that the next task needs to begin, the parts that the last task left, and the resident parts.
Example: masters of 4 bytes, optimizer state of 8 and gradients of 4, while group 1 is updated in
its backward, without residents:

    left by BACKWARD 2, UPDATE 2   M2 O2 G2   16   their memory isn't free yet
    used by BACKWARD 1, UPDATE 1   M1 O1 G1   16
    needed by BACKWARD 0           M0          4   O0 may arrive while it computes
                                              36

With a limit below the largest of these sums, computation would have to wait for memory.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from megatrain_jax._src.common.keys import PASSING, Key, Kind
from megatrain_jax._src.common.remembering import IdentityKey, remembered
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.tasks import Task, TaskLists, Use
from megatrain_jax._src.engine.schedule.workload import Workload

Residuals = Mapping[int, int]
"""Bytes of residuals by stage."""
_NOTHING = Task(computations=(), uses=(), num_early=0, last_touch={})


def least_bytes(lists: TaskLists, resident: frozenset[Key]) -> int:
    """The minimum limit with which no task has to wait for the memory of the task before it."""
    return _demands_of(lists).least_bytes(resident)


def least_bytes_with_residuals(
    lists: TaskLists, resident: frozenset[Key], staying: Residuals, moving: Residuals
) -> int:
    """`least_bytes` of a step that also saves these residuals, but without its own lists.

    It is exact up to the parts that arrive while a backward computes, which residuals shorten.

    Args:
        lists: The tasks of the step without these residuals.
        resident: The resident parts.
        staying: Bytes of the residuals that stay on the device, by stage.
        moving: Bytes of the residuals that wait in the host, by stage.
    """
    return _demands_of(lists).with_residuals(resident, staying, moving)


def next_uses_that_fit(lists: TaskLists, limit: int, resident: frozenset[Key]) -> int:
    """The number of uses of the next step that fit while a step's last task computes."""
    return _demands_of(lists).next_uses_that_fit(limit, resident)


def _demands_of(lists: TaskLists) -> "_StepsDemands":
    # The demands of tasks don't depend on residents, and the search asks for many residents.
    key = IdentityKey(lists)
    return remembered("steps' demands", lambda: key, lambda: _StepsDemands(lists), 16)


class _StepsDemands:
    """The demands of all tasks of a workload's lists."""

    def __init__(self, lists: TaskLists):
        """Takes the lists of tasks."""
        self._workload, self._lists = lists.workload, lists
        self._endings: dict[int, tuple[_Demand, ...]] = {}
        self._known: dict[frozenset[Key], list[int]] = {}
        # A steady step follows a cold or a steady one, so its first tasks find the leftovers of
        # that step's last tasks. Flushes and evaluations have no residents.
        self._tasks = (*lists.cold, *lists.steady, *lists.steady[:2])
        self._always = [(0, len(self._tasks))]

    @functools.cached_property
    def _demands(self) -> list["_Demand"]:
        return _demands(self._workload, self._tasks)

    @functools.cached_property
    def _changes(self) -> dict[Key, list[tuple[int, int]]]:
        """For each part, tasks and their additional bytes if it is resident and exists."""
        found: dict[Key, list[tuple[int, int]]] = defaultdict(list)
        for number, demand in enumerate(self._demands):
            for key, change in demand.changes:
                if any(first <= number < stop for first, stop in self._tasks_with(key)):
                    found[key].append((number, change))
        return found

    @functools.cached_property
    def _existing(self) -> dict[Key, list[tuple[int, int]]]:
        """For each part that doesn't outlast a step, ranges of tasks that find it existing.

        Residuals that no stage saves count as saved, from the task after the stage's forward to its
        backward.
        """
        found: dict[Key, list[tuple[int, int]]] = defaultdict(list)
        begun: dict[Key, int] = {}
        for number, task in enumerate(self._tasks):
            for computation in task.computations:
                op, stage = computation.instruction.op, computation.instruction.stage
                saved = () if stage is None else (Key(Kind.RESIDUALS, stage),)
                made = saved if op is Op.FORWARD else ()
                for key in (*computation.creates, *made):
                    if key.kind in PASSING:
                        begun.setdefault(key, number + 1)
                for key in (*computation.kills, *(saved if op is Op.BACKWARD else ())):
                    if key in begun:
                        found[key].append((begun.pop(key), number + 1))
        for key, first in begun.items():
            found[key].append((first, len(self._tasks)))
        return found

    def _tasks_with(self, key: Key) -> list[tuple[int, int]]:
        """The ranges of tasks that find a part existing."""
        return self._existing[key] if key.kind in PASSING else self._always

    @functools.cached_property
    def _others(self) -> int:
        lists = self._lists.flush, self._lists.evaluation
        key = tuple(map(IdentityKey, lists))  # they are the same for all sets of residuals
        return remembered(
            "demand at rest",
            lambda: key,
            lambda: max(least_of(self._workload, tasks) for tasks in lists),
        )

    def least_bytes(self, resident: frozenset[Key]) -> int:
        """See the function `least_bytes`."""
        return max(self._others, *self._by_task(resident))

    def _by_task(self, resident: frozenset[Key]) -> list[int]:
        """The bytes of each task."""
        found = [demand.without_residents for demand in self._demands]
        more = [0] * (len(found) + 1)
        for key in resident:
            size = self._workload.size(key)
            for first, stop in self._tasks_with(key):
                more[first] += size
                more[stop] -= size
            for number, change in self._changes.get(key, ()):
                found[number] += change
        return list(map(add, found, accumulate(more)))

    def with_residuals(
        self, resident: frozenset[Key], staying: Residuals, moving: Residuals
    ) -> int:
        """See `least_bytes_with_residuals`."""
        # Asked for with many sets of residuals, but few of residents.
        if resident not in self._known:
            self._known[resident] = self._by_task(resident)
        more = [0] * (len(self._tasks) + 2)
        for residuals in (staying, moving):
            for stage, size in residuals.items():
                for first, stop in self._existing[Key(Kind.RESIDUALS, stage)]:
                    more[first - 1] += size
                    # Residuals that move leave their memory after the next task, and have it again
                    # from the task before their backward on.
                    if residuals is moving and stop < len(self._tasks):
                        more[min(first + 1, stop - 1)] -= size
                        more[stop - 2] += size
                    more[stop + 1] -= size
        return max(self._others, *map(add, self._known[resident], accumulate(more)))

    def next_uses_that_fit(self, limit: int, resident: frozenset[Key]) -> int:
        """See the function `next_uses_that_fit`."""
        cold, steady = self._lists.cold, self._lists.steady
        ends = len(cold) - 1, len(cold) + len(steady) - 1
        here = [
            {k for k in resident if any(a <= end < b for a, b in self._tasks_with(k))}
            for end in ends
        ]
        left = [limit - sum(map(self._workload.size, keys)) for keys in here]

        def fits(count: int) -> bool:
            rows = zip(self._ending(count), here, left, strict=True)
            return all(demand.num_bytes(keys) <= most for demand, keys, most in rows)

        # Early uses always fit, because `least_bytes` counts them and the limit is at least that.
        early = steady[0].num_early
        most = sum(len(task.uses) for task in steady) - early
        return early + most_that_fit(most, lambda count: fits(early + count))

    def _ending(self, count: int) -> tuple["_Demand", ...]:
        """The demand of the last task of a cold and of a steady step, before some next uses."""
        if count in self._endings:
            return self._endings[count]
        cold, steady = self._lists.cold, self._lists.steady
        uses = [use for task in steady for use in task.uses][:count]
        # If a step has a single task, the task before its last belongs to the previous step.
        ends = ((steady + step)[-2:] for step in (cold, steady))
        found = tuple(_demand(self._workload, before, last, uses) for before, last in ends)
        return self._endings.setdefault(count, found)


def least_of(workload: Workload, tasks: Sequence[Task]) -> int:
    """The minimum limit for one list of tasks alone, without residents, on an idle device."""
    return max((demand.without_residents for demand in _demands(workload, tasks)), default=0)


def _demands(workload: Workload, tasks: Sequence[Task]) -> list["_Demand"]:
    """The demand of each task of a list, with an idle device before and after."""
    padded = (_NOTHING, *tasks, _NOTHING)
    return [
        _demand(workload, before, task, after.uses[: after.num_early])
        for before, task, after in zip(padded, tasks, padded[2:], strict=False)
    ]


@dataclass(frozen=True, kw_only=True)
class _Demand:
    """The bytes while a task computes: its uses, the next uses, and leftovers.

    Attributes:
        without_residents: The bytes if no part is resident.
        changes: Bytes to add for each part that is resident, besides the resident's own bytes.
    """

    without_residents: int
    changes: tuple[tuple[Key, int], ...]

    def num_bytes(self, resident: set[Key]) -> int:
        """The bytes in addition to these residents."""
        return self.without_residents + sum(more for k, more in self.changes if k in resident)


def _demand(workload: Workload, before: Task, task: Task, next_uses: Sequence[Use]) -> _Demand:
    """The demand of a task after a task and before the next uses."""
    early = {use.key for use in task.uses[: task.num_early] if not use.creates}
    killed = {key for computation in before.computations for key in computation.kills}
    created = {use.key for use in before.uses if use.creates}
    needed = {use.key for use in before.uses if not use.creates}
    num_bytes, changes = 0, Counter[Key]()
    for use in before.uses:
        size = workload.size(use.key)
        # A deferred update consumes the old gradient, and its task creates a new one with the same
        # key, which is not consumed.
        consumed = use.key in killed and not (use.creates and use.key in needed)
        left = size if consumed or use.key not in early else 0
        # A resident gradient is counted with the residents, and the next one reuses its memory
        # after it is consumed. Only if a task also created the next one do two exist.
        left_of_resident = size if consumed and use.key in created else 0
        num_bytes += left
        changes[use.key] += left_of_resident - left
    uses = (*task.uses, *next_uses)
    for key in {use.key for use in uses if not use.creates}:
        num_bytes += workload.size(key)
        changes[key] -= workload.size(key)
    num_bytes += sum(workload.size(use.key) for use in uses if use.creates)
    found = tuple((key, change) for key, change in changes.items() if change)
    return _Demand(without_residents=num_bytes, changes=found)


def most_that_fit(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to a limit that fits, by bisection; 0 always fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
