"""What moves when in one training step, as plain data.

From the tasks of a step, their bytes and a budget this derives an ordered list of instructions that
the engine only has to obey, so tests and plans can read a step unexecuted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megatrain_jax._src.schedule.clock import Clock
from megatrain_jax._src.schedule.residency import Residency
from megatrain_jax._src.schedule.tasks import (
    LASTING,
    PASSING,
    Instruction,
    Op,
    PartKey,
    Task,
    TaskLists,
    Use,
    Workload,
    build_task_lists,
    gradient_tasks,
)

_NUM_CANDIDATES = 8
_NUM_KEPT_CANDIDATES = 6
# How far apart two estimates of a lap have to be to tell which lap is faster.
_UNCERTAINTY = 0.03
# The first lists only bring the clock into its rhythm.
_MIN_LAPS = 3


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The instructions of every kind of lap, and the device bytes they need.

    The first step runs `cold`, each later one `steady`. After either, `flush` brings everything
    to rest: pending updates are applied, host copies are current, the device is empty, and the
    next step is cold again. `evaluation` runs at rest and ends at rest.

    Attributes:
        cold: A training step that starts at rest.
        steady: A training step that follows a training step.
        flush: What to do after a training step to be at rest.
        evaluation: Every stage's FORWARD, from rest to rest.
        num_tasks: Items of a cold as of a steady lap, for resolving negative task numbers.
        ledger: For "cold", "steady", "flush" and "evaluation" the bytes on the device after each
            instruction. What is dropped or consumed counts until the WAIT or LAND for its task.
            Steady laps and flushes may hold less, offload what is unchanged, and wait for tasks
            that left nothing: their instructions serve after every lap.
        peak_bytes: The largest entry of the ledgers.
        resident: Parts that stay on the device between laps, or from when they are made to their
            last use.
        kept: Stages whose residuals are kept from forward to backward.
        seconds: Estimate of a steady lap's time.
        smallest_bytes: The least budget with which computing need not wait for room.
        all_resident_bytes: From here on a steady lap without residuals moves nothing.
    """

    cold: tuple[Instruction, ...]
    steady: tuple[Instruction, ...]
    flush: tuple[Instruction, ...]
    evaluation: tuple[Instruction, ...]
    num_tasks: int
    ledger: Mapping[str, tuple[int, ...]]
    peak_bytes: int
    resident: frozenset[PartKey]
    kept: frozenset[int]
    seconds: float
    smallest_bytes: int
    all_resident_bytes: int


def find_schedule(workload: Workload, budget: int | None) -> Schedule:
    """Orders a training step so that what it keeps never exceeds a budget on the device.

    Args:
        workload: What to compute on which bytes; which residuals are kept is decided here.
        budget: Bytes that parameters, optimizer state, gradients, residuals and the values between
            stages may occupy on the device. None asks for the smallest schedule.

    Returns:
        The schedule: of several with more or fewer residents and residuals the one estimated to be
        the fastest, or of those that are about as fast the one that moves least. The order of
        computing instructions never depends on the budget.

    Raises:
        ValueError: The budget is below the smallest schedule's peak.
    """
    lists = build_task_lists(workload)
    smallest = least_bytes(lists, frozenset())
    budget = smallest if budget is None else budget
    if budget < smallest:
        raise ValueError(
            f"device_budget={budget} bytes is too small for this model, optimizer and precision; "
            f"the smallest that works is {smallest} bytes ({smallest / 2**30:.3g} GiB)"
        )
    everything = frozenset(chain.from_iterable(_resident_units(lists)))
    bounds = {"smallest_bytes": smallest, "all_resident_bytes": least_bytes(lists, everything)}
    candidates = [_with_residents(lists, budget, bounds)]
    for kept in _kept_choices(workload, budget) if budget > smallest else ():
        candidates.append(_with_residents(build_task_lists(kept), budget, bounds))
    return _best(workload, candidates)


def _with_residents(lists: TaskLists, budget: int, bounds: Mapping[str, int]) -> Schedule:
    """The fastest schedule of some with more or fewer parts that stay on the device."""
    everything = _everything(lists)
    if budget >= (needed := least_bytes(lists, everything)):
        return _lay_down(lists, needed, everything, bounds)
    always, units = _residuals(lists), _resident_units(lists)

    def residents(count: int) -> frozenset[PartKey]:
        return always.union(*units[:count])

    most = _most(len(units), lambda count: least_bytes(lists, residents(count)) <= budget)
    counts = {round(most * share / _NUM_CANDIDATES) for share in range(_NUM_CANDIDATES + 1)}
    candidates = [_lay_down(lists, budget, residents(count), bounds) for count in sorted(counts)]
    return _best(lists.workload, candidates)


