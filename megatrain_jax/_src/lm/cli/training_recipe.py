"""The recipe shared by `finetune` and `pretrain`, as one idempotent call.

It plans, reads, trains, exports and reports; steps that are already done are skipped.
"""

import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax

import megatrain_jax as mt
from megatrain_jax import callbacks, distributed
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.activity import getting_on
from megatrain_jax._src.common.errors import noting
from megatrain_jax._src.common.progress import phase_lines
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.lm.cli import recipe, run_report
from megatrain_jax._src.lm.cli.errors import as_command_errors, with_cli_options
from megatrain_jax._src.lm.cli.reference import (
    BatchesWithReference,
    ReferenceLogProbs,
    load_or_compute_reference,
)
from megatrain_jax._src.lm.cli.run_data import RunData, check_files, file_stamps, has_bar, read
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.run_settings import TrainingSettings
from megatrain_jax._src.lm.common import hub

# The name of the note that holds the repository of an uploaded export.
_PUSHED = "pushed to"


def run(settings: TrainingSettings, prepare: Callable[[], recipe.Job]) -> int:
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
    timer = run_report.PhaseTimer()
    with as_command_errors():
        folder.check(settings)
        if settings.push is not None:
            hub.check_upload("push", settings.push)
        if folder.is_done(settings):
            print(f"{folder.path} is done: {_how(folder.report or {})}. See {folder.path}")
            if changed := folder.changed_files(file_stamps(settings)):
                print(
                    f"warning: files of {' and '.join(f'`{name}`' for name in changed)} have "
                    "changed in size or time since that run read them. To train on them as they "
                    "are now, choose another `out`"
                )
            return distributed.in_first(lambda: push(settings, folder))
        check_files(settings)
        job = prepare()
        identity = folder.note("identity") or uuid.uuid4().hex
        found = _callbacks(settings, folder, job, identity)
        options = recipe.run_options(settings, job.frozen, job.trainable) | _parts(settings, folder)
        options["on_nonfinite"] = settings.on_nonfinite
        options["ema_decay"] = settings.ema_decay
        plan = _plan(settings, job, options)
        # Else the run chooses both at its start, when it has measured the network.
        if settings.microbatches == "auto" and settings.state_per_process != "auto":
            # As the first process's machine has it.
            parts = distributed.in_first(lambda: [plan.microbatches, plan.waves])
            options |= dict(zip(("microbatches", "waves"), parts, strict=True))
        print(with_cli_options(str(plan)), flush=True)
        _check_memory(plan, settings)
        timer.lap("plan")
        # After the plan, which takes seconds, whereas reading and tokenising may take an hour.
        with getting_on("reading the data"):
            batches = read(settings, job.dataset)
        folder.check_data(batches.fingerprint)
        folder.begin(settings)
        for name, value in _notes(settings, identity, batches, options).items():
            folder.take_note(name, value)
    timer.lap("data")
    with as_command_errors():
        schedule = recipe.schedule_of_run(settings, batches.steps)
        reference = load_or_compute_reference(folder, batches.datasets, job, options)
    if reference is not None:
        timer.lap("reference")
    result = _train(settings, folder, job, options, batches, schedule, found, reference)
    timer.lap("training")
    trainer, steps = result.trainer, result.trainer.num_steps

    def export(suffix: str = "") -> None:
        template = batches.chat_template
        run_report.export_all(
            settings, folder, lambda name, to: job.export(trainer, name, to, template), suffix
        )

    if result.interrupted:
        if settings.export == "always":
            export(f"-step-{steps}")
        return run_report.tell_interrupted(settings, steps, batches.steps)
    ending = {"ended": result.ended, "reason": result.reason, "steps": steps}
    ending = folder.ended or {**ending, "steps_asked_for": batches.steps}
    if settings.checkpoints:
        folder.end(ending)
    report = {**ending, **run_report.figures(result, settings, folder.began)}
    report["tokens_held_out"] = batches.num_held_out
    distributed.in_first(lambda: result.history.plot().savefig(folder.path / "loss.png"))
    if settings.export != "never":
        best = callbacks.KeepBest(folder.best).path if settings.keep_best else None
        if best is not None:
            if int(best.name) != steps:
                trainer.restore(best)
            print(f"the best evaluation was that of step {best.name}, which is exported")
        export()
        report |= {"exported_step": trainer.num_steps, "exported_params": settings.params}
        timer.lap("export")
    folder.finish({**report, "seconds": timer.seconds, "history": list(result.history)})
    print(f"finished after {_how(ending)}: {folder.path}")
    return distributed.in_first(lambda: push(settings, folder))


