"""Values under a trace, stacked ones as grids of slices, and equations applied slice by slice.

A worked example: `w` of shape (2, 4, 5) is a stack of two blocks' leaves `w0`, `w1` of (4, 5)::

    w = rows([w0, w1])                # Pieces, grid [w0, w1], axes (0,)
    y = sin(w).transpose(1, 0, 2)     # grid [sin(w0), sin(w1)], axes (1,): no array of (2, 4, 5)
    piece(y, (1,), (0,))              # sin(w0), which depends on block 0 alone
    stack(y)                          # the array of (4, 2, 5), which depends on both blocks
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program import known
from megatrain_jax._src.program.axis_rules import MAPPED, shape_of
from megatrain_jax._src.program.axis_rules import together as axes_together
from megatrain_jax._src.program.grid import moved
from megatrain_jax._src.program.index import Index, numbers, remaining, sliced_axes
from megatrain_jax._src.program.primitives import LAYOUT, is_elementwise

# The operation that makes one slice of two in a reduction along a sliced axis.
FOLDS = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
    "reduce_xor": jax.lax.bitwise_xor,
}
NOTHING: frozenset = frozenset()


@dataclasses.dataclass(frozen=True)
class Value:
    """A traced value, and what it depends on.

    Attributes:
        array: The value: a tracer, an array or a number.
        blocks: Blocks whose parameters it depends on, and on nothing else; None if also on data.
        row: If all its slices are alike, computes the one along some axes, or gives None where it
            can't.
        integers: Integers that it holds, if they are known at trace time.
    """

    array: Any
    blocks: frozenset | None = NOTHING
    row: Callable[[tuple[int, ...]], Any] | None = dataclasses.field(default=None, compare=False)
    integers: known.Known | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A stacked value as its slices.

    Attributes:
        grid: The slices, `Value`s in an object array.
        axes: Axes of the stacked value that the grid's axes are, ascending.
    """

    grid: np.ndarray
    axes: tuple[int, ...]

    @property
    def blocks(self) -> frozenset | None:
        """The blocks of all slices together."""
        return join(self.grid.flat)


def constant(value: Any) -> Value:
    """A literal or a constant."""
    return Value(value, integers=known.constant(value))


def join(values: Sequence["Value | Pieces"] | Any) -> frozenset | None:
    """The blocks that values depend on together, or None if one depends on data as well."""
    blocks = [v.blocks for v in values]
    known_blocks = [b for b in blocks if b is not None]
    return NOTHING.union(*known_blocks) if len(known_blocks) == len(blocks) else None


def rows(values: Sequence[Value]) -> Pieces:
    """The stacked value that has these slices along axis 0."""
    return Pieces(_grid((len(values),), values), (0,))


def _grid(shape: Sequence[int], values: Sequence[Value]) -> np.ndarray:
    # Filled, not converted: NumPy would look into what it is given for arrays and sequences.
    grid = np.empty(len(values), dtype=object)
    grid[:] = values
    return grid.reshape(shape)


def _of(grid: np.ndarray, axes: tuple[int, ...]) -> Value | Pieces:
    """The value of a grid: its only slice if it is sliced along no axis."""
    return Pieces(grid, axes) if axes else grid.item()


def piece(value: Value | Pieces, axes: tuple[int, ...], at: tuple[int, ...]) -> Value:
    """The slice of a value at these positions of these axes, which are ascending."""
    if isinstance(value, Pieces):
        own = dict(zip(axes, at, strict=True))
        # A slice across pieces is made of several of them.
        if not own.keys() >= set(value.axes):
            return piece(stack(value), axes, at)
        part = value.grid[tuple(own[a] for a in value.axes)]
        inner = [(a - sum(b < a for b in value.axes), i) for a, i in own.items()
                 if a not in value.axes]  # fmt: skip
        return piece(part, *zip(*inner, strict=True)) if inner else part
    if value.row is not None and (array := value.row(axes)) is not None:
        return Value(array, value.blocks)
    array = value.array
    for a, i in zip(reversed(axes), reversed(at), strict=True):
        array = jax.lax.index_in_dim(jax.numpy.asarray(array), i, a, keepdims=False)
    integers = value.integers.row(at[0]) if value.integers is not None and axes == (0,) else None
    return Value(array, value.blocks, integers=integers)


def first(value: Value | Pieces, i: int) -> Value | Pieces:
    """Slice `i` of a value along axis 0, which may be a stacked value itself."""
    if isinstance(value, Pieces) and value.axes[0] == 0:
        grid = value.grid[i : i + 1].reshape(value.grid.shape[1:])
        return _of(grid, tuple(a - 1 for a in value.axes[1:]))
    if isinstance(value, Pieces):
        # Axis 0 lies within each slice, and all of them have a row of it.
        cells = [piece(part, (0,), (i,)) for part in value.grid.flat]
        return Pieces(_grid(value.grid.shape, cells), tuple(a - 1 for a in value.axes))
    return piece(value, (0,), (i,))


