"""Arrays that are read or computed when they are needed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class ComputedArray:
    """An array that is read or computed when it is converted to one; nothing is kept here.

    Attributes:
        shape: Its shape.
        dtype: The dtype of its numbers.
        source_files: Paths of the files that are read, for a run that reads them ahead.
    """

    def __init__(
        self,
        what: str,
        shape: tuple[int, ...],
        dtype: Any,
        numbers: Callable[[Any], np.ndarray],
        source_files: tuple[Path, ...] = (),
    ):
        """Refers to the numbers.

        Args:
            what: What it is, for an error.
            shape: Its shape.
            dtype: The dtype of its numbers, None if only the numbers have one.
            numbers: Function that returns them, of the wanted dtype, which may be None, or not.
            source_files: See the class.
        """
        self._what, self._numbers = what, numbers
        self.shape, self.source_files = shape, source_files
        self.dtype: Any = None if dtype is None else np.dtype(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the numbers."""
        if copy is False:
            raise ValueError(f"{self._what} can't be had without copying or computing it")
        array = self._numbers(dtype)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        """Says what it is."""
        return f"ComputedArray({self._what}, {self.shape}, {self.dtype})"
