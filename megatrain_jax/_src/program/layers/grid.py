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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from megatrain_jax._src.program.layers.index import remaining
from megatrain_jax._src.program.primitives import ARG_REDUCTIONS, CUMULATIVE, REDUCTIONS

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
        The grid of each result; None if the operation mixes slices or has no rule here.
        The grid of each result; None if the operation mixes slices, or isn't known here.
    """
    name = eqn.primitive.name
    rule = _RULES.get(name)
    # A sharding of the result names axes that a slice doesn't have.
    if rule is None or eqn.params.get("sharding") is not None:
        return None
    return rule(eqn, grid, axes, known)


def _inner(axes: Sequence[int], dim: int) -> int:
    """The number, within a slice, of an axis of the whole that is not sliced."""
    return dim - sum(a < dim for a in axes)


def _inner_all(axes, dims) -> tuple[int, ...]:
    """The numbers, within a slice, of all given axes that are not sliced."""
    return tuple(_inner(axes, d) for d in dims if d not in axes)


def _transpose(eqn, grid, axes, known):
    order = eqn.params["permutation"]
    new = tuple(j for j, d in enumerate(order) if d in axes)
    within = _inner_all(axes, order)
    params = {**eqn.params, "permutation": within} if within != tuple(sorted(within)) else None
    turned = grid.transpose([axes.index(order[j]) for j in new])
    return [_Moved(grid=turned, axes=new, params=params)]


def _rev(eqn, grid, axes, known):
    dims = eqn.params["dimensions"]
    within = _inner_all(axes, dims)
    params = {**eqn.params, "dimensions": within} if within else None
    turned = np.flip(grid, tuple(axes.index(d) for d in dims if d in axes))
    return [_Moved(grid=turned, axes=axes, params=params)]


def _slice(eqn, grid, axes, known):
    shape = eqn.invars[0].aval.shape
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(shape)
    taken = grid[tuple(slice(starts[a], limits[a], strides[a]) for a in axes)]
    within = {
        "start_indices": remaining(starts, axes),
        "limit_indices": remaining(limits, axes),
        "strides": remaining(strides, axes),
    }
    whole = remaining(eqn.outvars[0].aval.shape, axes) == remaining(shape, axes)
    return [_Moved(grid=taken, axes=axes, params=None if whole else {**eqn.params, **within})]


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
    within = remaining(sizes, axes)
    whole = within == remaining(shape, axes)
    return [
        _Moved(
            grid=grid[tuple(places)],
            axes=axes,
            params=None if whole else {**eqn.params, "slice_sizes": within},
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
    within = _inner_all(axes, dims)
    return [
        _Moved(
            grid=np.asarray(taken),
            axes=tuple(a - sum(d < a for d in dims) for a in axes if a not in dims),
            params={**eqn.params, "dimensions": within} if within else None,
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
    within = remaining(new, found)
    params = None if within == remaining(old, axes) else {**eqn.params, "new_sizes": within}
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


def _broadcast(eqn, grid, axes, known):
    dims, shape = tuple(eqn.params["broadcast_dimensions"]), eqn.params["shape"]
    # Repeating a sliced axis of length 1 would need the same slice several times.
    new = tuple(dims[a] for a in axes)
    if len(eqn.invars) != 1 or any(shape[d] != n for d, n in zip(new, grid.shape, strict=True)):
        return None
    within = {"shape": remaining(shape, new), "broadcast_dimensions": _inner_all(new, dims)}
    return [_Moved(grid=grid, axes=new, params={**eqn.params, **within})]


def _reduction(eqn, grid, axes, known):
    reduced = tuple(eqn.params["axes"])
    if not set(reduced).isdisjoint(axes):
        return None
    new = tuple(a - sum(d < a for d in reduced) for a in axes)
    return [_Moved(grid=grid, axes=new, params={**eqn.params, "axes": _inner_all(axes, reduced)})]


def _cumulative(eqn, grid, axes, known):
    if eqn.params["axis"] in axes:
        return None
    axis = _inner(axes, eqn.params["axis"])
    return [_Moved(grid=grid, axes=axes, params={**eqn.params, "axis": axis})]


def _split(eqn, grid, axes, known):
    sizes, axis = eqn.params["sizes"], eqn.params["axis"]
    if axis not in axes:
        params = {**eqn.params, "axis": _inner(axes, axis)}
        return [_Moved(grid=grid, axes=axes, params=params) for _ in sizes]
    parts = np.split(grid, np.cumsum(sizes)[:-1].tolist(), axis=axes.index(axis))
    return [_Moved(grid=part, axes=axes, params=None) for part in parts]


def _unstack(eqn, grid, axes, known):
    axis = eqn.params["axis"]
    new = tuple(a - (axis < a) for a in axes if a != axis)
    if axis not in axes:
        params = {**eqn.params, "axis": _inner(axes, axis)}
        return [_Moved(grid=grid, axes=new, params=params) for _ in eqn.outvars]
    rows = np.moveaxis(grid, axes.index(axis), 0)
    return [_Moved(grid=rows[i, ...], axes=new, params=None) for i in range(len(rows))]


_RULES: dict[str, Callable[..., list[_Moved] | None]] = {
    "transpose": _transpose,
    "rev": _rev,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "split": _split,
    "unstack": _unstack,
    **dict.fromkeys(REDUCTIONS | ARG_REDUCTIONS, _reduction),
    **dict.fromkeys(CUMULATIVE, _cumulative),
}
