"""The steps of `Trainer.step`, until their records are in the history."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax

from megatrain_jax._src.engine.runtime.training import StepMetrics


class UnrecordedSteps:
    """The steps of `Trainer.step` that have no record yet, in order.

    Example: steps 7 and 8 were dispatched, and 9 is next. `records(keep=1)` waits for 7 alone and
    yields its record; `records()` waits for both.
    """

    def __init__(self, skips: bool):
        """Starts without steps.

        Args:
            skips: Whether a step with numbers that are not finite is skipped and counted; otherwise
                it ends in an error and has no record.
        """
        self._skips = skips
        self._waiting: deque[tuple[float, StepMetrics]] = deque()

    def add(self, began: float, metrics: StepMetrics) -> None:
        """Adds a step that began at a time of `time.perf_counter`."""
        self._waiting.append((began, metrics))

    @property
    def are_waiting(self) -> bool:
        """Whether there are steps without a record."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Forgets all steps without a record."""
        self._waiting.clear()

    def records(self, keep: int = 0) -> Iterator[dict[str, Any]]:
        """Yields the records of all but the newest `keep` steps, and forgets these steps.

        A step lasts until the next one begins, the newest until its record is requested.
        """
        while len(self._waiting) > keep:
            began, metrics = self._waiting[0]
            healthy, values = jax.device_get((metrics.healthy, dict(metrics)))
            # Not earlier: after an interrupted wait, the next call records the step.
            self._waiting.popleft()
            if not (healthy or self._skips):
                continue
            after = self._waiting[0][0] if self._waiting else time.perf_counter()
            values = {name: float(value) for name, value in values.items()}
            if self._skips:
                values["skipped"] = float(not healthy)
            yield {"step": metrics.step, "loss": values["loss"], **values, "seconds": after - began}
