"""Reads and checks files and JSON that anybody may have written.

`parsed_json` reads all JSON except what this process wrote itself. It refuses invalid JSON, values
nested too deeply for other code to walk through, and integers of thousands of digits: these would
fail later, where nothing names the file.
"""

import json
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain_jax._src.common import checks

# Ids, sizes and counts are stored as int32.
MOST = 2**31 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
# UTF-8 has no surrogates, so JSON can have them only as escapes.
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path) -> int:
    """Returns the size of a regular file in bytes. Reading a named pipe, for example, never ends.

    Raises:
        OSError: If it can't be looked at; a `FileNotFoundError` if nothing has that name.
        ValueError: If it is not a regular file.
    """
    status = path.stat()
    if (kind := stat.S_IFMT(status.st_mode)) != stat.S_IFREG:
        raise ValueError(f"{path} is {_KINDS.get(kind, 'something else')}, not a regular file")
    return status.st_size


def parsed_json(text: str | bytes, levels: int = 64) -> Any:
    """Returns the value of JSON text from outside.

    Args:
        text: The text, or its bytes in UTF-8.
        levels: How deeply values may be nested.

    Raises:
        ValueError: If it is no JSON, is nested more deeply, or has an integer of thousands of
            digits.
    """
    deep = f"it is nested more than {levels} levels deep"
    try:
        text = text.decode() if isinstance(text, bytes) else text
        values = json.loads(text)
    except RecursionError:
        raise ValueError(deep) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # Python's limit
        raise ValueError("it has an integer of thousands of digits") from None
    # Each level takes a bracket, and few texts have so many.
    if text.count("[") + text.count("{") > levels and too_deep(values, levels):
        raise ValueError(deep)
    return values


def too_deep(values: Any, levels: int = 64) -> bool:
    """Whether JSON values are nested more than this many levels deep.

    Code that recurses takes a frame of Python's stack for each level.
    """
    level = [values]
    for _ in range(levels):
        level = [
            child
            for value in level
            if isinstance(value, dict | list | tuple)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)


def check_text(text: str) -> str:
    """Returns a text that other code can encode as UTF-8.

    Raises:
        ValueError: If it has half of a surrogate pair.
    """
    if not text.isascii() and (half := _SURROGATE.search(text)):
        raise ValueError(f"its text has half of a surrogate pair, {half[0]!r}, at {half.start()}")
    return text


def check_texts(content: bytes, values: Any) -> None:
    """Checks all texts in JSON values, as `check_text` does.

    Args:
        content: The JSON text, in UTF-8.
        values: The values in it.
    """
    waiting = [values] if _ESCAPED.search(content) else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            check_text(value)
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Puts the path of a file before the message of an error that its values cause.

    Raises:
        TypeError: For a TypeError.
        ValueError: For any other error that a value of JSON can cause in code that computes with
            it, such as an OverflowError for a number that is too large.
    """
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from error
    except (ValueError, ArithmeticError, LookupError, RecursionError, re.error) as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: {what}") from error


@contextmanager
def as_value_errors(message: str) -> Iterator[None]:
    """Turns any error of another library into a `ValueError` of one line that begins with this."""
    try:
        yield
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise ValueError(f"{message}: {why}") from error


@contextmanager
def needing(advice: str, kind: type[Exception] = ImportError) -> Iterator[None]:
    """Turns the error of a package that can't be imported into one with advice."""
    try:
        yield
    except ImportError as error:
        raise kind(advice) from error


def integer(path: Path | str, name: str, value: Any, *, least: int = 0, most: int = MOST) -> int:
    """Returns an integer in a file.

    Args:
        path: The file, for the message.
        name: The field.
        value: Its value.
        least: The least allowed.
        most: The most allowed.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is out of bounds.
    """
    with naming(path):
        return checks.integer(name, value, least=least, most=most)
