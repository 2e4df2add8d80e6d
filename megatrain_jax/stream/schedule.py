"""What moves when in one training step, as plain data.

From which stage uses which parameter groups, their bytes and a budget this derives an ordered
list of records that the engine only has to obey, so tests and plans can read a step unexecuted.
"""

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

LARGEST_WINDOW = 8

PartKey = tuple[str, int]
"""A part ("P" masters, "O" optimizer state, "G" gradient) and the group it belongs to."""


class Op(enum.Enum):
    """What a record asks of the engine."""

    FETCH = "fetch"  # host -> device; both copies are current afterwards
    OFFLOAD = "offload"  # device -> host, then drop the device copy
    RELEASE = "release"  # drop a device copy whose host copy is current
    WAIT = "wait"  # block until an item's compute and offloads are over
    FORWARD = "forward"
    BACKWARD = "backward"  # adds to the gradients of the stage's groups, creating missing ones
    ZEROS = "zeros"  # create a group's gradient, all zero
    REDUCE = "reduce"  # a group's complete gradient -> scalars
    COMBINE = "combine"  # all scalars -> the scalars that updates read
    UPDATE = "update"  # change a group's masters and optimizer state, consume its gradient


@dataclass(frozen=True, kw_only=True)
class Record:
    """One thing for the engine to do.

    Attributes:
        op: What to do.
        stage: The stage of a FORWARD or BACKWARD.
        group: The group of every record but FORWARD, BACKWARD, COMBINE and WAIT.
        part: "P", "O" or "G" of a FETCH, OFFLOAD or RELEASE.
        item: The item of its lap this record belongs to; for WAIT the item to wait for, where
            negative numbers count back from the end of the lap before (-1 is its last item).
    """

    op: Op
    stage: int | None = None
    group: int | None = None
    part: str | None = None
    item: int | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one training step has to compute, and the bytes it computes on.

    Attributes:
        stages: For each stage, in forward order, the groups whose masters it reads.
        backward: For each stage, whether the loss depends on it.
        fused_last: The last stage has no FORWARD in training: its BACKWARD returns the loss.
        sizes: For each group the bytes of "P", "O" and "G". A part that is missing or has no
            bytes never moves and appears in no FETCH, OFFLOAD or RELEASE.
        deferred: Updates need scalars of all gradients, so they happen in the next step.
        accumulate: A stage runs several microbatches, so its gradients have to start as ZEROS.
        reduce_reads: Parts that REDUCE reads besides the gradient.
    """

    stages: tuple[tuple[int, ...], ...]
    backward: tuple[bool, ...]
    fused_last: bool
    sizes: tuple[Mapping[str, int], ...]
    deferred: bool
    accumulate: bool = False
    reduce_reads: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Checks what the schedule relies on."""
        assert self.stages and len(self.stages) == len(self.backward)
        assert self.backward[-1] or not self.fused_last, "a fused last stage yields the loss"
        assert all(0 <= group < len(self.sizes) for stage in self.stages for group in stage)
        assert self.reduce_reads <= {"P", "O"}

    def size(self, key: PartKey) -> int:
        """Bytes of one part of one group."""
        return self.sizes[key[1]].get(key[0], 0)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The records of every kind of lap, and the device bytes they need.

    The first step runs `cold`, each later one `steady`. After either, `flush` brings everything
    to rest: pending updates are applied, host copies are current, the device is empty, and the
    next step is cold again. `evaluation` runs at rest and ends at rest.

    Attributes:
        cold: A training step that starts at rest.
        steady: A training step that follows a training step.
        flush: What to do after a training step to be at rest.
        evaluation: Every stage's FORWARD, from rest to rest.
        num_items: Items of a cold as of a steady lap, for resolving negative item numbers.
        ledger: For "cold", "steady", "flush" and "evaluation" the bytes on the device after each
            record. Bytes of an OFFLOAD or RELEASE count until the WAIT for its item, a gradient's
            until its UPDATE. Right after a cold lap, a steady lap or flush may hold less than its
            ledger says, and wait for items that moved nothing.
        peak_bytes: The largest entry of the ledgers.
        window: How many items fetches run ahead and offloads lag behind.
        resident: Parts that stay on the device between laps.
        smallest_bytes: Peak of the smallest schedule: window 1, nothing resident.
        all_resident_bytes: Peak with everything resident: from here on a steady lap moves nothing.
    """

    cold: tuple[Record, ...]
    steady: tuple[Record, ...]
    flush: tuple[Record, ...]
    evaluation: tuple[Record, ...]
    num_items: int
    ledger: Mapping[str, tuple[int, ...]]
    peak_bytes: int
    window: int
    resident: frozenset[PartKey]
    smallest_bytes: int
    all_resident_bytes: int


def plan_schedule(workload: Workload, budget: int | None) -> Schedule:
    """Orders a training step so that its state never exceeds a budget on the device.

    Args:
        workload: What to compute on which bytes.
        budget: Bytes that parameters, optimizer state and gradients may occupy on the device.
            None asks for the smallest schedule.

    Returns:
        The schedule. A larger budget first makes parts resident, then widens the window; the
        order of computing records never depends on the budget.

    Raises:
        ValueError: The budget is below the smallest schedule's peak.
    """
    laps = _build_laps(workload)
    units = _resident_units(workload)
    smallest = _simulate(laps, 1, frozenset())
    whole = _simulate(laps, LARGEST_WINDOW, frozenset(key for unit in units for key in unit))
    if budget is None:
        chosen = smallest
    elif budget < smallest.peak_bytes:
        raise ValueError(
            f"device_budget={budget} bytes is too small for this model, optimizer and precision; "
            f"the smallest that works is {smallest.peak_bytes} bytes "
            f"({smallest.peak_bytes / 2**30:.3g} GiB)"
        )
    elif budget >= whole.peak_bytes:
        chosen = whole
    else:
        chosen = _fill_budget(laps, units, budget, smallest)
    return replace(chosen, smallest_bytes=smallest.peak_bytes, all_resident_bytes=whole.peak_bytes)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One computing record and what it does to parts of groups."""

    record: Record
    touches: tuple[PartKey, ...]
    creates: tuple[PartKey, ...]
    dirties: tuple[PartKey, ...]
    kills: tuple[PartKey, ...]


