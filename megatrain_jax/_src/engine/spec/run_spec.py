"""A run without arrays: model and optimizer are cut, laid out and scheduled.

It is made from shapes alone, so a plan of a 120B model takes seconds on a laptop. The trainer
starts from the same object.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.adapt.adapters import AdaptedModel
from megatrain_jax._src.engine.adapt.loss_function import EvalLoss, argument_of
from megatrain_jax._src.engine.options.batch_checks import num_rows
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.options.precision import Precision
from megatrain_jax._src.engine.program.fingerprint import fingerprint
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.loss.trace import TracedLoss, trace_loss
from megatrain_jax._src.engine.program.optimizer.cut import OptimizerCut
from megatrain_jax._src.engine.program.optimizer.hyperparameters import find_hyperparameters
from megatrain_jax._src.engine.schedule.schedule import BudgetError
from megatrain_jax._src.engine.spec.block_splits import BlockSplit
from megatrain_jax._src.engine.spec.bound_step import BoundStep, bind_step
from megatrain_jax._src.engine.spec.codecs import stored_dtype
from megatrain_jax._src.engine.spec.cut_run import Cut, cut_program
from megatrain_jax._src.engine.state.hardware import Hardware
from megatrain_jax._src.engine.state.layout import Grouping, GroupLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run without arrays: model and optimizer are cut, laid out and scheduled.

    Attributes:
        adapted: The model without its arrays.
        loss_fn: The user's loss function.
        options: Options of the run.
        traced: The loss as traced for the first batch shape.
        budget_bytes: Maximum bytes on the device of state and values between stages; None for the
            minimum.
        temporary_bytes: Device bytes of compiled functions' temporaries; None until known.
        temporary_estimated: Whether `temporary_bytes` is an estimate, without compilation.
        base_bytes: Bytes of the process beside the run's arrays, with the compiler's, where a CPU
            computes: all arrays are then in the host's memory. None on a GPU.
        is_measured: Whether the first step is scheduled by measured times of its functions.
        measured_machine: The hardware with measured rates of copies, by which the first step is
            scheduled; None if they were not measured. Steps of later batch shapes choose what they
            save by the options' hardware, so that measured rates never change results.
        room_bytes: Device bytes that functions of later batch shapes may use for temporaries; None
            if the device's memory is unknown.
        host_room: Host bytes per device that are available in addition to the state at rest;
            infinite if unknown.
        lacking_device: Device bytes that the run lacks, however it is cut and scheduled; 0 if it
            fits, or if the device's memory is unknown.
        lacking_host: Host bytes that each process lacks in the same sense.
        on_disk: The parts that rest on disks, with their class; see `Workload`.
        leaves: All leaves of the model, in the store's order.
        grouping: Groups of the leaves.
        layouts: Layout of each group.
        optimizer: The optimizer, cut by group.
        first: The training step for the first batch shape.
        num_parts: Number of parts that each block is cut into.
        num_groups: Number of groups that each block's experts are divided into; see
            `groups_among`.
        has_smaller_parts: See `Cut`.
        state_choice: A sentence on the choice of `state_per_process`; "" if there was none.
        finer_ways: The ways to cut blocks into more parts, or their experts into more groups.
        finer: Makes the same run in the first possible one of such ways; None if there is none.
    """

    adapted: AdaptedModel
    loss_fn: Callable[..., Any]
    options: Options
    traced: TracedLoss
    budget_bytes: int | None
    temporary_bytes: int | None = None
    temporary_estimated: bool = False
    base_bytes: int | None = None
    is_measured: bool = False
    measured_machine: Hardware | None = None
    room_bytes: int | None = None
    host_room: float = math.inf
    lacking_device: int = 0
    lacking_host: int = 0
    on_disk: Mapping[Key, int] = dataclasses.field(default_factory=dict)
    leaves: tuple[Leaf, ...]
    grouping: Grouping
    layouts: tuple[GroupLayout, ...]
    optimizer: OptimizerCut
    first: BoundStep
    num_parts: int = 1
    num_groups: int = 1
    has_smaller_parts: bool = True
    state_choice: str = ""
    finer_ways: tuple[BlockSplit, ...] = ()
    finer: "Callable[[Sequence[BlockSplit]], RunSpec | None]" = dataclasses.field(
        default=lambda ways: None, compare=False
    )

    @property
    def lacking(self) -> tuple[int, int]:
        """What the run lacks, on the device and in the host; zeros if it fits."""
        return self.lacking_device, self.lacking_host

    @functools.cached_property
    def averaged_layouts(self) -> tuple[GroupLayout, ...]:
        """The layout of each group with its averages as masters; frozen groups have no others."""
        return tuple(
            layout
            if group in self.grouping.frozen
            else dataclasses.replace(layout, master=layout.averages)
            for group, layout in enumerate(self.layouts)
        )

    @property
    def machine(self) -> Hardware | None:
        """The hardware that the first step is scheduled for."""
        return self.measured_machine or self.options.machine

    @property
    def precision(self) -> Precision:
        """Dtypes of masters and of compute."""
        return self.options.dtypes

    @property
    def microbatches(self) -> int:
        """Number of parts that a training batch is split into."""
        return self.first.microbatches

    @property
    def waves(self) -> int:
        """Number of parts of the microbatches that go through the stages one after another."""
        return self.first.waves

    @property
    def largest_slab_bytes(self) -> int:
        """Bytes of the largest array of the store per device."""
        slabs = (slab for layout in self.layouts for slab in layout.slabs)
        return max(slab.num_bytes // slab.num_shards for slab in slabs)

    def trace(
        self, batch: Any, *, train: bool, loss_fn: Callable[..., Any]
    ) -> tuple[TracedLoss, int]:
        """Traces a loss on one microbatch; see `bound_step`.

        Returns:
            The traced loss, and the number of microbatches.
        """
        microbatches = self.microbatches
        # Training batches must be divisible by the microbatches; evaluation batches need not.
        if not train and (num_rows(batch) or 1) % microbatches:
            microbatches = 1
        traced = trace_microbatch(
            self.adapted, loss_fn, self.options, batch, microbatches, self.num_groups, train=train
        )
        return traced, microbatches

    @property
    def step_metrics(self) -> tuple[str, ...]:
        """The names of the numbers in a step's record."""
        names = ["loss", *self.traced.metrics, *find_hyperparameters(self.optimizer), "grad_norm"]
        names += ["loss_scale"] if self.precision.scales_loss else []
        names += ["skipped"] if self.optimizer.skips else []
        return *names, "seconds"

    @property
    def loss_to_evaluate(self) -> EvalLoss | None:
        """The run's loss for evaluations, if it has one of its own."""
        given = self.options.eval_loss_fn
        return None if given is None else EvalLoss(given)

    def evaluation_metrics(
        self, batch: Any, loss_fn: Callable[..., Any] | None = None
    ) -> tuple[str, ...]:
        """The names of the metrics that the evaluation of a batch has; see `bound_step`."""
        loss_fn = loss_fn or self.loss_to_evaluate or self.loss_fn
        traced, _ = self.trace(batch, train=False, loss_fn=loss_fn)
        return "loss", *traced.metrics

    def bound_step(
        self,
        batch: Any,
        *,
        train: bool = True,
        loss_fn: Callable[..., Any] | None = None,
        averages: bool = False,
    ) -> BoundStep:
        """Traces, cuts and schedules a step for a new batch shape, or an evaluation.

        Args:
            batch: A batch, or `jax.ShapeDtypeStruct`s of one.
            train: Whether it is a training step; an evaluation has no backward.
            loss_fn: The loss; None for the run's own.
            averages: Whether an evaluation reads averages of parameters in place of masters.
        """
        loss_fn = loss_fn or self.loss_fn
        layouts = self.averaged_layouts if averages else self.layouts
        traced, microbatches = self.trace(batch, train=train, loss_fn=loss_fn)
        waves = min(self.waves, microbatches)
        # The store has the run's own leaves and groups, so they are used even if this loss would
        # suggest different ones.
        cut = Cut(
            leaves=self.leaves,
            program=cut_program(traced, self.leaves, self.precision),
            grouping=self.grouping,
            optimizer=self.optimizer,
        )

        # The drives have space for the activations of the first step's shape alone.
        on_disk = {k: n for k, n in self.on_disk.items() if k.kind is not Kind.ACTIVATION}

        def bound(waves: int) -> BoundStep:
            return bind_step(
                (batch_key(batch), train, loss_fn),
                cut,
                layouts,
                self.options,
                microbatches=microbatches,
                device_budget=self.budget_bytes,
                host_room=self.host_room,
                waves=waves,
                training=train,
                on_disk=on_disk,
            )

        # An evaluation fetches all weights once if the device and the host have room for the
        # activations of all microbatches.
        if not train and waves > 1:
            with contextlib.suppress(BudgetError):
                step = bound(1)
                # Without a budget, it must not take more of the device than training does.
                room = self.budget_bytes or self.first.schedule.peak_bytes
                fits = step.schedule.peak_bytes <= room
                if fits and step.schedule.evaluation_bytes <= self.host_room:
                    return step
        try:
            return bound(waves)
        except BudgetError as error:
            raise self._refused(error.smallest, train) from None

    def _refused(self, smallest: int, train: bool) -> Exception:
        """The error for a step of a new batch shape that exceeds the budget."""
        what = "A step" if train else "An evaluation"
        takes = f"on batches of this shape takes {smallest} bytes ({sized(smallest)}) of the device"
        if self.options.device_budget is not None:
            return ValueError(
                f"device_budget={self.budget_bytes} is too small: {what.lower()} {takes} at least. "
                'Pass "minimum", or None for what the device has left, or use smaller or shorter '
                "batches. A larger number may not be enough, because blocks are cut for the first "
                "batch and the budget, unless training begins with the largest batches"
            )
        return MemoryError(
            f"{what} {takes} for state and activations at least, where the first batch has left "
            f"{sized(self.budget_bytes or 0)}. Nothing was computed. Use smaller or shorter "
            "batches, or begin with the largest: a run is fitted to its first batch."
        )


def exact_dtypes(spec: RunSpec) -> list[DTypeLike | None]:
    """The dtype of each parameter's master; None if the run asks for a dtype that may round."""
    precision = spec.precision
    found: dict[int, DTypeLike | None] = {}
    for leaf in spec.leaves:
        dtype = stored_dtype(precision, leaf)
        by_default = leaf.is_trainable or precision.frozen is None
        found[leaf.parameter] = dtype if by_default and dtype == precision.update else None
    return [found[p] for p in range(len(spec.adapted.paths))]


def distinct_facts(spec: RunSpec, sample_batch: Any) -> dict[str, Any]:
    """Facts that identify a run, by the user's names."""
    adapted, options = spec.adapted, spec.options
    return {
        "the model's parameters": (adapted.paths, adapted.shapes),
        "the model's variables": (adapted.variable_paths, adapted.variable_shapes),
        "the optimizer": fingerprint(spec.optimizer.traced),
        "the shapes of a batch": batch_key(sample_batch),
        "`microbatches`": options.microbatches,
        "`waves`": spec.waves,
        "`precision`": options.dtypes,
        "`device_budget`": options.device_budget,
        "`on_nonfinite`": options.on_nonfinite,
        "`max_skipped`": options.max_skipped,
        "`seed`": options.seed,
        "`state_per_process`": options.state_per_process,
        "`trainable`": spec.grouping.frozen,
        "the stages of the loss": [len(s.jaxpr.eqns) for s in spec.first.program.stages],
    }


def batch_key(batch: Any) -> Hashable:
    """The key of a batch shape: the structure, shapes and dtypes that a step is compiled for."""
    leaves, treedef = jax.tree.flatten(batch)
    # JAX's own dtypes: without x64, an int64 array from NumPy becomes int32.
    return treedef, tuple((x.shape, str(jax.dtypes.canonicalize_dtype(x.dtype))) for x in leaves)


def trace_microbatch(
    adapted: AdaptedModel,
    loss_fn: Callable[..., Any],
    options: Options,
    batch: Any,
    microbatches: int,
    num_groups: int,
    *,
    train: bool,
) -> TracedLoss:
    """Traces the loss of one microbatch."""
    part = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (x.shape[0] // microbatches, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
        ),
        batch,
    )
    # In the compute dtype: stages cast the leaves that they read, so no equation casts parameters.
    compute = [jax.ShapeDtypeStruct(s.shape, options.dtypes.compute) for s in adapted.shapes]

    def loss(parameters, variables, batch, rng):
        return adapted.loss(loss_fn, parameters, variables, batch, rng, train)

    devices = [*options.mesh.devices.flat] if isinstance(options.mesh, Mesh) else None
    return trace_loss(
        *(loss, compute, adapted.variable_shapes, part),
        num_devices=options.num_devices,
        devices=devices,
        builder=adapted.builder,
        expert_groups=num_groups,
        name=argument_of(loss_fn),
    )
