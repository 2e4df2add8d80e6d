"""A step of one batch shape as pure data: the cut loss, bound to groups, with its schedule.

Each batch shape is bound once, for training or evaluation. Binding gives every stage the slabs of
its groups, and its backward the cotangents and gradients that it takes and adds to. From their
bytes and times, the schedule then decides when each part moves.

Example: an embedding (group 0), two blocks (groups 1 and 2), and a head that is tied to the
embedding, in bf16, with one microbatch. Stages are bound from the last to the first::

    stage   groups   gradient             its backward
    3       (0,)     fp32: sum of two     also returns the loss: this stage has no forward
    2       (2,)     bf16: complete       creates it
    1       (1,)     bf16: complete       creates it
    0       (0,)     fp32                 adds to the gradient of stage 3

With two microbatches all gradients are fp32 sums, and every backward accumulates.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.common.keys import Key
from megatrain_jax._src.common.remembering import remembered
from megatrain_jax._src.engine.kernels.bound_stage import (
    BackwardMode,
    Binding,
    BoundStage,
    Residuals,
    Slot,
    find_residuals,
)
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.options.precision import Precision, Rounding
from megatrain_jax._src.engine.program.loss.stages import Program, Stage
from megatrain_jax._src.engine.schedule.schedule import Schedule
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.schedule.workload import Workload
from megatrain_jax._src.engine.spec.activations import counted_activations, last_read_by_task
from megatrain_jax._src.engine.spec.costs import (
    batch_seconds,
    collective_bytes,
    find_costs,
    rounding_seconds,
    seconds_saved,
    update_seconds,
)
from megatrain_jax._src.engine.spec.cut_run import Cut
from megatrain_jax._src.engine.spec.selective import selective_residuals
from megatrain_jax._src.engine.state.hardware import Hardware, card
from megatrain_jax._src.engine.state.layout import Grouping, GroupLayout

# Number of results to keep for reuse: plans of one model have few templates.
_MOST_RESIDUALS = 64


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BoundStep:
    """One step of one batch shape, for training or evaluation; compared by identity.

    Attributes:
        key: Key of the batch shape and kind of step.
        program: The loss, traced and cut.
        stages: The program's stages, bound to groups.
        microbatches: Number of parts that the batch is split into.
        num_devices: Number of devices that share the step.
        narrow_sums: Rounding of sums of gradients stored in bfloat16; None stores fp32.
        collectives: For each stage, bytes that a device receives in forward and in backward.
        workload: The step's workload with all residuals that stages can save.
        selective: The workload with only the costliest residuals; None if no stage has any.
        schedule: The step's instructions, in order.
        last_read: For each task, ids of the values that its stage reads for the last time.
    """

    key: Hashable
    program: Program
    stages: tuple[BoundStage, ...]
    microbatches: int
    num_devices: int
    narrow_sums: Rounding | None = None
    collectives: tuple[tuple[int, int], ...]
    workload: Workload
    selective: Workload | None
    schedule: Schedule
    last_read: Mapping[int, tuple[int, ...]]

    @functools.cached_property
    def gradient_dtypes(self) -> Mapping[int, str]:
        """Dtype in which each group's gradient is stored; fp32 if no backward computes one."""
        dtypes = {g: "float32" for g in range(len(self.workload.sizes))}
        for bound in self.stages:
            if bound.mode is not None:
                pairs = zip(bound.groups, bound.mode.gradients, strict=True)
                dtypes |= {g: dtype for g, dtype in pairs if dtype is not None}
        summed = () if self.narrow_sums is None else _summed(self.stages)
        return dtypes | dict.fromkeys(summed, "bfloat16")

    @property
    def waves(self) -> int:
        """Number of equal parts of the microbatches that go through the stages one by one."""
        return self.workload.waves

    @property
    def depends_on_waves(self) -> bool:
        """Whether the number of waves changes how gradients are added up, or how often rounded."""
        return self.workload.has_shared_sums or self.narrow_sums is not None

    @property
    def wave_microbatches(self) -> int:
        """Number of microbatches in a wave."""
        return self.microbatches // self.waves

    @property
    def scheduled(self) -> Workload:
        """The workload that the schedule was made for."""
        return (
            self.selective
            if self.selective is not None and self.schedule.selective
            else self.workload
        )

    @functools.cached_property
    def keeping(self) -> tuple[BoundStage, ...]:
        """The stages with all residuals, or only the costliest if the schedule is selective."""
        if not self.schedule.selective:
            return self.stages
        return tuple(dataclasses.replace(bound, residuals=bound.selective) for bound in self.stages)

    def part(self, number: int, microbatch: int) -> BoundStage:
        """A stage with the mode of its backward for one of a wave's microbatches."""
        return self.keeping[number].of_microbatch(microbatch, self.wave_microbatches)

    @functools.cached_property
    def kept(self) -> frozenset[int]:
        """Ids of the values that a later stage or the step's end reads."""
        return frozenset(self.program.outputs).union(*self.last_read.values())

    @functools.cached_property
    def kept_once(self) -> frozenset[int]:
        """Ids of values kept for the first microbatch only: the variables' new values."""
        read, program = {i for bound in self.stages for i in bound.stage.inputs}, self.program
        return self.kept.difference(read, program.results)

    @functools.cached_property
    def accumulated_cotangents(self) -> frozenset[int]:
        """Ids of the values with a cotangent that one backward makes and a later one adds to."""
        return frozenset().union(*(bound.sent for bound in self.stages))

    @functools.cached_property
    def late_state(self) -> Mapping[int, int]:
        """Ids, by variable, of new values of variables that stages compute, not the prologue."""
        early = set(self.program.prologue_values)
        return {k: i for k, i in enumerate(self.program.new_variables) if i not in early}


