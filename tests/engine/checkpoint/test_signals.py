"""Signals during steps, evaluations and saves: runs end with their last step saved."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from itertools import count
from typing import Any

import pytest

import megatrain_jax as mt
from ending_runs import BATCHES, OPTIMIZERS, STEPS, run
from megatrain_jax import callbacks
from megatrain_jax._src.engine.checkpoint import folder
from megatrain_jax._src.engine.checkpoint.workspace import FolderWorkspace
from megatrain_jax._src.engine.runtime.interrupt import Signals, deferred_interrupt
from megatrain_jax._src.engine.train import run as training_run
from messages import tells
from places import HELPERS, ROOT

pytestmark = pytest.mark.usefixtures("started_once")


def during_the_save(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Sends signals, each once the one before was received, when only the name is missing."""
    publish, receive = FolderWorkspace.publish, Signals._receive
    received = threading.Semaphore(0)

    def counted(*args: Any) -> None:
        received.release()
        receive(*args)

    def interrupted(*args: Any, **options: Any) -> None:
        while received.acquire(blocking=False):
            pass
        for number in numbers:
            # To this thread: the main one has to notice it without being woken.
            signal.pthread_kill(threading.get_ident(), number)
            assert received.acquire(timeout=60)
        publish(*args, **options)

    monkeypatch.setattr(Signals, "_receive", counted)
    monkeypatch.setattr(FolderWorkspace, "publish", interrupted)


