"""Records: dicts of a step's numbers, among which callbacks may have put anything."""

from typing import Any

import numpy as np


def is_number(value: Any) -> bool:
    """Whether a value of a record is a number; a boolean is none."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
