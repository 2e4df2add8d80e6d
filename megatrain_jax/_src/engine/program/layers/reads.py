"""Lists the reads of a traced loss: the parameter slices that its equations take, in order.

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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers import known
from megatrain_jax._src.engine.program.layers.grid import moved
from megatrain_jax._src.engine.program.layers.loops import reads_by_counter
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
        scans: For each scan over plain parameters along axis 0, these parameters.
        mixed: For (parameter, axis), the name of an equation that takes several slices together.
        remade: Parameters with slices mixed in an array that a scan takes slice by slice.
        looped: Parameters sliced by the counter of a loop that is not unrolled.
    """

    def __init__(self, traced: jx.Traced, num_parameters: int):
        """Walks a loss; its inputs are constants, then parameters, then data."""
        self.reads: list[Read] = []
        self.scans: list[tuple[int, ...]] = []
        self.mixed: dict[tuple[int, int], str] = {}
        self.remade: set[int] = set()
        self.looped: set[int] = set()
        trails = [_Trail(integers=known.constant(c)) for c in traced.consts]
        inputs = traced.jaxpr.invars[len(traced.consts) :]
        for p, v in enumerate(inputs):
            trails.append(_parameter(p, v.aval.shape) if p < num_parameters else _DATA)
        self._walk(traced.jaxpr, trails)

    def _walk(self, jaxpr, trails: Sequence[_Trail]) -> list[_Trail]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), trails, strict=True))
        for eqn in jaxpr.eqns:
            outs = self._eqn(eqn, [_literal(a) if jx.is_literal(a) else env[a] for a in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [_literal(a) if jx.is_literal(a) else env[a] for a in jaxpr.outvars]

    def _call(self, body: jx.Body, ins):
        """Walks a body."""
        consts = [_Trail(integers=known.constant(c)) for c in body.consts]
        return self._walk(body.jaxpr, [*consts, *ins])

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
            for x in ins[sum(jx.scan_parts(eqn)) :]:
                self.remade |= set() if x.of_data else x.parameters
        if name in ("scan", "while"):
            self._note_loop(eqn, ins)
        return self._applied(eqn, ins)

    def _is_candidate(self, view: _View) -> bool:
        """Whether a view's axis may still be the layers' axis: nothing has mixed it.

        A scan over the parameter itself takes axis 0 slice by slice, so that axis always may.
        """
        return view.grid.size > 1 and (view.plain and not view.axis or view.key not in self.mixed)

    def _is_over_layers(self, eqn, ins) -> bool:
        """Whether to walk a scan iteration by iteration; notes a scan over plain parameters."""
        num_consts, num_carry = jx.scan_parts(eqn)
        xs = [v for x in ins[num_consts + num_carry :] for v in x.views if v.axes[:1] == (0,)]
        scanned = [v.parameter for v in xs if v.plain and not v.axis]
        if scanned and (leaves := tuple(dict.fromkeys(scanned))) not in self.scans:
            self.scans.append(leaves)
        return any(map(self._is_candidate, xs)) or self._takes_by_counter(eqn, ins)

    def _takes_by_counter(self, eqn, ins) -> bool:
        stacked = [any(map(self._is_candidate, x.views)) for x in ins]
        return reads_by_counter(eqn, stacked, [x.integers is not None for x in ins])

    def _note_loop(self, eqn, ins) -> None:
        """Notes parameters that a loop slices by its counter without being unrolled."""
        for k, x in enumerate(ins):
            if any(map(self._is_candidate, x.views)):
                alone = [j == k for j in range(len(ins))]
                if reads_by_counter(eqn, alone, [y.integers is not None for y in ins]):
                    self.looped |= x.parameters

    def _unrolled(self, eqn, ins):
        """Walks a scan's body once per iteration, in execution order."""
        num_consts, num_carry = jx.scan_parts(eqn)
        consts, xs = ins[:num_consts], ins[num_consts + num_carry :]
        carry = ins[num_consts : num_consts + num_carry]
        length, body = eqn.params["length"], jx.loop_body(eqn)
        given = []
        for i in range(length - 1, -1, -1) if eqn.params["reverse"] else range(length):
            rows = [_row(x, i) for x in xs]
            out = self._call(body, [*consts, *carry, *rows])
            carry = out[:num_carry]
            given.append(out[num_carry:])
        return [*carry, *(self._together(column) for column in zip(*given, strict=True))]

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
        return [
            dataclasses.replace(joined, views=tuple(row), before=before, integers=number)
            for row, number in zip(views, integers, strict=True)
        ]


_DATA = _Trail(of_data=True)


def _parameter(p: int, shape: tuple[int, ...]) -> _Trail:
    views = [
        _View(parameter=p, axis=axis, grid=_positions(n), axes=(axis,), plain=True)
        for axis, n in enumerate(shape)
        if n > 1
    ]
    return _Trail(views=tuple(views), parameters=frozenset((p,)))


@functools.lru_cache
def _positions(n: int) -> np.ndarray:
    return np.arange(n)


def _literal(atom: Any) -> _Trail:
    return _Trail(integers=known.constant(atom.val))


def _joined(trails: Sequence[_Trail]) -> _Trail:
    """The trail of a value that depends on all of these, without views."""
    of_data = any(x.of_data for x in trails)
    before = 0
    for x in trails:
        before |= x.before
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

    def integers(j: int) -> np.ndarray | None:
        found = ins[j].integers
        return None if found is None else found.value

    found = moved(eqn, view.grid, view.axes, integers)
    if found is None:
        return None
    return [dataclasses.replace(view, grid=m.grid, axes=m.axes, plain=False) for m in found]
