"""The order of a step's computations, and their division into tasks.

The order depends only on the model and optimizer, never on memory: the forward of each stage, then
the backward of each stage in reverse. A group is updated right after its gradient is complete
(immediate update), or before its first use in the next step (deferred update), if the optimizer
needs a scalar of all gradients first. The examples separate tasks by `|`.

Stages 0 to 2, with a fused last stage and immediate updates::

    FORWARD 0 | FORWARD 1 | BACKWARD 2, COMBINE, UPDATE 2 | BACKWARD 1, UPDATE 1 | ...

If the host is too small for all activations, the forwards of some stages run twice. Their outputs
are dropped after the first time, and computed again before the backward of the next stage that is
not among them. Stages 0 to 4, with forwards 1 and 2 computed again::

    FORWARD 0 | FORWARD 1 | FORWARD 2 | FORWARD 3 | BACKWARD 4 | FORWARD 1 | FORWARD 2 | BACKWARD 3
    | BACKWARD 2 | BACKWARD 1 | BACKWARD 0

A step may go through the model in several waves, each with a part of the microbatches. Gradients
are summed over the waves: the first wave creates them and the last one completes them. So immediate
updates and reductions happen in the last wave, and the previous step's deferred updates in the
first. Two waves through stages 0 and 1, with gradients accumulated over microbatches::

    FORWARD 0 | ZEROS 1, BACKWARD 1           | ZEROS 0, BACKWARD 0
    FORWARD 0 | BACKWARD 1, COMBINE, UPDATE 1 | BACKWARD 0, UPDATE 0
"""

from collections.abc import Iterable

from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.workload import Workload


def computing_order(workload: Workload) -> list[list[Instruction]]:
    """The computing instructions of a steady step, by task."""
    wave = _deferred_wave if workload.deferred else _immediate_wave
    return [task for number in range(workload.waves) for task in wave(workload, number)]


def evaluating_order(workload: Workload) -> list[list[Instruction]]:
    """The computing instructions of an evaluation, by task: every stage's forward."""
    stages = range(len(workload.stages))
    return [
        [Instruction(op=Op.FORWARD, stage=stage, wave=wave)]
        for wave in range(workload.waves)
        for stage in stages
    ]


def _immediate_wave(workload: Workload, wave: int) -> list[list[Instruction]]:
    """The tasks of a wave with immediate updates."""
    stages = range(len(workload.stages) - workload.fused_last)
    tasks = [[Instruction(op=Op.FORWARD, stage=stage, wave=wave)] for stage in stages]
    # Immediate updates need no gradient but their own. COMBINE needs only the loss, known when the
    # last wave's backward begins, and runs once, before the first UPDATE that reads its scalars.
    combine = [Instruction(op=Op.COMBINE)] if wave == workload.waves - 1 else []
    for task, complete in gradient_tasks(workload, wave):
        if complete:
            task.extend(combine)
            combine = []
        tasks.append([*task, *_for_each(complete, Op.UPDATE)])
    tasks[-1].extend(combine)
    return tasks


def _deferred_wave(workload: Workload, wave: int) -> list[list[Instruction]]:
    """The tasks of a wave with deferred updates."""
    unused = workload.unused_groups if wave == 0 else []
    pending = set(workload.trained_groups).difference(unused) if wave == 0 else set()
    # These updates come first, because a stage without a backward may read these groups. Each is a
    # separate task, so that only one group at a time is on the device.
    tasks = [_for_each([group], Op.UPDATE) for group in unused]
    for stage, groups in enumerate(workload.stages):
        fresh = sorted(pending.intersection(groups))
        pending.difference_update(fresh)
        forward = Instruction(op=Op.FORWARD, stage=stage, wave=wave)
        tasks.append([*_for_each(fresh, Op.UPDATE), forward])
    # A fused last stage has no FORWARD: its updates come before its BACKWARD.
    updates = tasks.pop()[:-1] if workload.fused_last else []
    for task, complete in gradient_tasks(workload, wave):
        tasks.append([*updates, *task, *_for_each(complete, Op.REDUCE)])
        updates = []
    if wave == workload.waves - 1:
        tasks[-1].append(Instruction(op=Op.COMBINE))
    return tasks


def _for_each(groups: Iterable[int], op: Op) -> list[Instruction]:
    return [Instruction(op=op, group=group) for group in groups]


def gradient_tasks(workload: Workload, wave: int) -> list[tuple[list[Instruction], list[int]]]:
    """The tasks of a wave's backward, each with the groups that get their complete gradient."""
    stages = [stage for stage, reached in enumerate(workload.backward) if reached]
    trained = [[g for g in groups if g not in workload.frozen] for groups in workload.stages]
    # Backward goes from the last stage to the first: a group's gradient begins in the latest stage
    # that reads the group and is complete after the earliest.
    latest = {group: stage for stage in stages for group in trained[stage]}
    earliest = {group: stage for stage in reversed(stages) for group in trained[stage]}
    begins, completes = wave == 0 and workload.accumulate, wave == workload.waves - 1
    tasks = []
    for stage in reversed(stages):
        for earlier in _computed_again(workload, stage):
            tasks.append(([Instruction(op=Op.FORWARD, stage=earlier, wave=wave)], []))
        groups = dict.fromkeys(trained[stage])
        # With a single microbatch, the first BACKWARD creates the gradient, so it needs no zeros.
        begun = [group for group in groups if latest[group] == stage and begins]
        complete = [group for group in groups if earliest[group] == stage and completes]
        backward = Instruction(op=Op.BACKWARD, stage=stage, wave=wave)
        tasks.append(([*_for_each(begun, Op.ZEROS), backward], complete))
    if completes:
        tasks.extend((_for_each([group], Op.ZEROS), [group]) for group in workload.unused_groups)
    return tasks


def _computed_again(workload: Workload, stage: int) -> range:
    """The stages just before a stage that are computed again before its backward."""
    first = stage
    while stage not in workload.again and first - 1 in workload.again:
        first -= 1
    return range(first, stage)