def _how(ending: Mapping[str, Any]) -> str:
    """The end of a run in words."""
    if ending["ended"] == "stopped":
        of = f"{ending['steps']} of {ending['steps_asked_for']} steps"
        return f"{of}, stopped early: {ending['reason']}"
    return f"{ending['steps']} step{'s' * (ending['steps'] != 1)}"


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
    if settings.microbatches == "auto" and options["microbatches"] != "auto":
        found["microbatches"] = f"{options['microbatches']} {options['waves']}"
    stamps = {f"files of {option}": stamp for option, stamp in file_stamps(settings).items()}
    return found | stamps


def _plan(settings: TrainingSettings, job: recipe.Job, options: Mapping[str, Any]) -> mt.Plan:
    return mt.plan(
        job.model,
        job.counted_loss,
        recipe.optimizer_of_run(settings, recipe.schedule_of_run(settings, settings.steps or 1)),
        job.shapes,
        num_gpus=run_report.num_gpus(),
        **options,
    )


def _check_memory(plan: mt.Plan, settings: TrainingSettings) -> None:
    """Refuses a run that is certain not to fit, before its data is read.

    Its start compares all figures, after reading.

    Raises:
        MemoryError: If state alone exceeds the host, or a given budget the GPU.
    """
    process, most = plan.host_fixed_bytes, plan.host_process_limit
    # Its processes may have hosts of their own.
    state = plan.host_bytes // (1 if settings.state_per_process is True else jax.process_count())
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
    job: recipe.Job,
    options: Mapping[str, Any],
    batches: RunData,
    schedule: optax.Schedule,
    found: list[callbacks.Callback],
    reference: ReferenceLogProbs | None,
) -> mt.FitResult:
    every = settings.log_every
    lines = run_report.ProgressLines(batches.steps, schedule, every, folder.begin_at)

    def with_reference(some: Any) -> Any:
        if reference is None or some is None:
            return some
        return BatchesWithReference(some, reference)

    # A run that was stopped early has nothing left to train, but may have to be exported.
    ended = folder.ended if settings.checkpoints else None
    with phase_lines():
        return mt.fit(
            job.model,
            job.counted_loss,
            with_reference(batches.train),
            recipe.optimizer_of_run(settings, schedule),
            steps=ended["steps"] if ended else batches.steps,
            params=job.params,
            eval_data=with_reference(batches.held_out),
            eval_every=settings.eval_every,
            eval_params=settings.params if batches.held_out else "trained",
            callbacks=[lines, *found],
            progress=has_bar(),
            **folder.saving(settings),
            **options,
        )


def _callbacks(
    settings: TrainingSettings, folder: RunFolder, job: recipe.Job, identity: str
) -> list[callbacks.Callback]:
    """The callbacks in order: callbacks that add values before logs, callbacks that stop last."""
    judged: dict[str, Any] = {
        "metric": settings.metric,
        "mode": settings.metric_mode,
        "min_delta": settings.min_delta,
    }
    found = run_report.make_samples(settings, job)
    found += run_report.make_logs(settings, folder, identity)
    with noting("The command's option for it is `metric_mode`.", ValueError):
        if settings.keep_best:
            found.append(callbacks.KeepBest(folder.best, **judged))
        if settings.stop_after is not None:
            found.append(callbacks.EarlyStopping(**judged, patience=settings.stop_after))
    return found


def push(settings: TrainingSettings, folder: RunFolder) -> int:
    """Uploads the export, unless it was uploaded before or the settings name no repository.

    Returns:
        The exit status: 1 if the upload failed; the export stays where it is.
    """
    name = settings.push
    if name is None or folder.note(_PUSHED) == name:
        return 0
    export = folder.path / settings.exports[0]
    try:
        with getting_on("uploading the export"):
            commit = hub.upload(export, name, private=settings.push_private)
    except Exception as error:  # HTTP and disk errors have no common type
        why = " ".join(str(error).split())[:300]
        print(
            f"`push`={name} failed: {type(error).__name__}: {why}. The export is complete in "
            f"{export}; the same command tries again, and so does `hf upload {name} {export}`",
            file=sys.stderr,
            flush=True,
        )
        return 1
    folder.take_note(_PUSHED, name)
    print(f"pushed to {commit}", flush=True)
    return 0
