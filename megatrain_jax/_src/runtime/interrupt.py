"""Ctrl-C and SIGTERM between steps instead of within one, and only once a run.

A step that is cut off while it is dispatched leaves some groups updated and others not, so the
signal waits until the work it would break is whole. Supervisors repeat their signals, so a run that
has been told to end ends undisturbed.
"""

import signal
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

# The number of signals that a run takes in all before one cuts its end, the final save, off.
_PATIENCE = 2
# Seconds that the main thread waits for another thread before it looks for signals. The kernel may
# give a signal to any thread, and one that comes just before a wait begins doesn't end that wait.
SECONDS_AT_A_TIME = 0.1


def deferred_interrupt(*, insist: bool = False) -> AbstractContextManager[None]:
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
    return _Deferral(insist)


class _Deferral:
    """One ``with`` block of `deferred_interrupt`."""

    def __init__(self, insist: bool):
        """Makes a block that has not begun."""
        self._insist = insist
        self._held_back: dict[int, Any] = {}
        self._received: list[int] = []

    def __enter__(self) -> None:
        """Holds the signals back, on the main thread."""
        if not _on_main_thread():
            return
        # `getsignal` gives a function for handlers of Python's only; the others can't be put back.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number, call in handlers.items():
                if callable(call):
                    self._held_back[number] = call
                    signal.signal(number, self._remember)
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Hands the signals that came to their handlers."""
        late = self._end()
        try:
            if late is not None and (error is None or not isinstance(late, KeyboardInterrupt)):
                raise late
        finally:
            del late  # its traceback leads here, and the cycle would keep the callers' arrays

    def _end(self) -> BaseException | None:
        return _put_back(self._held_back, self._received)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        goes_through = self._insist and self._received
        # An error at a block's beginning or end could leave handlers installed for good.
        if goes_through and not _is_within(frame, self.__enter__, self.__exit__):
            self._held_back[number](number, frame)
        else:
            self._received.append(number)


def _put_back(handlers: Mapping[int, Any], received: list[int]) -> BaseException | None:
    """Installs handlers, then sends signals again that came meanwhile.

    From the first handler on, a signal may raise anywhere in here; what is left is done then, too.

    Args:
        handlers: The handlers by the signals' numbers.
        received: Numbers of the signals to send; empty afterwards. Each kind is sent once: who
            sends one several times means the same by all of them.

    Returns:
        The error that a handler raised; rather another one than a `KeyboardInterrupt`.
    """
    left, error = list(handlers.items()), None
    while left or received:
        try:
            while left:
                signal.signal(*left[-1])
                left.pop()
            # Sent again rather than raised here: a notebook's or an outer block's handler decides.
            while received:
                number = received[0]
                received[:] = [other for other in received if other != number]
                signal.raise_signal(number)
        except BaseException as raised:
            if error is None or isinstance(error, KeyboardInterrupt):
                error = raised
    try:
        return error
    finally:
        del error  # see `__exit__`


def _is_within(frame: FrameType | None, *methods: Any) -> bool:
    """Whether a signal has come while one of some objects' methods runs."""
    while frame is not None:
        for method in methods:
            of_method = frame.f_code is method.__func__.__code__
            if of_method and frame.f_locals.get("self") is method.__self__:
                return True
        frame = frame.f_back
    return False


class Signals:
    """A run's handlers of SIGINT and SIGTERM: the first signal ends it, the second changes nothing.

    Each is a `KeyboardInterrupt` in the run, the second one only while a body that allows it
    (`deferred_interrupt(insist=True)`) holds the first one back. Once the run is ending, two
    signals in all are only counted, and a third is a `KeyboardInterrupt` again. SIGINT is taken
    over from Python's own handler, SIGTERM from its default action and from any handler that was
    installed from Python; a signal that is ignored, or whose handler is not Python's, stays so.

    A supervisor sends SIGTERM, and again after 0.1 s while the last step is being saved:

        begin() -> from now on signals interrupt the run
        first   -> KeyboardInterrupt after the step at hand; `ending` is true
        second  -> counted; the save goes on
        __exit__ -> the handlers of before are back; `hand_on` acts as they would have

    Attributes:
        ending: Whether the run is ending, so that signals are only counted.
    """

    def __init__(self):
        """Makes handlers that are not installed yet."""
        self.ending = False
        self._has_begun = False
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
        try:
            for number in self._before:
                signal.signal(number, self._receive)
            return self
        except BaseException:
            _put_back(self._before, [])
            raise

    def __exit__(self, *error: object) -> None:
        """Puts the handlers of before back."""
        late = _put_back(self._before, [])
        if late is not None:
            raise late

    def begin(self) -> None:
        """Lets signals interrupt the run from now on; those before are only counted.

        Raises:
            KeyboardInterrupt: If one came before.
        """
        self._has_begun = True
        if self._received:
            self.ending = True
            raise KeyboardInterrupt

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
        # An error while the handlers of before are put back could leave one of these for good.
        if not self._has_begun or _is_within(frame, self.__exit__):
            return
        if not self.ending or len(self._received) > _PATIENCE:
            self.ending = True
            raise KeyboardInterrupt


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
