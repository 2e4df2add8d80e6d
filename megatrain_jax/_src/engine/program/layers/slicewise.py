"""Applies equations to stacked values slice by slice.

Example: `w` of shape (2, 4, 5), a stack of `w0` and `w1`, both (4, 5)::

    exp w                           exp w0, exp w1
    w.transpose(0, 2, 1)            transpose(1, 0) of w0 and of w1, by a rule of `moved`
    w w, the layers as a batch      w0 w0, w1 w1, by the axes that go together (`axes.py`)
    w.reshape(8, 5)                 w0, w1, as runs of four rows each
    sum w                           sum w0 + sum w1
    sort w, along the layers        None: each entry of the result depends on w0 and w1

Some operations move the slices of a stacked array without computing on them.

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
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.lax import GatherScatterMode

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.axes import (
    FOLDED,
    MAPPED,
    Axes,
    params_of_part,
    params_of_slice,
)
from megatrain_jax._src.engine.program.layers.known import Known
from megatrain_jax._src.engine.program.layers.sliced_values import (
    FOLDS,
    SlicedValue,
    Slicing,
    Value,
    grid_of,
    join,
    piece,
    remaining,
    sliced,
    stack,
    value_of,
)
from megatrain_jax._src.engine.program.primitives import (
    ARG_REDUCTIONS,
    CUMULATIVE,
    REDUCTIONS,
    is_elementwise,
)


class _Moved(NamedTuple):
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
    eqn: Any, grid: np.ndarray, axes: tuple[int, ...], known: Sequence[Known | None]
) -> list[_Moved] | None:
    """Applies an operation to its first operand, a grid.

    Args:
        eqn: The equation.
        grid: The slices of its first operand.
        axes: The axes along which that operand is sliced, ascending.
        known: The integers of each operand, if they are known.

    Returns:
        The grid of each result; None if the operation mixes slices, or isn't known here.
    """
    name = eqn.primitive.name
    # A sharding of the result names axes that a slice doesn't have.
    if eqn.params.get("sharding") is not None:
        return None
    if rule := _RULES.get(name):
        return rule(eqn, grid, axes, known)
    return _moved_apart(eqn, grid, axes) if name in _APART else None


def _moved_apart(eqn, grid: np.ndarray, axes: tuple[int, ...]) -> list[_Moved] | None:
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
        found.append(_Moved(turned, tuple(sorted(new)), params))
    return found


def _rev(eqn, grid, axes, known):
    dims = eqn.params["dimensions"]
    params = None if set(dims) <= set(axes) else params_of_slice(eqn, axes, ())
    turned = np.flip(grid, tuple(axes.index(d) for d in dims if d in axes))
    return [_Moved(turned, axes, params)]


def _slice(eqn, grid, axes, known):
    shape = eqn.invars[0].aval.shape
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(shape)
    taken = grid[tuple(slice(starts[a], limits[a], strides[a]) for a in axes)]
    whole = remaining(eqn.outvars[0].aval.shape, axes) == remaining(shape, axes)
    params = {**params_of_slice(eqn, axes, axes), "strides": remaining(strides, axes)}
    return [_Moved(taken, axes, None if whole else params)]


def _dynamic_slice(eqn, grid, axes, known):
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    places = []
    for a in axes:
        if (start := known[1 + a]) is None:
            return None
        # XLA clamps a dynamic slice that would reach past an end; so do we.
        first = min(max(int(start.value), 0), shape[a] - sizes[a])
        places.append(slice(first, first + sizes[a]))
    taken = grid[tuple(places)]
    if remaining(sizes, axes) == remaining(shape, axes):
        return [_Moved(taken, axes, None)]
    operands = tuple(1 + d for d in range(len(shape)) if d not in axes)
    return [_Moved(taken, axes, params_of_slice(eqn, axes, axes), operands)]


def _gather(eqn, grid, axes, known):
    """`take` along one sliced axis, by known integers."""
    shape, numbers = eqn.invars[0].aval.shape, eqn.params["dimension_numbers"]
    along = numbers.start_index_map
    if len(along) != 1 or along[0] not in axes or numbers.collapsed_slice_dims != along:
        return None
    (axis,), places = along, known[1]
    whole = tuple(1 if d == axis else n for d, n in enumerate(shape))
    batched = numbers.operand_batching_dims
    if places is None or batched or tuple(eqn.params["slice_sizes"]) != whole:
        return None
    places = places.value[..., 0]
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
    return [_Moved(taken.transpose(order), tuple(sorted(ends)), None)]


def _squeeze(eqn, grid, axes, known):
    dims = eqn.params["dimensions"]
    taken = grid[tuple(0 if a in dims else slice(None) for a in axes)]
    left = tuple(a - sum(d < a for d in dims) for a in axes if a not in dims)
    params = None if set(dims) <= set(axes) else params_of_slice(eqn, axes, ())
    return [_Moved(np.asarray(taken), left, params)]


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
    return [_Moved(grid.reshape([new[d] for d in found]), tuple(found), params)]


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
        return _moved_apart(eqn, grid, axes)
    parts = np.split(grid, np.cumsum(sizes)[:-1].tolist(), axis=axes.index(axis))
    return [_Moved(part, axes, None) for part in parts]


def _unstack(eqn, grid, axes, known):
    axis = eqn.params["axis"]
    if axis not in axes:
        return _moved_apart(eqn, grid, axes)
    new = tuple(a - (axis < a) for a in axes if a != axis)
    rows = np.moveaxis(grid, axes.index(axis), 0)
    return [_Moved(rows[i, ...], new, None) for i in range(len(rows))]


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


def slicewise(eqn, ins: Sequence[Value | SlicedValue]) -> list | None:
    """Applies an equation slice by slice; None if it mixes slices.

    Args:
        eqn: The equation.
        ins: Its operands, at least one of them stacked.
    """
    name, operand = eqn.primitive.name, ins[0]
    if any(isinstance(v, SlicedValue) and v.run for v in ins):
        if name == "reshape" and isinstance(operand, SlicedValue):
            return _regrouped(eqn, operand)
        if name == "slice" and (found := _runs_within(eqn, operand)) is not None:
            return [found]
        return _apart(eqn, ins)
    if is_elementwise(eqn):
        return _map(eqn, ins)
    others = [v for v in ins[1:] if isinstance(v, Value)]
    if not isinstance(operand, SlicedValue) or len(others) < len(ins) - 1:
        return _apart(eqn, ins)
    if name in FOLDS and not set(eqn.params["axes"]).isdisjoint(operand.axes):
        return [_fold(eqn, operand)]

    found = moved(eqn, operand.grid, operand.axes, [None, *(v.integers for v in others)])
    if found is None:
        return _regrouped(eqn, operand) if name == "reshape" else _apart(eqn, ins)
    if found[0].params is None:
        return [value_of(m.grid, m.axes) for m in found]
    changed, taken = eqn.replace(params=found[0].params), [others[k - 1] for k in found[0].operands]
    cells = [_bound(changed, [part, *taken]) for part in found[0].grid.flat]
    columns = zip(found, zip(*cells, strict=True), strict=True)
    return [value_of(grid_of(m.grid.shape, column), m.axes) for m, column in columns]


def _bound(eqn, ins: Sequence[Value]) -> list[Value]:
    """The results of an equation on values that are not stacked."""
    blocks = join(ins)
    return [Value(a, blocks) for a in jx.bind(eqn, [v.array for v in ins])]


def _map(eqn, ins) -> list[SlicedValue]:
    """Binds the equation once per slice; operands that aren't stacked are sliced or shared."""
    axes = tuple(sorted({a for v in ins if isinstance(v, SlicedValue) for a in v.axes}))
    shape, cells = eqn.outvars[0].aval.shape, []
    for at in np.ndindex(*(shape[a] for a in axes)):
        row = [
            v if isinstance(v, Value) and not a.aval.shape else piece(v, axes, _within(a, axes, at))
            for v, a in zip(ins, eqn.invars, strict=True)
        ]
        cells.append(_bound(eqn, row))
    return [sliced(shape, axes, column) for column in zip(*cells, strict=True)]


