"""Options that count only with another one, which are refused without it."""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any


def check_needed(settings: Any, names: Sequence[str], *, is_there: bool, needed: str) -> None:
    """Checks that options which would count for nothing are what they are by default.

    Args:
        settings: A dataclass of settings.
        names: Options of it that count only with others.
        is_there: Whether the settings have what they count with.
        needed: What they count with, in words, and how to ask for it.

    Raises:
        ValueError: If one was given, but not what it counts with.
    """
    if is_there:
        return
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(settings)
    }
    for name in names:
        if (value := getattr(settings, name)) != defaults[name]:
            raise ValueError(f"`{name}`={value} counts only with {needed}")
