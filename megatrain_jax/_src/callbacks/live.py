"""A loss curve that updates in a notebook's cell during training."""

import io
from collections.abc import Sequence
from typing import Any

from megatrain_jax import FitResult, History, Trainer
from megatrain_jax._src.callbacks.callback import Callback
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import needing


class LiveCurve(Callback):
    """Plots metrics of the history in a notebook, updated every few steps.

    The plot appears in the output of the training cell, as one image that is replaced. Needs
    IPython, as every notebook does.
    """

    adds_metrics = ()

    def __init__(
        self,
        metrics: str | Sequence[str] = "loss",
        *,
        every: int = 10,
        log: bool = False,
        smooth: int = 1,
    ):
        """Shows nothing yet.

        Args:
            metrics: See `History.plot`.
            every: Number of steps between updates; the final plot is drawn at the end.
            log: See `History.plot`.
            smooth: See `History.plot`.

        Raises:
            ImportError: If IPython is not installed.
            TypeError: If an argument has a wrong type.
            ValueError: If a number is less than 1.
        """
        with needing("a live curve needs a notebook: pip install jupyter"):
            from IPython import display
        self._ipython: Any = display
        self._every = checks.integer("every", every)
        self._options: dict[str, Any] = {"metrics": metrics, "log": log, "smooth": smooth}
        History().plot(**self._options)  # checks the options before the run begins
        self._shown: Any = None

    def begin(self, trainer: Trainer) -> None:
        """Begins a new curve, in the current cell."""
        self._shown = None

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Updates the curve if it is due."""
        if record["step"] % self._every == 0:
            self._draw(trainer)

    def end(self, result: FitResult) -> None:
        """Draws the curve of the whole run."""
        if result.history:
            self._draw(result.trainer)

    def _draw(self, trainer: Trainer) -> None:
        # Only one process has the notebook.
        if not trainer.processes.is_first:
            return
        buffer = io.BytesIO()
        trainer.history.plot(**self._options).savefig(buffer, format="png", dpi=100)
        image = self._ipython.Image(data=buffer.getvalue(), format="png")
        if self._shown is None:
            self._shown = self._ipython.display(image, display_id=True)
        else:
            self._shown.update(image)
