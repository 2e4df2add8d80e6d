"""The training loop: steps in flight, their records, evaluation and checkpoints.

The loop never waits for the step it has just dispatched. A step's metrics are read one step late,
so the driver always has the next step ready while the device computes:

    step 7 is dispatched    batch 8 is drawn    step 6 is read; its record goes to the callbacks
    step 8 is dispatched    batch 9 is drawn    step 7 is read; ...
    step 9, to be saved     batch 10 is drawn   steps 8 and 9 are read, then 9 is saved
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatrain_jax._src.common.activity import doing
from megatrain_jax._src.common.errors import call_all, noting
from megatrain_jax._src.common.progress import tell_phase, tqdm
from megatrain_jax._src.engine.adapt.loss_function import EVAL_PREFIX
from megatrain_jax._src.engine.history import History
from megatrain_jax._src.engine.options.batch_checks import batch_size
from megatrain_jax._src.engine.options.inputs import eval_batches
from megatrain_jax._src.engine.options.options import LoopOptions
from megatrain_jax._src.engine.runtime.interrupt import Signals, deferred_interrupt
from megatrain_jax._src.engine.runtime.training import TooManySkippedError
from megatrain_jax._src.engine.train.result import FitResult
from megatrain_jax._src.engine.train.series import RunCheckpoints
from megatrain_jax._src.engine.train.source import Prefetch, first_evaluation, naming_evaluation
from megatrain_jax._src.engine.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A dispatched step with metrics that have not been read yet.

    Attributes:
        step: Number of the step, from 1.
        metrics: The step's metrics on the device.
        size: Number of examples or tokens in its batch.
        unit: The unit of `size`, such as "tokens".
        began: The time of its dispatch, in seconds of `time.perf_counter`.
    """

    step: int
    metrics: dict[str, Any]
    size: int
    unit: str
    began: float


@dataclass(frozen=True, kw_only=True)
class _Report:
    """A complete record, and the callbacks that have not got it yet.

    Attributes:
        record: The record.
        rate: The step's rate, in words, for the progress bar; None if the bar has shown it.
        left: The callbacks, in order.
    """

    record: dict[str, Any]
    rate: str | None
    left: deque[Any]


def is_unevaluated(history: History, options: LoopOptions) -> bool:
    """Whether there is evaluation data, but the last step has not been evaluated."""
    evaluated = any(name.startswith(EVAL_PREFIX) for record in history[-1:] for name in record)
    return options.eval_data is not None and bool(history) and not evaluated


def slowest_of(seconds: Sequence[float]) -> dict[str, float]:
    """What a record says of the processes' own seconds; nothing of a single process."""
    if len(seconds) < 2:
        return {}
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return {"slowest_process": float(slowest), "slowest_seconds": seconds[slowest]}


