"""Mistakes in what a command is asked for, told in a line instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class AskedWronglyError(Exception):
    """A command can't do what it is asked for; the message says why."""


@contextmanager
def checking() -> Iterator[None]:
    """Turns errors of a body that only checks, reads and plans into `AskedWronglyError`."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        notes = getattr(error, "__notes__", ())
        raise AskedWronglyError(" ".join([str(error), *notes])) from error
