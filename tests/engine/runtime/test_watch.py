"""The thread that ends a run whose main thread can't: after a signal, and if it hangs."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from typing import Any

import pytest

from boards import FakeBoard, FakeClock, look, present, processes_of
from megatrain_jax._src.common.activity import HERE, doing, progressed
from megatrain_jax._src.engine.runtime import watch
from megatrain_jax._src.engine.runtime.interrupt import Signals, _is_within, deferred_interrupt
from megatrain_jax._src.engine.runtime.watch import StalledError, Watch
from megatrain_jax._src.engine.state.processes import Processes
from messages import tells
from small import batch, fit


class Recorded(Signals):
    """Handlers that record the errors that the main thread should raise."""

    def __init__(self):
        super().__init__()
        self.errors: list[BaseException] = []

    def insist(self, error: BaseException) -> None:
        self.errors.append(error)


def watch_of(processes: Processes, stall_seconds: float | None = 600.0) -> tuple[Watch, Recorded]:
    signals = Recorded()
    found = Watch(signals, processes, stall_seconds)
    found._clock = FakeClock()
    return found, signals


def pass_time(watch: Watch, seconds: float, numbers: tuple[int, ...] = ()) -> None:
    """Looks every second, after the peers' rows were read."""
    if watch._processes.presence is not None:
        look(watch._processes, 0)
    watch.look(list(numbers))
    for _ in range(round(seconds)):
        if watch._processes.presence is not None:
            look(watch._processes, 1)
        watch._clock.seconds += 1
        watch.look([])


@pytest.fixture
def untaken() -> Iterator[None]:
    """The main thread's work is its own again, at the end of a test."""
    yield
    HERE._taker, HERE.doing = None, ("", False)


@pytest.mark.parametrize("cause", ["SIGTERM", "SIGINT", "a stall"])
@pytest.mark.parametrize("is_users", [True, False])
@pytest.mark.parametrize("can_be", [True, False])
def test_what_holds_the_main_thread_in_the_users_code_is_left_behind(
    cause, is_users, can_be, untaken
):
    found, _ = watch_of(processes_of(FakeBoard()), 100)
    errors: list[BaseException] = []

    def take_over(error: BaseException) -> None:
        errors.append(error)
        HERE.doing = "saving", False

    if can_be:
        found.take_over = take_over
    with doing("drawing batch 3", of_user=is_users):
        if cause == "a stall":
            pass_time(found, 102)
        else:
            pass_time(found, 1, (signal.Signals[cause],))
        pass_time(found, 3)
        assert not errors
        pass_time(found, 10)
    wanted = {"SIGTERM": KeyboardInterrupt, "a stall": StalledError}.get(cause)
    assert [type(error) for error in errors] == [wanted] * (is_users and can_be and bool(wanted))


def test_a_thread_that_is_left_behind_does_nothing_more(untaken):
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def held() -> None:
        with doing("drawing batch 3", of_user=True):
            begun.set()
            goes_on.wait()
            with suppress(BaseException), doing("saving"):
                ended.set()
        ended.set()

    with doing("reading"):
        assert not HERE.take()
    threading.Thread(target=held, daemon=True).start()
    assert begun.wait(20) and HERE.take()
    goes_on.set()
    with doing("saving in its place"):
        assert HERE.doing == ("saving in its place", False)
    assert not ended.wait(0.01) and HERE.doing[0] == "drawing batch 3"