def _within(atom, axes: tuple[int, ...], at: tuple[int, ...]) -> tuple[int, ...]:
    """Positions in a result, as positions in an operand that may have length 1 along an axis."""
    return tuple(min(i, atom.aval.shape[axis] - 1) for axis, i in zip(axes, at, strict=True))


def _fold(eqn, operand: SlicedValue) -> Value | SlicedValue:
    """A reduction along sliced axes (and maybe more): within each slice, then between slices."""
    reduced, axes = tuple(eqn.params["axes"]), operand.axes
    parts = list(operand.grid.flat)
    if not set(reduced) <= set(axes):
        changed = eqn.replace(params=params_of_slice(eqn, axes, ()))
        parts = [_bound(changed, [part])[0] for part in parts]
    # Axes that stay sliced move to the front, so each remaining row is one sum.
    kept = tuple(k for k, a in enumerate(axes) if a not in reduced)
    grid = np.moveaxis(grid_of(operand.grid.shape, parts), kept, range(len(kept)))
    shape = grid.shape[: len(kept)]
    # In the order of slices, which may round differently from one reduction of the whole.
    rows = grid.reshape(math.prod(shape), -1)
    totals = [_folded(FOLDS[eqn.primitive.name], list(cells)) for cells in rows]
    new = tuple(axes[k] - sum(d < axes[k] for d in reduced) for k in kept)
    return value_of(grid_of(shape, totals), new)


