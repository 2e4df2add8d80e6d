"""What a run tells: its progress lines, its logs, and the numbers of its report."""

import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import optax

import megatrain_jax as mt
from megatrain_jax import Trainer, callbacks, distributed
from megatrain_jax._src.common.progress import tqdm
from megatrain_jax._src.lm.cli.recipe import Job
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.run_settings import RunSettings, TrainingSettings


def make_logs(settings: RunSettings, folder: RunFolder, identity: str) -> list[callbacks.Callback]:
    """Makes the logs named in the settings; nothing is written yet.

    Args:
        settings: The settings.
        folder: The folder of the run.
        identity: Name of the run, the same in all its processes.

    Raises:
        ImportError: If a log's package is not installed.
        TypeError: If a log's argument is unknown.
    """
    wandb = {"dir": str(folder.path), "id": identity, "resume": "allow"}
    trackio = {"name": f"{folder.path.name}-{identity}", "resume": "allow"}
    makers: dict[str, Callable[[], callbacks.Callback]] = {
        "csv": lambda: callbacks.CSVLog(folder.path / "log.csv"),
        "jsonl": lambda: callbacks.JSONLog(folder.path / "log.jsonl"),
        "tensorboard": lambda: callbacks.TensorBoard(str(folder.path / "tensorboard")),
        "trackio": lambda: callbacks.Trackio(**{**trackio, **(settings.trackio or {})}),
        "wandb": lambda: callbacks.WandB(**{**wandb, **(settings.wandb or {})}),
        "mlflow": lambda: _MLflow(folder, settings.mlflow or {}),
    }
    return [makers[name]() for name in dict.fromkeys(settings.log_names)]


def make_samples(settings: TrainingSettings, job: Job) -> list[callbacks.Callback]:
    """Makes the callback that continues the settings' prompts; it runs before the logs.

    Raises:
        ValueError: If there is no tokenizer, or its template can't render a prompt as a question.
    """
    if settings.samples is None:
        return []
    tokenizer, as_prompt = job.prompting()
    return [
        callbacks.Samples(
            list(map(as_prompt, settings.prompts)),
            tokenizer,
            num_tokens=settings.sample_tokens,
            temperatures=settings.sample_temperatures,
            seed=settings.seed,
            params=settings.params,
        )
    ]


class _MLflow(callbacks.MLflow):
    """A log to MLflow that continues the run recorded in the folder."""

    def __init__(self, folder: RunFolder, given: dict[str, Any]):
        super().__init__(**{"run_id": folder.note("mlflow"), **given})
        self._folder = folder

    def begin(self, trainer: Trainer) -> None:
        """Opens the log, and records its run in the folder."""
        super().begin(trainer)
        if self.run_id is not None:
            self._folder.take_note("mlflow", self.run_id)


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
    adds_metrics: ClassVar = ("learning_rate",)
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
    in_rows = settings.batch * settings.length
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
        **peak_memory(),
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


def num_gpus() -> int | None:
    """The number of GPUs that a run here uses; None if there is none."""
    return None if mt.this_machine() is None else jax.device_count()


def peak_memory() -> dict[str, float | None]:
    """The peak memory of its first device, None if it is not reported, and of the process."""
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use") or None
    return {
        "peak_device_gib": peak and peak / 2**30,
        "peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def tell_interrupted(settings: RunSettings, steps: int, of: int) -> int:
    """Prints how to go on with a run that was interrupted; returns its exit status."""
    goes_on = "goes on from there" if settings.checkpoints else "begins anew"
    print(f"interrupted after step {steps} of {of}: the same command {goes_on}")
    return 130  # as in a shell: 128 plus the number of SIGINT


def export_all(
    settings: RunSettings, folder: RunFolder, export: Callable[[str, Path], Path], suffix: str = ""
) -> None:
    """Writes the exports that a run's folder lacks.

    Args:
        settings: The settings.
        folder: The folder of the run.
        export: Function that writes an export, given its name and its folder.
        suffix: End of the folders' names.
    """
    for name in settings.exports:
        to = folder.path / f"{name}{suffix}"
        if not distributed.in_first(to.exists):
            averages = isinstance(settings, TrainingSettings) and settings.params == "ema"
            what = "exported the averages" if averages else "exported"
            print(f"{what} to {export(name, to)}", flush=True)
