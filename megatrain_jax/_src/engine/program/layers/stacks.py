"""Finds stacked parameters: arrays of all layers that the loss reads layer by layer.

Models often keep layers in one array: `w` of shape (layers, ...) that a `scan` or a Python loop
slices. To stream such a model, each layer's slice must become a separate leaf in its own block.
This module finds the axes of layers, from the reads of a traced loss (`Reads`).

The axis 0 of a `scan` over a parameter has layers; so has any axis of length 1 that a `scan` takes.
Any further slicing (by hand, by a loop's counter, along another axis) counts as layers only if all
of these hold:

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

The reads of a traced loss are the parameter slices that its equations take, in order.

Nothing is computed. The walk tracks, for each value, the parameters in it. A value that consists
only of parameters, rearranged or changed elementwise, has views of them. An equation that combines
data with such a value is a read. Example, with `w` of shape (2, 4, 4), parameter 0::

    x = tanh(x @ w[0])   # w[0]: a view of position 0 along axis 0
    x = tanh(x @ w[1])   # w[1]: a view of position 1; this x comes after read 0

    reads[0] = Read(positions={0: {0: 0}}, before=0b0)
    reads[1] = Read(positions={0: {0: 1}}, before=0b1)
    mixed = {(0, 1): "dot_general", (0, 2): "dot_general"}

The product takes all positions of axes 1 and 2 together, so only axis 0 can be the layers' axis.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers import known
from megatrain_jax._src.engine.program.layers.known import reads_by_counter
from megatrain_jax._src.engine.program.layers.sliced_values import Index, index_of, sliced_axes
from megatrain_jax._src.engine.program.layers.slicewise import moved
from megatrain_jax._src.engine.program.primitives import REDUCTIONS, is_elementwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class _View:
    """The slices of a parameter along one of its axes, and their places in a value.

    Attributes:
        parameter: Number of the parameter.
        axis: Axis of the parameter.
        grid: Positions along that axis, int[...]: the slice at each place along `axes`.
        axes: Axes of the value that the grid's axes stand for, ascending.
        plain: Whether the value is the parameter itself, changed at most elementwise and combined
            with no further parameter.
    """

    parameter: int
    axis: int
    grid: np.ndarray
    axes: tuple[int, ...]
    plain: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Number of the parameter, and axis: a key of `Reads.mixed`."""
        return self.parameter, self.axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trail:
    """The trail of a value: the parameter slices in it, and the reads before it.

    Attributes:
        views: Slices of parameters in the value.
        parameters: Parameters that the value depends on; empty if it depends on data.
        before: Bit mask of the reads that the value comes after (bit r is read r).
        of_data: Whether the value depends on data.
        integers: The value's integers, if they are known at trace time.
    """

    views: tuple[_View, ...] = ()
    parameters: frozenset[int] = frozenset()
    before: int = 0
    of_data: bool = False
    integers: known.Known | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """An equation that combines data with parameters.

    Attributes:
        positions: For each parameter, by axis, the one position that the equation takes; axes with
            several positions are left out.
        before: Bit mask of the earlier reads that it depends on (bit r is read r).
    """

    positions: Mapping[int, Mapping[int, int]]
    before: int