@dataclass(frozen=True, kw_only=True)
class _Item:
    """Steps between which nothing is fetched."""

    steps: tuple[_Step, ...]
    last_step: dict[PartKey, int]  # the last of the steps that touches a part
    needs: dict[PartKey, None]  # parts that exist before the item; an ordered set


@dataclass(frozen=True, kw_only=True)
class _Laps:
    """The items of every kind of lap: the same for every budget."""

    workload: Workload
    cold: tuple[_Item, ...]
    steady: tuple[_Item, ...]
    flush: tuple[_Item, ...]
    evaluation: tuple[_Item, ...]


def _build_laps(workload: Workload) -> _Laps:
    lap = _deferred_lap(workload) if workload.deferred else _immediate_lap(workload)
    pending = Op.UPDATE if workload.deferred else None
    # The first lap has nothing to apply; items left empty keep its numbering that of all laps.
    first = [[record for record in item if record.op is not pending] for item in lap]
    at_rest = [[record for record in item if record.op is pending] for item in lap]
    forward = [[Record(op=Op.FORWARD, stage=stage)] for stage in range(len(workload.stages))]
    gradients: set[PartKey] = set()
    cold = _as_items(workload, first, gradients)
    waiting = set(gradients)
    steady = _as_items(workload, lap, gradients)
    assert gradients == waiting, "a lap leaves the gradients that the next one starts from"
    flush = _as_items(workload, filter(None, at_rest), waiting)
    assert not waiting, "a flush applies every gradient"
    evaluation = _as_items(workload, forward, set())
    return _Laps(workload=workload, cold=cold, steady=steady, flush=flush, evaluation=evaluation)


def _immediate_lap(workload: Workload) -> list[list[Record]]:
    """Each group is updated in the item that completes its gradient."""
    stages = range(len(workload.stages) - workload.fused_last)
    items = [[Record(op=Op.FORWARD, stage=stage)] for stage in stages]
    combine = [Record(op=Op.COMBINE)]
    for item, complete in _gradient_items(workload):
        if complete:
            item.extend(combine)
            combine = []
        for group in complete:
            item.extend(Record(op=op, group=group) for op in (Op.REDUCE, Op.UPDATE))
        items.append(item)
    items[-1].extend(combine)
    return items


