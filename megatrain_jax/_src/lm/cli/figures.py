"""The numbers of a run's report: throughput, losses, peak memory, seconds of each phase."""

import resource
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import megatrain_jax as mt
from megatrain_jax._src.lm.cli.devices import peak_device_bytes
from megatrain_jax._src.lm.cli.training_settings import TrainingSettings

_GIB = 2**30


def figures(
    result: mt.FitResult, settings: TrainingSettings, began: Collection[int]
) -> dict[str, Any]:
    """The numbers of a run that has ended.

    Args:
        result: The result of `fit`.
        settings: The settings.
        began: The first step of each process of the run.
    """
    measured = steady(result.history, began)
    seconds = [record["seconds"] for record in measured]
    tokens = [record["tokens"] for record in measured]
    mean = statistics.mean(seconds) if seconds else None
    in_rows, peak = settings.batch * settings.length, peak_device_bytes()
    last = result.history[-1]
    return {
        "num_parameters": result.trainer.plan.num_parameters,
        "num_frozen": result.trainer.plan.num_frozen,
        "microbatches": result.trainer.plan.microbatches,
        "num_measured_steps": len(seconds),
        "mean_seconds_per_step": mean,
        "stdev_seconds_per_step": statistics.stdev(seconds) if len(seconds) > 1 else None,
        "tokens_per_step": in_rows,
        "tokens_per_second": mean and in_rows / mean,
        "tokens_per_second_without_padding": mean and sum(tokens) / sum(seconds),
        "first_loss": result.history[0]["loss"],
        "last_loss": last["loss"],
        "eval_loss": last.get("eval_loss"),
        "peak_device_gib": peak and peak / _GIB,
        "peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def steady(history: Sequence[Mapping[str, Any]], began: Collection[int]) -> list[Mapping[str, Any]]:
    """The records of regular steps, without compilation and final waits in their seconds.

    The first steps of a process compile; the last ones wait for steps in flight.

    Args:
        history: All records of a run.
        began: The first step of each of its processes.
    """
    starts = [n for n, record in enumerate(history) if record["step"] in began]
    bounds = pairwise(sorted({0, *starts, len(history)}))
    return [record for start, end in bounds for record in history[start + 3 : end - 2]]


class PhaseTimer:
    """A timer of the phases of a run."""

    def __init__(self):
        """Starts the first phase."""
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, name: str) -> None:
        """Records the seconds of the phase that ends, and starts the next."""
        now = time.perf_counter()
        self.seconds[name], self._start = now - self._start, now
