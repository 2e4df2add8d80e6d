"""Records: dicts with a step's numbers, to which callbacks may add anything."""

from typing import Any

import numpy as np


def is_number(value: Any) -> bool:
    """Whether a value of a record is a number; Booleans are not."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
