"""What one training step computes, as plain data: instructions, and the tasks they form.

A task is a stage's forward or backward with the small work that goes with it. This says which
parts of which groups, and which values between stages, each touches; the schedule decides from
that what moves when.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from megatrain_jax._src.common.keys import LASTING, Key, Kind


class Op(enum.Enum):
    """What an instruction asks of the engine."""

    FETCH = "fetch"  # host -> device; both copies are current afterwards
    OFFLOAD = "offload"  # device -> host, then drop the device copy
    RELEASE = "release"  # drop a device copy whose host copy is current
    WAIT = "wait"  # block until a task has been computed
    LAND = "land"  # block until what a task offloaded is in the host
    FORWARD = "forward"
    BACKWARD = "backward"  # adds to the gradients of the stage's groups, creating missing ones
    ZEROS = "zeros"  # create a group's gradient, all zero
    REDUCE = "reduce"  # a group's complete gradient -> scalars, where updates are deferred
    COMBINE = "combine"  # all scalars -> the scalars that updates read
    UPDATE = "update"  # change a group's masters and optimizer state, consume its gradient


WAITS = frozenset({Op.WAIT, Op.LAND})
"""The instructions in which the driver waits for the device."""

# Kinds of the parts of groups that computing touches, in the order in which they are fetched.
_TOUCHES = {
    Op.FORWARD: (Kind.MASTERS,),
    Op.BACKWARD: (Kind.MASTERS, Kind.GRADIENT),
    Op.ZEROS: (Kind.GRADIENT,),
    Op.REDUCE: (Kind.GRADIENT,),  # and what the optimizer reads besides
    Op.COMBINE: (),
    Op.UPDATE: (Kind.MASTERS, Kind.OPTIMIZER_STATE, Kind.GRADIENT),
}


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One thing for the engine to do.

    Attributes:
        op: What to do.
        stage: The stage of a FORWARD or BACKWARD.
        group: The group of a ZEROS, REDUCE or UPDATE.
        key: What a FETCH, OFFLOAD or RELEASE moves, or a LAND waits for.
        task: The task of its lap this instruction belongs to; for WAIT and LAND the task to wait
            for, where negative numbers count back from the end of the lap before (-1 is its last).
    """

    op: Op
    stage: int | None = None
    group: int | None = None
    key: Key | None = None
    task: int | None = None


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
        dispatch: What the driver needs to dispatch one instruction.
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
        sizes: For each group the bytes of its masters, optimizer state and gradient. What is
            missing or has no bytes never moves and appears in no FETCH, OFFLOAD or RELEASE.
        values: Bytes of each value that is counted, by its id.
        makes: For each stage, the counted values it makes; none unless given.
        reads: For each stage, the counted values it reads.
        residuals: For each stage, bytes of the residuals that it can keep, 0 if none; none unless
            given.
        kept: The stages that keep them.
        frozen: The groups that are only read: they have no gradients and are never updated.
        deferred: Updates need scalars of all gradients, so they happen in the next step.
        accumulate: A stage runs several microbatches, so its gradients have to start as ZEROS.
        reduce_reads: Kinds that REDUCE reads besides the gradient.
        costs: How long it takes.
    """

    stages: tuple[tuple[int, ...], ...]
    backward: tuple[bool, ...]
    fused_last: bool
    sizes: tuple[Mapping[Kind, int], ...]
    values: Mapping[int, int] = field(default_factory=dict)
    makes: tuple[tuple[int, ...], ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    residuals: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()
    frozen: frozenset[int] = frozenset()
    deferred: bool
    accumulate: bool = False
    reduce_reads: frozenset[Kind] = frozenset()
    costs: Costs

    def __post_init__(self) -> None:
        """Checks what the schedule relies on."""
        assert self.stages and len(self.stages) == len(self.backward)
        assert self.backward[-1] or not self.fused_last, "a fused last stage yields the loss"
        assert all(0 <= group < len(self.sizes) for stage in self.stages for group in stage)
        assert self.reduce_reads <= LASTING
        untrained = (Kind.OPTIMIZER_STATE, Kind.GRADIENT)
        assert not any(self.size(Key(kind, g)) for g in self.frozen for kind in untrained)
        assert len(self.costs.forward) == len(self.costs.backward) == len(self.stages)
        assert len(self.costs.update) == len(self.sizes)
        made, read = ({i for row in rows for i in row} for rows in (self.makes, self.reads))
        assert set(self.values) == made == read, "every value is made and read"
        assert all(self.residuals[s] and self.backward[s] for s in self.kept)
        assert not self.fused_last or len(self.stages) - 1 not in self.kept

    def size(self, key: Key) -> int:
        """Bytes of one part of one group, of one value, or of one stage's residuals."""
        kind, owner = key
        if kind is Kind.RESIDUALS:
            return self.residuals[owner]
        return self.values[owner] if kind is Kind.ACTIVATION else self.sizes[owner].get(kind, 0)


