"""The tasks of a training step as plain data: computations in order, with the parts they use.

A task is a stage's forward or backward, with small computations such as updates. From the parts
that each task uses, the schedule decides when to move them.

Two stages that read groups 0 and 1, with a fused last stage and immediate updates, form three tasks
(M masters, O optimizer state, G gradient, A activation, by owner):

    task  computations               uses, early ones first                 creates
    0     FORWARD 0                  M0                                     A0
    1     BACKWARD 1, COMBINE,       M1 A0; O1 may arrive while BACKWARD 1  G1
          UPDATE 1                   computes, if that takes long enough
    2     BACKWARD 0, UPDATE 0       M0; O0                                 G0

If updates are deferred, because they need a scalar of all gradients, the tasks of a steady step are

    0     UPDATE 0, FORWARD 0        the updates use the previous step's G0 and
    1     UPDATE 1, BACKWARD 1,      G1, and free their memory before this step
          REDUCE 1                   creates new ones
    2     BACKWARD 0, REDUCE 0,
          COMBINE

The first step omits the UPDATEs, and a flush consists of them alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.order import computing_order, evaluating_order
from megatrain_jax._src.engine.schedule.workload import Workload

# Kinds of a group's parts that each operation touches, in the order of fetching.
_TOUCHES = {
    Op.FORWARD: (Kind.MASTERS,),
    Op.BACKWARD: (Kind.MASTERS, Kind.GRADIENT),
    Op.ZEROS: (Kind.GRADIENT,),
    Op.REDUCE: (Kind.GRADIENT,),  # plus `Workload.reduce_reads`
    Op.COMBINE: (),
    Op.UPDATE: (Kind.MASTERS, Kind.OPTIMIZER_STATE, Kind.GRADIENT),
}


# The first, a middle and the last wave.
_FEW_WAVES = 3


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A computing instruction with its effects on parts, and its time.

    Attributes:
        instruction: The instruction.
        touches: Parts that must be on the device, including the parts that it creates.
        creates: Parts that exist only after it.
        dirties: Parts that it creates or changes, so that the host's copy becomes stale.
        kills: Parts that don't exist after it.
        seconds: Estimate of its time.
        seconds_on_link: Seconds during which devices exchange values over their links.
    """

    instruction: Instruction
    touches: tuple[Key, ...]
    creates: tuple[Key, ...]
    dirties: tuple[Key, ...]
    kills: tuple[Key, ...]
    seconds: float
    seconds_on_link: float


@dataclass(frozen=True, kw_only=True)
class Use:
    """A part that a task uses, and whether the task creates it."""

    key: Key
    creates: bool


@dataclass(frozen=True, kw_only=True)
class Task:
    """A sequence of computations without fetches in between.

    Attributes:
        computations: The computing instructions, in order.
        uses: The parts it uses: first the early parts, which must be present when it begins, then
            the parts that may arrive while its stage computes, and last the parts that it creates.
        num_early: Number of early parts.
        last_touch: For each part, the number of the last computation that touches it.
        wave: The wave of its stage; 0 if it has no stage.
    """

    computations: tuple[Computation, ...]
    uses: tuple[Use, ...]
    num_early: int
    last_touch: dict[Key, int]
    wave: int = 0


@dataclass(frozen=True, kw_only=True)
class TaskLists:
    """The tasks of each list that can be run: the same for every budget.

    Attributes:
        workload: The workload of the tasks.
        cold: A training step that starts at rest.
        steady: A training step that follows a training step; as many tasks as `cold`.
        flush: The pending updates of a training step.
        evaluation: Every stage's forward.
        left_out: Number of waves that the lists omit, all equal to the second one.
    """

    workload: Workload
    cold: tuple[Task, ...]
    steady: tuple[Task, ...]
    flush: tuple[Task, ...]
    evaluation: tuple[Task, ...]
    left_out: int = 0

    def times(self, task: int) -> int:
        """The number of times that a step runs a task of the lists."""
        return 1 + (self.left_out if self.steady[task].wave == 1 else 0)


