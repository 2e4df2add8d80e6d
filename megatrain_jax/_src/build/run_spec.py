"""A run before it has arrays: the model cut, the optimizer cut, everything laid out and scheduled.

Pure and abstract, so that a plan of a 120B model takes seconds on a laptop; the trainer starts
from the same object.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from megatrain_jax._src.adapt.adapters import AdaptedModel
from megatrain_jax._src.adapt.model_kinds import path_name, trainable_mask
from megatrain_jax._src.build.bound_step import BoundStep, bind_step
from megatrain_jax._src.build.options import RunOptions
from megatrain_jax._src.build.precision import Precision
from megatrain_jax._src.kernels.cache import Templates, compile_ahead, estimate_ahead
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.blocks import Leaf
from megatrain_jax._src.program.flops import count_flops, is_product
from megatrain_jax._src.program.loss.gradients import refuse_no_gradient
from megatrain_jax._src.program.loss.stages import Program
from megatrain_jax._src.program.loss.trace import TracedLoss, cut_loss, leaves_of, trace_loss
from megatrain_jax._src.program.optimizer.cut import CoupledGroupsError, OptimizerCut, cut_optimizer
from megatrain_jax._src.program.stacks import Stack
from megatrain_jax._src.report.make_plan import make_plan
from megatrain_jax._src.report.plan import Plan
from megatrain_jax._src.schedule.search import find_schedule
from megatrain_jax._src.schedule.tasks import Op
from megatrain_jax._src.state.groups import Grouping, GroupLayout, group_leaves, layout_group
from megatrain_jax._src.state.hardware import H200, Hardware
from megatrain_jax._src.state.placement import Placement

# The driver waits for a task before it dispatches the second one after it.
_TASKS_IN_FLIGHT = 3
# Share of the device's memory that an automatic budget leaves to the allocator's gaps, beside room
# for one more of the largest arrays.
_RESERVED = 0.05
# Parameters below which a model fits any device as a whole.
_WORTH_CUTTING = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run's compile-time facts.

    Attributes:
        adapted: The model without its arrays.
        loss_fn: The user's loss.
        precision: Dtypes of masters and of compute.
        microbatches: Into how many parts a training batch is split.
        device_budget: Bytes that state and the values between stages may occupy on the device, or
            None for the least.
        automatic: Whether the budget is to be what the device has left.
        temporary_bytes: What compiled functions need on the device for themselves; None before
            that is known.
        temporary_estimated: Whether that is an estimate, since they aren't compiled.
        hardware: The machine that steps are scheduled for.
        leaves: All arrays of the store, in order.
        grouping: Which of them travel together.
        layouts: How each group lies in slabs.
        optimizer: The optimizer, cut by group.
        first: The training step for the batch shape the run started with.
    """

    adapted: AdaptedModel
    loss_fn: Callable[..., Any]
    precision: Precision
    microbatches: int
    device_budget: int | None
    automatic: bool
    temporary_bytes: int | None
    temporary_estimated: bool
    hardware: Hardware
    leaves: tuple[Leaf, ...]
    grouping: Grouping
    layouts: tuple[GroupLayout, ...]
    optimizer: OptimizerCut
    first: BoundStep

    def step_plan(
        self, batch: Any, *, train: bool = True, loss_fn: Callable[..., Any] | None = None
    ) -> BoundStep:
        """Traces, cuts and schedules a step for another batch shape, or an evaluation."""
        loss_fn = loss_fn or self.loss_fn
        microbatches = self.microbatches
        if not train and jax.tree.leaves(batch)[0].shape[0] % microbatches:
            microbatches = 1
        traced = _trace(self.adapted, loss_fn, self.precision, batch, microbatches, train)
        return _bind_step(
            (batch_key(batch), train, loss_fn),
            cut_loss(traced, self.leaves),
            traced,
            self.grouping,
            self.layouts,
            self.optimizer,
            microbatches=microbatches,
            device_budget=self.device_budget,
            hardware=self.hardware,
            training=train,
        )

    def with_temporaries(
        self, temporary_bytes: int, device_bytes: int | None, estimated: bool
    ) -> "RunSpec":
        """The same run, with its functions' memory known.

        An automatic budget becomes what they leave of the device.

        Args:
            temporary_bytes: What compiled functions need on the device for themselves.
            device_bytes: Device memory that is free; None if unknown.
            estimated: Whether the functions' memory is an estimate.
        """
        spec = dataclasses.replace(
            self, temporary_bytes=temporary_bytes, temporary_estimated=estimated
        )
        if not self.automatic or device_bytes is None:
            return spec
        taken = _other_bytes(self.first) + temporary_bytes
        left = int(device_bytes * (1 - _RESERVED)) - self.largest_slab_bytes - taken
        budget = max(left, self.first.schedule.smallest_bytes)
        schedule = find_schedule(self.first.workload, budget)
        first = dataclasses.replace(self.first, schedule=schedule)
        return dataclasses.replace(spec, device_budget=budget, first=first)

    @property
    def host_bytes_needed(self) -> int:
        """Pinned host memory for state, waiting gradients and values, and arrays in flight."""
        return self.plan().host_peak_bytes

    @property
    def largest_slab_bytes(self) -> int:
        """Bytes of the largest array of the store."""
        slabs = (slab for layout in self.layouts for slab in layout.slabs)
        return max(slab.num_bytes for slab in slabs)

    def plan(self, hardware: Hardware | None = None) -> Plan:
        """What a step of the first batch shape needs and does."""
        step, sizes = self.first, self.first.workload.sizes
        templates: dict[Hashable, int] = {}
        template_of: dict[int, int | str] = {}
        for bound in step.stages:
            number = templates.setdefault(bound.key, len(templates))
            for g in bound.groups:
                template_of.setdefault(g, number)
        parts = (*self.optimizer.reduce, *self.optimizer.apply)
        flops = {part.key: count_flops(part.jaxpr) for part in {p.key: p for p in parts}.values()}
        return make_plan(
            names=self.grouping.names,
            sizes=sizes,
            values=step.workload.values,
            num_parameters=[
                sum(jx.num_elements(self.leaves[i]) for i in rows) for rows in self.grouping.leaves
            ],
            templates=[template_of.get(g, "-") for g in range(len(sizes))],
            stage_flops=[count_flops(bound.stage.jaxpr) for bound in step.stages],
            backward=step.workload.backward,
            learned=[bound.stage.trainable_share for bound in step.stages],
            frozen=self.grouping.frozen,
            fused_last=step.workload.fused_last,
            kept=step.schedule.kept,
            saved_flops=[b.residuals.saved_flops if b.residuals else 0 for b in step.stages],
            microbatches=step.microbatches,
            optimizer_flops=sum(flops[part.key] for part in parts),
            seconds_per_step=step.schedule.seconds,
            instructions=step.schedule.steady,
            deferred=step.workload.deferred,
            device_state_bytes=step.schedule.peak_bytes,
            device_other_bytes=_other_bytes(step),
            device_temporary_bytes=self.temporary_bytes,
            device_temporary_estimated=self.temporary_estimated,
            in_flight_bytes=_in_flight_bytes(step),
            largest_slab_bytes=self.largest_slab_bytes,
            num_templates=len(templates),
            warnings=self.warnings,
            hardware=hardware,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What could not be done well, in words."""
        return (*self.first.program.warnings, *self._no_blocks(), *self._wide_products())

    def _no_blocks(self) -> list[str]:
        """Warns where nothing could be cut: then the largest stage is the model."""
        small = sum(map(jx.num_elements, self.leaves)) < _WORTH_CUTTING
        if small or any(bound.stage.is_block for bound in self.first.stages):
            return []
        return [
            "no blocks were found, so all parameters are on the device together: keep layers in a "
            "list (`layers/3`), name them by number (`Block_3`), or scan over stacked ones"
        ]

    def _wide_products(self) -> list[str]:
        """Warns of arithmetic that does not run in the compute dtype, which users rarely intend."""
        compute = np.dtype(self.precision.compute)
        jaxprs = [bound.stage.jaxpr for bound in self.first.stages]
        every = sum(count_flops(j, is_product) for j in jaxprs)
        wide = sum(count_flops(j, lambda e: is_product(e, compute.itemsize)) for j in jaxprs)
        if wide <= every / 10:
            return []
        return [
            f"{wide / every:.0%} of the matrix products have operands wider than "
            f"{compute.name}, the compute dtype. A layer that fixes its dtype when it is built "
            "(nnx.Embed does), or a wide array in the batch, widens all that follow: give it the "
            "compute dtype"
        ]


def make_run_spec(
    adapted: AdaptedModel,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    sample_batch: Any,
    options: RunOptions,
) -> RunSpec:
    """Cuts model and optimizer and lays everything out, on shapes alone."""
    microbatches, precision = options.microbatches, options.precision
    hardware = options.hardware or H200  # some machine has to be assumed to order a step
    budget = None if isinstance(options.device_budget, str) else options.device_budget
    traced = _trace(adapted, loss_fn, precision, sample_batch, microbatches, True)
    trained = trainable_mask(options.trainable, adapted.paths)
    leaves, program, grouping, cut = _cut(adapted, traced, optimizer, trained, options)
    layouts = tuple(
        layout_group(
            leaves,
            rows,
            [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in state],
            precision.stored(g not in grouping.frozen),
        )
        for g, (rows, state) in enumerate(zip(grouping.leaves, cut.state, strict=True))
    )
    first = _bind_step(
        (batch_key(sample_batch), True, loss_fn),
        program,
        traced,
        grouping,
        layouts,
        cut,
        microbatches=microbatches,
        device_budget=budget,
        hardware=hardware,
        training=True,
    )
    return RunSpec(
        adapted=adapted,
        loss_fn=loss_fn,
        precision=precision,
        microbatches=microbatches,
        device_budget=budget,
        automatic=options.device_budget is None,
        temporary_bytes=None,
        temporary_estimated=False,
        hardware=hardware,
        leaves=leaves,
        grouping=grouping,
        layouts=layouts,
        optimizer=cut,
        first=first,
    )


def _cut(
    adapted: AdaptedModel,
    traced: TracedLoss,
    optimizer: optax.GradientTransformation,
    trained: Sequence[bool],
    options: RunOptions,
) -> tuple[tuple[Leaf, ...], Program, Grouping, OptimizerCut]:
    """Cuts loss and optimizer by the same groups.

    Layers that a loss takes by hand stay in one array if the optimizer needs several of them: Muon
    makes a matrix of a stack of biases.
    """

    def by(stacks: Sequence[Stack]) -> tuple[tuple[Leaf, ...], Program, Grouping, OptimizerCut]:
        leaves = leaves_of(traced, adapted.paths, adapted.shapes, trained, stacks)
        program = cut_loss(traced, leaves)
        if warning := refuse_no_gradient(program, leaves):
            program = program.warning(warning)
        if options.microbatches > 1:
            _refuse_batch_statistics(adapted, program)
        grouping = group_leaves(leaves, [stage.leaves for stage in program.stages])
        cut = _cut_optimizer(optimizer, adapted, leaves, grouping, trained, options.precision)
        if options.on_nonfinite == "skip":
            cut = dataclasses.replace(cut, deferred=True, guarded=True, skips=True)
        return leaves, program, grouping, cut

    every, scanned = traced.stacks.stacks, traced.stacks.scanned
    try:
        return by(every)
    except CoupledGroupsError as error:
        if every == scanned:
            raise
        reason = str(error)
    leaves, program, grouping, cut = by(scanned)
    return (
        leaves,
        program.warning(f"layers in one array were left together: {reason}"),
        grouping,
        cut,
    )


def _cut_optimizer(
    optimizer: optax.GradientTransformation,
    adapted: AdaptedModel,
    leaves: Sequence[Leaf],
    grouping: Grouping,
    trained: Sequence[bool],
    precision: Precision,
) -> OptimizerCut:
    """Cuts the update of what is trained; to Optax the rest is masked, as with `optax.masked`."""
    parameters = [p for p, trains in enumerate(trained) if trains]
    number = {p: n for n, p in enumerate(parameters)}

    def params_tree(arrays: Sequence[Any]) -> Any:
        return adapted.params_tree(jx.merge(trained, arrays, [optax.MaskedNode()] * len(trained)))

    rows = [
        (leaf, g) for leaf, g in zip(leaves, grouping.group_of, strict=True) if leaf.is_trainable
    ]
    return cut_optimizer(
        optimizer,
        params_tree,
        [jax.ShapeDtypeStruct(adapted.shapes[p].shape, precision.master) for p in parameters],
        [dataclasses.replace(leaf, parameter=number[leaf.parameter]) for leaf, _ in rows],
        [g for _, g in rows],
        len(grouping.names),
    )


def fit_to_device(
    spec: RunSpec, templates: Templates, device_bytes: int | None, placement: Placement | None
) -> RunSpec:
    """Finds what a step's functions need and, if the budget is automatic, gives it what they leave.

    Args:
        spec: The run, planned without knowledge of its functions' memory.
        templates: Where the functions go.
        device_bytes: Device memory that is free; None if unknown.
        placement: Of the run, for which they are compiled; None if the device isn't here, so that
            what they need is estimated.
    """

    def needed_by(step: BoundStep) -> int:
        what = templates, step, spec.layouts, spec.optimizer
        return estimate_ahead(*what) if placement is None else compile_ahead(*what, placement)

    needed, estimated = needed_by(spec.first), placement is None
    fitted = spec.with_temporaries(needed, device_bytes, estimated)
    if fitted.first.schedule.kept != spec.first.schedule.kept:  # that takes other functions
        more = needed_by(fitted.first)
        if more > needed:
            fitted = spec.with_temporaries(more, device_bytes, estimated)
    return fitted


def _other_bytes(step: BoundStep) -> int:
    """Bytes of the values that live between stages and that the schedule doesn't count."""
    others = step.kept - step.workload.values.keys()
    times = {i: 1 if i in step.kept_once else step.microbatches for i in others}
    return sum(n * jx.num_bytes(step.program.values[i]) for i, n in times.items())


def _in_flight_bytes(step: BoundStep) -> int:
    """Most host bytes that are both old copies still being read and new ones being written."""
    sizes = step.workload.sizes
    lasting = (r for r in step.schedule.steady if r.op is Op.OFFLOAD and r.part in ("P", "O"))
    groups = {r.group for r in lasting if r.group is not None}
    moving = sorted((sizes[g]["P"] + sizes[g]["O"] for g in groups), reverse=True)
    return sum(moving[:_TASKS_IN_FLIGHT])


def exact_dtypes(spec: RunSpec) -> list[DTypeLike | None]:
    """For each parameter the dtype of its master; None where `precision.frozen` may round it."""
    rounds = spec.precision.frozen is not None
    trained = {leaf.parameter: leaf.is_trainable for leaf in spec.leaves}
    return [
        None if rounds and not trained[p] else spec.precision.master
        for p in range(len(spec.adapted.paths))
    ]


def batch_key(batch: Any) -> Hashable:
    """What a batch's compiled step depends on: its structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple((x.shape, str(jax.dtypes.canonicalize_dtype(x.dtype))) for x in leaves)


def _trace(adapted, loss_fn, precision, batch, microbatches, train) -> TracedLoss:
    part = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (x.shape[0] // microbatches, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
        ),
        batch,
    )
    compute = [jax.ShapeDtypeStruct(s.shape, precision.compute) for s in adapted.shapes]

    def loss(parameters, variables, batch, rng):
        return adapted.loss(loss_fn, parameters, variables, batch, rng, train)

    return trace_loss(loss, compute, adapted.variable_shapes, part)


def _bind_step(key, program, traced, grouping, layouts, cut: OptimizerCut, **options) -> BoundStep:
    return bind_step(
        key,
        program,
        grouping,
        layouts,
        metrics=traced.metrics,
        deferred=cut.deferred,
        reduce_reads=cut.reduce_reads,
        **options,
    )


def _refuse_batch_statistics(adapted: AdaptedModel, program: Program) -> None:
    """Refuses state that the parts of a batch can't agree on."""
    names = [path_name(path) for path in adapted.variable_paths]
    new = program.outputs[len(program.outputs) - len(names) :]
    of_batch, _ = jx.split(program.state.of_batch, names)
    if of_batch:
        raise ValueError(
            "microbatches > 1 can't train this model: its state "
            f"{', '.join(of_batch[:6])} depends on the batch (statistics as of a batch norm), and "
            "statistics of a part of a batch differ from those of the whole. Use microbatches=1, "
            "or a normalisation without batch statistics."
        )
    pairs, early = zip(program.state.drawn, new, strict=True), set(program.prologue_values)
    drawn, _ = jx.split([d and i not in early for d, i in pairs], names)
    if drawn:
        raise ValueError(
            "microbatches > 1 can't train this model: random numbers are drawn from its state "
            f"{', '.join(drawn[:6])}, which depends on parameters, so that the parts of a batch "
            "would all draw the same. Use microbatches=1, or draw from the `rng` of the loss."
        )
