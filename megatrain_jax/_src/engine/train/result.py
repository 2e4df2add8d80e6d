"""The result of a training run, the reason of its end, and the error for data that ran out."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from megatrain_jax._src.common.suggestions import ExplainedAttributes
from megatrain_jax._src.engine.history import History
from megatrain_jax._src.engine.report.table import (
    aligned,
    html_beside,
    html_box,
    html_table,
    result_cells,
)
from megatrain_jax._src.engine.trainer import Trainer

EMPTY = (
    "`data` gave no batch: it is empty, or an iterator that was used up before (a generator can "
    "be iterated over only once)"
)
Ended = Literal["done", "stopped", "interrupted", "failed"]


class StopTraining(KeyboardInterrupt):  # noqa: N818 (it is no error)
    """Raised by a callback to end the run normally; its text is the reason.

    The run ends as after Ctrl-C, with its last step saved if it has a checkpoint folder, but
    `FitResult.ended` is "stopped". Training can continue with the result's trainer.

    Examples:
        >>> def enough(trainer, record):
        ...     if record["loss"] < 0.1:
        ...         raise StopTraining("the loss is small enough")
    """


@dataclass(frozen=True, kw_only=True, repr=False)
class FitResult(ExplainedAttributes):
    """The result of a run: its trainer, model and history.

    Its representation shows steps, losses and the reason of the end, in a notebook with the loss
    curve.

    Attributes:
        trainer: The trainer, with all its state on the host. Continue with `train`.
        history: One record per step, over the trainer's life.
        ended: How the run ended: "done" after all steps or at the end of the data, "stopped" by a
            callback's `StopTraining`, "interrupted" by a signal or a `KeyboardInterrupt`, "failed"
            with an error, which has this result as an attribute.
        reason: The reason of the end, in words.
    """

    trainer: Trainer
    history: History
    ended: Ended
    reason: str

    @property
    def interrupted(self) -> bool:
        """Whether a signal came, or a callback raised `KeyboardInterrupt`."""
        return self.ended == "interrupted"

    @property
    def model(self) -> Any:
        """The user's model with the trained parameters as host arrays; see `Trainer.model`."""
        return self.trainer.model

    @property
    def params(self) -> Any:
        """The trained parameters as host arrays, in the model's own structure."""
        return self.trainer.params

    def save(self, path: str | PathLike[str], *, params_only: bool = False) -> None:
        """Writes a checkpoint of the trained state; see `Trainer.save`.

        Args:
            path: The folder to write; must not exist.
            params_only: Whether to save only parameters.
        """
        self.trainer.save(path, params_only=params_only)

    def __repr__(self) -> str:
        """Returns steps, losses and the reason of the end as a plain text table."""
        return "FitResult\n" + aligned(self._cells())

    def _repr_html_(self) -> str:
        return html_box(html_beside(html_table(self._cells()), self.history.curve_html()))

    def _cells(self) -> list[list[str]]:
        reason = f"{self.ended}: {self.reason}"
        return result_cells(self.trainer.num_steps, reason, self.history)


def result_of(
    trainer: Trainer, error: BaseException | None, signals: str = "", *, all_steps: bool = False
) -> FitResult:
    """The result of a run that has ended.

    Args:
        trainer: The run's trainer.
        error: The error that ended it, if any.
        signals: The signals that came, in words.
        all_steps: Whether the run was limited by a number of steps, not by the data's end.
    """
    ended, reason = _ending(error, signals, all_steps)
    return FitResult(trainer=trainer, history=trainer.history, ended=ended, reason=reason)


def _ending(error: BaseException | None, signals: str, all_steps: bool) -> tuple[Ended, str]:
    # A signal takes precedence over the error that it caused.
    if signals:
        return "interrupted", f"by {signals}"
    if error is None:
        return "done", "all `steps`" if all_steps else "to the end of `data`"
    if isinstance(error, StopTraining):
        return "stopped", str(error) or "by a callback"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "by a KeyboardInterrupt"
    if isinstance(error, Exception):
        return "failed", f"{type(error).__name__}: {error}"
    return "interrupted", f"by {type(error).__name__}"


class DataRanOutError(ValueError):
    """Raised if `data` ended before `steps` steps were done.

    Attributes:
        result: The `FitResult` of the completed steps, so nothing is lost.
    """

    result: Any = None


@contextmanager
def attaching_result(trainer: Trainer) -> Iterator[None]:
    """Gives the body's errors an attribute `result`: the `FitResult` of the completed steps."""
    try:
        yield
    except BaseException as error:
        with suppress(AttributeError, TypeError):  # an error may refuse attributes
            # In a process ended by SIGTERM, the error is a SystemExit.
            signals = "SIGTERM" if isinstance(error, SystemExit) else ""
            error.result = result_of(trainer, error, signals)  # type: ignore[attr-defined]
            if isinstance(error, Exception) and not isinstance(error, DataRanOutError):
                error.add_note(
                    f"This error's `.result` holds the trainer, after step {trainer.num_steps}, "
                    "and the history."
                )
        raise
