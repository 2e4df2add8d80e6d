"""Ctrl-C and SIGTERM between steps instead of within one.

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
    """Holds SIGINT and SIGTERM back until the body has ended, then hands them to their handlers.

    With Python's own handler that means a `KeyboardInterrupt` at the end of the ``with`` block.
    Blocks may be nested: the outermost raises. If the body raises, its error goes on and the
    signal is dropped, because the error already ends the work. Off the main thread, where Python
    delivers no signals, and for a signal that is ignored, has its default action or a handler that
    was not installed from Python, nothing changes.

    Args:
        insist: Whether a second signal goes through at once; for a body that may hang and that
            can be cut off without harm to the training state.

    Raises:
        KeyboardInterrupt: If a signal came during the body whose handler raises it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held_back = {number: call for number, call in handlers.items() if callable(call)}
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if insist and len(received) > 1:
            held_back[signal.Signals(number)](number, frame)

    for number in held_back:
        signal.signal(number, remember)
    try:
        yield
    finally:
        for number, call in held_back.items():
            signal.signal(number, call)
    if received:
        # Sent again rather than raised here: a notebook's or an outer block's handler decides.
        signal.raise_signal(received[0])
