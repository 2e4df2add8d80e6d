"""Trains a model in one call."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from os import PathLike
from typing import Any

import optax
from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.progress import tqdm
from megatrain_jax._src.common.settings import changes
from megatrain_jax._src.common.suggestions import lets_go, take
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.engine.adapt.loss_function import EVAL_PREFIX
from megatrain_jax._src.engine.checkpoint.saved_settings import (
    batch_digest,
    differences,
    version_remark,
)
from megatrain_jax._src.engine.options import inputs
from megatrain_jax._src.engine.options.batch_checks import check_batch
from megatrain_jax._src.engine.options.options import (
    Callbacks,
    DeviceBudget,
    DiskDir,
    EmaDecay,
    EvalData,
    HostBudget,
    LoopOptions,
    Microbatches,
    OnNonfinite,
    Options,
    PrecisionGiven,
    StatePerProcess,
    Trainable,
    WhichParams,
    taken,
)
from megatrain_jax._src.engine.runtime.evaluation import batch_shapes
from megatrain_jax._src.engine.start import Prepared
from megatrain_jax._src.engine.state.hardware import Hardware
from megatrain_jax._src.engine.state.placement import default_mesh, placed_on
from megatrain_jax._src.engine.state.processes import Processes
from megatrain_jax._src.engine.train.result import EMPTY, FitResult, attaching_result
from megatrain_jax._src.engine.train.run import Run
from megatrain_jax._src.engine.train.series import RunCheckpoints
from megatrain_jax._src.engine.train.source import (
    Source,
    first_evaluation,
    in_epochs,
    length_of_pass,
    naming_batch,
    naming_evaluation,
    own_position,
)
from megatrain_jax._src.engine.trainer import Trainer, prepare, started

_ONE_BATCH = "to train on one batch, pass itertools.repeat(batch) and `steps`"
_END = object()


@lets_go("model", "params")
def fit(
    model: Any,
    loss_fn: Callable[..., Any],
    data: Iterable[Any],
    optimizer: optax.GradientTransformation,
    *,
    params: Any = None,
    resume: bool = True,
    steps: int | None = None,
    epochs: int | None = None,
    eval_data: EvalData | None = None,
    eval_every: int | None = None,
    eval_params: WhichParams = "trained",
    checkpoint_dir: str | PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    callbacks: Callbacks = (),
    stall_seconds: float | None = 600.0,
    progress: bool = True,
    microbatches: Microbatches = 1,
    waves: int | None = None,
    precision: PrecisionGiven = "auto",
    device_budget: DeviceBudget = None,
    host_budget: HostBudget = None,
    disk_dir: DiskDir = None,
    disk_budget: HostBudget = None,
    trainable: Trainable = None,
    eval_loss_fn: Callable[..., Any] | None = None,
    on_nonfinite: OnNonfinite = "raise",
    ema_decay: EmaDecay = None,
    max_skipped: int = 10,
    seed: int = 0,
    hardware: Hardware | str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    state_per_process: StatePerProcess = False,
) -> FitResult:
    """Trains a model whose state lives in pinned host memory.

    Ctrl-C ends the run after the current step, saves it if there is a `checkpoint_dir`, and returns
    the result so far. SIGTERM does the same and then ends the process with status 143, by
    `SystemExit`, or calls the handler installed for it. An error is raised after the last complete
    step is saved. Every raised exception has the result as its attribute `result`. To continue
    after any of these, or after `steps`, call `train` with the result's trainer. The same call in a
    new process resumes from the newest checkpoint.

    Args:
        model: An `nnx.Module`, a function without arguments that builds one, a `flax.linen.Module`,
            or a pytree of arrays. It stays as it is: the result's `model` is the trained one.
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``, returning a scalar
            loss or ``(loss, metrics)``.
        data: An iterable of batches. A batch is a pytree of arrays with a leading axis of examples,
            which may differ without microbatches on one device; the first one sets the structure
            and the dtypes.
        optimizer: An Optax gradient transformation.
        params: Parameters to start from, a tree of arrays or a checkpoint's folder; see `Trainer`.
            Ignored by a run that resumes.
        resume: Whether to resume from the newest complete checkpoint in `checkpoint_dir`, at the
            batch after it. If the iterator of `data` has `get_state` and `set_state`, as Grain's
            do, with states of Python, NumPy and JAX values, these restore its position; else the
            batches used before are skipped. Newer checkpoints that are damaged are renamed. A
            warning names differences in loss, optimizer, precision, seed and data, and in
            `microbatches` and `waves` where they change results, and whether the checkpoint's or
            the new value is used. With False, `checkpoint_dir` must not contain steps.
        steps: Number of batches to train on, including those before a checkpoint; None trains until
            `data` ends.
        epochs: Number of passes over `data` instead of `steps`. `data` must have a length and be
            iterable anew, as a list is; otherwise give `steps`.
        eval_data: Evaluation batches, iterated anew each time, or a function that returns them. The
            first batch is checked before the first step; a function is called for that, and its
            result serves the first evaluation.
        eval_every: Evaluate after each multiple of this number of steps; None for after each epoch
            of `epochs`, or only at the end. If there is `eval_data`, the end of the run is always
            evaluated, even for a finished run that was not.
        eval_params: "ema" to evaluate averages of the parameters, which `ema_decay` keeps.
        checkpoint_dir: Folder of the run's checkpoints, one subfolder per step, each an ordinary
            Orbax checkpoint. The last step is always saved. On a local or mounted disk, or in an
            object store, as "gs://bucket/folder" or "s3://bucket/folder"; no second run can write
            there at the same time.
        checkpoint_every: Save after each multiple of this number of steps. Training continues while
            a checkpoint is written.
        keep: Number of newest checkpoints to keep.
        callbacks: Called in order as ``callback(trainer, record)`` with each complete record.
            Records are read late, so the trainer may already have dispatched the step after the
            record's. A callback can end the run early by raising `StopTraining`. Methods `begin`
            and `end`, if it has them, are called at the run's begin and end; see
            `megatrain_jax.callbacks.Callback`.
        stall_seconds: In a run of several processes, the seconds after which it ends with an error
            if no process has got on: has computed, compiled, written or read a part, or drawn a
            batch. Each process then prints the stacks of its threads, and the last step is saved if
            no process hangs outside of Python. It is at least three times the longest such pause
            before. None for no limit. A callback, or data, that takes longer needs a larger number.
        progress: Whether to show a progress bar; without it nothing is printed, except that a
            signal ended the run.
        microbatches: Number of equal parts that each training batch is split into, or "auto"; see
            `Trainer`. With "auto", a run that resumes keeps its checkpoint's number.
        waves: Number of equal groups of microbatches that go through forward and backward one after
            another; see `Trainer`.
        precision: A `Precision`, or a name: "compact" and "two_bytes" for its methods, "bfloat16",
            "float16" and "float32" for the dtype of the computation, or "auto" for bfloat16, or
            float16 on a GPU without it.
        device_budget: Bytes of device memory for state and activations, or text such as "22GiB",
            "minimum", or None ("auto") for all that compiled functions leave; see `Trainer`.
        host_budget: Maximum bytes of host memory of the process, or text such as "200GiB"; None for
            all that is available at the start, less a reserve; see `Trainer`.
        disk_dir: Folder, or list of folders of different drives, for the part of the state that the
            host's memory can't hold; None for none; see `Trainer`.
        disk_budget: Maximum bytes that the process may take in `disk_dir`, or text such as
            "500GiB"; None for what is free.
        trainable: The parameters to train, as names or a regular expression in their paths, a
            predicate of the path, a filter of `flax.nnx`, or a list of these; None trains all; see
            `Trainer`.
        eval_loss_fn: Loss function to evaluate with, called as `loss_fn` is; None for `loss_fn`;
            see `Trainer`.
        on_nonfinite: The action if a loss or a gradient is not finite: "raise", or "skip" to leave
            everything but the step number unchanged and continue; see `Trainer`.
        ema_decay: Decay of an exponential moving average of the trained parameters, or an Optax
            schedule of it; None keeps no average; see `Trainer`.
        max_skipped: Number of consecutive skipped steps that is an error; see `Trainer`.
        seed: Seed of a Linen module's parameters and of the keys for `loss_fn`; see `Trainer`.
        hardware: The machine whose rates the schedule and `plan` use, a `Hardware` or a card's name
            such as "H100"; None for this machine, or an H200 without a GPU.
        mesh: The devices to train on; None for all GPUs that JAX sees, or else its first device;
            see `Trainer`.
        state_per_process: Whether each of several processes holds all state on its own devices
            instead of a share ("hybrid sharding"); see `Trainer`.

    Returns:
        The trainer and its history.

    Raises:
        ValueError: If `data` is empty, a batch does not fit, or an option is out of range or
            contradicts another.
        TypeError: If an argument has a wrong type, or the state of the iterator of `data` can't be
            saved.
        DataRanOutError: If `data` ends before `steps` steps.
        FloatingPointError: If a loss or a gradient is not finite and `on_nonfinite` is "raise", or
            `max_skipped` consecutive steps were skipped.
        CheckpointError: If `checkpoint_dir` or a checkpoint can't be written, another run uses the
            folder, it contains later steps than the run starts from, or none of its checkpoints can
            be read.
        SystemExit: After SIGTERM.
    """
    loop, run = taken(LoopOptions, locals()), taken(Options, locals())
    model, params = take(model), take(params)  # after `locals()`, which would keep them
    resume = checks.boolean("resume", resume)
    inputs.check_order("fit(model, loss_fn, data, optimizer)", optimizer, "data", data)
    inputs.check_parts(model, loss_fn, optimizer, params)
    inputs.check_mesh(run.mesh)
    inputs.check_data("data", data, _ONE_BATCH)
    data, loop = in_epochs(data, loop)
    loop.check_evaluated(length_of_pass(data), at_end=False)
    run = replace(run, mesh=run.mesh or default_mesh())
    assert run.mesh is not None
    processes = placed_on(run.mesh).processes
    with _series(loop, processes, resume=resume) as series:
        source = Source(data, saved=series is not None)
        # Drawn before anything is made: its shapes determine everything that follows, and it is
        # trained on.
        own = run.num_devices // processes.count
        sample = _first_batch(source, run.least_microbatches, own)
        continues = loop.checkpoint_dir if resume else None
        prepared = prepare(model, loss_fn, optimizer, sample, params, continues, loop.progress, run)
        del model, params  # now freed, if they were made for this call
        evaluation = _checked_metrics(prepared, loop)
        trainer = started(prepared)
        del prepared  # it may have all parameters as arrays
        with attaching_result(trainer):
            batches: Iterator[Any] = chain([sample], source)
            first = 0
            if series is not None:
                source.first = batch_digest(sample)
                trained = _resumed(series, trainer, source, loop, resume=resume)
                if trained is not None and trained == source.count:
                    # The sample was the data's first batch, which the run has already trained on.
                    batches, first = source, trained
            call = Run(trainer=trainer, source=source, first=first, counted_from=0)
            return call.train(batches, loop, series, evaluation)


def train(
    trainer: Trainer,
    data: Iterable[Any],
    *,
    resume: bool = False,
    steps: int | None = None,
    epochs: int | None = None,
    eval_data: EvalData | None = None,
    eval_every: int | None = None,
    eval_params: WhichParams = "trained",
    checkpoint_dir: str | PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    callbacks: Callbacks = (),
    stall_seconds: float | None = 600.0,
    progress: bool = True,
) -> FitResult:
    """Continues training with a trainer; `fit` is `Trainer` followed by this.

    It ends like `fit`: after Ctrl-C, after SIGTERM, and with an error.

    With `steps` it draws exactly that many batches, so a second call on the same iterator continues
    where the first one stopped. A run ended by Ctrl-C may have drawn one batch that it did not
    train on.

    Args:
        trainer: The trainer, new or used.
        data: See `fit`.
        resume: Whether to restore the newest checkpoint in `checkpoint_dir` first, if there is one,
            with the position of `data`; `steps` are then counted from 0, as in `fit`. The trainer
            itself draws no batch of `data`, so the data may be made by the trainer.
        steps: Number of batches to train on, including those before a checkpoint; None trains until
            `data` ends; see `fit`. Here these are further steps.
        epochs: Number of passes over `data` instead of `steps`; see `fit`. `data` starts from its
            beginning.
        eval_data: Evaluation batches, iterated anew each time, or a function that returns them; see
            `fit`.
        eval_every: Evaluate after each multiple of this number of steps; None for after each epoch
            of `epochs`, or only at the end; see `fit`. Steps are counted over the trainer's life.
            If Ctrl-C cut off an evaluation due after the trainer's last step, it is made first.
        eval_params: "ema" to evaluate averages of the parameters, which `ema_decay` keeps.
        checkpoint_dir: Folder of the run's checkpoints, one subfolder per step, each an ordinary
            Orbax checkpoint; see `fit`. Without `resume`, the folder must not contain later steps.
        checkpoint_every: Save after each multiple of this number of steps; see `fit`.
        keep: Number of newest checkpoints to keep.
        callbacks: Called in order as ``callback(trainer, record)`` with each complete record; see
            `fit`.
        stall_seconds: In a run of several processes, the seconds after which it ends with an error
            if no process has got on: has computed, compiled, written or read a part, or drawn a
            batch; see `fit`.
        progress: Whether to show a progress bar; without it nothing is printed, except that a
            signal ended the run.

    Returns:
        The trainer, with all its state on the host, and its history.

    Raises:
        ValueError: See `fit`.
        TypeError: See `fit`.
        DataRanOutError: See `fit`.
        FloatingPointError: See `fit`.
    """
    loop = taken(LoopOptions, locals())
    resume = checks.boolean("resume", resume)
    inputs.check_trainer(trainer)
    inputs.check_data("data", data, _ONE_BATCH)
    data, loop = in_epochs(data, loop)
    loop.check_evaluated(at_end=True)
    if loop.decides_by(""):
        loop.check_metrics(trainer.run_state.spec.step_metrics, "")
    with attaching_result(trainer), _series(loop, trainer.processes, resume=resume) as series:
        source = Source(data, saved=series is not None)
        start = trainer.num_steps
        if series is not None:
            trained = _resumed(series, trainer, source, loop, resume=resume)
            start = start if trained is None else 0
        run = Run(trainer=trainer, source=source, first=source.count, counted_from=start)
        return run.train(source, loop, series)


def _series(
    options: LoopOptions, processes: Processes, *, resume: bool
) -> AbstractContextManager[RunCheckpoints | None]:
    """The run's checkpoints, if it has any; all processes must agree on both arguments."""
    given = {"`checkpoint_dir`": options.checkpoint_dir is not None, "`resume`": resume}
    processes.agree("the run's arguments", lambda: given)
    if options.checkpoint_dir is None:
        return nullcontext()
    return RunCheckpoints(
        options.checkpoint_dir,
        options.checkpoint_every,
        options.keep,
        processes,
        options.steps if resume else None,
    )


