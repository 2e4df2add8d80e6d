"""The host memory that steps take beside the state at rest: for parts that wait, and in flight.

A worked example, gradients of 2 bytes beside masters and optimizer state of 12 in five groups, all
of which move, while updates are deferred and the device has room for two gradients::

    gradients 0 to 2 wait from their REDUCE to their UPDATE in the next step      6
    a first part's old arrays are read while the new ones of three groups arrive  36
    all that passes                                                              42
"""

from collections.abc import Iterable, Sequence

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.schedule.instructions import Instruction, Op
from megatrain_jax._src.schedule.tasks import Task
from megatrain_jax._src.schedule.workload import Workload

# The driver waits for a task before it dispatches the second one after it.
_TASKS_IN_FLIGHT = 3


def waiting_bytes(
    workload: Workload, lists: Iterable[tuple[Sequence[Task], Sequence[Instruction]]]
) -> int:
    """The most bytes of gradients, activations and residuals that wait in the host at one time.

    Args:
        workload: The workload.
        lists: Tasks that are run one list after another, each list with its instructions.
    """
    waiting: dict[Key, int] = {}
    now = most = 0
    for tasks, instructions in lists:
        computations = {c.instruction: c for task in tasks for c in task.computations}
        for instruction in instructions:
            op, key = instruction.op, instruction.key
            if op is Op.OFFLOAD and key is not None and key.kind not in LASTING:
                now += workload.size(key) - waiting.get(key, 0)
                waiting[key] = workload.size(key)
                most = max(most, now)
            # A copy that was fetched again is dropped by whoever consumes or changes the part.
            elif key is None and (computation := computations.get(instruction)):
                for gone in (*computation.kills, *computation.dirties):
                    now -= waiting.pop(gone, 0)
    return most


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