def build_task_lists(
    workload: Workload, *, few_waves: bool = False, bare: TaskLists | None = None
) -> TaskLists:
    """Lists the tasks of a workload.

    Args:
        workload: The workload.
        bare: Lists of the same workload without residuals, if they are known; what residuals don't
            change is taken from them.
        few_waves: Whether to list three waves at most: the first, the last, and one of the middle
            waves, which are equal. They suffice to time a step, but can't be run.
    """
    left_out = max(0, workload.waves - _FEW_WAVES) if few_waves else 0
    workload = replace(workload, waves=workload.waves - left_out)
    every = computing_order(workload)
    pending = Op.UPDATE if workload.deferred else None
    # The first step has no updates. Empty tasks are kept, so that all steps number tasks alike.
    first = [[i for i in task if i.op is not pending] for task in every]
    # `made` carries over from list to list, because they run one after another. The asserts check
    # that each list finds the gradients left by the one before, and that a flush leaves none.
    made: set[Key] = set()
    cold = _as_tasks(workload, first, made)
    waiting = set(made)
    steady = _as_tasks(workload, every, made, cold)
    assert made == waiting, "a step leaves the gradients that the next one starts from"
    if bare is None:
        at_rest = [[i for i in task if i.op is pending] for task in every]
        flush = _as_tasks(workload, list(filter(None, at_rest)), waiting)
        assert not waiting, "a flush applies every gradient"
        # An evaluation has no backward, so it saves no residuals.
        without = replace(workload, kept=frozenset())
        evaluation = _as_tasks(without, evaluating_order(workload), set())
    else:
        flush, evaluation = bare.flush, bare.evaluation
    return TaskLists(
        workload=workload,
        cold=cold,
        steady=steady,
        flush=flush,
        evaluation=evaluation,
        left_out=left_out,
    )


def _as_tasks(
    workload: Workload,
    step: Sequence[Sequence[Instruction]],
    made: set[Key],
    known: Sequence[Task] = (),
) -> tuple[Task, ...]:
    """Derives the tasks, with the parts they use, from instructions.

    Args:
        workload: The workload of the step.
        step: The instructions of each task.
        made: Gradients, activations and residuals that exist before; updated in place.
        known: Tasks of the same step, perhaps without its updates; equal ones are taken.
    """
    # An activation is dropped after its last read in this list, or after its last read before it is
    # computed again. In an evaluation the last reader is a FORWARD; in a step it is usually the
    # BACKWARD of the first stage that reads it.
    instructions = list(chain.from_iterable(step))
    done = last_reads(
        [_reads(workload, i) for i in instructions], [_makes(workload, i) for i in instructions]
    )
    rows = iter(done)
    tasks = []
    for number, instructions in enumerate(step):
        # Updates read no activations, so a task without them is the same beside them.
        if known and len(known[number].computations) == len(instructions):
            tasks.append(known[number])
            for computation in known[number].computations:
                next(rows)
                made.update(computation.creates)
                made.difference_update(computation.kills)
            continue
        computations = []
        for instruction in instructions:
            numbered = replace(instruction, task=number)
            computations.append(_as_computation(workload, numbered, next(rows), made))
            made.update(computations[-1].creates)
            made.difference_update(computations[-1].kills)
        tasks.append(_as_task(workload, computations))
    return tuple(tasks)


def last_reads(
    reads: Sequence[Iterable[int]], makes: Sequence[Iterable[int]]
) -> list[tuple[int, ...]]:
    """The values that are no longer needed after each computation.

    A value may be made more than once, and is not needed from its last read until it is made again.
    Example: computations 0, 2 and 4 make x, and 1 and 3 read it::

        last_reads([(), "x", (), "x", ()], ["x", (), "x", (), "x"])
        # [(), ("x",), (), ("x",), ("x",)]: no computation reads the last x

    Args:
        reads: The values that each computation reads, in order.
        makes: The values that each computation makes.
    """
    # Backwards: a value becomes needed at its last read, until the computation that makes it.
    needed: set[int] = set()
    found = []
    for read, made in zip(reversed(reads), reversed(makes), strict=True):
        done = [i for i in made if i not in needed]
        needed.difference_update(made)
        done += [i for i in dict.fromkeys(read) if i not in needed]
        needed.update(read)
        found.append(tuple(done))
    return found[::-1]


def _makes(workload: Workload, instruction: Instruction) -> Sequence[int]:
    """The activations that an instruction makes."""
    if instruction.stage is None or not workload.makes or instruction.op is not Op.FORWARD:
        return ()
    return workload.makes[instruction.stage]


def _reads(workload: Workload, instruction: Instruction) -> Sequence[int]:
    """The activations that an instruction reads."""
    if instruction.stage is None or not workload.reads:
        return ()
    return workload.reads[instruction.stage]