class Reads:
    """The reads of a loss, and the reasons not to cut a parameter into slices.

    Attributes:
        reads: All reads, in the order of their equations.
        scans: For each scan over plain parameters along axis 0, these parameters; for each scan
            with one trip, all parameters that it takes.
        single: For the parameters of scans with one trip, the axis that is scanned.
        mixed: For (parameter, axis), the name of an equation that takes several slices together.
        remade: Parameters with slices mixed in an array that a scan takes slice by slice.
        looped: Parameters sliced by the counter of a loop that is not unrolled.
    """

    def __init__(self, traced: jx.Traced, num_parameters: int):
        """Walks a loss; its inputs are constants, then parameters, then data."""
        self.reads: list[Read] = []
        self.scans: list[tuple[int, ...]] = []
        self.single: dict[int, int] = {}
        self.mixed: dict[tuple[int, int], str] = {}
        self.remade: set[int] = set()
        self.looped: set[int] = set()
        inputs = [*enumerate(traced.jaxpr.invars[len(traced.consts) :])]
        self._shapes = [v.aval.shape for _, v in inputs[:num_parameters]]
        trails = [_parameter(p, v.aval.shape) if p < num_parameters else _DATA for p, v in inputs]
        self._call(jx.Body(traced.jaxpr, traced.consts), trails)

    def _call(self, body: jx.Body, ins: Sequence[_Trail]) -> list[_Trail]:
        """Walks a body."""
        trails = [*map(_constant, body.consts), *ins]
        return jx.interpret(body.jaxpr, trails, self._eqn, lambda atom: _constant(atom.val))

    def _eqn(self, eqn, ins: list[_Trail]) -> Sequence[_Trail]:
        name = eqn.primitive.name
        if inner := jx.called(eqn):
            return self._call(inner, ins)
        if name == "cond" and ins[0].integers is not None:
            return self._call(jx.branch(eqn, ins[0].integers.value), ins[1:])
        if name == "scan" and self._is_over_layers(eqn, ins):
            return self._unrolled(eqn, ins)
        # Not unrolled: the array it scans may be made from parameters (a concatenation). A warning
        # then explains why their layers stay together.
        if name == "scan":
            for x in jx.scan_operands(eqn, ins)[2]:
                self.remade |= set() if x.of_data else x.parameters
        # A loop that slices parameters by its counter without being unrolled.
        for k, x in enumerate(ins if name in ("scan", "while") else ()):
            if any(map(self._is_candidate, x.views)):
                alone = [j == k for j in range(len(ins))]
                if reads_by_counter(eqn, alone, [y.integers is not None for y in ins]):
                    self.looped |= x.parameters
        return self._applied(eqn, ins)

    def _is_candidate(self, view: _View) -> bool:
        """Whether a view's axis may still be the layers' axis: nothing has mixed it.

        A scan over the parameter itself takes axis 0 slice by slice, so that axis always may.
        """
        return view.grid.size > 1 and (view.plain and not view.axis or view.key not in self.mixed)

    def _is_over_layers(self, eqn, ins) -> bool:
        """Whether to walk a scan iteration by iteration; notes a scan over plain parameters."""
        xs = [v for x in jx.scan_operands(eqn, ins)[2] for v in x.views if v.axes[:1] == (0,)]
        if eqn.params["length"] == 1:
            single = {v.parameter: v.axis for v in xs if self._shapes[v.parameter][v.axis] == 1}
            self.single.update(single)
            scanned = [*single]
        else:
            scanned = [v.parameter for v in xs if v.plain and not v.axis]
        if scanned and (leaves := tuple(dict.fromkeys(scanned))) not in self.scans:
            self.scans.append(leaves)
        stacked = [any(map(self._is_candidate, x.views)) for x in ins]
        integers = [x.integers is not None for x in ins]
        over_layers = eqn.params["length"] == 1 and scanned or any(map(self._is_candidate, xs))
        return bool(over_layers) or reads_by_counter(eqn, stacked, integers)

    def _unrolled(self, eqn, ins):
        """Walks a scan's body once per iteration, in execution order."""
        carry, columns = jx.unrolled(eqn, ins, self._call, _row)
        return [*carry, *map(self._together, columns)]

    def _together(self, trails: Sequence[_Trail]) -> _Trail:
        """The trail of a scan's stacked results, which keep no views."""
        # A scan's results are stacked anew, so a parameter slice among them is one of several.
        for view in (v for x in trails for v in x.views):
            self.mixed.setdefault(view.key, "scan")
        return _joined(trails)

    def _applied(self, eqn, ins: list[_Trail]) -> list[_Trail]:
        """The trails of an equation's results; notes the read, or the slices that it mixes.

        If an equation on data takes a view of one slice, the view ends there. Any other view moves
        with the equation. If it can't, a single slice keeps a view without axes, and several slices
        are mixed.
        """
        joined = _joined(ins)
        integers = known.results(eqn, [x.integers for x in ins])
        views: list[list[_View]] = [[] for _ in eqn.outvars]
        taken: dict[int, dict[int, int]] = {}
        # Data meets parameters: this is a read, even if it takes all slices.
        if joined.of_data:
            taken = {p: {} for x in ins if not x.of_data for p in sorted(x.parameters)}
        for k, view in ((k, v) for k, x in enumerate(ins) for v in x.views):
            if joined.of_data and view.grid.size == 1:
                taken.setdefault(view.parameter, {})[view.axis] = view.grid.item()
            elif (found := _moved(eqn, k, view, ins)) is not None:
                for row, new in zip(views, found, strict=True):
                    row += [] if new is None else [new]
            elif view.grid.size == 1:
                one = dataclasses.replace(view, grid=view.grid.reshape(()), axes=(), plain=False)
                for row in views:
                    row.append(one)
            else:
                self.mixed.setdefault(view.key, eqn.primitive.name)
        before = joined.before
        # The results come after this read too. A bit mask lets sets of reads be joined in one
        # operation, however many there are.
        if taken:
            self.reads.append(Read(positions=taken, before=before))
            before |= 1 << len(self.reads) - 1
        joined = dataclasses.replace(joined, before=before)
        pairs = zip(views, integers, strict=True)
        return [dataclasses.replace(joined, views=tuple(v), integers=k) for v, k in pairs]


