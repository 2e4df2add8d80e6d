"""Checks of single arguments. Errors give the argument's name, its value and the allowed values.

NumPy integers and Booleans count as integers and Booleans. A Boolean is not an integer, a whole
float is not an integer, and numbers must be finite.
"""

import dataclasses
import inspect
import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from types import UnionType
from typing import Any, TypeVar

import numpy as np

from megatrain_jax._src.common.sizes import bytes_of, sized

_T = TypeVar("_T")
# Python treats Booleans as integers, but nobody means one as a number of steps or bytes.
_BOOLEANS = (bool, np.bool_)


class _Shown(reprlib.Repr):
    """Short representations on one line, with the dtypes and shapes of arrays, not their values."""

    def __init__(self):
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr1(self, x: Any, level: int) -> str:
        """Returns the representation of a value, or of a part of one."""
        shape = getattr(x, "shape", None)
        if shape and isinstance(shape, tuple) and hasattr(x, "dtype"):
            return f"{x.dtype}{list(shape)}"
        return " ".join(super().repr1(x, level).split())


shown = _Shown().repr
"""Returns a value as text of bounded length, however long or deep it is."""


def refused(name: str, allowed: str, value: Any, hint: str = "") -> str:
    """The error message for a bad argument.

    Args:
        name: The argument.
        allowed: The values that it may have, in words.
        value: The value given.
        hint: Advice, as a clause.
    """
    end = f"; {hint}" if hint else ""
    return f"`{name}` must be {allowed}, but is {shown(value)} ({type(value).__name__}){end}"


def integer(
    name: str, value: Any, *, least: int = 1, most: int | None = None, other: str = ""
) -> int:
    """Returns an integer as Python's own.

    Args:
        name: The argument.
        value: The value given.
        least: The least allowed.
        most: The most allowed; None for no bound.
        other: Further values that the argument accepts, for the message.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is out of bounds.
    """
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    allowed = f"an integer {bounds}{other}"
    try:
        number = None if isinstance(value, _BOOLEANS) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        is_whole = isinstance(value, float) and value.is_integer()
        raise TypeError(refused(name, allowed, value, f"pass int({value!r})" if is_whole else ""))
    if number < least or (most is not None and number > most):
        raise ValueError(refused(name, bounds, value))
    return number


def num_bytes(name: str, value: Any, *words: str, least: int = 2**20) -> int | str | None:
    """Returns a number of bytes, one of the given words, or None.

    Args:
        name: The argument.
        value: The value given: an integer, text such as "22 GiB", a word, or None.
        words: Words that are allowed too.
        least: The least integer that can be meant in bytes; less was meant in another unit.

    Raises:
        TypeError: If it is neither an integer nor text.
        ValueError: If it is below `least`, or text that gives no number of bytes.
    """
    if value is None or (isinstance(value, str) and value in words):
        return value
    listed = "".join(f'"{word}", ' for word in words)
    if isinstance(value, str):
        try:
            size = bytes_of(name, value)
        except ValueError as error:
            also = f"{listed}or None" if words else "None"
            raise ValueError(f"{error}; it may also be {also}") from None
        if size < least:
            raise ValueError(f"`{name}`={value!r} is below {sized(least)}: write a larger unit")
        return size
    number = integer(name, value, other=f' (bytes), text such as "22 GiB", {listed}or None')
    if number < least:
        unit = "byte" if number == 1 else "bytes"
        raise ValueError(f'`{name}`={number} would be {number} {unit}: write "{number} GiB"')
    return number


def device_budget(value: Any, least: int = 2**20) -> int | str | None:
    """Returns the option `device_budget`: bytes, "minimum", or None for all that is free.

    Args:
        value: The value given, as of `num_bytes`; "auto" is None, and "least" is "minimum".
        least: See `num_bytes`.

    Raises:
        TypeError: See `num_bytes`.
        ValueError: See `num_bytes`.
    """
    value = {"least": "minimum", "auto": None}.get(value, value) if type(value) is str else value
    return num_bytes("device_budget", value, "minimum", "auto", least=least)


