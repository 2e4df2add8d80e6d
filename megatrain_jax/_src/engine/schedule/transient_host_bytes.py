"""The host memory of steps in addition to the state at rest: for parts that wait or are in flight.

Example: five groups have gradients of 2 bytes, and masters and optimizer state of 12 bytes. All of
them move, updates are deferred, and the device has memory for two gradients::

    gradients 0 to 2 wait from their REDUCE to their UPDATE in the next step      6
    old arrays of three groups are read while their new ones arrive              36
    total                                                                        42
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.engine.schedule.host_copies import host_changes
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.tasks import Computation, Task, TaskLists
from megatrain_jax._src.engine.schedule.workload import Workload

# The driver waits for a task before it dispatches the task two later.
_TASKS_IN_FLIGHT = 3


@dataclass(frozen=True, kw_only=True)
class TransientHostBytes:
    """The host bytes in addition to the state at rest, by part, at their peak.

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
) -> TransientHostBytes:
    """Finds the peak bytes of gradients, activations and residuals that wait in the host.

    Args:
        workload: The workload.
        lists: Lists of tasks with their instructions, in the order of running.

    Returns:
        The bytes by part at the peak, with `in_flight` 0.
    """
    waiting: dict[Key, int] = {}
    now = most = 0
    by_kind: Counter[Kind] = Counter()
    found = by_kind.copy()
    for key, _, is_new in chain.from_iterable(host_changes(*row) for row in lists):
        if key is None or key.kind in LASTING or key in workload.on_disk:
            continue
        size = workload.size(key) if is_new else 0
        more = size - waiting.get(key, 0)
        now, waiting[key], by_kind[key.kind] = now + more, size, by_kind[key.kind] + more
        if now > most:
            most, found = now, by_kind.copy()
    return TransientHostBytes(
        gradients=found[Kind.GRADIENT],
        activations=found[Kind.ACTIVATION],
        residuals=found[Kind.RESIDUALS],
    )


def in_flight_bytes(workload: Workload, steady: Sequence[Instruction]) -> int:
    """The maximum host bytes of old arrays that exist beside their new versions."""
    # An offload writes new arrays while a group's old ones may still be read. Both exist for as
    # many groups as there are tasks in flight; the largest groups are assumed.
    keys = {r.key for r in steady if r.op is Op.OFFLOAD}
    groups = {key.owner for key in keys if key is not None and key.kind in LASTING}
    state = (Kind.MASTERS, Kind.OPTIMIZER_STATE)
    moving = {g: sum(_size_in_memory(workload, Key(k, g)) for k in state) for g in groups}
    # Between waves, the device reads an old sum of gradients while the next one arrives.
    if workload.waves > 1:
        for key in keys:
            if key is not None and key.kind is Kind.GRADIENT:
                moving[key.owner] = max(moving.get(key.owner, 0), _size_in_memory(workload, key))
    return sum(sorted(moving.values(), reverse=True)[:_TASKS_IN_FLIGHT])


def _size_in_memory(workload: Workload, key: Key) -> int:
    """Bytes of a part that rests in memory; `Workload.resting_bytes` counts those on disks."""
    return 0 if key in workload.on_disk else workload.size(key)


def least_transient_host_bytes(lists: TaskLists, limit: int) -> int:
    """Returns a lower bound of the host bytes, beside the state at rest, of any schedule.

    It takes one pass over the tasks; finding a schedule takes thousands. Example: eight blocks have
    activations of 4 bytes, and masters and optimizer state of 6 bytes; the limit is 20 bytes::

        before the first backward 8 x 4 bytes are alive, and 20 - 6 fit     18
        3 of 8 groups can stay on the device, and 3 more are in flight      18
        lower bound                                                         36

    Args:
        lists: The tasks. Saving residuals only adds bytes, so the tasks of a step without residuals
            give a bound for all.
        limit: Maximum bytes on the device.
    """
    size, alive, waiting = lists.workload.size, set[Key](), 0
    on_disk = lists.workload.on_disk
    steps = [c for task in (*lists.cold, *lists.steady) for c in task.computations]
    for computation in steps:
        # Parts on disks take none, beside their slots.
        alive.update(
            key for key in computation.creates if key.kind not in LASTING and key not in on_disk
        )
        used = sum(size(key) for key in computation.touches if key.kind in LASTING)
        # Each live part is on the device, beside the state in use, or it waits in the host.
        waiting = max(waiting, sum(map(size, alive)) + used - limit)
        alive.difference_update(computation.kills)
    return waiting + _least_in_flight(lists.workload, steps, limit)


def _least_in_flight(workload: Workload, steps: Iterable[Computation], limit: int) -> int:
    """Returns the minimum of `in_flight_bytes` over all schedules.

    A group that never moves is on the device at the end of a step, so all such groups together fit
    within the limit. Example: with groups of 8, 8, 2, 2, 2 and 2 bytes and a limit of 10, one of 8
    and one of 2 stay, and 8 + 2 + 2 bytes of the remaining groups are in flight.
    """
    updated = {key.owner for c in steps for key in c.dirties if key.kind in LASTING}
    found = (sum(_size_in_memory(workload, Key(k, group)) for k in LASTING) for group in updated)
    # Groups of 0 bytes are added, because fewer than three groups may move.
    sizes = [*sorted(found, reverse=True), *(0,) * _TASKS_IN_FLIGHT]
    before, least = list(accumulate(sizes, initial=0)), sum(sizes)
    # The three largest moving groups are `third` and two groups before it.
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