_DATA = _Trail(of_data=True)


def _parameter(p: int, shape: tuple[int, ...]) -> _Trail:
    views = [
        _View(parameter=p, axis=axis, grid=_positions(n), axes=(axis,), plain=True)
        for axis, n in enumerate(shape)
    ]
    return _Trail(views=tuple(views), parameters=frozenset((p,)))


@functools.lru_cache
def _positions(n: int) -> np.ndarray:
    return np.arange(n)


def _constant(value: Any) -> _Trail:
    return _Trail(integers=known.constant(value))


def _joined(trails: Sequence[_Trail]) -> _Trail:
    """The trail of a value that depends on all of these, without views."""
    of_data = any(x.of_data for x in trails)
    before = functools.reduce(operator.or_, (x.before for x in trails), 0)
    parameters: frozenset[int] = frozenset()
    if not of_data:
        parameters = parameters.union(*(x.parameters for x in trails))
    return _Trail(parameters=parameters, before=before, of_data=of_data)


def _row(x: _Trail, i: int) -> _Trail:
    """The trail of slice `i` of a value along axis 0."""
    views = []
    for view in x.views:
        grid, axes = view.grid, view.axes
        if axes[:1] == (0,):
            grid, axes = np.asarray(grid[i]), axes[1:]
        views.append(dataclasses.replace(view, grid=grid, axes=tuple(a - 1 for a in axes),
                                         plain=False))  # fmt: skip
    integers = None if x.integers is None else x.integers.row(i)
    return dataclasses.replace(x, views=tuple(views), integers=integers)


