"""The axes along which the arrays of an operation can be divided, for all parts of the library.

Three parts of the library divide arrays: a kernel that computes its rows in tiles to save memory,
several devices that share the examples of a batch, and a stack of layers that is cut into slices.
All of them ask here.

A label describes how an array is divided: along an axis with `outer * num_tiles * inner` entries,
tile i has the entries with middle index i. Several devices are tiles with `outer` 1. A tile of the
results is made from tiles of some operands, and from the remaining operands whole. If only operands
are divided, the result is a sum over tiles.

Example: the product of x f32[8, 6] and w f32[6, 5], `dot_general x w`, in 2 tiles::

    together                 division, for a label with inner 4 or 3
    x axis 0, result axis 0  x (0, 4), w whole, result (0, 4)
    w axis 1, result axis 1  5 entries can't be divided by 2
    x axis 1, w axis 0       x (1, 3), w (0, 3), result a sum over tiles

If x f32[2, 8, 6] is divided along its tokens, axis 1, a reshape to f32[16, 6] is divided along its
axis 0, with outer 2: tile 0 has the rows 0..3 and 8..11.

Rules by primitive answer the question: if one axis of an array is divided, which axes of an
equation's operands and results must be divided with it?

A rule answers with groups of axes. An axis is named (position of its array, axis), where positions
count the operands and then the results. If one axis of a group is divided, all axes of the group
are; arrays outside the group are read whole by every part. Axes in no group cannot be divided. The
second field says how parts form the result: each part yields its own part (`MAPPED`), parts are
reduced to the result by the operation's own reduction (`FOLDED`), or they are added into the first
operand (`ADDED_INTO`).

Example: `dot_general x w` with x f32[8, 6] and w f32[6, 5]::

    [(0, 0), (2, 0)]    MAPPED    some rows of x yield the same rows of the result
    [(1, 1), (2, 1)]    MAPPED    some columns of w yield the same columns of the result
    [(0, 1), (1, 0)]    FOLDED    parts of the inner axis yield terms of a sum: the result
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program import primitives

# How parts form the result; see the top of this file.
MAPPED, FOLDED, ADDED_INTO = "mapped", "folded", "added into"

# A group of axes, and how parts along them form the result.
AxisGroup = tuple[list[tuple[int, int]], str]


def shape_of(eqn: Any, at: int) -> tuple[int, ...]:
    """The shape of an operand or result of an equation, by its position (operands come first)."""
    count = len(eqn.invars)
    atom = eqn.invars[at] if at < count else eqn.outvars[at - count]
    return getattr(atom.aval, "shape", ())


def rule_of(eqn: Any) -> Callable[[Any], Iterator[AxisGroup]] | None:
    """The function that lists the groups of axes of an equation; None if they are unknown.

    Reshapes have their own rule in `axes.py`.
    """
    elementwise = eqn.primitive.name == primitives.BARRIER or primitives.is_elementwise(eqn)
    return _RULES.get(eqn.primitive.name, _elementwise if elementwise else None)


def has_explicit_sharding(eqn: Any, name: str = "sharding") -> bool:
    """Whether the given parameter of an equation fixes how devices divide its result."""
    sharding = eqn.params.get(name)
    return sharding is not None and not jx.is_automatic(sharding)


def _elementwise(eqn: Any) -> Iterator[AxisGroup]:
    count = len(eqn.invars)
    # Operands with fewer axes (usually scalars), or with length 1 where the result is longer, are
    # read whole by each part.
    for axis, size in enumerate(shape_of(eqn, count)):
        places = [(at, axis) for at in range(count) if axis < len(s := shape_of(eqn, at))
                  and s[axis] == size]  # fmt: skip
        yield [*places, (count, axis)], MAPPED


def _constrained(eqn: Any) -> Iterator[AxisGroup]:
    """A sharding constraint can be divided along the axes that it does not shard."""
    sharding = eqn.params["sharding"]
    spec = () if sharding.is_fully_replicated else getattr(sharding, "spec", None)
    if spec is not None:
        for axis in range(len(shape_of(eqn, 0))):
            if axis >= len(spec) or spec[axis] is None:
                yield [(0, axis), (1, axis)], MAPPED


def _along(name: str) -> Callable[[Any], Iterator[AxisGroup]]:
    """The rule of an operation that works along the axes named in a parameter, and only there."""

    def rule(eqn: Any) -> Iterator[AxisGroup]:
        taken = eqn.params[name]
        taken = set(taken) if isinstance(taken, (tuple, list)) else {taken}
        positions = range(len(eqn.invars) + len(eqn.outvars))
        for axis in range(len(shape_of(eqn, 0))):
            if axis not in taken:
                yield [(at, axis) for at in positions if shape_of(eqn, at)], MAPPED

    return rule


def _reduction(eqn: Any) -> Iterator[AxisGroup]:
    """Operations with a result that lacks some axes: reductions, and a squeeze."""
    gone = set(eqn.params["dimensions" if eqn.primitive.name == "squeeze" else "axes"])
    for axis in range(len(shape_of(eqn, 0))):
        if axis not in gone:
            yield [(0, axis), (1, axis - sum(d < axis for d in gone))], MAPPED
        elif eqn.primitive.name in primitives.REDUCTIONS:
            yield [(0, axis)], FOLDED


def _broadcast(eqn: Any) -> Iterator[AxisGroup]:
    if len(eqn.invars) != 1 or has_explicit_sharding(eqn):
        return
    dims, old = tuple(eqn.params["broadcast_dimensions"]), shape_of(eqn, 0)
    for axis, size in enumerate(eqn.params["shape"]):
        places = [(0, dims.index(axis))] if axis in dims and old[dims.index(axis)] == size else []
        yield [*places, (1, axis)], MAPPED


def _made(eqn: Any) -> Iterator[AxisGroup]:
    """Arrays made without an array operand: counters, and random bits of one key."""
    at = len(eqn.invars)
    # A requested sharding refers to the whole shape and would be wrong for a part.
    if not has_explicit_sharding(eqn):
        yield from (([(at, axis)], MAPPED) for axis in range(len(shape_of(eqn, at))))


def _random_bits(eqn: Any) -> Iterator[AxisGroup]:
    """Random bits of one key, if each element depends only on its own index."""
    key = eqn.invars[0].aval
    counted = getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009
    if counted and not key.shape and key.dtype == _threefry_dtype():
        yield from _made(eqn)


@functools.cache
def _threefry_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def _transpose(eqn: Any) -> Iterator[AxisGroup]:
    for new, old in enumerate(eqn.params["permutation"]):
        yield [(0, old), (1, new)], MAPPED


def _dot_general(eqn: Any) -> Iterator[AxisGroup]:
    contracted, batch = eqn.params["dimension_numbers"]
    if has_explicit_sharding(eqn, "out_sharding"):
        return
    for new, pair in enumerate(zip(*batch, strict=True)):
        yield [*enumerate(pair), (2, new)], MAPPED
    # The result's axes are the batch axes, then the left operand's free axes, then the right's.
    new = len(batch[0])
    for at in (0, 1):
        for axis in range(len(shape_of(eqn, at))):
            if axis not in (*contracted[at], *batch[at]):
                yield [(at, axis), (2, new)], MAPPED
                new += 1
    for pair in zip(*contracted, strict=True):
        yield [*enumerate(pair)], FOLDED


def _convolution(eqn: Any) -> Iterator[AxisGroup]:
    left, right, result = eqn.params["dimension_numbers"]
    if eqn.params["batch_group_count"] != 1:
        return
    # Examples (first in each layout) never mix; spatial axes do, through windows.
    yield [(0, left[0]), (2, result[0])], MAPPED
    if eqn.params["feature_group_count"] == 1:
        yield [(1, right[0]), (2, result[1])], MAPPED
        yield [(0, left[1]), (1, right[1])], FOLDED


def _pad(eqn: Any) -> Iterator[AxisGroup]:
    for axis, config in enumerate(eqn.params["padding_config"]):
        # Along a padded axis, positions of the operand and the result differ.
        if tuple(config) == (0, 0, 0):
            yield [(0, axis), (2, axis)], MAPPED


def _slice(eqn: Any) -> Iterator[AxisGroup]:
    """A slice or its update: axes along which it has the full length, and so starts at 0."""
    last, strides = len(eqn.invars), eqn.params.get("strides")
    part = 1 if eqn.primitive.name == "dynamic_update_slice" else last
    for axis, (old, new) in enumerate(zip(shape_of(eqn, 0), shape_of(eqn, part), strict=True)):
        if old == new and (strides is None or strides[axis] == 1):
            yield [(at, axis) for at in sorted({0, part, last})], MAPPED


def _gather(eqn: Any) -> Iterator[AxisGroup]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    rank, offsets = len(shape_of(eqn, 2)), numbers.offset_dims
    rows = [axis for axis in range(rank) if axis not in offsets]
    together = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims,
                        strict=True))  # fmt: skip
    # All axes of the indices but the last, which spans one index, appear in the result in order.
    for axis, new in enumerate(rows):
        places = [(0, together[axis])] if axis in together else []
        yield [*places, (1, axis), (2, new)], MAPPED
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(shape_of(eqn, 0))) if axis not in gone]
    for axis, new in zip(kept, offsets, strict=True):
        if sizes[axis] == shape_of(eqn, 0)[axis]:
            yield [(0, axis), (2, new)], MAPPED


def _scatter(eqn: Any) -> Iterator[AxisGroup]:
    numbers = eqn.params["dimension_numbers"]
    windows = numbers.update_window_dims
    rows = [axis for axis in range(len(shape_of(eqn, 2))) if axis not in windows]
    together = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims,
                        strict=True))  # fmt: skip
    for axis, update in enumerate(rows):
        if axis in together:
            own = together[axis]
            yield [(0, own), (1, axis), (2, update), (3, own)], MAPPED
        # Additions may come in any order; in any other scatter the last write wins.
        elif eqn.primitive.name in ADDING:
            yield [(1, axis), (2, update)], ADDED_INTO
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(shape_of(eqn, 0))) if axis not in gone]
    for axis, update in zip(kept, windows, strict=True):
        if shape_of(eqn, 0)[axis] == shape_of(eqn, 2)[update]:
            yield [(0, axis), (2, update), (3, axis)], MAPPED


def _stack(eqn: Any) -> Iterator[AxisGroup]:
    operands, new = range(len(eqn.invars)), eqn.params["axis"]
    for axis in range(len(shape_of(eqn, 0))):
        yield [*((at, axis) for at in operands), (len(operands), axis + (new <= axis))], MAPPED


def _unstack(eqn: Any) -> Iterator[AxisGroup]:
    gone = eqn.params["axis"]
    for axis in range(len(shape_of(eqn, 0))):
        if axis != gone:
            new = axis - (gone < axis)
            yield [(0, axis), *((at, new) for at in range(1, 1 + len(eqn.outvars)))], MAPPED


def _windows(eqn: Any) -> Iterator[AxisGroup]:
    params = eqn.params
    for axis, size in enumerate(params["window_dimensions"]):
        alone = size == 1 == params["window_strides"][axis] == params["base_dilation"][axis]
        if alone and tuple(params["padding"][axis]) == (0, 0):
            yield [(0, axis), (1, axis)], MAPPED


def _matrices(eqn: Any) -> Iterator[AxisGroup]:
    """Decompositions and solves of batched matrices: all axes but the last two can be divided."""
    positions = range(len(eqn.invars) + len(eqn.outvars))
    for axis in range(len(shape_of(eqn, 0)) - 2):
        yield [(at, axis) for at in positions], MAPPED


# JAX versions spell these names with a hyphen or an underscore.
ADDING = ("scatter-add", "scatter_add")
_OTHER_SCATTERS = [f"scatter{sign}{kind}" for sign in "-_" for kind in ("mul", "min", "max")]

_RULES: dict[str, Callable[[Any], Iterator[AxisGroup]]] = {
    **dict.fromkeys(primitives.REDUCTIONS | primitives.ARG_REDUCTIONS | {"squeeze"}, _reduction),
    **dict.fromkeys(primitives.CUMULATIVE, _along("axis")),
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    **dict.fromkeys(["slice", "dynamic_slice", "dynamic_update_slice"], _slice),
    "gather": _gather,
    "iota": _made,
    **dict.fromkeys(primitives.MATRICES, _matrices),
    "pad": _pad,
    "random_bits": _random_bits,
    **dict.fromkeys(primitives.WINDOW_REDUCTIONS, _windows),
    "rev": _along("dimensions"),
    **dict.fromkeys([*ADDING, "scatter", *_OTHER_SCATTERS], _scatter),
    "sharding_constraint": _constrained,
    "sort": _along("dimension"),
    "split": _along("axis"),
    "stack": _stack,
    "top_k": _along("axis"),
    "transpose": _transpose,
    "unstack": _unstack,
}


@dataclasses.dataclass(frozen=True)
class Label:
    """The division of an array along an axis with `outer * num_tiles * inner` entries."""

    axis: int
    outer: int
    inner: int

    def split(self, shape: Sequence[int], num_tiles: int) -> tuple[int, ...]:
        """An array's shape with a separate axis for the number of the tile."""
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        return (*before, self.outer, num_tiles, self.inner, *after)


