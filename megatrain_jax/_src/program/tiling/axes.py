"""Division of one operation into tiles: the divided axes of its operands and results.

A label describes how an array is divided: along an axis with `outer * num_tiles * inner` entries,
tile i has the entries with middle index i. The rules in `axis_rules.py` list the axes that must be
divided together: a tile of the results is made from tiles of some operands, and from the remaining
operands whole. If only operands are divided, the result is a sum over tiles.

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

from megatrain_jax._src.program.axis_rules import (
    MAPPED,
    Together,
    is_placed,
    shape_of,
    together,
)


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
        self._all = self._count + len(eqn.outvars)
        self._found: dict[tuple[int, int], Together] = {}
        # A callback would see tiles, and be called once for each.
        for group in () if eqn.effects else together(eqn):
            if not any(_is_key(eqn, at) for at, _ in group[0]):
                self._found.update((place, group) for place in group[0])

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
        if (at, label.axis) not in self._found:
            return None
        places, kind = self._found[at, label.axis]
        labels: list[Label | None] = [None] * self._all
        for position, axis in places:
            labels[position] = Label(axis, label.outer, label.inner)
        return Division(tuple(labels[: self._count]), tuple(labels[self._count :]), kind)


def _is_key(eqn: Any, at: int) -> bool:
    """Whether an operand or result holds random keys, which stay whole."""
    aval = (*eqn.invars, *eqn.outvars)[at].aval
    return jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _reshaped(eqn: Any, at: int, label: Label, num_tiles: int) -> Division | None:
    """The division of a reshape, from where the entries around the divided ones end up."""
    if eqn.params.get("dimensions") is not None or is_placed(eqn):
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
