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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatrain_jax._src.common.keys import PASSING, Key
from megatrain_jax._src.schedule.tasks import Task, TaskLists, Use
from megatrain_jax._src.schedule.workload import Workload

_NOTHING = Task(computations=(), uses=(), num_early=0, last_touch={})


def least_bytes(lists: TaskLists, resident: frozenset[Key]) -> int:
    """The minimum limit with which no task has to wait for the memory of the task before it."""
    # A steady step follows a cold or a steady one, so its first tasks find the leftovers of that
    # step's last tasks. Flushes and evaluations have no residents.
    steps = (*lists.cold, *lists.steady, *lists.steady)
    return max(
        least_of(lists.workload, steps, resident),
        least_of(lists.workload, lists.flush),
        least_of(lists.workload, lists.evaluation),
    )


def least_of(
    workload: Workload, tasks: Sequence[Task], resident: frozenset[Key] = frozenset()
) -> int:
    """The minimum limit for one list of tasks alone, with an idle device before and after."""
    return max(
        (
            _least_at(workload, before, task, after.uses[: after.num_early], here)
            for (before, task, after), here in zip(
                _neighbours(tasks), _residents_at(workload, tasks, resident), strict=True
            )
        ),
        default=0,
    )


def _neighbours(tasks: Sequence[Task]) -> Iterator[tuple[Task, Task, Task]]:
    padded = (_NOTHING, *tasks, _NOTHING)
    return zip(padded, tasks, padded[2:], strict=False)


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
        for computation in task.computations:
            new = passing.intersection(computation.creates) - here.alive
            here.alive.update(new)
            old = here.alive.intersection(computation.kills)
            here.alive.difference_update(old)
            here.num_bytes += sum(map(workload.size, new)) - sum(map(workload.size, old))


def _least_at(
    workload: Workload, before: Task, task: Task, next_uses: Sequence[Use], resident: _Residents
) -> int:
    """Bytes while a task computes: its uses, the next uses, leftovers and residents."""
    early = {use.key for use in task.uses[: task.num_early] if not use.creates}
    killed = {key for computation in before.computations for key in computation.kills}
    created = {use.key for use in before.uses if use.creates}
    needed = {use.key for use in before.uses if not use.creates}
    gone = 0
    for use in before.uses:
        # A deferred update consumes the old gradient, and its task creates a new one with the same
        # key, which is not consumed.
        consumed = use.key in killed and not (use.creates and use.key in needed)
        kept = use.key in early or use.key in resident
        # A resident gradient is counted with the residents, and the next one reuses its memory
        # after it is consumed. Only if a task also created the next one do two exist.
        if not kept or (consumed and (use.key not in resident or use.key in created)):
            gone += workload.size(use.key)
    uses = (*task.uses, *next_uses)
    here = {use.key for use in uses if not use.creates and use.key not in resident}
    new = [use.key for use in uses if use.creates]
    return gone + resident.num_bytes + sum(map(workload.size, (*here, *new)))


def next_uses_that_fit(lists: TaskLists, limit: int, resident: frozenset[Key]) -> int:
    """The number of uses of the next step that fit while a step's last task computes."""
    uses = [use for task in lists.steady for use in task.uses]
    ends = []
    for step in (lists.cold, lists.steady):
        # If a step has a single task, the task before its last belongs to the previous step.
        *_, here = _residents_at(lists.workload, step, resident)
        ends.append(((lists.steady + step)[-2], step[-1], here))

    def fits(count: int) -> bool:
        return all(
            _least_at(lists.workload, before, last, uses[:count], here) <= limit
            for before, last, here in ends
        )

    # Early uses always fit, because `least_bytes` counts them and the limit is at least that.
    early = lists.steady[0].num_early
    return early + most_that_fit(len(uses) - early, lambda count: fits(early + count))


def most_that_fit(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to a limit that fits, by bisection; 0 always fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