@dataclasses.dataclass(frozen=True)
class Division:
    """The division of an operation: labels of the operands and results that are divided.

    Attributes:
        operands: Label of each operand; None if every tile reads it whole.
        results: Label of each result; None if it is made from all tiles.
        kind: `MAPPED` if each tile makes a tile of the results; `FOLDED` if the result is the sum,
            or another reduction, over tiles; `ADDED_INTO` if each tile adds into the first operand.
    """

    operands: tuple[Label | None, ...]
    results: tuple[Label | None, ...]
    kind: str = MAPPED


class Axes:
    """The groups of axes of one equation, by the rule of its primitive."""

    def __init__(self, eqn: Any) -> None:
        self._eqn = eqn
        self._count = len(eqn.invars)
        # A callback would see parts of its operands, and be called once for each.
        rule = None if eqn.effects else rule_of(eqn)
        groups = () if rule is None else rule(eqn)
        self._found = {place: group for group in groups for place in group[0]}

    @functools.cached_property
    def _divisible(self) -> dict[tuple[int, int], AxisGroup]:
        """The groups without random keys, which stay whole."""
        return {
            place: group
            for place, group in self._found.items()
            if not any(_is_key(self._eqn, position) for position, _ in group[0])
        }

    def together(self, at: int, axis: int) -> AxisGroup | None:
        """The group of an axis: the axes that are divided with it, and how parts form the result.

        Args:
            at: Position of the array among the equation's operands, then results.
            axis: Axis of the array.

        Returns:
            The group; None if the axis can't be divided. Reshapes have no groups, only divisions.
        """
        return self._found.get((at, axis))

    def division(self, at: int, label: Label, num_tiles: int) -> Division | None:
        """The division of the equation that gives one of its arrays a label.

        Args:
            at: Position of the array among the equation's operands, then results.
            label: The array's label.
            num_tiles: Number of tiles.

        Returns:
            The division; None if tiles mix, or the primitive has no rule.
        """
        if self._eqn.primitive.name == "reshape":
            return _reshaped(self._eqn, at, label, num_tiles)
        if (group := self._divisible.get((at, label.axis))) is None:
            return None
        places, kind = group
        labels: list[Label | None] = [None] * (self._count + len(self._eqn.outvars))
        for position, axis in places:
            labels[position] = Label(axis, label.outer, label.inner)
        return Division(tuple(labels[: self._count]), tuple(labels[self._count :]), kind)


