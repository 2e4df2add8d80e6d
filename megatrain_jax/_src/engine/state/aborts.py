"""JAX's aborts of this process, with a word in Python about their cause.

If its coordination service fails, JAX writes a message of C++ and calls `abort`, mostly on a thread
of its own. Here this thread is held up instead, and the run ends by an error in Python; where
Python's own thread aborts, as in `jax.distributed.initialize` when a process never comes, the words
are printed and the process exits.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

# The handler must live as long as the process.
_handlers: list[object] = []
_explain: list[Callable[[bool], str]] = []
# After this many seconds the process ends, if the run has not ended it.
_HELD_SECONDS = 30.0


def explain_aborts(words: Callable[[bool], str]) -> None:
    """Has JAX's aborts explained from now on.

    Args:
        words: Called with whether Python's own thread aborts; returns the cause, for a message. On
            a thread of JAX it may also let the run know, which has half a minute to end.
    """
    _explain[:] = [words]
    if _handlers:
        return
    library = ctypes.CDLL(None)

    def handle(number: int) -> None:
        is_own = threading.get_ident() in {thread.ident for thread in threading.enumerate()}
        text = _explain[0](is_own)
        if is_own:
            end(text)
        time.sleep(_HELD_SECONDS)
        end(text)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    library.signal.restype = ctypes.c_void_p
    library.signal(int(signal.SIGABRT), handler)
    _handlers.append(handler)


def end(text: str, status: int = 1, *, stacks: bool = True) -> None:
    """Ends this process at once, with a message and, if wanted, the stacks of its threads."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    if text:
        os.write(2, f"\n{text}\n\n".encode(errors="replace"))
    if stacks:
        faulthandler.dump_traceback(2)
    os._exit(status)
