"""The recipe shared by `finetune` and `pretrain`, as one idempotent call.

It plans, reads, trains, exports and reports; steps that are already done are skipped.
"""

import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optax

import megatrain_jax as mt
from megatrain_jax import callbacks
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.progress import phase_lines
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.lm.cli.devices import num_gpus
from megatrain_jax._src.lm.cli.errors import as_command_errors, with_cli_options
from megatrain_jax._src.lm.cli.figures import PhaseTimer, figures
from megatrain_jax._src.lm.cli.job import Job
from megatrain_jax._src.lm.cli.logs import make_logs, make_samples
from megatrain_jax._src.lm.cli.progress_lines import ProgressLines
from megatrain_jax._src.lm.cli.push import check_push, push
from megatrain_jax._src.lm.cli.reference import (
    BatchesWithReference,
    ReferenceLogProbs,
    load_or_compute_reference,
)
from megatrain_jax._src.lm.cli.run_data import RunData, check_files, file_stamps, read
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.run_recipe import optimizer_of_run, precision_of_run, schedule_of_run
from megatrain_jax._src.lm.cli.training_settings import TrainingSettings

# As in a shell: 128 plus the number of SIGINT.
_INTERRUPTED = 130


def run(settings: TrainingSettings, prepare: Callable[[], Job]) -> int:
    """Starts a run, or resumes it.

    Args:
        settings: The settings.
        prepare: Function that does its command's own checks and returns the job.

    Returns:
        The exit status: 0 if the run has finished, now or before; 130 if it was interrupted; 1 if
        its export could not be uploaded.

    Raises:
        CommandError: If the request is invalid; raised before training begins.
    """
    folder = RunFolder(Path(settings.out).expanduser())
    timer = PhaseTimer()
    with as_command_errors():
        folder.check(settings)
        check_push(settings)
        if folder.is_done(settings):
            print(f"{folder.path} is done: {_how(folder.report or {})}. See {folder.path}")
            if changed := folder.changed_files(file_stamps(settings)):
                print(
                    f"warning: files of {' and '.join(f'`{name}`' for name in changed)} have "
                    "changed in size or time since that run read them. To train on them as they "
                    "are now, choose another `out`"
                )
            return push(settings, folder)
        check_files(settings)
        job = prepare()
        identity = folder.note("identity") or uuid.uuid4().hex
        logs = [*make_samples(settings, job), *make_logs(settings, folder, identity)]
        options = _options(settings, job) | _parts(settings, folder)
        plan = _plan(settings, job, options)
        if settings.microbatches == "auto":
            options |= {"microbatches": plan.microbatches, "waves": plan.waves}
        print(with_cli_options(str(plan)), flush=True)
        _check_memory(plan, settings)
        timer.lap("plan")
        # After the plan, which takes seconds, whereas reading and tokenising may take an hour.
        batches = read(settings, job.dataset)
        folder.check_data(batches.fingerprint)
        folder.begin(settings)
        for name, value in _notes(settings, identity, batches, options).items():
            folder.take_note(name, value)
    timer.lap("data")
    with as_command_errors():
        schedule = schedule_of_run(settings, batches.steps)
        reference = load_or_compute_reference(folder, batches.datasets, job, options)
    if reference is not None:
        timer.lap("reference")
    result = _train(settings, folder, job, options, batches, schedule, logs, reference)
    timer.lap("training")
    steps = result.trainer.num_steps
    if result.interrupted:
        if settings.export == "always":
            _export(settings, job, result.trainer, batches, folder.path, f"-step-{steps}")
        goes_on = "goes on from there" if settings.checkpoints else "begins anew"
        print(f"interrupted after step {steps} of {batches.steps}: the same command {goes_on}")
        return _INTERRUPTED
    ending = {"ended": result.ended, "reason": result.reason, "steps": steps}
    ending = folder.ended or {**ending, "steps_asked_for": batches.steps}
    if settings.checkpoints:
        folder.end(ending)
    report = {**ending, **figures(result, settings, folder.began)}
    report["tokens_held_out"] = batches.num_held_out
    result.history.plot().savefig(folder.path / "loss.png")
    if settings.export != "never":
        report["exported_step"] = _export_finished(settings, job, result.trainer, batches, folder)
        timer.lap("export")
    folder.finish({**report, "seconds": timer.seconds, "history": list(result.history)})
    print(f"finished after {_how(ending)}: {folder.path}")
    return push(settings, folder)


def _how(ending: Mapping[str, Any]) -> str:
    """The end of a run in words."""
    if ending["ended"] == "stopped":
        of = f"{ending['steps']} of {ending['steps_asked_for']} steps"
        return f"{of}, stopped early: {ending['reason']}"
    return f"{ending['steps']} step{'s' * (ending['steps'] != 1)}"


def _options(settings: TrainingSettings, job: Job) -> dict[str, Any]:
    """The options that a plan and a run share."""
    here = mt.this_machine()
    return {
        "precision": precision_of_run(settings, job.frozen, here),
        "trainable": job.trainable,
        "device_budget": settings.device_budget,
        "host_budget": settings.host_budget,
        "on_nonfinite": settings.on_nonfinite,
        "seed": settings.seed,
        "hardware": here,
    }


def _parts(settings: TrainingSettings, folder: RunFolder) -> dict[str, Any]:
    """The number of microbatches; in a resumed run with "auto", also of waves, as chosen before."""
    chosen = folder.note("microbatches") if folder.has_checkpoints else None
    if settings.microbatches == "auto" and chosen is not None:
        return dict(zip(("microbatches", "waves"), map(int, chosen.split()), strict=True))
    return {"microbatches": settings.microbatches}


