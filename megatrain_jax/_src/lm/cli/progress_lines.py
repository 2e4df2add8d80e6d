"""The lines that a run prints during training, one per record of `fit`."""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optax

import megatrain_jax as mt
from megatrain_jax._src.common.progress import tqdm

# Number of recent steps from which throughput and remaining time are computed.
_RECENT = 20
# The first steps of a process compile, so they are not included.
_COMPILING = 2


@dataclass
class ProgressLines:
    """A callback of `fit` that prints loss, learning rate, gradient norm, rate and time left.

    It adds the learning rate to the record, for later callbacks.

    Attributes:
        steps: Number of steps of the run.
        schedule: Learning rate of a step, counted from 0.
        every: Print a line after each multiple of this number of steps.
        tell_start: Function called with the first step of this process.
    """

    steps: int
    schedule: optax.Schedule
    every: int
    tell_start: Callable[[int], None] = lambda step: None
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _seen: int = 0

    def __call__(self, trainer: mt.Trainer, record: dict[str, Any]) -> None:
        """Prints the line of a record, if it is due or contains an evaluation."""
        record["learning_rate"] = np.asarray(self.schedule(record["step"] - 1)).item()
        if not self._seen:
            self.tell_start(record["step"])
            if record["step"] > 1:
                _print(f"went on after step {record['step'] - 1}")
        self._seen += 1
        if self._seen > _COMPILING:
            self._recent.append((record["tokens"], record["seconds"]))
        evaluated = "eval_loss" in record
        if evaluated or record["step"] % self.every == 0 or record["step"] == self.steps:
            _print(self.line(record))

    def line(self, record: dict[str, Any]) -> str:
        """Returns the line of a record; padding is not counted as tokens.

        Until enough steps without compilation have run, it has neither a rate nor the time left.
        """
        step = record["step"]
        parts = [
            f"step {step}/{self.steps}",
            f"loss {record['loss']:.4g}",
            f"learning rate {record['learning_rate']:.3g}",
            f"gradient norm {record['grad_norm']:.3g}",
        ]
        if "reward" in record:
            parts.append(f"reward {record['reward']:.3g}")
        # Reinforcement learning has two rates, in place of their mean.
        apart = [name for name in ("generation", "training") if f"{name}/seconds" in record]
        parts += [f"{name} {record[f'{name}/tokens_per_second']:,.0f} tokens/s" for name in apart]
        tokens = sum(count for count, _ in self._recent)
        seconds = sum(duration for _, duration in self._recent)
        if self._recent and not apart:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
        if "eval_loss" in record:
            parts.append(f"eval loss {record['eval_loss']:.4g}")
        if "eval_accuracy" in record:
            parts.append(f"accuracy there {record['eval_accuracy']:.1%}")
        if self._recent:
            left = (self.steps - step) * seconds / len(self._recent)
            parts.append(f"{tqdm.format_interval(left)} left")
        return ", ".join(parts)


def _print(line: str) -> None:
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
