"""What one training or evaluation step of one batch shape is: its program bound to groups.

Pure data, derived once per batch shape: which slabs and values each stage takes, which cotangents
arrive where, when a value is last read, and the schedule.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.kernels.residuals import Residuals, find_residuals
from megatrain_jax._src.kernels.stages import Backward, Binding, Slot
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.flops import count_flops
from megatrain_jax._src.program.loss.stages import Program, Stage
from megatrain_jax._src.schedule.search import Schedule, find_schedule
from megatrain_jax._src.schedule.tasks import Costs, Instruction, Op, Workload
from megatrain_jax._src.state.groups import Grouping, GroupLayout
from megatrain_jax._src.state.hardware import Hardware

# What Python needs for one instruction, measured on the host of an H200.
_SECONDS_PER_RECORD = 1.5e-4
# Bytes of a value that is worth a copy; smaller ones stay where they are and aren't counted.
_SMALL = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundStage:
    """A stage with the groups it reads.

    Attributes:
        stage: The stage.
        groups: The groups whose masters it takes.
        binding: Where its leaves lie in them.
        mode: How its backward accumulates; None without a backward.
        sent: Ids of inputs whose cotangent another stage has already sent, in input order.
        residuals: What its forward can keep for its backward; None if there is nothing.
    """

    stage: Stage
    groups: tuple[int, ...]
    binding: Binding
    mode: Backward | None
    sent: tuple[int, ...]
    residuals: Residuals | None

    @property
    def key(self) -> Hashable:
        """Equal for bound stages that share a compiled forward."""
        return self.stage.key, self.binding

    @property
    def trained(self) -> tuple[int, ...]:
        """Its groups that get gradients from it; in a stage without a backward there are none."""
        if self.mode is None:
            return ()
        pairs = zip(self.groups, self.mode.gradients, strict=True)
        return tuple(group for group, dtype in pairs if dtype is not None)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BoundStep:
    """One step of one batch shape; no two are equal.

    Attributes:
        key: Tells batch shapes and kinds of step apart.
        program: The cut loss.
        stages: Its stages, bound to groups.
        microbatches: Into how many parts the batch is split.
        metrics: Names of the metrics that the loss returns.
        workload: What the schedule was made for.
        schedule: What moves when.
        last_read: For each instruction kind and stage, the values that nothing reads afterwards.
    """

    key: Hashable
    program: Program
    stages: tuple[BoundStage, ...]
    microbatches: int
    metrics: tuple[str, ...]
    workload: Workload
    schedule: Schedule
    last_read: Mapping[tuple[Op, int], tuple[int, ...]]

    @functools.cached_property
    def kept(self) -> frozenset[int]:
        """Ids of the values that something reads after they are made."""
        return frozenset(self.program.outputs).union(*self.last_read.values())

    @functools.cached_property
    def kept_once(self) -> frozenset[int]:
        """Those that are read of the first microbatch alone: new values of the model's state."""
        read = {i for bound in self.stages for i in bound.stage.inputs}
        return self.kept.difference(read, self.program.outputs[: 1 + len(self.metrics)])

    @functools.cached_property
    def late_state(self) -> Mapping[int, int]:
        """Ids of the new values of the variables that stages compute, by the variable's number."""
        new, early = (
            self.program.outputs[1 + len(self.metrics) :],
            set(self.program.prologue_values),
        )
        return {k: i for k, i in enumerate(new) if i not in early}


def bind_step(
    key: Hashable,
    program: Program,
    grouping: Grouping,
    layouts: Sequence[GroupLayout],
    *,
    microbatches: int,
    metrics: tuple[str, ...],
    deferred: bool,
    reduce_reads: frozenset[str],
    device_budget: int | None,
    hardware: Hardware,
    training: bool = True,
) -> BoundStep:
    """Binds a program to groups and schedules it for a machine."""
    stages = program.stages
    fused = training and program.outputs[0] in stages[-1].outputs
    gradients = _gradient_dtypes(stages, grouping, microbatches)
    sizes = tuple(map(GroupLayout.sizes, layouts, gradients))
    bound = _bind(stages, grouping, layouts, gradients, fused, microbatches > 1, training)
    values, makes, reads = _counted_values(program, microbatches)
    workload = Workload(
        values=values,
        makes=makes,
        reads=reads,
        residuals=tuple(microbatches * b.residuals.num_bytes if b.residuals else 0 for b in bound),
        stages=tuple(b.groups for b in bound),
        backward=tuple(s.has_backward for s in stages),
        fused_last=fused,
        sizes=sizes,
        frozen=grouping.frozen,
        deferred=deferred,
        accumulate=microbatches > 1,
        reduce_reads=reduce_reads,
        costs=_costs(bound, sizes, microbatches, hardware),
    )
    schedule = find_schedule(workload, device_budget)
    instructions = schedule.cold if training else schedule.evaluation
    return BoundStep(
        key=key,
        program=program,
        stages=bound,
        microbatches=microbatches,
        metrics=metrics,
        workload=workload,
        schedule=schedule,
        last_read=_last_reads(instructions, stages, program),
    )