def _best(workload: Workload, candidates: Sequence[Schedule]) -> Schedule:
    """The fastest; of those that are as fast by all that can be foretold, what moves least."""
    enough = (1 + _UNCERTAINTY) * min(schedule.seconds for schedule in candidates)
    good = [schedule for schedule in candidates if schedule.seconds <= enough]
    return min(good, key=lambda schedule: (_moved(workload, schedule), schedule.seconds))


def _moved(workload: Workload, schedule: Schedule) -> int:
    """Bytes that a steady lap copies, both ways."""
    copies = (r for r in schedule.steady if r.op in (Op.FETCH, Op.OFFLOAD))
    return sum(workload.size((str(r.part), r.group or 0)) for r in copies)


def _kept_choices(workload: Workload, budget: int) -> Iterator[Workload]:
    """Workloads that keep some stages' residuals: few, as many as fit, as many as all state leaves.

    Those that save the most time for their bytes come first, and of equal ones the last stages,
    whose residuals are needed for the shortest time.
    """
    seconds = workload.costs.recompute
    stages = [stage for stage, size in enumerate(workload.residuals) if size]
    stages.sort(key=lambda s: (-seconds[s] / workload.residuals[s], -s))

    def keeping(count: int) -> Workload:
        return replace(workload, kept=frozenset(stages[:count]))

    def fits(count: int, resident: Callable[[TaskLists], frozenset[PartKey]]) -> bool:
        lists = build_task_lists(keeping(count))
        return least_bytes(lists, resident(lists)) <= budget

    most = _most(len(stages), lambda count: fits(count, _residuals))
    shares = range(1, _NUM_KEPT_CANDIDATES + 1)
    counts = {round(most * share / _NUM_KEPT_CANDIDATES) for share in shares}
    counts.add(_most(most, lambda count: fits(count, _everything)))
    for count in sorted(counts - {0}):
        yield keeping(count)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to a limit that fits, if all smaller ones do; 0 always does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def least_bytes(lists: TaskLists, resident: frozenset[PartKey]) -> int:
    """The least limit with which a task need only wait for the room of tasks two before it."""
    nothing: frozenset[PartKey] = frozenset()
    lines = (
        ((*lists.cold, *lists.steady, *lists.steady), resident),
        (lists.flush, nothing),
        (lists.evaluation, nothing),
    )
    return max(
        _least_at(lists.workload, before, task, after.uses[: after.num_early], here)
        for line, stays in lines
        for (before, task, after), here in zip(
            _neighbours(line), _residents_at(lists.workload, line, stays), strict=True
        )
    )


_NOTHING = Task(steps=(), uses=(), num_early=0, last_step={})


def _neighbours(tasks: Sequence[Task]) -> Iterator[tuple[Task, Task, Task]]:
    padded = (_NOTHING, *tasks, _NOTHING)
    return zip(padded, tasks, padded[2:], strict=False)


@dataclass(kw_only=True)
class _Residents:
    """The residents that exist at one task.

    Attributes:
        lasting: Those that always do; shared by all tasks.
        alive: Those that do only in a part of a lap; changes with the task.
        num_bytes: Bytes of all.
    """

    lasting: frozenset[PartKey]
    alive: set[PartKey]
    num_bytes: int

    def __contains__(self, key: PartKey) -> bool:
        return key in self.lasting or key in self.alive


def _residents_at(
    workload: Workload, tasks: Sequence[Task], resident: frozenset[PartKey]
) -> Iterator[_Residents]:
    """For each task, the residents that exist when it begins; one object, good until the next."""
    passing = {key for key in resident if key[0] in PASSING}
    lasting = resident - passing
    here = _Residents(lasting=lasting, alive=set(), num_bytes=sum(map(workload.size, lasting)))
    for number, task in enumerate(tasks):
        yield here
        if number == len(tasks) - 1:
            return
        for step in task.steps:
            new = passing.intersection(step.creates) - here.alive
            here.alive.update(new)
            old = here.alive.intersection(step.kills)
            here.alive.difference_update(old)
            here.num_bytes += sum(map(workload.size, new)) - sum(map(workload.size, old))


