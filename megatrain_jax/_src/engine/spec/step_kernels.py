"""The kernels of a step."""

import dataclasses
from collections.abc import Iterator, Sequence

from jax.typing import DTypeLike

from megatrain_jax._src.engine.kernels import stage_kernels as stages
from megatrain_jax._src.engine.kernels import steps, updates
from megatrain_jax._src.engine.kernels.bound_stage import in_tiles, with_split_attention
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.program.optimizer.cut import OptimizerCut
from megatrain_jax._src.engine.program.rewriting import are_oversized
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.state.layout import GroupLayout
from megatrain_jax._src.engine.state.placement import Placement


def begin_kernel(step: BoundStep, placement: Placement) -> Kernel:
    """The kernel that begins a step: it splits the batch and runs the prologue."""
    return steps.begin(step.key, step.program, step.microbatches, placement)


def stage_kernel(
    step: BoundStep, op: Op, number: int, placement: Placement, microbatch: int = 0
) -> Kernel:
    """The kernel of a stage's FORWARD or BACKWARD in a step, for a microbatch of a wave."""
    bound, program = step.part(number, microbatch), step.program
    keeps = number in step.schedule.kept
    if op is Op.FORWARD:
        kernel = stages.forward(bound, program, placement, keeps=keeps)
    else:
        count = step.wave_microbatches
        kernel = stages.backward(bound, program, placement, count, keeps=keeps)
        if bound.mode is not None and (bound.mode.is_partial or bound.mode.completes):
            # The gradients of a wave's microbatches are in fp32 until the last one rounds them.
            rows = zip(bound.binding.layouts, bound.mode.gradients, strict=True)
            wide = sum(layout.size for layout, dtype in rows if dtype is not None)
            beside = kernel.beside_bytes + 4 * wide // placement.num_devices
            kernel = dataclasses.replace(kernel, beside_bytes=beside)
    if are_oversized(bound.stage.attention_shapes, placement.num_devices):
        kernel = with_split_attention(kernel, placement.num_devices)
    # By name, because kernels with and without residuals may have different tiles.
    tiling = bound.tiles.get(kernel.name)
    return in_tiles(kernel, tiling.num_tiles) if tiling else kernel


def stage_kernels(step: BoundStep, op: Op, number: int, placement: Placement) -> Iterator[Kernel]:
    """The kernels of a stage's FORWARD or BACKWARD: of the first, second and last microbatch.

    They differ only if the backward rounds sums of gradients.
    """
    last = step.wave_microbatches - 1
    rounds = op is Op.BACKWARD and step.stages[number].rounded
    for microbatch in sorted({0, min(1, last), last} if rounds else {0}):
        yield stage_kernel(step, op, number, placement, microbatch)


def group_kernel(
    op: Op,
    group: int,
    cut: OptimizerCut,
    layouts: Sequence[GroupLayout],
    gradient: DTypeLike,
    placement: Placement,
) -> Kernel:
    """The kernel of a group's REDUCE or UPDATE, for a gradient of this dtype."""
    make = updates.reduce if op is Op.REDUCE else updates.update
    return make(cut, layouts[group], group, gradient, placement)


def step_kernels(
    step: BoundStep,
    layouts: Sequence[GroupLayout],
    cut: OptimizerCut,
    placement: Placement,
    *,
    training: bool = True,
) -> Iterator[Kernel]:
    """The kernels of all stages and groups, in order; small kernels are not included."""
    what = step, layouts, cut, placement
    for _, _, kernel in numbered_kernels(*what, training=training):
        yield kernel


def numbered_kernels(
    step: BoundStep,
    layouts: Sequence[GroupLayout],
    cut: OptimizerCut,
    placement: Placement,
    *,
    training: bool = True,
) -> Iterator[tuple[Op, int, Kernel]]:
    """The operations of all stages and groups, the stage's or group's number, and the kernels."""
    lists = step.schedule
    # Together, the cold list and the flush have all computations of a steady step.
    instructions = (*lists.cold, *lists.flush) if training else lists.evaluation
    for op, stage, group in dict.fromkeys((i.op, i.stage, i.group) for i in instructions):
        if op in (Op.FORWARD, Op.BACKWARD) and stage is not None:
            for kernel in stage_kernels(step, op, stage, placement):
                yield op, stage, kernel
        elif op in (Op.REDUCE, Op.UPDATE) and group is not None:
            gradient = step.gradient_dtypes[group]
            yield op, group, group_kernel(op, group, cut, layouts, gradient, placement)
