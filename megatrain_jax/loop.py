"""The training loop: steps in flight, their records, evaluation and checkpoints.

The loop never waits for the step it has just dispatched: a step's metrics are read one step late,
so that the driver always has the next one ready while the device computes.
"""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tqdm.auto import tqdm

from megatrain_jax.batches import Prefetch, Source, batch_size
from megatrain_jax.checkpoint.folder import CheckpointError
from megatrain_jax.checkpoint.series import Checkpoints
from megatrain_jax.interrupt import deferred_interrupt
from megatrain_jax.options import EvalData, eval_batches
from megatrain_jax.result import EMPTY, DataRanOutError, FitResult
from megatrain_jax.trainer import Trainer

Callback = Callable[[Trainer, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call of `fit` or `train`: a trainer, and where its data is.

    Attributes:
        trainer: The trainer.
        source: The data.
        first: How many batches of the data came before the run's first step.
    """

    trainer: Trainer
    source: Source
    first: int

    def train(
        self,
        batches: Iterable[Any],
        steps: int | None,
        eval_data: EvalData | None,
        eval_every: int | None,
        series: Checkpoints | None,
        callbacks: Sequence[Callback],
        progress: bool,
    ) -> FitResult:
        """Trains on batches until they end or `steps` steps were done."""
        trainer = self.trainer
        before = trainer.num_steps
        interrupted = False
        with tqdm(total=steps, unit="step", disable=not progress) as bar, _terminable():
            save = Save(series, trainer, lambda: self._position(before))
            loop = Loop(trainer, eval_data, eval_every, save, callbacks, bar)
            try:
                try:
                    loop.run(Prefetch(islice(batches, steps)))
                except KeyboardInterrupt:
                    interrupted = loop.stopping = True
                    loop.finish(evaluate=False)
                if series is not None:
                    bar.set_description("saving")
                save.at_end()
                bar.set_description()
            except BaseException as error:
                save.give_up()
                if isinstance(error, CheckpointError):
                    error.result = self._result(interrupted)
                raise
            if progress and interrupted:
                bar.write(f"Interrupted after step {trainer.num_steps}{save.where}.")
        result = self._result(interrupted)
        done = trainer.num_steps - before
        if interrupted or done == steps or (steps is None and done):
            return result
        if not done:
            raise DataRanOutError(EMPTY, result)
        raise DataRanOutError(
            f"`data` ran out after {done} of `steps`={steps} batches. The steps done are kept: "
            "this error's `.result` holds the trainer and the history. Pass `steps=None` to train "
            "until the data ends, or data that repeats.",
            result,
        )

    def _position(self, before: int) -> dict[str, Any]:
        return self.source.position(self.first + self.trainer.num_steps - before)

    def _result(self, interrupted: bool) -> FitResult:
        trainer = self.trainer
        return FitResult(trainer=trainer, history=trainer.history, interrupted=interrupted)


@dataclass(frozen=True)
class Save:
    """When a run saves, if it does."""

    series: Checkpoints | None
    trainer: Trainer
    position: Callable[[], dict[str, Any]]

    def is_due(self, step: int) -> bool:
        """Whether to save after a step."""
        return self.series is not None and self.series.is_due(step)

    def now(self) -> None:
        """Begins to save."""
        assert self.series is not None
        self.series.save(self.trainer, self.position())

    def at_end(self) -> None:
        """Saves the last step, if it is not saved yet, and waits until it is whole."""
        if self.series is not None:
            if self.series.saved != self.trainer.num_steps:
                self.now()
            self.series.finish(self.trainer)

    def give_up(self) -> None:
        """Waits for what is being written, where another error is on its way."""
        if self.series is not None:
            self.series.finish_quietly(self.trainer)

    @property
    def where(self) -> str:
        """Where the last step is, for a message."""
        return "" if self.series is None else f", saved in {self.series.folder}"


@contextmanager
def _terminable() -> Iterator[None]:
    """Treats SIGTERM like Ctrl-C, also where that is ignored, as in the background of a shell."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A step that was dispatched and whose metrics were not read yet."""

    step: int
    metrics: dict[str, Any]
    size: int
    unit: str
    began: float


class Loop:
    """The steps in flight and where their records go."""

    def __init__(
        self,
        trainer: Trainer,
        eval_data: EvalData | None,
        eval_every: int | None,
        save: Save,
        callbacks: Sequence[Callback],
        bar: tqdm,
    ):
        """Starts with none in flight."""
        self.trainer = trainer
        self.save = save
        self.eval_data = eval_data
        self.eval_every = eval_every
        self.callbacks = callbacks
        self.bar = bar
        self.pending: deque[_Pending] = deque()
        self.stopping = False

    def run(self, batches: Prefetch) -> None:
        """Trains until `batches` ends, then completes every record."""
        for batch in batches:
            began = time.perf_counter()
            size, unit = batch_size(batch)
            # The two deferrals: an interrupt here would lose the metrics of a step that counts,
            # or kill a generator that the user wants to go on with.
            with self._finished_on(TypeError, ValueError), deferred_interrupt():
                metrics = self.trainer.step(batch)
                step = self.trainer.num_steps
                self.pending.append(
                    _Pending(step=step, metrics=metrics, size=size, unit=unit, began=began)
                )
            with self._finished_on(Exception), deferred_interrupt(insist=True):
                batches.fill()
            evaluate = self.eval_every is not None and step % self.eval_every == 0
            save = self.save.is_due(step)
            self.complete(keep=0 if evaluate or save else 1, evaluate=evaluate)
            if save:
                with self._finished_on(CheckpointError):
                    self.save.now()
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
            is_last = len(self.pending) == 1
            seconds = (time.perf_counter() if is_last else self.pending[1].began) - pending.began
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
            rate = f"{pending.size / seconds:,.0f} {pending.unit}/s"
            skipped = f", {n} skipped" if (n := self.trainer.num_skipped) else ""
            shown = f"loss {record['loss']:.4g}, {rate}{skipped}"
            self.bar.set_postfix_str(shown, refresh=False)
            self.bar.update()
            for callback in self.callbacks:
                # One that stops the run does so again for the steps that were still in flight.
                with suppress(*([KeyboardInterrupt] if self.stopping else [])):
                    callback(self.trainer, record)

    def _evaluate(self) -> dict[str, float]:
        assert self.eval_data is not None
        batches = eval_batches(self.eval_data)
        try:
            means = self.trainer.evaluate(batches)
        except Exception as error:
            error.add_note("This was raised by the evaluation of `eval_data`.")
            raise
        return {f"eval_{name}": value for name, value in means.items()}

    @contextmanager
    def _finished_on(self, *kinds: type[Exception]) -> Iterator[None]:
        # These errors come before anything of the new step ran, so the steps done can be kept.
        try:
            yield
        except kinds:
            self.finish(evaluate=False)
            raise
