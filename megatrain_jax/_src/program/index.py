"""Indices: the part of a whole array that the store keeps as an array of its own.

An index has a number for each axis that is sliced and None for each that is not, up to the last
one that is: `()` is the whole array, `(3,)` is `w[3]`, `(None, 3)` is `w[:, 3]`.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jax.typing import ArrayLike

Index = tuple[int | None, ...]


def selector(index: Index) -> tuple[int | slice, ...]:
    """The subscript of an array that takes this part of it: `x[selector(index)]`."""
    return tuple(slice(None) if i is None else i for i in index)


def numbers(index: Index) -> tuple[int, ...]:
    """The numbers in an index."""
    return tuple(i for i in index if i is not None)


def sliced_axes(index: Index) -> tuple[int, ...]:
    """The axes that an index has numbers for."""
    return tuple(axis for axis, i in enumerate(index) if i is not None)


def index_of(axes: Sequence[int], positions: Sequence[int]) -> Index:
    """The index with these numbers on these axes, which are in ascending order.

    `index_of((1,), (3,))` is `(None, 3)`.
    """
    at = dict(zip(axes, map(int, positions), strict=True))
    return tuple(at.get(axis) for axis in range(max(axes, default=-1) + 1))


def remaining(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """A shape without some axes."""
    return tuple(n for axis, n in enumerate(shape) if axis not in axes)


def shown(index: Index) -> str:
    """An index as users write it."""
    return f"[{', '.join(':' if i is None else str(i) for i in index)}]" if index else ""


def joined(rows: Iterable[tuple[Index, ArrayLike]], shape: Sequence[int]) -> np.ndarray:
    """A whole array from its slices; the only slice of index `()` is given back as it is."""
    rows = list(rows)
    if len(rows) == 1 and not rows[0][0]:
        return np.asarray(rows[0][1])
    whole = np.empty(shape, np.asarray(rows[0][1]).dtype)
    for index, array in rows:
        whole[selector(index)] = array
    return whole
