"""Warnings of what a plan could not do well, given where users see them: at their own line."""

import sys
import warnings
from collections.abc import Iterable

_PACKAGE = __name__.partition(".")[0]


class PlanWarning(UserWarning):
    """What a run could not do well, as `Plan.warnings` says it.

    Examples:
        To silence them:

        >>> import warnings
        >>> warnings.simplefilter("ignore", PlanWarning)
    """


def warn_of(texts: Iterable[str]) -> None:
    """Warns of each text at the first line outside this package that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    for text in texts:
        warnings.warn(text, PlanWarning, stacklevel=level)
