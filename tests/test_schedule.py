"""The schedule against a small machine that does what an engine does.

The machine keeps versions instead of arrays, so a stale copy, a lost partial sum, an update with
the wrong gradient or a byte too many fails here rather than in a training run.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from megatrain_jax.stream.laps import Costs, Op, PartKey, Record, Workload
from megatrain_jax.stream.schedule import Schedule, plan_schedule

COPIES = {Op.FETCH, Op.OFFLOAD, Op.RELEASE}
WAITS = {Op.WAIT, Op.LAND}
MOVES = COPIES | WAITS
LAPS = ("cold", "steady", "flush", "evaluation")
BLOCK = {"P": 4, "O": 8, "G": 4}


@dataclass(kw_only=True)
class Machine:
    """Runs records on version numbers.

    The version of masters and optimizer state is the number of their updates, that of a gradient
    the lap that made it and the stages summed into it, that of a value or residuals the run that
    made them.
    """

    workload: Workload
    truth: dict[PartKey, Any] = field(default_factory=dict)  # as if nothing ever moved
    host: dict[PartKey, Any] = field(default_factory=dict)
    device: dict[PartKey, Any] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)  # free once the item has been computed
    leaving: dict[int, int] = field(default_factory=dict)  # free once its offloads are over
    kind: str = ""
    lap: int = 0
    runs: int = 0
    last_read: dict[int, Record] = field(default_factory=dict)  # of the lap at hand, by value
    kept: frozenset[int] = frozenset()  # stages of the lap at hand that keep residuals
    begun: int = 0  # number of the first item of this lap
    item: int = -1  # the last item seen
    computing: int = -1  # the last item that computed
    staged: bool = False  # its stage has been computed
    fetched: dict[PartKey, int] = field(default_factory=dict)
    reduced: dict[int, int] = field(default_factory=dict)
    combined: int = 0

    def __post_init__(self):
        self.truth = {(part, group): 0 for part in "PO" for group in self.groups}
        self.host = {key: 0 for key in self.truth if self.workload.size(key)}

    @property
    def groups(self) -> range:
        return range(len(self.workload.sizes))

    def run(self, kind: str, schedule: Schedule, *, exact: bool) -> None:
        """Runs one kind of lap; its ledger has to be exact or else a bound."""
        self.kind = kind
        self.lap += kind in ("cold", "steady")
        self.runs += 1
        self.workload = replace(self.workload, kept=schedule.kept)
        self.kept = schedule.kept if kind in ("cold", "steady") else frozenset()
        self.last_read = {
            i: record
            for record in getattr(schedule, kind)
            if record.stage is not None
            for i in self.values(self.workload.reads, record.stage)
        }
        for record, promised in zip(getattr(schedule, kind), schedule.ledger[kind], strict=True):
            assert record.item is not None
            self.item = max(self.item, self.begun + record.item)
            if record.op in MOVES:
                self.move(record, self.begun + record.item, exact)
            else:
                self.compute(record, self.begun + record.item)
            held = sum(self.workload.size(key) for key in self.device)
            actual = held + sum(self.used.values()) + sum(self.leaving.values())
            assert actual == promised if exact else actual <= promised
            assert promised <= schedule.peak_bytes
        assert not any(key[0] in "AR" for key in (*self.truth, *self.device, *self.host))
        if kind in ("cold", "steady"):
            self.begun += schedule.num_items
            self.check_end_of_lap()
        else:
            self.check_rest()
            self.begun, self.item, self.computing = 0, -1, -1
            self.fetched.clear()

    def values(self, table: tuple[tuple[int, ...], ...], stage: int) -> tuple[int, ...]:
        return table[stage] if table else ()

    def move(self, record: Record, item: int, exact: bool) -> None:
        key = (str(record.part), -1 if record.group is None else record.group)
        if record.op in WAITS:
            assert item <= self.computing, "waits for what was not dispatched"
            freed = self.used if record.op is Op.WAIT else self.leaving
            assert item in freed or not exact, "nothing to wait for"
            freed.pop(item, None)
            return
        assert self.workload.size(key) and key[0] != "R"
        if record.op is Op.FETCH:
            assert key not in self.device
            assert self.host[key] == self.truth[key], "a stale copy is fetched"
            assert self.computing < item, "an item fetches before it computes"
            self.device[key] = self.host[key]
            # What the first item needs after a rest can't have been fetched ahead.
            ahead = self.kind == "steady" or item > self.begun
            self.fetched[key] = item if ahead else item - 1
            return
        assert item == self.computing, "evictions follow the op they wait for"
        if record.op is Op.RELEASE:
            assert self.host[key] == self.device[key], "a changed part is dropped"
        self.host[key] = self.device.pop(key)
        self.free(self.leaving if record.op is Op.OFFLOAD else self.used, key, item)

    def free(self, freed: dict[int, int], key: PartKey, item: int) -> None:
        freed[item] = freed.get(item, 0) + self.workload.size(key)

    def compute(self, record: Record, item: int) -> None:
        assert item >= self.computing
        self.staged = record.stage is not None or (self.staged and item == self.computing)
        self.computing = item
        group = -1 if record.group is None else record.group
        if record.stage is not None:
            for owner in set(self.workload.stages[record.stage]):
                self.read("P", owner, stage=True)
                updates = self.lap - (self.kind in ("cold", "steady"))
                assert self.truth["P", owner] == updates, "a stage reads the last step's masters"
                if record.op is Op.BACKWARD:
                    self.add_gradient(owner, record.stage)
            for i in self.values(self.workload.reads, record.stage):
                self.read("A", i, stage=True)
                assert self.truth["A", i] == self.runs, "a stage reads what this run made"
            if record.op is Op.FORWARD:
                for i in self.values(self.workload.makes, record.stage):
                    assert ("A", i) not in self.truth
                    self.write("A", i, self.runs)
            if record.stage in self.kept:
                if record.op is Op.FORWARD:
                    assert ("R", record.stage) not in self.truth
                    self.write("R", record.stage, self.runs)
                else:
                    self.read("R", record.stage, stage=True)
                    self.consume(("R", record.stage))
            for i in self.values(self.workload.reads, record.stage):
                if self.last_read[i] is record:
                    self.consume(("A", i))
        elif record.op is Op.ZEROS:
            assert ("G", group) not in self.truth
            self.write("G", group, (self.lap, frozenset()))
        elif record.op is Op.REDUCE:
            self.read("G", group)
            for part in self.workload.reduce_reads:
                self.read(part, group)
            assert self.truth["G", group] == (self.lap, self.backward_stages(group))
            assert self.combined == self.lap - self.workload.deferred
            assert self.reduced.get(group, 0) == self.lap - 1
            self.reduced[group] = self.lap
        elif record.op is Op.COMBINE:
            assert self.combined == self.lap - 1
            self.combined = self.lap
            if self.workload.deferred:
                assert all(self.reduced[group] == self.lap for group in self.groups)
        else:
            assert record.op is Op.UPDATE
            self.update(group)

    def read(self, part: str, group: int, stage: bool = False) -> None:
        key = (part, group)
        assert key in self.truth
        if self.workload.size(key):
            assert self.device[key] == self.truth[key]
            late = self.staged and not stage  # arrives while the stage computes
            assert self.fetched.get(key, -1) < self.computing + late, "fetched too late to overlap"

    def write(self, part: str, group: int, version: object) -> None:
        self.truth[part, group] = version
        if self.workload.size((part, group)):
            self.device[part, group] = version
            self.fetched.pop((part, group), None)

    def backward_stages(self, group: int) -> frozenset[int]:
        stages = zip(self.workload.stages, self.workload.backward, strict=True)
        return frozenset(at for at, (used, needed) in enumerate(stages) if needed and group in used)

    def add_gradient(self, group: int, stage: int) -> None:
        lap, stages = self.lap, frozenset()
        if ("G", group) in self.truth:
            self.read("G", group, stage=True)
            lap, stages = self.truth["G", group]
        else:
            assert not self.workload.accumulate, "sums over microbatches start from zeros"
        assert lap == self.lap and stage not in stages
        self.write("G", group, (lap, stages | {stage}))

    def update(self, group: int) -> None:
        for part in "POG":
            self.read(part, group)
        late = self.workload.deferred and self.kind != "flush"
        made = self.lap - late
        assert self.reduced[group] == made <= self.combined
        assert self.truth["G", group] == (made, self.backward_stages(group))
        for part in "PO":
            assert self.truth[part, group] == made - 1, "each gradient is applied exactly once"
            self.write(part, group, made)
        self.consume(("G", group))

    def consume(self, key: PartKey) -> None:
        if self.workload.size(key):  # free once the device has got here
            self.free(self.used, key, self.computing)
        for copies in (self.truth, self.device, self.host, self.fetched):
            copies.pop(key, None)

    def check_end_of_lap(self) -> None:
        assert self.combined == self.lap
        assert all(self.reduced[group] == self.lap for group in self.groups)
        applied = self.lap - self.workload.deferred
        assert all(self.truth["P", group] == applied for group in self.groups)

    def check_rest(self) -> None:
        assert not self.device and not self.used and not self.leaving
        assert all(version == self.lap for version in self.truth.values())
        assert self.host == {key: v for key, v in self.truth.items() if self.workload.size(key)}


def run_everything(workload: Workload, schedule: Schedule) -> None:
    """Laps in all orders in which a trainer can run them."""
    machine = Machine(workload=workload)
    machine.run("evaluation", schedule, exact=True)
    machine.run("cold", schedule, exact=True)
    for _ in range(3):
        machine.run("steady", schedule, exact=False)
    machine.run("flush", schedule, exact=False)
    machine.run("evaluation", schedule, exact=True)
    machine.run("cold", schedule, exact=True)
    machine.run("flush", schedule, exact=False)
    machine.run("cold", schedule, exact=True)
    machine.run("steady", schedule, exact=False)
    machine.run("flush", schedule, exact=False)


def random_workload(seed: int) -> Workload:
    """Tied, looped, frozen, unused and empty parts in any combination."""
    rng = random.Random(seed)
    num_groups, num_stages = rng.randint(1, 7), rng.randint(1, 9)
    if rng.random() < 0.5:
        stages: list[tuple[int, ...]] = [(at % num_groups,) for at in range(num_stages)]
    else:
        stages = [(rng.randrange(num_groups),) * rng.randint(0, 2) for _ in range(num_stages)]
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(num_stages)
        stages[at] = (*stages[at], rng.randrange(num_groups))
    backward = [rng.random() < 0.9 for _ in stages[1:]] + [True]
    sizes = []
    for _ in range(num_groups):
        empty = rng.choice(("", "", "", "O", "OG"))
        sizes.append({part: 0 if part in empty else rng.randint(1, 50) for part in "POG"})
    makes: list[tuple[int, ...]] = [()] * num_stages
    reads: list[tuple[int, ...]] = [()] * num_stages
    values = {}
    for i in range(rng.choice((0, 3, 3, 9)) if num_stages > 1 else 0):
        maker = rng.randrange(num_stages - 1)
        makes[maker] += (i,)
        for reader in sorted({rng.randrange(maker + 1, num_stages) for _ in range(2)}):
            reads[reader] += (i,)
        values[i] = rng.randint(1, 50)
    fused_last = rng.random() < 0.7
    keeps = [b and not (fused_last and s == num_stages - 1) for s, b in enumerate(backward)]
    backward_seconds = [rng.choice((0.0, 3.0, 60.0)) for _ in stages]
    return Workload(
        stages=tuple(stages),
        backward=tuple(backward),
        fused_last=fused_last,
        sizes=tuple(sizes),
        values=values,
        makes=tuple(makes),
        reads=tuple(reads),
        residuals=tuple(rng.choice((0, rng.randint(1, 50))) if k else 0 for k in keeps),
        deferred=rng.random() < 0.5,
        accumulate=rng.random() < 0.5,
        reduce_reads=frozenset(part for part in "PO" if rng.random() < 0.3),
        costs=Costs(
            forward=tuple(rng.choice((0.0, 1.0, 20.0)) for _ in stages),
            backward=tuple(backward_seconds),
            recompute=tuple(rng.choice((0.1, 0.3)) * seconds for seconds in backward_seconds),
            update=tuple(rng.random() for _ in sizes),
            byte=rng.choice((0.0, 0.1, 1.0)),
            dispatch=rng.choice((0.0, 0.1)),
        ),
    )


def chain(num_groups: int, **changes) -> Workload:
    """One group per stage, as in a plain stack of blocks; compute and link take equally long."""
    stages = changes.get("stages", tuple((group,) for group in range(num_groups)))
    plain = {
        "stages": stages,
        "backward": (True,) * len(stages),
        "fused_last": True,
        "sizes": (BLOCK,) * num_groups,
        "deferred": False,
        "costs": costs(len(stages), num_groups),
    }
    return Workload(**plain | changes)


def costs(num_stages: int, num_groups: int, **changes) -> Costs:
    plain = Costs(
        forward=(4.0,) * num_stages,
        backward=(12.0,) * num_stages,
        update=(0.0,) * num_groups,
        byte=1.0,
    )
    return replace(plain, **changes)


def spell(records: tuple[Record, ...]) -> list[str]:
    """Records as words such as "FETCH P0", "FORWARD 0", "WAIT -1" and "LAND 2"."""
    words = []
    for record in records:
        numbers = (record.stage, record.group, record.item if record.op in WAITS else None)
        number = next((str(number) for number in numbers if number is not None), "")
        words.append(f"{record.op.name} {record.part or ''}{number}".strip())
    return words


def computing(records: tuple[Record, ...]) -> list[str]:
    return spell(tuple(record for record in records if record.op not in MOVES))


@pytest.mark.parametrize("seed", range(100))
def test_every_budget_computes_the_same_on_current_data(seed):
    workload = random_workload(seed)
    smallest = plan_schedule(workload, None)
    assert smallest.peak_bytes <= smallest.smallest_bytes
    run_everything(workload, smallest)
    most = max(smallest.smallest_bytes, smallest.all_resident_bytes)
    with_residuals = most + 2 * sum(workload.residuals)
    between = random.Random(seed).choices(range(smallest.smallest_bytes, with_residuals + 1), k=2)
    middle = (smallest.smallest_bytes + most) // 2
    for budget in (smallest.smallest_bytes, *between, middle, most, with_residuals):
        schedule = plan_schedule(workload, budget)
        assert max(max(ledger, default=0) for ledger in schedule.ledger.values()) <= budget
        assert schedule.peak_bytes <= budget
        run_everything(workload, schedule)
        for name in LAPS:
            assert computing(getattr(schedule, name)) == computing(getattr(smallest, name))


@pytest.mark.parametrize("deferred", [False, True])
def test_residuals_are_kept_where_they_save_time_and_fit(deferred):
    num, size = 8, 10
    workload = chain(
        num,
        deferred=deferred,
        residuals=(*((size,) * (num - 1)), 0),
        costs=costs(num, num, recompute=(4.0,) * num, byte=10.0),
    )
    all_resident = plan_schedule(workload, None).all_resident_bytes
    assert not plan_schedule(workload, None).kept
    seconds = []
    for count in range(num + 2):
        schedule = plan_schedule(workload, all_resident + count * size)
        seconds.append(schedule.seconds)
        assert len(schedule.kept) <= count
        # Of equal stages the last ones: theirs are needed for the shortest time.
        assert schedule.kept == frozenset(range(num - 1 - len(schedule.kept), num - 1))
        assert schedule.seconds == seconds[0] - 4.0 * len(schedule.kept)
        run_everything(workload, schedule)
    assert len(schedule.kept) == num - 1
    assert seconds == sorted(seconds, reverse=True)


def test_what_saves_the_most_for_its_bytes_is_kept_first():
    workload = chain(
        4,
        residuals=(10, 10, 5, 0),
        costs=costs(4, 4, recompute=(4.0, 5.0, 1.0, 0.0)),
    )
    most = plan_schedule(workload, None).all_resident_bytes
    found = {plan_schedule(workload, most + room).kept for room in range(0, 40)}
    assert found == {frozenset(), frozenset({1}), frozenset({0, 1}), frozenset({0, 1, 2})}


@pytest.mark.parametrize("seed", range(60))
def test_computing_never_waits_for_room(seed):
    """The device always has an item to compute while the driver waits."""
    workload = random_workload(seed)
    smallest = plan_schedule(workload, None).smallest_bytes
    for budget in (smallest, smallest + random.Random(seed).randint(1, 200)):
        schedule = plan_schedule(workload, budget)
        computed = -1
        for record in schedule.steady:
            assert record.item is not None
            if record.op not in MOVES:
                computed = record.item
            elif record.op is Op.WAIT or (record.op is Op.LAND and workload.costs.byte):
                assert record.item < computed


@pytest.mark.parametrize("seed", range(30))
def test_nothing_moves_once_everything_is_resident(seed):
    workload = random_workload(seed)
    without = plan_schedule(replace(workload, residuals=()), 10**9)
    assert without.peak_bytes <= without.all_resident_bytes
    whole = plan_schedule(workload, 10**9)
    assert not COPIES & {record.op for record in whole.steady}
    # It waits once for each item that consumes gradients or values, and for no other.
    waits, consumers, last_read = [], set(), {}
    for record in whole.steady:
        assert record.item is not None
        if record.op in WAITS:
            waits.append(record.item % whole.num_items)
        elif record.op is Op.UPDATE and workload.size(("G", record.group or 0)):
            consumers.add(record.item)
        elif record.stage is not None:
            last_read.update(dict.fromkeys(workload.reads[record.stage], record.item))
            if record.op is Op.BACKWARD and record.stage in whole.kept:
                consumers.add(record.item)
    assert sorted(waits) == sorted(consumers.union(last_read.values()))
    cold = [record for record in whole.cold if record.op is Op.FETCH]
    assert len(cold) == len({(record.part, record.group) for record in cold})


def test_immediate_step_by_hand():
    schedule = plan_schedule(chain(4), None)
    assert schedule.num_items == 7 and schedule.smallest_bytes == 36
    forward = [
        *("WAIT -2", "FETCH P2", "FORWARD 0", "OFFLOAD P0"),
        *("WAIT -1", "LAND -2", "FETCH P3", "FETCH O3", "FORWARD 1", "RELEASE P1"),
        *("FORWARD 2", "WAIT 1", "LAND -1", "FETCH O2"),
    ]
    backward = [
        *("BACKWARD 3", "COMBINE", "REDUCE 3", "UPDATE 3", "OFFLOAD P3", "OFFLOAD O3"),
        *("LAND 0", "FETCH P1"),
        *("BACKWARD 2", "REDUCE 2", "UPDATE 2", "OFFLOAD P2", "OFFLOAD O2"),
        *("WAIT 3", "LAND 3", "FETCH O1", "FETCH P0"),
        *("BACKWARD 1", "REDUCE 1", "UPDATE 1", "OFFLOAD P1", "OFFLOAD O1"),
        *("WAIT 4", "LAND 4", "FETCH O0", "FETCH P1"),
        *("BACKWARD 0", "REDUCE 0", "UPDATE 0", "OFFLOAD O0"),
    ]
    assert spell(schedule.steady) == [*forward, *backward]
    assert spell(schedule.flush) == [
        *("OFFLOAD P0", "RELEASE P1", "WAIT -2", "LAND -2", "WAIT -1", "LAND -1"),
    ]
    assert spell(schedule.evaluation) == [
        *("FETCH P0", "FETCH P1", "FETCH P2", "FETCH P3", "FORWARD 0", "RELEASE P0"),
        *("FORWARD 1", "RELEASE P1", "WAIT 0", "FORWARD 2", "RELEASE P2"),
        *("WAIT 1", "FORWARD 3", "RELEASE P3", "WAIT 2", "WAIT 3"),
    ]
    # From its start: P0, P1; G0 and G1 until they were used up; P1, O1 and O0 on their way out.
    assert schedule.ledger["steady"][:14] == (
        *(32, 36, 36, 36),
        *(32, 20, 24, 32, 32, 32),
        *(32, 28, 20, 28),
    )
    assert schedule.ledger["flush"] == (36, 36, 32, 20, 12, 0)


def test_resident_step_by_hand():
    schedule = plan_schedule(chain(2), 32)
    assert len(schedule.resident) == 4 and schedule.all_resident_bytes == 32
    assert spell(schedule.steady) == [
        *("WAIT -2", "FORWARD 0", "WAIT -1", "BACKWARD 1", "COMBINE", "REDUCE 1", "UPDATE 1"),
        *("BACKWARD 0", "REDUCE 0", "UPDATE 0"),
    ]
    assert schedule.ledger["steady"] == (28, 28, 24, 28, 28, 28, 28, 32, 32, 32)


def test_deferred_step_by_hand():
    schedule = plan_schedule(chain(4, deferred=True), None)
    assert spell(schedule.cold) == [
        *("FETCH P0", "FETCH P1", "FETCH P2", "FETCH P3", "FETCH O0", "FETCH O1"),
        *("FORWARD 0", "FORWARD 1", "FORWARD 2"),
        *("BACKWARD 3", "RELEASE P3", "REDUCE 3", "OFFLOAD G3"),
        *("BACKWARD 2", "REDUCE 2", "OFFLOAD G2", "WAIT 3"),
        *("BACKWARD 1", "REDUCE 1", "BACKWARD 0", "REDUCE 0", "COMBINE"),
    ]
    steady = spell(schedule.steady)
    forward = steady[: steady.index("BACKWARD 3")]
    assert [word for word in forward if word.split()[0] in ("UPDATE", "FORWARD", "OFFLOAD")] == [
        *("UPDATE 0", "OFFLOAD O0", "FORWARD 0", "OFFLOAD P0"),
        *("UPDATE 1", "OFFLOAD O1", "FORWARD 1", "OFFLOAD P1"),
        *("UPDATE 2", "OFFLOAD O2", "FORWARD 2", "OFFLOAD P2"),
        *("UPDATE 3", "OFFLOAD O3"),
    ]
    # What the next forward updates first comes, or stays, while backward computes.
    backward = steady[steady.index("BACKWARD 3") :]
    assert {"FETCH O0", "FETCH O1"} <= set(backward) and "OFFLOAD G0" not in backward


def test_a_single_item_by_hand():
    workload = chain(1, deferred=True)
    schedule = plan_schedule(workload, None)
    assert spell(schedule.cold) == ["FETCH P0", "FETCH O0", "BACKWARD 0", "REDUCE 0", "COMBINE"]
    assert spell(schedule.steady) == ["WAIT -2", "UPDATE 0", "BACKWARD 0", "REDUCE 0", "COMBINE"]
    assert spell(schedule.flush) == [
        *("WAIT -2", "UPDATE 0", "OFFLOAD P0", "OFFLOAD O0", "WAIT -1", "WAIT 0", "LAND 0"),
    ]
    # At the end of a steady lap: P, O, the new gradient and those of the last two updates.
    assert schedule.ledger["cold"] == (4, 12, 16, 16, 16)
    assert schedule.ledger["steady"] == (20, 20, 24, 24, 24)
    assert schedule.ledger["flush"] == (20, 20, 20, 20, 16, 12, 0)
    for deferred in (False, True):
        single = replace(workload, deferred=deferred)
        run_everything(single, plan_schedule(single, None))
        run_everything(single, plan_schedule(single, 10**9))


def test_unused_groups_are_updated_with_zeros():
    workload = chain(2, stages=((0,),), backward=(True,))
    order = ["BACKWARD 0", "COMBINE", "REDUCE 0", "UPDATE 0", "ZEROS 1", "REDUCE 1", "UPDATE 1"]
    assert computing(plan_schedule(workload, None).steady) == order
    deferred = plan_schedule(replace(workload, deferred=True), None)
    order = ["BACKWARD 0", "REDUCE 0", "ZEROS 1", "REDUCE 1", "COMBINE"]
    assert computing(deferred.cold) == order
    assert computing(deferred.steady) == ["UPDATE 1", "UPDATE 0", *order]
    assert computing(deferred.flush) == ["UPDATE 1", "UPDATE 0"]


def test_microbatches_sum_into_zeros():
    tied = chain(2, stages=((0,), (1,), (0,)), backward=(True,) * 3, accumulate=True)
    assert computing(plan_schedule(tied, None).steady) == [
        *("FORWARD 0", "FORWARD 1"),
        *("ZEROS 0", "BACKWARD 2", "ZEROS 1", "BACKWARD 1", "COMBINE", "REDUCE 1", "UPDATE 1"),
        *("BACKWARD 0", "REDUCE 0", "UPDATE 0"),
    ]


@pytest.mark.parametrize("deferred", [False, True])
def test_a_tied_gradient_travels_between_its_stages(deferred):
    tied = chain(8, stages=(*((group,) for group in range(8)), (0,)), deferred=deferred)
    words = spell(plan_schedule(tied, None).cold)
    travel = ["BACKWARD 8", "OFFLOAD G0", "BACKWARD 7", "FETCH G0", "BACKWARD 1", "BACKWARD 0"]
    places = [words.index(word) for word in travel]
    assert places == sorted(places)
    assert words.index("UPDATE 0" if not deferred else "REDUCE 0") > places[-1]


@pytest.mark.parametrize("deferred", [False, True])
def test_values_wait_in_the_host_for_their_backward(deferred):
    plain = {"values": {i: 4 for i in range(7)}, "deferred": deferred}
    makes, reads = ((0,), (1,), (2,), (3,), (4,), (5,), (6,), ()), ((), *((i,) for i in range(7)))
    workload = chain(8, makes=makes, reads=reads, **plain)
    words = spell(plan_schedule(workload, None).steady)
    travel = ["FORWARD 1", "OFFLOAD A0", "BACKWARD 7", "FETCH A0", "BACKWARD 1"]
    places = [words.index(word) for word in travel]
    assert places == sorted(places)
    # What backward needs first stays, and nothing is fetched for forward, which has just made it.
    assert not {"OFFLOAD A6", "OFFLOAD A5"} & set(words)
    assert all(words.count(f"FETCH A{i}") == words.count(f"OFFLOAD A{i}") <= 1 for i in range(7))
    evaluation = spell(plan_schedule(workload, None).evaluation)
    assert not any(word.split()[-1].startswith("A") for word in evaluation)
    run_everything(workload, plan_schedule(workload, None))


def test_parts_without_bytes_never_move():
    bare = chain(3, sizes=({"P": 4, "G": 4}, {"P": 4, "O": 0, "G": 4}, {"P": 4}))
    schedule = plan_schedule(bare, None)
    moved = {(r.part, r.group) for name in LAPS for r in getattr(schedule, name) if r.part}
    assert moved == {("P", 0), ("P", 1), ("P", 2)}
    assert "UPDATE 2" in spell(schedule.steady)


def decoder(**changes) -> Workload:
    """Blocks between an embedding and a head that are four times as large."""
    large = {part: 4 * size for part, size in BLOCK.items()}
    return chain(20, sizes=(large, *(BLOCK,) * 18, large), **changes)


def busy_seconds(workload: Workload) -> float:
    """Computing alone."""
    costs = workload.costs
    return sum(costs.forward) - costs.forward[-1] + sum(costs.backward) + sum(costs.update)


def bytes_moved(workload: Workload, schedule: Schedule, op: Op) -> int:
    moved = [(str(r.part), r.group) for r in schedule.steady if r.op is op]
    return sum(workload.size((part, group)) for part, group in moved if group is not None)


def test_streaming_hides_behind_computing():
    # A backward takes as long as its block needs in either direction, the large ends four times.
    workload = decoder(costs=costs(20, 20, forward=(6.0,) * 20, backward=(18.0,) * 20))
    smallest = plan_schedule(workload, None)
    assert smallest.seconds < 1.15 * busy_seconds(workload)
    roomier = plan_schedule(workload, 2 * smallest.smallest_bytes)
    assert roomier.seconds == pytest.approx(busy_seconds(workload), rel=1e-9)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_bound_link_is_never_idle(deferred):
    workload = decoder(
        deferred=deferred, costs=costs(20, 20, forward=(0.1,) * 20, backward=(0.3,) * 20)
    )
    schedule = plan_schedule(workload, None)
    busier = max(bytes_moved(workload, schedule, op) for op in (Op.FETCH, Op.OFFLOAD))
    assert busier <= schedule.seconds < 1.1 * busier


@pytest.mark.parametrize("deferred", [False, True])
def test_a_larger_budget_is_faster(deferred):
    workload = decoder(deferred=deferred)
    smallest = plan_schedule(workload, None)
    room = smallest.all_resident_bytes - smallest.smallest_bytes
    budgets = [smallest.smallest_bytes + room * share // 4 for share in range(5)]
    schedules = [plan_schedule(workload, budget) for budget in budgets]
    seconds = [schedule.seconds for schedule in schedules]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    moved = [bytes_moved(workload, schedule, Op.FETCH) for schedule in schedules]
    assert moved == sorted(moved, reverse=True) and not moved[-1]
    for schedule in schedules:
        run_everything(workload, schedule)


def test_coming_to_rest_fetches_no_resident_that_is_due():
    whole = plan_schedule(chain(30, deferred=True), 10**9)
    assert not any(word.startswith("FETCH") for word in spell(whole.flush))


def test_too_small_a_budget_names_the_smallest_that_works():
    workload = chain(4)
    smallest = plan_schedule(workload, None).smallest_bytes
    with pytest.raises(ValueError, match=rf"device_budget={smallest - 1} .* works is {smallest} "):
        plan_schedule(workload, smallest - 1)
