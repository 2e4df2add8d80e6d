"""Indices of slices, and traced values with stacked arrays as grids of their slices.

A stacked array is represented by its slices.

Example: `w` of shape (2, 4, 5) stacks the leaves `w0`, `w1` of two blocks, each (4, 5)::

    w = rows([w0, w1])                # Pieces, grid [w0, w1], axes (0,)
    y = sin(w).transpose(1, 0, 2)     # grid [sin(w0), sin(w1)], axes (1,): no array of (2, 4, 5)
    piece(y, (1,), (0,))              # sin(w0), which depends on block 0 alone
    stack(y)                          # the array of (4, 2, 5), which depends on both blocks

If the layers' axis is merged with further axes, each slice is a run of entries of that axis::

    w.reshape(8, 5)                   # grid [w0, w1], axes (0,), run 4: w0 is the first four rows

An index names the part of a parameter that the store keeps as a separate array.

An index has a number for each sliced axis and None for each whole axis before the last sliced one:
`()` is the whole array, `(3,)` is `w[3]`, `(None, 3)` is `w[:, 3]`. An array of experts that is
stored group by group has a range instead, which keeps the axis: `(Range(4, 8),)` is `w[4:8]`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from megatrain_jax._src.engine.program.layers import known


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


# Binary operations that combine two slices in a reduction along a sliced axis.
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
    """A traced value, with its dependencies.

    Attributes:
        array: The value: a tracer, an array or a number.
        blocks: Blocks with parameters it depends on, if it depends on nothing else; None if it
            depends on data.
        row: If all its slices are alike, computes the slice along some axes, or returns None if it
            can't.
        integers: Its integers, if they are known at trace time.
    """

    array: Any
    blocks: frozenset | None = NOTHING
    row: Callable[[tuple[int, ...]], Any] | None = dataclasses.field(default=None, compare=False)
    integers: known.Known | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class SlicedValue:
    """A stacked value as its slices.

    Attributes:
        grid: The slices, `Value`s in an object array.
        axes: Axes of the stacked value that the grid's axes stand for, ascending.
        run: If nonzero, there is one such axis, and each slice has this many entries along it; if
            0, slices lack the axes.
    """

    grid: np.ndarray
    axes: tuple[int, ...]
    run: int = 0

    @property
    def blocks(self) -> frozenset | None:
        """The blocks of all slices together."""
        return join(self.grid.flat)


def constant(value: Any) -> Value:
    """A literal or a constant."""
    return Value(value, integers=known.constant(value))


def join(values: Sequence["Value | SlicedValue"] | Any) -> frozenset | None:
    """The blocks that values depend on together, or None if one depends on data."""
    blocks = [v.blocks for v in values]
    known_blocks = [b for b in blocks if b is not None]
    return NOTHING.union(*known_blocks) if len(known_blocks) == len(blocks) else None


def rows(values: Sequence[Value]) -> SlicedValue:
    """The stacked value with these slices along axis 0."""
    return SlicedValue(grid_of((len(values),), values), (0,))


def grid_of(shape: Sequence[int], values: Sequence[Value]) -> np.ndarray:
    """A grid with these slices, in the order of its elements."""
    # Filled instead of converted: NumPy would try to unpack the values as sequences.
    grid = np.empty(len(values), dtype=object)
    grid[:] = values
    return grid.reshape(shape)


def value_of(grid: np.ndarray, axes: tuple[int, ...]) -> Value | SlicedValue:
    """The value of a grid: its only slice if it has no sliced axis."""
    return SlicedValue(grid, axes) if axes else grid.item()


def piece(value: Value | SlicedValue, axes: tuple[int, ...], at: tuple[int, ...]) -> Value:
    """The slice of a value at these positions of these axes, which are ascending."""
    if isinstance(value, SlicedValue):
        own = dict(zip(axes, at, strict=True))
        # A slice across pieces needs several of them.
        if not own.keys() >= set(value.axes):
            return piece(stack(value), axes, at)
        if value.run:
            which, own[value.axes[0]] = divmod(own[value.axes[0]], value.run)
            return piece(value.grid[which], axes, tuple(own.values()))
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


def first(value: Value | SlicedValue, i: int) -> Value | SlicedValue:
    """Slice `i` of a value along axis 0; it may itself be a stacked value."""
    if isinstance(value, SlicedValue) and value.run and value.axes[0] == 0:
        return piece(value, (0,), (i,))
    if isinstance(value, SlicedValue) and value.axes[0] == 0:
        grid = value.grid[i : i + 1].reshape(value.grid.shape[1:])
        return value_of(grid, tuple(a - 1 for a in value.axes[1:]))
    if isinstance(value, SlicedValue):
        # Axis 0 lies within each slice, so every slice contributes a row.
        cells = [piece(part, (0,), (i,)) for part in value.grid.flat]
        return SlicedValue(
            grid_of(value.grid.shape, cells), tuple(a - 1 for a in value.axes), value.run
        )
    return piece(value, (0,), (i,))


def stack(value: Value | SlicedValue) -> Value:
    """The whole array of a stacked value."""
    if isinstance(value, Value):
        return value
    if value.run:
        arrays = [v.array for v in value.grid]
        return Value(jax.lax.concatenate(arrays, value.axes[0]), value.blocks)
    # The last sliced axis goes first. The axes still sliced then all precede it, so its number
    # within a slice is its own less their count.
    *outer, axis = value.axes
    parts = []
    for row in value.grid.reshape(-1, value.grid.shape[-1]):
        inner = axis - len(outer)
        expanded = [jax.lax.expand_dims(p.array, (inner,)) for p in row]
        parts.append(Value(jax.lax.concatenate(expanded, inner), join(row)))
    return stack(value_of(grid_of(value.grid.shape[:-1], parts), tuple(outer)))


@dataclasses.dataclass(frozen=True)
class Slicing:
    """The slicing of a value, without the slices themselves.

    Attributes:
        axes: The sliced axes, ascending; none if the value is whole.
        lengths: Number of slices along each of these axes.
        run: Number of entries of a slice along the only sliced axis; 0 if slices lack the axis.
    """

    axes: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    run: int = 0

    @classmethod
    def of(cls, value: Value | SlicedValue) -> "Slicing":
        """The slicing of a value."""
        if isinstance(value, Value):
            return cls()
        return cls(value.axes, value.grid.shape, value.run)

    @property
    def count(self) -> int:
        """Number of slices."""
        return math.prod(self.lengths)

    def shifted(self, by: int) -> "Slicing":
        """The same slicing for a value with this many additional axes in front."""
        return dataclasses.replace(self, axes=tuple(a + by for a in self.axes))

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of one slice, for a value of the given shape."""
        if self.run:
            return tuple(self.run if d == self.axes[0] else n for d, n in enumerate(whole))
        return remaining(whole, self.axes)

    def cell(self, value: Value | SlicedValue, p: int) -> Value:
        """Slice number `p` of a value, in the order of the grid's elements."""
        if not self.axes:
            return stack(value)
        if isinstance(value, SlicedValue) and self == Slicing.of(value):
            return value.grid.flat[p]
        if not self.run:
            return piece(value, self.axes, tuple(map(int, np.unravel_index(p, self.lengths))))
        value = stack(value)
        array = jax.numpy.asarray(value.array)
        part = jax.lax.slice_in_dim(array, p * self.run, (p + 1) * self.run, axis=self.axes[0])
        return Value(part, value.blocks)

    def whole(self, cells: Sequence[Value]) -> Value | SlicedValue:
        """The value with these slices."""
        if not self.axes:
            return cells[0]
        return SlicedValue(grid_of(self.lengths, cells), self.axes, self.run)