def _gradient_dtypes(
    stages: Sequence[Stage], grouping: Grouping, microbatches: int
) -> tuple[str | None, ...]:
    """The dtype of each group's gradient: fp32 for sums, else what the backward computes it in.

    A gradient that is complete after one backward is as exact in the stage's own dtype as in
    fp32, and half as large where that is bf16. Frozen groups have none.
    """
    group_of = grouping.group_of
    dtypes: list[set[str]] = [set() for _ in grouping.leaves]
    readers = [0] * len(grouping.leaves)
    for stage in stages:
        first = len(stage.consts)
        leaves = stage.jaxpr.invars[first : first + len(stage.leaves)]
        for leaf, v in zip(stage.leaves, leaves, strict=True):
            dtypes[group_of[leaf]].add(v.aval.dtype.name)
        for group in {group_of[leaf] for leaf in stage.leaves}:
            readers[group] += 1
    return tuple(
        None
        if g in grouping.frozen
        else min([*rows, "float32"], key=lambda name: np.dtype(name).itemsize)
        if microbatches == 1 and number == 1 and len(rows) == 1
        else "float32"
        for g, (rows, number) in enumerate(zip(dtypes, readers, strict=True))
    )


def _counted_values(
    program: Program, microbatches: int
) -> tuple[dict[int, int], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Bytes of the values that stages hand on, and for each stage those it makes and reads."""
    read = {i for stage in program.stages for i in stage.inputs}
    made = {i for stage in program.stages for i in stage.outputs}
    values = {}
    for i in sorted(read & made - set(program.outputs)):
        num_bytes = microbatches * jx.num_bytes(program.values[i])
        if num_bytes >= _SMALL and not jnp.issubdtype(program.values[i].dtype, jax.dtypes.extended):
            values[i] = num_bytes

    def counted(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(i for i in dict.fromkeys(ids) if i in values)

    makes = tuple(counted(stage.outputs) for stage in program.stages)
    return values, makes, tuple(counted(stage.inputs) for stage in program.stages)


def _costs(
    bound: Sequence[BoundStage],
    sizes: Sequence[Mapping[str, int]],
    microbatches: int,
    hardware: Hardware,
) -> Costs:
    """Estimates from operations, and for updates from bytes."""
    stages = [b.stage for b in bound]
    flops = {stage.key: count_flops(stage.jaxpr) for stage in {s.key: s for s in stages}.values()}
    rate = hardware.flops_per_s * hardware.sustained / microbatches
    forward = [flops[stage.key] / rate for stage in stages]
    # A backward computes its stage once more, and a product has two factors to differentiate, of
    # which one may be frozen.
    backward = [
        (2 + stage.trainable_share) * seconds
        for stage, seconds in zip(stages, forward, strict=True)
    ]
    saved = [_seconds_saved(b.residuals, hardware) * microbatches for b in bound]
    moved = [2 * (s["P"] + s["O"]) + s["G"] for s in sizes]
    return Costs(
        forward=tuple(forward),
        backward=tuple(backward),
        update=tuple(num_bytes / hardware.memory_bytes_per_s for num_bytes in moved),
        recompute=tuple(saved),
        byte=1 / hardware.link_bytes_per_s,
        dispatch=_SECONDS_PER_RECORD,
    )


def _seconds_saved(residuals: Residuals | None, hardware: Hardware) -> float:
    """Products run near the device's rate, and what they give is written and read once more."""
    if residuals is None:
        return 0.0
    moved = 2 * residuals.num_bytes / hardware.memory_bytes_per_s
    return max(0.0, residuals.saved_flops / hardware.flops_per_s - moved)


def _bind(
    stages, grouping, layouts, gradients, fused, accumulate, training
) -> tuple[BoundStage, ...]:
    group_of = grouping.group_of
    position = {leaf: i for leaves in grouping.leaves for i, leaf in enumerate(leaves)}
    seen_groups: set[int] = set()
    sent: set[int] = set()
    found: dict[Hashable, Residuals | None] = {}
    bound: list[BoundStage] = []
    for s in range(len(stages) - 1, -1, -1):
        stage: Stage = stages[s]
        groups = tuple(dict.fromkeys(group_of[leaf] for leaf in stage.leaves))
        slots = tuple(
            Slot(slab=groups.index(group_of[leaf]), leaf=position[leaf]) for leaf in stage.leaves
        )
        binding = Binding(layouts=tuple(layouts[g].master for g in groups), slots=slots)
        mode, known, residuals = None, (), None
        if stage.has_backward:
            existing = tuple(
                active and i in sent and i not in stage.inputs[:n]
                for n, (i, active) in enumerate(zip(stage.inputs, stage.active, strict=True))
            )
            known = tuple(i for i, e in zip(stage.inputs, existing, strict=True) if e)
            mode = Backward(
                gradients=tuple(gradients[g] for g in groups),
                accumulate=tuple(
                    g not in grouping.frozen and (accumulate or g in seen_groups) for g in groups
                ),
                arriving=stage.has_cotangent,
                existing=existing,
                give_outputs=fused and s == len(stages) - 1,
            )
            seen_groups.update(groups)
            sent.update(i for i, a in zip(stage.inputs, stage.active, strict=True) if a)
            if training and not mode.give_outputs:
                like = stage.key, stage.is_trainable, stage.active, stage.has_cotangent
                if like not in found:
                    found[like] = find_residuals(stage)
                residuals = found[like]
        bound.append(
            BoundStage(
                stage=stage,
                groups=groups,
                binding=binding,
                mode=mode,
                sent=known,
                residuals=residuals,
            )
        )
    return tuple(bound[::-1])


def _last_reads(instructions: Sequence[Instruction], stages, program: Program):
    """For each computing instruction the values it is the last to read."""
    last: dict[int, tuple[Op, int]] = {}
    for instruction in instructions:
        if instruction.op in (Op.FORWARD, Op.BACKWARD) and instruction.stage is not None:
            for i in stages[instruction.stage].inputs:
                last[i] = (instruction.op, instruction.stage)
    out: dict[tuple[Op, int], list[int]] = {}
    lasting = set(program.outputs)
    for i, at in last.items():
        if i not in lasting:
            out.setdefault(at, []).append(i)
    return {at: tuple(ids) for at, ids in out.items()}
