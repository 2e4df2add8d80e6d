"""Makes a run's logging callbacks from their names in the settings."""

from collections.abc import Callable
from typing import Any

from megatrain_jax import Trainer, callbacks
from megatrain_jax._src.lm.cli.job import Job
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.run_settings import RunSettings
from megatrain_jax._src.lm.cli.training_settings import TrainingSettings


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
    makers: dict[str, Callable[[], callbacks.Callback]] = {
        "csv": lambda: callbacks.CSVLog(folder.path / "log.csv"),
        "jsonl": lambda: callbacks.JSONLog(folder.path / "log.jsonl"),
        "tensorboard": lambda: callbacks.TensorBoard(str(folder.path / "tensorboard")),
        "wandb": lambda: _wandb(folder, identity, settings.wandb or {}),
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
        )
    ]


def _wandb(folder: RunFolder, identity: str, given: dict[str, Any]) -> callbacks.WandB:
    return callbacks.WandB(**{"dir": str(folder.path), "id": identity, "resume": "allow", **given})


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
