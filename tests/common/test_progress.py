"""Lines that tell of slow work."""

import sys
import threading
from types import SimpleNamespace

from megatrain_jax._src.common.progress import told_if_slow


def timers():
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_slow_work_is_told_at_a_terminal_and_quick_work_is_not(monkeypatch):
    lines, told, is_terminal = [], threading.Event(), True

    def write(text: str) -> None:
        lines.append(text)
        told.set()

    stream = SimpleNamespace(write=write, flush=lambda: None, isatty=lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with told_if_slow("a plan", seconds=0):
        assert told.wait(60)
    lines.clear()
    with told_if_slow("a plan", seconds=60):
        (timer,) = timers()
    timer.join(5)
    assert not timer.is_alive() and not lines
    is_terminal = False
    with told_if_slow("a plan", seconds=60):
        assert not timers()
