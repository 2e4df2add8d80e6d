"""Notes on errors, and the first error of several calls."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def noting(text: str, *kinds: type[Exception]) -> Iterator[None]:
    """Adds a note to an error of the body, if it is of these kinds; without any, to every error."""
    kinds = kinds or (Exception,)
    try:
        yield
    except kinds as error:
        error.add_note(text)
        raise


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Calls functions one after another.

    Raises:
        Exception: The first error, when all have been called.
    """
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
