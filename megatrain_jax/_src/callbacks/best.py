"""Early stopping, and saving of the best checkpoint by a metric."""

import math
import re
import shutil
from contextlib import suppress
from os import PathLike
from typing import Any, Literal

from megatrain_jax import FitResult, StopTraining, Trainer
from megatrain_jax._src.callbacks.callback import Callback
from megatrain_jax._src.common import checks, object_paths
from megatrain_jax._src.common.outside import parsed_json
from megatrain_jax._src.common.suggestions import did_you_mean

Mode = Literal["auto", "min", "max"]
# Metrics by a word of their names, without a number at its end: top5, map50.
_WORDS = {
    "max": frozenset(
        "acc accuracy auc auprc auroc bleu chrf correct correlation dice elbo f1 hit hits iou "
        "jaccard kappa likelihood map margin margins match matthews mcc miou mrr ndcg pearson "
        "precision psnr r2 recall return returns reward rewards rouge score sensitivity "
        "spearman specificity ssim top win wins winrate".split()
    ),
    "min": frozenset(
        "bce bpb brier ce cer cost deviance distance divergence err error errors fid kl kld "
        "lpips loss losses mae mape mse nll perplexity ppl rmse smape wer".split()
    ),
}
# A dice loss is a loss: these decide as the last word.
_LAST = frozenset("err error loss".split())
_EVAL_PREFIX = "eval_"
# This file marks a folder as a checkpoint of this library.
_MANIFEST = "megatrain.json"


def _mode_of(metric: str) -> str:
    """Whether less or more of a metric is better, by its name.

    Examples:
        >>> _mode_of("eval_top5"), _mode_of("eval_dice_loss")
        ('max', 'min')

    Raises:
        ValueError: If the name doesn't tell, or tells both.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", metric.lower()) if not word.isdecimal()]
    if words and words[-1] in _LAST:
        return "min"
    forms = {form for word in words for form in (word, word.rstrip("0123456789"))}
    found = [mode for mode, known in _WORDS.items() if not known.isdisjoint(forms)]
    if len(found) != 1:
        why = "names both" if found else "doesn't tell"
        raise ValueError(
            f"`metric`={metric!r} {why} whether less or more is better: pass mode='min' or 'max'"
        )
    return found[0]


class _Best:
    """The best value of a metric so far.

    For "min" with `min_delta` 0.1, the values 2, 1.5, 1.45, 1.3 are better, better, not better and
    better: 1.45 is less than 0.1 below 1.5, and 1.3 is more.

    Attributes:
        metric: The metric's name.
        value: Its best value; None before the first.
        step: The step of the best value.
        since: Number of values since then.
    """

    def __init__(self, metric: Any, mode: Any, min_delta: Any):
        checks.instance("metric", metric, str, "the name of a metric")
        checks.word("mode", mode, ("auto", "min", "max"))
        mode = _mode_of(metric) if mode == "auto" else mode
        self.metric, self._sign = metric, -1.0 if mode == "max" else 1.0
        self._delta = checks.number("min_delta", min_delta, least=0)
        self.forget()

    def forget(self) -> None:
        """Forgets all values."""
        self.value: float | None = None
        self.step = self.since = 0

    def replay(self, trainer: Trainer) -> None:
        """Starts from the values in the trainer's history."""
        self.forget()
        for record in trainer.history:
            if self.metric in record:
                self.is_better(record)

    def is_better(self, record: dict[str, Any]) -> bool | None:
        """Whether a record has the best value so far; None if it lacks the metric.

        Raises:
            ValueError: If the record should have the metric: an evaluation's metric comes with each
                evaluation, every other one with each step.
        """
        if self.metric not in record:
            kind = _EVAL_PREFIX if self.metric.startswith(_EVAL_PREFIX) else ""
            names = [name for name in record if name.startswith(kind)]
            if names:
                near = did_you_mean(self.metric, names)
                raise ValueError(
                    f"no metric is called {self.metric!r}; there are {', '.join(names)}{near}"
                )
            return None
        value = float(record[self.metric])
        # With the sign, less is always better.
        best = math.inf if self.value is None else self._sign * self.value
        if math.isfinite(value) and self._sign * value < best - self._delta:
            self.value, self.step, self.since = value, record["step"], 0
            return True
        # A value that is not finite is not better, but counts.
        self.since += 1
        return False


