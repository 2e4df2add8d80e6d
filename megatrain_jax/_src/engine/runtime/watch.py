"""A thread beside a run that ends it where its main thread can't: when a signal comes, or it hangs.

Python runs handlers of signals on the main thread alone, between two operations of Python. So the
first signal has no effect while the user's code waits for data, or JAX for a process that is gone.

Example: SIGTERM while one of two processes waits for its next batch:

    0 s     both note the signal; the first one waits for the second one's message
    3 s     the second one's data is interrupted as by a second signal; it tells the first one
    then    both complete the steps in flight and save the last one

If its data is stuck where Python can't interrupt it, as in a read from a dead disk, the thread
takes the run over: the main thread never comes back from there.

    5 s     the second one's thread tells the first one; both complete the steps in flight and save
    then    the second process ends, in the middle of its main thread's work
"""

import faulthandler
import os
import select
import signal
import threading
from collections.abc import Callable

from megatrain_jax._src.common.activity import HERE
from megatrain_jax._src.engine.runtime.interrupt import Signals
from megatrain_jax._src.engine.state.presence import Clock
from megatrain_jax._src.engine.state.processes import PATIENCE_SECONDS, Processes

# The user's code has so long to come to an end after the first signal; after a stall, until all
# processes know of it.
_GRACE_SECONDS, _STALL_GRACE_SECONDS = 3.0, 2.0
# If it has not come to its end after these, it is left behind.
_HELD_SECONDS = 5.0
# A process whose main thread hangs elsewhere ends after these, without a save.
_HANGS_SECONDS = 10.0
_LOOK_SECONDS = 0.5
# A run is not stalled before it was idle for this many times as long as ever before.
_AS_BEFORE = 3.0
STALL = "a stall"
# Exit status of a process ended by SIGTERM: 128 plus the signal's number.
TERMINATED = 143


class StalledError(RuntimeError):
    """Raised in a run of several processes of which none has got on for `stall_seconds`."""


class Watch:
    """The thread, while a run trains; it is a context manager within the run's `Signals`.

    Attributes:
        take_over: Ends the run and the process in place of the main thread, with the error that
            this thread has in vain tried to raise there; None if the run can't be taken over.
    """

    def __init__(self, signals: Signals, processes: Processes, stall_seconds: float | None):
        """Makes a thread that has not begun.

        Args:
            signals: The run's handlers.
            processes: The processes that share the run.
            stall_seconds: See `fit`.
        """
        self.take_over: Callable[[BaseException], None] | None = None
        self._signals, self._processes = signals, processes
        self._stall_seconds = stall_seconds
        self._clock = Clock()
        self._ending, self._since = "", 0.0  # the reason why the run ends soon, from when on
        self._has_insisted = self._has_shown = False
        self._idle = self._longest_idle = 0.0
        self._text = ""
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        """Begins to watch; on the main thread, also for signals."""
        self._processes.begin_run()
        self._processes.patience = self._stall_seconds
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before: int | None = None
        if threading.current_thread() is threading.main_thread():
            # The only way to learn of a signal while the main thread is in C.
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            _wakeups.add(self._write)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the thread."""
        if self._before is not None and self._write in _wakeups:
            signal.set_wakeup_fd(self._before)
            _wakeups.discard(self._write)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)
        self._processes.patience = PATIENCE_SECONDS

    def _work(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], _LOOK_SECONDS)
            numbers = os.read(self._read, 1000) if ready else b""
            if 0 in numbers:
                return
            if numbers and self._before not in (None, -1):  # as asyncio has one
                os.write(self._before, numbers)
            self._clock.tick()
            self.look([number for number in numbers if self._signals.ends_run(number)])

    def look(self, numbers: list[int]) -> None:
        """Looks once at what has happened.

        Args:
            numbers: The signals that have come.
        """
        processes = self._processes
        for number in numbers:
            if number == signal.SIGTERM and self._has_insisted:
                continue  # this thread's own, or a further one
            processes.hurry(signal.Signals(number).name)
            self._begin_ending(signal.Signals(number).name)
        if (presence := processes.presence) is not None:
            asked = presence.asked_to_end
            if asked and not self._ending:
                self._begin_ending(asked)
            elif self._is_stalled(presence.idle_seconds) and not self._ending:
                processes.hurry(STALL)
                self._begin_ending(STALL)
            elif not asked:
                self._ending = ""
        if self._ending:
            self._end(self._clock.seconds - self._since)

    def _begin_ending(self, reason: str) -> None:
        if reason == "SIGTERM":
            self._processes.status = TERMINATED
        if not self._ending:
            self._ending, self._since = reason, self._clock.seconds

    def _is_stalled(self, idle: float) -> bool:
        if idle < self._idle:  # it has got on after all
            self._longest_idle = max(self._longest_idle, self._idle)
        self._idle = idle
        limit = self._stall_seconds
        return limit is not None and idle > max(limit, _AS_BEFORE * self._longest_idle)

    def _end(self, seconds: float) -> None:
        """Does what is due so many seconds after the run should have begun to end."""
        processes, name = self._processes, self._ending
        is_stalled = name == STALL
        if is_stalled and not self._has_shown:
            self._has_shown = True
            self._text = (
                f"no process has got on for {self._stall_seconds:g} s, the run's `stall_seconds`: "
                f"{processes.activities()}"
            )
            os.write(2, f"\n{StalledError.__name__}: {self._text}\n\n".encode())
            faulthandler.dump_traceback(2)
        _, is_users = HERE.doing
        grace = _STALL_GRACE_SECONDS if is_stalled else _GRACE_SECONDS
        if is_users and seconds > grace:
            if is_stalled:
                error: BaseException = StalledError(self._text)
            elif name == "SIGTERM":
                error = KeyboardInterrupt()
            else:
                return  # a second Ctrl-C does it
            if not self._has_insisted:
                self._has_insisted = True
                if not is_stalled and not self._signals.has_received:
                    self._signals.note(signal.SIGTERM)  # it came to another process
                self._signals.insist(error)
            take_over = self.take_over
            if take_over is not None and seconds > _HELD_SECONDS and HERE.take():
                take_over(error)
        presence = processes.presence
        hangs = is_stalled and seconds > _HANGS_SECONDS and not self._signals.ending
        if hangs and presence is not None and not presence.waits:
            processes.give_up(self._text)


# Descriptors that signals are written to. A forked child would write its own signals there.
_wakeups: set[int] = set()


def _forget_wakeups() -> None:
    if _wakeups:
        signal.set_wakeup_fd(-1)
        _wakeups.clear()


os.register_at_fork(after_in_child=_forget_wakeups)
