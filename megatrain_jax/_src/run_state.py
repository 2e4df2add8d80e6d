"""A run's state as its user sees it: to read, to save and to restore."""

import os
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from megatrain_jax._src.build.not_settable import not_settable
from megatrain_jax._src.build.run_spec import RunSpec
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
from megatrain_jax._src.report.run_view import trainer_cells
from megatrain_jax._src.report.table import aligned, html_box, html_table
from megatrain_jax._src.runtime.by_hand import StepsByHand
from megatrain_jax._src.runtime.engine import Engine
from megatrain_jax._src.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.runtime.training import Training
from megatrain_jax._src.runtime.views import optimizer_state, parameters
from megatrain_jax._src.start import group_bar
from megatrain_jax._src.state.processes import Processes


class RunState:
    """The state of a run, for users: parameters, optimizer state, other variables, and history.

    Whatever reads it applies pending updates first and brings all of it to rest in pinned host
    memory; see `flush`, also for the errors that this raises.

    At a prompt and in a notebook it shows its model, how far it is and what it may take.
    """

    def __init__(self, spec: RunSpec, engine: Engine, progress: bool):
        """Holds the state of a run before its first step.

        Args:
            spec: The run before it had arrays.
            engine: The engine that runs the steps; its store is filled.
            progress: Whether to show a progress bar while a checkpoint is restored.
        """
        self._history = History()
        self._by_hand = StepsByHand(spec.optimizer.skips)
        self._spec, self._engine, self._store = spec, engine, engine.store
        self._training = Training(engine, spec.grouping.names, spec.options.max_skipped)
        self._saving: Saving | None = None
        self._made_of: dict[str, Any] | None = None
        # Settings that became state when another trainer was made, if a checkpoint was restored.
        self._restored: Mapping[str, Any] | None = None
        self._progress = progress

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a private attribute.

        Raises:
            AttributeError: If its name is a public one. What a trainer tells of itself is
                read-only, and no other attribute would have an effect.
        """
        if not name.startswith("_"):
            raise AttributeError(not_settable(type(self), name))
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Returns the model, the step and the budget as a table of plain text."""
        return "Trainer\n" + aligned(self._cells())

    def _repr_html_(self) -> str:
        return html_box(html_table(self._cells()))

    def _cells(self) -> list[list[str]]:
        # The history as it is: to look at a trainer neither waits nor fails.
        cells = trainer_cells(self._spec, self.num_steps, self._history, self.devices)
        lost = self._training.lost
        return [*cells, ["state", "lost", lost]] if lost else cells

    @property
    def history(self) -> History:
        """One record a step, of those that `fit` and `train` make and of those made by hand.

        Waits for the steps made by hand.
        """
        self._record()
        return self._history

    def _record(self, keep: int = 0) -> None:
        """Records the steps made by hand, but for the newest `keep`."""
        with deferred_interrupt():
            self._history.extend(self._by_hand.records(keep))

    def flush(self) -> None:
        """Applies pending updates and brings all state to rest in pinned host memory.

        Raises:
            RuntimeError: If an error has cut off a step or a restore: there is no state then.
            FloatingPointError: See `Trainer.read`, of steps made by `step` that were not read.
                Called again, it brings the state to rest that the error describes.
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
        """Steps that were skipped, of those whose metrics were read."""
        return self._training.num_skipped

    @property
    def params(self) -> Any:
        """The parameters, as host arrays in the model's own structure.

        They share memory with the store and stay as they are when training goes on. Only a
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
        """The user's kind of model, holding the parameters as numpy arrays.

        They share memory with the store, as those of `params` do.
        """
        self.flush()
        variables = self._store.on_host(self._store.variables)
        return self._spec.adapted.rebuild(parameters(self._spec, self._store), variables)

    @property
    def variables(self) -> dict[str, Any]:
        """The model's state that is no parameter, such as running statistics, by its path.

        Host arrays that share memory with the store, as those of `params` do; random keys are on
        the device.
        """
        self.flush()
        arrays = self._store.on_host(self._store.variables)
        paths = self._spec.adapted.variable_paths
        return {path_name(path): x for path, x in zip(paths, arrays, strict=True)}

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
            FloatingPointError: See `Trainer.read`, of steps that were not read; nothing is written.
                Called again, it saves the state that the error describes. If that holds a step in
                part, `restore` warns.
        """
        params_only = checks.boolean("params_only", params_only)
        self._training.settle_all()
        self.start_saving(path, params_only=params_only).wait()

    @property
    def made_of(self) -> dict[str, Any]:
        """The settings of this run, which its checkpoints keep for comparison: see `fit`.

        JSON with the fingerprints of the loss and the optimizer, a hash of the loss's code, the
        precision, the seed, the hyperparameters in the optimizer's state, and the versions of the
        libraries.
        """
        # Not at the start: most trainers never save.
        if self._made_of is None:
            with self._store.placement.outside_meshes():
                self._made_of = made_of(self._spec)
        return self._made_of

    def check_names(self) -> None:
        """Refuses a model whose arrays can't be told apart in a checkpoint.

        Raises:
            CheckpointError: If two of its paths are one there.
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
        """Begins to write a checkpoint and returns; steps may go on meanwhile.

        Args:
            path: See `save`.
            facts: The facts to keep beside the state, as JSON.
            params_only: See `save`.
            workspace: Workspace of the run whose checkpoint this is; what is at `path` is replaced.

        Returns:
            The save, to be waited for. A second save waits for the first by itself.
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
            "partial": self._training.partial,
            "history": as_json(self.history),  # as it is now
            "coded": coding_of(self._spec, entries),
            "made_of": self.made_of | ({} if self._restored is None else {"state": self._restored}),
            **(facts or {}),
        }
        self._saving = Saving(path, self._spec, self._store, entries, about, params_only, workspace)
        return self._saving

    def _join_saving(self) -> None:
        """Waits until nothing is written; an error is for who waits for that checkpoint."""
        if self._saving is not None:
            self._saving.join()

    def _settle_saving(self) -> None:
        """Has the checkpoint of several processes published that all of them have written."""
        if self._saving is not None:
            self._saving.settle()

    def restore(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Goes on from a checkpoint of the same model and optimizer.

        It may have been written with another device budget, number of microbatches or precision:
        what it holds in another dtype or code is converted, with a warning.

        Args:
            path: A folder that `save` or `fit` has written.

        Returns:
            The facts kept beside the arrays.

        Raises:
            CheckpointError: If it is damaged, or of another model or optimizer. Unless it says
                otherwise, the training state is as it was. If it says that the state is lost, all
                that needs it raises `RuntimeError` until another checkpoint is restored.
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
        # A state that is lost can't be brought to rest, and need not be.
        if training.lost is None:
            training.settle_all()
            self.flush()
        placement = self._store.placement
        what = "restoring", self._spec, placement, self._progress
        with deferred_interrupt(), placement.outside_meshes(), group_bar(*what) as bar:
            # Said before and taken back after: whatever interrupts what lies between, the state is
            # known to be lost.
            training.lose(f"{path} could not be restored to its end")
            self._engine.abandon()
            known = facts.get("arrays")
            load(path, known, self._spec, self._store, entries, others, bar.update)
            training.go_on_from(facts)
            self._restored = facts.get("made_of", {}).get("state", {})
            self._by_hand.forget()
            self._history = History(facts["history"])
        if training.partial is not None:
            message = f"{path}: {training.partial}. Training goes on from there."
            warnings.warn(message, stacklevel=3)
        return facts, len(others)
