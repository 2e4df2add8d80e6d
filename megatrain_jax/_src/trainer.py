"""`Trainer`: one run, which initialises its state, steps, evaluates, and returns the model."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Unpack

import jax
import optax

from megatrain_jax._src.adapt.adapters import adapt
from megatrain_jax._src.checkpoint.given_parameters import starting_from
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.garbage import leaving_garbage
from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.history import weighted_means
from megatrain_jax._src.kernels.bound_stage import BoundStage
from megatrain_jax._src.options.batch_checks import check_batch, check_like, other_shapes
from megatrain_jax._src.options.inputs import (
    check_data,
    check_loss,
    check_mesh,
    check_order,
    check_parts,
)
from megatrain_jax._src.options.machine import check_products
from megatrain_jax._src.options.options import Options, RunArguments, options_of, shows
from megatrain_jax._src.report.make_plan import make_plan
from megatrain_jax._src.report.plan import Plan
from megatrain_jax._src.report.run_warnings import find_warnings, warn_of
from megatrain_jax._src.run_state import RunState
from megatrain_jax._src.runtime.batch import joined_shapes, put_batch
from megatrain_jax._src.runtime.evaluation import evaluate_batches
from megatrain_jax._src.runtime.exhausted import advised
from megatrain_jax._src.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.runtime.training import StepMetrics
from megatrain_jax._src.schedule.search import Schedule
from megatrain_jax._src.spec.bound_step import BoundStep
from megatrain_jax._src.spec.budget import in_room
from megatrain_jax._src.spec.host import agreed_host_budget, on_same_host
from megatrain_jax._src.spec.rescheduled import with_all_waves
from megatrain_jax._src.spec.run_spec import (
    RunSpec,
    batch_key,
    distinct_facts,
    exact_dtypes,
    make_run_spec,
)
from megatrain_jax._src.start import start, with_parts
from megatrain_jax._src.state.cards import this_machine
from megatrain_jax._src.state.placement import default_mesh, placed_on


class Trainer(RunState):
    """Trains one model whose parameters and optimizer state live in pinned host memory."""

    @shows(Options)
    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        sample_batch: Any,
        *,
        params: Any = None,
        progress: bool = True,
        **options: Unpack[RunArguments],
    ):
        """Cuts the model, checks that it fits, and initialises its state in host memory.

        Args:
            model: An `nnx.Module`, a function without arguments that builds one, a
                `flax.linen.Module`, or a pytree of arrays.
            loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``, returning a scalar
                loss or ``(loss, metrics)``.
            optimizer: An Optax gradient transformation.
            sample_batch: A batch, or its `jax.ShapeDtypeStruct`s. Every array has a leading axis of
                examples.
            params: Parameters to start from instead of the model's own: a tree of arrays under the
                model's paths (objects with a shape, a dtype and `__array__`, such as memory-mapped
                files, are read one by one), or the folder of a checkpoint that Orbax can read.
                Their dtype may be narrower than the masters', not wider. A tree may also contain
                the model's further variables, which are ignored, and nothing else.
            progress: Whether to show a progress bar while the state is made or restored.
            microbatches: Number of equal parts that each training batch is split into. The loss and
                the gradient are the means over the parts. "auto" has the plan choose, by the memory
                of the GPU, and with it the number of waves; 1 where there is no GPU.
            waves: Number of equal groups of microbatches that go through forward and backward one
                after another. Each fetches all weights, and holds activations of its own alone.
                None has the plan choose; one where a parameter is read by several blocks, as a
                tied embedding is, since the sum of its gradients would be rounded differently.
            precision: The dtypes of masters, of compute and of optimizer state, or the name of a
                `Precision`: "compact" is `Precision.compact()`; "bfloat16", the default, and
                "float32" compute in this dtype, with masters and optimizer state in fp32.
            device_budget: Bytes of device memory that state and activations may occupy, as a number
                or as text such as "22 GiB". With a larger budget, less is transferred and less is
                recomputed in backward: results may then differ in the last bits. "least" for the
                minimum with which no step waits for memory; None for all that compiled functions
                leave of the device, or the minimum if JAX doesn't report the device's memory.
            host_budget: Maximum bytes of host memory of the process, as a number or as text such as
                "200GiB". It covers pinned memory, the memory of JAX, CUDA and XLA, compilation,
                reading and saving. None for all that is available when the run starts, less a
                reserve for the system. With a smaller budget, more is recomputed in backward.
            trainable: The parameters to train: a regular expression to search for in their paths,
                such as ``"layers/.*/(q|v)_proj"``, a list of them of which any may be found, a
                predicate of the path, or None for all. Frozen
                parameters have neither gradients nor optimizer state and are only copied to the
                device, in `precision.frozen` if that is given; the optimizer sees
                `optax.MaskedNode` in their place.
            on_nonfinite: The action if a loss or a gradient is not finite: "raise", or "skip" to
                leave everything but the step number unchanged and continue. Skipping is decided
                over all gradients, so no parameter is updated before all are known.
            max_skipped: Maximum number of consecutive skipped steps; reaching it is an error.
            seed: Seed of a Linen module's parameters and of the keys for `loss_fn`.
            hardware: The machine whose rates the schedule and `plan` use, a `Hardware` or the name
                of a card such as "H100"; None for this machine, or an H200 if there is no GPU. The
                actual memory size is measured.
            mesh: The devices to train on, each with its share of the state and of the batch: a
                `jax.sharding.Mesh` with any axes, with equally many devices of each process or only
                of this one; None for all GPUs that JAX sees, or else its first device. The loss is
                still over the whole batch; each process passes its part.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If an option is out of range, or model, loss, batch, parameters and options
                are inconsistent.
            CheckpointError: If `params` is a folder that Orbax can't read.
            MemoryError: If host or device memory is too small.
        """
        began = time.perf_counter()
        run = options_of(Trainer.__init__, Options, options)
        # Starts JAX's backend; settings that must precede this were made on import.
        machine = this_machine()
        check_products(run.dtypes, machine)
        mesh = run.mesh or default_mesh()
        check_mesh(mesh)
        placement = placed_on(mesh)
        hardware = run.machine or machine
        if hardware and machine and hardware.host_bytes is None:  # a named card is in this host
            hardware = dataclasses.replace(hardware, host_bytes=machine.host_bytes)
        run = dataclasses.replace(run, hardware=hardware, mesh=mesh)
        if machine is not None:
            run = dataclasses.replace(run, host_budget=agreed_host_budget(run, placement))
        progress = checks.boolean("progress", progress) and placement.processes.is_first
        order = "Trainer(model, loss_fn, optimizer, sample_batch)"
        check_order(order, optimizer, "sample_batch", sample_batch)
        check_parts(model, loss_fn, optimizer, params)
        num_devices = len(placement.local_devices)
        number = run.least_microbatches
        check_batch(sample_batch, number, "sample_batch", num_devices, or_shapes=True)
        adapted, initial = adapt(model, loss_fn, sample_batch, run.seed)
        initial.check()
        # The run keeps only what it needs: the caller may have dropped its own reference too.
        del model
        adapted.check_batch(sample_batch)
        sample = joined_shapes(sample_batch, placement.processes.count)

        def make(run: Options) -> RunSpec:
            return make_run_spec(adapted, loss_fn, optimizer, sample, run)

        with leaving_garbage(), remembering():
            spec = make(with_parts(run, make, sample, placement, has_gpu=machine is not None))
        # Before anything large is made, so an error comes early.
        placement.processes.agree("the beginning of a run", lambda: distinct_facts(spec, sample))
        if placement.processes.is_first:
            warn_of(find_warnings(spec))
        if params is not None:
            initial = starting_from(params, initial, adapted, exact_dtypes(spec))
            del params
        has_gpu = machine is not None
        spec, engine, seconds = start(spec, placement, initial, progress, began, has_gpu=has_gpu)
        super().__init__(spec, engine, progress)
        self._startup = dict(seconds)
        self._sample = joined_shapes(sample_batch, 1)
        self._steps: dict[Hashable, BoundStep] = {spec.first.key: spec.first}

    @advised()
    def step(self, batch: Any) -> StepMetrics:
        """Dispatches one training step, and adds its record to the history.

        Args:
            batch: A batch like the sample; each new shape is traced and compiled once.

        Returns:
            The loss, the loss function's metrics and the global norm of the gradients, as scalar
            device arrays: means over the microbatches, and the sum of a metric called "weight". The
            step may still be running; `read` waits for it.

        Raises:
            ValueError: If the batch does not fit.
            FloatingPointError: If an earlier step had a number that is not finite.
        """
        self._record(keep=1)  # completed steps; at most one step is in flight
        began = time.perf_counter()
        return self._dispatch(batch, lambda metrics: self._by_hand.add(began, metrics))

    @advised()
    def dispatch(self, batch: Any) -> StepMetrics:
        """Dispatches one training step like `step`, but leaves its record to the caller.

        Args:
            batch: See `step`.

        Returns:
            See `step`.

        Raises:
            ValueError: See `step`.
            FloatingPointError: See `step`.
        """
        return self._dispatch(batch, lambda metrics: None)

    def _dispatch(self, batch: Any, note: Callable[[StepMetrics], None]) -> StepMetrics:
        self._training.check_whole()
        self.check_batch(batch)
        step = self._bound_step(batch, train=True, loss_fn=self._spec.loss_fn)
        # Otherwise steps would queue on the device without bound, each with its batch.
        self._training.wait_for_room()
        placement, where = self._store.placement, f"training step {self.num_steps + 1}"
        with deferred_interrupt(), placement.outside_meshes():
            self._training.check_whole()
            placement.processes.agree(where, lambda: {"the shapes of a batch": batch_key(batch)})
            self._settle_saving()
            metrics = self._training.dispatch(step, put_batch(batch, step, placement))
            note(metrics)
        return metrics

    def check_batch(self, batch: Any) -> None:
        """Checks a batch like `step`, preferably while it is on the host.

        Raises:
            TypeError: If it is not a pytree of arrays.
            ValueError: If it differs from the sample, can't be cut into microbatches, or fails the
                model's own `check_batch`.
        """
        num_devices = len(self._store.placement.local_devices)
        check_batch(batch, self._spec.microbatches, num_devices=num_devices)
        check_like(batch, self._sample)
        self._spec.adapted.check_batch(batch)

    @advised()
    def read(self, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """Waits for a step and returns its metrics as Python numbers.

        If steps may be skipped, a metric "skipped" tells whether this one was.

        Raises:
            FloatingPointError: If its loss or a gradient was not finite, or an unread earlier
                step's, and such steps are not skipped. The message lists the updates that were made
                nevertheless; the step and later ones are no longer counted, and training can
                continue with the next batch. Also if too many consecutive steps were skipped.
        """
        try:
            values = {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}
        except (TypeError, ValueError) as error:
            raise TypeError(checks.refused("metrics", "what `step` returned", metrics)) from error
        if isinstance(metrics, StepMetrics):
            is_finite = self._training.settle(metrics)
            self._record(keep=self.num_steps - metrics.step)
            if self._spec.optimizer.skips:
                values["skipped"] = float(not is_finite)
        return values

    @advised()
    def evaluate(
        self, batches: Iterable[Any], loss_fn: Callable[..., Any] | None = None
    ) -> dict[str, float]:
        """Computes loss and metrics of batches without training on them.

        NNX modules run as after ``.eval()``. Pending updates are applied first.

        Args:
            batches: An iterable of batches.
            loss_fn: A loss function to use instead of the training loss.

        Returns:
            Means over all batches. Each batch, and each of its microbatches, is weighted by the
            loss's metric "weight", or else by its number of examples. "weight" itself is the sum.

        Raises:
            TypeError: If `batches` is not an iterable, or a batch is not a pytree of arrays.
            ValueError: If there is no batch, or all weights are 0.
            FloatingPointError: See `read`, of steps that were not read.
        """
        check_data("batches", batches, "to evaluate on one batch, pass [batch]")
        if loss_fn is not None:
            check_loss(loss_fn)
        self.flush()

        def bind(batch: Any) -> BoundStep:
            check_batch(batch)
            self._spec.adapted.check_batch(batch)
            return self._bound_step(batch, train=False, loss_fn=loss_fn or self._spec.loss_fn)

        rows, sizes = evaluate_batches(self._engine, batches, bind)
        if not rows:
            raise ValueError("`batches` gave no batch to evaluate")
        return weighted_means(jax.device_get(rows), sizes)

    @property
    def plan(self) -> Plan:
        """The plan of this run on this machine: memory, transfers, arithmetic."""
        return make_plan(self._spec, *self.processes.spread)

    @property
    def startup(self) -> dict[str, float]:
        """The seconds that making this trainer took, by phase, in order.

        "tracing" covers the model, the loss and the optimizer; "compiling" the functions of a step;
        "pinning" host memory; "initialising" the initial state, or reading `params`. Memory is
        pinned two to three times as fast on huge pages, for which the machine's administrator
        writes `always` to `/sys/kernel/mm/transparent_hugepage/shmem_enabled`.
        """
        return dict(self._startup)

    @property
    def schedule(self) -> Schedule:
        """The schedule of a step on the sample's shapes: transfers and computations, as data."""
        return self._spec.first.schedule

    @property
    def stages(self) -> tuple[BoundStage, ...]:
        """The stages of such a step, each with the groups it reads."""
        return self._spec.first.stages

    def _bound_step(self, batch, *, train: bool, loss_fn) -> BoundStep:
        shapes = joined_shapes(batch, self._store.placement.processes.count)
        # Losses are compared as functions: a new one, even with equal code, is cut again.
        key = (batch_key(shapes), train, loss_fn)
        if key not in self._steps:
            where = f"training step {self.num_steps + 1}" if train else "an evaluation"
            with self._store.placement.outside_meshes(), _told_apart(where, batch, self._sample):
                step = self._spec.bound_step(shapes, train=train, loss_fn=loss_fn)
                step = on_same_host(step, self._spec, *self.processes.spread, training=train)
                what = self._spec, self._engine.kernels, self._store.placement
                step = in_room(step, *what, training=train)
                self._steps[key] = with_all_waves(step, training=train)
        return self._steps[key]


@contextlib.contextmanager
def _told_apart(where: str, batch: Any, sample: Any) -> Iterator[None]:
    """Adds to an error in a step how its batch differs from the first one.

    The error may be JAX's own, about two shapes in the middle of the model, or the user's.
    """
    try:
        yield
    except Exception as error:
        if shapes := other_shapes(batch, sample):
            error.add_note(f"This came with the batch of {where}: {shapes}.")
        raise