def bind_step(
    key: Hashable,
    cut: Cut,
    layouts: Sequence[GroupLayout],
    options: Options,
    *,
    microbatches: int,
    device_budget: int | None,
    host_room: float = math.inf,
    waves: int,
    training: bool = True,
    on_disk: Mapping[Key, int] = MappingProxyType({}),
) -> BoundStep:
    """Binds a cut loss to groups and schedules it for a machine.

    Args:
        key: Key of the step; see `BoundStep`.
        cut: The loss and the optimizer, cut by the same groups.
        layouts: Layout of each group.
        options: Options of the run; the rates of their machine determine the schedule.
        microbatches: Number of parts that the batch is split into.
        device_budget: Device bytes for state, activations and residuals; None for the minimum.
        host_room: Host bytes per device that are available in addition to the state at rest.
        waves: Number of equal parts of the microbatches that go through the stages one by one.
        training: Whether it is a training step; an evaluation has no backward.
        on_disk: See `Workload`.
    """
    num_devices, narrow_sums = options.num_devices, _rounding_of_sums(options.dtypes)
    hardware = options.machine or card("H200")  # some machine has to be assumed to order a step
    program, grouping, stages = cut.program, cut.grouping, cut.program.stages
    if program.examples.number % num_devices:  # every device computes all of it
        program = dataclasses.replace(program, examples=program.examples.undivided())
    # If the last stage makes the loss, its backward follows at once and computes the loss as well.
    fused = training and program.outputs[0] in stages[-1].outputs
    gradients = _gradient_dtypes(
        stages, grouping, [x.master.dtype for x in layouts], microbatches, narrow_sums
    )
    updating = update_seconds(cut.optimizer, layouts, hardware)
    asked = hardware if training else None
    bound = _bind(stages, grouping, layouts, gradients, fused, microbatches > 1, asked)
    summed = _summed(bound) if narrow_sums else frozenset()
    bound = tuple(_rounding(b, summed, narrow_sums) for b in bound)
    waiting = ["bfloat16" if g in summed else dtype for g, dtype in enumerate(gradients)]
    sizes = tuple(map(GroupLayout.sizes, layouts, waiting))
    collectives = collective_bytes(bound, microbatches, num_devices)
    costs = find_costs(bound, sizes, updating, collectives, microbatches, num_devices, hardware)
    if narrow_sums:
        costs = dataclasses.replace(costs, rounding=rounding_seconds(bound, num_devices, hardware))
    activations, makes, reads = counted_activations(program, microbatches, num_devices)
    workload = Workload(
        activations=activations,
        makes=makes,
        reads=reads,
        residuals=_residual_bytes(program, [b.residuals for b in bound], microbatches, num_devices),
        may_offload_residuals=num_devices == 1,  # some residuals may be replicated on all devices
        stages=tuple(b.groups for b in bound),
        backward=tuple(s.has_backward for s in stages),
        fused_last=fused,
        sizes=sizes,
        frozen=grouping.frozen,
        deferred=cut.optimizer.deferred,
        accumulate=microbatches > 1,
        reduce_reads=cut.optimizer.reduce_reads,
        on_disk=dict(on_disk),
        costs=dataclasses.replace(costs, batch=batch_seconds(program, microbatches, num_devices)),
    )
    selective = None
    # The search chooses between workloads: all residuals of some stages, or the costliest of many.
    if any(kept := [b.selective for b in bound]):
        saved = seconds_saved(kept, microbatches / num_devices, hardware)
        costs = dataclasses.replace(workload.costs, recompute=saved)
        num_bytes = _residual_bytes(program, kept, microbatches, num_devices)
        selective = dataclasses.replace(workload, residuals=num_bytes, costs=costs, selective=True)
    # Up to here, bytes and times are for all microbatches.
    workload, selective = workload.in_waves(waves), selective and selective.in_waves(waves)
    schedule = find_schedule(workload, device_budget, selective, host_room)
    instructions = schedule.cold if training else schedule.evaluation
    return BoundStep(
        key=key,
        program=program,
        stages=bound,
        microbatches=microbatches,
        num_devices=num_devices,
        narrow_sums=narrow_sums,
        collectives=collectives,
        workload=workload,
        selective=selective,
        schedule=schedule,
        last_read=last_read_by_task(instructions, stages, program),
    )


