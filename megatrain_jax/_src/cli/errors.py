"""Mistakes in what a command is asked for, told in a line instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

# A note of JAX's on errors that pass through its functions, which is about tracebacks.
_OF_TRACEBACKS = "JAX_TRACEBACK_FILTERING"


class AskedWronglyError(Exception):
    """A command can't do what it is asked for; the message says why."""


@contextmanager
def checking() -> Iterator[None]:
    """Turns errors of a body that only checks, reads and plans into `AskedWronglyError`."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise AskedWronglyError(told(error)) from error


def told(error: BaseException) -> str:
    """The text of an error, with the notes that were added to it on its way."""
    notes = (note for note in getattr(error, "__notes__", ()) if _OF_TRACEBACKS not in note)
    return " ".join([str(error), *notes])
