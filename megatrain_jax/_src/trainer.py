"""One run: initialises state group by group, steps, evaluates, and hands the model back."""

import dataclasses
import os
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np
import optax
from tqdm.auto import tqdm

from megatrain_jax._src.adapt.adapters import adapt
from megatrain_jax._src.build.batches import check_batch, check_like
from megatrain_jax._src.build.bound_step import BoundStep
from megatrain_jax._src.build.budget import fit_to_device
from megatrain_jax._src.build.inputs import check_data, check_loss, check_parts
from megatrain_jax._src.build.options import Options, RunArguments, options_of, shows
from megatrain_jax._src.build.run_spec import batch_key, exact_dtypes, make_run_spec
from megatrain_jax._src.checkpoint.contents import entries_of
from megatrain_jax._src.checkpoint.folder import local_path
from megatrain_jax._src.checkpoint.given_parameters import starting_from
from megatrain_jax._src.checkpoint.restore import check, load
from megatrain_jax._src.checkpoint.save import Saving
from megatrain_jax._src.checkpoint.workspace import Workspace
from megatrain_jax._src.common import checks
from megatrain_jax._src.history import History, as_json, weighted_means
from megatrain_jax._src.kernels.cache import Templates
from megatrain_jax._src.report.make_plan import make_plan
from megatrain_jax._src.report.plan import Plan, check_device
from megatrain_jax._src.report.warnings import find_warnings, warn_of
from megatrain_jax._src.runtime import store
from megatrain_jax._src.runtime.engine import Engine
from megatrain_jax._src.runtime.exhausted import advised
from megatrain_jax._src.runtime.initialise import initialise
from megatrain_jax._src.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.state import pool
from megatrain_jax._src.state.hardware import this_machine
from megatrain_jax._src.state.placement import default_device, on_one_device

_END = object()


class StepMetrics(dict[str, jax.Array]):
    """The metrics of one step, as scalars on the device that may not be ready yet.

    Attributes:
        step: Number of the step, from 1.
        healthy: Whether all numbers have been finite up to its end, or in it if steps are skipped.
        group_ok: For each group, in order of its gradient, whether it and all before were finite.
    """

    step: int
    healthy: jax.Array
    group_ok: list[tuple[int, jax.Array]]


