"""What one training step computes, as plain data: records, and the items they form.

An item is a stage's forward or backward with the small work that goes with it. This says which
parts of which groups, and which values between stages, each touches; the schedule decides from
that what moves when.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

PartKey = tuple[str, int]
"""A part and its number: of a group "P" masters, "O" optimizer state or "G" gradient; "A" and a
value's id; "R" and a stage whose residuals are kept.

A value ("activation") is what one stage hands to others, residuals are what its forward keeps for
its backward; of all microbatches. Gradients, values and residuals are made within a lap; masters
and optimizer state always exist.
"""
LASTING = "PO"
PASSING = "AR"


class Op(enum.Enum):
    """What a record asks of the engine."""

    FETCH = "fetch"  # host -> device; both copies are current afterwards
    OFFLOAD = "offload"  # device -> host, then drop the device copy
    RELEASE = "release"  # drop a device copy whose host copy is current
    WAIT = "wait"  # block until an item has been computed
    LAND = "land"  # block until what an item offloaded is in the host
    FORWARD = "forward"
    BACKWARD = "backward"  # adds to the gradients of the stage's groups, creating missing ones
    ZEROS = "zeros"  # create a group's gradient, all zero
    REDUCE = "reduce"  # a group's complete gradient -> scalars, where updates are deferred
    COMBINE = "combine"  # all scalars -> the scalars that updates read
    UPDATE = "update"  # change a group's masters and optimizer state, consume its gradient


WAITS = frozenset({Op.WAIT, Op.LAND})
"""The records in which the driver waits for the device."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One thing for the engine to do.

    Attributes:
        op: What to do.
        stage: The stage of a FORWARD or BACKWARD.
        group: The group of every record but FORWARD, BACKWARD, COMBINE and WAIT; with part "A" the
            id of a value.
        part: "P", "O", "G" or "A" of a FETCH, OFFLOAD, RELEASE or LAND.
        item: The item of its lap this record belongs to; for WAIT and LAND the item to wait for,
            where negative numbers count back from the end of the lap before (-1 is its last item).
    """

    op: Op
    stage: int | None = None
    group: int | None = None
    part: str | None = None
    item: int | None = None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Estimates of how long things take, in seconds. They decide what moves when, never results.

    Attributes:
        forward: For each stage, its forward of all microbatches.
        backward: For each stage, its backward of all microbatches.
        update: For each group, its update.
        recompute: For each stage, by how much its backward is shorter if its residuals are kept;
            nothing unless given.
        byte: One byte over the link, in either direction.
        dispatch: What the driver needs to dispatch one record.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]
    recompute: tuple[float, ...] = ()
    byte: float
    dispatch: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one training step has to compute, and the bytes it computes on.

    Attributes:
        stages: For each stage, in forward order, the groups whose masters it reads.
        backward: For each stage, whether the loss depends on it.
        fused_last: The last stage has no FORWARD in training: its BACKWARD returns the loss.
        sizes: For each group the bytes of "P", "O" and "G". A part that is missing or has no
            bytes never moves and appears in no FETCH, OFFLOAD or RELEASE.
        values: Bytes of each value that is counted, by its id.
        makes: For each stage, the counted values it makes; none unless given.
        reads: For each stage, the counted values it reads.
        residuals: For each stage, bytes of the residuals that it can keep, 0 if none; none unless
            given.
        kept: The stages that keep them.
        frozen: The groups that are only read: they have no gradients and are never updated.
        deferred: Updates need scalars of all gradients, so they happen in the next step.
        accumulate: A stage runs several microbatches, so its gradients have to start as ZEROS.
        reduce_reads: Parts that REDUCE reads besides the gradient.
        costs: How long it takes.
    """

    stages: tuple[tuple[int, ...], ...]
    backward: tuple[bool, ...]
    fused_last: bool
    sizes: tuple[Mapping[str, int], ...]
    values: Mapping[int, int] = field(default_factory=dict)
    makes: tuple[tuple[int, ...], ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    residuals: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()
    frozen: frozenset[int] = frozenset()
    deferred: bool
    accumulate: bool = False
    reduce_reads: frozenset[str] = frozenset()
    costs: Costs

    def __post_init__(self) -> None:
        """Checks what the schedule relies on."""
        assert self.stages and len(self.stages) == len(self.backward)
        assert self.backward[-1] or not self.fused_last, "a fused last stage yields the loss"
        assert all(0 <= group < len(self.sizes) for stage in self.stages for group in stage)
        assert self.reduce_reads <= {"P", "O"}
        assert not any(self.size((part, g)) for g in self.frozen for part in "OG")
        assert len(self.costs.forward) == len(self.costs.backward) == len(self.stages)
        assert len(self.costs.update) == len(self.sizes)
        made, read = ({i for row in rows for i in row} for rows in (self.makes, self.reads))
        assert set(self.values) == made == read, "every value is made and read"
        assert all(self.residuals[s] and self.backward[s] for s in self.kept)
        assert not self.fused_last or len(self.stages) - 1 not in self.kept

    def size(self, key: PartKey) -> int:
        """Bytes of one part of one group, of one value, or of one stage's residuals."""
        part, number = key
        if part == "R":
            return self.residuals[number]
        return self.values[number] if part == "A" else self.sizes[number].get(part, 0)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One computing record, what it does to parts and values, and how long it takes."""

    record: Record
    touches: tuple[PartKey, ...]
    creates: tuple[PartKey, ...]
    dirties: tuple[PartKey, ...]
    kills: tuple[PartKey, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Use:
    """An item uses a part, which either exists before the item or is created by it."""

    key: PartKey
    creates: bool


@dataclass(frozen=True, kw_only=True)
class Item:
    """Steps between which nothing is fetched.

    Attributes:
        steps: What it computes, in order.
        uses: The parts it uses: first those that have to be there when it begins, then those that
            may still arrive while its stage computes, and last those that it creates.
        num_early: How many are of the first kind.
        last_step: The last of the steps that touches a part.
    """

    steps: tuple[Step, ...]
    uses: tuple[Use, ...]
    num_early: int
    last_step: dict[PartKey, int]


@dataclass(frozen=True, kw_only=True)
class Laps:
    """The items of every kind of lap: the same for every budget."""

    workload: Workload
    cold: tuple[Item, ...]
    steady: tuple[Item, ...]
    flush: tuple[Item, ...]
    evaluation: tuple[Item, ...]


def build_laps(workload: Workload) -> Laps:
    """Lists the items of every kind of lap of a workload."""
    lap = _deferred_lap(workload) if workload.deferred else _immediate_lap(workload)
    pending = Op.UPDATE if workload.deferred else None
    # The first lap has nothing to apply; items left empty keep its numbering that of all laps.
    first = [[record for record in item if record.op is not pending] for item in lap]
    at_rest = [[record for record in item if record.op is pending] for item in lap]
    forward = [[Record(op=Op.FORWARD, stage=stage)] for stage in range(len(workload.stages))]
    made: set[PartKey] = set()
    cold = _as_items(workload, first, made)
    waiting = set(made)
    steady = _as_items(workload, lap, made)
    assert made == waiting, "a lap leaves the gradients that the next one starts from"
    flush = _as_items(workload, list(filter(None, at_rest)), waiting)
    assert not waiting, "a flush applies every gradient"
    evaluation = _as_items(replace(workload, kept=frozenset()), forward, set())
    return Laps(workload=workload, cold=cold, steady=steady, flush=flush, evaluation=evaluation)


def _immediate_lap(workload: Workload) -> list[list[Record]]:
    """Each group is updated in the item that completes its gradient."""
    stages = range(len(workload.stages) - workload.fused_last)
    items = [[Record(op=Op.FORWARD, stage=stage)] for stage in stages]
    combine = [Record(op=Op.COMBINE)]
    for item, complete in gradient_items(workload):
        if complete:
            item.extend(combine)
            combine = []
        items.append([*item, *_for_each(complete, Op.UPDATE)])
    items[-1].extend(combine)
    return items


def _deferred_lap(workload: Workload) -> list[list[Record]]:
    """Each group is updated before its first use in the next lap."""
    unused = _unused_groups(workload)
    pending = set(_trained_groups(workload)).difference(unused)
    items = [_for_each([group], Op.UPDATE) for group in unused]
    for stage, groups in enumerate(workload.stages):
        fresh = sorted(pending.intersection(groups))
        pending.difference_update(fresh)
        items.append([*_for_each(fresh, Op.UPDATE), Record(op=Op.FORWARD, stage=stage)])
    updates = items.pop()[:-1] if workload.fused_last else []
    for item, complete in gradient_items(workload):
        items.append([*updates, *item, *_for_each(complete, Op.REDUCE)])
        updates = []
    items[-1].append(Record(op=Op.COMBINE))
    return items


def _for_each(groups: Iterable[int], op: Op) -> list[Record]:
    return [Record(op=op, group=group) for group in groups]


def gradient_items(workload: Workload) -> list[tuple[list[Record], list[int]]]:
    """The items that make gradients, each with the groups whose gradients it completes."""
    stages = [stage for stage, reached in enumerate(workload.backward) if reached]
    trained = [[g for g in groups if g not in workload.frozen] for groups in workload.stages]
    latest = {group: stage for stage in stages for group in trained[stage]}
    earliest = {group: stage for stage in reversed(stages) for group in trained[stage]}
    items = []
    for stage in reversed(stages):
        groups = dict.fromkeys(trained[stage])
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
    return [group for group in _trained_groups(workload) if group not in used]


def _trained_groups(workload: Workload) -> list[int]:
    return [group for group in range(len(workload.sizes)) if group not in workload.frozen]


def _as_items(
    workload: Workload, lap: Sequence[Sequence[Record]], made: set[PartKey]
) -> tuple[Item, ...]:
    """Derives what a lap's items need; `made` holds what exists of gradients and values."""
    last_read: dict[int, Record] = {}
    for record in chain.from_iterable(lap):
        last_read.update(dict.fromkeys(_reads(workload, record), record))
    items = []
    for number, records in enumerate(lap):
        steps = []
        for record in records:
            done = [i for i in _reads(workload, record) if last_read[i] is record]
            steps.append(_as_step(workload, replace(record, item=number), done, made))
            made.update(steps[-1].creates)
            made.difference_update(steps[-1].kills)
        items.append(_as_item(workload, steps))
    return tuple(items)


def _reads(workload: Workload, record: Record) -> Sequence[int]:
    return () if record.stage is None or not workload.reads else workload.reads[record.stage]


def _as_item(workload: Workload, steps: Sequence[Step]) -> Item:
    stages = [at for at, step in enumerate(steps) if step.record.stage is not None]
    stage = max(stages, default=len(steps) - 1)
    early: dict[PartKey, None] = {}
    late: dict[PartKey, None] = {}
    created: dict[PartKey, None] = {}
    for at, step in enumerate(steps):
        for key in step.touches:
            if key in step.creates:
                created[key] = None
            elif not any(key in known for known in (early, late, created)):
                (early if at <= stage else late)[key] = None
    # What can't arrive while the stage computes would hold up what follows.
    seconds = sum(steps[at].seconds for at in stages)
    hidden = sum(map(workload.size, late)) * workload.costs.byte <= seconds
    return Item(
        steps=tuple(steps),
        uses=(
            *(Use(key=key, creates=False) for key in (*early, *late)),
            *(Use(key=key, creates=True) for key in created),
        ),
        num_early=len(early) + (0 if hidden else len(late)),
        last_step={key: at for at, step in enumerate(steps) for key in step.touches},
    )


def _as_step(workload: Workload, record: Record, done: Iterable[int], made: set[PartKey]) -> Step:
    """What a record touches; `done` are values that it is the last to read."""
    groups = (record.group,) if record.stage is None else workload.stages[record.stage]

    def keys(parts: Iterable[str]) -> tuple[PartKey, ...]:
        pairs = ((part, group) for group in groups if group is not None for part in parts)
        return tuple(key for key in dict.fromkeys(pairs) if workload.size(key))

    makes = record.op in (Op.BACKWARD, Op.ZEROS)
    new = tuple(key for key in keys("G") if makes and key not in made)
    assert record.op is not Op.ZEROS or new == keys("G"), "zeros would lose a gradient"
    updates = record.op is Op.UPDATE
    touches = {Op.FORWARD: "P", Op.BACKWARD: "PG", Op.ZEROS: "G", Op.COMBINE: "", Op.UPDATE: "POG"}
    touches[Op.REDUCE] = "".join(("G", *sorted(workload.reduce_reads)))
    read = tuple(("A", i) for i in dict.fromkeys(_reads(workload, record)))
    given: tuple[PartKey, ...] = ()
    if record.op is Op.FORWARD and record.stage is not None and workload.makes:
        given = tuple(("A", i) for i in workload.makes[record.stage])
    used: tuple[PartKey, ...] = ()
    if record.stage in workload.kept:
        residuals = (("R", record.stage),)
        given, used = ((*given, *residuals), ()) if record.op is Op.FORWARD else (given, residuals)
    return Step(
        record=record,
        touches=(*keys(touches[record.op]), *read, *used, *given),
        creates=(*new, *given),
        dirties=(*keys("G" if makes else "PO" if updates else ()), *given),
        kills=(*keys("G" if updates else ()), *(("A", i) for i in dict.fromkeys(done)), *used),
        seconds=_seconds(workload, record),
    )


def _seconds(workload: Workload, record: Record) -> float:
    costs = workload.costs
    if record.stage is not None:
        if record.op is Op.FORWARD:
            return costs.forward[record.stage]
        saved = costs.recompute[record.stage] if record.stage in workload.kept else 0.0
        return costs.backward[record.stage] - saved
    if record.op is Op.UPDATE and record.group is not None:
        return costs.update[record.group]
    return 0.0
