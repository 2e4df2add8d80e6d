"""A started run: its arrays, counts and history, and their way into checkpoints and back."""

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Never

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.common.model_path import path_name
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.checkpoint.contents import entries_of
from megatrain_jax._src.engine.checkpoint.encodings import coding_of
from megatrain_jax._src.engine.checkpoint.folder import in_all_processes, local_path
from megatrain_jax._src.engine.checkpoint.restore import check, load
from megatrain_jax._src.engine.checkpoint.save import Saving
from megatrain_jax._src.engine.checkpoint.saved_settings import converted, saved_settings
from megatrain_jax._src.engine.checkpoint.workspace import UnownedWorkspace, Workspace
from megatrain_jax._src.engine.history import History, as_json
from megatrain_jax._src.engine.kernels.loss_scale import as_facts, scaling_of
from megatrain_jax._src.engine.program.layers.index import Index, joined
from megatrain_jax._src.engine.program.optimizer.cut import assemble_state
from megatrain_jax._src.engine.report.run_view import trainer_cells
from megatrain_jax._src.engine.runtime.compute_copy import ComputeCopy
from megatrain_jax._src.engine.runtime.engine import Engine
from megatrain_jax._src.engine.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.runtime.training import Training
from megatrain_jax._src.engine.runtime.unrecorded_steps import UnrecordedSteps
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.start import group_bar


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
    """

    def __init__(self, spec: RunSpec, engine: Engine, progress: bool):
        """Makes the state of a run before its first step.

        Args:
            spec: The run, before it has arrays.
            engine: The engine that runs the steps; its store is filled.
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
        self._progress = progress

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
            self.training.check_whole()
            self.engine.flush()

    def cells(self) -> list[list[str]]:
        """The table that a trainer prints: its model, its progress and its budget."""
        # The history without pending records: printing a trainer neither waits nor fails.
        devices, training = self.store.placement.devices, self.training
        cells = trainer_cells(self.spec, training.num_steps, self.history, devices)
        return [*cells, ["state", "lost", training.lost]] if training.lost else cells

    def params(self) -> Any:
        """The parameters; see `Trainer.params`."""
        self.flush()
        return self.spec.adapted.params_tree(_parameters(self.spec, self.store))

    def opt_state(self) -> Any:
        """The optimizer's state; see `Trainer.opt_state`."""
        self.flush()
        return _optimizer_state(self.spec, self.store)

    def model(self) -> Any:
        """The user's kind of model; see `Trainer.model`."""
        self.flush()
        # Models write them when they are called, as a dropout counts its keys.
        variables = [
            x.copy() if isinstance(x, np.ndarray) else x
            for x in self.store.on_host(self.store.variables)
        ]
        return self.spec.adapted.rebuild(_parameters(self.spec, self.store), variables)

    def compute_copy(self) -> ComputeCopy:
        """The parameters, to be read onto the devices; see `Trainer.compute_copy`."""
        self.flush()
        return ComputeCopy(self.spec, self.store)

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
        path = local_path(checks.path("path", path), "path")
        if workspace is None and os.path.lexists(path):
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
            "parts": {"microbatches": self.spec.microbatches, "waves": self.spec.waves},
            "partial": self.training.partial,
            "history": as_json(self.history),  # its current contents
            "coded": coding_of(self.spec, entries),
            "made_of": self.saved_settings
            | ({} if self._restored is None else {"state": self._restored}),
            **(facts or {}),
        }
        if self.store.scaling is not None:
            about["loss_scale"] = as_facts(self.store.scaling)
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
        path = local_path(checks.path("path", path), "path")
        facts, num_converted = self.start_from(path)
        if num_converted:
            warn_user(f"{path} {converted(num_converted)}.")
        return facts

    def start_from(self, path: Path) -> tuple[dict[str, Any], int]:
        """Restores a checkpoint as `restore` does, without its warning of converted arrays.

        Args:
            path: A folder on a disk, as `local_path` has it.

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
        return facts, len(others)


def _parameters(spec: RunSpec, store: Store) -> list[np.ndarray]:
    """The parameters in the model's order; only parameters stacked over layers are copies."""
    rows: list[list[tuple[Index, np.ndarray]]] = [[] for _ in spec.adapted.shapes]
    views: dict[int, np.ndarray] = {}
    for g, leaves in enumerate(spec.grouping.leaves):
        views.update(zip(leaves, store.leaves(Key(Kind.MASTERS, g)), strict=True))
    for i, leaf in enumerate(spec.leaves):
        rows[leaf.parameter].append((leaf.index, views[i]))
    shapes = (shape.shape for shape in spec.adapted.shapes)
    return [joined(row, shape) for row, shape in zip(rows, shapes, strict=True)]


def _optimizer_state(spec: RunSpec, store: Store) -> Any:
    """Optax's state in Optax's own structure."""
    groups = [store.leaves(Key(Kind.OPTIMIZER_STATE, g)) for g in range(len(store.layouts))]
    return assemble_state(spec.optimizer, groups, store.on_host(store.globals))
