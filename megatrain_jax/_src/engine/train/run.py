"""One call of `fit` or `train`: runs the loop, and ends the run properly for every cause.

A run may end with all steps done, with data that ran out, by a callback's `StopTraining`, by a
signal, by an error here or in another process. In each case the same steps follow, in this order:

1. The loop stops. If several processes share the run, all learn of the cause.
2. Steps in flight are completed and their records reported; all state moves to the host.
3. The last step is saved, if the run has a checkpoint folder.
4. Callbacks' `end` is called, so they find the last step saved.
5. The result is returned, or the error raised with the result attached; after SIGTERM the process
   exits.

From the moment the loop stops, signals are only counted, because they ask for the save that is
under way. Only a third Ctrl-C gives up the save. If the user's code holds the main thread, another
one does all this in its place, and ends the process; see `watch.py`.

Example, one process with a checkpoint folder: SIGTERM arrives during step 7. Step 7 is completed,
its record goes to the callbacks, `checkpoints/7` is written, callbacks end, and the process exits
with status 143.
"""

import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jax

from megatrain_jax._src.common.activity import HERE
from megatrain_jax._src.common.progress import tqdm
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.options.options import LoopOptions
from megatrain_jax._src.engine.runtime.interrupt import Signals
from megatrain_jax._src.engine.runtime.watch import TERMINATED, Watch
from megatrain_jax._src.engine.state.placement import device_count_text
from megatrain_jax._src.engine.state.processes import PeerEndedError, Processes
from megatrain_jax._src.engine.train.loop import Loop, is_unevaluated
from megatrain_jax._src.engine.train.result import (
    EMPTY,
    DataRanOutError,
    FitResult,
    StopTraining,
    result_of,
)
from megatrain_jax._src.engine.train.series import RunCheckpoints
from megatrain_jax._src.engine.train.source import Prefetch, Source, is_state, joined_positions
from megatrain_jax._src.engine.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call of `fit` or `train`: a trainer, and the position of its data.

    Attributes:
        trainer: The trainer.
        source: The user's data.
        first: Number of the data's batches before the run's first step.
        counted_from: The trainer's step from which `steps` are counted.
    """

    trainer: Trainer
    source: Source
    first: int
    counted_from: int

    def train(
        self,
        batches: Iterable[Any],
        options: LoopOptions,
        series: RunCheckpoints | None,
        evaluation: tuple[Any, Iterable[Any]] | None = None,
    ) -> FitResult:
        """Trains until the batches end or all steps are done, then saves the last step.

        For every cause of the end, the steps in flight are completed and the last one is saved
        before the error is raised or, after SIGTERM, the process exits.

        Args:
            batches: The batches to train on.
            options: The options of the loop.
            series: The run's checkpoints, if it has any.
            evaluation: The `first_evaluation`, if it is drawn already.
        """
        trainer, processes = self.trainer, self.trainer.processes
        process_id = os.getpid()
        trainer.add_end_tokens(self.source.end_tokens)
        before, steps = trainer.num_steps, options.steps
        progress = options.progress and processes.is_first
        processes.agree("the beginning of training", lambda: options.agreed_options)
        # A resumed `fit` counts from 0, so steps before the checkpoint count as done.
        left = None if steps is None else max(0, steps - (before - self.counted_from))
        if left == 0 and not (self.first and is_unevaluated(trainer.history, options)):
            return result_of(trainer, None, all_steps=True)
        if series is not None:
            series.check_writable()
        error: BaseException | None = None
        shown = {"desc": _bar_text(trainer, progress), "unit": "step", "disable": not progress}
        with (
            Signals() as signals,
            Watch(signals, processes, options.stall_seconds) as watch,
            tqdm(total=self._total(left), **shown) as bar,
        ):

            def told(raised: BaseException) -> BaseException:
                # In a process forked by a callback: the run belongs to the parent, and so do the
                # threads that write checkpoints.
                if os.getpid() != process_id:
                    raise raised
                # The remaining processes learn of it before they wait for this one, and end, too.
                return _tell_peers(raised, processes, signals)

            position = partial(self._position, before)
            loop = Loop(trainer, options, series, position, bar, signals)
            has_stopped = False

            def take_over(raised: BaseException) -> None:
                what, _ = HERE.doing
                signals.ending = True
                loop.take_over()
                late = error if has_stopped else told(raised)
                late = self._finish_run(loop, late, before, watch)
                found = result_of(trainer, late, signals.names, all_steps=steps is not None)
                _tell_ending(found, late, signals, series, shown=processes.is_first)
                if not _returns_result(late):
                    _tell_error(late)
                if series is not None:
                    series.release()
                processes.end_held(f"it was {what}, which can't be interrupted")

            watch.take_over = take_over
            try:
                try:
                    # Not earlier: a signal before the `try` would end the run without a result.
                    signals.begin()
                    # `islice` accepts no larger number.
                    some = batches if left is None else islice(batches, min(left, sys.maxsize))
                    loop.check_eval_data(evaluation)
                    loop.begin()
                    # A checkpoint without an evaluation doesn't tell whether one was begun.
                    if left != 0 and (self.first or trainer.history.cut_off == before):
                        loop.evaluate_cut_off()
                    loop.run(Prefetch(some, trainer.check_batch, processes, self.first))
                    # A finished run may be called again with evaluation data.
                    if self.first and trainer.num_steps == before:
                        loop.evaluate_finished()
                except BaseException as raised:
                    error = told(raised)
                # From here on signals are only counted, because the save that they ask for follows.
                signals.ending = True
            except KeyboardInterrupt as late:  # of a signal that came since
                error = error or told(late)
            has_stopped = True
            insisted: KeyboardInterrupt | None = None
            try:
                error = self._finish_run(loop, error, before, watch)
            # The third signal aborts the save.
            except KeyboardInterrupt as third:
                insisted = third
        result = result_of(trainer, error, signals.names, all_steps=steps is not None)
        is_shown = progress or (signals.has_received and processes.is_first)
        _tell_ending(result, error, signals, None if insisted else series, shown=is_shown)
        # Last of all, as SIGTERM itself would do.
        if signals.terminates:
            if not _returns_result(error):
                _tell_error(error)  # the exit shows no cause
            raise SystemExit(TERMINATED) from error
        if insisted is not None:
            raise insisted
        if not _returns_result(error):
            assert error is not None
            raise error
        signals.call_previous_handler()
        return result

    def _total(self, left: int | None) -> int | None:
        """The total of the progress bar; without `steps`, from the data's length."""
        length = self.source.length
        return left if left is not None or length is None else max(0, length - self.first)

    def _finish_run(
        self, loop: Loop, error: BaseException | None, before: int, watch: Watch
    ) -> BaseException | None:
        """Completes the steps in flight, saves the last one, and calls the callbacks' `end`.

        Returns:
            The error that the run ends with.
        """
        trainer, processes = self.trainer, self.trainer.processes
        series, signals, steps = loop.series, loop.signals, loop.options.steps
        if processes.unreachable is None:
            error = _complete(loop, error, processes)
        watch.take_over = None
        if processes.unreachable is not None and series is not None:
            error = _completed_alone(loop, series, error, processes)
        if processes.unreachable is None or processes.is_alone:
            if series is not None:
                loop.bar.set_description("saving")
            error = _saved(loop, error, trained=trainer.num_steps > before)
            loop.bar.set_description(_bar_text(trainer, not loop.bar.disable))
        elif series is not None:
            series.finish_whole()
            _note(error, f"Nothing more could be saved. {processes.saved}")
        if error is None and not signals.has_received:
            error = self._ran_out(steps, before)
        result = result_of(trainer, error, signals.names, all_steps=steps is not None)
        try:
            # Called last, so that a callback finds the last step saved.
            loop.end(result)
        except Exception as late:
            error = _joined(error, late)
        return error

    def _ran_out(self, steps: int | None, before: int) -> DataRanOutError | None:
        """The error of a run with too few batches; None if there were enough."""
        now = self.trainer.num_steps
        if now == before and self.first == 0:
            return DataRanOutError(EMPTY)
        done = now - self.counted_from
        if steps is None or done == steps:
            return None
        return DataRanOutError(
            f"`data` ran out after {done} of `steps`={steps} batches. The steps done are kept: "
            "this error's `.result` holds the trainer and the history. Pass `steps=None` to train "
            "until the data ends, or data that repeats."
        )

    def _position(self, before: int) -> dict[str, Any] | None:
        position = self.source.position(self.first + self.trainer.num_steps - before)
        position = joined_positions(position, self.trainer.processes)
        # The number of batches used before this call is unknown.
        return None if self.counted_from and not is_state(position) else position