@dataclass(frozen=True, kw_only=True)
class Computation:
    """One computing instruction, what it does to parts and values, and how long it takes."""

    instruction: Instruction
    touches: tuple[Key, ...]
    creates: tuple[Key, ...]
    dirties: tuple[Key, ...]
    kills: tuple[Key, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Use:
    """A task uses a part, which either exists before the task or is created by it."""

    key: Key
    creates: bool


@dataclass(frozen=True, kw_only=True)
class Task:
    """Steps between which nothing is fetched.

    Attributes:
        steps: What it computes, in order.
        uses: The parts it uses: first those that have to be there when it begins, then those that
            may still arrive while its stage computes, and last those that it creates.
        num_early: How many are of the first kind.
        last_step: The last of the steps that touches a part.
    """

    steps: tuple[Computation, ...]
    uses: tuple[Use, ...]
    num_early: int
    last_step: dict[Key, int]


@dataclass(frozen=True, kw_only=True)
class TaskLists:
    """The tasks of every kind of lap: the same for every budget."""

    workload: Workload
    cold: tuple[Task, ...]
    steady: tuple[Task, ...]
    flush: tuple[Task, ...]
    evaluation: tuple[Task, ...]


def build_task_lists(workload: Workload) -> TaskLists:
    """Lists the tasks of every kind of lap of a workload."""
    lap = _deferred_lap(workload) if workload.deferred else _immediate_lap(workload)
    pending = Op.UPDATE if workload.deferred else None
    # The first lap has nothing to apply; tasks left empty keep its numbering that of all lists.
    first = [[instruction for instruction in task if instruction.op is not pending] for task in lap]
    at_rest = [[instruction for instruction in task if instruction.op is pending] for task in lap]
    forward = [[Instruction(op=Op.FORWARD, stage=stage)] for stage in range(len(workload.stages))]
    made: set[Key] = set()
    cold = _as_tasks(workload, first, made)
    waiting = set(made)
    steady = _as_tasks(workload, lap, made)
    assert made == waiting, "a lap leaves the gradients that the next one starts from"
    flush = _as_tasks(workload, list(filter(None, at_rest)), waiting)
    assert not waiting, "a flush applies every gradient"
    evaluation = _as_tasks(replace(workload, kept=frozenset()), forward, set())
    return TaskLists(
        workload=workload, cold=cold, steady=steady, flush=flush, evaluation=evaluation
    )


def _immediate_lap(workload: Workload) -> list[list[Instruction]]:
    """Each group is updated in the task that completes its gradient."""
    stages = range(len(workload.stages) - workload.fused_last)
    tasks = [[Instruction(op=Op.FORWARD, stage=stage)] for stage in stages]
    combine = [Instruction(op=Op.COMBINE)]
    for task, complete in gradient_tasks(workload):
        if complete:
            task.extend(combine)
            combine = []
        tasks.append([*task, *_for_each(complete, Op.UPDATE)])
    tasks[-1].extend(combine)
    return tasks


def _deferred_lap(workload: Workload) -> list[list[Instruction]]:
    """Each group is updated before its first use in the next lap."""
    unused = _unused_groups(workload)
    pending = set(_trained_groups(workload)).difference(unused)
    tasks = [_for_each([group], Op.UPDATE) for group in unused]
    for stage, groups in enumerate(workload.stages):
        fresh = sorted(pending.intersection(groups))
        pending.difference_update(fresh)
        tasks.append([*_for_each(fresh, Op.UPDATE), Instruction(op=Op.FORWARD, stage=stage)])
    updates = tasks.pop()[:-1] if workload.fused_last else []
    for task, complete in gradient_tasks(workload):
        tasks.append([*updates, *task, *_for_each(complete, Op.REDUCE)])
        updates = []
    tasks[-1].append(Instruction(op=Op.COMBINE))
    return tasks


def _for_each(groups: Iterable[int], op: Op) -> list[Instruction]:
    return [Instruction(op=op, group=group) for group in groups]


def gradient_tasks(workload: Workload) -> list[tuple[list[Instruction], list[int]]]:
    """The tasks that make gradients, each with the groups whose gradients it completes."""
    stages = [stage for stage, reached in enumerate(workload.backward) if reached]
    trained = [[g for g in groups if g not in workload.frozen] for groups in workload.stages]
    latest = {group: stage for stage in stages for group in trained[stage]}
    earliest = {group: stage for stage in reversed(stages) for group in trained[stage]}
    tasks = []
    for stage in reversed(stages):
        groups = dict.fromkeys(trained[stage])
        begun = [group for group in groups if latest[group] == stage and workload.accumulate]
        complete = [group for group in groups if earliest[group] == stage]
        backward = Instruction(op=Op.BACKWARD, stage=stage)
        tasks.append(([*_for_each(begun, Op.ZEROS), backward], complete))
    tasks.extend((_for_each([group], Op.ZEROS), [group]) for group in _unused_groups(workload))
    return tasks


def _unused_groups(workload: Workload) -> list[int]:
    """Groups that the loss does not depend on; Optax still updates them, with zeros."""
    reached = zip(workload.stages, workload.backward, strict=True)
    used = {group for stage, backward in reached if backward for group in stage}
    return [group for group in _trained_groups(workload) if group not in used]


def _trained_groups(workload: Workload) -> list[int]:
    return [group for group in range(len(workload.sizes)) if group not in workload.frozen]


def _as_tasks(
    workload: Workload, lap: Sequence[Sequence[Instruction]], made: set[Key]
) -> tuple[Task, ...]:
    """Derives what a lap's tasks need; `made` holds what exists of gradients and values."""
    last_read: dict[int, Instruction] = {}
    for instruction in chain.from_iterable(lap):
        last_read.update(dict.fromkeys(_reads(workload, instruction), instruction))
    tasks = []
    for number, instructions in enumerate(lap):
        steps = []
        for instruction in instructions:
            done = [i for i in _reads(workload, instruction) if last_read[i] is instruction]
            steps.append(_as_step(workload, replace(instruction, task=number), done, made))
            made.update(steps[-1].creates)
            made.difference_update(steps[-1].kills)
        tasks.append(_as_task(workload, steps))
    return tuple(tasks)


def _reads(workload: Workload, instruction: Instruction) -> Sequence[int]:
    return (
        () if instruction.stage is None or not workload.reads else workload.reads[instruction.stage]
    )


def _as_task(workload: Workload, steps: Sequence[Computation]) -> Task:
    stages = [at for at, step in enumerate(steps) if step.instruction.stage is not None]
    stage = max(stages, default=len(steps) - 1)
    early: dict[Key, None] = {}
    late: dict[Key, None] = {}
    created: dict[Key, None] = {}
    for at, step in enumerate(steps):
        for key in step.touches:
            if key in step.creates:
                created[key] = None
            elif not any(key in known for known in (early, late, created)):
                (early if at <= stage else late)[key] = None
    # What can't arrive while the stage computes would hold up what follows.
    seconds = sum(steps[at].seconds for at in stages)
    hidden = sum(map(workload.size, late)) * workload.costs.byte <= seconds
    return Task(
        steps=tuple(steps),
        uses=(
            *(Use(key=key, creates=False) for key in (*early, *late)),
            *(Use(key=key, creates=True) for key in created),
        ),
        num_early=len(early) + (0 if hidden else len(late)),
        last_step={key: at for at, step in enumerate(steps) for key in step.touches},
    )


def _as_step(
    workload: Workload, instruction: Instruction, done: Iterable[int], made: set[Key]
) -> Computation:
    """What an instruction touches; `done` are values that it is the last to read."""
    groups = (
        (instruction.group,) if instruction.stage is None else workload.stages[instruction.stage]
    )

    def keys(kinds: Iterable[Kind]) -> tuple[Key, ...]:
        every = (Key(kind, group) for group in groups if group is not None for kind in kinds)
        return tuple(key for key in dict.fromkeys(every) if workload.size(key))

    makes = instruction.op in (Op.BACKWARD, Op.ZEROS)
    gradients = keys([Kind.GRADIENT])
    new = tuple(key for key in gradients if makes and key not in made)
    assert instruction.op is not Op.ZEROS or new == gradients, "zeros would lose a gradient"
    updates = instruction.op is Op.UPDATE
    state = keys([Kind.MASTERS, Kind.OPTIMIZER_STATE]) if updates else ()
    touches = _TOUCHES[instruction.op]
    if instruction.op is Op.REDUCE:
        touches = (*touches, *sorted(workload.reduce_reads))
    read = tuple(Key(Kind.ACTIVATION, i) for i in dict.fromkeys(_reads(workload, instruction)))
    given: tuple[Key, ...] = ()
    if instruction.op is Op.FORWARD and instruction.stage is not None and workload.makes:
        given = tuple(Key(Kind.ACTIVATION, i) for i in workload.makes[instruction.stage])
    used: tuple[Key, ...] = ()
    if instruction.stage in workload.kept:
        residuals = (Key(Kind.RESIDUALS, instruction.stage),)
        given, used = (
            ((*given, *residuals), ()) if instruction.op is Op.FORWARD else (given, residuals)
        )
    return Computation(
        instruction=instruction,
        touches=(*keys(touches), *read, *used, *given),
        creates=(*new, *given),
        dirties=(*(gradients if makes else state), *given),
        kills=(
            *(gradients if updates else ()),
            *(Key(Kind.ACTIVATION, i) for i in dict.fromkeys(done)),
            *used,
        ),
        seconds=_seconds(workload, instruction),
    )


def _seconds(workload: Workload, instruction: Instruction) -> float:
    costs = workload.costs
    if instruction.stage is not None:
        if instruction.op is Op.FORWARD:
            return costs.forward[instruction.stage]
        saved = costs.recompute[instruction.stage] if instruction.stage in workload.kept else 0.0
        return costs.backward[instruction.stage] - saved
    if instruction.op is Op.UPDATE and instruction.group is not None:
        return costs.update[instruction.group]
    return 0.0
