"""A small machine that does what an engine does, with versions instead of arrays.

A stale copy, a lost partial sum, an update with the wrong gradient or a byte too many fails here
rather than in a training run.
"""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain_jax._src.common.keys import LASTING, PASSING, Key, Kind
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.schedule import Schedule
from megatrain_jax._src.engine.schedule.transient_host_bytes import in_flight_bytes
from megatrain_jax._src.engine.schedule.workload import Workload
from workloads import MOVES, WAITS

# The kinds of parts that wait in the host, as a plan lists them.
PARTS = (Kind.GRADIENT, Kind.ACTIVATION, Kind.RESIDUALS)


@dataclass(kw_only=True)
class Machine:
    """A machine that runs instructions on version numbers.

    The version of masters and optimizer state is the number of their updates, that of a gradient
    the step that made it and the stages of each wave summed into it, that of an activation or
    residuals the run and the wave that made them.
    """

    workload: Workload
    truth: dict[Key, Any] = field(default_factory=dict)  # as if nothing ever moved
    host: dict[Key, Any] = field(default_factory=dict)
    device: dict[Key, Any] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)  # free once the task has been computed
    leaving: dict[tuple[int, Key], int] = field(default_factory=dict)  # free once landed
    kind: str = ""
    step: int = 0
    runs: int = 0
    # Instructions of this step with an activation that no later one reads before it is made again.
    last_reads: set[tuple[int, int]] = field(default_factory=set)
    kept: frozenset[int] = frozenset()  # stages of the step at hand that keep residuals
    begun: int = 0  # number of the first task of this step
    task: int = -1  # the last task seen
    computing: int = -1  # the last task that computed
    staged: bool = False  # its stage has been computed
    fetched: dict[Key, int] = field(default_factory=dict)
    reduced: dict[int, int] = field(default_factory=dict)
    combined: int = 0
    waited: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})  # if evaluating
    # Bytes of gradients, activations and residuals whenever the most of them waited, in training.
    most_waited: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self):
        self.truth = {Key(kind, group): 0 for kind in LASTING for group in self.groups}
        self.host = {key: 0 for key in self.truth if self.workload.size(key)}

    @property
    def groups(self) -> range:
        return range(len(self.workload.sizes))

    def run(self, kind: str, schedule: Schedule, *, exact: bool) -> None:
        """Runs one of the lists; its ledger has to be exact or else a bound."""
        self.kind = kind
        self.step += kind in ("cold", "steady")
        self.runs += 1
        self.workload = replace(self.workload, kept=schedule.kept)
        self.kept = schedule.kept if kind in ("cold", "steady") else frozenset()
        reader: dict[int, Instruction] = {}
        self.last_reads = set()
        for instruction in getattr(schedule, kind):
            if instruction.stage is None:
                continue
            if instruction.op is Op.FORWARD:
                for i in self.of_stage(self.workload.makes, instruction.stage):
                    if i in reader:
                        self.last_reads.add((id(reader[i]), i))
                    reader[i] = instruction  # which drops what nobody reads
            for i in self.of_stage(self.workload.reads, instruction.stage):
                reader[i] = instruction
        self.last_reads.update((id(instruction), i) for i, instruction in reader.items())
        for instruction, promised in zip(
            getattr(schedule, kind), schedule.ledger[kind], strict=True
        ):
            assert instruction.task is not None
            self.task = max(self.task, self.begun + instruction.task)
            if instruction.op in MOVES:
                self.move(instruction, self.begun + instruction.task, exact)
            else:
                self.compute(instruction, self.begun + instruction.task)
            evaluates = kind == "evaluation"
            if not evaluates and self.waiting() > self.waited[False]:
                self.most_waited.clear()
            self.waited[evaluates] = max(self.waited[evaluates], self.waiting())
            if not evaluates and self.waiting() == self.waited[False]:
                self.most_waited.add(tuple(self.waiting(kind) for kind in PARTS))
            held = sum(self.workload.size(key) for key in self.device)
            actual = held + sum(self.used.values()) + sum(self.leaving.values())
            assert actual == promised if exact else actual <= promised
            assert promised <= schedule.peak_bytes
        assert not any(key.kind in PASSING for key in (*self.truth, *self.device, *self.host))
        if kind in ("cold", "steady"):
            self.begun += schedule.num_tasks
            self.check_end_of_step()
        else:
            self.check_rest()
            self.begun, self.task, self.computing = 0, -1, -1
            self.fetched.clear()

    def waiting(self, kind: Kind | None = None) -> int:
        """Bytes of current copies in the host of parts beside the state, or of one kind of them."""
        kinds = set(PARTS) if kind is None else {kind}
        kept = (key for key in self.host if key.kind in kinds)
        return sum(self.workload.size(k) for k in kept if self.host[k] == self.truth.get(k))

    def of_stage(self, table: tuple[tuple[int, ...], ...], stage: int) -> tuple[int, ...]:
        return table[stage] if table else ()

    def move(self, instruction: Instruction, task: int, exact: bool) -> None:
        key = instruction.key
        if instruction.op in WAITS:
            assert task <= self.computing, "waits for what was not dispatched"
            freed = self.leaving.pop((task, key), 0) if key else self.used.pop(task, 0)
            assert freed or not exact, "nothing to wait for"
            return
        assert key is not None
        assert self.workload.size(key)
        assert key.kind is not Kind.RESIDUALS or self.workload.may_offload_residuals
        if instruction.op is Op.FETCH:
            assert key not in self.device
            assert self.host[key] == self.truth[key], "a stale copy is fetched"
            assert self.computing < task, "a task fetches before it computes"
            self.device[key] = self.host[key]
            # What the first task needs after a rest can't have been fetched ahead.
            ahead = self.kind == "steady" or task > self.begun
            self.fetched[key] = task if ahead else task - 1
            return
        assert task == self.computing, "evictions follow the op they wait for"
        if instruction.op is Op.RELEASE:
            assert self.host[key] == self.device[key], "a changed part is dropped"
        self.host[key] = self.device.pop(key)
        if instruction.op is Op.RELEASE:
            self.free(key, task)
        else:
            self.leaving[task, key] = self.workload.size(key)

    def free(self, key: Key, task: int) -> None:
        self.used[task] = self.used.get(task, 0) + self.workload.size(key)

    def compute(self, instruction: Instruction, task: int) -> None:
        assert task >= self.computing
        self.staged = instruction.stage is not None or (self.staged and task == self.computing)
        self.computing = task
        group = -1 if instruction.group is None else instruction.group
        if instruction.stage is not None:
            for owner in set(self.workload.stages[instruction.stage]):
                self.read(Key(Kind.MASTERS, owner), stage=True)
                updates = self.step - (self.kind in ("cold", "steady"))
                assert self.truth[Key(Kind.MASTERS, owner)] == updates, (
                    "a stage reads the last step's masters"
                )
                if instruction.op is Op.BACKWARD:
                    self.add_gradient(owner, instruction.stage, instruction.wave)
            version = self.runs, instruction.wave
            for i in self.of_stage(self.workload.reads, instruction.stage):
                self.read(Key(Kind.ACTIVATION, i), stage=True)
                assert self.truth[Key(Kind.ACTIVATION, i)] == version, (
                    "a stage reads what this run and this wave made"
                )
            if instruction.op is Op.FORWARD:
                for i in self.of_stage(self.workload.makes, instruction.stage):
                    assert Key(Kind.ACTIVATION, i) not in self.truth
                    self.write(Key(Kind.ACTIVATION, i), version)
            if instruction.stage in self.kept:
                residuals = Key(Kind.RESIDUALS, instruction.stage)
                if instruction.op is Op.FORWARD:
                    assert residuals not in self.truth
                    self.write(residuals, version)
                else:
                    self.read(residuals, stage=True)
                    assert self.truth[residuals] == version
                    self.consume(residuals)
            for table in (self.workload.reads, self.workload.makes):
                for i in self.of_stage(table, instruction.stage):
                    if (id(instruction), i) in self.last_reads:
                        self.consume(Key(Kind.ACTIVATION, i))
        elif instruction.op is Op.ZEROS:
            assert Key(Kind.GRADIENT, group) not in self.truth
            self.write(Key(Kind.GRADIENT, group), (self.step, frozenset()))
        elif instruction.op is Op.REDUCE:
            assert self.workload.deferred
            for kind in self.workload.reduce_reads:
                self.read(Key(kind, group))
            self.reduce(group)
        elif instruction.op is Op.COMBINE:
            assert self.combined == self.step - 1
            self.combined = self.step
            if self.workload.deferred:
                assert all(self.reduced[group] == self.step for group in self.groups)
        else:
            assert instruction.op is Op.UPDATE
            self.update(group)

    def read(self, key: Key, stage: bool = False) -> None:
        assert key in self.truth
        if self.workload.size(key):
            assert self.device[key] == self.truth[key]
            late = self.staged and not stage  # arrives while the stage computes
            assert self.fetched.get(key, -1) < self.computing + late, "fetched too late to overlap"

    def write(self, key: Key, version: object) -> None:
        self.truth[key] = version
        if self.workload.size(key):
            self.device[key] = version
            self.fetched.pop(key, None)

    def backward_stages(self, group: int) -> frozenset[tuple[int, int]]:
        stages = zip(self.workload.stages, self.workload.backward, strict=True)
        read = [at for at, (used, needed) in enumerate(stages) if needed and group in used]
        return frozenset(itertools.product(read, range(self.workload.waves)))

    def add_gradient(self, group: int, stage: int, wave: int) -> None:
        step, stages, key = self.step, frozenset(), Key(Kind.GRADIENT, group)
        if key in self.truth:
            self.read(key, stage=True)
            step, stages = self.truth[key]
        else:
            assert not self.workload.accumulate, "sums over microbatches start from zeros"
        assert step == self.step and (stage, wave) not in stages
        self.write(key, (step, stages | {(stage, wave)}))

    def reduce(self, group: int) -> None:
        self.read(Key(Kind.GRADIENT, group))
        assert self.truth[Key(Kind.GRADIENT, group)] == (self.step, self.backward_stages(group))
        assert self.combined == self.step - self.workload.deferred
        assert self.reduced.get(group, 0) == self.step - 1
        self.reduced[group] = self.step

    def update(self, group: int) -> None:
        for kind in (*LASTING, Kind.GRADIENT):
            self.read(Key(kind, group))
        if not self.workload.deferred:
            self.reduce(group)  # an update at once measures its gradient itself
        late = self.workload.deferred and self.kind != "flush"
        made = self.step - late
        assert self.reduced[group] == made <= self.combined
        assert self.truth[Key(Kind.GRADIENT, group)] == (made, self.backward_stages(group))
        for kind in LASTING:
            key = Key(kind, group)
            assert self.truth[key] == made - 1, "each gradient is applied exactly once"
            self.write(key, made)
        self.consume(Key(Kind.GRADIENT, group))

    def consume(self, key: Key) -> None:
        if self.workload.size(key):  # free once the device has got here
            self.free(key, self.computing)
        for copies in (self.truth, self.device, self.host, self.fetched):
            copies.pop(key, None)

    def check_end_of_step(self) -> None:
        assert self.combined == self.step
        assert all(self.reduced[group] == self.step for group in self.groups)
        applied = self.step - self.workload.deferred
        assert all(self.truth[Key(Kind.MASTERS, group)] == applied for group in self.groups)

    def check_rest(self) -> None:
        assert not self.device and not self.used and not self.leaving
        assert all(version == self.step for version in self.truth.values())
        assert self.host == {key: v for key, v in self.truth.items() if self.workload.size(key)}


def run_everything(workload: Workload, schedule: Schedule) -> None:
    """All lists in all orders in which a trainer can run them."""
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
    in_flight = in_flight_bytes(workload, schedule.steady)
    parts = schedule.transient
    assert parts.in_flight == in_flight
    assert (parts.gradients, parts.activations, parts.residuals) in machine.most_waited
    assert machine.waited[False] + in_flight == schedule.transient_bytes
    assert machine.waited[True] == schedule.evaluation_bytes
