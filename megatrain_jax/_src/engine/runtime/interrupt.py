"""Makes Ctrl-C and SIGTERM take effect between steps, not within one, and only once per run.

A step that is interrupted while it is dispatched leaves only some groups updated, so a signal waits
until that work is complete. Supervisors send signals repeatedly, so a second signal does not
disturb a run that is already ending.
"""

import signal
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

# The number of signals that a run accepts before a further one interrupts its final save.
_PATIENCE = 2
# The main thread waits at most this many seconds at a time for another thread, then looks for
# signals. The kernel may deliver a signal to any thread, and one that comes just before a wait
# begins doesn't end it.
SECONDS_AT_A_TIME = 0.1


def deferred_interrupt(*, second_interrupts: bool = False) -> AbstractContextManager[None]:
    """Holds SIGINT and SIGTERM back until the body has ended, then passes them to their handlers.

    With Python's own handler, this raises a `KeyboardInterrupt` at the end of the ``with`` block.
    Blocks may be nested: the outermost raises. If the body raises, its error continues instead of a
    `KeyboardInterrupt`, because it already ends the work; handlers still learn of the signal.
    Nothing changes off the main thread, where Python delivers no signals, and for a signal that is
    ignored, has its default action, or a handler not installed from Python.

    Args:
        second_interrupts: Whether a second signal takes effect at once; for a body that may hang
            and can be interrupted without harm to the training state.

    Raises:
        KeyboardInterrupt: If a signal came during the body and its handler raises it.
    """
    return _Deferral(second_interrupts)


class _Deferral:
    """One ``with`` block of `deferred_interrupt`."""

    def __init__(self, second_interrupts: bool):
        """Makes a block that has not begun."""
        self._second_interrupts = second_interrupts
        self._held_back: dict[int, Any] = {}
        self._received: list[int] = []

    def __enter__(self) -> None:
        """Holds the signals back, on the main thread."""
        if not _on_main_thread():
            return
        # `getsignal` returns a function only for Python handlers; no other handler could be
        # restored.
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
        """Passes the received signals to their handlers."""
        late = self._end()
        try:
            if late is not None and (error is None or not isinstance(late, KeyboardInterrupt)):
                raise late
        finally:
            del late  # its traceback refers to this frame; the cycle would keep the callers' arrays

    def _end(self) -> BaseException | None:
        return _restore_handlers(self._held_back, self._received)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        goes_through = self._second_interrupts and (self._received or Signals.insists)
        # An error at a block's beginning or end could leave handlers installed for good.
        if goes_through and not _is_within(frame, self.__enter__, self.__exit__):
            self._held_back[number](number, frame)
        else:
            self._received.append(number)


def _restore_handlers(handlers: Mapping[int, Any], received: list[int]) -> BaseException | None:
    """Installs handlers, then sends again the signals that came meanwhile.

    Once the first handler is installed, a signal may raise anywhere in this function; the remaining
    work is still done.

    Args:
        handlers: The handlers by the signals' numbers.
        received: Numbers of the signals to send; empty afterwards. Each kind is sent once, because
            repeated signals mean the same.

    Returns:
        The error that a handler raised, preferably one that is not a `KeyboardInterrupt`.
    """
    left, error = list(handlers.items()), None
    while left or received:
        try:
            while left:
                signal.signal(*left[-1])
                left.pop()
            # Sent again, not raised here, so that a notebook's or an outer block's handler decides.
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
    """Whether a signal arrived while one of the given bound methods was running."""
    while frame is not None:
        for method in methods:
            of_method = frame.f_code is method.__func__.__code__
            if of_method and frame.f_locals.get("self") is method.__self__:
                return True
        frame = frame.f_back
    return False