def _bar_text(trainer: Trainer, shown: bool) -> str | None:
    """The text before a progress bar: the number of devices, and the state on each.

    A run on one device has no such text, nor does a hidden bar.
    """
    if not shown or not (several := device_count_text(trainer.devices)):
        return None
    return f"training{several}, {sized(trainer.plan.host_share_bytes)} each"


def _tell_ending(
    result: FitResult,
    error: BaseException | None,
    signals: Signals,
    series: RunCheckpoints | None,
    *,
    shown: bool,
) -> None:
    """Reports that a run was stopped or interrupted, its last step, and where that is saved."""
    if not shown or result.ended not in ("stopped", "interrupted"):
        return
    where = ""
    if series is not None and _returns_result(error):
        where = f", saved in {series.folder}"
    by = f" by {signals.names}" if signals.names else ""
    reason = f": {result.reason}" if result.ended == "stopped" else ""
    after = f"after step {result.trainer.num_steps}{where}{reason}"
    tqdm.write(f"{result.ended.capitalize()}{by} {after}.", file=sys.stderr)


def _tell_error(error: BaseException | None) -> None:
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    tqdm.write(f"{type(error).__name__}: {error}{notes}", file=sys.stderr)


# In place of a signal's name: a callback of another process has ended the run normally.
_STOPPED = StopTraining.__name__


