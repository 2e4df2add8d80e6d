"""Trains a model in one call."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import optax
from tqdm.auto import tqdm

from megatrain_jax._src.build.batches import check_batch
from megatrain_jax._src.build.inputs import check_data, check_mesh, check_parts, check_trainer
from megatrain_jax._src.build.options import (
    FitArguments,
    LoopArguments,
    LoopOptions,
    Options,
    options_of,
    shows,
)
from megatrain_jax._src.checkpoint.made_of import batch_digest, differences, upgraded
from megatrain_jax._src.common import checks
from megatrain_jax._src.state.placement import default_mesh, placed_on
from megatrain_jax._src.state.processes import Processes
from megatrain_jax._src.train.result import EMPTY, FitResult, handed_over
from megatrain_jax._src.train.run import Run
from megatrain_jax._src.train.series import Checkpoints
from megatrain_jax._src.train.source import Source, numbered, own_position
from megatrain_jax._src.trainer import Trainer

_ONE_BATCH = "to train on one batch, pass itertools.repeat(batch) and `steps`"
_END = object()


@shows(LoopOptions, Options)
def fit(
    model: Any,
    loss_fn: Callable[..., Any],
    data: Iterable[Any],
    optimizer: optax.GradientTransformation,
    *,
    params: Any = None,
    resume: bool = True,
    **options: Unpack[FitArguments],
) -> FitResult:
    """Trains a model whose state lives in pinned host memory.

    Ctrl-C ends the run after the step at hand, saves it if there is a `checkpoint_dir`, and returns
    what was trained so far. SIGTERM does the same and then ends the process with status 143, by
    `SystemExit`, or calls the handler that was installed for it. An error on the way is raised
    once the last whole step is saved. Whatever is raised has the result as its attribute `result`.
    To go on after any of these, or after `steps`, call `train` with the result's trainer. The same
    call in a new process goes on from the newest checkpoint.

    Args:
        model: An `nnx.Module`, a function of no arguments that builds one, a
            `flax.linen.Module`, or a pytree of arrays.
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``, giving a scalar loss
            or ``(loss, metrics)``.
        data: An iterable of batches. A batch is a pytree of arrays with a leading axis of
            examples; the first one sets the structure and the dtypes.
        optimizer: An Optax gradient transformation.
        params: Parameters to start from, a tree of arrays or a checkpoint's folder; see `Trainer`.
            A run that resumes has its own.
        resume: Whether to go on from the newest whole checkpoint in `checkpoint_dir`, with the
            batch that came after it. If the iterator of `data` has `get_state` and `set_state`, as
            Grain's have, these put it there, and a state consists of Python, NumPy and JAX values;
            else the batches that were used are skipped. Newer checkpoints that are damaged are
            renamed.
            A warning says which of loss, optimizer, precision, seed and data differ from the
            checkpoint's, and which of both counts. Without it, `checkpoint_dir` must hold no steps
            yet.
        steps: Number of batches to train on, those before a checkpoint included; None trains until
            `data` ends.
        microbatches: Number of equal parts that each batch is cut into.
        precision: The dtypes of masters, of compute and of optimizer state.
        device_budget: Bytes of device memory that state may occupy, "least", or None for what the
            device has left; see `Trainer`.
        host_budget: Bytes of host memory that the process may take in all, or text such as
            "200GiB"; None for what is available; see `Trainer`.
        trainable: The parameters that are trained, as a regular expression on their paths or a
            function of the path; None trains all. See `Trainer`.
        on_nonfinite: The action if a loss or a gradient is not finite: "raise", or "skip" the step,
            which leaves parameters and optimizer state as they were; see `Trainer`.
        max_skipped: Number of steps in a row that may be skipped; see `Trainer`.
        seed: Seed of a Linen module's parameters and of the keys `loss_fn` gets.
        hardware: The machine whose rates steps are scheduled by; see `Trainer`.
        mesh: The devices to train on; see `Trainer`.
        eval_data: Batches to evaluate on, or a function that returns them, called for each
            evaluation and not before; they are iterated over anew each time.
        eval_every: Evaluate after each step whose number this divides. The run's end is always
            evaluated where there is `eval_data`, also that of a run that was finished without.
        checkpoint_dir: Folder of the run's checkpoints, one subfolder a step, each an ordinary
            Orbax checkpoint. The last step is always saved. On a local or mounted disk; no other
            run can write there meanwhile.
        checkpoint_every: Save after each step whose number this divides. Training goes on while
            a checkpoint is written.
        keep: Number of checkpoints to keep, the newest ones.
        callbacks: Called in order as ``callback(trainer, record)`` with each complete record.
            Records are read late, so the trainer may have dispatched one step more than the
            record's. A callback ends the run early by raising `StopTraining`. One that has methods
            `begin` and `end` is told of the run's; see `megatrain_jax.callbacks.Callback`.
        progress: Whether to show a progress bar; without it nothing is printed, but that a signal
            ended the run.

    Returns:
        The trainer and its history.

    Raises:
        ValueError: If `data` is empty, a batch does not fit, an option is out of its range, or the
            options contradict each other.
        TypeError: If an argument is of another type than it should be, or the state of the iterator
            of `data` can't be saved.
        DataRanOutError: If `data` ends before `steps` steps.
        FloatingPointError: If a loss or a gradient is not finite and `on_nonfinite` is "raise", or
            `max_skipped` steps in a row were skipped.
        CheckpointError: If `checkpoint_dir` or a checkpoint can't be written, another run has the
            folder, it holds later steps than the run starts from, or none of the checkpoints there
            can be read.
        SystemExit: After SIGTERM.
    """
    loop, run = options_of(fit, LoopOptions, options), options_of(fit, Options, options)
    resume = checks.boolean("resume", resume)
    check_parts(model, loss_fn, optimizer, params)
    check_mesh(run.mesh)
    check_data("data", data, _ONE_BATCH)
    run = replace(run, mesh=run.mesh or default_mesh())
    assert run.mesh is not None
    processes = placed_on(run.mesh).processes
    with _series(loop, processes, resume=resume) as series:
        source = Source(data, saved=series is not None)
        # Drawn before anything is made: its shapes decide on all that follows, and it is trained
        # on.
        sample = _first_batch(source, run.microbatches, run.num_devices // processes.count)
        trainer = Trainer(
            model, loss_fn, optimizer, sample, params=params, progress=loop.progress, **vars(run)
        )
        # Nothing here holds them while the run lasts: they may be as large as the model.
        del params
        with handed_over(trainer):
            batches: Iterator[Any] = chain([sample], source)
            first, facts = 0, None
            if series is not None:
                source.first = batch_digest(sample)
                facts = series.resume(trainer) if resume else series.begin(trainer)
            if series is not None and facts is not None:
                shown = loop.progress and processes.is_first
                position = own_position(facts["data"], processes)
                path = series.folder / str(trainer.num_steps)
                if processes.is_first:
                    same_data = source.is_data_of(position)
                    _compare(path, facts, trainer, loop, series.num_converted, same_data=same_data)
                if shown:
                    remark = upgraded(facts.get("made_of"), trainer.made_of)
                    tqdm.write(f"Resumed from {path}.{remark}")
                source.go_to(position, shown)
                # The sample was the data's first batch, which the run has already trained on then.
                batches, first = source, source.count
            call = Run(trainer=trainer, source=source, first=first, counted_from=0)
            return call.train(batches, loop, series)


@shows(LoopOptions)
def train(trainer: Trainer, data: Iterable[Any], **options: Unpack[LoopArguments]) -> FitResult:
    """Trains on with a trainer; `fit` is `Trainer` followed by this.

    It ends as `fit` does: after Ctrl-C, after SIGTERM, and with an error.

    With `steps` it draws exactly that many batches, so that a second call on the same iterator
    goes on where the first one stopped. A run that Ctrl-C ended may have drawn one batch that it
    did not train on.

    Args:
        trainer: The trainer, new or used.
        data: See `fit`.
        steps: Number of further steps to take; None trains until `data` ends.
        eval_data: See `fit`.
        eval_every: See `fit`; steps are counted over the trainer's life. An evaluation that was due
            after the trainer's last step, and that Ctrl-C cut off, is made first.
        checkpoint_dir: See `fit`; nothing is resumed here, and no later steps may be there.
        checkpoint_every: See `fit`.
        keep: See `fit`.
        callbacks: See `fit`.
        progress: See `fit`.

    Returns:
        The trainer, all its state on the host, and its history.

    Raises:
        ValueError: See `fit`.
        TypeError: See `fit`.
        DataRanOutError: See `fit`.
        FloatingPointError: See `fit`.
    """
    loop = options_of(train, LoopOptions, options)
    check_trainer(trainer)
    check_data("data", data, _ONE_BATCH)
    with handed_over(trainer), _series(loop, trainer.processes, resume=False) as series:
        if series is not None:
            series.begin(trainer)
        source = Source(data, saved=series is not None)
        run = Run(trainer=trainer, source=source, first=0, counted_from=trainer.num_steps)
        return run.train(source, loop, series)


def _series(
    options: LoopOptions, processes: Processes, *, resume: bool
) -> AbstractContextManager[Checkpoints | None]:
    """The run's checkpoints, if it has any; processes differ in neither argument."""
    given = {"`checkpoint_dir`": options.checkpoint_dir is not None, "`resume`": resume}
    processes.agree("the run's arguments", lambda: given)
    if options.checkpoint_dir is None:
        return nullcontext()
    return Checkpoints(
        options.checkpoint_dir,
        options.checkpoint_every,
        options.keep,
        processes,
        options.steps if resume else None,
    )


def _compare(
    path: Path,
    facts: Mapping[str, Any],
    trainer: Trainer,
    loop: LoopOptions,
    num_converted: int,
    *,
    same_data: bool,
) -> None:
    """Warns of settings in which a run differs from the checkpoint that it goes on from."""
    finished = loop.steps is not None and trainer.num_steps >= loop.steps
    before, now = facts.get("made_of"), trainer.made_of
    line = differences(
        path, before, now, same_data=same_data, finished=finished, num_converted=num_converted
    )
    if line is not None:
        warnings.warn(line, stacklevel=3)


def _first_batch(source: Source, microbatches: int, num_devices: int) -> Any:
    """The first batch of the data, which a trainer is made from.

    Raises:
        ValueError: If there is none, or microbatches and devices can't share it.
        TypeError: If it is no pytree of arrays.
    """
    sample = next(source, _END)
    if sample is _END:
        raise ValueError(EMPTY)
    with numbered(1):
        check_batch(sample, microbatches, num_devices=num_devices)
    return sample