def stack(value: Value | Pieces) -> Value:
    """The whole array of a stacked value."""
    if isinstance(value, Value):
        return value
    # Along the last sliced axis first: the axes still sliced are those before it, so its number
    # within a slice is its own less their count.
    *outer, axis = value.axes
    parts = []
    for row in value.grid.reshape(-1, value.grid.shape[-1]):
        inner = axis - len(outer)
        expanded = [jax.lax.expand_dims(p.array, (inner,)) for p in row]
        parts.append(Value(jax.lax.concatenate(expanded, inner), join(row)))
    return stack(_of(_grid(value.grid.shape[:-1], parts), tuple(outer)))


def piecewise(eqn, ins: Sequence[Value | Pieces]) -> list | None:
    """Applies an equation slice by slice; None if it mixes slices.

    Args:
        eqn: The equation.
        ins: Its operands, at least one of them stacked.
    """
    name, operand = eqn.primitive.name, ins[0]
    if is_elementwise(eqn):
        return _map(eqn, ins)
    others = [v for v in ins[1:] if isinstance(v, Value)]
    if not isinstance(operand, Pieces) or len(others) < len(ins) - 1:
        return _apart(eqn, ins)
    if name in FOLDS and not set(eqn.params["axes"]).isdisjoint(operand.axes):
        return [_fold(eqn, operand)]

    def integers(k: int) -> np.ndarray | None:
        found = others[k - 1].integers
        return None if found is None else found.value

    found = moved(eqn, operand.grid, operand.axes, integers)
    if found is None:
        return _apart(eqn, ins)
    if found[0].params is None:
        return [_of(m.grid, m.axes) for m in found]
    changed, taken = eqn.replace(params=found[0].params), [others[k - 1] for k in found[0].operands]
    cells = [_bound(changed, [part, *taken]) for part in found[0].grid.flat]
    return [
        _of(_grid(m.grid.shape, column), m.axes)
        for m, column in zip(found, zip(*cells, strict=True), strict=True)
    ]


def _bound(eqn, ins: Sequence[Value]) -> list[Value]:
    """The results of an equation on values that are not stacked."""
    blocks = join(ins)
    return [Value(a, blocks) for a in jx.bind(eqn, [v.array for v in ins])]


def together(values: Sequence[Value | Pieces]) -> tuple[int, ...]:
    """The axes along which any of some values is sliced."""
    return tuple(sorted({a for v in values if isinstance(v, Pieces) for a in v.axes}))


