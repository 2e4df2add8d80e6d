"""The numbers that an optimizer was made with, by the names that Optax gives them.

A traced update has numbers without names. The functions that `optax.adamw(1e-3)` is made of still
have both, as they close over `b1`, `eps`, `weight_decay` and so on. A message can name them.
"""

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Beyond these an object is no optimizer any more, but data.
_DEPTH, _MOST = 16, 200
# `optax.scale_by_learning_rate(0.1)` is `optax.scale(-0.1)`, whose number has this name.
_STEP = "step_size"

Numbers = Sequence[Sequence[Any]]


def named_numbers(function: Any) -> list[tuple[str, float]]:
    """The numbers that a function and the functions it is made of close over.

    Args:
        function: An optimizer's `update`.

    Returns:
        Names and values in the order of the functions, each function once; the first 200.

    Examples:
        >>> import optax
        >>> named_numbers(optax.sgd(0.1, momentum=0.9).update)
        [('decay', 0.9), ('learning_rate', 0.1)]
    """
    found = _numbers("", function, 0, set())
    return [row for row, _ in zip(found, range(_MOST), strict=False)]


def other_numbers(before: Numbers, now: Numbers) -> str:
    """A clause such as `learning_rate 0.001 -> 0.002` on the numbers that differ.

    Args:
        before: Names and values.
        now: Others; nothing is said if their names are not the same ones.
    """
    if [name for name, _ in before] != [name for name, _ in now]:
        return ""
    rows = [
        f"{name} {old:.6g} -> {new:.6g}"
        for (name, old), (_, new) in zip(before, now, strict=True)
        if old != new
    ]
    # Two functions may close over one number.
    return ", ".join(dict.fromkeys(rows))


def _numbers(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | np.bool_) or depth > _DEPTH:
        return
    if isinstance(value, int | float | np.integer | np.floating):
        is_rate = name == _STEP and value < 0
        yield ("learning_rate", -float(value)) if is_rate else (name, float(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(str(key), item, depth + 1, seen)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _numbers(name, item, depth + 1, seen)
    elif id(value) not in seen:
        seen.add(id(value))
        for key, item in _parts(value):
            yield from _numbers(key, item, depth + 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The named values that a function of any kind holds."""
    if isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield "", value.args
        yield "", value.keywords
    elif isinstance(value, types.MethodType):
        yield "", value.__func__
        yield from getattr(value.__self__, "__dict__", {}).items()
    elif callable(value) and not isinstance(value, type):
        # A schedule that is an object, or a function that another one wraps, as `__wrapped__`.
        yield from getattr(value, "__dict__", {}).items()
