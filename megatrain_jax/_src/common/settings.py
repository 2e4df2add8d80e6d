"""Comparison of a run's settings with the settings that its folder was started with.

Both are JSON. A value may be a function's fingerprint, as made by `program/fingerprint.py`.
"""

from collections import Counter
from collections.abc import Container, Mapping
from typing import Any

# Messages name the numbers that differ if there are at most this many.
_MOST_NUMBERS = 8


def changes(
    before: Mapping[str, Any], now: Mapping[str, Any], free: Container[str] = ()
) -> dict[str, str]:
    """The settings that differ, by name, each as a clause with both values.

    A setting that is missing on one side is ignored: a version of this library without the setting
    wrote that side.

    Args:
        before: The settings that the folder was started with.
        now: The settings of this call.
        free: Names of settings that may differ.

    Examples:
        >>> changes({"seed": 0, "batch": 8}, {"seed": 1, "batch": 8})
        {'seed': 'seed was 0 and is 1'}
    """
    found = {}
    for name, value in now.items():
        if name in before and name not in free and (clause := _clause(name, before[name], value)):
            found[name] = clause
    return found


def _clause(name: str, before: Any, now: Any) -> str | None:
    if before == now:
        return None
    if not _is_fingerprint(before) or not _is_fingerprint(now):
        return f"{name} was {before!r} and is {now!r}"
    if before["form"] != now["form"]:
        return f"{name} computes something else"
    counts = Counter(before["numbers"]), Counter(now["numbers"])
    old, new = (list(ours - theirs) for ours, theirs in (counts, counts[::-1]))
    if not (old and new) or len(old) + len(new) > _MOST_NUMBERS:
        return f"{name} computes with other numbers"
    return f"{name} computes with {', '.join(new)} in place of {', '.join(old)}"


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"form", "values", "numbers"}