def _deferred_lap(workload: Workload) -> list[list[Record]]:
    """Each group is updated before its first use in the next lap."""
    unused = _unused_groups(workload)
    pending = [group for group in range(len(workload.sizes)) if group not in unused]
    items = [_for_each([group], Op.UPDATE) for group in unused]
    for stage, groups in enumerate(workload.stages):
        fresh = [group for group in pending if group in groups]
        pending = [group for group in pending if group not in groups]
        items.append([*_for_each(fresh, Op.UPDATE), Record(op=Op.FORWARD, stage=stage)])
    updates = items.pop()[:-1] if workload.fused_last else []
    for item, complete in _gradient_items(workload):
        items.append([*updates, *item, *_for_each(complete, Op.REDUCE)])
        updates = []
    items[-1].append(Record(op=Op.COMBINE))
    return items


def _for_each(groups: Iterable[int], op: Op) -> list[Record]:
    return [Record(op=op, group=group) for group in groups]


def _gradient_items(workload: Workload) -> list[tuple[list[Record], list[int]]]:
    """The items that make gradients, each with the groups whose gradients it completes."""
    stages = [stage for stage, reached in enumerate(workload.backward) if reached]
    latest = {group: stage for stage in stages for group in workload.stages[stage]}
    earliest = {group: stage for stage in reversed(stages) for group in workload.stages[stage]}
    items = []
    for stage in reversed(stages):
        groups = dict.fromkeys(workload.stages[stage])
        begun = [group for group in groups if latest[group] == stage and workload.accumulate]
        complete = [group for group in groups if earliest[group] == stage]
        backward = Record(op=Op.BACKWARD, stage=stage)
        items.append(([*_for_each(begun, Op.ZEROS), backward], complete))
    items.extend((_for_each([group], Op.ZEROS), [group]) for group in _unused_groups(workload))
    return items


def _unused_groups(workload: Workload) -> list[int]:
    """Groups that the loss does not depend on; Optax still updates them, with zeros."""
    reached = zip(workload.stages, workload.backward, strict=True)
    used = {group for stage, backward in reached if backward for group in stage}
    return [group for group in range(len(workload.sizes)) if group not in used]


def _as_items(
    workload: Workload, lap: Iterable[Iterable[Record]], gradients: set[PartKey]
) -> tuple[_Item, ...]:
    """Derives what a lap's items need; `gradients` holds those that exist and is brought on."""
    items = []
    for number, records in enumerate(lap):
        steps: list[_Step] = []
        needs: dict[PartKey, None] = {}
        created: set[PartKey] = set()
        for record in records:
            step = _as_step(workload, replace(record, item=number), gradients)
            created.update(step.creates)
            needs.update((key, None) for key in step.touches if key not in created)
            gradients.update(step.creates)
            gradients.difference_update(step.kills)
            steps.append(step)
        last = {key: at for at, step in enumerate(steps) for key in step.touches}
        items.append(_Item(steps=tuple(steps), last_step=last, needs=needs))
    return tuple(items)


def _as_step(workload: Workload, record: Record, gradients: set[PartKey]) -> _Step:
    groups = (record.group,) if record.stage is None else workload.stages[record.stage]

    def keys(parts: Iterable[str]) -> tuple[PartKey, ...]:
        pairs = ((part, group) for group in groups if group is not None for part in parts)
        return tuple(key for key in dict.fromkeys(pairs) if workload.size(key))

    makes = record.op in (Op.BACKWARD, Op.ZEROS)
    new = tuple(key for key in keys("G") if makes and key not in gradients)
    assert record.op is not Op.ZEROS or new == keys("G"), "zeros would lose a gradient"
    updates = record.op is Op.UPDATE
    touches = {Op.FORWARD: "P", Op.BACKWARD: "PG", Op.ZEROS: "G", Op.COMBINE: "", Op.UPDATE: "POG"}
    touches[Op.REDUCE] = "".join(("G", *sorted(workload.reduce_reads)))
    return _Step(
        record=record,
        touches=keys(touches[record.op]),
        creates=new,
        dirties=keys("G" if makes else "PO" if updates else ()),
        kills=keys("G" if updates else ()),
    )


