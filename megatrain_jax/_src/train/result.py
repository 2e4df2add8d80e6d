"""The result of a training run, and the error that ends one whose data ran out."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from megatrain_jax._src.history import History
from megatrain_jax._src.trainer import Trainer

EMPTY = (
    "`data` gave no batch: it is empty, or an iterator that was used up before (a generator can "
    "be iterated over only once)"
)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of a run: its trainer, model and history; in a notebook it shows its loss curve.

    Attributes:
        trainer: The trainer, with all its state on the host. Go on with `train`.
        history: One record a step, over the trainer's life.
        interrupted: Whether a signal came, or a callback raised `KeyboardInterrupt`.
    """

    trainer: Trainer
    history: History
    interrupted: bool

    @property
    def model(self) -> Any:
        """The user's model holding the trained parameters as host arrays."""
        return self.trainer.model

    @property
    def params(self) -> Any:
        """The trained parameters as host arrays, in the model's own structure."""
        return self.trainer.params

    def __repr__(self) -> str:
        """Says how far the run came, instead of printing every record."""
        loss = f"{self.history[-1]['loss']:.6g}" if self.history else "none"
        return (
            f"FitResult(steps={self.trainer.num_steps}, loss={loss}, "
            f"interrupted={self.interrupted})"
        )

    def _repr_png_(self) -> bytes | None:
        return self.history._repr_png_()


class DataRanOutError(ValueError):
    """The error that `data` ended before `steps` steps were done.

    Attributes:
        result: The `FitResult` of the steps that were done; nothing of them is lost.
    """

    result: Any = None


@contextmanager
def handed_over(trainer: Trainer) -> Iterator[None]:
    """Gives an error of the body an attribute `result`: the `FitResult` of the steps done."""
    try:
        yield
    except BaseException as error:
        with suppress(AttributeError, TypeError):  # an error may refuse attributes
            error.result = FitResult(  # type: ignore[attr-defined]
                trainer=trainer,
                history=trainer.history,
                interrupted=not isinstance(error, Exception),
            )
            if isinstance(error, Exception) and not isinstance(error, DataRanOutError):
                error.add_note(
                    f"This error's `.result` holds the trainer, after step {trainer.num_steps}, "
                    "and the history."
                )
        raise