class Signals:
    """A run's handlers of SIGINT and SIGTERM: the first signal ends it, a second has no effect.

    A signal raises `KeyboardInterrupt` in the run; the second one does so only while a body that
    allows it (`deferred_interrupt(insist=True)`) holds the first one back. Once the run is ending,
    two signals in total are only counted, and a third raises `KeyboardInterrupt` again. SIGINT is
    taken over from Python's own handler, SIGTERM from its default action and from any handler
    installed from Python; ignored signals and non-Python handlers are left alone. The program's own
    handler of SIGINT still decides: it gets the signal at once, or at `begin` or `__exit__` if the
    signal comes while handlers are replaced, where its error could leave one installed for good.

    Example: a supervisor sends SIGTERM, and again after 0.1 s while the last step is being saved:

        begin() -> from now on signals interrupt the run
        first   -> KeyboardInterrupt after the current step; `ending` is true
        second  -> counted; the save continues
        __exit__ -> the previous handlers are restored; `call_previous_handler` calls them

    Attributes:
        ending: Whether the run is ending, so that signals are only counted.
        insists: Whether a thread interrupts the user's code, as a second signal does.
    """

    insists = False

    def __init__(self):
        """Makes handlers that are not installed yet."""
        self.ending = False
        self._insisted_by: BaseException | None = None
        self._has_begun = False
        self._received: list[int] = []
        # Signals for the program's own handler of SIGINT.
        self._held_back: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        """Takes the signals over, on the main thread."""
        if _on_main_thread():
            interrupt = signal.getsignal(signal.SIGINT)
            terminate = signal.getsignal(signal.SIGTERM)
            # First in here, so that `_restore_handlers` restores it last.
            if callable(interrupt):
                self._before[signal.SIGINT] = interrupt
            if terminate is signal.SIG_DFL or callable(terminate):
                self._before[signal.SIGTERM] = terminate
        try:
            for number in self._before:
                signal.signal(number, self._receive)
            return self
        except BaseException:
            _restore_handlers(self._before, self._held_back)
            raise

    def __exit__(self, *error: object) -> None:
        """Restores the previous handlers."""
        self._insisted_by, Signals.insists = None, False
        late = _restore_handlers(self._before, self._held_back)
        if late is not None:
            raise late

    def begin(self) -> None:
        """Lets signals interrupt the run from now on; earlier ones are only counted.

        Raises:
            KeyboardInterrupt: If one came before.
        """
        self._has_begun = True
        if self._held_back:
            self._held_back.clear()
            signal.raise_signal(signal.SIGINT)
        if self._received:
            self.ending = True
            raise KeyboardInterrupt

    def note(self, number: int) -> None:
        """Counts a signal that ended another process of the run as if it had arrived here."""
        self._received.append(number)

    def ends_run(self, number: int) -> bool:
        """Whether a signal of this number ends the run."""
        before = self._before.get(number)
        return before is not None and (number == signal.SIGTERM or _is_default(before))

    def insist(self, error: BaseException) -> None:
        """Raises an error on the main thread, also within a body that holds the first signal back.

        Called by another thread. While the run is ending, or if SIGTERM was not taken over, nothing
        happens.
        """
        if self.ending or signal.SIGTERM not in self._before:
            return
        self._insisted_by, Signals.insists = error, True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    @property
    def has_received(self) -> bool:
        """Whether a signal has come."""
        return bool(self._received)

    @property
    def names(self) -> str:
        """The signals that came, for a message."""
        return " and ".join(signal.Signals(n).name for n in dict.fromkeys(self._received))

    @property
    def terminates(self) -> bool:
        """Whether SIGTERM came and its previous action was to end the process."""
        handler = self._before.get(signal.SIGTERM)
        return signal.SIGTERM in self._received and handler is signal.SIG_DFL

    def call_previous_handler(self) -> None:
        """Calls SIGTERM's previous handler, if SIGTERM came; after `__exit__`."""
        if signal.SIGTERM in self._received and callable(self._before.get(signal.SIGTERM)):
            signal.raise_signal(signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if (error := self._insisted_by) is not None and number == signal.SIGTERM:
            self._insisted_by, Signals.insists = None, False
            if self._has_begun and not self.ending and not self._waits(frame):
                self.ending = True
                raise error
            return
        # An error while handlers are replaced could leave one of these installed for good.
        if number == signal.SIGINT and not _is_default(before):
            if self._waits(frame):
                self._held_back.append(number)
            else:
                before(number, frame)
            return
        self._received.append(number)
        if self._waits(frame):
            return
        if not self.ending or len(self._received) > _PATIENCE:
            self.ending = True
            raise KeyboardInterrupt

    def _waits(self, frame: FrameType | None) -> bool:
        return not self._has_begun or _is_within(frame, self.__exit__)


def _is_default(handler: Any) -> bool:
    return handler is signal.default_int_handler


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
