"""What moves when in one training step, as plain data.

From the items of a step, their bytes and a budget this derives an ordered list of records that
the engine only has to obey, so tests and plans can read a step unexecuted.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatrain_jax.stream.laps import (
    Item,
    Laps,
    Op,
    PartKey,
    Record,
    Step,
    Workload,
    build_laps,
    gradient_items,
)

LARGEST_WINDOW = 8


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
            record. What an OFFLOAD or RELEASE drops and the gradient that an UPDATE consumes count
            until the WAIT for its item. Until a window after a cold lap, a steady lap or flush may
            hold less than its ledger says, and wait for items that left nothing.
        peak_bytes: The largest entry of the ledgers.
        window: How many items fetches run ahead, and what leaves the device lags behind.
        resident: Parts that stay on the device between laps.
        smallest_bytes: Peak of the smallest schedule: window 1, nothing resident.
        all_resident_bytes: Peak with everything resident and the widest window: from here on a
            steady lap moves nothing, and only waits for the updates of items a window behind.
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
    laps = build_laps(workload)
    units = _resident_units(workload)
    smallest = _simulate(laps, 1, frozenset())
    whole = _simulate(laps, _largest_window(laps), frozenset(key for unit in units for key in unit))
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


def _largest_window(laps: Laps) -> int:
    """The widest window worth trying.

    One that reaches all other items of a lap already keeps everything on the device; a wider one
    would only pile up consumed gradients.
    """
    return max(1, min(LARGEST_WINDOW, len(laps.steady) - 1))


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

    def compute(self, step: Step, item: int) -> None:
        for key in step.creates:
            self.present.add(key)
            self.num_bytes += self.workload.size(key)
        assert self.present.issuperset(step.touches)
        self.dirty.update(step.dirties)
        for key in step.kills:
            self.present.discard(key)
            self.dirty.discard(key)
            self.host_gradients.discard(key)
            # Its memory is free once the device has got there, which only a WAIT tells.
            self._leave(key, item)
        self.emit(step.record)

    def evict(self, key: PartKey, item: int) -> None:
        op = Op.OFFLOAD if key in self.dirty else Op.RELEASE
        if key[0] == "G":
            self.host_gradients.add(key)
        self.present.discard(key)
        self.dirty.discard(key)
        self._leave(key, item)
        self.emit(Record(op=op, group=key[1], part=key[0], item=item))

    def _leave(self, key: PartKey, item: int) -> None:
        self.leaving[item] = self.leaving.get(item, 0) + self.workload.size(key)

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
    device: _Device, items: Iterable[Item], later: Iterable[Item], stays: Mapping[PartKey, float]
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
            device.compute(step, number)
            for key in step.touches:
                done = item.last_step[key] == at and stays.get(key, 0) <= number
                if done and key in device.present and not any(key in needs for needs in ahead):
                    device.evict(key, number)


def _run_to_rest(device: _Device, items: Sequence[Item], resident: frozenset[PartKey]) -> None:
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
    laps: Laps, window: int, resident: frozenset[PartKey], limit: float = math.inf
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
    second = cold
    for _ in range(window // num_items + 1):  # until nothing that a cold lap leaves is in flight
        second = second.next_lap(num_items)
        _run_items(second, laps.steady, later, stays)
    steady = second.next_lap(num_items)
    _run_items(steady, laps.steady, later, stays)
    # A deferred cold lap lacks the updates of a steady one, but an update comes before any other
    # use in its lap. So what leaves in a cold lap leaves in a steady one too, whose ledger and
    # waits cover the bytes that a cold one leaves in flight.
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
        produced = [group for _, complete in gradient_items(workload) for group in complete]
        units = [*((("G", group),) for group in reversed(produced)), *units]
    sized = (tuple(key for key in unit if workload.size(key)) for unit in units)
    return [unit for unit in sized if unit]


def _fill_budget(
    laps: Laps, units: Sequence[tuple[PartKey, ...]], budget: int, best: Schedule
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
    wider = (schedule(low, window) for window in range(_largest_window(laps), 1, -1))
    return next((found for found in wider if found is not None), best)
