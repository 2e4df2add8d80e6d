"""Check of the option for the parameters to train."""

import re
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.checks import refused


def trainable_of(value: Any) -> Any:
    """Returns the argument `trainable`, a list of patterns as a tuple.

    Raises:
        TypeError: If it is neither a pattern, a list of patterns, a function nor None.
        ValueError: If a pattern is no regular expression.
    """
    is_listed = isinstance(value, list | tuple) and value and all(type(p) is str for p in value)
    for pattern in value if is_listed else [value] if isinstance(value, str) else []:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            given = f"`trainable`={value!r}"
            at = f": {pattern!r}" if is_listed else ""
            raise ValueError(f"{given}{at} is no regular expression: {error}") from error
    if is_listed:
        return tuple(value)
    if not (value is None or isinstance(value, str)) and not (
        callable(value) and checks.can_be_called(value, 1)
    ):
        allowed = "a regular expression, a list of them, a function of a parameter's path, or None"
        raise TypeError(refused("trainable", allowed, value))
    return value