class _OverBudget(Exception):
    """The rest of a simulation no longer matters."""


@dataclass(kw_only=True)
class _Device:
    """What is on the device while records are laid down, and how many bytes that is."""

    workload: Workload
    window: int
    limit: float
    present: set[PartKey] = field(default_factory=set)
    dirty: set[PartKey] = field(default_factory=set)
    host_gradients: set[PartKey] = field(default_factory=set)
    leaving: dict[int, int] = field(default_factory=dict)  # item -> bytes until its WAIT
    num_bytes: int = 0
    records: list[Record] = field(default_factory=list)
    ledger: list[int] = field(default_factory=list)

    def emit(self, record: Record) -> None:
        if self.num_bytes > self.limit:
            raise _OverBudget
        self.records.append(record)
        self.ledger.append(self.num_bytes)

    def wait(self, item: int) -> None:
        self.num_bytes -= self.leaving.pop(item)
        self.emit(Record(op=Op.WAIT, item=item))

    def fetch(self, keys: Iterable[PartKey], item: int) -> None:
        """Fetches what is absent; a gradient neither here nor on the host is yet to be created."""
        for key in keys:
            if key in self.present or (key[0] == "G" and key not in self.host_gradients):
                continue
            self.present.add(key)
            self.num_bytes += self.workload.size(key)
            self.emit(Record(op=Op.FETCH, group=key[1], part=key[0], item=item))

    def compute(self, step: _Step) -> None:
        for key in step.creates:
            self.present.add(key)
            self.num_bytes += self.workload.size(key)
        assert self.present.issuperset(step.touches)
        self.dirty.update(step.dirties)
        for key in step.kills:
            self.present.discard(key)
            self.dirty.discard(key)
            self.host_gradients.discard(key)
            self.num_bytes -= self.workload.size(key)
        self.emit(step.record)

    def evict(self, key: PartKey, item: int) -> None:
        op = Op.OFFLOAD if key in self.dirty else Op.RELEASE
        if key[0] == "G":
            self.host_gradients.add(key)
        self.present.discard(key)
        self.dirty.discard(key)
        self.leaving[item] = self.leaving.get(item, 0) + self.workload.size(key)
        self.emit(Record(op=op, group=key[1], part=key[0], item=item))

    def next_lap(self, num_items: int) -> "_Device":
        """This state as the lap that follows one of `num_items` items sees it."""
        return replace(
            self,
            present=set(self.present),
            dirty=set(self.dirty),
            host_gradients=set(self.host_gradients),
            leaving={item - num_items: size for item, size in self.leaving.items()},
            records=[],
            ledger=[],
        )


def _run_items(
    device: _Device, items: Iterable[_Item], later: Iterable[_Item], stays: Mapping[PartKey, float]
) -> None:
    """Lays down the records of items, and brings `device` on.

    `later` are the items after those, at least a window of them or all there are. A part is kept
    before the item that `stays` says, and wherever the window needs it.
    """
    line = [item.needs for item in (*items, *later)]
    for number, item in enumerate(items):
        for old in [old for old in device.leaving if old < number - device.window]:
            device.wait(old)
        ahead = line[number + 1 : number + 1 + device.window]
        # After the first item, all but the item that enters the window have been seen to.
        for needs in ahead[-1:] if number else (line[0], *ahead):
            device.fetch(needs, number)
        for at, step in enumerate(item.steps):
            device.compute(step)
            for key in step.touches:
                done = item.last_step[key] == at and stays.get(key, 0) <= number
                if done and key in device.present and not any(key in needs for needs in ahead):
                    device.evict(key, number)


