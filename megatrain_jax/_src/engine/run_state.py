"""A started run: its arrays and history, their way into checkpoints and back, and its steps.

Steps are cut and scheduled once per batch shape, then dispatched.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Never

import jax
import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.activity import doing
from megatrain_jax._src.common.computed_array import ComputedArray
from megatrain_jax._src.common.host_memory import available_bytes
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.common.object_paths import AnyPath
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.common.trees import path_name
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.adapt.loss_function import Prediction, check_loss, name_of
from megatrain_jax._src.engine.checkpoint import places
from megatrain_jax._src.engine.checkpoint.contents import EMA, EMA_COUNT, coding_of, entries_of
from megatrain_jax._src.engine.checkpoint.folder import in_all_processes, parsed_path
from megatrain_jax._src.engine.checkpoint.restore import check, load
from megatrain_jax._src.engine.checkpoint.save import Saving, UnownedWorkspace
from megatrain_jax._src.engine.checkpoint.saved_settings import converted, saved_settings
from megatrain_jax._src.engine.checkpoint.workspace import Workspace
from megatrain_jax._src.engine.history import History, as_json, weighted_means
from megatrain_jax._src.engine.kernels.steps import as_facts, scaling_of
from megatrain_jax._src.engine.options.batch_checks import check_batch, check_like, other_arrays
from megatrain_jax._src.engine.options.inputs import check_data
from megatrain_jax._src.engine.options.options import WhichParams, check_which
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.sliced_values import Index, joined
from megatrain_jax._src.engine.program.optimizer.cut import assemble_state
from megatrain_jax._src.engine.program.optimizer.hyperparameters import (
    find_hyperparameters,
    find_kept,
    injected,
)
from megatrain_jax._src.engine.program.optimizer.trace_optimizer import AveragedState
from megatrain_jax._src.engine.report.table import trainer_cells
from megatrain_jax._src.engine.runtime.compute_copy import ComputeCopy
from megatrain_jax._src.engine.runtime.engine import Engine
from megatrain_jax._src.engine.runtime.evaluation import batch_shapes, evaluate_batches, put_batch
from megatrain_jax._src.engine.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.runtime.training import StepMetrics, Training, UnrecordedSteps
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.budget import fit_new_shape_to_device
from megatrain_jax._src.engine.spec.host import fit_new_shape_to_host
from megatrain_jax._src.engine.spec.rescheduled import with_all_waves
from megatrain_jax._src.engine.spec.run_spec import RunSpec, batch_key
from megatrain_jax._src.engine.start import group_bar
from megatrain_jax._src.engine.state.layout import GroupLayout

# Functions given to evaluations whose bound steps are kept.
_MOST_GIVEN = 8


class RunState:
    """A started run: its arrays, counts and history; checkpoints save and restore it.

    A `Trainer` has one, and checks the arguments of its user.

    Attributes:
        spec: The run, before it has arrays.
        engine: The engine that runs the steps.
        store: The engine's store, with all arrays.
        training: The training steps from dispatch until their results are known.
        by_hand: The steps of `Trainer.step` that have no record yet.
        history: The records of finished steps not in `by_hand`.
        bound: The steps that were cut and scheduled, by batch shape, kind and loss.
    """

    def __init__(self, spec: RunSpec, engine: Engine, sample_batch: Any, progress: bool):
        """Makes the state of a run before its first step.

        Args:
            spec: The run, before it has arrays.
            engine: The engine that runs the steps; its store is filled.
            sample_batch: The first batch, or its shapes.
            progress: Whether to show a progress bar while a checkpoint is restored.
        """
        self.history = History()
        self.by_hand = UnrecordedSteps(spec.optimizer.skips)
        self.spec, self.engine, self.store = spec, engine, engine.store
        self.training = Training(engine, spec.grouping.names, spec.options.max_skipped)
        self._saving: Saving | None = None
        self._saved_settings: dict[str, Any] | None = None
        # Settings that are state in the restored checkpoint; None if nothing was restored.
        self._restored: Mapping[str, Any] | None = None
        # The hyperparameters in the last `opt_state`, and what they were.
        self._given_hyperparams: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._progress = progress
        self._sample = batch_shapes(sample_batch)
        # Functions given to evaluations, the last one used most recently; their values say whether
        # they were looked at, for what belongs to training. A notebook makes a new one in each run
        # of a cell, and its bound steps take a MiB and more.
        self._given: dict[Callable[..., Any], bool] = {}
        self.bound: dict[Any, BoundStep] = {spec.first.key: spec.first}

    def __reduce_ex__(self, protocol: Any) -> Never:
        """Refuses to pickle or deep-copy the state, and with it its trainer and results.

        Raises:
            TypeError: Always, because pinned slabs and compiled functions belong to this process.
        """
        raise TypeError(
            "a Trainer can't be pickled or copied: its state is in pinned memory and its compiled "
            "functions are of this process. Write a checkpoint by `trainer.save(path)` and read it "
            "by `restore(path)` of a new Trainer; `trainer.params` and `trainer.history` can be "
            "pickled"
        )

    def record(self, keep: int = 0) -> None:
        """Adds the records of `Trainer.step`'s steps to the history, except the newest `keep`."""
        with deferred_interrupt():
            self.history.extend(self.by_hand.records(keep))

    def flush(self) -> None:
        """Applies pending updates and moves all state to pinned host memory.

        Raises:
            RuntimeError: If an error has cut off a step or a restore, so that there is no state.
            FloatingPointError: See `Trainer.read`, for steps of `step` that were not read. A second
                call returns the state that the error describes.
        """
        # Steps that `fit` or `train` has in flight are read there.
        if self.by_hand.are_waiting:
            self.training.settle_all()
        with deferred_interrupt(), self.store.placement.outside_meshes():
            self.training.flush()

    @contextlib.contextmanager
    def _read_by_all(self, what: str, kind: Kind) -> Iterator[None]:
        """Flushes, and has all processes read a part of the state together.

        Raises:
            MemoryError: If more rests on disks than memory can hold, in any of the processes.
            PeerEndedError: If another process doesn't come, because it has not made the same call.
        """
        self.flush()
        on_disk = (key for key in self.spec.on_disk if key.kind is kind)
        needed = sum(map(self.spec.first.workload.size, on_disk)) * self.spec.first.num_devices
        free = min(self.store.placement.processes.gather(f"reading {what}", available_bytes()))
        if needed > free:
            raise MemoryError(
                f"{what} in `disk_dir` take {sized(needed)} of host memory when they are read as a "
                f"whole, and {sized(free)} are available: `trainer.unread_model()` is read array "
                "by array, and `trainer.save` and `models.save_pretrained` write part by part"
            )
        with doing(f"reading {what}"):
            yield

    def cells(self) -> list[list[str]]:
        """The table that a trainer prints: its model, its progress and its budget."""
        # The history without pending records: printing a trainer neither waits nor fails.
        devices, training = self.store.placement.devices, self.training
        cells = trainer_cells(self.spec, training.num_steps, self.history, devices)
        return [*cells, ["state", "lost", training.lost]] if training.lost else cells

    def _store(self, params: WhichParams) -> Store:
        """The store, or one to read from that has the averages of parameters in their place."""
        return self.store.of_averages(layouts) if (layouts := self._layouts(params)) else self.store

    def _layouts(self, params: WhichParams) -> tuple[GroupLayout, ...] | None:
        """The layouts to read averages by; None for the trained parameters themselves.

        Raises:
            ValueError: If the run has no averages, or `params` is no known name.
        """
        check_which(params)
        if params == "trained":
            return None
        if self.spec.options.ema_decay is None:
            raise ValueError(
                f"`params`={params!r} needs a run with `ema_decay`: this one keeps no average"
            )
        return self.spec.averaged_layouts

    def params(self, params: WhichParams = "trained") -> Any:
        """The parameters; see `Trainer.params`."""
        with self._read_by_all("the parameters", Kind.MASTERS):
            return self.spec.adapted.params_tree(_parameters(self.spec, self._store(params)))

    def opt_state(self) -> Any:
        """The optimizer's state; see `Trainer.opt_state`."""
        # In Optax's own structure.
        store = self.store
        with self._read_by_all("arrays of the optimizer's state", Kind.OPTIMIZER_STATE):
            groups = [store.leaves(Key(Kind.OPTIMIZER_STATE, g)) for g in range(len(store.layouts))]
            state = assemble_state(self.spec.optimizer, groups, store.on_host(store.globals))
        state = state.inner if isinstance(state, AveragedState) else state
        self._given_hyperparams = [(given, dict(given)) for given in injected(state)]
        return state

    def set_hyperparams(self, values: Mapping[str, Any]) -> None:
        """Sets hyperparameters of later steps; see `Trainer.set_hyperparams`."""
        cut, store = self.spec.optimizer, self.store
        every, kept = find_hyperparameters(cut), find_kept(cut)
        values = {name: checks.number(name, value) for name, value in values.items()}
        if unknown := [name for name in values if name not in kept]:
            why = (
                "it has a schedule, which sets it in each step"
                if unknown[0] in every
                else f"this optimizer's are {', '.join(kept) or 'none'}; write "
                "optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3) to have them"
            )
            raise ValueError(f"`{unknown[0]}` is no hyperparameter that can be set: {why}")
        with deferred_interrupt(), store.placement.outside_meshes():
            self.training.check_whole()
            store.placement.processes.agree("setting hyperparameters", lambda: values)
            for name, value in values.items():
                old = store.globals[kept[name]]
                store.globals[kept[name]] = store.placement.put(
                    np.asarray(value, old.dtype), old.sharding
                )
        self._given_hyperparams = []

    def _check_hyperparams(self) -> None:
        """Refuses hyperparameters that were set in what `opt_state` returned, a copy.

        Raises:
            ValueError: If there are some; the next call passes.
        """
        rows, self._given_hyperparams = self._given_hyperparams, []
        for given, before in rows:
            for name, value in before.items():
                if given.get(name) is not value:
                    raise ValueError(
                        f"`{name}` was set in the hyperparameters of `opt_state`, which is a copy: "
                        f"nothing changes. Call `trainer.set_hyperparams({name}=...)`"
                    )

    def model(self, params: WhichParams = "trained") -> Any:
        """The user's kind of model; see `Trainer.model`."""
        with self._read_by_all("the model's arrays", Kind.MASTERS):
            # Models write them when they are called, as a dropout counts its keys.
            variables = [
                x.copy() if isinstance(x, np.ndarray) else x
                for x in self.store.on_host(self.store.variables)
            ]
            arrays = _parameters(self.spec, self._store(params))
            return self.spec.adapted.rebuild(arrays, variables)

    def unread_model(self, params: WhichParams) -> Any:
        """The user's kind of model; see `Trainer.unread_model`."""
        self.flush()
        spec, store = self.spec, self._store(params)
        leaves = [
            store.unread(Key(Kind.MASTERS, g), len(rows))
            for g, rows in enumerate(spec.grouping.leaves)
        ]
        arrays = [
            _unread(row, shape.shape)
            for row, shape in zip(_by_parameter(spec, leaves), spec.adapted.shapes, strict=True)
        ]
        return spec.adapted.rebuild(arrays, store.on_host(store.variables))

    def compute_copy(self, params: WhichParams = "trained") -> ComputeCopy:
        """The parameters, to be read onto the devices; see `Trainer.compute_copy`."""
        self.flush()
        return ComputeCopy(self.spec, self._store(params))

    def variables(self) -> dict[str, Any]:
        """The model's state beside the parameters; see `Trainer.variables`."""
        self.flush()
        arrays = self.store.on_host(self.store.variables)
        paths = self.spec.adapted.variable_paths
        return {path_name(path): x for path, x in zip(paths, arrays, strict=True)}

    @property
    def saved_settings(self) -> dict[str, Any]:
        """The settings of this run; checkpoints save them for comparison, see `fit`.

        JSON with the fingerprints of the loss and the optimizer, a hash of the loss's code, the
        precision, the seed, the hyperparameters in the optimizer's state, and the library versions.
        """
        # Computed on demand, because most trainers never save.
        if self._saved_settings is None:
            with self.store.placement.outside_meshes():
                self._saved_settings = saved_settings(self.spec)
        return self._saved_settings

    def check_names(self) -> None:
        """Refuses a model whose arrays would be ambiguous in a checkpoint.

        Raises:
            CheckpointError: If two of its paths would get one name.
        """
        entries_of(self.spec)

    def start_saving(
        self,
        path: str | PathLike[str],
        facts: Mapping[str, Any] | None = None,
        *,
        params_only: bool = False,
        workspace: Workspace | UnownedWorkspace | None = None,
    ) -> Saving:
        """Starts writing a checkpoint and returns; steps may continue meanwhile.

        Args:
            path: See `save`.
            facts: The facts to save beside the state, as JSON.
            params_only: See `save`.
            workspace: Workspace of the run that saves this checkpoint; the contents of `path` are
                replaced.

        Returns:
            The save, to wait for. A second save waits for the first by itself.
        """
        path = parsed_path(path, "path")
        if workspace is None and places.is_there(path):
            raise FileExistsError(f"there is something at {path} already: choose another `path`")
        self._join_saving()
        self.flush()
        self.record()
        entries = entries_of(self.spec)
        about = {
            "step": self.training.num_steps,
            "skipped": self.training.num_skipped,
            "skipped_in_row": self.training.skipped_in_row,
            "params_only": params_only,
            "parts": {"microbatches": self.num_parts, "waves": self.spec.waves},
            "partial": self.training.partial,
            "history": as_json(self.history),  # its current contents
            "coded": coding_of(self.spec, entries),
            "made_of": self.saved_settings
            | ({} if self._restored is None else {"state": self._restored}),
            **(facts or {}),
        }
        if self.store.scaling is not None:
            about["loss_scale"] = as_facts(self.store.scaling)
        if (calls := self.spec.adapted.calls) is not None:
            about["calls"] = calls
        self._saving = Saving(path, self.spec, self.store, entries, about, params_only, workspace)
        return self._saving

    def _join_saving(self) -> None:
        """Waits until nothing is being written; errors are for the waiter of that checkpoint."""
        if self._saving is not None:
            self._saving.join()

    def settle_saving(self) -> None:
        """Lets a checkpoint of several processes be published once all have written it."""
        if self._saving is not None:
            self._saving.settle()

    def restore(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Continues from a checkpoint; see `Trainer.restore`."""
        folder = parsed_path(path, "path")
        facts, num_converted = self.start_from(folder)
        if num_converted:
            warn_user(f"{folder} {converted(num_converted)}.")
        return facts

    def start_from(self, path: AnyPath) -> tuple[dict[str, Any], int]:
        """Restores a checkpoint as `restore` does, without its warning of converted arrays.

        Args:
            path: A folder, as `parsed_path` has it.

        Returns:
            The facts kept beside the arrays, and the number of arrays that were converted.
        """
        self._join_saving()
        entries = entries_of(self.spec)
        where = f"the check of {path.name}"
        training, processes = self.training, self.store.placement.processes
        facts, others = in_all_processes(processes, where, lambda: check(path, self.spec, entries))
        # A lost state can't be flushed, and need not be.
        if training.lost is None:
            training.settle_all()
            self.flush()
        placement = self.store.placement
        what = "restoring", self.spec, placement, self._progress
        with deferred_interrupt(), placement.outside_meshes(), group_bar(*what) as bar:
            # Marked as lost first and as valid afterwards, so that an interrupt in between leaves
            # the state marked as lost.
            training.lose(f"{path} could not be restored to its end")
            self.engine.abandon()
            load(path, facts["arrays"], self.spec, self.store, entries, others, bar.update)
            training.restore_counts(facts)
            if self.store.scaling is not None:
                self.store.scaling = self.store.small(scaling_of(facts.get("loss_scale")))
            self._restored = facts["made_of"]["state"]
            self.by_hand.forget()
            self.history = History(facts["history"])
        if training.partial is not None:
            warn_user(f"{path}: {training.partial}. Training goes on from there.")
        if (EMA_COUNT,) in others:
            warn_user(f"{path} holds no averages: those of `ema_decay` begin with its parameters.")
        return facts, sum(array[0] not in (EMA, EMA_COUNT) for array in others)

    @property
    def num_parts(self) -> int:
        """The number of microbatches of the whole batch, on which random keys depend."""
        return self.store.placement.num_copies * self.spec.microbatches

    # ---- steps

    def check(self, batch: Any) -> None:
        """Checks a batch to train on; see `Trainer.check_batch`."""
        placement = self.store.placement
        num_devices, divides = len(placement.local_devices), placement.num_devices > 1
        of = f"the batch of training step {self.training.num_steps + 1}"
        number = self.spec.microbatches
        check_batch(batch, number, num_devices=num_devices, of=of, needs_rows=divides)
        check_like(batch, self._sample)
        self.spec.adapted.check_batch(batch)

    def check_evaluation(self, batch: Any, params: WhichParams) -> tuple[str, ...]:
        """Checks a batch to evaluate; see `Trainer.check_eval_batch`."""
        averages = self._layouts(params) is not None
        self._check_values(batch)
        spec, placement = self.spec, self.store.placement
        loss_fn = self._loss_to_evaluate(batch)
        shapes = batch_shapes(batch, placement.num_processes)
        if _num_bytes(batch) > _num_bytes(self._sample):  # it may not fit
            step = self._bind(batch, train=False, loss_fn=loss_fn, averages=averages)
            return "loss", *step.program.metrics
        with placement.outside_meshes(), _noting_arrays("an evaluation", batch, self._sample):
            return spec.evaluation_metrics(shapes, loss_fn)

    def train(self, batch: Any, *, by_hand: bool) -> StepMetrics:
        """Dispatches a training step; see `Trainer.step`.

        Args:
            batch: A batch.
            by_hand: Whether the step's record is added to the history when its results are known.
        """
        began = time.perf_counter()
        self.training.check_whole()
        self._check_hyperparams()
        self.check(batch)
        step = self._bind(batch, train=True, loss_fn=self.spec.loss_fn)
        # Otherwise steps would queue on the device without bound, each with its batch.
        with doing(f"computing step {self.training.num_steps}"):
            self.training.limit_steps_in_flight()
        placement = self.store.placement
        where = f"training step {self.training.num_steps + 1}"
        with deferred_interrupt(), placement.outside_meshes(), doing(where):
            self.training.check_whole()
            placement.processes.agree(where, lambda: {"the shapes of a batch": batch_key(batch)})
            self.settle_saving()
            metrics = self.training.dispatch(step, put_batch(batch, step, placement))
            if by_hand:
                self.by_hand.add(began, metrics)
        return metrics

    def read(self, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """Waits for a step and returns its metrics; see `Trainer.read`."""
        try:
            with doing(f"computing step {getattr(metrics, 'step', self.training.num_steps)}"):
                values = {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}
        except (TypeError, ValueError) as error:
            raise TypeError(checks.refused("metrics", "what `step` returned", metrics)) from error
        if isinstance(metrics, StepMetrics):
            is_finite = self.training.settle(metrics)
            self.record(keep=self.training.num_steps - metrics.step)
            if self.spec.optimizer.skips:
                values["skipped"] = float(not is_finite)
        return values

    def evaluate(
        self, batches: Iterable[Any], loss_fn: Callable[..., Any] | None, params: WhichParams
    ) -> dict[str, float]:
        """Computes loss and metrics of batches; see `Trainer.evaluate`."""
        if loss_fn is not None:
            check_loss(loss_fn)
        own = self._evaluated(batches, lambda b: loss_fn or self._loss_to_evaluate(b), params)
        found = list(own)
        rows, sizes = zip(*found, strict=True)
        rows, placement = jax.device_get(rows), self.store.placement
        if placement.across:  # each process has evaluated its own batches
            own = [{name: float(x) for name, x in row.items()} for row in rows], sizes
            every = placement.processes.gather("the means of an evaluation", own)
            rows, sizes = (list(itertools.chain(*each)) for each in zip(*every, strict=True))
        return weighted_means(rows, sizes)

    def predict(self, batches: Iterable[Any], fn: Callable[..., Any], params: WhichParams) -> Any:
        """Computes arrays with a row for each example; see `Trainer.predict`."""
        check_loss(fn, "fn")
        here, found = self.store.placement.part_here, []

        def prediction(batch: Any) -> Prediction:
            self._warn_of_training(Prediction(fn), batch, ("let it call", ""))
            return Prediction(fn)

        for arrays, _ in self._evaluated(batches, prediction, params):
            if found:
                found[-1] = jax.tree.map(here, found[-1])  # while this batch is computed
                _check_joinable(found[0], arrays, len(found) + 1)
            found.append(arrays)
        found[-1] = jax.tree.map(here, found[-1])
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def _evaluated(
        self,
        batches: Iterable[Any],
        loss_of: Callable[[Any], Callable[..., Any]],
        params: WhichParams,
    ) -> Iterator[tuple[Any, int | None]]:
        """The results of the loss of each batch, at least one; see `evaluate_batches`."""
        check_data("batches", batches, "to evaluate on one batch, pass [batch]")
        averaged = self._layouts(params)
        self.flush()

        def bind(batch: Any) -> BoundStep:
            self._check_values(batch)
            own = averaged is not None
            return self._bind(batch, train=False, loss_fn=loss_of(batch), averages=own)

        found = evaluate_batches(self.engine, batches, bind, averaged)
        if (first := next(found, None)) is None:
            raise ValueError("`batches` gave no batch to evaluate")
        return itertools.chain([first], found)

    def _loss_to_evaluate(self, batch: Any) -> Callable[..., Any]:
        """The run's loss for evaluation; warns once if it is the training loss, and trains."""
        given = self.spec.loss_to_evaluate
        if given is None:
            advice = "pass `eval_loss_fn`, a loss that calls", ", or the same loss if this is meant"
            self._warn_of_training(self.spec.loss_fn, batch, advice)
        return given or self.spec.loss_fn

    def _warn_of_training(self, function: Any, batch: Any, advice: tuple[str, str]) -> None:
        """Warns, once for a function, if it does what belongs to training."""
        if self._given.get(function):
            return
        self._use(function)
        self._given[function] = True
        if does := self.spec.adapted.only_in_training(function, batch):
            name = name_of(function)
            warn_user(
                f"in evaluations, {name} {does}, as in training: {advice[0]} the model as for "
                f"inference, such as model(x, train=False){advice[1]}"
            )

    def _use(self, function: Callable[..., Any]) -> None:
        """Marks a function as used now, and forgets the bound steps of one used long ago."""
        self._given[function] = self._given.pop(function, False)
        own = self.spec.loss_fn, self.spec.loss_to_evaluate
        others = [given for given in self._given if given not in own]
        if len(others) > _MOST_GIVEN:
            del self._given[oldest := others[0]]
            old = {key: step for key, step in self.bound.items() if key[2] == oldest}
            self.engine.forget([*old.values()])
            self.bound = {key: step for key, step in self.bound.items() if key not in old}

    def _check_values(self, batch: Any) -> None:
        """Checks a batch to evaluate, which need not be like the first one to train on."""
        spec, placement = self.spec, self.store.placement
        check_batch(batch, needs_rows=spec.microbatches > 1 or placement.num_devices > 1)
        spec.adapted.check_batch(batch)

    def _bind(
        self, batch: Any, *, train: bool, loss_fn: Callable[..., Any], averages: bool = False
    ) -> BoundStep:
        """The step on batches of this shape, cut and scheduled when it is first needed."""
        placement, spec = self.store.placement, self.spec
        shapes = batch_shapes(batch, placement.num_processes)
        # Losses are compared as functions: a new one, even with equal code, is cut again.
        key = (batch_key(shapes), train, loss_fn, *(["ema"] if averages else []))
        self._use(loss_fn)
        if key not in self.bound:
            where = f"training step {self.training.num_steps + 1}" if train else "an evaluation"
            with placement.outside_meshes(), _noting_arrays(where, batch, self._sample):
                step = spec.bound_step(shapes, train=train, loss_fn=loss_fn, averages=averages)
                step = fit_new_shape_to_host(step, spec, *placement.process_counts, training=train)
                step = fit_new_shape_to_device(
                    step, spec, self.engine.kernels, placement, training=train
                )
                self.bound[key] = with_all_waves(step, training=train)
        return self.bound[key]


def _parameters(spec: RunSpec, store: Store) -> list[np.ndarray]:
    """The parameters in the model's order; only parameters stacked over layers are copies."""
    leaves = [store.leaves(Key(Kind.MASTERS, g)) for g in range(len(store.layouts))]
    rows = zip(_by_parameter(spec, leaves), spec.adapted.shapes, strict=True)
    return [joined(row, shape.shape) for row, shape in rows]


def _by_parameter(spec: RunSpec, leaves: Sequence[Sequence[Any]]) -> list[list[tuple[Index, Any]]]:
    """For each parameter its leaves, from the leaves of each group, with their indices in it."""
    rows: list[list[tuple[Index, Any]]] = [[] for _ in spec.adapted.shapes]
    numbers = itertools.chain(*spec.grouping.leaves)
    found = dict(zip(numbers, itertools.chain(*leaves), strict=True))
    for i, leaf in enumerate(spec.leaves):
        rows[leaf.parameter].append((leaf.index, found[i]))
    return rows


def _unread(row: Sequence[tuple[Index, Any]], shape: tuple[int, ...]) -> ComputedArray:
    """A parameter that is read when it is needed, from its leaves."""
    dtype = row[0][1].dtype
    return ComputedArray("a parameter", shape, dtype, lambda _: joined(row, shape))


def _check_joinable(first: Any, other: Any, number: int) -> None:
    """Checks that the arrays of two batches differ in nothing but their number of rows."""
    before, now = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays)
        for arrays in (first, other)
    )
    if before != now:
        raise ValueError(
            f"a row of what fn returned is {before} for the first of `batches` and {now} for batch "
            f"{number}, but the rows of all batches are joined: return rows of equal shapes, or "
            "call `predict` with one batch at a time"
        )


def _num_bytes(batch: Any) -> int:
    return sum(map(jx.num_bytes, jax.tree.leaves(batch)))


@contextlib.contextmanager
def _noting_arrays(where: str, batch: Any, sample: Any) -> Iterator[None]:
    """Adds to a step's error the arrays that differ from those of the first batch.

    The error may be JAX's own, about two shapes in the middle of the model, or the user's.
    """
    try:
        yield
    except Exception as error:
        if others := other_arrays(batch, sample):
            error.add_note(f"This came with the batch of {where}: {others}.")
        raise