def _notes(
    settings: TrainingSettings, identity: str, batches: RunData, options: Mapping[str, Any]
) -> dict[str, str]:
    """The notes for later processes of a run."""
    # External logs recognise a resumed run by its first process's identity.
    found = {"identity": identity, "data": batches.fingerprint}
    if settings.microbatches == "auto":
        found["microbatches"] = f"{options['microbatches']} {options['waves']}"
    stamps = {f"files of {option}": stamp for option, stamp in file_stamps(settings).items()}
    return found | stamps


def _plan(settings: TrainingSettings, job: Job, options: Mapping[str, Any]) -> mt.Plan:
    number = options["microbatches"]
    return mt.plan(
        job.model,
        # The number only scales metrics, which a plan doesn't have.
        job.loss_of(1 if number == "auto" else number),
        optimizer_of_run(settings, schedule_of_run(settings, settings.steps or 1)),
        job.shapes,
        num_gpus=num_gpus(),
        **options,
    )


def _check_memory(plan: mt.Plan, settings: TrainingSettings) -> None:
    """Refuses a run that is certain not to fit, before its data is read.

    Its start compares all figures, after reading.

    Raises:
        MemoryError: If state alone exceeds the host, or a given budget the GPU.
    """
    state, process, most = plan.host_bytes, plan.host_fixed_bytes, plan.host_process_limit
    if process is not None and most is not None and most < state + process:
        raise MemoryError(
            f"Training needs at least {sized(state + process)} of host memory: {sized(state)} for "
            f"state, {sized(process)} for the process itself. It may take {sized(most)} "
            "(`host_budget`, or this machine's memory). No data was read. Use a larger "
            "`host_budget`, or for less state Precision.compact(), another optimizer or adapters."
        )
    budget = checks.device_budget(settings.device_budget)
    most = plan.hardware and plan.hardware.usable_bytes
    if isinstance(budget, int) and most is not None and most < plan.device_state_bytes:
        raise MemoryError(
            f"`device_budget`={settings.device_budget} is too large: state and activations would "
            f"take {sized(plan.device_state_bytes)} of the {sized(most)} that the GPU has. No data "
            "was read. Leave it out to use all that the GPU has left."
        )


def _train(
    settings: TrainingSettings,
    folder: RunFolder,
    job: Job,
    options: Mapping[str, Any],
    batches: RunData,
    schedule: optax.Schedule,
    logs: list[callbacks.Callback],
    reference: ReferenceLogProbs | None,
) -> mt.FitResult:
    every = settings.log_every
    lines = ProgressLines(batches.steps, schedule, every, folder.begin_at)
    saving: dict[str, Any] = {}
    if settings.checkpoints:
        saving = {
            "checkpoint_dir": folder.checkpoints,
            "checkpoint_every": settings.checkpoint_every,
            "keep": settings.keep,
        }
    # A run that was stopped early has nothing left to train, but may have to be exported.
    ended = folder.ended if settings.checkpoints else None
    with phase_lines():
        return mt.fit(
            job.model,
            job.loss_of(options["microbatches"]),
            _with_reference(reference, batches.train),
            optimizer_of_run(settings, schedule),
            steps=ended["steps"] if ended else batches.steps,
            params=job.params,
            eval_data=_with_reference(reference, batches.held_out),
            eval_every=settings.eval_every,
            callbacks=_callbacks(settings, folder, lines, logs),
            progress=sys.stderr.isatty(),
            **saving,
            **options,
        )


def _with_reference(reference: ReferenceLogProbs | None, batches: Any) -> Any:
    """Batches with the log-probabilities of the reference, if there is one."""
    return (
        batches
        if reference is None or batches is None
        else BatchesWithReference(batches, reference)
    )


def _callbacks(
    settings: TrainingSettings,
    folder: RunFolder,
    lines: ProgressLines,
    logs: list[callbacks.Callback],
) -> list[Any]:
    """The callbacks in order: callbacks that add values before logs, callbacks that stop last."""
    judged: dict[str, Any] = {
        "metric": settings.metric,
        "mode": settings.metric_mode,
        "min_delta": settings.min_delta,
    }
    found: list[Any] = [lines, *logs]
    if settings.keep_best:
        found.append(callbacks.KeepBest(folder.best, **judged))
    if settings.stop_after is not None:
        found.append(callbacks.EarlyStopping(**judged, patience=settings.stop_after))
    return found


def _export_finished(
    settings: TrainingSettings, job: Job, trainer: mt.Trainer, batches: RunData, folder: RunFolder
) -> int:
    """Exports the result of a finished run; returns its step."""
    best = callbacks.KeepBest(folder.best).path if settings.keep_best else None
    if best is not None:
        if int(best.name) != trainer.num_steps:
            trainer.restore(best)
        print(f"the best evaluation was that of step {best.name}, which is exported")
    _export(settings, job, trainer, batches, folder.path)
    return trainer.num_steps


def _export(
    settings: TrainingSettings,
    job: Job,
    trainer: mt.Trainer,
    batches: RunData,
    folder: Path,
    suffix: str = "",
) -> None:
    for name in settings.exports:
        to = folder / f"{name}{suffix}"
        if not to.exists():
            print(f"exported to {job.export(trainer, name, to, batches.chat_template)}", flush=True)