@pytest.mark.by_default("2-2", "2-15", "15-None", "15-2", "15-15")
@pytest.mark.parametrize("first", [None, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_disturb_the_final_save(
    first, second, tmp_path, monkeypatch, capfd
):
    during_the_save(monkeypatch, second)

    def at_three(trainer: Any, record: dict[str, Any]) -> None:
        if first is not None and record["step"] == 3:
            os.kill(os.getpid(), first)

    try:
        result: Any = run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path, callbacks=[at_three])
        status = 0
    except SystemExit as error:
        result, status = error.result, error.code  # type: ignore[attr-defined]
    except KeyboardInterrupt:  # which would end all tests
        pytest.fail("the signal has cut the save off")
    assert status == (143 if signal.SIGTERM in (first, second) else 0)
    assert result.interrupted
    done = result.trainer.num_steps
    assert done == (STEPS if first is None else 4)
    assert folder.steps(tmp_path) == [done]
    assert tells(capfd.readouterr().err, f"step {done}", tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("last", [signal.SIGINT, signal.SIGTERM])
def test_a_third_signal_cuts_the_final_save_off(last, tmp_path, monkeypatch, capfd):
    during_the_save(monkeypatch, signal.SIGINT, signal.SIGINT, last)
    with pytest.raises(SystemExit if last == signal.SIGTERM else KeyboardInterrupt) as caught:
        run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path)
    assert caught.value.result.trainer.num_steps == STEPS  # type: ignore[attr-defined]
    shown = capfd.readouterr().err
    assert tells(shown, f"step {STEPS}") and str(tmp_path) not in shown


def test_sigterm_is_handed_on_to_a_handler_of_the_caller(tmp_path):
    seen = []
    before = signal.signal(
        signal.SIGTERM, lambda number, frame: seen.append(folder.steps(tmp_path))
    )
    try:
        callbacks = [lambda trainer, record: os.kill(os.getpid(), signal.SIGTERM)]
        result = run(OPTIMIZERS["deferred"], checkpoint_dir=tmp_path, callbacks=callbacks)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.interrupted
    assert seen == [[result.trainer.num_steps]]


@pytest.fixture
def own_handlers():
    """The program's own handlers: the numbers that they get, and which of them are installed."""
    got = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handler(number: int, frame: Any) -> None:
        got.append(number)
        raise InterruptedError

    for number in before:
        signal.signal(number, handler)
    yield got, lambda: [n for n in before if signal.getsignal(n) is handler]
    for number, call in before.items():
        signal.signal(number, call)


def test_the_program_s_own_handler_waits_until_a_run_has_begun(own_handlers):
    got, installed = own_handlers
    with Signals() as signals:
        assert not installed()
        signal.raise_signal(signal.SIGINT)
        assert not got
        with pytest.raises(InterruptedError):
            signals.begin()
        with pytest.raises(InterruptedError):
            signal.raise_signal(signal.SIGINT)
        assert got == [signal.SIGINT, signal.SIGINT]
    assert len(installed()) == 2


def test_signals_while_handlers_are_put_back_leave_none_replaced(own_handlers, monkeypatch):
    got, installed = own_handlers
    put_back = signal.signal

    def then_a_signal(number: Any, handler: Any) -> None:
        put_back(number, handler)
        if number not in got:
            signal.raise_signal(number)

    with pytest.raises(InterruptedError), deferred_interrupt():
        monkeypatch.setattr(signal, "signal", then_a_signal)
    assert sorted(got) == [signal.SIGINT, signal.SIGTERM] and len(installed()) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_an_error_ends_a_run_saves_its_last_step(number, tmp_path, monkeypatch):
    """It comes after the error, and before signals are only counted."""
    own, told = training_run._tell_peers, []

    def tells_late(*given: Any) -> Any:
        if not told:
            told.append(given)
            signal.raise_signal(number)
        return own(*given)

    def fails() -> Any:
        yield from BATCHES[:3]
        raise OSError("the disk is gone")

    monkeypatch.setattr(training_run, "_tell_peers", tells_late)
    try:
        ended = run(OPTIMIZERS["immediate"], fails(), steps=STEPS, checkpoint_dir=tmp_path).ended
    except SystemExit as exited:
        ended = exited.code
    except KeyboardInterrupt:  # would end pytest, too
        ended = "escaped"
    assert ended == ("interrupted" if number == signal.SIGINT else 143) and told
    assert (tmp_path / "3").is_dir()


@pytest.mark.exhaustive
def test_signals_at_any_line_lose_nothing():
    program = HELPERS / "signals_anywhere.py"
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", "."), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths}
    ended = subprocess.run([sys.executable, program], env=environment, timeout=200)
    assert ended.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_callback_can_not_keep_a_signal_to_itself(number):
    def careless(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 3:
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                pass

    try:
        result: Any = run(OPTIMIZERS["deferred"], callbacks=[careless])
        assert number == signal.SIGINT
    except SystemExit as error:
        result = error.result  # type: ignore[attr-defined]
    assert result.trainer.num_steps == 4


@pytest.mark.parametrize("where", ["data", "eval_data"])
def test_data_that_stall_give_way_to_the_second_signal(where, tmp_path):
    def stalled():
        yield from BATCHES[: 3 if where == "data" else 1]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    options = {"eval_data": stalled, "eval_every": 3} if where == "eval_data" else {}
    data = stalled() if where == "data" else BATCHES
    result = run(OPTIMIZERS["deferred"], data, checkpoint_dir=tmp_path, **options)
    assert result.interrupted
    assert folder.steps(tmp_path) == [3]
    assert len(result.history) == 3 and "eval_loss" not in result.history[-1]


@pytest.mark.exhaustive
def test_an_evaluation_that_was_cut_off_is_made_when_the_run_goes_on(tmp_path):
    def go(folder, cut_off):
        def evaluated():
            yield BATCHES[0]
            if cut_off:
                signal.raise_signal(signal.SIGINT)
            yield BATCHES[1]

        seen = []
        logs = [callbacks.CSVLog(folder / "log.csv"), callbacks.JSONLog(folder / "log.jsonl")]
        records = [*logs, lambda trainer, record: seen.append((record["step"], *record))]
        options = {"eval_data": evaluated, "eval_every": 2, "checkpoint_dir": folder}
        return run(OPTIMIZERS["deferred"], callbacks=records, **options), seen

    whole, _ = go(tmp_path / "whole", False)
    cut, _ = go(tmp_path / "cut", True)
    assert cut.interrupted and cut.trainer.num_steps == 2 and "eval_loss" not in cut.history[-1]
    resumed, seen = go(tmp_path / "cut", False)
    values = [[r.get("eval_loss") for r in result.history] for result in (whole, resumed)]
    assert values[0] == values[1] and values[0][1] is not None
    # `train` makes it, too.
    options = {"eval_data": BATCHES[:2], "eval_every": 2, "progress": False}
    mt.train(cut.trainer, BATCHES[2:], **options)
    assert [r.get("eval_loss") for r in cut.history] == values[0]
    # But none that was never begun.
    by_hand = run(OPTIMIZERS["deferred"], BATCHES[:2]).trainer
    mt.train(by_hand, BATCHES[2:], **options)
    assert [r.get("eval_loss") for r in by_hand.history] == [None, None, *values[0][2:]]
    assert seen[0][0] == 2 and "eval_loss" in seen[0] and seen[1][0] == 3
    table, lines = (
        (tmp_path / "cut" / name).read_text(encoding="utf-8").splitlines()
        for name in ("log.csv", "log.jsonl")
    )
    logged = [list(csv.DictReader(table)), [json.loads(line) for line in lines]]
    for found in logged:
        assert [int(row["step"]) for row in found] == list(range(1, STEPS + 1))
        assert float(found[1]["eval_loss"]) == pytest.approx(values[0][1])


def test_an_evaluation_is_cut_short_by_one_signal():
    drawn = []

    def long():
        for i in count():
            drawn.append(i)
            if i == 2:
                signal.raise_signal(signal.SIGINT)
            yield BATCHES[0]

    trainer = run(OPTIMIZERS["deferred"], BATCHES[:2]).trainer
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate(long())
    assert drawn == [0, 1, 2]
    trainer.read(trainer.step(BATCHES[2]))