class Trainer:
    """Trains one model whose parameters and optimizer state live in pinned host memory.

    Attributes:
        history: One record a step; `fit` and `train` write it.
        num_steps: Training steps dispatched so far.
        num_skipped: How many of them were skipped, of those that were read.
    """

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
            model: An `nnx.Module`, a function of no arguments that builds one, a
                `flax.linen.Module`, or a pytree of arrays.
            loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``, giving a scalar
                loss or ``(loss, metrics)``.
            optimizer: An Optax gradient transformation.
            sample_batch: A batch, or `jax.ShapeDtypeStruct`s of one. Every array has a leading
                axis of examples.
            params: Parameters to start from instead of the model's own: a tree of arrays under the
                model's paths (anything with a shape, a dtype and `__array__`, such as a file
                mapped into memory, is read one by one), or the folder of a checkpoint that Orbax
                can read. Their dtype may be narrower than the masters', not wider.
            progress: Whether to show a progress bar while the state is made or restored.
            microbatches: Into how many equal parts each training batch is split. The loss and
                the gradient are the means over the parts.
            precision: Which dtype the masters have and which one computes.
            device_budget: Bytes of device memory that state and activations may occupy. With more,
                less is moved, and less is computed again in backward: results may then differ in
                the last bits. "least" for the smallest number with which no step waits for room;
                None for what the device has left beside compiled functions, and the least where
                JAX doesn't tell.
            trainable: Which parameters are trained: a regular expression to be found in their
                paths, such as ``"layers/.*/(q|v)_proj"``, a function of the path, or None for all.
                The others have neither gradients nor optimizer state and are only copied to the
                device, in `precision.frozen` if that is given; the optimizer sees
                `optax.MaskedNode` in their place.
            on_nonfinite: What to do if a loss or a gradient is not finite: "raise", or "skip" to
                leave everything but the number of the step as it was and go on. To skip is a
                decision over all gradients, so no parameter is updated before all are known.
            max_skipped: How many steps in a row may be skipped; the last of them is an error.
            seed: Seed of a Linen module's parameters and of the keys `loss_fn` gets.
            hardware: The machine whose rates steps are scheduled by and `plan` refers to; None for
                this one, or an H200 where there is no GPU. How much memory there is, is found out.

        Raises:
            TypeError: If an argument is of another type than it should be.
            ValueError: If an option is out of its range, or model, loss, batch, parameters and
                options don't fit together.
            CheckpointError: If `params` is a folder that Orbax can't read.
            MemoryError: If host memory or the device's is too small.
        """
        run = options_of(Trainer.__init__, Options, options)
        machine, templates = this_machine(), Templates()
        self._placement = placement = on_one_device(default_device())
        run = dataclasses.replace(run, hardware=run.hardware or machine)
        self._progress = checks.boolean("progress", progress)
        check_parts(model, loss_fn, optimizer, params)
        check_batch(sample_batch, run.microbatches, "sample_batch")
        adapted, initial = adapt(model, loss_fn, sample_batch, run.seed)
        del model
        adapted.check_batch(sample_batch)
        spec = make_run_spec(adapted, loss_fn, optimizer, sample_batch, run)
        warn_of(find_warnings(spec))
        if params is not None:
            initial = starting_from(params, initial, adapted, exact_dtypes(spec))
            del params
        with self._bar("compiling", len(spec.layouts)) as bar:
            if machine is not None:
                free = pool.free_device_bytes(placement)
                spec = fit_to_device(spec, templates, free, placement)
                check_device(make_plan(spec), free)
            bar.set_description("reserving host memory")
            pool.reserve(placement, make_plan(spec).host_peak_bytes, spec.largest_slab_bytes)
            bar.set_description("initialising")
            self._engine = Engine(
                spec.layouts, spec.optimizer, templates, placement, jax.random.key(run.seed)
            )
            initialise(spec, self._engine, initial, bar.update)
        self._spec = spec
        self._sample = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), sample_batch)
        self._steps: dict[Hashable, BoundStep] = {spec.first.key: spec.first}
        self._in_flight: deque[StepMetrics] = deque()
        self._saving: Saving | None = None
        self._max_skipped, self._skipped_in_row = run.max_skipped, 0
        self._lost: str | None = None  # why there is no state, if there is none
        self._partial: str | None = None  # which step the state holds in part, if any
        self.history = History()
        self.num_steps = self.num_skipped = 0

    @advised()
    def step(self, batch: Any) -> StepMetrics:
        """Dispatches one training step.

        Args:
            batch: A batch like the sample; new shapes are traced and compiled once each.

        Returns:
            The loss, the loss function's metrics and the global norm of the gradients, as scalar
            device arrays: means over the microbatches, and the sum of a metric called "weight".
            The step may still be running; `read` waits for it.

        Raises:
            ValueError: If the batch does not fit.
            FloatingPointError: If an earlier step met a number that is not finite.
        """
        self._check_whole()
        self.check_batch(batch)
        step = self._bound_step(batch, train=True, loss_fn=self._spec.loss_fn)
        # Two steps may overlap, no more: what runs ahead of the device holds its memory.
        while len(self._in_flight) > 1:
            self.read(self._in_flight[0])
        with deferred_interrupt():
            self._check_whole()
            arrays = jax.device_put(jax.tree.leaves(batch), self._placement.batches)
            self._lost = f"an error cut step {self.num_steps + 1} off while it was dispatched"
            metrics = StepMetrics(self._engine.train(step, arrays))
            self._lost = self._partial = None
            self.num_steps += 1
            metrics.step = self.num_steps
            metrics.healthy, metrics.group_ok = self._engine.ok, self._engine.group_ok
            self._in_flight.append(metrics)
        return metrics

    def check_batch(self, batch: Any) -> None:
        """Checks a batch as `step` does, best while it is on the host.

        Raises:
            TypeError: If it is no pytree of arrays.
            ValueError: If it is unlike the sample, can't be cut into microbatches, or fails the
                model's own `check_batch`.
        """
        check_batch(batch, self._spec.microbatches)
        check_like(batch, self._sample)
        self._spec.adapted.check_batch(batch)

    @advised()
    def read(self, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """Waits for a step and returns its metrics as Python numbers.

        Where steps may be skipped, a metric "skipped" tells whether this one was.

        Raises:
            FloatingPointError: If its loss or a gradient, or that of a step before it which was
                not read, was not finite, and such steps are not skipped. The message says what was
                updated nevertheless; the step and those after it are no longer counted, and
                training can go on with the next batch. Also if too many steps in a row were
                skipped.
        """
        try:
            values = {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}
        except (TypeError, ValueError) as error:
            raise TypeError(checks.refused("metrics", "what `step` returned", metrics)) from error
        if isinstance(metrics, StepMetrics):
            while self._in_flight and self._in_flight[0].step <= metrics.step:
                self._settle(self._in_flight[0])
            healthy = bool(jax.device_get(metrics.healthy))
            if self._spec.optimizer.skips:
                values["skipped"] = float(not healthy)
            elif not healthy:
                raise FloatingPointError(f"step {metrics.step} or one before it was not finite")
        return values

    def _settle(self, metrics: StepMetrics) -> None:
        """Waits for the oldest step in flight, and looks whether it was finite."""
        healthy = bool(jax.device_get(metrics.healthy))
        if not healthy and not self._spec.optimizer.skips:
            self._fail(metrics)
        self._in_flight.popleft()
        self._skipped_in_row = 0 if healthy else self._skipped_in_row + 1
        self.num_skipped += not healthy
        if self._skipped_in_row == self._max_skipped:
            self._skipped_in_row = 0
            raise FloatingPointError(
                f"a loss or a gradient of each step from {metrics.step - self._max_skipped + 1} to "
                f"{metrics.step} was not finite. They were skipped, as many in a row as "
                f"`max_skipped`={self._max_skipped} allows; parameters and optimizer state are as "
                "before them."
            )

    def _fail(self, metrics: StepMetrics) -> None:
        """Raises; first drops the step and what is pending, so that training can go on."""
        loss, flags = jax.device_get((metrics["loss"], metrics.group_ok))
        names = self._spec.grouping.names
        updated = [names[g] for g, ok in flags if ok]
        touched = bool(updated) and bool(np.isfinite(loss)) and not self._spec.optimizer.deferred
        self._in_flight.clear()
        self._engine.recover()
        # What was dispatched after this step did nothing. A step that has changed something counts.
        self.num_steps = metrics.step if touched else metrics.step - 1
        self._engine.set_step(self.num_steps)
        step = f"step {metrics.step}"
        if touched:
            self._partial = f"{step} was done in part, since a gradient was not finite"
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss of {step} is {loss}; nothing was updated")
        if self._spec.optimizer.deferred:
            raise FloatingPointError(f"a gradient of {step} is not finite; nothing was updated")
        guilty = next(names[g] for g, ok in flags if not ok)
        raise FloatingPointError(
            f"the gradient of {guilty} is not finite in {step}. Updated before it was met: "
            f"{', '.join(updated) or 'nothing'}; all other parameters are as before the step."
        )

    @advised()
    def evaluate(
        self, batches: Iterable[Any], loss_fn: Callable[..., Any] | None = None
    ) -> dict[str, float]:
        """Computes loss and metrics of batches without training on them.

        NNX modules run as after ``.eval()``. Pending updates are applied first.

        Args:
            batches: An iterable of batches.
            loss_fn: Another loss function than the one trained with.

        Returns:
            Means over all batches. Each batch, and each of its microbatches, counts as much as the
            metric "weight" of its loss says, or as it has examples if there is no such metric.
            "weight" itself is the sum.

        Raises:
            TypeError: If `batches` is no iterable, or a batch is no pytree of arrays.
            ValueError: If there is no batch, or all weights are 0.
        """
        check_data("batches", batches, "to evaluate on one batch, pass [batch]")
        if loss_fn is not None:
            check_loss(loss_fn)
        self.flush()
        rows, sizes, iterator = [], [], iter(batches)
        while True:
            # An iterator that hangs gives way to a second signal.
            with deferred_interrupt(insist=True):
                batch = next(iterator, _END)
            if batch is _END:
                break
            check_batch(batch)
            self._spec.adapted.check_batch(batch)
            step = self._bound_step(batch, train=False, loss_fn=loss_fn or self._spec.loss_fn)
            with deferred_interrupt():
                arrays = jax.device_put(jax.tree.leaves(batch), self._placement.batches)
                rows.append(self._engine.evaluate(step, arrays))
                sizes.append(arrays[0].shape[0])
        if not rows:
            raise ValueError("`batches` gave no batch to evaluate")
        return weighted_means(jax.device_get(rows), sizes)

    def flush(self) -> None:
        """Applies pending updates and brings all state to rest in pinned host memory.

        Raises:
            RuntimeError: If an error has cut off a step or a restore: there is no state then.
        """
        with deferred_interrupt():
            self._check_whole()
            self._engine.flush()

    def _check_whole(self) -> None:
        if self._lost is not None:
            raise RuntimeError(
                f"this trainer's state is lost: {self._lost}. Restore a checkpoint with "
                "`trainer.restore(path)`, or make a new trainer."
            )

    @property
    def params(self) -> Any:
        """The parameters, as host arrays in the model's own structure.

        They share memory with the store and stay as they are when training goes on. Only a
        parameter stacked over layers, which the store keeps layer by layer, is a copy.
        """
        self.flush()
        return self._spec.adapted.params_tree(store.parameters(self._spec, self._engine))

    @property
    def opt_state(self) -> Any:
        """Optax's state, as host arrays in Optax's own structure; shares memory like `params`."""
        self.flush()
        return store.optimizer_state(self._spec, self._engine)

    @property
    def model(self) -> Any:
        """The user's kind of model, holding the parameters as numpy arrays.

        They share memory with the store, as those of `params` do.
        """
        self.flush()
        variables = store.on_host(self._engine.variables, self._placement)
        return self._spec.adapted.rebuild(store.parameters(self._spec, self._engine), variables)

    @property
    def plan(self) -> Plan:
        """What a step needs and does on this machine."""
        return make_plan(self._spec)

    def save(self, path: str | PathLike[str], *, params_only: bool = False) -> None:
        """Writes a checkpoint that Orbax reads, too: parameters under the model's own paths.

        Args:
            path: The folder to write; must not exist.
            params_only: Whether to leave out all that is not parameters. Training can't go on
                from such a checkpoint.

        Raises:
            TypeError: If `path` is no path.
            ValueError: If Orbax could not read from `path` what it has written.
            FileExistsError: If there is something at `path`.
            CheckpointError: If it can't be written; nothing is left of it.
        """
        path = local_path(checks.path("path", path), "path")
        self.start_saving(path, params_only=checks.boolean("params_only", params_only)).wait()

    def start_saving(
        self,
        path: Path,
        facts: Mapping[str, Any] | None = None,
        *,
        params_only: bool = False,
        workspace: Workspace | None = None,
    ) -> Saving:
        """Begins to write a checkpoint and returns; steps may go on meanwhile.

        Args:
            path: See `save`.
            facts: What to keep beside the state, as JSON.
            params_only: See `save`.
            workspace: Of the run whose checkpoint this is; what is at `path` is then replaced.

        Returns:
            What to wait for. A second save waits for the first by itself.
        """
        path = path.absolute()
        if workspace is None and os.path.lexists(path):
            raise FileExistsError(f"there is something at {path} already")
        self._join_saving()
        self.flush()
        entries = entries_of(self._spec)
        about = {
            "step": self.num_steps,
            "skipped": self.num_skipped,
            "params_only": params_only,
            "partial": self._partial,
            "history": as_json(self.history),  # as it is now
            **(facts or {}),
        }
        self._saving = Saving(
            path, self._spec, self._engine, entries, about, params_only, workspace
        )
        return self._saving

    def wait_for_saving(self) -> None:
        """Waits until a checkpoint that is being written is whole.

        Raises:
            CheckpointError: If it could not be written; raised once.
        """
        if self._saving is not None:
            self._saving.wait()

    def _join_saving(self) -> None:
        """Waits until nothing is written; an error is for who waits for that checkpoint."""
        if self._saving is not None:
            self._saving.join()

    def restore(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Goes on from a checkpoint of the same model and optimizer.

        It may have been written with another device budget, number of microbatches or compute
        dtype.

        Args:
            path: A folder that `save` or `fit` has written.

        Returns:
            What was kept beside the arrays.

        Raises:
            CheckpointError: If it is damaged, or of another model or optimizer. Unless it says
                otherwise, the training state is as it was. If it says that the state is lost, all
                that needs it raises `RuntimeError` until another checkpoint is restored.
        """
        path = local_path(checks.path("path", path), "path")
        self._join_saving()
        entries = entries_of(self._spec)
        facts = check(path, entries)
        if self._lost is None:
            for metrics in list(self._in_flight):
                self.read(metrics)
            self.flush()
        self._in_flight.clear()
        with deferred_interrupt(), self._bar("restoring", len(self._spec.layouts)) as bar:
            self._lost = f"{path} could not be restored to its end"
            load(path, facts.get("arrays"), self._spec, self._engine, entries, bar.update)
            self._lost = None
            self.num_steps, self.num_skipped = facts["step"], facts["skipped"]
            self.history = History(facts["history"])
        self._partial = facts.get("partial")
        if self._partial is not None:
            warnings.warn(f"{path}: {self._partial}. Training goes on from there.", stacklevel=2)
        return facts

    def _bar(self, what: str, num_groups: int) -> tqdm:
        return tqdm(
            desc=what, total=num_groups, unit="group", disable=not self._progress, leave=False
        )

    def _bound_step(self, batch, *, train: bool, loss_fn) -> BoundStep:
        key = (batch_key(batch), train, loss_fn)
        if key not in self._steps:
            self._steps[key] = self._spec.bound_step(batch, train=train, loss_fn=loss_fn)
        return self._steps[key]