@pytest.mark.parametrize("held", ["data", "callback", "last callback"])
def test_another_thread_saves_the_last_step_if_the_main_thread_is_held(
    held, tmp_path, monkeypatch, untaken
):
    reached, never, ended = threading.Event(), threading.Event(), threading.Event()
    called: list[Any] = []
    saved: list[bool] = []  # before the last records are told

    def look(watch: Watch, numbers: list[int]) -> None:
        if reached.is_set() and not ended.is_set() and HERE.take():
            assert watch.take_over is not None
            with redirect_stderr(io.StringIO()) as said:
                watch.take_over(KeyboardInterrupt())
            called.append(said.getvalue())
            os.write(watch._write, b"\0")  # ends this thread
            ended.set()

    monkeypatch.setattr(Watch, "look", look)
    monkeypatch.setattr(watch, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(Processes, "end_held", lambda self, why: called.append(why))

    def hang() -> None:
        reached.set()
        never.wait()

    def batches() -> Iterator[Any]:
        yield from map(batch, range(3))
        if held == "data":
            hang()

    class Log:
        def __call__(self, trainer: Any, record: dict[str, float]) -> None:
            called.append(record["step"])
            if reached.is_set():
                saved.append((tmp_path / "3").is_dir())
            if (held, record["step"]) in (("callback", 1), ("last callback", 3)):
                hang()

        def end(self, result: Any) -> None:
            called.append(result.ended)

    options = {"data": batches(), "callbacks": [Log()]}
    thread = threading.Thread(target=fit, args=(tmp_path, None), kwargs=options, daemon=True)
    thread.start()
    assert ended.wait(20)
    *told, why, said = called
    # The next step is dispatched before a step's record is told.
    last = 2 if held == "callback" else 3
    steps = [1] if held == "callback" else [1, 2, 3]
    assert saved == [True, True] * (held == "data")
    assert told == [*steps, *["interrupted"] * (held == "data")]
    assert tells(said, str(tmp_path)) and (tmp_path / str(last)).is_dir()
    assert ("drawing" if held == "data" else "Log") in why


@pytest.mark.parametrize("is_users", [True, False])
def test_the_users_code_is_interrupted_some_seconds_after_sigterm(is_users):
    found, signals = watch_of(Processes())
    with doing("drawing batch 3", of_user=is_users):
        with doing("a part of it, which is over", of_user=not is_users):
            pass
        pass_time(found, 2, (signal.SIGTERM,))
        assert not signals.errors
        pass_time(found, 8)
        assert [type(error) for error in signals.errors] == [KeyboardInterrupt] * is_users


def test_a_first_ctrl_c_waits_for_the_users_code():
    found, signals = watch_of(Processes())
    with doing("drawing batch 3", of_user=True):
        pass_time(found, 20, (signal.SIGINT,))
    assert not signals.errors


def test_sigterm_of_a_peer_ends_this_process_as_its_own():
    board = FakeBoard()
    found, signals = watch_of(processes_of(board))
    with doing("drawing batch 3", of_user=True):
        board.show(1, ending="SIGTERM")
        pass_time(found, 2)
        board.show(1)  # it is in another run by now
        pass_time(found, 5)
        assert not signals.errors
        board.show(1, ending="SIGTERM")
        pass_time(found, 5)
    assert len(signals.errors) == 1 and signals.names == "SIGTERM"
    assert found._processes.status == 143


def test_a_run_stalls_if_no_process_gets_on_for_as_long_as_allowed(capfd):
    board = FakeBoard()
    processes = processes_of(board)
    found, signals = watch_of(processes, 100)
    with doing("drawing batch 3", of_user=True):
        for beat, pause in enumerate((90, 30, 30)):
            board.show(1, count=beat, doing="compiling")
            pass_time(found, pause)
        assert not signals.errors and not present(processes).ending
        # Three times the longest pause is more than the limit.
        pass_time(found, 235)
        assert not signals.errors and not present(processes).ending
        pass_time(found, 10)
    (error,) = signals.errors
    assert isinstance(error, StalledError) and not signals.has_received
    assert tells(str(error), "process 1", "compiling", "`stall_seconds`", "100 s")
    assert "test_watch.py" in capfd.readouterr().err, "the stacks"
    pass_time(found, 1, (signal.SIGTERM,))  # as the thread sends it to interrupt the main thread
    assert present(processes).asked_to_end == watch.STALL and processes.status == 1


def test_a_process_that_hangs_outside_of_python_gives_its_peers_up():
    processes = processes_of(FakeBoard())
    found, signals = watch_of(processes, 100)
    with doing("writing"):
        progressed()
        pass_time(found, 108)
        assert processes.unreachable is None
        pass_time(found, 10)
    assert not signals.errors and tells(processes.unreachable or "", "`stall_seconds`")


def test_a_run_without_a_limit_never_stalls():
    found, signals = watch_of(processes_of(FakeBoard()), None)
    with doing("drawing batch 3", of_user=True):
        pass_time(found, 2000)
    assert not signals.errors


@pytest.mark.parametrize("at_once", [True, False])
def test_an_error_of_another_thread_interrupts_what_may_be_interrupted(at_once):
    reached = []
    with Signals() as signals:
        signals.begin()
        with pytest.raises(StalledError), deferred_interrupt(second_interrupts=at_once):
            signals.insist(StalledError())
            time.sleep(0)
            reached.append("the end")
        assert signals.ending and reached == ["the end"] * (not at_once)
        signals.insist(StalledError())  # no effect on a run that is ending
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_error_that_comes_when_a_run_has_ended_interrupts_nothing_later(monkeypatch):
    with monkeypatch.context() as patch, Signals() as signals:
        patch.setattr(signal, "pthread_kill", lambda thread, number: None)  # it is on its way
        signals.insist(StalledError())
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt(second_interrupts=True):
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")
    assert reached, "the first signal waits, as ever"


def test_sigterm_ends_a_run_whose_data_hangs_and_saves_its_last_step(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(watch, "_LOOK_SECONDS", 0.001)

    def batches() -> Iterator[Any]:
        yield from map(batch, range(3))
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1000)

    with pytest.raises(SystemExit) as raised:
        fit(tmp_path, None, data=batches())
    assert raised.value.code == 143 and (tmp_path / "3").is_dir()


class Waiting:
    """Runs something within a method of its own."""

    def within(self, call: Callable[[], Any]) -> Any:
        return call()


def test_a_signal_is_within_the_methods_that_are_running():
    one, other = Waiting(), Waiting()

    def found(*methods: Any) -> bool:
        return _is_within(sys._getframe(), *methods)

    assert not found(one.within)
    assert one.within(lambda: found(one.within)) and one.within(
        lambda: found(other.within, one.within)
    )
    assert not one.within(lambda: found(other.within))
    assert one.within(lambda: other.within(lambda: found(one.within)))
