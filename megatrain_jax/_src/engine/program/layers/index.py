"""Indices of slices: the part of a parameter that the store keeps as a separate array.

An index has a number for each sliced axis and None for each whole axis before the last sliced one:
`()` is the whole array, `(3,)` is `w[3]`, `(None, 3)` is `w[:, 3]`. An array of experts that is
stored group by group has a range instead, which keeps the axis: `(Range(4, 8),)` is `w[4:8]`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike


class Range(NamedTuple):
    """A part of axis 0; all ranges of an array are equally long.

    Attributes:
        start: Its first position.
        stop: The position after its last.
    """

    start: int
    stop: int

    def of(self, size: int, new_size: int) -> "Range":
        """The same part of an axis with `new_size` positions in place of `size`."""
        return Range(self.start * new_size // size, self.stop * new_size // size)


Index = tuple[int | None, ...] | tuple[Range]


def range_of(index: Index) -> Range | None:
    """The range of an index; None if it has none."""
    return index[0] if index and isinstance(index[0], Range) else None


def selector(index: Index) -> tuple[int | slice, ...]:
    """The subscript that takes this part of an array: `x[selector(index)]`."""
    if (part := range_of(index)) is not None:
        return (slice(*part),)
    return tuple(slice(None) if i is None else i for i in _positions(index))


def numbers(index: Index) -> tuple[int, ...]:
    """The numbers in an index, or the first position of its range."""
    if (part := range_of(index)) is not None:
        return (part.start,)
    return tuple(i for i in _positions(index) if i is not None)


def sliced_axes(index: Index) -> tuple[int, ...]:
    """The axes of an index that a slice lacks."""
    if range_of(index) is not None:
        return ()
    return tuple(axis for axis, i in enumerate(index) if i is not None)


def _positions(index: Index) -> tuple[int | None, ...]:
    assert range_of(index) is None
    return index  # pyright: ignore[reportReturnType]


def index_of(axes: Sequence[int], positions: Sequence[int]) -> Index:
    """The index with these numbers on these axes, given in ascending order.

    `index_of((1,), (3,))` is `(None, 3)`.
    """
    at = dict(zip(axes, map(int, positions), strict=True))
    return tuple(at.get(axis) for axis in range(max(axes, default=-1) + 1))


def remaining(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """A shape without the given axes."""
    return tuple(n for axis, n in enumerate(shape) if axis not in axes)


def shown(index: Index) -> str:
    """An index as users write it."""
    if (part := range_of(index)) is not None:
        return f"[{part.start}:{part.stop}]"
    return f"[{', '.join(':' if i is None else str(i) for i in index)}]" if index else ""


def joined(rows: Iterable[tuple[Index, ArrayLike]], shape: Sequence[int]) -> np.ndarray:
    """Joins slices to a whole array; a single slice with index `()` is returned as it is."""
    rows = list(rows)
    if len(rows) == 1 and not rows[0][0]:
        return np.asarray(rows[0][1])
    whole = np.empty(shape, np.asarray(rows[0][1]).dtype)
    for index, array in rows:
        whole[selector(index)] = array
    return whole
