"""The checkpoints of one training run: one is saved every few steps, and the newest are kept."""

import time
from contextlib import suppress
from os import PathLike
from typing import Any

from megatrain_jax._src.common.object_paths import UNFINISHED, AnyPath
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.checkpoint import folder, manifest, orbax, places
from megatrain_jax._src.engine.checkpoint.folder import (
    CheckpointError,
    OtherFormatError,
    UnreadError,
    in_all_processes,
    in_first_process,
)
from megatrain_jax._src.engine.checkpoint.save import Saving, UnownedWorkspace, claim_workspace
from megatrain_jax._src.engine.checkpoint.workspace import Workspace
from megatrain_jax._src.engine.state.processes import PeerEndedError, Processes
from megatrain_jax._src.engine.trainer import Trainer

# Seconds to wait before retrying to read a checkpoint.
_PAUSES = 0.5, 2.0
# Maximum characters of each older checkpoint's error in the message about all checkpoints.
_MOST_LETTERS = 150


class RunCheckpoints:
    """Saves to and resumes from a folder with one subfolder per step.

    No second run can write to the folder until this is closed; it is a context manager.

    Attributes:
        folder: The folder.
        every: Save after each multiple of this number of steps; None saves only at a run's end.
        saved: The step of this run's newest checkpoint; None before the first.
        num_converted: Number of arrays that `resume` converted to the run's precision.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        every: int | None,
        keep: int,
        processes: Processes,
        last: int | None = None,
    ):
        """Creates the folder and removes unfinished files of dead processes.

        Args:
            path: The folder.
            every: Save after each multiple of this number of steps; None for the end only.
            keep: Number of newest checkpoints to keep.
            processes: The processes that share the run; the first one manages the folder.
            last: The last step of the run, if it continues from this folder: if the folder has it,
                it need not be writable. None if not known.

        Raises:
            TypeError: If `path` is not a path.
            ValueError: If Orbax can't write to and read from `path`.
            CheckpointError: If another run uses the folder, it can't be written, or it is a
                checkpoint itself.
        """
        self.folder = folder.parsed_path(path, "checkpoint_dir")
        self.every, self._keep = every, keep
        self._processes = processes
        found = in_first_process(processes, "the look at `checkpoint_dir`", self._look)
        has_last = last is not None and last in found
        self._claimed = self.folder / UNFINISHED, f"`checkpoint_dir`={self.folder}"
        self._workspace = claim_workspace(*self._claimed, processes, only_read=has_last)
        self.saved: int | None = None
        self.num_converted = 0
        self._saving: Saving | None = None
        self._left_alone: set[int] = set()

    def _look(self) -> list[int]:
        """The steps in the folder, which must not be a checkpoint itself."""
        with folder.reading_folder(self.folder):
            self._refuse_checkpoint()
            return folder.steps(self.folder)

    def _refuse_checkpoint(self) -> None:
        if not folder.has_manifest(self.folder) and not orbax.is_described(self.folder):
            return
        is_step = self.folder.name.isdecimal() and folder.has_manifest(self.folder)
        resumes = f" To go on with its run, pass {self.folder.parent}." if is_step else ""
        raise CheckpointError(
            f"`checkpoint_dir`={self.folder} is a checkpoint, not the folder of a run's "
            f"checkpoints: steps saved inside would be mixed up with it.{resumes} To start a new "
            f"run from its parameters, pass it as `params=` and a new `checkpoint_dir`"
        )

    def __enter__(self) -> "RunCheckpoints":
        """Returns this object."""
        return self

    def __exit__(self, *error: object) -> None:
        """See `release`."""
        self.release()

    def release(self) -> None:
        """Releases the folder, after the checkpoint being written is complete."""
        self._workspace.release(run=True)

    def finish_whole(self) -> None:
        """Waits for a save, after a peer is lost, if that one has written its part."""
        if self._saving is not None and self._saving.is_whole:
            self.finish_quietly()

    def go_on_alone(self) -> None:
        """Drops the unfinished checkpoint, of which other processes have a part.

        Raises:
            CheckpointError: If the first process still holds the folder.
        """
        self.finish_quietly()
        if isinstance(self._workspace, Workspace):
            self._workspace.clear()
        else:
            self._workspace = claim_workspace(*self._claimed, self._processes)

    def check_writable(self) -> None:
        """Checks that steps can be saved.

        Raises:
            CheckpointError: If the folder can't be written.
        """
        if isinstance(self._workspace, UnownedWorkspace) and self._workspace.unwritable is not None:
            raise CheckpointError(self._workspace.unwritable)

    def resume(self, trainer: Trainer) -> dict[str, Any] | None:
        """Restores the newest usable checkpoint; newer, unusable ones are renamed.

        Returns:
            The facts saved beside the arrays, including the data's position; None if there is no
            checkpoint.

        Raises:
            CheckpointError: If there are checkpoints, but none that this trainer can continue from;
                if the newest undamaged one has another format; or if other files occupy the place
                of later ones.
        """
        trainer.run_state.check_names()
        refused: dict[int, CheckpointError] = {}
        where = "the search for checkpoints"
        found = in_first_process(self._processes, where, lambda: orbax.candidates(self.folder))
        for step in reversed(found):
            try:
                # If one process can't read it, all continue from an older step.
                facts = self._restore_patiently(trainer, step)
            except UnreadError as error:
                error.add_note(
                    "The checkpoint may be whole, so it has kept its name. The same call tries "
                    "again; without that folder it goes on from the checkpoint before."
                )
                raise
            except OtherFormatError as error:
                # It may hold steps that no other checkpoint has.
                error.add_note(
                    "No checkpoint was renamed. To go on from an older step, move that folder away."
                )
                raise
            except CheckpointError as error:
                refused[step] = error
                continue
            if isinstance(self._workspace, Workspace):
                for number, error in refused.items():
                    self._set_aside(self._workspace, number, error, step)
            self.begin(trainer)
            return facts
        if refused:
            raise _none_usable(refused)
        self.begin(trainer)
        return None

    def begin(self, trainer: Trainer) -> None:
        """Checks that nothing in the folder conflicts with the steps that a trainer will take.

        Raises:
            CheckpointError: If an entry has the number of a later step.
        """
        start = trainer.num_steps
        self.saved = in_first_process(
            self._processes, "the look for steps", lambda: self._begin(start)
        )
        self._tell_saved()

    def _tell_saved(self) -> None:
        """Has the newest checkpoint named if the run ends without its peers."""
        newest = "No step" if self.saved is None else f"Step {self.saved}"
        self._processes.saved = f"{newest} is saved in {self.folder}."

    def _begin(self, start: int) -> int | None:
        """Does the check of `begin`; returns the step if there is a checkpoint of it."""
        numbers = folder.numbered(self.folder)
        strange = [n for n in numbers if not folder.has_manifest(self.folder / str(n))]
        if later := [str(n) for n in numbers if n > start]:
            raise CheckpointError(
                f"this run starts from step {start}, but {self.folder} holds {', '.join(later)}, "
                "the names of later checkpoints. Choose another folder or move its files; "
                "`fit(resume=True)` resumes from complete checkpoints of the same run"
            )
        for number in strange:
            self._leave_alone(
                number, f"it has no {folder.MANIFEST}, so it is no checkpoint of ours"
            )
        return start if start in numbers and start not in strange else None

    def is_due(self, step: int) -> bool:
        """Whether to save after a step."""
        return self.every is not None and step % self.every == 0

    def save(self, trainer: Trainer, position: dict[str, Any] | None) -> None:
        """Starts saving a trainer's state, after the previous save is complete.

        Args:
            trainer: The trainer; its history is complete.
            position: The data's position, as JSON; None if unknown.

        Raises:
            CheckpointError: If this or the previous checkpoint could not be written.
        """
        self.finish()
        path = self.folder / str(trainer.num_steps)
        in_first_process(self._processes, f"the saving of {path.name}", lambda: self._prepare(path))
        facts = {} if position is None else {"data": position}
        self._saving = trainer.run_state.start_saving(path, facts, workspace=self._workspace)
        # Reset by `finish` if it could not be written.
        self.saved = trainer.num_steps

    def _prepare(self, path: AnyPath) -> None:
        # A callback may have saved this step itself.
        if places.is_there(path) and (strange := _strange(path)):
            raise CheckpointError(f"{path} can't be replaced: megatrain_jax didn't make {strange}")
        if isinstance(self._workspace, Workspace):
            self._workspace.prepare(path)

    def finish(self) -> None:
        """Waits for a save, then removes the oldest checkpoints.

        Raises:
            CheckpointError: If it could not be written.
        """
        if self._saving is not None:
            try:
                self._saving.wait()
            except CheckpointError:
                # Not saved after all, so the end of the run tries again.
                self._saving = self.saved = None
                raise
            self._saving = None
            self._tell_saved()
            if isinstance(self._workspace, Workspace):
                # Only after the newest one is complete, so there are never fewer to return to.
                self._remove_oldest(self._workspace)

    def finish_quietly(self) -> None:
        """Waits for a save like `finish`, but ignores its error: another error is being raised."""
        with suppress(CheckpointError, OSError, PeerEndedError):
            self.finish()

    def _restore_patiently(self, trainer: Trainer, step: int) -> dict[str, Any]:
        """Restores a checkpoint; retries after temporary faults, such as a file server's pause."""
        for seconds in _PAUSES:
            with suppress(UnreadError):
                return self._restore(trainer, step)
            time.sleep(seconds)
        return self._restore(trainer, step)

    def _restore(self, trainer: Trainer, step: int) -> dict[str, Any]:
        path = self.folder / str(step)
        where = f"the manifest of step {step}"
        if (
            found := in_all_processes(self._processes, where, lambda: manifest.read(path)["step"])
        ) != step:
            raise CheckpointError(f"{path} is a checkpoint of step {found}, not {step}.")
        # The number of converted arrays becomes a part of the one warning of changed settings.
        facts, self.num_converted = trainer.run_state.start_from(path)
        if "data" not in facts:
            warn_user(
                f"{path}, saved by hand or by `train`, has no position of `data`: as many "
                "batches as it has steps are skipped.",
            )
            facts["data"] = {"batches": step}
        return facts

    def _set_aside(
        self, workspace: Workspace, step: int, error: CheckpointError, resumed: int
    ) -> None:
        """Renames a refused checkpoint, so that steps are ordered by number again."""
        path, number = self.folder / str(step), 1
        # Dangling links occupy a name too.
        while places.is_there(aside := path.with_name(f"{step}.refused-{number}")):
            number += 1
        try:
            workspace.rename(path, aside)
            where = f"It is called {aside.name} now"
        except OSError as reason:
            where = f"It can't be renamed ({reason})"
        warn_user(
            f"{str(error).rstrip('.')}. Resumed from step {resumed} instead. {where}.",
        )

    def _remove_oldest(self, workspace: Workspace) -> None:
        """Removes all but the newest checkpoints; warns once about any that can't be removed."""
        assert self.saved is not None
        steps = [s for s in folder.steps(self.folder) if s not in self._left_alone]
        # Later ones are not this run's, so they stay.
        for step in [s for s in steps if s <= self.saved][: -self._keep]:
            path = self.folder / str(step)
            try:
                if strange := _strange(path):
                    self._leave_alone(step, f"megatrain_jax didn't make {strange}")
                else:
                    workspace.discard(path)
            except (OSError, CheckpointError) as error:
                self._leave_alone(step, f"{type(error).__name__}: {error}")

    def _leave_alone(self, step: int, why: str) -> None:
        self._left_alone.add(step)
        warn_user(f"{self.folder / str(step)} is left alone: {why}")


def _none_usable(refused: dict[int, CheckpointError]) -> CheckpointError:
    """The error of the newest checkpoint, followed by a shortened error of each older one."""
    newest, *older = refused.values()
    if not older:
        return newest
    said = [f"{step}: {_shortened(error)}" for step, error in [*refused.items()][1:]]
    error = CheckpointError(
        f"{str(newest).rstrip('.')}. No older checkpoint there can be gone on from, either: "
        f"{'; '.join(said)}"
    )
    error.__cause__ = newest
    return error


def _shortened(error: CheckpointError) -> str:
    """The first words of an error."""
    words = str(error).split("\n")[0]
    return words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]}..."


def _strange(path: AnyPath) -> str:
    """The files in a checkpoint that this library didn't make, for a message; empty if none.

    Raises:
        CheckpointError: If it is not a checkpoint of this library.
    """
    if path.is_symlink():
        return "that symbolic link"
    return ", ".join(manifest.unknown_names(path)[:3])
