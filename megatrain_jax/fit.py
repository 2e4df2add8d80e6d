"""The training loop: steps, progress, evaluation, history.

The loop never waits for the step it has just dispatched: a step's metrics are read one step late,
so that the driver always has the next one ready while the device computes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import optax
from tqdm.auto import tqdm

from megatrain_jax.data import Prefetch, batch_size, check_batch
from megatrain_jax.history import History
from megatrain_jax.interrupt import deferred_interrupt
from megatrain_jax.job import DeviceBudget
from megatrain_jax.precision import Precision
from megatrain_jax.trainer import Trainer

Callback = Callable[[Trainer, dict[str, Any]], None]
EvalData = Iterable[Any] | Callable[[], Iterable[Any]]

_DEFAULT_PRECISION = Precision()


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a training run leaves behind; in a notebook it shows its loss curve.

    Attributes:
        trainer: The trainer, with all its state on the host. Go on with `train`.
        history: One record a step, over the trainer's life.
        interrupted: Whether Ctrl-C ended the run.
    """

    trainer: Trainer
    history: History
    interrupted: bool

    @property
    def model(self) -> Any:
        """The user's model holding the trained parameters as host arrays."""
        return self.trainer.model

    @property
    def params(self) -> Any:
        """The trained parameters as host arrays, in the model's own structure."""
        return self.trainer.params

    def __repr__(self) -> str:
        """Says how far the run came, instead of printing every record."""
        loss = f"{self.history[-1]['loss']:.6g}" if self.history else "none"
        return (
            f"FitResult(steps={self.trainer.num_steps}, loss={loss}, "
            f"interrupted={self.interrupted})"
        )

    def _repr_png_(self) -> bytes | None:
        return self.history._repr_png_()


class DataRanOutError(ValueError):
    """`data` ended before `steps` steps were done.

    Attributes:
        result: The `FitResult` of the steps that were done; nothing of them is lost.
    """

    def __init__(self, message: str, result: FitResult):
        """Holds the result, so that `fit` loses no trained state by raising."""
        super().__init__(message)
        self.result = result


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
    seed: int = 0,
    eval_data: EvalData | None = None,
    eval_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> FitResult:
    """Trains a model whose state lives in pinned host memory.

    Ctrl-C ends the run after the step at hand and returns what was trained so far. To go on after
    it, or after `steps`, call `train` with the result's trainer.

    Args:
        model: An `nnx.Module`, a function of no arguments that builds one, a
            `flax.linen.Module`, or a pytree of arrays.
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``, giving a scalar loss
            or ``(loss, metrics)``.
        data: An iterable of batches. A batch is a pytree of arrays with a leading axis of
            examples; the first one sets the structure and the dtypes.
        optimizer: An Optax gradient transformation.
        steps: How many batches to train on; None trains until `data` ends.
        microbatches: Into how many equal parts each batch is cut.
        precision: Which dtype the masters have and which one computes.
        device_budget: Bytes of device memory that state may occupy, "least", or None for what the
            device has left; see `Trainer`.
        seed: Seed of a Linen module's parameters and of the keys `loss_fn` gets.
        eval_data: Batches to evaluate on, or a function that returns them; they are iterated over
            anew each time.
        eval_every: Evaluate after each step whose number this divides. The run's end is always
            evaluated where there is `eval_data`.
        callbacks: Called in order as ``callback(trainer, record)`` with each complete record.
            Records are read late, so the trainer may have dispatched one step more than the
            record's. A callback ends the run early by raising `KeyboardInterrupt`.
        progress: Whether to show a progress bar; without it nothing is printed.

    Returns:
        The trainer and its history.

    Raises:
        ValueError: If `data` is empty, a batch does not fit, or the options contradict each other.
        TypeError: If `data` or `eval_data` is not what it should be.
        DataRanOutError: If `data` ends before `steps` steps; it holds the result of those done.
        FloatingPointError: If a loss or a gradient is not finite.
    """
    _check_options(data, steps, eval_data, eval_every)
    batches = iter(data)
    try:
        sample = next(batches)
    except StopIteration:
        raise ValueError(_EMPTY) from None
    check_batch(sample, microbatches)
    trainer = Trainer(
        model,
        loss_fn,
        optimizer,
        sample,
        microbatches=microbatches,
        precision=precision,
        device_budget=device_budget,
        seed=seed,
    )
    return train(
        trainer,
        chain([sample], batches),
        steps=steps,
        eval_data=eval_data,
        eval_every=eval_every,
        callbacks=callbacks,
        progress=progress,
    )


