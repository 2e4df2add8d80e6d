"""Traces of a few steps with JAX's profiler."""

from os import PathLike
from typing import Any

import jax

from megatrain_jax import FitResult, Trainer
from megatrain_jax._src.callbacks.callback import Callback
from megatrain_jax._src.common import checks


class Profile(Callback):
    """Traces some of a run's steps with `jax.profiler`, for TensorBoard, XProf or Perfetto.

    The trace starts before the first of these steps is dispatched, so it may include part of the
    step before, and ends when the last one has been computed. If several processes share a run,
    only the first one is traced, with its own devices.
    """

    adds_metrics = ()

    def __init__(self, folder: str | PathLike[str], first: int = 3, last: int | None = None):
        """Traces nothing yet.

        Args:
            folder: The folder that the profiler writes to.
            first: Number of the first step to trace, counted over the trainer's life; the first
                steps of a run are slower.
            last: Number of the last step to trace; None for `first` + 2.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If `first` is less than 1, or `last` less than `first`.
        """
        self._folder = checks.path("folder", folder)
        self._first = checks.integer("first", first)
        last = self._first + 2 if last is None else last
        self._last = checks.integer("last", last, least=self._first)
        self._tracing = False

    def begin(self, trainer: Trainer) -> None:
        """Starts the trace if the run's first step is to be traced."""
        self._go_on(trainer)

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Starts the trace before the first step, and ends it after the last one."""
        # A record is complete when its step has been computed.
        if self._tracing and record["step"] >= self._last:
            self._stop()
        elif not self._tracing:
            self._go_on(trainer)

    def end(self, result: FitResult) -> None:
        """Ends the trace of a run that has ended early."""
        if self._tracing:
            self._stop()

    def _go_on(self, trainer: Trainer) -> None:
        """Starts the trace if the next step is to be traced."""
        is_next = self._first <= trainer.num_steps + 1 <= self._last
        if is_next and trainer.processes.is_first:
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def _stop(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()