def _run_to_rest(device: _Device, items: Sequence[_Item], resident: frozenset[PartKey]) -> None:
    """Runs items after which nothing is on the device; residents stay until their last use."""
    uses = ((key, number) for number, item in enumerate(items) for key in item.needs)
    stays = {key: number for key, number in uses if key in resident}
    soon = {key for item in items[: device.window + 1] for key in item.needs}
    for key in sorted(device.present - soon - stays.keys()):
        device.evict(key, 0)
    _run_items(device, items, (), stays)
    for item in list(device.leaving):
        device.wait(item)
    assert not device.present and not device.num_bytes


def _simulate(
    laps: _Laps, window: int, resident: frozenset[PartKey], limit: float = math.inf
) -> Schedule:
    """The schedule of one window and one set of resident parts; raises above the limit."""
    num_items = len(laps.steady)
    later = laps.steady * (window // num_items + 1)
    stays = dict.fromkeys(resident, math.inf)
    # A first lap may not touch all parts that stay (a deferred one reads no optimizer state), yet
    # has to end as every other lap does.
    state = {key: None for key in sorted(resident) if key[0] != "G"}
    last = replace(laps.cold[-1], needs={**laps.cold[-1].needs, **state})
    cold = _Device(workload=laps.workload, window=window, limit=limit)
    _run_items(cold, [*laps.cold[:-1], last], later, stays)
    second = cold.next_lap(num_items)
    _run_items(second, laps.steady, later, stays)
    steady = second.next_lap(num_items)
    _run_items(steady, laps.steady, later, stays)
    # An update comes before any other use in its lap, so what a cold lap evicts, a steady lap does
    # too, and a steady lap's ledger and waits cover the bytes that a cold one leaves in flight.
    assert all(size <= second.leaving.get(item, 0) for item, size in cold.leaving.items())
    # All steady laps start alike, and so are the same.
    assert cold.present == second.present == steady.present
    assert cold.dirty <= second.dirty == steady.dirty and second.leaving == steady.leaving
    flush = steady.next_lap(num_items)
    _run_to_rest(flush, laps.flush, resident)
    evaluation = _Device(workload=laps.workload, window=window, limit=limit)
    _run_to_rest(evaluation, laps.evaluation, resident)
    runs = {"cold": cold, "steady": steady, "flush": flush, "evaluation": evaluation}
    peak = max((size for run in runs.values() for size in run.ledger), default=0)
    return Schedule(
        **{name: tuple(run.records) for name, run in runs.items()},
        num_items=num_items,
        ledger={name: tuple(run.ledger) for name, run in runs.items()},
        peak_bytes=peak,
        window=window,
        resident=resident,
        smallest_bytes=peak,
        all_resident_bytes=peak,
    )


def _resident_units(workload: Workload) -> list[tuple[PartKey, ...]]:
    """What can be made resident, in order of preference; a unit stays as a whole or not at all."""
    stages = (workload.stages[0], workload.stages[-1], *workload.stages, range(len(workload.sizes)))
    groups = dict.fromkeys(group for stage in stages for group in stage)
    state = "PO" if workload.deferred else "POG"
    units = [tuple((part, group) for part in state) for group in groups]
    if workload.deferred:
        # A waiting gradient saves a round trip for few bytes; those made last are used first.
        produced = [group for _, complete in _gradient_items(workload) for group in complete]
        units = [*((("G", group),) for group in reversed(produced)), *units]
    sized = (tuple(key for key in unit if workload.size(key)) for unit in units)
    return [unit for unit in sized if unit]


def _fill_budget(
    laps: _Laps, units: Sequence[tuple[PartKey, ...]], budget: int, best: Schedule
) -> Schedule:
    """The most residents that fit, then the widest window; `best` fits with neither."""

    def schedule(num_units: int, window: int) -> Schedule | None:
        resident = frozenset(key for unit in units[:num_units] for key in unit)
        try:
            return _simulate(laps, window, resident, limit=budget)
        except _OverBudget:
            return None

    # Peaks need not grow with every unit, but each bound taken as fitting has been simulated.
    low, high = 0, len(units)
    while low < high:
        middle = (low + high + 1) // 2
        found = schedule(middle, 1)
        if found is None:
            high = middle - 1
        else:
            low, best = middle, found
    wider = (schedule(low, window) for window in range(LARGEST_WINDOW, 1, -1))
    return next((found for found in wider if found is not None), best)
