"""Applies equations to stacked values slice by slice.

Example: `w` of shape (2, 4, 5), a stack of `w0` and `w1`, both (4, 5)::

    exp w                           exp w0, exp w1
    w.transpose(0, 2, 1)            transpose(1, 0) of w0 and of w1, by a rule of `grid.py`
    w w, the layers as a batch      w0 w0, w1 w1, by the axes that go together (`axes.py`)
    w.reshape(8, 5)                 w0, w1, as runs of four rows each
    sum w                           sum w0 + sum w1
    sort w, along the layers        None: each entry of the result depends on w0 and w1
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.axes import (
    FOLDED,
    MAPPED,
    Axes,
    params_of_part,
    params_of_slice,
)
from megatrain_jax._src.engine.program.layers.grid import moved, segments
from megatrain_jax._src.engine.program.layers.sliced_values import (
    FOLDS,
    SlicedValue,
    Slicing,
    Value,
    grid_of,
    join,
    piece,
    sliced,
    stack,
    value_of,
)
from megatrain_jax._src.engine.program.primitives import is_elementwise


def slicewise(eqn, ins: Sequence[Value | SlicedValue]) -> list | None:
    """Applies an equation slice by slice; None if it mixes slices.

    Args:
        eqn: The equation.
        ins: Its operands, at least one of them stacked.
    """
    name, operand = eqn.primitive.name, ins[0]
    if any(isinstance(v, SlicedValue) and v.run for v in ins):
        if name == "reshape" and isinstance(operand, SlicedValue):
            found = _regrouped(eqn, operand)
            return None if found is None else [found]
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

    def integers(k: int) -> np.ndarray | None:
        found = others[k - 1].integers
        return None if found is None else found.value

    found = moved(eqn, operand.grid, operand.axes, integers)
    if found is None and name == "reshape":
        merged = _regrouped(eqn, operand)
        return None if merged is None else [merged]
    if found is None:
        return _apart(eqn, ins)
    if found[0].params is None:
        return [value_of(m.grid, m.axes) for m in found]
    changed, taken = eqn.replace(params=found[0].params), [others[k - 1] for k in found[0].operands]
    cells = [_bound(changed, [part, *taken]) for part in found[0].grid.flat]
    return [
        value_of(grid_of(m.grid.shape, column), m.axes)
        for m, column in zip(found, zip(*cells, strict=True), strict=True)
    ]


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
    totals = []
    for cells in grid.reshape(math.prod(shape), -1):
        # In the order of slices, which may round differently from one reduction of the whole.
        total = cells[0].array
        for part in cells[1:]:
            total = FOLDS[eqn.primitive.name](total, part.array)
        totals.append(Value(total, join(cells)))
    new = tuple(axes[k] - sum(d < axes[k] for d in reduced) for k in kept)
    return value_of(grid_of(shape, totals), new)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
    """Axes of an equation's operands and results that are sliced together.

    Attributes:
        axes: The axis of each operand and result that has one, by position (operands first).
        kind: How slices form the results; see `axis_rules.py`.
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
        fold, total = FOLDS.get(eqn.primitive.name, jax.lax.add), cells[0][0].array
        for row in cells[1:]:
            total = fold(total, row[0].array)
        return [Value(total, join([row[0] for row in cells]))]
    return [
        _result([row[r] for row in cells], count + r, groups, lengths)
        for r in range(len(eqn.outvars))
    ]


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


def _regrouped(eqn, operand: SlicedValue) -> Value | SlicedValue | None:
    """A reshape that merges the sliced axes with following axes, or splits them again.

    Returns None if the entries of a slice are not contiguous afterwards.
    """
    old, new = eqn.invars[0].aval.shape, tuple(eqn.params["new_sizes"])
    if eqn.params.get("dimensions") is not None or 0 in old:
        return None
    if eqn.params.get("sharding") is not None:
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
    return after.whole([_bound(within, [cell])[0] for cell in operand.grid.flat])


def _runs_within(eqn, operand: Value | SlicedValue) -> Value | SlicedValue | None:
    """The runs that a slice takes whole, if it begins and ends between runs."""
    assert isinstance(operand, SlicedValue)
    axis, run, params = operand.axes[0], operand.run, eqn.params
    start, stop = params["start_indices"][axis], params["limit_indices"][axis]
    if start % run or stop % run or set(params["strides"] or (1,)) != {1}:
        return None
    starts, stops = list(params["start_indices"]), list(params["limit_indices"])
    starts[axis], stops[axis] = 0, run
    within = eqn.replace(
        params={**params, "start_indices": tuple(starts), "limit_indices": tuple(stops)}
    )
    taken = operand.grid[start // run : stop // run]
    shape = list(eqn.invars[0].aval.shape)
    shape[axis] = run
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
