"""Warnings at the line of the user's own code that called this library."""

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