def _moved(eqn, k: int, view: _View, ins: Sequence[_Trail]) -> list[_View | None] | None:
    """The view of operand `k` in each result; None if its slices are mixed or lost."""
    name, aval = eqn.primitive.name, eqn.invars[k].aval
    if is_elementwise(eqn):
        if any(v.aval.shape != aval.shape for v in eqn.outvars):
            return None
        # Two parameters combined in one array are not a plain parameter that a scan could slice.
        alone = all(v.parameter == view.parameter for x in ins for v in x.views)
        return [dataclasses.replace(view, plain=view.plain and alone) for _ in eqn.outvars]
    if k or not view.axes:
        return None
    # Reducing along the slices (a norm over all layers) is no reason to keep them together.
    if name in REDUCTIONS and not set(eqn.params["axes"]).isdisjoint(view.axes):
        return [None]

    found = moved(eqn, view.grid, view.axes, [x.integers for x in ins])
    if found is None:
        return None
    return [dataclasses.replace(view, grid=m.grid, axes=m.axes, plain=False) for m in found]


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
        rows = zip(self.first, other.first, strict=True)
        return all(max(a) < min(b) for a, b in itertools.pairwise(rows))


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
        read = {axis for _, at in taken for axis in at if self.shapes[p][axis] > 1}
        mixed, is_plain = self.found.mixed, p in self.plain
        axes = sorted(a for a in read if (p, a) not in mixed or a == 0 and is_plain)
        # More axes first: they give smaller slices, each with its own read.
        counts = range(len(axes), 0, -1)
        for chosen in itertools.chain(*(itertools.combinations(axes, n) for n in counts)):
            sliced = self._along(p, chosen)
            if sliced is not None and self._one_by_one(sliced):
                return sliced
        return next(filter(None, (self._along(p, axes[:n]) for n in counts)), None)

    def _along(self, p: int, axes: Sequence[int]) -> _Sliced | None:
        """The slices of a parameter along the given axes, if all are read."""
        rows = self._reads_by_place(p, axes)
        # A slice that is never read would be in no block, and so would never be updated.
        if len(rows) < math.prod(self.shapes[p][axis] for axis in axes):
            return None
        order = tuple(index_of(axes, place) for place in rows)
        first = tuple(next(_bits(reads)) for reads in rows.values())
        return _Sliced(parameter=p, order=order, first=first, reads=tuple(rows.values()))

    def _reads_by_place(self, p: int, axes: Sequence[int]) -> dict[tuple[int, ...], int]:
        """For each slice of a parameter along some axes that is read, a bit mask of its reads."""
        rows: dict[tuple[int, ...], int] = {}
        for r, at in self.taken[p]:
            # A read of several positions along one of these axes belongs to no single slice.
            if at.keys() >= set(axes):
                place = tuple(at[axis] for axis in axes)
                rows[place] = rows.get(place, 0) | 1 << r
        return rows

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

    def _scanned(self, leaves: tuple[int, ...]) -> Stack:
        """The stack of one scan over these parameters along axis 0.

        If its body also takes all of them slice by slice along a further axis, one after another,
        as with groups of layers, these inner slices are the layers.
        """
        known = [self.sliced[p] for p in leaves if p in self.sliced]
        orders = {frozenset(s.order) for s in known}
        grouped = len(known) == len(leaves) and len(orders) == 1
        single = {p: axis for p, axis in self.found.single.items() if p in leaves}
        axes = (0,)
        if grouped and all(self._in_series(s.reads) for s in known):
            own = sliced_axes(known[0].order[0])
            axes = own if single or own[0] == 0 else axes
        if single and axes == (0,):
            slices = {p: (index_of((axis,), (0,)),) for p, axis in single.items()}
            return Stack(slices=slices, layers=(index_of(axes, (0,)),), named=leaves, scanned=True)
        shape = [self.shapes[leaves[0]][axis] for axis in axes]
        layers = tuple(index_of(axes, place) for place in np.ndindex(*shape))
        slices = dict.fromkeys(leaves, layers)
        return Stack(slices=slices, layers=layers, named=leaves, scanned=True)

    def _in_series(self, reads: Sequence[int]) -> bool:
        """Whether each slice is read after the one before it, given all reads of each."""
        return all(a & self._before(b) for a, b in itertools.pairwise(reads))

    def _one_by_one(self, one: _Sliced) -> bool:
        """Whether each slice is read after the one before it has been read for the last time."""
        # The highest bit is a slice's last read; the lowest bit is the next slice's first read.
        over = [a.bit_length() <= (b & -b).bit_length() for a, b in itertools.pairwise(one.reads)]
        return all(over) and self._in_series(one.reads)

    def _layers(self, lead: _Sliced, group: Sequence[_Sliced]) -> Stack | None:
        """The stack of parameters read alternately; None if their slices are not layers."""
        own = {s.parameter for s in group}
        columns = zip(*(s.reads for s in group), strict=True)
        reads = [functools.reduce(operator.or_, column) for column in columns]
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
        rows = self._reads_by_place(p, (axis,))
        return len(rows) > 1 and self._in_series(list(rows.values()))

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