def _tell_peers(error: BaseException, processes: Processes, signals: Signals) -> BaseException:
    """Tells all processes of an error; returns the error that this process ends with.

    A signal or a `StopTraining` that ended another process ends this one as if it had come here.
    """
    if isinstance(error, PeerEndedError):
        if error.signal is None:
            return error
        signals.ending = True
        if error.signal == _STOPPED:
            return StopTraining(str(error))
        signals.note(signal.Signals[error.signal])
        return KeyboardInterrupt()
    ended_by = None
    if signals.has_received:
        ended_by = "SIGTERM" if signals.terminates else "SIGINT"
    elif isinstance(error, StopTraining):
        ended_by = _STOPPED
    elif isinstance(error, KeyboardInterrupt):
        ended_by = "SIGINT"
    if isinstance(error, jax.errors.JaxRuntimeError):
        processes.hurry("an error")  # a peer may have died
    try:
        processes.leave(f"{type(error).__name__}: {error}", ended_by)
    except PeerEndedError as unreachable:
        return _explained(error, unreachable)
    return error


def _explained(error: BaseException, unreachable: PeerEndedError) -> Any:
    """The error to raise if another process can't be reached: JAX's own is only a symptom."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        unreachable.__cause__ = error
        return unreachable
    error.add_note(str(unreachable))
    return error


def _complete(
    loop: Loop, error: BaseException | None, processes: Processes
) -> BaseException | None:
    """Completes the steps in flight; returns the error that the run ends with.

    An error here is shared by all processes, because it decides whether they save.
    """
    late: Exception | None = None
    try:
        loop.finish()
    except Exception as raised:
        late = raised
        processes.lose(f"{type(raised).__name__}: {raised}")
    try:
        words = processes.gather("the end of training", late and f"{type(late).__name__}: {late}")
        ended = [i for i, text in enumerate(words) if text is not None]
        if late is None and ended:
            late = PeerEndedError(f"process {ended[0]} has ended: {words[ended[0]]}")
    except PeerEndedError as unreachable:
        late = unreachable if late is None else _explained(late, unreachable)
        if error is not None and isinstance(error, jax.errors.JaxRuntimeError):
            return _explained(error, unreachable)
    return error if late is None else _joined(error, late)


def _completed_alone(
    loop: Loop, series: RunCheckpoints, error: BaseException | None, processes: Processes
) -> BaseException | None:
    """Completes the steps in flight without lost peers, if each process holds all state."""
    if loop.trainer.run_state.store.placement.across is None:
        return error
    try:
        with processes.going_on_alone():
            loop.finish()
        series.go_on_alone()
    except Exception as late:
        processes.is_alone = False  # so that nothing is saved
        return error if isinstance(late, PeerEndedError) else _joined(error, late)
    return error


def _saved(loop: Loop, error: BaseException | None, trained: bool) -> BaseException | None:
    """Saves the last step, if the run has a folder; returns the error that the run ends with."""
    if (series := loop.series) is None:
        return error
    last = loop.trainer.num_steps
    try:
        if _returns_result(error) or trained:
            if series.saved != last:
                loop.save()
            series.finish()
            if not _returns_result(error):
                _note(error, f"Step {last} is saved in {series.folder}.")
        else:
            series.finish_quietly()
            _note(error, f"No step was done, so nothing was saved in {series.folder}.")
    except Exception as late:
        series.finish_quietly()
        return _joined(error, late)
    return error


def _returns_result(error: BaseException | None) -> bool:
    """Whether a run that ends with this error, or none, returns its result."""
    return error is None or isinstance(error, KeyboardInterrupt)


def _joined(error: BaseException | None, late: Exception) -> BaseException:
    """The error to raise: the first, with a note about a later one."""
    if _returns_result(error):
        return late
    assert error is not None
    _note(error, f"While the run ended, there was one more error: {type(late).__name__}: {late}")
    return error


def _note(error: BaseException | None, text: str) -> None:
    if error is not None and text not in getattr(error, "__notes__", ()):
        error.add_note(text)
