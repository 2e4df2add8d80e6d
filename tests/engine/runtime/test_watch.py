"""The thread that ends a run whose main thread can't: after a signal, and if it hangs."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from boards import FakeBoard, FakeClock, look, present, processes_of
from megatrain_jax._src.common.activity import doing, progressed
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
