"""A trainer that only writes down its calls, and batches for it."""

from typing import Any

import jax
import numpy as np

from megatrain_jax._src.engine.history import History
from megatrain_jax._src.engine.options.batch_checks import check_batch, check_like
from megatrain_jax._src.engine.runtime.interrupt import deferred_interrupt
from megatrain_jax._src.engine.state.processes import Processes


class LogTrainer:
    """Keeps Trainer's interface and trains nothing; `log` says what was called, in order."""

    def __init__(self, log: list[tuple[str, int]] | None = None):
        self.log = [] if log is None else log
        self.history = History()
        self.num_steps = self.num_skipped = 0
        self.devices, self.processes = tuple(jax.devices()[:1]), Processes()
        self.on_step: dict[int, Any] = {}
        self.on_read: dict[int, Any] = {}
        self.first: Any = None

    def dispatch(self, batch: Any) -> dict[str, Any]:
        with deferred_interrupt():
            action = self.on_step.get(self.num_steps + 1)
            if action is not None:
                action()
            self.num_steps += 1
            self.log.append(("step", self.num_steps))
        return {"step_read": self.num_steps, "first": batch["x"][0, 0]}

    def read(self, metrics: dict[str, Any]) -> dict[str, float]:
        step = metrics["step_read"]
        self.log.append(("read", step))
        action = self.on_read.pop(step, None)
        if action is not None:
            action()
        return {"loss": 1.0 / step, "first": float(jax.device_get(metrics["first"]))}

    def evaluate(self, batches: Any, *, params: str) -> dict[str, float]:
        self.log.append(("evaluate", self.num_steps))
        return {"loss": float(len(list(batches)))}

    def check_batch(self, batch: Any) -> None:
        check_batch(batch)
        self.first = self.first or batch
        check_like(batch, self.first)

    def check_eval_batch(self, batch: Any, *, params: str) -> tuple[str, ...]:
        """Accepts all, since `evaluate` only counts batches."""
        return ("loss",)

    def add_end_tokens(self, tokens: Any) -> None:
        """Ends of texts are no concern of the loop."""

    def flush(self) -> None:
        self.log.append(("flush", self.num_steps))


def batch_of(value: float, examples: int = 4) -> dict[str, np.ndarray]:
    return {"x": np.full((examples, 3), value, np.float32)}