def places(shape: Sequence[int], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All positions of some axes."""
    return list(np.ndindex(*(shape[a] for a in axes)))


def sliced(shape: Sequence[int], axes: tuple[int, ...], cells: Sequence[Value]) -> Pieces:
    """The stacked value of this shape that has these slices at all positions of some axes."""
    return Pieces(_grid([shape[a] for a in axes], cells), axes)


def stacked(slices: Mapping[Index, Value]) -> Value | Pieces:
    """The value that has these slices, by index; a slice of index `()` is the value itself."""
    if () in slices:
        return slices[()]
    axes = sliced_axes(next(iter(slices)))
    rows = sorted(((numbers(i), v) for i, v in slices.items()), key=lambda row: row[0])
    shape = [n + 1 for n in rows[-1][0]]
    return Pieces(_grid(shape, [value for _, value in rows]), axes)


def _map(eqn, ins) -> list[Pieces]:
    """Binds the equation once per slice; operands that aren't stacked are sliced or shared."""
    axes, shape = together(ins), eqn.outvars[0].aval.shape
    cells = []
    for at in places(shape, axes):
        row = [
            v if isinstance(v, Value) and not a.aval.shape else piece(v, axes, _within(a, axes, at))
            for v, a in zip(ins, eqn.invars, strict=True)
        ]
        cells.append(_bound(eqn, row))
    return [sliced(shape, axes, column) for column in zip(*cells, strict=True)]


def _within(atom, axes: tuple[int, ...], at: tuple[int, ...]) -> tuple[int, ...]:
    """Positions in a result as those in an operand, which may be of length 1 along an axis."""
    return tuple(min(i, atom.aval.shape[axis] - 1) for axis, i in zip(axes, at, strict=True))


def _fold(eqn, operand: Pieces) -> Value | Pieces:
    """A reduction along sliced axes, and maybe others: within each slice, then slice to slice."""
    reduced, axes = tuple(eqn.params["axes"]), operand.axes
    within = tuple(d - sum(a < d for a in axes) for d in reduced if d not in axes)
    parts = list(operand.grid.flat)
    if within:
        changed = eqn.replace(params={**eqn.params, "axes": within})
        parts = [_bound(changed, [part])[0] for part in parts]
    # Axes that stay sliced go to the front: then each row of what is left is one sum.
    kept = tuple(k for k, a in enumerate(axes) if a not in reduced)
    grid = np.moveaxis(_grid(operand.grid.shape, parts), kept, range(len(kept)))
    shape = grid.shape[: len(kept)]
    totals = []
    for cells in grid.reshape(math.prod(shape), -1):
        # In the order of slices, which may round otherwise than one reduction of the whole.
        total = cells[0].array
        for part in cells[1:]:
            total = FOLDS[eqn.primitive.name](total, part.array)
        totals.append(Value(total, join(cells)))
    new = tuple(axes[k] - sum(d < axes[k] for d in reduced) for k in kept)
    return _of(_grid(shape, totals), new)


def _apart(eqn, ins: Sequence[Value | Pieces]) -> list[Pieces] | None:
    """Binds an equation once per slice where its rule keeps the sliced axes of all operands apart.

    The layers of a product of stacked matrices are one example, with the layers as a batch. Slices
    have length 1 along these axes meanwhile, so that all axes keep their numbers. None if slices
    mix.
    """
    # Parameters of those in LAYOUT hold a shape; where `grid.py` can't change it, slices mix.
    if eqn.effects or eqn.primitive.name in LAYOUT:
        return None
    group_of = {place: (tuple(places), kind) for places, kind in axes_together(eqn)
                for place in places}  # fmt: skip
    stacks = {at: v.axes for at, v in enumerate(ins) if isinstance(v, Pieces)}
    groups = dict.fromkeys(group_of.get((at, a)) for at, axes in stacks.items() for a in axes)
    count, results = len(ins), len(eqn.outvars)
    rows: list[dict[int, int]] = []  # by group, the axis of each array that it takes slices of
    for group in groups:
        if group is None or group[1] != MAPPED:
            return None
        rows.append(dict(group[0]))
        # Two operands sliced along axes of their own: each slice of one would meet all of the
        # other's. A result that isn't sliced would be made of all slices.
        if not rows[-1].keys() >= {*stacks, *range(count, count + results)}:
            return None
    # By operand, then result: its sliced axes, ascending, with the groups' numbers.
    along = [sorted((row[at], g) for g, row in enumerate(rows) if at in row)
             for at in range(count + results)]  # fmt: skip
    lengths = [shape_of(eqn, group[0][0][0])[group[0][0][1]] for group in groups if group]
    cells = []
    for position in np.ndindex(*lengths):
        parts = []
        for v, taken in zip(ins, along[:count], strict=True):
            if taken:
                axes = tuple(axis for axis, _ in taken)
                v = piece(v, axes, tuple(position[g] for _, g in taken))
                v = Value(jax.lax.expand_dims(v.array, axes), v.blocks)
            parts.append(v)
        outs = zip(_bound(eqn, parts), along[count:], strict=True)
        cells.append([Value(jax.lax.squeeze(v.array, [a for a, _ in taken]), v.blocks)
                      for v, taken in outs])  # fmt: skip
    return [
        Pieces(_grid(lengths, column).transpose([g for _, g in taken]), tuple(a for a, _ in taken))
        for column, taken in zip(zip(*cells, strict=True), along[count:], strict=True)
    ]


def uniform_row(eqn, ins: Sequence[Value]) -> Callable[[tuple[int, ...]], Any] | None:
    """A function that computes one slice of a result whose slices are all alike, or None.

    Zeros of a stack's shape, broadcast from a scalar, so become zeros of each slice.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim" and params.get("sharding") is None and len(ins) == 1:
        dims, shape = params["broadcast_dimensions"], params["shape"]

        def filled(axes):
            if any(a in dims for a in axes):
                return None
            new = tuple(d - sum(a < d for a in axes) for d in dims)
            within = {"shape": remaining(shape, axes), "broadcast_dimensions": new}
            return jx.bind(eqn.replace(params={**params, **within}), [ins[0].array])[0]

        return filled
    if is_elementwise(eqn) and len(eqn.outvars) == 1 and any(v.row for v in ins):
        if all(v.row or not a.aval.shape for v, a in zip(ins, eqn.invars, strict=True)):

            def computed(axes):
                arrays = [v.row(axes) if v.row else v.array for v in ins]
                return None if any(a is None for a in arrays) else jx.bind(eqn, arrays)[0]

            return computed
    return None
