"""The timeline of a step: the clock's estimate of when each copy and computation happens.

This runs a schedule's instructions on a clock once more, and records when each lane is busy. In the
example of `clock.py`:

    copies in    0 –  4  M0       4 –  8  M1      16 – 20  M2
    compute      4 – 10  FORWARD 0      10 – 16  FORWARD 1
    copies out  10 – 14  M0
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.schedule.clock import Clock
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.schedule import Schedule
from megatrain_jax._src.engine.schedule.tasks import Computation, Task, build_task_lists
from megatrain_jax._src.engine.schedule.workload import Workload

Lane = Literal["copies in", "compute", "copies out", "disk reads", "disk writes"]
LANES: tuple[Lane, ...] = ("copies in", "compute", "copies out")
DISK_LANES: tuple[Lane, ...] = ("disk reads", "disk writes")
"""The further lanes of a step with state on disks."""
# The number of steady steps to run; the last one is shown. By then, steps no longer differ.
_STEADY_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Span:
    """A time span of one copy, computation or exchange in its lane.

    Attributes:
        lane: The lane.
        what: The operation of a computation, the kind of part that a copy moves, or "exchange" for
            collectives over the lane's link.
        of: The number of the stage or group; None if it has none.
        start: Seconds from the beginning of the step.
        end: Seconds from the beginning of the step.
    """

    lane: Lane
    what: Op | Kind | Literal["exchange"]
    of: int | None
    start: float
    end: float


def timeline(workload: Workload, schedule: Schedule) -> tuple[Span, ...]:
    """The spans of a steady step, from the end of the previous step's computation.

    Copies that the previous step started early for this step begin before 0.

    Args:
        workload: The workload that the schedule was found for.
        schedule: The schedule.
    """
    spans, _, began = _steady(workload, schedule)
    return tuple(replace(s, start=s.start - began, end=s.end - began) for s in spans)


def memory(workload: Workload, schedule: Schedule) -> tuple[tuple[float, int], ...]:
    """The device memory of a steady step: seconds from its beginning, and bytes from then on.

    The bytes come from the schedule's ledger; it counts a part from its instruction on. An
    instruction's time is the moment when the device has computed all earlier ones.

    Args:
        workload: See `timeline`.
        schedule: See `timeline`.
    """
    _, times, began = _steady(workload, schedule)
    return tuple((t - began, n) for t, n in zip(times, schedule.ledger["steady"], strict=True))


def _steady(workload: Workload, schedule: Schedule) -> tuple[list[Span], list[float], float]:
    """Spans of a steady step, the device's time before each instruction, and the step's start."""
    lists = build_task_lists(replace(workload, kept=schedule.kept))
    clock = Clock(costs=workload.costs, on_disk=workload.on_disk)
    spans, times = replay(clock, workload, schedule.cold, lists.cold)
    began = 0.0
    for _ in range(_STEADY_STEPS):
        began = clock.device
        clock = clock.next_step(schedule.num_tasks)
        spans, times = replay(clock, workload, schedule.steady, lists.steady)
    return spans, times, began


def replay(
    clock: Clock, workload: Workload, instructions: Sequence[Instruction], tasks: Iterable[Task]
) -> tuple[list[Span], list[float]]:
    """Runs one list of instructions on a clock.

    Returns:
        The spans of the lanes, and the time when the device is done before each instruction.
    """
    # Instructions have no costs; the computations do, and come in the same order.
    computations = ((c, n) for n, task in enumerate(tasks) for c in task.computations)
    spans: list[Span] = []
    times: list[float] = []
    for instruction in instructions:
        times.append(clock.device)
        op, key, task = instruction.op, instruction.key, instruction.task
        if op is Op.WAIT and task is not None:
            clock.wait(task)
        elif op is Op.LAND and task is not None and key is not None:
            clock.land(task, key)
        elif op in (Op.FETCH, Op.OFFLOAD) and task is not None and key is not None:
            spans.extend(_copied(clock, workload, op, key, task))
        elif op is not Op.RELEASE:
            computation, number = next(computations)
            assert computation.instruction == instruction
            spans.extend(_computed(clock, computation, number))
    return spans, times


def _copied(clock: Clock, workload: Workload, op: Op, key: Key, task: int) -> Iterator[Span]:
    """Advances the clock by a copy, and yields its spans."""
    size, disk = workload.size(key), clock.costs.disk if key in clock.on_disk else None
    if op is Op.FETCH:
        free = clock.inward
        clock.fetch(key, size)
        end = clock.arrived[key]
    else:
        free = clock.outward
        clock.offload(key, size, task)
        end = clock.outward
    # Like `Clock._carry`: the lane must be free, and the device done with its current work.
    start = max(free, clock.driver, clock.device)
    if disk is not None and op is Op.FETCH:
        start = max(start, end - size * clock.costs.link.inward)  # after its read
    lane = LANES[0] if op is Op.FETCH else LANES[2]
    yield Span(lane=lane, what=key.kind, of=key.owner, start=start, end=end)
    if disk is not None:
        over, each = (clock.read, disk.read) if op is Op.FETCH else (clock.written, disk.written)
        own = DISK_LANES[0 if op is Op.FETCH else 1]
        yield Span(lane=own, what=key.kind, of=key.owner, start=over - size * each, end=over)


def _computed(clock: Clock, computation: Computation, task: int) -> Iterator[Span]:
    """Advances the clock by a computation, and yields its spans."""
    row, seconds = computation.instruction, computation.seconds
    clock.compute(computation.touches, seconds, task, computation.seconds_on_link)
    end, of = clock.device, row.group if row.stage is None else row.stage
    yield Span(lane="compute", what=row.op, of=of, start=end - seconds, end=end)
    if computation.seconds_on_link:
        length = computation.seconds_on_link
        for lane, over in zip((LANES[0], LANES[2]), (clock.inward, clock.outward), strict=True):
            yield Span(lane=lane, what="exchange", of=None, start=over - length, end=over)