class Loop:
    """The training loop of one run: its steps in flight, and their records.

    A signal never separates two actions that belong together: dispatching a step and adding it to
    the steps in flight, or reading a record and adding it to the history. A second signal
    interrupts user code that may hang (drawing a batch or an evaluation batch).
    """

    def __init__(
        self,
        trainer: Trainer,
        options: LoopOptions,
        series: RunCheckpoints | None,
        position: Callable[[], dict[str, Any] | None],
        bar: tqdm,
        signals: Signals,
    ):
        """Makes a loop with no step in flight.

        Args:
            trainer: The trainer; its history receives the records.
            options: The run's options: callbacks, evaluation, checkpoints.
            series: The run's checkpoints; None if it has no folder for them.
            position: Returns the data's position after the trainer's last step; None if unknown.
            bar: Progress bar, advanced with each record.
            signals: The run's signals; `ending` stops the loop between two steps.
        """
        self.trainer = trainer
        self.options = options
        self.series, self._position = series, position
        self._has_evaluated = False
        self.callbacks = options.callbacks
        self.begun: list[Any] = []
        self.first_evaluation: Iterable[Any] | None = None  # the batches of the first evaluation
        self.bar = bar
        self.signals = signals
        self.pending: deque[_Pending] = deque()
        self._by_process: dict[int, list[float]] = {}  # seconds of the processes, by step
        # Complete records that some callbacks have not got yet; if a signal or a callback's error
        # leaves some here, the run's end reports them.
        self.unreported: deque[_Report] = deque()
        self._is_in_callback = self._is_taken = False

    def begin(self) -> None:
        """Calls `begin` of all callbacks that have it."""
        for callback in self.callbacks:
            # Added first, so that its `end` is called even if its own `begin` fails.
            self.begun.append(callback)
            self._call(callback, getattr(callback, "begin", None), self.trainer)

    def end(self, result: FitResult) -> None:
        """Calls `end` of all begun callbacks that have it.

        Raises:
            Exception: The first error of a callback, after all have been called.
        """

        def calls() -> Iterator[Callable[[], None]]:
            while self.unreported:
                yield self._report
            for callback in self.begun:
                yield partial(self._call, callback, getattr(callback, "end", None), result)

        call_all(calls())

    def check_eval_data(self, drawn: tuple[Any, Iterable[Any]] | None) -> None:
        """Checks the first batch of `eval_data`, because an evaluation may come hours later.

        Args:
            drawn: The `first_evaluation`, if it was needed before.

        Raises:
            Exception: If there is no batch, or it can't be evaluated.
        """
        if self.options.eval_data is None:
            return
        which = self.options.eval_params
        if which == "ema" and self.trainer.run_state.spec.options.ema_decay is None:
            raise ValueError(f"`eval_params`={which!r} needs `ema_decay`: the run keeps no average")
        with naming_evaluation():
            first, self.first_evaluation = drawn or first_evaluation(self.options.eval_data)
            names = self.trainer.check_eval_batch(first, params=self.options.eval_params)
            self.options.check_metrics(names, EVAL_PREFIX)
        if self.trainer.processes.is_first:
            self.options.warn_of_training_metrics(names)

    def run(self, batches: Prefetch) -> None:
        """Trains until `batches` end, and completes every record.

        Raises:
            KeyboardInterrupt: If a signal came, or a callback raised it.
        """
        on_cpu, told = self.trainer.devices[0].platform == "cpu", False
        for batch in batches:
            if not told:
                compiles = ", which compiles its functions" if on_cpu else ""
                self._tell(f"step {self.trainer.num_steps + 1}{compiles} ...")
                told = True
            began = time.perf_counter()
            size, unit = batch_size(batch)
            with deferred_interrupt():
                metrics = self.trainer.dispatch(batch)
                step = self.trainer.num_steps
                self.pending.append(
                    _Pending(step=step, metrics=metrics, size=size, unit=unit, began=began)
                )
            # The first signal does not interrupt this, because an exception inside a generator ends
            # it, and the user may want to reuse it.
            with deferred_interrupt(second_interrupts=True):
                batches.fill()
            self._by_process[step] = batches.seconds
            every = self.options.eval_every
            due = every is not None and step % every == 0
            # If exhausted after `fill`, this was the last batch, and the end of a run is always
            # evaluated.
            evaluate = self.options.eval_data is not None and (due or batches.exhausted)
            # Both need the numbers of this very step, so no step stays in flight then.
            save = self.series is not None and self.series.is_due(step)
            self.complete(keep=0 if evaluate or save else 1, evaluate=evaluate)
            if save:
                with deferred_interrupt():
                    self.save()
            if self.signals.ending:  # a callback swallowed the `KeyboardInterrupt`
                raise KeyboardInterrupt
        self.complete(keep=0)

    def save(self) -> None:
        """Starts saving the trainer's state; training may continue meanwhile."""
        assert self.series is not None
        self.series.save(self.trainer, self._position())

    def evaluate_cut_off(self) -> None:
        """Repeats an evaluation that was due after the last step, when a run continues.

        A signal may have cut it off. Callbacks get the record again, now with the evaluation,
        because this may be the best checkpoint.
        """
        every, history = self.options.eval_every, self.trainer.history
        if every is None or not is_unevaluated(history, self.options):
            return
        if (record := history[-1])["step"] % every == 0:
            record.update(self._evaluate())
            self.unreported.append(_Report(record=record, rate=None, left=deque(self.callbacks)))
            self._report()

    def evaluate_finished(self) -> None:
        """Evaluates the last step of a run that had already finished, unless it was evaluated.

        Callbacks have seen its record, and its checkpoint stays unchanged.
        """
        if is_unevaluated(self.trainer.history, self.options):
            self.trainer.history[-1].update(self._evaluate())

    def take_over(self) -> None:
        """Lets a thread finish in place of the main thread, which the user's code holds.

        Callbacks may hang, too: they get the last records after the last step is saved. If one of
        them holds the main thread, none is called any more.
        """
        self._is_taken = True
        if self._is_in_callback:
            self.callbacks, self.begun = (), []

    def finish(self) -> None:
        """Completes every record, without evaluating, and moves all state to the host.

        Raises:
            Exception: The first error of a step or a callback, after all are told all records.
        """

        def read() -> None:
            try:
                while self.pending:
                    with deferred_interrupt():
                        self._read_oldest()
            finally:
                with deferred_interrupt():
                    self.trainer.flush()

        def calls() -> Iterator[Callable[[], None]]:
            yield read
            while self.unreported and not self._is_taken:
                yield self._report

        call_all(calls())

    def complete(self, *, keep: int, evaluate: bool = False) -> None:
        """Completes and reports the oldest records until only `keep` steps are unread.

        Args:
            keep: Number of steps that stay in flight.
            evaluate: Whether to evaluate with the last one; then none may stay in flight.
        """
        # An evaluation belongs to the step just before it: no later step may have changed the
        # state.
        assert not (evaluate and keep)
        self._report()
        while len(self.pending) > keep:
            with deferred_interrupt():
                record = self._read_oldest()
            if evaluate and not self.pending:
                record.update(self._evaluate())
            self._report()

    def _read_oldest(self) -> dict[str, Any]:
        pending, ended_by = self.pending[0], None
        try:
            metrics = self.trainer.read(pending.metrics)
        except TooManySkippedError as error:
            ended_by = error
            metrics = self.trainer.read(pending.metrics)  # this step still gets a record
        except FloatingPointError:
            self.pending.clear()  # steps dispatched after that one had no effect
            raise
        self.pending.popleft()
        # A step lasts until the next one is dispatched. As the driver waits for the device, the
        # mean over many steps is the device's time.
        following = self.pending[0].began if self.pending else time.perf_counter()
        seconds = following - pending.began
        record = {"step": pending.step, "loss": metrics["loss"], **metrics, "seconds": seconds}
        record |= slowest_of(self._by_process.pop(pending.step, []))
        self.trainer.history.append(record)
        rate = f"{pending.size / seconds:,.0f} {pending.unit}/s"
        self.unreported.append(_Report(record=record, rate=rate, left=deque(self.callbacks)))
        if ended_by is not None:
            raise ended_by
        return record

    def _report(self) -> None:
        """Shows complete records and passes them to the callbacks."""
        while self.unreported:
            report = self.unreported[0]
            if report.rate is not None:
                skipped = f", {n} skipped" if (n := self.trainer.num_skipped) else ""
                shown = f"loss {report.record['loss']:.4g}, {report.rate}{skipped}"
                self.bar.set_postfix_str(shown, refresh=False)
                self.bar.update()
                self.unreported[0] = report = replace(report, rate=None)
            # One that raises leaves the others to the run's end, which reports the rest to them.
            while report.left:
                callback = report.left.popleft()
                if any(callback is one for one in self.callbacks):
                    self._call(callback, callback, self.trainer, report.record)
            self.unreported.popleft()

    def _call(self, callback: Any, function: Callable[..., None] | None, *arguments: Any) -> None:
        """Calls a callback's function, if any, and checks that it did not move the trainer."""
        if function is None:
            return
        before = self.trainer.num_steps
        try:
            # A callback that stops the run would do so again for the steps that were still in
            # flight.
            name = getattr(function, "__qualname__", type(function).__qualname__)
            self._is_in_callback = True
            waits = getattr(callback, "signals_wait", False)
            with (
                suppress(*([KeyboardInterrupt] if self.signals.ending else [])),
                doing(f"in the callback {name}", of_user=True),
                deferred_interrupt(second_interrupts=True) if waits else nullcontext(),
            ):
                function(*arguments)
        except Exception:
            # It must not run into this error again.
            self.callbacks = tuple(one for one in self.callbacks if one is not callback)
            raise
        finally:
            self._is_in_callback = False
        if self.trainer.num_steps != before:
            self.callbacks = ()  # the state is no longer that of the records
            raise RuntimeError(
                f"a callback has moved the trainer from step {before} to "
                f"{self.trainer.num_steps} while it is trained. To step, restore or train by "
                "hand, end the run by raising KeyboardInterrupt, and go on with its result."
            )

    def _tell(self, phase: str) -> None:
        tell_phase(phase, self.options.progress and self.trainer.processes.is_first)

    def _evaluate(self) -> dict[str, float]:
        assert self.options.eval_data is not None
        if not self._has_evaluated:
            self._tell("the first evaluation, which compiles its functions ...")
            self._has_evaluated = True
        batches, self.first_evaluation = self.first_evaluation, None
        if batches is None:
            batches = eval_batches(self.options.eval_data)
        history = self.trainer.history
        history.cut_off = self.trainer.num_steps  # reset when the evaluation completes
        with noting("This was raised by the evaluation of `eval_data`."):
            means = self.trainer.evaluate(batches, params=self.options.eval_params)
        history.cut_off = None
        return {EVAL_PREFIX + name: value for name, value in means.items()}
