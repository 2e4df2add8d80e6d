"""User errors, reported in one line instead of a traceback."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# A note that JAX adds to errors passing through its functions; it is about tracebacks.
_OF_TRACEBACKS = "JAX_TRACEBACK_FILTERING"


# Advice for Python, as regular expressions, and the same advice for the command.
_ADVICE = (
    (r'Precision\(products=\{"\*": "float8"\}\)', "--products float8-all"),
    (r"Map these paths to float32 in Precision\(state=\{\.\.\.\}\)", "Use --state float32"),
    (r"Precision\.compact\(\)", "--precision compact"),
    (r"Precision\((\w+)=(?:\.\.\.|\"(\w+)\")\)", r"--\1 \2"),
    (r"`precision` asks for float8", "--products asks for float8"),
    (r"state that `precision` holds", "state that --state holds"),
    (r'`?\b([a-z]\w*)="(\w+)"`?', r"--\1 \2"),
    (r"`(compute|device_budget|host_budget|microbatches)`", r"--\1"),
)


class CommandError(Exception):
    """An invalid request; the command prints the message in one line."""


@contextmanager
def as_command_errors() -> Iterator[None]:
    """Turns errors in a body that only checks, reads and plans into `CommandError`."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise CommandError(error_text(error)) from error


def error_text(error: BaseException) -> str:
    """The text of an error, with the notes that were added to it."""
    notes = (note for note in getattr(error, "__notes__", ()) if _OF_TRACEBACKS not in note)
    return " ".join([str(error), *notes])


def with_cli_options(text: str) -> str:
    """A message of the library, with command-line options in place of arguments in Python.

    Examples:
        >>> with_cli_options('pass Precision(frozen="int8") and a larger `device_budget`')
        'pass --frozen int8 and a larger --device-budget'
    """
    for pattern, option in _ADVICE:
        text = re.sub(pattern, lambda m, o=option: _as_word(m.expand(o)), text)
    return text


def _as_word(option: str) -> str:
    name, space, value = option.partition(" ")
    name = name.replace("_", "-") if name.startswith("--") else name
    return f"{name}{space}{value}".rstrip()
