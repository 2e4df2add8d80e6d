"""The arithmetic of a plan: what a step moves, computes and holds, from its run's spec."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import groupby

from megatrain_jax._src.build.bound_step import BoundStep
from megatrain_jax._src.build.budget import other_bytes
from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.build.work import Work, backward_work, forward_work, saved_work
from megatrain_jax._src.common.keys import LASTING, Kind
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.flops import count_flops
from megatrain_jax._src.program.optimizer.cut import OptimizerCut
from megatrain_jax._src.report.plan import GroupRow, Plan
from megatrain_jax._src.report.warnings import find_warnings
from megatrain_jax._src.schedule.instructions import Instruction, Op
from megatrain_jax._src.state import pool

# The driver waits for a task before it dispatches the second one after it.
_TASKS_IN_FLIGHT = 3


def make_plan(spec: RunSpec, num_processes: int = 1, processes_per_host: int = 1) -> Plan:
    """The plan of a run, for steps of its first batch shape.

    Times and limits are those of the hardware in the run's options; without it there are none.

    Args:
        spec: The run.
        num_processes: Number of the processes that share it.
        processes_per_host: How many of them share a host.
    """
    step, grouping, devices = spec.first, spec.grouping, spec.first.num_devices
    own = devices // num_processes
    hardware = spec.options.hardware and spec.options.hardware.times(own * processes_per_host)
    workload, schedule = step.workload, step.schedule
    bytes_in, bytes_out, waiting_bytes = moved_bytes(
        schedule.steady, workload.sizes, workload.activations
    )
    state = [devices * (s[Kind.MASTERS] + s[Kind.OPTIMIZER_STATE]) for s in workload.sizes]
    peak = sum(state) + devices * (waiting_bytes + _in_flight_bytes(step))
    process = hardware and pool.process_bytes(
        peak // num_processes, spec.largest_slab_bytes, hardware.assumed_host_bytes, own
    )
    num_parameters = [sum(jx.num_elements(spec.leaves[i]) for i in g) for g in grouping.leaves]
    templates, num_templates = _templates(step)
    work = microbatch_work(step)
    return Plan(
        num_parameters=sum(num_parameters),
        num_frozen=sum(num_parameters[g] for g in grouping.frozen),
        frozen_bytes=sum(state[g] for g in grouping.frozen),
        groups=fold(grouping.names, num_parameters, state, templates, grouping.frozen),
        host_bytes=sum(state),
        host_peak_bytes=peak,
        host_process_bytes=process,
        device_budget=spec.budget_bytes,
        device_state_bytes=schedule.peak_bytes,
        device_other_bytes=other_bytes(step),
        device_temporary_bytes=spec.temporary_bytes,
        device_temporary_estimated=spec.temporary_estimated,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        flops_per_step=step.microbatches * round(work.flops) + _optimizer_flops(spec.optimizer),
        attention_flops_per_step=step.microbatches * round(work.attention),
        seconds_per_step=hardware and schedule.seconds,
        microbatches=step.microbatches,
        update_mode="deferred" if workload.deferred else "immediate",
        num_stages=len(step.stages),
        num_kept=len(schedule.kept),
        keeps_costliest=schedule.lean,
        num_templates=num_templates,
        num_devices=devices,
        num_processes=num_processes,
        processes_per_host=processes_per_host,
        collective_bytes=_collective_bytes(step),
        warnings=find_warnings(spec),
        hardware=hardware,
    )


def moved_bytes(
    instructions: Iterable[Instruction],
    sizes: Sequence[Mapping[Kind, int]],
    activations: Mapping[int, int],
) -> tuple[int, int, int]:
    """The bytes that one step moves to and from each device.

    Args:
        instructions: The schedule's instructions for one steady step.
        sizes: Bytes of each group's parts by kind.
        activations: Bytes of the activations that move, by id.

    Returns:
        Bytes to the device, bytes to the host, and bytes of gradients and activations
        that wait there.
    """
    moved, waiting = {Op.FETCH: 0, Op.OFFLOAD: 0}, {}
    for instruction in instructions:
        op, key = instruction.op, instruction.key
        if op in moved and key is not None:
            is_activation = key.kind is Kind.ACTIVATION
            size = activations[key.owner] if is_activation else sizes[key.owner][key.kind]
            moved[op] += size
            if op is Op.OFFLOAD and key.kind not in LASTING:
                waiting[key] = size
    return moved[Op.FETCH], moved[Op.OFFLOAD], sum(waiting.values())


def _collective_bytes(step: BoundStep) -> int:
    """The bytes that each device receives from the others in one steady step."""
    received = 0
    for instruction in step.schedule.steady:
        if instruction.stage is not None:
            forward, backward = step.collectives[instruction.stage]
            received += {Op.FORWARD: forward, Op.BACKWARD: backward}.get(instruction.op, 0)
    return received


def microbatch_work(step: BoundStep) -> Work:
    """Counts the floating-point operations of a step's forward and backward for one microbatch.

    A stage whose forward takes `f` operations does `c · f`. The factor `c` is 4 for a stage with a
    backward: one forward, one more to recompute it, and a backward of twice a forward, as each
    product of matrices has two factors to differentiate. It is 3 for the last stage if it is fused,
    since that one's forward runs as part of its backward only, and 1 for a stage without a
    backward. Where parameters are frozen, products for their gradients don't count. Stages that
    keep residuals don't do all of their forward again. So ten equal layers, of which the last is
    fused and none is frozen, take 9 · 4 · f + 3 · f = 39 · f operations, beside 30 · f without
    recomputation. Kernels of attention take half a forward more wherever there is a backward.
    """
    total, last = Work(flops=0, attention=0), len(step.stages) - 1
    forwards = forward_work([bound.stage for bound in step.stages])
    for s, (bound, forward) in enumerate(zip(step.keeping, forwards, strict=True)):
        if not (step.workload.fused_last and s == last):
            total = total.plus(forward)
        if step.workload.backward[s]:
            total = total.plus(backward_work(bound.stage, forward))
        if s in step.schedule.kept:
            total = total.plus(saved_work(bound.residuals), factor=-1)
    return total


def _optimizer_flops(cut: OptimizerCut) -> int:
    """Counts the operations of one update of all groups."""
    parts = (*cut.reduce, *cut.apply)
    flops = {part.key: count_flops(part.jaxpr) for part in {p.key: p for p in parts}.values()}
    return sum(flops[part.key] for part in parts)


def _templates(step: BoundStep) -> tuple[list[int | str], int]:
    """The number of the template that each group's stage uses, and how many there are."""
    numbers: dict[Hashable, int] = {}
    of_group: dict[int, int | str] = {}
    for bound in step.stages:
        number = numbers.setdefault(bound.key, len(numbers))
        for g in bound.groups:
            of_group.setdefault(g, number)
    return [of_group.get(g, "-") for g in range(len(step.workload.sizes))], len(numbers)


