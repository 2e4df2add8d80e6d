"""Ctrl-C and SIGTERM between steps instead of within one, and only once a run.

A step that is cut off while it is dispatched leaves some groups updated and others not, so the
signal waits until the work it would break is whole. Supervisors repeat their signals, so a run that
has been told to end ends undisturbed.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# The number of signals that a run takes in all before one cuts its end, the final save, off.
_PATIENCE = 2
# Seconds that the main thread waits for another thread before it looks for signals. The kernel may
# give a signal to any thread, and one that comes just before a wait begins doesn't end that wait.
SECONDS_AT_A_TIME = 0.1


@contextmanager
def deferred_interrupt(*, insist: bool = False) -> Iterator[None]:
    """Holds SIGINT and SIGTERM back until the body has ended, then hands them to their handlers.

    With Python's own handler that means a `KeyboardInterrupt` at the end of the ``with`` block.
    Blocks may be nested: the outermost raises. If the body raises, its error goes on instead of a
    `KeyboardInterrupt`, because the error already ends the work; handlers still learn of the
    signal. Off the main thread, where Python delivers no signals, and for a signal that is ignored,
    has its default action or a handler that was not installed from Python, nothing changes.

    Args:
        insist: Whether a second signal goes through at once; for a body that may hang and that
            can be cut off without harm to the training state.

    Raises:
        KeyboardInterrupt: If a signal came during the body whose handler raises it.
    """
    if not _on_main_thread():
        yield
        return
    # `getsignal` gives a function for handlers of Python's only; the others can't be put back.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held_back = {number: call for number, call in handlers.items() if callable(call)}
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if insist and received:
            held_back[signal.Signals(number)](number, frame)
        else:
            received.append(number)

    for number in held_back:
        signal.signal(number, remember)
    failed = True
    try:
        yield
        failed = False
    finally:
        for number, call in held_back.items():
            signal.signal(number, call)
        interrupt = None
        # Sent again rather than raised here: a notebook's or an outer block's handler decides. Each
        # kind once: who sends one several times means the same by all of them.
        for number in dict.fromkeys(received):
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt as raised:
                interrupt = interrupt or raised
        if interrupt is not None and not failed:
            raise interrupt


class Signals:
    """A run's handlers of SIGINT and SIGTERM: the first signal ends it, the second changes nothing.

    Each is a `KeyboardInterrupt` in the run, the second one only while a body that allows it
    (`deferred_interrupt(insist=True)`) holds the first one back. Once the run is ending, two
    signals in all are only counted, and a third is a `KeyboardInterrupt` again. SIGINT is taken
    over from Python's own handler, SIGTERM from its default action and from any handler that was
    installed from Python; a signal that is ignored, or whose handler is not Python's, stays so.

    A supervisor sends SIGTERM, and again after 0.1 s while the last step is being saved:

        first   -> KeyboardInterrupt after the step at hand; `ending` is true
        second  -> counted; the save goes on
        __exit__ -> the handlers of before are back; `hand_on` acts as they would have

    Attributes:
        ending: Whether the run is ending, so that signals are only counted.
    """

    def __init__(self):
        """Makes handlers that are not installed yet."""
        self.ending = False
        self._received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        """Takes the signals over, on the main thread."""
        if _on_main_thread():
            terminate = signal.getsignal(signal.SIGTERM)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.default_int_handler
            if terminate is signal.SIG_DFL or callable(terminate):
                self._before[signal.SIGTERM] = terminate
        for number in self._before:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        """Puts the handlers of before back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def note(self, number: int) -> None:
        """Counts a signal that ended another process of the run as one that came here."""
        self._received.append(number)

    @property
    def came(self) -> bool:
        """Whether a signal has come."""
        return bool(self._received)

    @property
    def names(self) -> str:
        """The signals that came, for a message."""
        return " and ".join(signal.Signals(n).name for n in dict.fromkeys(self._received))

    @property
    def terminates(self) -> bool:
        """Whether SIGTERM came, which by default ends the process."""
        handler = self._before.get(signal.SIGTERM)
        return signal.SIGTERM in self._received and handler is signal.SIG_DFL

    def hand_on(self) -> None:
        """Calls the handler that SIGTERM had before the run, if SIGTERM came; after `__exit__`."""
        if signal.SIGTERM in self._received and callable(self._before.get(signal.SIGTERM)):
            signal.raise_signal(signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        if not self.ending or len(self._received) > _PATIENCE:
            self.ending = True
            raise KeyboardInterrupt


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
