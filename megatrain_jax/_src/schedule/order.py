"""The order of a step's computations, and which of them form a task.

Stages 0 to 2, of which the last is fused, with updates in their own backward::

    FORWARD 0 | FORWARD 1 | BACKWARD 2, COMBINE, UPDATE 2 | BACKWARD 1, UPDATE 1 | ...

Where a host is too small for what all stages hand on, some are computed again: their outputs are
dropped after the forward, and made once more before the backward of the first stage after them
that is not computed again. Stages 0 to 4, with 1 and 2 computed again, 0 and 3 not::

    FORWARD 0 | FORWARD 1 | FORWARD 2 | FORWARD 3 | BACKWARD 4 | FORWARD 1 | FORWARD 2 | BACKWARD 3
    | BACKWARD 2 | BACKWARD 1 | BACKWARD 0
"""

from collections.abc import Iterable

from megatrain_jax._src.schedule.instructions import Instruction, Op
from megatrain_jax._src.schedule.workload import Workload


def computing_order(workload: Workload) -> list[list[Instruction]]:
    """The computing instructions of a steady step, by task."""
    return _deferred_step(workload) if workload.deferred else _immediate_step(workload)


def _immediate_step(workload: Workload) -> list[list[Instruction]]:
    """The instructions of each task if a group is updated where its gradient is completed."""
    stages = range(len(workload.stages) - workload.fused_last)
    tasks = [[Instruction(op=Op.FORWARD, stage=stage)] for stage in stages]
    # Immediate updates need nothing of any gradient but their own: COMBINE takes the loss, which is
    # there once backward has begun, and comes once, before the first UPDATE that reads its scalars.
    combine = [Instruction(op=Op.COMBINE)]
    for task, complete in gradient_tasks(workload):
        if complete:
            task.extend(combine)
            combine = []
        tasks.append([*task, *_for_each(complete, Op.UPDATE)])
    tasks[-1].extend(combine)
    return tasks


def _deferred_step(workload: Workload) -> list[list[Instruction]]:
    """The instructions of each task if a group is updated before its first use in the next step."""
    unused = workload.unused_groups
    pending = set(workload.trained_groups).difference(unused)
    # Before all stages, as one without a backward may read them; each a task of its own, so that
    # one after another is on the device.
    tasks = [_for_each([group], Op.UPDATE) for group in unused]
    for stage, groups in enumerate(workload.stages):
        fresh = sorted(pending.intersection(groups))
        pending.difference_update(fresh)
        tasks.append([*_for_each(fresh, Op.UPDATE), Instruction(op=Op.FORWARD, stage=stage)])
    # A fused last stage has no FORWARD: what that task updates goes in front of its BACKWARD.
    updates = tasks.pop()[:-1] if workload.fused_last else []
    for task, complete in gradient_tasks(workload):
        tasks.append([*updates, *task, *_for_each(complete, Op.REDUCE)])
        updates = []
    tasks[-1].append(Instruction(op=Op.COMBINE))
    return tasks


def _for_each(groups: Iterable[int], op: Op) -> list[Instruction]:
    return [Instruction(op=op, group=group) for group in groups]


def gradient_tasks(workload: Workload) -> list[tuple[list[Instruction], list[int]]]:
    """The tasks of a step's backward, each with the groups whose gradients it completes."""
    stages = [stage for stage, reached in enumerate(workload.backward) if reached]
    trained = [[g for g in groups if g not in workload.frozen] for groups in workload.stages]
    # Backward goes from the last stage to the first: a group's gradient is begun in the latest of
    # the stages that read it and complete after the earliest.
    latest = {group: stage for stage in stages for group in trained[stage]}
    earliest = {group: stage for stage in reversed(stages) for group in trained[stage]}
    tasks = []
    for stage in reversed(stages):
        for earlier in _computed_again(workload, stage):
            tasks.append(([Instruction(op=Op.FORWARD, stage=earlier)], []))
        groups = dict.fromkeys(trained[stage])
        # Of a single microbatch, the first BACKWARD creates the gradient and zeros would be waste.
        begun = [group for group in groups if latest[group] == stage and workload.accumulate]
        complete = [group for group in groups if earliest[group] == stage]
        backward = Instruction(op=Op.BACKWARD, stage=stage)
        tasks.append(([*_for_each(begun, Op.ZEROS), backward], complete))
    tasks.extend((_for_each([group], Op.ZEROS), [group]) for group in workload.unused_groups)
    return tasks


def _computed_again(workload: Workload, stage: int) -> range:
    """The stages that are computed again before the backward of a stage: those just before it."""
    first = stage
    while stage not in workload.again and first - 1 in workload.again:
        first -= 1
    return range(first, stage)
