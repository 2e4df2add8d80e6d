"""The host memory that steps take beside the state at rest: for parts that wait, and in flight.

A worked example, gradients of 2 bytes beside masters and optimizer state of 12 in five groups, all
of which move, while updates are deferred and the device has room for two gradients::

    gradients 0 to 2 wait from their REDUCE to their UPDATE in the next step      6
    a first part's old arrays are read while the new ones of three groups arrive  36
    all that passes                                                              42
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.schedule.instructions import Instruction, Op
from megatrain_jax._src.schedule.tasks import Computation, Task, TaskLists
from megatrain_jax._src.schedule.workload import Workload

# The driver waits for a task before it dispatches the second one after it.
_TASKS_IN_FLIGHT = 3


@dataclass(frozen=True, kw_only=True)
class Passing:
    """The host bytes beside the state at rest, by part, when the most wait there.

    Attributes:
        gradients: Gradients that wait for their update.
        activations: Activations that wait for their last reader.
        residuals: Residuals that wait for their stage's backward.
        in_flight: Old arrays that are being read while new ones are written.
    """

    gradients: int
    activations: int
    residuals: int
    in_flight: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.gradients + self.activations + self.residuals + self.in_flight


def find_waiting(
    workload: Workload, lists: Iterable[tuple[Sequence[Task], Sequence[Instruction]]]
) -> Passing:
    """Finds the most bytes of gradients, activations and residuals that wait in the host at once.

    Args:
        workload: The workload.
        lists: Tasks that are run one list after another, each list with its instructions.

    Returns:
        The bytes by part at the time of the most; nothing is in flight.
    """
    waiting: dict[Key, int] = {}
    now = most = 0
    by_kind: Counter[Kind] = Counter()
    found = by_kind.copy()
    for tasks, instructions in lists:
        computations = {c.instruction: c for task in tasks for c in task.computations}
        for instruction in instructions:
            op, key = instruction.op, instruction.key
            if op is Op.OFFLOAD and key is not None and key.kind not in LASTING:
                more = workload.size(key) - waiting.get(key, 0)
                now, waiting[key] = now + more, workload.size(key)
                by_kind[key.kind] += more
                if now > most:
                    most, found = now, by_kind.copy()
            # A copy that was fetched again is dropped by whoever consumes or changes the part.
            elif key is None and (computation := computations.get(instruction)):
                for gone in (*computation.kills, *computation.dirties):
                    less = waiting.pop(gone, 0)
                    now, by_kind[gone.kind] = now - less, by_kind[gone.kind] - less
    return Passing(
        gradients=found[Kind.GRADIENT],
        activations=found[Kind.ACTIVATION],
        residuals=found[Kind.RESIDUALS],
    )


def in_flight_bytes(workload: Workload, steady: Sequence[Instruction]) -> int:
    """The most host bytes that are both old copies being read and new ones being written."""
    # An update writes new arrays while old ones may still be on their way to the device: for as
    # many groups as tasks are in flight, taken to be the largest, both exist.
    keys = {r.key for r in steady if r.op is Op.OFFLOAD}
    groups = {key.owner for key in keys if key is not None and key.kind in LASTING}
    state = (Kind.MASTERS, Kind.OPTIMIZER_STATE)
    moving = {g: sum(workload.size(Key(k, g)) for k in state) for g in groups}
    # Between waves, a sum of gradients is read by the device while the next one is on its way here.
    if workload.waves > 1:
        for key in keys:
            if key is not None and key.kind is Kind.GRADIENT:
                moving[key.owner] = max(moving.get(key.owner, 0), workload.size(key))
    return sum(sorted(moving.values(), reverse=True)[:_TASKS_IN_FLIGHT])


def least_passing_bytes(lists: TaskLists, limit: int) -> int:
    """Returns host bytes beside the state at rest that no schedule of some tasks can do without.

    It takes one pass over the tasks, where to find a schedule takes thousands. Eight blocks that
    hand on 4 bytes each, masters and optimizer state of 6 in all, and a limit of 20 bytes::

        before the first backward 8 x 4 bytes are alive, 20 - 6 have room   18
        of eight groups 3 can stay, and 3 of the others are in flight       18
        no schedule takes less than                                         36

    Args:
        lists: The tasks. Stages that keep residuals have more alive, so those of a step that keeps
            none serve for all.
        limit: Bytes that may be on the device.
    """
    size, alive, waiting = lists.workload.size, set[Key](), 0
    steps = [c for task in (*lists.cold, *lists.steady) for c in task.computations]
    for computation in steps:
        alive.update(key for key in computation.creates if key.kind not in LASTING)
        used = sum(size(key) for key in computation.touches if key.kind in LASTING)
        # Each is on the device beside what is computed on, or it waits.
        waiting = max(waiting, sum(map(size, alive)) + used - limit)
        alive.difference_update(computation.kills)
    return waiting + _least_in_flight(lists.workload, steps, limit)


def _least_in_flight(workload: Workload, steps: Iterable[Computation], limit: int) -> int:
    """Returns the least that `in_flight_bytes` can be of any schedule.

    A group that never moves is on the device at the end of a step, as its update has made it new:
    those that never move fit the limit together. Of groups of 8, 8, 2, 2, 2 and 2 bytes and a limit
    of 10, one of 8 and one of 2 stay, and 8 + 2 + 2 bytes of others are in flight.
    """
    updated = {key.owner for c in steps for key in c.dirties if key.kind in LASTING}
    found = (sum(workload.size(Key(kind, group)) for kind in LASTING) for group in updated)
    # With none of 0 bytes, fewer than three may move.
    sizes = [*sorted(found, reverse=True), *(0,) * _TASKS_IN_FLIGHT]
    before, least = list(accumulate(sizes, initial=0)), sum(sizes)
    # The largest that move are two of the first so many groups, and the next one.
    for third in range(2, len(sizes)):
        too_much, first, second = before[third] - limit, 0, third - 1
        while first < second:
            moving = sizes[first] + sizes[second]
            if moving < too_much:
                second -= 1
                continue
            least = min(least, moving + sizes[third])
            first += 1
    return least
