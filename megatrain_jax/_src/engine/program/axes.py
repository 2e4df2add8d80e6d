"""The axes along which the arrays of an operation can be divided, for all parts of the library.

Three parts of the library divide arrays: a kernel that computes its rows in tiles to save memory,
several devices that share the examples of a batch, and a stack of layers that is cut into slices.
All of them ask here; `axis_rules.py` has the rules by primitive.

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
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program.axis_rules import (
    ADDED_INTO,
    FOLDED,
    MAPPED,
    AxisGroup,
    has_explicit_sharding,
    rule_of,
    shape_of,
)

__all__ = [
    "ADDED_INTO",
    "FOLDED",
    "MAPPED",
    "Axes",
    "Division",
    "Label",
    "has_rule",
    "params_of_part",
    "params_of_slice",
]


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
        group = self.together(at, label.axis)
        if group is None or any(_is_key(self._eqn, position) for position, _ in group[0]):
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