def _in_flight_bytes(step: BoundStep) -> int:
    """Most host bytes of one device that are both old copies being read and new ones written."""
    sizes = step.workload.sizes
    keys = (r.key for r in step.schedule.steady if r.op is Op.OFFLOAD)
    groups = {key.owner for key in keys if key is not None and key.kind in LASTING}
    moving = sorted(
        (sizes[g][Kind.MASTERS] + sizes[g][Kind.OPTIMIZER_STATE] for g in groups), reverse=True
    )
    return sum(moving[:_TASKS_IN_FLIGHT])


def fold(
    names: Sequence[str],
    num_parameters: Sequence[int],
    state_bytes: Sequence[int],
    templates: Sequence[int | str],
    frozen: Collection[int],
) -> tuple[GroupRow, ...]:
    """Makes one row of consecutive groups that are alike.

    Args:
        names: The groups' names; like what follows, one entry a group.
        num_parameters: Parameters of each.
        state_bytes: State at rest of each.
        templates: The template that each group's stage uses.
        frozen: The groups that are not trained; they come last.
    """
    entries = list(zip(names, num_parameters, state_bytes, templates, strict=True))
    # A block may have a group of each kind: those of one kind are next to each other here.
    order = sorted(range(len(entries)), key=lambda g: g in frozen)
    entries = [entries[g] for g in order]
    rows = []
    for (count, host_bytes, template), run in groupby(entries, key=lambda entry: entry[1:]):
        alike = [name for name, *_ in run]
        rows.append(
            GroupRow(
                name=alike[0] if len(alike) == 1 else f"{alike[0]} … {alike[-1]}",
                count=len(alike),
                num_parameters=count,
                host_bytes=host_bytes,
                template=template,
            )
        )
    return tuple(rows)