class EarlyStopping(Callback):
    """Ends a run when a metric no longer improves: `FitResult.ended` is "stopped".

    Earlier values in the history count: a run that continues, in this process or from a checkpoint,
    stops where it would have stopped in one piece, and one that was stopped stops at once.

    Attributes:
        metric: The name of the metric.
    """

    adds_metrics = ()

    def __init__(
        self,
        metric: str = "eval_loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Mode = "auto",
    ):
        """Waits for the first record.

        Args:
            metric: The name of the metric in records.
            patience: Number of consecutive values without improvement; the last of them ends the
                run.
            min_delta: Minimum improvement that counts.
            mode: Whether less is better, "min", or more, "max". "auto" goes by the metric's name:
                less of losses and errors, more of accuracies, rewards, scores and the like.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If an argument is out of range, or `mode` is "auto" and the metric's name
                doesn't tell.
        """
        self._best, self.metric = _Best(metric, mode, min_delta), metric
        self._patience = checks.integer("patience", patience)

    def begin(self, trainer: Trainer) -> None:
        """Reads the values in the history.

        Raises:
            StopTraining: If a run that was stopped continues.
        """
        self._best.replay(trainer)
        self._stop()

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Ends the run after too many values without improvement.

        Raises:
            StopTraining: In that case.
            ValueError: If there is no such metric.
        """
        if self._best.is_better(record) is False:
            self._stop()

    def _stop(self) -> None:
        best = self._best
        if best.since >= self._patience:
            value = (
                "never finite" if best.value is None else f"{best.value:.6g} at step {best.step}"
            )
            raise StopTraining(f"best `{best.metric}` {value}, no better {best.since} times")


class KeepBest(Callback):
    """Saves the checkpoint with the best evaluation metric, in its own folder.

    It is written while training continues; the previous one is removed when the new one is
    complete. ``trainer.restore(keep.path)`` returns to it, ``fit(..., params=keep.path)`` starts
    from it.

    Attributes:
        metric: The name of the metric.
        path: The newest complete checkpoint; None before the first.
        own_checkpoints: The folder.
    """

    adds_metrics = ()

    def __init__(
        self,
        folder: str | PathLike[str],
        metric: str = "eval_loss",
        *,
        min_delta: float = 0.0,
        mode: Mode = "auto",
    ):
        """Saves nothing yet.

        Args:
            folder: The folder, of this callback alone: not the run's `checkpoint_dir`, but maybe
                its subfolder "best"; "gs://bucket/best" is one in an object store. The checkpoint
                is a subfolder named after its step.
            metric: The name of an evaluation metric in records.
            min_delta: Minimum improvement that counts.
            mode: Whether less is better, "min", or more, "max". "auto" goes by the metric's name:
                less of losses and errors, more of accuracies, rewards, scores and the like.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If an argument is out of range, the metric is not of evaluations, or `mode`
                is "auto" and the metric's name doesn't tell.
        """
        self._folder = object_paths.path_of(checks.path("folder", folder))
        self.own_checkpoints = self._folder
        self._best, self.metric = _Best(metric, mode, min_delta), metric
        if not metric.startswith(_EVAL_PREFIX):
            reason = "without an evaluation, the trainer may be a step ahead of the record"
            raise ValueError(f'`metric`={metric!r} must be of an evaluation, "eval_...": {reason}')
        self._saving: tuple[object_paths.AnyPath, Any] | None = None

    @property
    def path(self) -> object_paths.AnyPath | None:
        """The newest complete checkpoint; None before the first."""
        steps = self._steps()
        return self._folder / str(steps[-1]) if steps else None

    def begin(self, trainer: Trainer) -> None:
        """Reads the values in the history, and removes checkpoints of later steps.

        Raises:
            FileExistsError: If there are such checkpoints and the run is new, or there are those
                that a run has saved to go on from.
        """
        self._best.replay(trainer)
        if of_runs := [step for step in self._steps() if self._is_of_run(step)]:
            raise FileExistsError(
                f"`folder`={str(self._folder)!r} holds the checkpoints of a run, such as step "
                f"{of_runs[-1]}, and KeepBest would remove them: pass another one, such as "
                f"{str(self._folder / 'best')!r}"
            )
        # The run will repeat these steps, from an earlier checkpoint.
        if later := [step for step in self._steps() if step > trainer.num_steps]:
            if not trainer.num_steps:
                raise FileExistsError(
                    f"a new run begins, but {self._folder} holds step {later[0]} of "
                    "another one: choose another folder, or move its files"
                )
            self._remove(trainer, later)

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Starts saving the trainer's state if the record is the best one.

        Raises:
            ValueError: If there is no such metric.
            CheckpointError: If the previous checkpoint could not be written.
        """
        if self._best.is_better(record):
            self._finish(trainer)
            # The trainer is at the record's step, because an evaluation leaves no step in flight.
            path = self._folder / str(trainer.num_steps)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._saving = path, trainer.start_saving(path)

    def end(self, result: FitResult) -> None:
        """Waits until the best checkpoint is complete."""
        self._finish(result.trainer)

    def _finish(self, trainer: Trainer) -> None:
        """Waits for the checkpoint being written, and removes earlier ones."""
        if self._saving is not None:
            # Cleared first, so that a failed save is not waited for again.
            (path, saving), self._saving = self._saving, None
            saving.wait()
            self._remove(trainer, [step for step in self._steps() if step != int(path.name)])

    def _steps(self) -> list[int]:
        """The steps of the existing checkpoints, in order."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        steps = [path for path in found if path.name.isdecimal() and (path / _MANIFEST).is_file()]
        return sorted(int(path.name) for path in steps)

    def _is_of_run(self, step: int) -> bool:
        """Whether a checkpoint has a position of data, as those in a `checkpoint_dir` do."""
        with suppress(OSError, ValueError):
            return "data" in parsed_json((self._folder / str(step) / _MANIFEST).read_bytes())
        return False

    def _remove(self, trainer: Trainer, steps: list[int]) -> None:
        if trainer.processes.is_first:
            for path in (self._folder / str(step) for step in steps):
                if isinstance(path, object_paths.ObjectPath):
                    object_paths.discard(path, object_paths.workspace_of(path), _MANIFEST)
                else:
                    shutil.rmtree(path)
