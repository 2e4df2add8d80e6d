"""The checkpoints of one training run: one every so many steps, of which the newest are kept."""

import warnings
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from megatrain_jax.checkpoint import folder
from megatrain_jax.checkpoint.folder import CheckpointError
from megatrain_jax.trainer import Trainer


class Checkpoints:
    """Saves to and resumes from a folder with one subfolder a step.

    Attributes:
        folder: The folder.
        every: Save after each step whose number this divides; None saves at a run's end only.
        saved: The step of the newest checkpoint; None before there is one.
    """

    def __init__(self, path: str | PathLike[str], every: int | None, keep: int):
        """Removes what a process that died has left there.

        Args:
            path: The folder, made when it is first needed.
            every: See above.
            keep: How many checkpoints to keep.
        """
        self.folder, self.every, self._keep = Path(path).absolute(), every, keep
        folder.remove_all_leftovers(self.folder)
        self.saved = max(folder.steps(self.folder), default=None)

    def resume(self, trainer: Trainer) -> dict[str, Any] | None:
        """Restores the newest checkpoint that is whole.

        Returns:
            What was kept beside the arrays; None if there is no checkpoint.

        Raises:
            CheckpointError: If there are checkpoints, but none that this trainer can go on from.
        """
        failed: CheckpointError | None = None
        for step in reversed(folder.steps(self.folder)):
            try:
                facts = trainer.restore(self.folder / str(step))
            except CheckpointError as error:
                failed = failed or error
                continue
            if failed is not None:
                warnings.warn(f"{failed} Resumed from step {step} instead.", stacklevel=3)
            self.saved = step
            return facts
        if failed is not None:
            raise failed
        return None

    def is_due(self, step: int) -> bool:
        """Whether to save after a step."""
        return self.every is not None and step % self.every == 0

    def save(self, trainer: Trainer, position: dict[str, Any]) -> None:
        """Begins to save a trainer's state, once the save before is over.

        Args:
            trainer: The trainer; its history is complete.
            position: Where the data is, as JSON.

        Raises:
            CheckpointError: If this or the save before could not be written.
        """
        self.finish(trainer)
        path = self.folder / str(trainer.num_steps)
        if path.exists():  # of a run that was not resumed, or one that can't be read
            folder.remove(path)
        trainer.start_saving(path, {"data": position})
        self.saved = trainer.num_steps

    def finish(self, trainer: Trainer) -> None:
        """Waits for a save, then removes the oldest checkpoints.

        Raises:
            CheckpointError: If it could not be written.
        """
        trainer.wait_for_saving()
        folder.remove_oldest(self.folder, self._keep)

    def finish_quietly(self, trainer: Trainer) -> None:
        """Does the same where another error is on its way."""
        with suppress(CheckpointError, OSError):
            self.finish(trainer)