def has_rule(eqn: Any) -> bool:
    """Whether it is known along which axes an operation can be divided."""
    return eqn.primitive.name == "reshape" or rule_of(eqn) is not None


def _is_key(eqn: Any, at: int) -> bool:
    """Whether an operand or result holds random keys, which stay whole."""
    aval = (*eqn.invars, *eqn.outvars)[at].aval
    return jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _reshaped(eqn: Any, at: int, label: Label, num_tiles: int) -> Division | None:
    """The division of a reshape, from where the entries around the divided ones end up."""
    if eqn.params.get("dimensions") is not None or has_explicit_sharding(eqn):
        return None
    if _is_key(eqn, 0):
        return None
    shapes = shape_of(eqn, 0), shape_of(eqn, 1)
    mine, other = shapes[at], shapes[1 - at]
    outer = math.prod(mine[: label.axis]) * label.outer
    inner = label.inner * math.prod(mine[label.axis + 1 :])
    found = _label_between(other, outer, inner, num_tiles)
    # The divided entries lie within one axis here, but cross the border of two axes there.
    if found is None:
        return None
    labels = (label, found) if at == 0 else (found, label)
    return Division(labels[:1], labels[1:])


def _label_between(shape: Sequence[int], outer: int, inner: int, num_tiles: int) -> Label | None:
    """The label with this many entries of the flattened array outside and inside a tile."""
    before = 1
    for axis, size in enumerate(shape):
        after = math.prod(shape[axis + 1 :])
        # The first axis that fits is the outermost; `outer` counts the entries before the tiles
        # within it.
        if size > 1 and not outer % before and not inner % after:
            label = Label(axis, outer // before, inner // after)
            if label.outer * num_tiles * label.inner == size:
                return label
        before *= size
    return None


# Parameters that are a shape: the result's, or the shape of the slice taken from the operand.
_SHAPES = {
    "broadcast_in_dim": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
}


def params_of_part(
    eqn: Any, result_axis: int, operand_axis: int | None, length: int
) -> dict[str, Any]:
    """The parameters of an equation on a part of its arrays along one group of axes.

    Args:
        eqn: The equation.
        result_axis: The divided axis of its first result.
        operand_axis: The divided axis of its first operand; None if that is read whole.
        length: Length of the part along these axes.
    """
    name, params = eqn.primitive.name, eqn.params
    key, axis = _SHAPES.get(name), result_axis
    # All remaining primitives, including products, take their shapes from their operands.
    if name == "gather" and operand_axis is not None:
        if params["slice_sizes"][operand_axis] > 1:  # the axis lies within a window
            key, axis = "slice_sizes", operand_axis
    if key is None:
        return params
    return {**params, key: tuple(length if a == axis else n for a, n in enumerate(params[key]))}


# Parameters of operations on one array, besides numbers: axes of the operand by number, and lists
# with an entry for each axis of the operand or of the result.
_NUMBERS_OF_AXES = ("permutation", "dimensions", "axes", "axis")
_BY_AXIS = ("start_indices", "limit_indices", "strides", "slice_sizes")
_BY_NEW_AXIS = ("shape", "new_sizes")


def params_of_slice(eqn: Any, axes: Sequence[int], new: Sequence[int]) -> dict[str, Any]:
    """The parameters of an operation on a slice of its operand.

    Args:
        eqn: The equation of an operation that rearranges, reduces or accumulates one array.
        axes: The axes of its operand that the slice lacks.
        new: The axes of its results that their slices lack.
    """

    def numbered(gone: Sequence[int], value: Any) -> Any:
        if isinstance(value, int):
            return value - sum(a < value for a in gone)
        return tuple(d - sum(a < d for a in gone) for d in value if d not in gone)

    def without(gone: Sequence[int], value: Any) -> tuple[int, ...]:
        return tuple(n for a, n in enumerate(value) if a not in gone)

    params = dict(eqn.params)
    for names, change, gone in (
        (_NUMBERS_OF_AXES, numbered, axes),
        (("broadcast_dimensions",), numbered, new),
        (_BY_AXIS, without, axes),
        (_BY_NEW_AXIS, without, new),
    ):
        for name in names:
            if params.get(name) is not None:
                params[name] = change(gone, params[name])
    return params