def _rounding_of_sums(precision: Precision) -> Rounding | None:
    return None if precision.sums == jnp.dtype("float32") else precision.rounding


def _residuals(stage: Stage, hardware: Hardware) -> tuple[Residuals | None, Residuals | None]:
    """All residuals that are worth saving, and only the costliest."""
    every = find_residuals(stage)
    return every, selective_residuals(stage, every, hardware)


def _residual_bytes(
    program: Program, kept: Sequence[Residuals | None], microbatches: int, num_devices: int
) -> tuple[int, ...]:
    """Bytes of each stage's residuals of all microbatches on one device."""
    rows = (program.examples.num_bytes(r.avals, num_devices) if r else 0 for r in kept)
    return tuple(microbatches * num_bytes for num_bytes in rows)


def _gradient_dtypes(
    stages: Sequence[Stage],
    grouping: Grouping,
    masters: Sequence[str],
    microbatches: int,
    narrow_sums: Rounding | None,
) -> tuple[str | None, ...]:
    """The dtype of each group's gradient: fp32 for sums, else the backward's own dtype.

    A gradient that is complete after one backward is as exact in that dtype as in fp32, and half as
    large in bf16. Frozen groups have no gradient. Where the backward and the masters are in
    float64, so are gradients; sums to be rounded to bf16 are added up in fp32.
    """
    group_of = grouping.group_of
    dtypes: list[set[str]] = [set() for _ in grouping.leaves]
    readers = [0] * len(grouping.leaves)  # stages that read each group: as many backwards add up
    for stage in stages:
        first = len(stage.consts)
        leaves = stage.jaxpr.invars[first : first + len(stage.leaves)]
        for leaf, v in zip(stage.leaves, leaves, strict=True):
            dtypes[group_of[leaf]].add(v.aval.dtype.name)
        for group in {group_of[leaf] for leaf in stage.leaves}:
            readers[group] += 1
    found: list[str | None] = []
    for g, (rows, number) in enumerate(zip(dtypes, readers, strict=True)):
        is_sum = microbatches > 1 or number != 1 or len(rows) != 1
        is_wide = rows == {"float64"} and masters[g] == "float64"
        wide = "float64" if is_wide and not (is_sum and narrow_sums) else "float32"
        own = min([wide, *rows], key=lambda name: np.dtype(name).itemsize)
        found.append(None if g in grouping.frozen else wide if is_sum else own)
    return tuple(found)