def _resumed(
    series: RunCheckpoints, trainer: Trainer, source: Source, loop: LoopOptions, *, resume: bool
) -> int | None:
    """Restores the newest checkpoint if the run resumes, and brings the data to its position.

    Settings that differ are warned of.

    Returns:
        The number of batches drawn from `source` that the run has trained on, or that it needs no
        more; None if there was no checkpoint.
    """
    if not resume:
        series.begin(trainer)
        return None
    facts, is_first = series.resume(trainer), trainer.processes.is_first
    if facts is None:
        if loop.progress and is_first:  # so that a wrong folder is noticed
            start = f"starting from step {trainer.num_steps}."
            tqdm.write(f"No checkpoint in {series.folder} yet: {start}")
        return None
    position = own_position(facts["data"], trainer.processes)
    if is_first:
        path = series.folder / str(trainer.num_steps)
        before, now = facts["made_of"], trainer.run_state.saved_settings
        first = trainer.run_state.spec.first
        parts = {"microbatches": trainer.run_state.num_parts}
        if first.depends_on_waves:
            parts["waves"] = first.waves
        finished = loop.steps is not None and trainer.num_steps >= loop.steps
        line = differences(
            path,
            before,
            now,
            parts=changes(facts["parts"], parts),
            same_data=source.is_data_of(position),
            finished=finished,
            num_converted=series.num_converted,
        )
        if line is not None:
            warn_user(line)
        if loop.steps is not None and trainer.num_steps > loop.steps:
            warn_user(
                f"{path} is of step {trainer.num_steps}, beyond `steps`={loop.steps} (or the steps "
                "of `epochs`): nothing is trained, and the result is of that step. For a shorter "
                "run, choose another `checkpoint_dir`"
            )
        if loop.progress:
            all_of_it = " It has all its steps: nothing is trained or evaluated." * finished
            tqdm.write(f"Resumed from {path}.{all_of_it}{version_remark(before, now)}")
    # Nothing is drawn for a run that has all its steps, of data that may have no more.
    if loop.steps is None or trainer.num_steps <= loop.steps:
        source.go_to(position, loop.progress and is_first, once=loop.steps is None)
    return source.count if position["batches"] else 0