def _folded(fold: Callable[[Any, Any], Any], cells: Sequence[Value]) -> Value:
    return Value(functools.reduce(fold, [cell.array for cell in cells]), join(cells))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
    """Axes of an equation's operands and results that are sliced together.

    Attributes:
        axes: The axis of each operand and result that has one, by position (operands first).
        kind: How slices form the results; see `axes.py`.
        count: Number of slices.
        run: Entries of a slice along these axes; 0 if slices lack them.
    """

    axes: Mapping[int, int]
    kind: str
    count: int
    run: int


def _groups(eqn, ins: Sequence[Value | SlicedValue]) -> list[_Group] | None:
    """The groups of axes along which operands are sliced; None if slices mix."""
    rules = Axes(eqn)
    stacks = {at: v for at, v in enumerate(ins) if isinstance(v, SlicedValue)}
    found: dict[tuple[tuple[int, int], ...], _Group] = {}
    for at, value in stacks.items():
        for axis, count in zip(value.axes, value.grid.shape, strict=True):
            places, kind = rules.together(at, axis) or ((), None)
            axes = dict(places)
            # If two operands are sliced along separate axes, each slice of one would need all
            # slices of the second.
            if kind not in (MAPPED, FOLDED) or not axes.keys() >= stacks.keys():
                return None
            group = _Group(axes=axes, kind=kind, count=count, run=value.run)
            if found.setdefault(tuple(sorted(axes.items())), group) != group:
                return None
    groups = list(found.values())
    kinds = {group.kind for group in groups}
    results = range(len(ins), len(ins) + len(eqn.outvars))
    if kinds == {MAPPED}:
        # A result that isn't sliced would need all slices. Runs lie along one axis only.
        whole = any(at not in group.axes for group in groups for at in results)
        return None if whole or len(groups) > 1 and any(g.run for g in groups) else groups
    # Only scalar sums are formed from slices; an array summed over slices is computed at once.
    return groups if kinds == {FOLDED} and not eqn.outvars[0].aval.shape else None


def _apart(eqn, ins: Sequence[Value | SlicedValue]) -> list | None:
    """Applies an equation slice by slice if its rule keeps the operands' sliced axes separate.

    One example is a product of stacked matrices with the layers as batch axis. Slices that lack
    these axes get them with length 1 meanwhile, so all axes keep their numbers. Returns None if
    slices mix.
    """
    if eqn.effects or (groups := _groups(eqn, ins)) is None:
        return None
    count = len(ins)
    for group in groups:
        if group.kind == MAPPED:
            operand = group.axes.get(0) if count else None
            params = params_of_part(eqn, group.axes[count], operand, group.run or 1)
            eqn = eqn.replace(params=params)
    lengths = tuple(group.count for group in groups)
    cells = []
    for position in np.ndindex(*lengths):
        parts = [_part(v, at, groups, position) for at, v in enumerate(ins)]
        cells.append(_bound(eqn, parts))
    if groups[0].kind == FOLDED:
        fold = FOLDS.get(eqn.primitive.name, jax.lax.add)
        return [_folded(fold, [row[0] for row in cells])]
    columns = enumerate(zip(*cells, strict=True), count)
    return [_result(column, at, groups, lengths) for at, column in columns]


def _part(value: Value | SlicedValue, at: int, groups: Sequence[_Group], position) -> Value:
    """The part of an operand that one slice of each group needs."""
    pairs = [(g, p) for g, p in zip(groups, position, strict=True) if at in g.axes]
    if not pairs:
        return stack(value)  # no slices
    if run := groups[0].run:  # of the only group
        return Slicing((groups[0].axes[at],), (groups[0].count,), run).cell(value, position[0])
    axes, places = zip(*sorted((g.axes[at], p) for g, p in pairs), strict=True)
    value = piece(value, axes, places)
    return Value(jax.lax.expand_dims(value.array, axes), value.blocks)


