"""Steps with another schedule: with spans computed again, in waves, or by measured costs.

The bound stages of a step stay as they are; its workload changes, and with it the schedule.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from megatrain_jax._src.common.keys import Key
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.schedule import Schedule
from megatrain_jax._src.engine.schedule.search import find_schedule, reschedule, whole_schedule
from megatrain_jax._src.engine.schedule.workload import Costs, DiskLink, Link, Workload
from megatrain_jax._src.engine.spec.activations import last_read_by_task, recomputed_stages
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.run_spec import RunSpec


def with_recomputed_spans(
    step: BoundStep,
    span: int,
    device_budget: int | None,
    host_room: float,
    num_bytes: float = math.inf,
) -> BoundStep:
    """A training step for a host that can't hold all residuals or all blocks' activations.

    Of each `span` blocks, all but one run their forward again before their backward. `num_bytes`
    is the size of the activations to save by this; see `recomputed_stages`.
    """
    stages = [bound.stage for bound in step.stages]
    again = recomputed_stages(step.workload, stages, span, num_bytes)
    return _rescheduled(
        step, lambda workload: _computing_again(workload, again), device_budget, host_room
    )


def with_state_on_disk(
    step: BoundStep,
    on_disk: Mapping[Key, int],
    again: frozenset[int],
    device_budget: int | None,
    host_room: float,
) -> BoundStep:
    """A training step with some of its state on disks, which computes some forwards again.

    See `Workload` for `on_disk` and `again`, and `bind_step`.
    """

    def on_disks(workload: Workload) -> Workload:
        return dataclasses.replace(workload, on_disk=on_disk, again=again)

    return _rescheduled(step, on_disks, device_budget, host_room)


def with_disks(step: BoundStep, link: DiskLink) -> BoundStep:
    """A training step, nothing of which is on disks, with the rates of other disks."""
    return _with_costs(step, lambda costs: dataclasses.replace(costs, disk=link))


def in_waves(step: BoundStep, waves: int, device_budget: int | None) -> BoundStep:
    """A training step in a different number of waves, a divisor of the microbatches."""
    return _rescheduled(step, lambda workload: workload.in_waves(waves), device_budget, math.inf)


def _with_workload(step: BoundStep, changed: Callable[[Workload], Workload]) -> BoundStep:
    """A step with its workload changed, with all residuals and with only the costliest."""
    selective = step.selective and changed(step.selective)
    return dataclasses.replace(step, workload=changed(step.workload), selective=selective)


def _with_costs(step: BoundStep, changed: Callable[[Costs], Costs]) -> BoundStep:
    """A step with the same computations and new costs."""
    return _with_workload(
        step, lambda workload: dataclasses.replace(workload, costs=changed(workload.costs))
    )


def _rescheduled(
    step: BoundStep,
    changed: Callable[[Workload], Workload],
    device_budget: int | None,
    host_room: float,
) -> BoundStep:
    """A training step with a new schedule for its changed workload."""
    found = _with_workload(step, changed)
    schedule = find_schedule(found.workload, device_budget, found.selective, host_room)
    return _with_schedule(found, schedule)


def _with_schedule(step: BoundStep, schedule: Schedule, *, training: bool = True) -> BoundStep:
    """A step with a schedule of its workload."""
    stages = [bound.stage for bound in step.stages]
    # Cold and steady steps have the same tasks, except for updates.
    instructions = schedule.cold if training else schedule.evaluation
    last_read = last_read_by_task(instructions, stages, step.program)
    return dataclasses.replace(step, schedule=schedule, last_read=last_read)


def by_measured_seconds(
    step: BoundStep,
    seconds: Mapping[tuple[Op, int], float],
    device_budget: int | None,
    host_room: float,
    delay: float,
) -> BoundStep:
    """A training step with the same computations, scheduled by the measured times of its functions.

    Args:
        step: The step.
        seconds: Seconds of a stage's FORWARD or BACKWARD of one microbatch, and of a group's REDUCE
            or UPDATE, by operation and number. Functions that are missing keep their estimates.
        device_budget: See `bind_step`.
        host_room: See `bind_step`.
        delay: See `Costs`.
    """
    kept, saved, each = step.schedule.kept, step.scheduled.costs.recompute, step.wave_microbatches

    def of_stages(op: Op, estimates: Sequence[float]) -> tuple[float, ...]:
        found = list(estimates)
        for s in range(len(found)):
            if (op, s) in seconds:
                # The clock subtracts the time that residuals save; the measured time lacks it.
                more = saved[s] if op is Op.BACKWARD and s in kept else 0.0
                found[s] = each * seconds[op, s] + more
        return tuple(found)

    def measured(costs: Costs) -> Costs:
        return dataclasses.replace(
            costs,
            forward=of_stages(Op.FORWARD, costs.forward),
            backward=of_stages(Op.BACKWARD, costs.backward),
            update=tuple(seconds.get((Op.UPDATE, g), x) for g, x in enumerate(costs.update)),
            reduce=tuple(seconds.get((Op.REDUCE, g), 0.0) for g in range(len(costs.update))),
            delay=delay,
        )

    found = _with_costs(step, measured)
    schedule = reschedule(found.scheduled, step.schedule, device_budget, host_room)
    return _with_schedule(found, schedule)


def by_measured_link(step: BoundStep, link: Link, device_budget: int | None) -> BoundStep:
    """A training step with the same computations, scheduled by the measured rates of its link.

    It needs no more host memory than the step given, whose memory may be pinned already.

    Args:
        step: The step.
        link: The link to the host.
        device_budget: See `bind_step`.
    """
    found = _with_costs(step, lambda costs: dataclasses.replace(costs, link=link))
    return _with_schedule(found, reschedule(found.scheduled, step.schedule, device_budget, 0.0))


def workload_with_recomputed_spans(
    step: BoundStep, span: int, num_bytes: float = math.inf
) -> Workload:
    """Returns the workload of `with_recomputed_spans` without a search for its schedule."""
    stages = [bound.stage for bound in step.stages]
    return _computing_again(
        step.workload, recomputed_stages(step.workload, stages, span, num_bytes)
    )


def _computing_again(workload: Workload, again: frozenset[int]) -> Workload:
    # The same object if nothing changes, because a search remembers results by workload.
    return workload if workload.again == again else dataclasses.replace(workload, again=again)


def run_with_all_waves(spec: RunSpec) -> RunSpec:
    """A run with the instructions of all waves in its training step; see `with_all_waves`."""
    return dataclasses.replace(spec, first=with_all_waves(spec.first))


def with_all_waves(step: BoundStep, *, training: bool = True) -> BoundStep:
    """A step with the instructions of all waves; a searched schedule may omit some."""
    if not step.schedule.left_out:
        return step
    schedule = whole_schedule(step.scheduled, step.schedule)
    return _with_schedule(step, schedule, training=training)
