"""Finds stacked parameters: arrays of all layers that the loss reads layer by layer.

Models often keep layers in one array: `w` of shape (layers, ...) that a `scan` or a Python loop
slices. To stream such a model, each layer's slice must become a separate leaf in its own block.
This module finds the axes of layers, from the reads of a traced loss (`reads.py`).

The axis 0 of a `scan` over a parameter has layers. Any further slicing (by hand, by a loop's
counter, along another axis) counts as layers only if all of these hold:

- every use of the parameter takes one slice, and every slice is used;
- each slice is read after the one before it: experts, or query, key and value, are not;
- a layer is larger than the shared parameters, read between all layers.

Parameters with slices that are read alternately form one stack. The order of the slices' first
reads is the order of the layers.

Example, with `w` of shape (3, 4, 4), parameter 0, and `b` of shape (3, 4), parameter 1::

    for i in range(3):
        x = tanh(x @ w[i]) + b[i]

    w[0], b[0], w[1], b[1], w[2], b[2] are read in this order, each after the one before
    Stack(slices={0: ((0,), (1,), (2,)), 1: ((0,), (1,), (2,))},
          layers=((0,), (1,), (2,)), named=(0, 1))

In `sum(x @ w[i] for i in range(3))` no slice is read after another: there is no stack.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.index import Index, index_of, sliced_axes
from megatrain_jax._src.engine.program.layers.reads import Reads

# A stack smaller than this fraction of the model's parameters is not worth separate stages.
_SMALLEST = 1 / 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Parameters with slices that are the layers of one loop.

    Attributes:
        slices: For each parameter, the index of its slice in each layer, in the layers' order.
        layers: Index of each layer, taken from the parameter that is read first.
        named: Parameters with a common path that names the stack; parameters that only join a scan
            are not included.
        between: Further parameters that are read between the layers.
        scanned: Whether a scan over the parameters themselves shows that they are layers.
    """

    slices: Mapping[int, tuple[Index, ...]]
    layers: tuple[Index, ...]
    named: tuple[int, ...]
    between: frozenset[int] = frozenset()
    scanned: bool = False

    @property
    def length(self) -> int:
        """Number of layers."""
        return len(self.layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stacks:
    """The stacks of a loss, and parameters that look like stacks but can't be cut.

    Attributes:
        stacks: Stacks that can be cut into layers.
        mixed: For further parameters that are read layer by layer, the name of an operation that
            takes several layers together.
        partial: Parameters with layers that are never read.
        remade: Parameters that a scan slices only inside another array made from them.
        looped: Parameters sliced by the counter of a loop that can't be unrolled.
    """

    stacks: tuple[Stack, ...]
    mixed: Mapping[int, str]
    partial: frozenset[int]
    remade: frozenset[int]
    looped: frozenset[int]

    @property
    def scanned(self) -> tuple[Stack, ...]:
        """The stacks of scans, without parameters that are only read alternately with them."""
        return tuple(
            dataclasses.replace(stack, slices={p: stack.slices[p] for p in stack.named})
            for stack in self.stacks if stack.scanned
        )  # fmt: skip


def find_stacks(traced: jx.Traced, num_parameters: int) -> Stacks:
    """Finds the stacks of a loss; its inputs are constants, then parameters, then data."""
    finder = _Finder(traced, num_parameters)
    stacks = finder.stacks()
    cut = {p for stack in stacks for p in stack.slices}
    mixed = {p: name for p, name in finder.mixed().items() if p not in cut}
    return Stacks(
        stacks=tuple(stacks),
        mixed=mixed,
        partial=frozenset(p for p in finder.partial() if p not in cut and p not in mixed),
        remade=frozenset(finder.found.remade - cut - mixed.keys()),
        looped=frozenset(finder.found.looped - cut),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sliced:
    """A parameter that is read slice by slice.

    Attributes:
        parameter: Number of the parameter.
        order: Indices of its slices, in the order of their first reads.
        first: Number of the first read of each slice.
        reads: Bit mask of all reads of each slice (bit r is read r).
    """

    parameter: int
    order: tuple[Index, ...]
    first: tuple[int, ...]
    reads: tuple[int, ...]

    def alternates_with(self, other: "_Sliced") -> bool:
        """Whether both have the same number of slices, and these are read alternately."""
        if len(self.order) != len(other.order):
            return False
        rows = list(zip(self.first, other.first, strict=True))
        return all(max(a) < min(b) for a, b in zip(rows, rows[1:], strict=False))


class _Finder:
    """Joins the reads of each parameter into stacks."""

    def __init__(self, traced: jx.Traced, num_parameters: int):
        self.found = Reads(traced, num_parameters)
        invars = traced.jaxpr.invars[len(traced.consts) :][:num_parameters]
        self.shapes = [tuple(v.aval.shape) for v in invars]
        self.sizes = [jx.num_elements(v.aval) for v in invars]
        self.plain = {p for leaves in self.found.scans for p in leaves}
        self.taken: list[list[tuple[int, Mapping[int, int]]]] = [[] for _ in self.shapes]
        for r, read in enumerate(self.found.reads):
            for p, at in read.positions.items():
                self.taken[p].append((r, at))
        self.sliced = {p: s for p in range(num_parameters) if (s := self._sliced(p)) is not None}

    def _sliced(self, p: int) -> _Sliced | None:
        """The slices of a parameter along its unmixed axes; None if some slices are not read.

        It takes the most axes with slices that are read one after another: for an array of shape
        (3, layers, ...) with queries, keys and values, axis 1 alone.
        """
        taken = self.taken[p]
        axes = sorted({axis for _, at in taken for axis in at if self._may_be_cut(p, axis)})
        # More axes first: they give smaller slices, each with its own read.
        counts = range(len(axes), 0, -1)
        for chosen in itertools.chain(*(itertools.combinations(axes, n) for n in counts)):
            sliced = self._along(p, chosen)
            if sliced is not None and self._one_by_one(sliced):
                return sliced
        return next(filter(None, (self._along(p, axes[:n]) for n in counts)), None)

    def _along(self, p: int, axes: Sequence[int]) -> _Sliced | None:
        """The slices of a parameter along the given axes, if all are read."""
        rows: dict[tuple[int, ...], int] = {}
        first: list[int] = []
        for r, at in self.taken[p]:
            # A read of several positions along one of these axes belongs to no single slice.
            if at.keys() >= set(axes):
                place = tuple(at[axis] for axis in axes)
                if place not in rows:
                    first.append(r)
                rows[place] = rows.get(place, 0) | 1 << r
        # A slice that is never read would be in no block, and so would never be updated.
        if len(rows) < math.prod(self.shapes[p][axis] for axis in axes):
            return None
        order = tuple(index_of(axes, place) for place in rows)
        return _Sliced(parameter=p, order=order, first=tuple(first), reads=tuple(rows.values()))

    def _may_be_cut(self, p: int, axis: int) -> bool:
        return (p, axis) not in self.found.mixed or axis == 0 and p in self.plain

    def stacks(self) -> list[Stack]:
        """All stacks: first the scans' stacks, with parameters read alternately with them."""
        stacks = [self._scanned(leaves) for leaves in self.found.scans]
        claimed = {p for stack in stacks for p in stack.slices}
        rest = [s for p, s in sorted(self.sliced.items()) if p not in claimed]
        for k, stack in enumerate(stacks):
            lead = next((self.sliced[p] for p in stack.slices if p in self.sliced), None)
            if lead is not None and set(lead.order) == set(stack.layers):
                mine = [s for s in rest if s.alternates_with(lead)]
                rest = [s for s in rest if s not in mine]
                added = {s.parameter: _in_order(stack, lead, s) for s in mine}
                stacks[k] = dataclasses.replace(stack, slices={**stack.slices, **added})
        while rest:
            # Of parameters read alternately, the one read first gives the layers' order.
            lead = min(rest, key=lambda s: s.first)
            group = [s for s in rest if s is lead or s.alternates_with(lead)]
            rest = [s for s in rest if s not in group]
            if (stack := self._layers(lead, group)) is not None:
                stacks.append(stack)
        return stacks

    def _scanned(self, leaves: Sequence[int]) -> Stack:
        """The stack of one scan over these parameters along axis 0.

        If its body also takes all of them slice by slice along a further axis, one after another,
        as with groups of layers, these inner slices are the layers.
        """
        known = [self.sliced[p] for p in leaves if p in self.sliced]
        orders = {frozenset(s.order) for s in known}
        grouped = (
            len(known) == len(leaves) and len(orders) == 1 and all(map(self._in_series, known))
        )
        axes = sliced_axes(known[0].order[0]) if grouped else (0,)
        if axes[0] != 0:
            axes = (0,)
        shape = [self.shapes[leaves[0]][axis] for axis in axes]
        layers = tuple(index_of(axes, place) for place in np.ndindex(*shape))
        slices = dict.fromkeys(leaves, layers)
        return Stack(slices=slices, layers=layers, named=tuple(leaves), scanned=True)

    def _in_series(self, one: _Sliced) -> bool:
        """Whether each slice is read after the one before it."""
        pairs = zip(one.reads, one.reads[1:], strict=False)
        return all(a & self._before(b) for a, b in pairs)

    def _one_by_one(self, one: _Sliced) -> bool:
        """Whether each slice is read after the one before it has been read for the last time."""
        pairs = zip(one.reads, one.reads[1:], strict=False)
        # The highest bit is a slice's last read; the lowest bit is the next slice's first read.
        over = all(a.bit_length() <= (b & -b).bit_length() for a, b in pairs)
        return over and self._in_series(one)

    def _layers(self, lead: _Sliced, group: Sequence[_Sliced]) -> Stack | None:
        """The stack of parameters read alternately; None if their slices are not layers."""
        own = {s.parameter for s in group}
        reads = [
            functools.reduce(operator.or_, rows)
            for rows in zip(*(s.reads for s in group), strict=True)
        ]
        before = [self._before(row) for row in reads]
        gaps = []  # parameters read between a layer and the next, outside the stack
        # `before` grows from layer to layer, so a gap's reads are the ones added by the last step.
        for k in range(1, len(reads)):
            if not before[k] & reads[k - 1]:
                return None  # in parallel, like experts, or query, key and value
            gaps.append(self._parameters(before[k] & ~before[k - 1]) - own)
        shared = set.intersection(*gaps)
        # Parameters read between all layers are shared by them. If they are larger than a layer,
        # the stack is only the varying part of one block that is applied again and again.
        size, whole = sum(self.sizes[p] for p in own), sum(self.sizes)
        if size < _SMALLEST * whole or size / len(reads) < sum(self.sizes[p] for p in shared):
            return None
        return Stack(
            slices={s.parameter: s.order for s in group},
            layers=lead.order,
            named=tuple(s.parameter for s in group),
            between=frozenset().union(*gaps),
        )

    def mixed(self) -> dict[int, str]:
        """Parameters with slices that are read one after another, but also together."""
        found: dict[int, str] = {}
        for (p, axis), name in self.found.mixed.items():
            if self._some_in_series(p, axis):
                found.setdefault(p, name)
        return found

    def partial(self) -> list[int]:
        """Parameters with some slices read one after another, and some never read."""
        return [
            p for p, shape in enumerate(self.shapes)
            if p not in self.sliced and any(self._some_in_series(p, a) for a in range(len(shape)))
        ]  # fmt: skip

    def _some_in_series(self, p: int, axis: int) -> bool:
        """Whether several slices along an axis are read, each after the one before it."""
        rows: dict[int, int] = {}
        for r, at in self.taken[p]:
            if axis in at:
                rows[at[axis]] = rows.get(at[axis], 0) | 1 << r
        reads = list(rows.values())
        pairs = list(zip(reads, reads[1:], strict=False))
        return bool(pairs) and all(a & self._before(b) for a, b in pairs)

    def _before(self, reads: int) -> int:
        """Bit mask of all reads that come before any of the given reads."""
        return functools.reduce(operator.or_, (self.found.reads[r].before for r in _bits(reads)))

    def _parameters(self, reads: int) -> set[int]:
        """The parameters that the given reads take."""
        return {p for r in _bits(reads) for p in self.found.reads[r].positions}


def _bits(number: int) -> Iterator[int]:
    """Positions of the bits that are set, ascending."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _in_order(stack: Stack, lead: _Sliced, other: _Sliced) -> tuple[Index, ...]:
    """A parameter's slices in the order of the stack; `lead` is one of the stack's parameters."""
    partner = dict(zip(lead.order, other.order, strict=True))
    return tuple(partner[index] for index in stack.slices[lead.parameter])
