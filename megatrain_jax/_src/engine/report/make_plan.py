"""Computes a `Plan` from a run's spec, and refuses one that can't fit on the device."""

import dataclasses
import math
from collections.abc import Collection, Container, Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any

import jax

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.kernels.bound_stage import Tiling
from megatrain_jax._src.engine.kernels.stage_kernels import residual_kernel_names
from megatrain_jax._src.engine.options.batch_checks import batch_size
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.flops import flops_by_kind, is_product
from megatrain_jax._src.engine.program.loss.block_parts import num_groups, whole_block
from megatrain_jax._src.engine.program.optimizer.cut import OptimizerCut
from megatrain_jax._src.engine.program.tiling.tiled import FACTORS
from megatrain_jax._src.engine.report.plan import GroupRow, Plan, TileRow
from megatrain_jax._src.engine.report.plan_table import ShownPlan
from megatrain_jax._src.engine.report.run_warnings import find_warnings
from megatrain_jax._src.engine.schedule.instructions import WAITS, Instruction, Op
from megatrain_jax._src.engine.schedule.least_time import computing_seconds
from megatrain_jax._src.engine.schedule.tasks import build_task_lists
from megatrain_jax._src.engine.schedule.workload import Workload
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.budget import least_device_bytes, uncounted_activation_bytes
from megatrain_jax._src.engine.spec.host import host_process, peak_bytes, pooled_bytes
from megatrain_jax._src.engine.spec.indivisible_arrays import indivisible_arrays
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.work import Work, backward_work, forward_work, saved_work
from megatrain_jax._src.engine.state.hardware import summing_bytes


def make_plan(
    spec: RunSpec, num_processes: int = 1, processes_per_host: int = 1, num_copies: int = 1
) -> Plan:
    """The plan of a run, for steps of its first batch shape.

    Times and limits refer to the hardware in the run's options; without hardware, a plan has none.

    Args:
        spec: The run.
        num_processes: Number of processes that share the run.
        processes_per_host: Number of processes on each host.
        num_copies: Number of processes that each hold all state.
    """
    step, grouping, devices = spec.first, spec.grouping, spec.first.num_devices
    workload, schedule, work = step.workload, step.schedule, microbatch_work(step)
    # A host's memory is shared by all devices of its processes.
    machine, per_host = spec.machine, devices // num_processes * processes_per_host
    hardware = machine and machine.times(per_host)
    moved = moved_bytes(schedule.steady, step.scheduled)
    state = [devices * (s[Kind.MASTERS] + s[Kind.OPTIMIZER_STATE]) for s in workload.sizes]
    on_disk = devices * sum(workload.size(key) for key in spec.on_disk if key.kind in LASTING)
    budget, unpinned = spec.options.host_bytes, 0
    if spec.options.is_disk_memory:
        unpinned = devices * sum(map(step.scheduled.size, spec.on_disk))
        budget = (budget or 0) + (spec.options.disk_bytes or 0)
    read, written = moved_bytes(schedule.steady, step.scheduled, spec.on_disk)
    num_parameters = [sum(jx.num_elements(spec.leaves[i]) for i in g) for g in grouping.leaves]
    templates, num_templates = _templates(step)
    of_update, in_float32 = _optimizer_flops(spec.optimizer, devices)
    jaxprs = {bound.stage.key: bound.stage.jaxpr for bound in step.stages}.values()
    loops = hardware and work.loop_seconds(hardware, hardware.sustained, devices)
    # As the clock counts them.
    no_dispatch = WAITS | {Op.RELEASE}
    dispatches = sum(row.op not in no_dispatch for row in schedule.steady)
    shapes: Any = step.key
    size, unit = batch_size([jax.ShapeDtypeStruct(*x) for x in shapes[0][1]])
    plan = ShownPlan(
        num_parameters=sum(num_parameters),
        num_frozen=sum(num_parameters[g] for g in grouping.frozen),
        frozen_bytes=sum(state[g] for g in grouping.frozen),
        groups=_group_rows(spec, num_parameters, state, templates),
        host_bytes=sum(state) - on_disk,
        host_slot_bytes=devices * workload.resting_bytes - (sum(state) - on_disk),
        disk_bytes=on_disk,
        disk_read_bytes=read * per_host,
        disk_written_bytes=written * per_host,
        unpinned_bytes=unpinned,
        host_peak_bytes=peak_bytes(step),
        host_gradient_bytes=devices * schedule.transient.gradients,
        host_activation_bytes=devices * schedule.transient.activations,
        host_residual_bytes=devices * schedule.transient.residuals,
        **_process_bytes(spec, num_processes, processes_per_host, unpinned),
        host_budget=budget,
        device_budget=spec.budget_bytes,
        device_state_bytes=schedule.peak_bytes,
        device_excess=_excess(spec) if spec.lacking_device else "",
        device_other_bytes=uncounted_activation_bytes(step),
        device_temporary_bytes=spec.temporary_bytes,
        device_temporary_estimated=spec.temporary_estimated,
        bytes_in=moved[0],
        bytes_out=moved[1],
        # Work is of all devices together; bytes moved are each device's.
        flops_per_step=step.microbatches * round(work.flops) + of_update,
        attention_flops_per_step=step.microbatches * round(work.attention),
        float8_flops_per_step=step.microbatches * round(work.float8),
        float32_flops_per_step=step.microbatches * round(work.float32) + in_float32,
        loop_kernels_per_step=step.microbatches * round(work.kernels),
        by_kernels=tuple(sorted({kernel.purpose for j in jaxprs for kernel in jx.kernels_of(j)})),
        seconds_loops=step.microbatches * (loops or 0.0),
        seconds_per_step=hardware and schedule.seconds,
        is_measured=spec.is_measured,
        batch_size=num_copies * size,
        batch_unit=unit,
        microbatches=step.microbatches,
        waves=step.waves,
        update_mode="deferred" if workload.deferred else "immediate",
        num_stages=len(step.stages),
        num_kept=len(schedule.kept),
        keeps_costliest=schedule.selective,
        num_templates=num_templates,
        num_parts=spec.num_parts,
        num_expert_groups=num_groups(spec.leaves),
        tiles=_tiles(step, grouping.names),
        num_again=len(step.workload.again),
        num_devices=devices,
        num_processes=num_processes,
        processes_per_host=processes_per_host,
        collective_bytes=_collective_bytes(step),
        num_copies=num_copies,
        state_choice=spec.state_choice,
        summed_bytes=_summed_bytes(step, num_copies),
        seconds_dispatch=dispatches * workload.costs.dispatch,
        warnings=find_warnings(spec),
        hardware=hardware,
        # The step has two workloads; the schedule was made for this one, with residuals' sizes.
        workload=step.scheduled,
        schedule=schedule,
    )
    return dataclasses.replace(plan, memory_bytes=_memory_bytes(plan, step))


