"""Trains a model in one call."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from os import PathLike
from typing import Any

import optax
from tqdm.auto import tqdm

from megatrain_jax._src.build.batches import check_batch
from megatrain_jax._src.build.options import (
    DeviceBudget,
    EvalData,
    LoopOptions,
    OnNonfinite,
    RunOptions,
    Trainable,
    check_data,
    check_parts,
    check_trainer,
)
from megatrain_jax._src.build.precision import Precision
from megatrain_jax._src.train.loop import Callback
from megatrain_jax._src.train.result import EMPTY, FitResult, handed_over
from megatrain_jax._src.train.run import Run
from megatrain_jax._src.train.series import Checkpoints
from megatrain_jax._src.train.source import Source, numbered
from megatrain_jax._src.trainer import Trainer

_DEFAULT_PRECISION = Precision()
_ONE_BATCH = "to train on one batch, pass itertools.repeat(batch) and `steps`"


def fit(
    model: Any,
    loss_fn: Callable[..., Any],
    data: Iterable[Any],
    optimizer: optax.GradientTransformation,
    *,
    steps: int | None = None,
    microbatches: int = 1,
    precision: Precision = _DEFAULT_PRECISION,
    device_budget: DeviceBudget = None,
    params: Any = None,
    trainable: Trainable = None,
    on_nonfinite: OnNonfinite = "raise",
    max_skipped: int = 10,
    seed: int = 0,
    eval_data: EvalData | None = None,
    eval_every: int | None = None,
    checkpoint_dir: str | PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    resume: bool = True,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
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
        steps: How many batches to train on, those before a checkpoint included; None trains until
            `data` ends.
        microbatches: Into how many equal parts each batch is cut.
        precision: Which dtype the masters have and which one computes.
        device_budget: Bytes of device memory that state may occupy, "least", or None for what the
            device has left; see `Trainer`.
        params: Parameters to start from, a tree of arrays or a checkpoint's folder; see `Trainer`.
            A run that resumes has its own.
        trainable: Which parameters are trained, as a regular expression on their paths or a
            function of the path; None trains all. See `Trainer`.
        on_nonfinite: What to do if a loss or a gradient is not finite: "raise", or "skip" the step,
            which leaves parameters and optimizer state as they were; see `Trainer`.
        max_skipped: How many steps in a row may be skipped; see `Trainer`.
        seed: Seed of a Linen module's parameters and of the keys `loss_fn` gets.
        eval_data: Batches to evaluate on, or a function that returns them, called for each
            evaluation and not before; they are iterated over anew each time.
        eval_every: Evaluate after each step whose number this divides. The run's end is always
            evaluated where there is `eval_data`.
        checkpoint_dir: Folder of the run's checkpoints, one subfolder a step, each an ordinary
            Orbax checkpoint. The last step is always saved. On a local or mounted disk; no other
            run can write there meanwhile.
        checkpoint_every: Save after each step whose number this divides. Training goes on while
            a checkpoint is written.
        keep: How many checkpoints to keep, the newest ones.
        resume: Whether to go on from the newest whole checkpoint in `checkpoint_dir`, with the
            batch that came after it: `data` is put there by `set_state` if its iterator has that
            (Grain), or else by skipping the batches that were used. Newer checkpoints that can't
            be read are renamed. Without it, `checkpoint_dir` must hold no steps yet.
        callbacks: Called in order as ``callback(trainer, record)`` with each complete record.
            Records are read late, so the trainer may have dispatched one step more than the
            record's. A callback ends the run early by raising `KeyboardInterrupt`.
        progress: Whether to show a progress bar; without it nothing is printed, but that a signal
            ended the run.

    Returns:
        The trainer and its history.

    Raises:
        ValueError: If `data` is empty, a batch does not fit, an option is out of its range, or the
            options contradict each other.
        TypeError: If an argument is of another type than it should be.
        DataRanOutError: If `data` ends before `steps` steps.
        FloatingPointError: If a loss or a gradient is not finite and `on_nonfinite` is "raise", or
            `max_skipped` steps in a row were skipped.
        CheckpointError: If `checkpoint_dir` or a checkpoint can't be written, another run has the
            folder, it holds later steps than the run starts from, or none of the checkpoints there
            can be read.
        SystemExit: After SIGTERM.
    """
    options = LoopOptions(
        steps=steps,
        eval_data=eval_data,
        eval_every=eval_every,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        callbacks=callbacks,
        progress=progress,
    )
    shape = RunOptions(
        microbatches=microbatches,
        precision=precision,
        device_budget=device_budget,
        trainable=trainable,
        on_nonfinite=on_nonfinite,
        max_skipped=max_skipped,
        seed=seed,
    )
    check_parts(model, loss_fn, optimizer, params)
    check_data("data", data, _ONE_BATCH)
    with _series(options) as series:
        source = Source(data)
        try:
            sample = next(source)
        except StopIteration:
            raise ValueError(EMPTY) from None
        with numbered(1):
            check_batch(sample, shape.microbatches)
        trainer = Trainer(
            model,
            loss_fn,
            optimizer,
            sample,
            microbatches=microbatches,
            precision=precision,
            device_budget=device_budget,
            params=params,
            trainable=trainable,
            on_nonfinite=on_nonfinite,
            max_skipped=max_skipped,
            seed=seed,
            progress=progress,
        )
        del params
        with handed_over(trainer):
            facts = None
            if series is not None:
                facts = series.resume(trainer) if options.resume else series.begin(trainer)
            batches: Iterator[Any] = chain([sample], source)
            first = 0
            if series is not None and facts is not None:
                if options.progress:
                    tqdm.write(f"Resumed from {series.folder / str(trainer.num_steps)}.")
                source.go_to(facts["data"], options.progress)
                batches, first = source, source.count
            run = Run(trainer=trainer, source=source, first=first, counted_from=0)
            return run.train(batches, options, series)


def train(
    trainer: Trainer,
    data: Iterable[Any],
    *,
    steps: int | None = None,
    eval_data: EvalData | None = None,
    eval_every: int | None = None,
    checkpoint_dir: str | PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> FitResult:
    """Trains on with a trainer; `fit` is `Trainer` followed by this.

    It ends as `fit` does: after Ctrl-C, after SIGTERM, and with an error.

    With `steps` it draws exactly that many batches, so that a second call on the same iterator
    goes on where the first one stopped. A run that Ctrl-C ended may have drawn one batch that it
    did not train on.

    Args:
        trainer: The trainer, new or used.
        data: See `fit`.
        steps: How many further steps to take; None trains until `data` ends.
        eval_data: See `fit`.
        eval_every: See `fit`; steps are counted over the trainer's life.
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
    options = LoopOptions(
        steps=steps,
        eval_data=eval_data,
        eval_every=eval_every,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        keep=keep,
        callbacks=callbacks,
        progress=progress,
    )
    check_trainer(trainer)
    check_data("data", data, _ONE_BATCH)
    with handed_over(trainer), _series(options) as series:
        if series is not None:
            series.begin(trainer)
        source = Source(data)
        run = Run(trainer=trainer, source=source, first=0, counted_from=trainer.num_steps)
        return run.train(source, options, series)


def _series(options: LoopOptions) -> AbstractContextManager[Checkpoints | None]:
    if options.checkpoint_dir is None:
        return nullcontext()
    return Checkpoints(options.checkpoint_dir, options.checkpoint_every, options.keep)
