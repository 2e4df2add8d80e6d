"""Ctrl-C between steps instead of within one.

A step that is cut off while it is dispatched leaves some groups updated and others not, so the
signal waits until the work it would break is whole.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt(*, insist: bool = False) -> Iterator[None]:
    """Holds SIGINT back until the body has ended, then hands it to the handler that was there.

    With Python's own handler that means a `KeyboardInterrupt` at the end of the ``with`` block.
    Blocks may be nested: the outermost raises. If the body raises, its error goes on and the
    signal is dropped, because the error already ends the work. Off the main thread, where Python
    delivers no signals, and under a handler that was not installed from Python, nothing changes.

    Args:
        insist: Whether a second Ctrl-C goes through at once; for a body that may hang and that
            can be cut off without harm to the training state.

    Raises:
        KeyboardInterrupt: If SIGINT came during the body and Python's own handler was in place.
    """
    previous = signal.getsignal(signal.SIGINT)
    if previous is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    received = 0

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if insist and received > 1:
            if callable(previous):
                previous(signum, frame)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        # Sent again rather than raised here: a notebook's or an outer block's handler decides.
        signal.raise_signal(signal.SIGINT)