def common_slicing(values: Sequence[Value | SlicedValue], shape: Sequence[int]) -> Slicing:
    """The slicing in which several values of one shape are computed together.

    It is whole if their slices don't match.
    """
    found = {Slicing.of(v) for v in values if isinstance(v, SlicedValue)}
    if len(found) < 2:
        return next(iter(found), Slicing())
    if any(one.run for one in found):
        return Slicing()
    axes = tuple(sorted({a for one in found for a in one.axes}))
    return Slicing(axes, tuple(shape[a] for a in axes))


def sliced(shape: Sequence[int], axes: tuple[int, ...], cells: Sequence[Value]) -> SlicedValue:
    """The stacked value of this shape with these slices at all positions of some axes."""
    return SlicedValue(grid_of([shape[a] for a in axes], cells), axes)


def stacked(slices: Mapping[Index, Value]) -> Value | SlicedValue:
    """The value with these slices, by index; a slice with index `()` is the value itself."""
    if () in slices:
        return slices[()]
    one = next(iter(slices))
    rows = sorted(((numbers(i), v) for i, v in slices.items()), key=lambda row: row[0])
    if (part := range_of(one)) is not None:
        cells = [value for _, value in rows]
        return SlicedValue(grid_of((len(cells),), cells), (0,), part.stop - part.start)
    axes = sliced_axes(one)
    shape = [n + 1 for n in rows[-1][0]]
    return SlicedValue(grid_of(shape, [value for _, value in rows]), axes)


def part_at(value: Value | SlicedValue, index: Index) -> Any:
    """The part of a value at an index, as an array."""
    if not index:
        return stack(value).array
    if (part := range_of(index)) is None:
        return piece(value, sliced_axes(index), numbers(index)).array
    run = part.stop - part.start
    if isinstance(value, SlicedValue) and (value.axes, value.run) == ((0,), run):
        return value.grid[part.start // run].array
    return jax.lax.slice_in_dim(jax.numpy.asarray(stack(value).array), *part)
