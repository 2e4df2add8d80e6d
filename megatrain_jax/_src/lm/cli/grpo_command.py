"""`megatrain-jax grpo`: from a checkpoint, prompts and reward functions to a new checkpoint."""

import hashlib
import json
import resource
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import megatrain_jax as mt
from megatrain_jax import callbacks, data, models
from megatrain_jax._src.common.progress import phase_lines
from megatrain_jax._src.lm.cli.devices import peak_device_bytes
from megatrain_jax._src.lm.cli.errors import (
    CommandError,
    as_command_errors,
    error_text,
    with_cli_options,
)
from megatrain_jax._src.lm.cli.grpo_settings import GrpoSettings
from megatrain_jax._src.lm.cli.logs import make_logs
from megatrain_jax._src.lm.cli.model_and_batch import checkpoint_folder, frozen_of, with_adapters
from megatrain_jax._src.lm.cli.progress_lines import ProgressLines
from megatrain_jax._src.lm.cli.reward_functions import load_rewards
from megatrain_jax._src.lm.cli.run_data import errors_name_option
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.run_recipe import optimizer_of_run, precision_of_run, schedule_of_run
from megatrain_jax._src.lm.cli.run_settings import listed
from megatrain_jax._src.lm.cli.tokenizers import load_tokenizer

# As in a shell: 128 plus the number of SIGINT.
_INTERRUPTED = 130


def run(settings: GrpoSettings) -> int:
    """Starts a run, or resumes it.

    Returns:
        The exit status: 0 if the run has finished, now or before; 130 if it was interrupted.

    Raises:
        CommandError: If the request is invalid; raised before training begins.
    """
    folder = RunFolder(Path(settings.out).expanduser())
    with as_command_errors():
        folder.check(settings)
        if folder.is_done(settings):
            print(f"{folder.path} is done. See {folder.path}")
            return 0
        start_callback = _StartCallback(settings, folder)
        arguments = _arguments(settings, folder, start_callback)
    try:
        with phase_lines():
            result = models.train_grpo(arguments.pop("model"), **arguments)
    except (ValueError, TypeError, OSError, ImportError) as error:
        if start_callback.is_past:
            raise
        raise CommandError(error_text(error)) from error
    steps = result.trainer.num_steps
    if result.interrupted:
        goes_on = "goes on from there" if settings.checkpoints else "begins anew"
        print(f"interrupted after step {steps} of {settings.steps}: the same command {goes_on}")
        return _INTERRUPTED
    _finish(settings, folder, result)
    print(f"finished after {steps} step{'s' * (steps != 1)}: {folder.path}")
    return 0


def _arguments(
    settings: GrpoSettings, folder: RunFolder, start_callback: "_StartCallback"
) -> dict[str, Any]:
    """The arguments of `models.train_grpo`."""
    options = _options(settings)
    rewards = load_rewards(listed(settings.rewards))
    with errors_name_option("data"):
        rows = data.prompts(settings.data, invalid=settings.invalid, columns=settings.columns)
    checkpoint = checkpoint_folder(settings.model)
    tokenizer = load_tokenizer("model", checkpoint)
    model = _model(settings, checkpoint)
    identity = folder.note("identity") or uuid.uuid4().hex
    logs = make_logs(settings, folder, identity)
    schedule = schedule_of_run(settings, settings.steps)
    optimizer = optimizer_of_run(settings, schedule)
    fingerprint = _fingerprint(rows)
    folder.check_data(fingerprint)
    # External logs recognise a resumed run by its identity.
    start_callback.notes = {"identity": identity, "data": fingerprint}
    print(f"{len(rows):,} prompts; {', '.join(listed(settings.rewards))}", flush=True)
    lines = ProgressLines(settings.steps, schedule, settings.log_every, folder.begin_at)
    return {
        "rows": rows,
        "rewards": rewards,
        "optimizer": optimizer,
        "steps": settings.steps,
        "tokenizer": tokenizer,
        "options": options,
        **_saving(settings, folder),
        "callbacks": [start_callback, lines, *logs],
        "progress": sys.stderr.isatty(),
        "microbatches": settings.microbatches,
        "device_budget": settings.device_budget,
        "host_budget": settings.host_budget,
        "seed": settings.seed,
        **model,
    }


