"""The state of a run, for its user to read, save and restore."""

import os
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from megatrain_jax._src.checkpoint.contents import entries_of
from megatrain_jax._src.checkpoint.folder import in_all, local_path
from megatrain_jax._src.checkpoint.forms import coding_of
from megatrain_jax._src.checkpoint.made_of import converted, made_of
from megatrain_jax._src.checkpoint.restore import check, load
from megatrain_jax._src.checkpoint.save import Saving
from megatrain_jax._src.checkpoint.workspace import Guest, Workspace
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.model_path import path_name
from megatrain_jax._src.history import History, as_json
from megatrain_jax._src.kernels.loss_scale import as_facts, scaling_of
from megatrain_jax._src.options.not_settable import not_settable
from megatrain_jax._src.report.run_view import trainer_cells
from megatrain_jax._src.report.table import aligned, html_box, html_table
from megatrain_jax._src.runtime.by_hand import StepsByHand
from megatrain_jax._src.runtime.engine import Engine
from megatrain_jax._src.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.runtime.training import Training
from megatrain_jax._src.runtime.views import optimizer_state, parameters
from megatrain_jax._src.spec.run_spec import RunSpec
from megatrain_jax._src.start import group_bar
from megatrain_jax._src.state.processes import Processes


class RunState:
    """The state of a run, for users: parameters, optimizer state, further variables, and history.

    Every read first applies pending updates and moves all state to pinned host memory.

    It prints as a table of its model, its progress and its budget.
    """

    def __init__(self, spec: RunSpec, engine: Engine, progress: bool):
        """Makes the state of a run before its first step.

        Args:
            spec: The run, before it has arrays.
            engine: The engine that runs the steps; its store is filled.
            progress: Whether to show a progress bar while a checkpoint is restored.
        """
        self._history = History()
        self._by_hand = StepsByHand(spec.optimizer.skips)
        self._spec, self._engine, self._store = spec, engine, engine.store
        self._training = Training(engine, spec.grouping.names, spec.options.max_skipped)
        self._saving: Saving | None = None
        self._made_of: dict[str, Any] | None = None
        # After restoring a checkpoint: settings that were saved as state by the trainer that wrote
        # it.
        self._restored: Mapping[str, Any] | None = None
        self._progress = progress

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a private attribute.

        Raises:
            AttributeError: If its name is public: a trainer's properties are read-only, and no
                further attribute would have an effect.
        """
        if not name.startswith("_"):
            raise AttributeError(not_settable(type(self), name))
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Returns the model, the step and the budget as a plain text table."""
        return "Trainer\n" + aligned(self._cells())

    def _repr_html_(self) -> str:
        return html_box(html_table(self._cells()))

    def _cells(self) -> list[list[str]]:
        # The history without pending records: printing a trainer neither waits nor fails.
        cells = trainer_cells(self._spec, self.num_steps, self._history, self.devices)
        lost = self._training.lost
        return [*cells, ["state", "lost", lost]] if lost else cells

    @property
    def history(self) -> History:
        """One record per step, for steps made by `fit`, by `train` and by hand.

        Waits for the steps made by hand.
        """
        self._record()
        return self._history

    def _record(self, keep: int = 0) -> None:
        """Records the steps made by hand, except the newest `keep`."""
        with deferred_interrupt():
            self._history.extend(self._by_hand.records(keep))

    def flush(self) -> None:
        """Applies pending updates and moves all state to pinned host memory.

        Raises:
            RuntimeError: If an error has cut off a step or a restore, so that there is no state.
            FloatingPointError: See `Trainer.read`, for steps of `step` that were not read. A second
                call returns the state that the error describes.
        """
        # Steps that `fit` or `train` has in flight are read there.
        if self._by_hand.are_waiting:
            self._training.settle_all()
        with deferred_interrupt(), self._store.placement.outside_meshes():
            self._training.check_whole()
            self._engine.flush()

    @property
    def num_steps(self) -> int:
        """Training steps dispatched so far."""
        return self._training.num_steps

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices that share the run."""
        return self._store.placement.devices

    @property
    def processes(self) -> Processes:
        """The processes that share the run."""
        return self._store.placement.processes

    @property
    def num_skipped(self) -> int:
        """Number of skipped steps, among steps whose metrics were read."""
        return self._training.num_skipped

    @property
    def params(self) -> Any:
        """The parameters, as host arrays in the model's own structure.

        They share memory with the store and stay unchanged when training continues. Only a
        parameter stacked over layers, which the store keeps layer by layer, is a copy.
        """
        self.flush()
        return self._spec.adapted.params_tree(parameters(self._spec, self._store))

    @property
    def opt_state(self) -> Any:
        """Optax's state, as host arrays in Optax's own structure; shares memory like `params`."""
        self.flush()
        return optimizer_state(self._spec, self._store)

    @property
    def model(self) -> Any:
        """The user's kind of model, with the parameters as NumPy arrays.

        They share memory with the store, like `params`.
        """
        self.flush()
        variables = self._store.on_host(self._store.variables)
        return self._spec.adapted.rebuild(parameters(self._spec, self._store), variables)

    @property
    def variables(self) -> dict[str, Any]:
        """The model's state other than parameters, such as running statistics, by path.

        Host arrays that share memory with the store, like `params`; random keys are on the device.
        """
        self.flush()
        arrays = self._store.on_host(self._store.variables)
        paths = self._spec.adapted.variable_paths
        return {path_name(path): x for path, x in zip(paths, arrays, strict=True)}

    def save(self, path: str | PathLike[str], *, params_only: bool = False) -> None:
        """Writes a checkpoint in Orbax format: parameters under the model's own paths.

        Args:
            path: The folder to write; must not exist.
            params_only: Whether to save only parameters. Training can't resume from such a
                checkpoint.

        Raises:
            TypeError: If `path` is not a path.
            ValueError: If Orbax could not read its own files at `path`.
            FileExistsError: If `path` exists.
            CheckpointError: If it can't be written; nothing is left of it.
            FloatingPointError: See `Trainer.read`, for steps that were not read; nothing is
                written. A second call saves the state described by the error. If that contains a
                partial step, `restore` warns.
        """
        params_only = checks.boolean("params_only", params_only)
        self._training.settle_all()
        self.start_saving(path, params_only=params_only).wait()

    @property
    def made_of(self) -> dict[str, Any]:
        """The settings of this run, which its checkpoints save for comparison: see `fit`.

        JSON with the fingerprints of the loss and the optimizer, a hash of the loss's code, the
        precision, the seed, the hyperparameters in the optimizer's state, and the library versions.
        """
        # Computed on demand, because most trainers never save.
        if self._made_of is None:
            with self._store.placement.outside_meshes():
                self._made_of = made_of(self._spec)
        return self._made_of

    def check_names(self) -> None:
        """Refuses a model whose arrays would be ambiguous in a checkpoint.

        Raises:
            CheckpointError: If two of its paths would get one name.
        """
        entries_of(self._spec)

    def start_saving(
        self,
        path: str | PathLike[str],
        facts: Mapping[str, Any] | None = None,
        *,
        params_only: bool = False,
        workspace: Workspace | Guest | None = None,
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
        path = local_path(checks.path("path", path), "path")
        if workspace is None and os.path.lexists(path):
            raise FileExistsError(f"there is something at {path} already")
        self._join_saving()
        self.flush()
        entries = entries_of(self._spec)
        about = {
            "step": self.num_steps,
            "skipped": self.num_skipped,
            "skipped_in_row": self._training.skipped_in_row,
            "params_only": params_only,
            "parts": {"microbatches": self._spec.microbatches, "waves": self._spec.waves},
            "partial": self._training.partial,
            "history": as_json(self.history),  # its current contents
            "coded": coding_of(self._spec, entries),
            "made_of": self.made_of | ({} if self._restored is None else {"state": self._restored}),
            **(facts or {}),
        }
        if self._store.scaling is not None:
            about["loss_scale"] = as_facts(self._store.scaling)
        self._saving = Saving(path, self._spec, self._store, entries, about, params_only, workspace)
        return self._saving

    def _join_saving(self) -> None:
        """Waits until nothing is being written; errors are for the waiter of that checkpoint."""
        if self._saving is not None:
            self._saving.join()

    def _settle_saving(self) -> None:
        """Lets a checkpoint of several processes be published once all have written it."""
        if self._saving is not None:
            self._saving.settle()

    def restore(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Continues from a checkpoint of the same model and optimizer.

        The checkpoint may have a different device budget, number of microbatches or precision:
        arrays in a different dtype or code are converted, with a warning.

        Args:
            path: A folder written by `save` or `fit`.

        Returns:
            The facts saved beside the arrays.

        Raises:
            CheckpointError: If it is damaged, or belongs to a different model or optimizer. Unless
                the message says otherwise, the training state is unchanged. If it says that the
                state is lost, every use of it raises `RuntimeError` until another checkpoint is
                restored.
        """
        path = local_path(checks.path("path", path), "path")
        facts, num_converted = self.start_from(path)
        if num_converted:
            warnings.warn(f"{path} {converted(num_converted)}.", stacklevel=2)
        return facts

    def start_from(self, path: Path) -> tuple[dict[str, Any], int]:
        """Restores a checkpoint as `restore` does, without its warning of converted arrays.

        Args:
            path: A folder on a disk, as `local_path` has it.

        Returns:
            The facts kept beside the arrays, and the number of arrays that were converted.
        """
        self._join_saving()
        entries = entries_of(self._spec)
        where = f"the check of {path.name}"
        facts, others = in_all(self.processes, where, lambda: check(path, self._spec, entries))
        training = self._training
        # A lost state can't be flushed, and need not be.
        if training.lost is None:
            training.settle_all()
            self.flush()
        placement = self._store.placement
        what = "restoring", self._spec, placement, self._progress
        with deferred_interrupt(), placement.outside_meshes(), group_bar(*what) as bar:
            # Declared lost first and taken back afterwards, so that any interrupt in between leaves
            # the state marked as lost.
            training.lose(f"{path} could not be restored to its end")
            self._engine.abandon()
            known = facts.get("arrays")
            load(path, known, self._spec, self._store, entries, others, bar.update)
            training.go_on_from(facts)
            if self._store.scaling is not None:
                self._store.scaling = self._store.small(scaling_of(facts.get("loss_scale")))
            self._restored = facts.get("made_of", {}).get("state", {})
            self._by_hand.forget()
            self._history = History(facts["history"])
        if training.partial is not None:
            message = f"{path}: {training.partial}. Training goes on from there."
            warnings.warn(message, stacklevel=3)
        return facts, len(others)
