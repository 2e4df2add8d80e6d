"""Moves the slices of a stacked array as an operation would, without computing on them.

A stacked array is a grid of slices: an array with one object per slice, and the axes of the whole
array that the grid's axes stand for. Transposing, reversing, slicing or regrouping the whole array
along those axes only rearranges the grid. Along all remaining axes, the operation applies within
each slice.

Example: `w` of shape (6, 4, 5) is a grid `[s0 ... s5]` along axis 0, each slice (4, 5)::

    w[::-1].transpose(1, 0, 2)   # grid [s5 ... s0] along axis 1; nothing within a slice
    w.reshape(2, 3, 4, 5)        # grid [[s0, s1, s2], [s3, s4, s5]] along axes 0 and 1
    w.transpose(0, 2, 1)         # the same grid; transpose(1, 0) within each slice
    w.reshape(3, 8, 5)           # None: each row of the result spans two slices
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from megatrain_jax._src.engine.program.axes import MAPPED, Axes, params_of_slice
from megatrain_jax._src.engine.program.layers.index import remaining
from megatrain_jax._src.engine.program.primitives import ARG_REDUCTIONS, CUMULATIVE, REDUCTIONS

# From the position of an operand to the integers it is known to hold, or None.
_KnownOperand = Callable[[int], np.ndarray | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Moved:
    """A grid after an operation, and the operation that remains to be done within each slice.

    Attributes:
        grid: Slices of the result, object[...].
        axes: Axes of the result that the grid's axes stand for, ascending.
        params: Parameters of the operation within a slice; None if nothing remains to be done.
        operands: Positions of the further operands that the operation takes within a slice.
    """

    grid: np.ndarray
    axes: tuple[int, ...]
    params: dict[str, Any] | None
    operands: tuple[int, ...] = ()


def moved(
    eqn: Any, grid: np.ndarray, axes: tuple[int, ...], known: _KnownOperand
) -> list[_Moved] | None:
    """Applies an operation to its first operand, a grid.

    Args:
        eqn: The equation.
        grid: The slices of its first operand.
        axes: The axes along which that operand is sliced, ascending.
        known: Maps the position of another operand to its known integers, or None.

    Returns:
        The grid of each result; None if the operation mixes slices, or isn't known here.
    """
    name = eqn.primitive.name
    # A sharding of the result names axes that a slice doesn't have.
    if eqn.params.get("sharding") is not None:
        return None
    if rule := _RULES.get(name):
        return rule(eqn, grid, axes, known)
    return _apart(eqn, grid, axes) if name in _APART else None


def _apart(eqn, grid: np.ndarray, axes: tuple[int, ...]) -> list[_Moved] | None:
    """The grid of each result if the operation leaves the slices apart, each at its place."""
    rules, ends = Axes(eqn), []
    for axis in axes:
        places, kind = rules.together(0, axis) or ((), None)
        if kind != MAPPED:
            return None
        ends.append(dict(places))
    found = []
    for at in range(len(eqn.invars), len(eqn.invars) + len(eqn.outvars)):
        new = [end[at] for end in ends]
        params: dict[str, Any] | None = params_of_slice(eqn, axes, new)
        order = params.get("permutation")
        if order is not None and order == tuple(sorted(order)):
            params = None
        turned = grid.transpose(np.argsort(new))
        found.append(_Moved(grid=turned, axes=tuple(sorted(new)), params=params))
    return found


def _rev(eqn, grid, axes, known):
    dims = eqn.params["dimensions"]
    params = None if set(dims) <= set(axes) else params_of_slice(eqn, axes, ())
    turned = np.flip(grid, tuple(axes.index(d) for d in dims if d in axes))
    return [_Moved(grid=turned, axes=axes, params=params)]


def _slice(eqn, grid, axes, known):
    shape = eqn.invars[0].aval.shape
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(shape)
    taken = grid[tuple(slice(starts[a], limits[a], strides[a]) for a in axes)]
    whole = remaining(eqn.outvars[0].aval.shape, axes) == remaining(shape, axes)
    params = {**params_of_slice(eqn, axes, axes), "strides": remaining(strides, axes)}
    return [_Moved(grid=taken, axes=axes, params=None if whole else params)]


def _dynamic_slice(eqn, grid, axes, known):
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    places = []
    for a in axes:
        start = known(1 + a)
        if start is None:
            return None
        # XLA clamps a dynamic slice that would reach past an end; so do we.
        first = min(max(int(start), 0), shape[a] - sizes[a])
        places.append(slice(first, first + sizes[a]))
    whole = remaining(sizes, axes) == remaining(shape, axes)
    return [
        _Moved(
            grid=grid[tuple(places)],
            axes=axes,
            params=None if whole else params_of_slice(eqn, axes, axes),
            operands=() if whole else tuple(1 + d for d in range(len(shape)) if d not in axes),
        )
    ]


def _gather(eqn, grid, axes, known):
    """`take` along one sliced axis, by known integers."""
    shape, numbers = eqn.invars[0].aval.shape, eqn.params["dimension_numbers"]
    along = numbers.start_index_map
    if len(along) != 1 or along[0] not in axes or numbers.collapsed_slice_dims != along:
        return None
    (axis,), places = along, known(1)
    whole = tuple(1 if d == axis else n for d, n in enumerate(shape))
    batched = numbers.operand_batching_dims
    if places is None or batched or tuple(eqn.params["slice_sizes"]) != whole:
        return None
    places = places[..., 0]
    if eqn.params["mode"] == GatherScatterMode.CLIP:
        places = np.clip(places, 0, shape[axis] - 1)
    # Out of bounds, the remaining modes fill or drop; no slice represents that.
    if places.size and (places.min() < 0 or places.max() >= shape[axis]):
        return None
    rank, offsets = len(eqn.outvars[0].aval.shape), numbers.offset_dims
    # The result has the axes of the places and, in the order of `offset_dims`, the operand's
    # remaining axes. Sorted by their final position, the grid's axes ascend again.
    batch = [d for d in range(rank) if d not in offsets]
    kept = dict(zip((d for d in range(len(shape)) if d != axis), offsets, strict=True))
    at = axes.index(axis)
    cells = np.take(grid, places.reshape(-1), axis=at)
    taken = cells.reshape((*grid.shape[:at], *places.shape, *grid.shape[at + 1 :]))
    ends = [*(kept[a] for a in axes[:at]), *batch, *(kept[a] for a in axes[at + 1 :])]
    order = np.argsort(ends)
    return [_Moved(grid=taken.transpose(order), axes=tuple(sorted(ends)), params=None)]


def _squeeze(eqn, grid, axes, known):
    dims = eqn.params["dimensions"]
    taken = grid[tuple(0 if a in dims else slice(None) for a in axes)]
    return [
        _Moved(
            grid=np.asarray(taken),
            axes=tuple(a - sum(d < a for d in dims) for a in axes if a not in dims),
            params=None if set(dims) <= set(axes) else params_of_slice(eqn, axes, ()),
        )
    ]


def _reshape(eqn, grid, axes, known):
    """Regroups axes; in each regrouped run, either all axes or none must be sliced."""
    old, new = eqn.invars[0].aval.shape, tuple(eqn.params["new_sizes"])
    if eqn.params.get("dimensions") is not None or 0 in old:
        return None
    found: list[int] = []
    # A run of axes is regrouped row by row, so slices stay whole only if all of it is sliced.
    for olds, news in segments(old, new):
        if any(d in axes and old[d] > 1 for d in olds):
            if any(d not in axes and old[d] > 1 for d in olds):
                return None
            found += [d for d in news if new[d] > 1]
    same = remaining(new, found) == remaining(old, axes)
    params = None if same else params_of_slice(eqn, axes, found)
    return [_Moved(grid=grid.reshape([new[d] for d in found]), axes=tuple(found), params=params)]


def segments(old: tuple[int, ...], new: tuple[int, ...]):
    """Splits two shapes into the shortest pairs of runs of axes with equal numbers of elements.

    (6, 4, 5) and (2, 3, 20) give ([0], [0, 1]) and ([1, 2], [2]).
    """
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news = [i] if i < len(old) else [], [j] if j < len(new) else []
        if olds and old[i] == 1:
            news = []
        elif news and new[j] == 1:
            olds = []
        while (a := math.prod(old[d] for d in olds)) != (b := math.prod(new[d] for d in news)):
            if a < b:
                olds.append(olds[-1] + 1)
            else:
                news.append(news[-1] + 1)
        yield olds, news
        i, j = i + len(olds), j + len(news)


def _split(eqn, grid, axes, known):
    sizes, axis = eqn.params["sizes"], eqn.params["axis"]
    if axis not in axes:
        return _apart(eqn, grid, axes)
    parts = np.split(grid, np.cumsum(sizes)[:-1].tolist(), axis=axes.index(axis))
    return [_Moved(grid=part, axes=axes, params=None) for part in parts]


def _unstack(eqn, grid, axes, known):
    axis = eqn.params["axis"]
    if axis not in axes:
        return _apart(eqn, grid, axes)
    new = tuple(a - (axis < a) for a in axes if a != axis)
    rows = np.moveaxis(grid, axes.index(axis), 0)
    return [_Moved(grid=rows[i, ...], axes=new, params=None) for i in range(len(rows))]


# Operations of one array that never change the slices' order among themselves.
_APART = REDUCTIONS | ARG_REDUCTIONS | CUMULATIVE | {"broadcast_in_dim", "transpose"}
# Operations that select or regroup the slices themselves.
_RULES: dict[str, Callable[..., list[_Moved] | None]] = {
    "rev": _rev,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "split": _split,
    "unstack": _unstack,
}