class _StartCallback(callbacks.Callback):
    """A callback that creates the run's folder before the first step, and prints the plan.

    So an invalid argument leaves no folder behind, which would belong to wrong settings.

    Attributes:
        notes: Notes to save in the folder.
        is_past: Whether the folder has been created.
    """

    def __init__(self, settings: GrpoSettings, folder: RunFolder):
        """Creates nothing yet."""
        self._settings, self._folder = settings, folder
        self.notes: Mapping[str, str] = {}
        self.is_past = False

    def begin(self, trainer: mt.Trainer) -> None:
        """Creates the folder before the first step."""
        self._folder.begin(self._settings)
        for name, value in self.notes.items():
            self._folder.take_note(name, value)
        self.is_past = True
        print(with_cli_options(str(trainer.plan)), flush=True)


def _saving(settings: GrpoSettings, folder: RunFolder) -> dict[str, Any]:
    if not settings.checkpoints:
        return {}
    return {
        "checkpoint_dir": folder.checkpoints,
        "checkpoint_every": settings.checkpoint_every,
        "keep": settings.keep,
    }


def _options(settings: GrpoSettings) -> models.GrpoOptions:
    """The options of GRPO, from the settings with their names."""
    names = {field.name for field in fields(models.GrpoOptions)}
    given = {name: value for name, value in asdict(settings).items() if name in names}
    return models.GrpoOptions(**given)


def _model(settings: GrpoSettings, checkpoint: str) -> dict[str, Any]:
    """The arguments of `models.train_grpo` for the model and its precision."""
    pretrained = models.load_pretrained(checkpoint, ignore=settings.ignore or ())
    model, params, trainable = pretrained.model, pretrained.params, settings.trainable
    if settings.lora_rank is not None:
        model, params, trainable = with_adapters(
            model,
            None,
            targets=settings.lora_targets,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            seed=settings.seed,
            params=params,
        )
    here = mt.this_machine()
    frozen = frozen_of(
        settings.frozen, settings.lora_rank is not None, pretrained.config.saved_dtype
    )
    return {
        "model": model,
        "params": params,
        "trainable": trainable,
        "precision": precision_of_run(settings, frozen, here),
        "hardware": here,
    }


def _fingerprint(rows: Sequence[Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _finish(settings: GrpoSettings, folder: RunFolder, result: mt.FitResult) -> None:
    """Exports the model and writes the report."""
    if settings.export != "never":
        for name in settings.exports:
            to = folder.path / name
            if not to.exists():
                print(f"exported to {_export(settings, result.trainer, name, to)}", flush=True)
    history, peak = result.history, peak_device_bytes()
    result.history.plot().savefig(folder.path / "loss.png")
    seconds = {
        name: [record.get(f"{name}/seconds", 0.0) for record in history]
        for name in ("generation", "training")
    }
    # Several updates may use the same completions.
    written = sum(
        record["generation/seconds"] * record["generation/tokens_per_second"]
        for record in history
        if "generation/seconds" in record
    )
    report: dict[str, Any] = {
        "ended": result.ended,
        "reason": result.reason,
        "steps": result.trainer.num_steps,
        "num_parameters": result.trainer.plan.num_parameters,
        "microbatches": result.trainer.plan.microbatches,
        "first_reward": history[0].get("reward"),
        "last_reward": history[-1].get("reward"),
        "completion_tokens_per_second": written / max(sum(map(sum, seconds.values())), 1e-9),
        "seconds": {name: sum(each) for name, each in seconds.items()},
        "peak_device_gib": peak and peak / 2**30,
        "peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "history": list(history),
    }
    folder.finish(report)


def _export(settings: GrpoSettings, trainer: mt.Trainer, name: str, folder: Path) -> Path:
    if name == "adapter":
        return models.save_lora(trainer, folder, dtype=settings.export_dtype or "float32")
    return models.save_pretrained(trainer, folder, dtype=settings.export_dtype)
