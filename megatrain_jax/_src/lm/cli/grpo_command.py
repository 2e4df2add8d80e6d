"""`megatrain-jax grpo`: from a checkpoint, prompts and reward functions to a new checkpoint."""

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import megatrain_jax as mt
from megatrain_jax import callbacks, data, distributed, models
from megatrain_jax._src.common.progress import phase_lines
from megatrain_jax._src.lm.cli import errors, model_and_batch, run_report
from megatrain_jax._src.lm.cli.grpo_settings import GrpoSettings
from megatrain_jax._src.lm.cli.recipe import optimizer_of_run, run_options, schedule_of_run
from megatrain_jax._src.lm.cli.run_data import errors_name_option, has_bar
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.run_settings import listed
from megatrain_jax._src.lm.cli.user_functions import imported
from megatrain_jax._src.lm.data.tokenizer import load_tokenizer


def run(settings: GrpoSettings) -> int:
    """Starts a run, or resumes it.

    Returns:
        The exit status: 0 if the run has finished, now or before; 130 if it was interrupted.

    Raises:
        CommandError: If the request is invalid; raised before training begins.
    """
    folder = RunFolder(Path(settings.out).expanduser())
    with errors.as_command_errors():
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
        raise errors.CommandError(errors.error_text(error)) from error
    steps = result.trainer.num_steps
    if result.interrupted:
        return run_report.tell_interrupted(settings, steps, settings.steps)
    _finish(settings, folder, result)
    print(f"finished after {steps} step{'s' * (steps != 1)}: {folder.path}")
    return 0


def _arguments(
    settings: GrpoSettings, folder: RunFolder, start_callback: "_StartCallback"
) -> dict[str, Any]:
    """The arguments of `models.train_grpo`."""
    names = {field.name for field in fields(models.GrpoOptions)}
    given = {name: value for name, value in asdict(settings).items() if name in names}
    options = models.GrpoOptions(**given)
    rewards = [imported("rewards", name) for name in listed(settings.rewards)]
    with errors_name_option("data"):
        rows = data.prompts(settings.data, invalid=settings.invalid, columns=settings.columns)
    checkpoint = model_and_batch.checkpoint_folder(settings.model)
    tokenizer = load_tokenizer(checkpoint, "model")
    model = _model(settings, checkpoint)
    identity = folder.note("identity") or uuid.uuid4().hex
    logs = run_report.make_logs(settings, folder, identity)
    schedule = schedule_of_run(settings, settings.steps)
    optimizer = optimizer_of_run(settings, schedule)
    contents = (json.dumps(row, sort_keys=True, default=str) for row in rows)
    fingerprint = hashlib.sha256("".join(contents).encode()).hexdigest()
    folder.check_data(fingerprint)
    # External logs recognise a resumed run by its identity.
    start_callback.notes = {"identity": identity, "data": fingerprint}
    print(f"{len(rows):,} prompts; {', '.join(listed(settings.rewards))}", flush=True)
    lines = run_report.ProgressLines(settings.steps, schedule, settings.log_every, folder.begin_at)
    return {
        "rows": rows,
        "rewards": rewards,
        "tools": [imported("tools", name) for name in listed(settings.tools)],
        "optimizer": optimizer,
        "steps": settings.steps,
        "tokenizer": tokenizer,
        "options": options,
        **folder.saving(settings),
        "callbacks": [start_callback, lines, *logs],
        "progress": has_bar(),
        "microbatches": settings.microbatches,
        **model,
    }


class _StartCallback(callbacks.Callback):
    """A callback that creates the run's folder before the first step, and prints the plan.

    So an invalid argument leaves no folder behind, which would belong to wrong settings.

    Attributes:
        notes: Notes to save in the folder.
        is_past: Whether the folder has been created.
    """

    adds_metrics = ()

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
        print(errors.with_cli_options(str(trainer.plan)), flush=True)


def _model(settings: GrpoSettings, checkpoint: str) -> dict[str, Any]:
    """The arguments of `models.train_grpo` for the model and its precision."""
    pretrained = models.load_pretrained(checkpoint, ignore=settings.ignore or ())
    model, params, trainable = pretrained.model, pretrained.params, settings.trainable
    if settings.lora_rank is not None:
        more = {"seed": settings.seed, "params": params}
        model, params, trainable = model_and_batch.with_adapters(
            model, None, model_and_batch.lora_options(settings), **more
        )
    has_adapters = settings.lora_rank is not None
    frozen = model_and_batch.frozen_of(settings.frozen, has_adapters, pretrained.config.saved_dtype)
    return {"model": model, "params": params} | run_options(settings, frozen, trainable)


def _finish(settings: GrpoSettings, folder: RunFolder, result: mt.FitResult) -> None:
    """Exports the model and writes the report."""
    if settings.export != "never":
        run_report.export_all(
            settings, folder, lambda *given: _export(settings, result.trainer, *given)
        )
    history = result.history
    distributed.in_first(lambda: result.history.plot().savefig(folder.path / "loss.png"))
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
        **run_report.peak_memory(),
        "history": list(history),
    }
    folder.finish(report)


def _export(settings: GrpoSettings, trainer: mt.Trainer, name: str, folder: Path) -> Path:
    if name == "adapter":
        return models.save_lora(trainer, folder, dtype=settings.export_dtype or "float32")
    return models.save_pretrained(trainer, folder, dtype=settings.export_dtype)