def _as_task(workload: Workload, computations: Sequence[Computation]) -> Task:
    """The task of these computations, with its parts in the order in which they are needed."""
    stages = [at for at, c in enumerate(computations) if c.instruction.stage is not None]
    # Parts that only later computations touch, such as an UPDATE's optimizer state, may arrive
    # while the stage computes. A task without a stage has no computation to hide their transfer.
    stage = max(stages, default=len(computations) - 1)
    early: dict[Key, None] = {}
    late: dict[Key, None] = {}
    created: dict[Key, None] = {}
    for at, computation in enumerate(computations):
        for key in computation.touches:
            if key in computation.creates:
                created[key] = None
            elif not any(key in known for known in (early, late, created)):
                (early if at <= stage else late)[key] = None
    # Parts that can't arrive while the stage computes would delay the computations after it, so
    # they count as early.
    seconds = sum(computations[at].seconds for at in stages)
    hidden = workload.seconds_inward(late) <= seconds
    return Task(
        computations=tuple(computations),
        uses=(
            *(Use(key=key, creates=False) for key in (*early, *late)),
            *(Use(key=key, creates=True) for key in created),
        ),
        num_early=len(early) + (0 if hidden else len(late)),
        last_touch={key: at for at, c in enumerate(computations) for key in c.touches},
        wave=computations[stages[0]].instruction.wave if stages else 0,
    )


def _as_computation(
    workload: Workload, instruction: Instruction, done: Iterable[int], made: set[Key]
) -> Computation:
    """The computation of an instruction, with the parts it touches and changes.

    Args:
        workload: The workload of the step.
        instruction: The instruction.
        done: Activations that are no longer needed after it.
        made: Gradients, activations and residuals that exist before it.
    """
    groups = (
        (instruction.group,) if instruction.stage is None else workload.stages[instruction.stage]
    )

    def keys(kinds: Iterable[Kind]) -> tuple[Key, ...]:
        every = (Key(kind, group) for group in groups if group is not None for kind in kinds)
        return tuple(key for key in dict.fromkeys(every) if workload.size(key))

    makes = instruction.op in (Op.BACKWARD, Op.ZEROS)
    updates = instruction.op is Op.UPDATE
    gradients = keys([Kind.GRADIENT])
    state = keys([Kind.MASTERS, Kind.OPTIMIZER_STATE]) if updates else ()
    # The first BACKWARD of a group creates its gradient, unless ZEROS did; later ones add to it.
    new = tuple(key for key in gradients if makes and key not in made)
    assert instruction.op is not Op.ZEROS or new == gradients, "zeros would lose a gradient"
    touches = _TOUCHES[instruction.op]
    if instruction.op is Op.REDUCE:
        touches = (*touches, *sorted(workload.reduce_reads))
    read = _activations(dict.fromkeys(_reads(workload, instruction)))
    given, taken = _of_stage(workload, instruction)
    return Computation(
        instruction=instruction,
        touches=(*keys(touches), *read, *taken, *given),
        creates=(*new, *given),
        dirties=(*(gradients if makes else state), *given),
        kills=(
            *(gradients if updates else ()),
            *_activations(dict.fromkeys(done)),
            *taken,
        ),
        seconds=_seconds(workload, instruction),
        seconds_on_link=_seconds_on_link(workload, instruction),
    )


def _activations(ids: Iterable[int]) -> tuple[Key, ...]:
    return tuple(Key(Kind.ACTIVATION, i) for i in ids)


def _of_stage(
    workload: Workload, instruction: Instruction
) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """The activations and residuals that a stage makes, and the residuals that it consumes."""
    stage = instruction.stage
    if stage is None:
        return (), ()
    residuals = (Key(Kind.RESIDUALS, stage),) if stage in workload.kept else ()
    if instruction.op is not Op.FORWARD:
        return (), residuals
    return (*_activations(_makes(workload, instruction)), *residuals), ()


def _seconds(workload: Workload, instruction: Instruction) -> float:
    costs = workload.costs
    if instruction.stage is not None:
        if instruction.op is Op.FORWARD:
            return costs.forward[instruction.stage]
        saved = costs.recompute[instruction.stage] if instruction.stage in workload.kept else 0.0
        rounding = costs.rounding[instruction.stage] if costs.rounding else 0.0
        return costs.backward[instruction.stage] - saved + rounding
    if instruction.op not in (Op.REDUCE, Op.UPDATE):
        return 0.0
    group = instruction.group
    assert group is not None
    found = costs.update if instruction.op is Op.UPDATE else costs.reduce
    first = Op.REDUCE if workload.deferred else Op.UPDATE  # reads the gradient first
    summing = costs.summing[group] if costs.summing and instruction.op is first else 0.0
    return (found[group] if found else 0.0) + summing


def _seconds_on_link(workload: Workload, instruction: Instruction) -> float:
    if instruction.stage is None:
        return 0.0
    costs = workload.costs
    forward = instruction.op is Op.FORWARD
    seconds = costs.forward_on_link if forward else costs.backward_on_link
    return seconds[instruction.stage] if seconds else 0.0