def _least_at(
    workload: Workload, before: Task, task: Task, next_uses: Sequence[Use], resident: _Residents
) -> int:
    """Bytes while a task computes: what it uses, the next uses, and what the last task left."""
    early = {use.key for use in task.uses[: task.num_early] if not use.creates}
    killed = {key for step in before.steps for key in step.kills}
    created = {use.key for use in before.uses if use.creates}
    needed = {use.key for use in before.uses if not use.creates}
    gone = 0
    for use in before.uses:
        consumed = use.key in killed and not (use.creates and use.key in needed)
        kept = use.key in early or use.key in resident
        # The room of a resident gradient is its own until there is the next one.
        if not kept or (consumed and (use.key not in resident or use.key in created)):
            gone += workload.size(use.key)
    uses = (*task.uses, *next_uses)
    here = {use.key for use in uses if not use.creates and use.key not in resident}
    new = [use.key for use in uses if use.creates]
    return gone + resident.num_bytes + sum(map(workload.size, (*here, *new)))


def _residuals(lists: TaskLists) -> frozenset[PartKey]:
    return frozenset(("R", stage) for stage in lists.workload.kept)


def _everything(lists: TaskLists) -> frozenset[PartKey]:
    return _residuals(lists).union(*_resident_units(lists))


def _resident_units(lists: TaskLists) -> list[tuple[PartKey, ...]]:
    """What can be made resident, in order of preference; a unit stays as a whole or not at all."""
    workload = lists.workload
    # A gradient that one task makes and consumes needs no lasting room.
    lasting = {use.key for task in lists.steady for use in task.uses if not use.creates}
    stages = (workload.stages[0], workload.stages[-1], *workload.stages, range(len(workload.sizes)))
    groups = dict.fromkeys(group for stage in stages for group in stage)
    state = "PO" if workload.deferred else "POG"
    units = [tuple((part, group) for part in state) for group in groups]
    if workload.deferred:
        # A waiting gradient saves a round trip for few bytes; those made last are used first.
        produced = [group for _, complete in gradient_tasks(workload) for group in complete]
        units = [*((("G", group),) for group in reversed(produced)), *units]
    # A value takes one trip out and one in, less for its bytes than what lasts.
    units += [(("A", i),) for i in workload.values]
    sized = (tuple(key for key in unit if key in lasting) for unit in units)
    return [unit for unit in sized if unit]


def _lay_down(
    lists: TaskLists, limit: int, resident: frozenset[PartKey], bounds: Mapping[str, int]
) -> Schedule:
    """The schedule of one limit and one set of resident parts."""
    num_tasks = len(lists.steady)
    boundary = _boundary(lists, limit, resident)

    def start(resident: frozenset[PartKey]) -> Residency:
        clock = Clock(costs=lists.workload.costs)
        device = Residency(workload=lists.workload, limit=limit, resident=resident, clock=clock)
        for key in resident:
            if key[0] in LASTING:
                device.reserve(key)
        return device

    cold = start(resident)
    cold.run(lists.cold, lists.steady, boundary)
    # What a lap leaves behind may depend on the lap before. The instructions have to serve after
    # any, so laps are repeated until one that starts from the most that any left ends with no more.
    begin, covered, num_laps = cold.next_lap(num_tasks, boundary), False, 0
    while not covered or num_laps < _MIN_LAPS:
        steady = begin.next_lap(0, boundary)
        steady.run(lists.steady, lists.steady, boundary)
        end = steady.next_lap(num_tasks, boundary)
        seconds = steady.clock.device - begin.clock.device
        start_of_lap = begin
        begin = begin.joined(end)
        covered, num_laps = begin.holds_no_more_than(start_of_lap), num_laps + 1
    flush = begin
    flush.run_to_rest(lists.flush)
    evaluation = start(frozenset())
    evaluation.run_to_rest(lists.evaluation)
    runs = {"cold": cold, "steady": steady, "flush": flush, "evaluation": evaluation}
    return Schedule(
        cold=tuple(cold.instructions),
        steady=tuple(steady.instructions),
        flush=tuple(flush.instructions),
        evaluation=tuple(evaluation.instructions),
        num_tasks=num_tasks,
        ledger={name: tuple(run.ledger) for name, run in runs.items()},
        peak_bytes=max((size for run in runs.values() for size in run.ledger), default=0),
        resident=resident,
        kept=lists.workload.kept,
        seconds=seconds,
        **bounds,
    )


def _boundary(lists: TaskLists, limit: int, resident: frozenset[PartKey]) -> int:
    """How many uses of the next lap can have their room while a lap's last task computes."""
    uses = [use for task in lists.steady for use in task.uses]
    ends = []
    for lap in (lists.cold, lists.steady):
        *_, here = _residents_at(lists.workload, lap, resident)
        ends.append(((lists.steady + lap)[-2], lap[-1], here))

    def fits(count: int) -> bool:
        return all(
            _least_at(lists.workload, before, last, uses[:count], here) <= limit
            for before, last, here in ends
        )

    early = lists.steady[0].num_early
    return early + _most(len(uses) - early, lambda count: fits(early + count))