def train(
    trainer: Trainer,
    data: Iterable[Any],
    *,
    steps: int | None = None,
    eval_data: EvalData | None = None,
    eval_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> FitResult:
    """Trains on with a trainer; `fit` is `Trainer` followed by this.

    With `steps` it draws exactly that many batches, so that a second call on the same iterator
    goes on where the first one stopped. A run that Ctrl-C ended may have drawn one batch that it
    did not train on.

    Args:
        trainer: The trainer, new or used.
        data: See `fit`.
        steps: How many further steps to take; None trains until `data` ends.
        eval_data: See `fit`.
        eval_every: See `fit`; steps are counted over the trainer's life.
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
    _check_options(data, steps, eval_data, eval_every)
    before = trainer.num_steps
    interrupted = False
    with tqdm(total=steps, unit="step", disable=not progress) as bar:
        loop = _Loop(trainer, eval_data, eval_every, callbacks, bar)
        try:
            loop.run(Prefetch(islice(data, steps)))
        except KeyboardInterrupt:
            interrupted = loop.stopping = True
            loop.finish(evaluate=False)
            if progress:
                bar.write(f"Interrupted after step {trainer.num_steps}.")
    result = FitResult(trainer=trainer, history=trainer.history, interrupted=interrupted)
    done = trainer.num_steps - before
    if interrupted or done == steps or (steps is None and done):
        return result
    if not done:
        raise DataRanOutError(_EMPTY, result)
    raise DataRanOutError(
        f"`data` ran out after {done} of `steps`={steps} batches. The steps done are kept: this "
        "error's `.result` holds the trainer and the history. Pass `steps=None` to train until "
        "the data ends, or data that repeats.",
        result,
    )


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A step that was dispatched and whose metrics were not read yet."""

    step: int
    metrics: dict[str, Any]
    size: int
    unit: str


class _Loop:
    """One call of `train`: the steps in flight and where their records go."""

    def __init__(
        self,
        trainer: Trainer,
        eval_data: EvalData | None,
        eval_every: int | None,
        callbacks: Sequence[Callback],
        bar: tqdm,
    ):
        self.trainer = trainer
        self.eval_data = eval_data
        self.eval_every = eval_every
        self.callbacks = callbacks
        self.bar = bar
        self.pending: deque[_Pending] = deque()
        self.clock = time.perf_counter()
        self.stopping = False

    def run(self, batches: Prefetch) -> None:
        """Trains until `batches` ends, then completes every record."""
        for batch in batches:
            size, unit = batch_size(batch)
            # The two deferrals: an interrupt here would lose the metrics of a step that counts,
            # or kill a generator that the user wants to go on with.
            with self._finished_on(TypeError, ValueError), deferred_interrupt():
                metrics = self.trainer.step(batch)
                step = self.trainer.num_steps
                self.pending.append(_Pending(step=step, metrics=metrics, size=size, unit=unit))
            with self._finished_on(Exception), deferred_interrupt(insist=True):
                batches.fill()
            evaluate = self.eval_every is not None and step % self.eval_every == 0
            self.complete(keep=0 if evaluate else 1, evaluate=evaluate)
        self.finish(evaluate=self.eval_data is not None)

    def finish(self, *, evaluate: bool) -> None:
        """Completes every record and brings all state to rest on the host."""
        self.complete(keep=0, evaluate=evaluate)
        with deferred_interrupt():
            self.trainer.flush()

    def complete(self, *, keep: int, evaluate: bool) -> None:
        """Completes the oldest records until only `keep` steps are unread.

        Args:
            keep: How many steps stay in flight.
            evaluate: Whether to evaluate with the last one; then none may stay in flight.
        """
        assert not (evaluate and keep)
        while len(self.pending) > keep:
            pending = self.pending[0]
            metrics = self.trainer.read(pending.metrics)
            now = time.perf_counter()
            seconds, self.clock = now - self.clock, now
            record: dict[str, Any] = {
                "step": pending.step,
                "loss": metrics["loss"],
                **metrics,
                "seconds": seconds,
            }
            self.trainer.history.append(record)
            self.pending.popleft()
            if evaluate and not self.pending:
                record.update(self._evaluate())
                self.clock = time.perf_counter()
            rate = f"{pending.size / seconds:,.0f} {pending.unit}/s"
            self.bar.set_postfix_str(f"loss {record['loss']:.4g}, {rate}", refresh=False)
            self.bar.update()
            for callback in self.callbacks:
                # One that stops the run does so again for the steps that were still in flight.
                with suppress(*([KeyboardInterrupt] if self.stopping else [])):
                    callback(self.trainer, record)

    def _evaluate(self) -> dict[str, float]:
        data = self.eval_data
        assert data is not None
        batches = data if isinstance(data, Iterable) else data()
        means = self.trainer.evaluate(batches)
        return {f"eval_{name}": value for name, value in means.items()}

    @contextmanager
    def _finished_on(self, *kinds: type[Exception]) -> Iterator[None]:
        # These errors come before anything of the new step ran, so the steps done can be kept.
        try:
            yield
        except kinds:
            self.finish(evaluate=False)
            raise


_EMPTY = (
    "`data` gave no batch: it is empty, or an iterator that was used up before (a generator can "
    "be iterated over only once)"
)


def _check_options(
    data: Any, steps: int | None, eval_data: EvalData | None, eval_every: int | None
) -> None:
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise TypeError(
            f"`data` must be an iterable of batches, but is of type {type(data).__name__}; to "
            "train on one batch, pass itertools.repeat(batch) and `steps`"
        )
    for name, value in (("steps", steps), ("eval_every", eval_every)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value}")
    if eval_data is None:
        if eval_every is not None:
            raise ValueError(f"`eval_every`={eval_every} needs `eval_data`")
    elif isinstance(eval_data, Iterator):
        raise TypeError(
            "`eval_data` is an iterator, which can be used only once, but each evaluation goes "
            "through it anew: pass a list, or a function that returns a new iterator"
        )
    elif isinstance(eval_data, Mapping) or not isinstance(eval_data, Iterable | Callable):
        raise TypeError(
            "`eval_data` must be an iterable of batches or a function that returns one, but is of "
            f"type {type(eval_data).__name__}"
        )