def _result(
    cells: Sequence[Value], at: int, groups: Sequence[_Group], lengths
) -> Value | SlicedValue:
    """A result, assembled from its slices in the order of the groups' positions."""
    axes = [group.axes[at] for group in groups]
    if groups[0].run:
        return Slicing(tuple(axes), lengths, groups[0].run).whole(cells)
    parts = [Value(jax.lax.squeeze(v.array, sorted(axes)), v.blocks) for v in cells]
    return SlicedValue(grid_of(lengths, parts).transpose(np.argsort(axes)), tuple(sorted(axes)))


def _regrouped(eqn, operand: SlicedValue) -> list[Value | SlicedValue] | None:
    """A reshape that merges the sliced axes with following axes, or splits them again.

    Returns None if the entries of a slice are not contiguous afterwards.
    """
    old, new = eqn.invars[0].aval.shape, tuple(eqn.params["new_sizes"])
    rearranged = any(eqn.params.get(name) is not None for name in ("dimensions", "sharding"))
    if rearranged or 0 in old:
        return None
    count = operand.grid.size
    pairs = [row for row in segments(old, new) if not set(row[0]).isdisjoint(operand.axes)]
    if len(pairs) != 1:
        return None
    olds, news = [d for d in pairs[0][0] if old[d] > 1], [d for d in pairs[0][1] if new[d] > 1]
    own = tuple(d for d in operand.axes if old[d] > 1)
    # In row-major order, a slice is a run of entries if its axes change slowest.
    if tuple(olds[: len(own)]) != own or not news:
        return None
    ends = [k for k in range(1, len(news) + 1) if math.prod(new[d] for d in news[:k]) == count]
    if ends:
        axes = tuple(news[: ends[0]])
        after = Slicing(axes, tuple(new[d] for d in axes))
    elif new[news[0]] % count == 0:
        after = Slicing((news[0],), (count,), new[news[0]] // count)
    else:
        return None
    within = eqn.replace(params={**eqn.params, "new_sizes": after.shape(new)})
    return [after.whole([_bound(within, [cell])[0] for cell in operand.grid.flat])]


def _runs_within(eqn, operand: Value | SlicedValue) -> Value | SlicedValue | None:
    """The runs that a slice takes whole, if it begins and ends between runs."""
    assert isinstance(operand, SlicedValue)
    axis, run, params = operand.axes[0], operand.run, eqn.params
    start, stop = params["start_indices"][axis], params["limit_indices"][axis]
    if start % run or stop % run or set(params["strides"] or (1,)) != {1}:
        return None
    starts, stops = list(params["start_indices"]), list(params["limit_indices"])
    shape = list(eqn.invars[0].aval.shape)
    starts[axis], stops[axis], shape[axis] = 0, run, run
    changed = {"start_indices": tuple(starts), "limit_indices": tuple(stops)}
    within = eqn.replace(params={**params, **changed})
    taken = operand.grid[start // run : stop // run]
    is_whole = stops == shape and not any(starts)
    cells = [cell if is_whole else _bound(within, [cell])[0] for cell in taken]
    return cells[0] if len(cells) == 1 else SlicedValue(grid_of((len(cells),), cells), (axis,), run)


def uniform_row(eqn, ins: Sequence[Value]) -> Callable[[tuple[int, ...]], Any] | None:
    """A function that computes one slice of a result with identical slices, or None.

    Zeros of a stack's shape, broadcast from a scalar, thus become zeros for each slice.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim" and params.get("sharding") is None and len(ins) == 1:

        def filled(axes):
            if any(a in params["broadcast_dimensions"] for a in axes):
                return None
            within = params_of_slice(eqn, (), axes)
            return jx.bind(eqn.replace(params=within), [ins[0].array])[0]

        return filled
    if is_elementwise(eqn) and len(eqn.outvars) == 1 and any(v.row for v in ins):
        if all(v.row or not a.aval.shape for v, a in zip(ins, eqn.invars, strict=True)):

            def computed(axes):
                arrays = [v.row(axes) if v.row else v.array for v in ins]
                return None if any(a is None for a in arrays) else jx.bind(eqn, arrays)[0]

            return computed
    return None