def _process_bytes(
    spec: RunSpec, num_processes: int, processes_per_host: int, unpinned: int
) -> dict[str, int]:
    """A plan's figures for the host memory of a process; empty without hardware."""
    if spec.machine is None and spec.base_bytes is None:
        return {}
    process = host_process(spec, num_processes, processes_per_host)
    known = {"host_fixed_bytes": process.fixed_bytes}
    if spec.base_bytes is not None:  # a CPU has no pools
        return known | {
            "host_process_bytes": process.needed(peak_bytes(spec.first) // num_processes) + unpinned
        }
    pooled = pooled_bytes(spec, num_processes, processes_per_host)
    known["host_pool_bytes"] = process.pool_bytes(pooled)
    return known | {"host_process_bytes": process.needed(pooled) + unpinned}


def moved_bytes(
    instructions: Iterable[Instruction], workload: Workload, among: Container[Key] | None = None
) -> tuple[int, int]:
    """The bytes that one step moves to each device, and to the host.

    Args:
        instructions: The schedule's instructions for one steady step.
        workload: The workload that the schedule was made for.
        among: The parts to count; None for all.
    """
    moved = {Op.FETCH: 0, Op.OFFLOAD: 0}
    for instruction in instructions:
        key = instruction.key
        if instruction.op in moved and key is not None and (among is None or key in among):
            moved[instruction.op] += workload.size(key)
    return moved[Op.FETCH], moved[Op.OFFLOAD]


def _collective_bytes(step: BoundStep) -> int:
    """The bytes that each device receives from its peers in one steady step."""
    received = 0
    for instruction in step.schedule.steady:
        if instruction.stage is not None:
            forward, backward = step.collectives[instruction.stage]
            received += {Op.FORWARD: forward, Op.BACKWARD: backward}.get(instruction.op, 0)
    # Each instruction runs one wave, but the stage's bytes are counted for all waves.
    return received // step.waves


def _summed_bytes(step: BoundStep, copies: int) -> int:
    """The bytes that a host receives per step to sum gradients over copies of the state."""
    each = sum(step.workload.sizes[g][Kind.GRADIENT] for g in step.workload.trained_groups)
    return round(summing_bytes(step.num_devices * each, copies))


def microbatch_work(step: BoundStep) -> Work:
    """Counts the floating-point operations of a step's forward and backward for one microbatch.

    A stage takes `c · f` operations if its forward takes `f`. The factor `c` is 4 for a stage with
    a backward: the forward, its recomputation, and a backward of twice a forward, since a matrix
    product has two factors to differentiate. It is 3 for a fused last stage, which runs its forward
    only within its backward, and 1 for a stage without a backward. Products for gradients of frozen
    parameters don't count. A stage that saves residuals recomputes only a part of its forward; a
    stage whose forward runs again before the backward takes one more forward. Attention kernels
    take another half forward in each backward.

    Example: ten equal layers, with the last one fused and none frozen, take
    9 · 4 · f + 3 · f = 39 · f operations; without recomputation they would take 30 · f.
    """
    total, last = Work(flops=0, attention=0), len(step.stages) - 1
    forwards = forward_work([bound.stage for bound in step.stages])
    for s, (bound, forward) in enumerate(zip(step.keeping, forwards, strict=True)):
        # A fused last stage runs its forward within its backward and is counted there.
        if not (step.workload.fused_last and s == last):
            total = total.plus(forward)
        if step.workload.backward[s]:
            total = total.plus(backward_work(bound.stage, forward))
        if s in step.workload.again:
            total = total.plus(forward)
        if s in step.schedule.kept:
            total = total.plus(saved_work(bound.residuals), factor=-1)
    return total


def _optimizer_flops(cut: OptimizerCut, num_devices: int) -> tuple[int, int]:
    """Counts the operations of one update of all groups, and of its float32 products.

    Every device computes the products of whole matrices, so these count once for each device.
    """
    parts = (*cut.reduce, *cut.apply)
    # Counted once per key, because equal blocks have equal fragments.
    jaxprs = {part.key: part.jaxpr for part in parts}
    found = {key: flops_by_kind(jaxpr) for key, jaxpr in jaxprs.items()}
    products = {key: flops_by_kind(jaxpr, is_product).total for key, jaxpr in jaxprs.items()}
    again = num_devices - 1
    return (
        sum(found[p.key].total + again * products[p.key] for p in parts),
        sum(num_devices * found[p.key].float32 for p in parts),
    )


def _memory_bytes(plan: Plan, step: BoundStep) -> float:
    """Bytes that a device's memory could move in its time without arithmetic, loops, collectives.

    0 if timed functions are faster than the estimates of these.

    Args:
        plan: The step's plan with a `memory_bytes` of 0.
        step: The step.
    """
    if plan.hardware is None or math.isinf(plan.hardware.memory_bytes_per_s):
        return 0.0
    workload = dataclasses.replace(step.scheduled, kept=step.schedule.kept)
    computing = computing_seconds(workload, workload.kept)
    return max(0.0, computing - plan.busy["device"][1]) * plan.hardware.memory_bytes_per_s


def _excess(spec: RunSpec) -> str:
    """The least device memory of a run, and the task with the largest part of it, in words."""
    step, names = spec.first, spec.grouping.names
    tasks = build_task_lists(step.workload, few_waves=True).steady
    largest = max(tasks, key=lambda task: sum(step.workload.size(use.key) for use in task.uses))
    rows = [computation.instruction for computation in largest.computations]
    groups = [g for row in rows if row.stage is not None for g in step.stages[row.stage].groups]
    groups += [row.group for row in rows if row.group is not None]
    named = (Op.FORWARD, Op.BACKWARD, Op.REDUCE, Op.UPDATE)
    operations = " and ".join(dict.fromkeys(row.op.value for row in rows if row.op in named))
    parts = "" if spec.num_parts == 1 else f" with blocks in {spec.num_parts} parts"
    count = num_groups(spec.leaves)
    parts += "" if count == 1 else f" and experts in {count} groups"
    in_block = bool(groups) and spec.leaves[spec.grouping.leaves[groups[0]][0]].block is not None
    together = indivisible_arrays(spec, spec.layouts) if in_block else ""
    return (
        f"at least {sized(least_device_bytes(spec))}{parts}, most in the {operations} of "
        f"{names[groups[0]] if groups else 'a stage without parameters'}"
        f"{together and f'; {together}'}"
    )


def _templates(step: BoundStep) -> tuple[list[int | str], int]:
    """The template's number for each group's stage, and the number of templates."""
    numbers: dict[Hashable, int] = {}
    of_group: dict[int, int | str] = {}
    for bound in step.stages:
        number = numbers.setdefault(bound.key, len(numbers))
        for g in bound.groups:
            # Several stages read a tied group; its row shows the first stage's template.
            of_group.setdefault(g, number)
    return [of_group.get(g, "-") for g in range(len(step.workload.sizes))], len(numbers)


def _tiles(step: BoundStep, names: Sequence[str]) -> tuple[TileRow, ...]:
    """Rows of tiled computations: one row for all stages with the same template and tiles."""
    alike: dict[tuple[Hashable, str, Tiling], list[str]] = {}
    for s, bound in enumerate(step.stages):
        name = names[bound.groups[0]] if bound.groups else "a stage without parameters"
        plain = "forward", "backward"
        own = residual_kernel_names(step.schedule.selective) if s in step.schedule.kept else plain
        for what, kernel in zip(plain, own, strict=True):
            # A stage may have tiles for its kernels with and without residuals; the schedule
            # decides which kernels run.
            if kernel in bound.tiles:
                alike.setdefault((bound.key, what, bound.tiles[kernel]), []).append(name)
    return tuple(
        TileRow(
            name=_span(rows),
            count=len(rows),
            what=what,
            num_tiles=tiling.num_tiles,
            num_rows=tiling.num_rows,
        )
        for (_, what, tiling), rows in alike.items()
    )


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def merge_equal_groups(
    names: Sequence[str],
    num_parameters: Sequence[int],
    state_bytes: Sequence[int],
    templates: Sequence[int | str],
    frozen: Collection[int],
    blocks: Sequence[Hashable] | None = None,
) -> tuple[GroupRow, ...]:
    """Merges consecutive equal groups into rows; if blocks are cut into parts, one row per part.

    Args:
        names: The groups' names. Each sequence has one entry per group.
        num_parameters: The groups' numbers of parameters.
        state_bytes: Bytes of the groups' state at rest.
        templates: The template that each group's stage uses.
        frozen: Numbers of the groups that are not trained; their rows come last.
        blocks: The block that each group is a part of; None for groups outside blocks. Without
            this argument, no two groups are parts of one block.
    """
    entries = list(zip(names, num_parameters, state_bytes, templates, strict=True))
    # A block may have a trained and a frozen group: sorting brings equal groups together.
    order = sorted(range(len(entries)), key=lambda g: g in frozen)
    # A group outside blocks is by itself.
    block_of = [g if blocks is None or blocks[g] is None else (blocks[g],) for g in order]
    found = groupby(zip(block_of, order, strict=True), key=lambda pair: pair[0])
    units = [[entries[g] for _, g in pairs] for _, pairs in found]
    rows = []
    for kinds, run in groupby(units, key=lambda unit: [entry[1:] for entry in unit]):
        alike = zip(*([name for name, *_ in unit] for unit in run), strict=True)
        for (count, host_bytes, template), of_kind in zip(kinds, alike, strict=True):
            rows.append(
                GroupRow(
                    name=_span(of_kind),
                    count=len(of_kind),
                    num_parameters=count,
                    host_bytes=host_bytes,
                    template=template,
                )
            )
    return tuple(rows)


def _group_rows(
    spec: RunSpec,
    num_parameters: Sequence[int],
    state_bytes: Sequence[int],
    templates: Sequence[int | str],
) -> tuple[GroupRow, ...]:
    """The rows of a run's groups, merged by the model's blocks before these were cut into parts."""
    grouping = spec.grouping
    parts = [spec.leaves[rows[0]].block for rows in grouping.leaves]
    blocks = [part and whole_block(part) for part in parts]
    names, frozen = grouping.names, grouping.frozen
    return merge_equal_groups(names, num_parameters, state_bytes, templates, frozen, blocks)


# Tiling a shorter axis would save little memory.
_LONG = 128


def check_device(
    plan: Plan, free_bytes: int | None, values: Sequence[jax.ShapeDtypeStruct] = ()
) -> None:
    """Refuses a plan that can't fit on the device.

    Args:
        plan: A plan with functions that have been compiled for the device.
        free_bytes: Free device memory; None if unknown.
        values: The values between stages; stages are tiled along their axes.

    Raises:
        MemoryError: If the plan needs more than `free_bytes`.
    """
    if free_bytes is None or plan.device_bytes <= free_bytes:
        return
    excess = f"; {plan.device_excess}" if plan.device_excess else ""
    raise MemoryError(
        f"Training needs {sized(plan.device_bytes)} of device memory, {sized(free_bytes)} "
        f"available: {sized(plan.device_state_bytes)} for state and activations (less with "
        f'device_budget="minimum"), {sized(plan.device_temporary_bytes or 0)} for the '
        f"temporary buffers of one function{excess}. Nothing was allocated. Use more "
        "`microbatches`, smaller batches, a loss that makes fewer logits at a time (a smaller "
        "`chunk` of `losses.next_token`), or fewer bytes per parameter (Precision.compact(), an "
        "optimizer with less state)."
        f"{_undivided(values)}"
    )


def _undivided(values: Sequence[jax.ShapeDtypeStruct]) -> str:
    """A sentence on an axis length that no tile count divides, with the remedy; "" if none."""
    largest = max(values, key=lambda value: math.prod(value.shape), default=None)
    if largest is None:
        return ""
    lengths = [n for n in largest.shape if n >= _LONG and all(n % k for k in FACTORS)]
    if not lengths:
        return ""
    length, factors = max(lengths), ", ".join(map(str, FACTORS))
    return (
        f" Nothing is computed in tiles along a length of {length:,}, which none of {factors} "
        f"divides: pad it to a multiple of {_LONG}, such as {-(-length // _LONG) * _LONG:,}."
    )