def number(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Returns a finite real number as a Python float.

    Args:
        name: The argument.
        value: The value given; an array without axes is a number.
        above: A bound that it must exceed.
        least: The minimum allowed.
        most: The maximum allowed.
        below: A bound that it must not reach.

    Raises:
        TypeError: If it is not a real number.
        ValueError: If it is not finite, or out of bounds.
    """
    bounds = {"above": above, "of at least": least, "of at most": most, "below": below}
    stated = [f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound)]
    allowed = " ".join(["a finite number", " and ".join(stated)]).rstrip()
    is_other = isinstance(value, (*_BOOLEANS, str, bytes)) or getattr(value, "shape", ())
    try:
        result = None if is_other else float(value)
    except OverflowError:
        result = math.inf
    except (TypeError, ValueError):  # a value that JAX traces has no number yet
        result = None
    if result is None:
        raise TypeError(refused(name, allowed, value))
    if not (above < result < below and least <= result <= most):
        raise ValueError(refused(name, allowed, value))
    return result


def boolean(name: str, value: Any, other: str = "") -> bool:
    """Returns a Boolean as Python's own.

    Args:
        name: The argument.
        value: The value given.
        other: Further values that the argument accepts, for the message.

    Raises:
        TypeError: If it is not a Boolean.
    """
    if not isinstance(value, _BOOLEANS):
        raise TypeError(refused(name, f"True or False{other}", value))
    return bool(value)


def instance(name: str, value: Any, kind: type[_T] | UnionType, allowed: str) -> _T:
    """Returns a value of a class.

    Args:
        name: The argument.
        value: The value given.
        kind: The class, or a union of classes.
        allowed: The class in words, for the message.

    Raises:
        TypeError: If it is none of this class.
    """
    if not isinstance(value, kind):
        raise TypeError(refused(name, allowed, value))
    return value


def numbers(owner: Any, kind: type[Any], **bounds: Mapping[str, Any]) -> None:
    """Checks the fields of a dataclass that are integers, floats or Booleans, or these or None.

    Args:
        owner: The object.
        kind: The class whose fields are checked, as far as their types are these.
        **bounds: For fields, the bounds of `integer` or `number`; otherwise integers are at least
            1, and floats at least 0.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If one is out of bounds.
    """
    for field in dataclasses.fields(kind):
        value, limits = getattr(owner, field.name), bounds.get(field.name, {})
        if value is None and field.type in (int | None, float | None):
            continue
        if field.type in (int, int | None):
            integer(field.name, value, **limits)
        elif field.type in (float, float | None):
            number(field.name, value, **(limits or {"least": 0}))
        elif field.type is bool:
            boolean(field.name, value)


def word(name: str, value: Any, known: Iterable[str], other: str = "") -> str:
    """Returns one of some words.

    Args:
        name: The argument.
        value: The value given.
        known: The words.
        other: Further values that the argument accepts, for the message.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is another string.
    """
    if isinstance(value, str) and value in known:
        return value
    allowed = f"{either(known)}{other}"
    raise (ValueError if isinstance(value, str) else TypeError)(refused(name, allowed, value))


def either(words: Iterable[str]) -> str:
    """Words as a message lists them: `"a", "b" or "c"`."""
    *most, last = (f'"{word}"' for word in words)
    return f"{', '.join(most)} or {last}" if most else last


def pattern(
    name: str, value: str, compiled: Callable[[str], re.Pattern[str]] = re.compile
) -> re.Pattern[str]:
    """Returns a regular expression, compiled.

    Args:
        name: The argument.
        value: The value given.
        compiled: Compiles it.

    Raises:
        ValueError: If it is none.
    """
    try:
        return compiled(value)
    # Also of a number that is too large, and of groups that are nested too deeply.
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"`{name}`={value[:100]!r} is no regular expression: {error}") from error


def ascending(name: str, value: Any) -> tuple[int, ...]:
    """Returns a tuple of integers from 0, each larger than the one before.

    Raises:
        TypeError: If it is not a tuple of integers.
        ValueError: If one is negative, or they don't ascend.
    """
    if not isinstance(value, tuple):
        raise TypeError(refused(name, "a tuple of integers", value))
    for number in value:
        integer(name, number, least=0)
    if list(value) != sorted(set(value)):
        raise ValueError(refused(name, "ascending", value))
    return value


def path(name: str, value: Any, other: str = "") -> str:
    """Returns the path of a file or folder as a string, with the home folder in place of a `~`.

    Args:
        name: The argument.
        value: The value given.
        other: Further values that the argument accepts, for the message.

    Raises:
        TypeError: If it is neither a string nor a path object.
        ValueError: If it is empty or contains a null character.
    """
    allowed = f"a path, as a str or a pathlib.Path{other}"
    text = os.fspath(value) if isinstance(value, str | PathLike) else None
    if not isinstance(text, str):
        raise TypeError(refused(name, allowed, value))
    if not text or "\0" in text:
        raise ValueError(refused(name, f"{allowed}, not empty and without null characters", value))
    return os.path.expanduser(text)


def can_be_called(function: Callable[..., Any], num_arguments: int) -> bool:
    """Whether a function's signature accepts this many arguments; True if it has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return True
    try:
        signature.bind(*(None,) * num_arguments)
    except TypeError:
        return False
    return True


def is_number(value: Any) -> bool:
    """Whether a value of a step's record is a number; Booleans are not."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
