"""A trace of some steps by JAX's profiler."""

from os import PathLike
from typing import Any

import jax

from megatrain_jax import FitResult, Trainer
from megatrain_jax._src.callbacks.callback import Callback
from megatrain_jax._src.common import checks


class Profile(Callback):
    """Traces some of a run's steps by `jax.profiler`, for TensorBoard, XProf or Perfetto.

    The trace begins before the first of them is dispatched, so the one before it may be there in
    part, and ends when the last of them has been computed.
    """

    def __init__(self, folder: str | PathLike[str], first: int = 3, last: int | None = None):
        """Traces nothing yet.

        Args:
            folder: The folder that the profiler writes to.
            first: Number of the first step to trace, counted over the trainer's life; the first
                steps of a run are slower.
            last: Number of the last one; None for two steps more.

        Raises:
            TypeError: If an argument is of another type.
            ValueError: If `first` is less than 1, or `last` less than `first`.
        """
        self._folder = checks.path("folder", folder)
        self._first = checks.integer("first", first)
        last = self._first + 2 if last is None else last
        self._last = checks.integer("last", last, least=self._first)
        self._tracing = False

    def begin(self, trainer: Trainer) -> None:
        """Begins the trace if the run's first step is one to trace."""
        self._go_on(trainer.num_steps)

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Begins the trace before the first step, ends it after the last one."""
        # A record is complete when its step has been computed.
        if self._tracing and record["step"] >= self._last:
            self._stop()
        elif not self._tracing:
            self._go_on(trainer.num_steps)

    def end(self, result: FitResult) -> None:
        """Ends the trace of a run that has ended before."""
        if self._tracing:
            self._stop()

    def _go_on(self, num_steps: int) -> None:
        """Begins the trace if the next step is one to trace."""
        if self._first <= num_steps + 1 <= self._last:
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def _stop(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()
