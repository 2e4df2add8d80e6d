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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatrain_jax._src.common.keys import PASSING, Key
from megatrain_jax._src.common.remembering import IdentityKey, remembered
from megatrain_jax._src.engine.schedule.tasks import Task, TaskLists, Use
from megatrain_jax._src.engine.schedule.workload import Workload

_NOTHING = Task(computations=(), uses=(), num_early=0, last_touch={})


def least_bytes(lists: TaskLists, resident: frozenset[Key]) -> int:
    """The minimum limit with which no task has to wait for the memory of the task before it."""
    return _demands_of(lists).least_bytes(resident)


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
        # A steady step follows a cold or a steady one, so its first tasks find the leftovers of
        # that step's last tasks. Flushes and evaluations have no residents.
        self._tasks = (*lists.cold, *lists.steady, *lists.steady[:2])

    @functools.cached_property
    def _demands(self) -> list["_Demand"]:
        return _demands(self._workload, self._tasks)

    @functools.cached_property
    def _others(self) -> int:
        lists = self._lists.flush, self._lists.evaluation
        return max(least_of(self._workload, tasks) for tasks in lists)

    def least_bytes(self, resident: frozenset[Key]) -> int:
        """See the function `least_bytes`."""
        here = _residents_at(self._workload, self._tasks, resident)
        pairs = zip(self._demands, here, strict=True)
        return max(self._others, *(demand.num_bytes(residents) for demand, residents in pairs))

    def next_uses_that_fit(self, limit: int, resident: frozenset[Key]) -> int:
        """See the function `next_uses_that_fit`."""
        steps = self._lists.cold, self._lists.steady
        here = [[*_residents_at(self._workload, step, resident)][-1] for step in steps]

        def fits(count: int) -> bool:
            pairs = zip(self._ending(count), here, strict=True)
            return all(demand.num_bytes(residents) <= limit for demand, residents in pairs)

        # Early uses always fit, because `least_bytes` counts them and the limit is at least that.
        early, steady = self._lists.steady[0].num_early, self._lists.steady
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


@dataclass(kw_only=True)
class _Residents:
    """The residents that exist at one task.

    Attributes:
        lasting: Residents that always exist; shared by all tasks.
        alive: Residents that exist only in a part of a step; changes with the task.
        num_bytes: Bytes of all residents.
    """

    lasting: frozenset[Key]
    alive: set[Key]
    num_bytes: int

    def __contains__(self, key: Key) -> bool:
        return key in self.lasting or key in self.alive


def _residents_at(
    workload: Workload, tasks: Sequence[Task], resident: frozenset[Key]
) -> Iterator[_Residents]:
    """The residents that exist when each task begins; one object that changes between tasks."""
    # A copy per task would take quadratic time in the number of layers, and the search calls this
    # many times.
    passing = {key for key in resident if key.kind in PASSING}
    lasting = resident - passing
    here = _Residents(lasting=lasting, alive=set(), num_bytes=sum(map(workload.size, lasting)))
    for number, task in enumerate(tasks):
        yield here
        if number == len(tasks) - 1:
            return
        for computation in task.computations if passing else ():
            new = passing.intersection(computation.creates) - here.alive
            here.alive.update(new)
            old = here.alive.intersection(computation.kills)
            here.alive.difference_update(old)
            here.num_bytes += sum(map(workload.size, new)) - sum(map(workload.size, old))


@dataclass(frozen=True, kw_only=True)
class _Demand:
    """The bytes while a task computes: its uses, the next uses, and leftovers.

    Attributes:
        without_residents: The bytes if no part is resident.
        changes: Bytes to add for each part that is resident, besides the resident's own bytes.
    """

    without_residents: int
    changes: tuple[tuple[Key, int], ...]

    def num_bytes(self, resident: _Residents) -> int:
        """The bytes in addition to these residents, and the residents' own bytes."""
        changes = (change for key, change in self.changes if key in resident)
        return self.without_residents + resident.num_bytes + sum(changes)


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
