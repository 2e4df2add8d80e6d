"""User errors, reported in one line instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

# A note that JAX adds to errors passing through its functions; it is about tracebacks.
_OF_TRACEBACKS = "JAX_TRACEBACK_FILTERING"


class AskedWronglyError(Exception):
    """A command can't do the request; the message says why."""


@contextmanager
def checking() -> Iterator[None]:
    """Turns errors in a body that only checks, reads and plans into `AskedWronglyError`."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise AskedWronglyError(told(error)) from error


def told(error: BaseException) -> str:
    """The text of an error, with the notes that were added to it."""
    notes = (note for note in getattr(error, "__notes__", ()) if _OF_TRACEBACKS not in note)
    return " ".join([str(error), *notes])