def _summed(stages: Sequence[BoundStage]) -> frozenset[int]:
    """The groups with gradients that are sums over microbatches or stages."""
    return frozenset(group for bound in stages for group in bound.accumulated)


def _rounding(bound: BoundStage, summed: frozenset[int], rounding: Rounding | None) -> BoundStage:
    """A stage with a backward that rounds its gradients of these groups."""
    if bound.mode is None or summed.isdisjoint(bound.trained):
        return bound
    rows = tuple(rounding if group in summed else None for group in bound.groups)
    return dataclasses.replace(bound, mode=dataclasses.replace(bound.mode, rounding=rows))


def _bind(
    stages, grouping, layouts, gradients, fused, accumulate, hardware: Hardware | None
) -> tuple[BoundStage, ...]:
    """Binds stages to groups, from the last to the first, in the order of the backward.

    A backward adds to gradients and cotangents that earlier backwards have made. An evaluation,
    without `hardware`, saves no residuals.
    """
    group_of = grouping.group_of
    # Position of each leaf in its group.
    position = {leaf: i for leaves in grouping.leaves for i, leaf in enumerate(leaves)}
    seen_groups: set[int] = set()
    sent: set[int] = set()
    found: dict[Hashable, tuple[Residuals | None, Residuals | None]] = {}
    bound: list[BoundStage] = []
    for s in range(len(stages) - 1, -1, -1):
        stage: Stage = stages[s]
        groups = tuple(dict.fromkeys(group_of[leaf] for leaf in stage.leaves))
        slots = tuple(
            Slot(slab=groups.index(group_of[leaf]), leaf=position[leaf]) for leaf in stage.leaves
        )
        binding = Binding(layouts=tuple(layouts[g].master for g in groups), slots=slots)
        mode, known, residuals, selective = None, (), None, None
        if stage.has_backward:
            # An existing cotangent is added only once, even if the stage takes the value twice.
            existing = tuple(
                active and i in sent and i not in stage.inputs[:n]
                for n, (i, active) in enumerate(zip(stage.inputs, stage.active, strict=True))
            )
            known = tuple(i for i, e in zip(stage.inputs, existing, strict=True) if e)
            mode = BackwardMode(
                gradients=tuple(gradients[g] for g in groups),
                accumulate=tuple(
                    g not in grouping.frozen and (accumulate or g in seen_groups) for g in groups
                ),
                arriving=stage.has_cotangent,
                existing=existing,
                give_outputs=fused and s == len(stages) - 1,
                rounding=(None,) * len(groups),
            )
            seen_groups.update(groups)
            sent.update(i for i, a in zip(stage.inputs, stage.active, strict=True) if a)
            if hardware is not None and not mode.give_outputs:
                # Tracing the two halves takes long; stages of one template share them.
                like = stage.key, stage.is_trainable, stage.active, stage.has_cotangent
                if like not in found:
                    found[like] = remembered(
                        "residuals",
                        lambda like=like: (*like, hardware),
                        functools.partial(_residuals, stage, hardware),
                        _MOST_RESIDUALS,
                    )
                residuals, selective = found[like]
        bound.append(
            BoundStage(
                stage=stage,
                groups=groups,
                binding=binding,
                mode=mode,
                sent=known,
                residuals=residuals,
                selective=selective,
            )
        )
    return tuple(bound[::-1])