def _checked_metrics(prepared: Prepared, loop: LoopOptions) -> tuple[Any, Iterable[Any]] | None:
    """Checks that records will have the metrics by which callbacks decide.

    Returns:
        The `first_evaluation`, if its batch had to be drawn.

    Raises:
        ValueError: If a metric will be in no record.
    """
    spec, placement = prepared.spec, prepared.placement
    loop.check_metrics(spec.step_metrics, "")
    if loop.eval_data is None or not loop.decides_by(EVAL_PREFIX):
        return None
    with naming_evaluation():
        first, batches = first_evaluation(loop.eval_data)
        check_batch(first)
        shapes = batch_shapes(first, placement.num_processes)
        with placement.outside_meshes():
            loop.check_metrics(spec.evaluation_metrics(shapes), EVAL_PREFIX)
    return first, batches


def _first_batch(source: Source, microbatches: int, num_devices: int) -> Any:
    """The first batch of the data, from which a trainer is made.

    Raises:
        ValueError: If there is none, or microbatches and devices can't share it.
        TypeError: If it is not a pytree of arrays.
    """
    sample = next(source, _END)
    if sample is _END:
        raise ValueError(EMPTY)
    with naming_batch(1):
        check_batch(sample, microbatches, num_devices=num_devices)
    return sample
