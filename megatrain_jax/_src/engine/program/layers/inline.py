"""Opens nested calls and unrolls loops over layers, so that a traced function can be cut.

The jaxpr is evaluated equation by equation under a second trace. A stacked parameter (one array for
all layers) is represented by `SlicedValue`, its slices, and stays so through every operation that
does not mix them. A loop that takes it layer by layer is unrolled.

Example, with `w` a stack of `w0`, `w1`, `w2` of shape (4, 4)::

    scan(lambda x, layer: (tanh(x @ layer), None), x, w)    # one equation, w of shape (3, 4, 4)

    a = dot x w0;  b = tanh a                               # six equations, no array of w
    c = dot b w1;  d = tanh c
    e = dot d w2;  f = tanh e

A loop over stacked values with independent slices is split into one loop per slice.

An optimizer may iterate on all layers of a stacked parameter at once, under a `vmap`. No layer
depends on another, so each gets its own loop. Values that are not stacked, such as a counter, are
recomputed in each of these loops.

Example: `w` of shape (3, 4, 4) with the slices `w0`, `w1`, `w2`::

    5 trips with (k, w):     k + 1, w - w w      one loop, its products with the layers as a batch

    5 trips with (k, w0):    k + 1, w0 - w0 w0   three loops, for w0, w1 and w2; one for k alone

If nothing has to be retraced, calls are opened by renaming variables.

`Inliner` retraces a function equation by equation, because slices of stacked parameters replace
arrays. Without stacked parameters, only the variables of the equations change, and copying them
takes a tenth of the time.

Example, with two calls of `f(x) = sin(2 * x)`::

    a = f p;  b = f a                                      # two equations; x is one variable

    c = mul 2 p;  a = sin c;  d = mul 2 a;  b = sin d      # four; each call has its own 2 * x
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers import known
from megatrain_jax._src.engine.program.layers.known import reads_by_counter
from megatrain_jax._src.engine.program.layers.sliced_values import (
    NOTHING,
    SlicedValue,
    Slicing,
    Value,
    common_slicing,
    constant,
    first,
    join,
    rows,
    stack,
)
from megatrain_jax._src.engine.program.layers.slicewise import slicewise, uniform_row
from megatrain_jax._src.engine.program.primitives import CALLS, CUSTOM_RULES, REMAT

# Evaluates a body on values: (body, operands) -> results.
_Call = Callable[[jx.Body, Sequence[Value | SlicedValue]], Sequence[Value | SlicedValue]]


class _SlicesDependError(Exception):
    """Raised for a loop in which one slice depends on another."""


def loop_by_slice(eqn: Any, ins: Sequence[Value | SlicedValue], call: _Call) -> list | None:
    """Makes one loop for each slice of a `scan` or `while` with stacked operands.

    Args:
        eqn: The loop.
        ins: Its operands, at least one of them stacked.
        call: Evaluates the loop's jaxprs on values.

    Returns:
        The results of the loop; None if its slices depend on each other.
    """
    counts = {v.grid.size for v in ins if isinstance(v, SlicedValue)}
    if eqn.effects or len(counts) > 1:
        return None
    try:
        make = _whiles if eqn.primitive.name == "while" else _scans
        return make(eqn, ins, counts.pop(), call)
    except _SlicesDependError:
        return None


def _scans(eqn, ins, count: int, call: _Call) -> list:
    num_consts, num_carry = jx.scan_parts(eqn)
    first = num_consts + num_carry  # of the scanned operands, which move along axis 0
    slicings = [Slicing.of(v) for v in ins]
    if any(0 in own.axes for own in slicings[first:]):
        raise _SlicesDependError  # a scan over an axis in which layers are merged with more
    # One trip's inputs and outputs lack the scan's own axis 0.
    inner = [*slicings[:first], *(own.shifted(-1) for own in slicings[first:])]
    body = _SlicedBody.of(jx.loop_body(eqn), call, count, num_consts, num_carry, inner)
    before = [*body.operands[:first], *slicings[first:]]
    after = [*body.results[:num_carry], *(own.shifted(1) for own in body.results[num_carry:])]

    def run(p: int | None) -> list[Any]:
        function, taken = body.of_slice(p)
        consts, carry, xs = (
            [_cell(before[k], ins[k], eqn.invars[k], p) for k in taken if start <= k < end]
            for start, end in itertools.pairwise((0, num_consts, first, len(ins)))
        )

        def trip(carry, x):
            out = function([*consts, *carry, *x])
            return out[: len(carry)], out[len(carry) :]

        params = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(trip, carry, xs, **params)
        return [*carry, *ys]

    return _joined(run, after, count)


def _whiles(eqn, ins, count: int, call: _Call) -> list:
    skipped, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    num_carry = len(ins) - skipped - num_consts
    slicings = [Slicing.of(v) for v in ins]
    body = _SlicedBody.of(jx.loop_body(eqn), call, count, num_consts, num_carry, slicings[skipped:])
    asked = [*slicings[:skipped], *body.operands[num_consts:]]
    condition = _SlicedBody.of(jx.loop_condition(eqn), call, count, len(asked), 0, asked)
    before = [*slicings[:skipped], *body.operands]

    def run(p: int | None) -> list[Any]:
        function, taken = body.of_slice(p)
        goes_on, read = condition.of_slice(p)

        def cells(numbers):
            return [_cell(before[k], ins[k], eqn.invars[k], p) for k in numbers]

        consts = cells(skipped + k for k in taken if k < num_consts)
        init = cells(skipped + k for k in taken if k >= num_consts)
        known = cells(k for k in read if k < skipped)
        return jax.lax.while_loop(
            lambda carry: goes_on([*known, *carry])[0],
            lambda carry: function([*consts, *carry]),
            init,
        )

    return _joined(run, body.results, count)


def _cell(slicing: Slicing, value: Value | SlicedValue, atom: Any, p: int | None) -> Any:
    """A slice of an operand as an array of its type, or the whole operand if it has no slices."""
    array = slicing.cell(value, p or 0).array
    is_key = jnp.issubdtype(atom.aval.dtype, jax.dtypes.extended)
    return array if is_key else jnp.asarray(array, atom.aval.dtype)


def _joined(
    run: Callable[[int | None], list[Any]], slicings: Sequence[Slicing], count: int
) -> list[Value | SlicedValue]:
    """Joins the results of one loop per slice, and of one loop for values without slices."""
    columns = [run(p) for p in range(count)]
    alone = iter(run(None) if any(not own.axes for own in slicings) else ())
    return [
        own.whole([Value(column[k]) for column in columns]) if own.axes else Value(next(alone))
        for k, own in enumerate(slicings)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SlicedBody:
    """A loop's body, or its condition, on slices.

    Attributes:
        traced: The jaxpr from all slices of its operands to all slices of its results.
        operands: The slicing of each operand.
        results: The slicing of each result.
        count: Number of slices of each sliced value.
    """

    traced: jx.Traced
    operands: Sequence[Slicing]
    results: Sequence[Slicing]
    count: int

    @classmethod
    def of(
        cls, body: jx.Body, call: _Call, count: int, num_consts: int, num_carry: int, operands
    ) -> "_SlicedBody":
        """Traces a body on slices; carried values are sliced alike before and after.

        Raises:
            _SlicesDependError: A slice of a result depends on another slice.
        """
        avals = [v.aval for v in body.jaxpr.invars]
        operands, results = list(operands), []
        last = num_consts + num_carry

        def on_slices(rows):
            pairs = zip(rows, operands, strict=True)
            values = call(body, [own.whole(list(map(Value, row))) for row, own in pairs])
            # A carried value that starts whole, such as zeros, may be sliced after a trip.
            # Conversely, if the trip returns a sliced operand whole, each of its slices must depend
            # on one slice, or slices meet.
            found = [Slicing.of(v) for v in values]
            given = [*operands[num_consts:last], *found[num_carry:]]
            results[:] = [g if g.axes else f for g, f in zip(given, found, strict=True)]
            if any(own.axes and own.count != count for own in found):
                raise _SlicesDependError  # only part of the slices, or several together
            pairs = zip(values, results, strict=True)
            return [[own.cell(v, p).array for p in range(own.count)] for v, own in pairs]

        while True:
            rows = [
                [jax.ShapeDtypeStruct(own.shape(a.shape), a.dtype)] * own.count
                for a, own in zip(avals, operands, strict=True)
            ]
            traced = jx.trace(on_slices, rows)
            if operands[num_consts:last] == results[:num_carry]:
                break
            operands[num_consts:last] = results[:num_carry]
        found = cls(traced=traced, operands=operands, results=list(results), count=count)
        found._check()
        return found

    def _slices(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """The variables of each operand's slices, and of each result's."""
        invars = iter(self.traced.jaxpr.invars[len(self.traced.consts) :])
        outvars = iter(self.traced.jaxpr.outvars)
        return (
            [list(itertools.islice(invars, own.count)) for own in self.operands],
            [list(itertools.islice(outvars, own.count)) for own in self.results],
        )

    def _check(self) -> None:
        behind: dict[Any, frozenset[int]] = {}  # the slices that each variable depends on
        inputs, outputs = self._slices()
        for row, own in zip(inputs, self.operands, strict=True):
            behind.update((v, frozenset((p,) if own.axes else ())) for p, v in enumerate(row))
        for eqn in self.traced.jaxpr.eqns:
            behind.update(dict.fromkeys(eqn.outvars, jx.union(behind, eqn.invars)))
        for row, own in zip(outputs, self.results, strict=True):
            for p, v in enumerate(row):
                if jx.union(behind, [v]) - {p if own.axes else None}:
                    raise _SlicesDependError

    def of_slice(self, p: int | None) -> tuple[Callable[[Sequence[Any]], list[Any]], list[int]]:
        """The function of one slice, or, with None, of the values without slices.

        Returns:
            `operands -> results` on arrays, and the numbers of the operands that it takes.
        """

        def chosen(rows, slicings):
            pairs = enumerate(zip(rows, slicings, strict=True))
            return {k: row[p or 0 if own.axes else 0] for k, (row, own) in pairs
                    if p is not None or not own.axes}  # fmt: skip

        inputs, outputs = self._slices()
        ins, outs = chosen(inputs, self.operands), chosen(outputs, self.results)
        consts, jaxpr = self.traced.consts, self.traced.jaxpr
        invars = [*jaxpr.invars[: len(consts)], *ins.values()]
        one = jx.sub_jaxpr(jaxpr, jaxpr.eqns, invars, list(outs.values()))
        traced = jx.without_dead_code(dataclasses.replace(self.traced, jaxpr=one))
        return lambda args: jx.evaluate(traced.jaxpr, [*consts, *args]), list(ins)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inliner:
    """Rewrites jaxprs by evaluating them on traced values.

    Attributes:
        primal: Whether the function is never differentiated, like an optimizer's update. Then
            conditionals become selections, and custom derivative rules are opened too.
        modules: Module of each leaf; the blocks of a value are numbers of leaves.
        opened: Whether it opened the `remat` that reads these leaves.
    """

    primal: bool = False
    modules: Sequence[Hashable] = ()
    opened: dict[frozenset[int], bool] = dataclasses.field(default_factory=dict)

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value | SlicedValue]) -> list:
        """Evaluates an open jaxpr on constants and values, under the caller's trace."""

        def results_of(eqn: Any, ins: list[Any]) -> Sequence[Any]:
            with eqn.ctx.manager:  # the mesh may differ between equations
                return self._eqn(eqn, ins)

        values = (*map(constant, consts), *args)
        return jx.interpret(jaxpr, values, results_of, lambda atom: constant(atom.val))

    def _eqn(self, eqn, ins) -> Sequence[Value | SlicedValue]:
        """The results of an equation: opened, unrolled, slice by slice, or on whole arrays."""
        name = eqn.primitive.name
        pieces = [v for v in ins if isinstance(v, SlicedValue)]
        if name not in REMAT or pieces or self._opens(ins):
            rules = CUSTOM_RULES if self.primal else frozenset()
            if inner := jx.called(eqn, CALLS | REMAT | rules):
                return self._call(inner, ins)
        # In an unrolled loop, "every third layer" depends on a counter with a known value.
        if name == "cond" and ins[0].integers is not None:
            return self._call(jx.branch(eqn, ins[0].integers.value), ins[1:])
        if self.primal and name == "cond":
            return self._select(eqn, ins)
        if not pieces:
            return self._plain(eqn, ins)
        if name == "scan" and _is_over_layers(eqn, ins):
            return self._unrolled(eqn, ins)
        is_loop = self.primal and name in ("scan", "while")
        out = loop_by_slice(eqn, ins, self._call) if is_loop else slicewise(eqn, ins)
        # An equation that mixes slices gets the whole array, so it reads all their blocks.
        return self._plain(eqn, [stack(v) for v in ins]) if out is None else out

    def opens_same(self, modules: Sequence[Hashable]) -> bool:
        """Whether the results were the same if leaves had these modules."""
        return all(opens == _are_several(of, modules) for of, opens in self.opened.items())

    def _opens(self, ins: Sequence[Value]) -> bool:
        """Whether to open a remat: over several modules, it would be one equation that reads all.

        A remat within a module stays as the user wrote it.
        """
        leaves = NOTHING.union(*(v.blocks for v in ins if v.blocks is not None))
        return self.opened.setdefault(leaves, _are_several(leaves, self.modules))

    def _plain(self, eqn, ins):
        """Binds an equation to values that are not stacked."""
        blocks = join(ins)
        integers = known.results(eqn, [v.integers for v in ins])
        if is_constant_scalar(eqn, ins):
            # NumPy scalars become literals of the equations that read them.
            if all(integers):
                return [Value(k.value[()], blocks, integers=k) for k in integers if k]
            return [Value(a, blocks) for a in folded(eqn, ins)]
        row = uniform_row(eqn, ins) if self.primal else None
        pairs = zip(jx.bind(eqn, [v.array for v in ins]), integers, strict=True)
        return [Value(a, blocks, row, k) for a, k in pairs]

    def _call(self, body: jx.Body, ins):
        return self.run(body.jaxpr, body.consts, ins)

    def _select(self, eqn, ins):
        """A conditional, computed as a selection between the results of all its branches.

        It is computed slice by slice, so each group's slices need only that group's operands.
        """
        index, *operands = ins
        branches = jx.branches(eqn)
        # An index out of bounds takes the nearest branch, as `cond` does.
        which = jax.lax.clamp(0, index.array, len(branches) - 1)
        results = [self._call(b, operands) for b in branches]
        out = []
        for cases, var in zip(zip(*results, strict=True), eqn.outvars, strict=True):
            slicing, cells = common_slicing(cases, var.aval.shape), []
            for p in range(slicing.count):
                row = [slicing.cell(case, p) for case in cases]
                arrays = [cell.array for cell in row]
                # The only case, if all are identical.
                chosen = arrays[0]
                if any(a is not chosen for a in arrays):
                    number = which if len(arrays) > 2 else which.astype(bool)
                    chosen = jax.lax.select_n(number, *arrays)
                cells.append(Value(chosen, join([index, *row])))
            out.append(slicing.whole(cells))
        return out

    def _unrolled(self, eqn, ins):
        """A scan, computed as its iterations; its stacked results are slices along axis 0."""
        _, num_carry = jx.scan_parts(eqn)

        def trip(body: jx.Body, operands: Sequence[Any]) -> list[Any]:
            out = self._call(body, operands)
            # A grid's cell is one array, so sliced results of an iteration are joined first, and
            # the scan's results are then sliced by iteration.
            return [*out[:num_carry], *map(stack, out[num_carry:])]

        carry, columns = jx.unrolled(eqn, ins, trip, first)
        return [*carry, *map(rows, columns)]


def _are_several(leaves: Iterable[int], modules: Sequence[Hashable]) -> bool:
    return len({modules[leaf] for leaf in leaves}) > 1


def _is_over_layers(eqn, ins) -> bool:
    """Whether a scan takes some of its stacked operands layer by layer."""
    stacked = [isinstance(v, SlicedValue) and not v.run for v in ins]
    xs = zip(*(jx.scan_operands(eqn, row)[2] for row in (ins, stacked)), strict=True)
    if any(v.axes[0] == 0 for v, has_layers in xs if has_layers):
        return True
    integers = [isinstance(v, Value) and v.integers is not None for v in ins]
    return reads_by_counter(eqn, stacked, integers)


def is_constant_scalar(eqn, ins) -> bool:
    """Whether an equation computes scalars from scalars known at trace time."""
    if eqn.effects or not ins:
        return False
    kinds, outs = (bool, int, float, np.generic, np.ndarray), [v.aval for v in eqn.outvars]
    are_known = all(isinstance(v.array, kinds) and np.ndim(v.array) == 0 for v in ins)
    return are_known and all(
        getattr(a, "shape", None) == () and isinstance(a.dtype, np.dtype) for a in outs
    )


def folded(eqn, ins) -> list:
    """The results of an equation on known scalars, computed now.

    The scalar then is a literal, however the model spells it, so blocks stay alike.
    """
    with jax.ensure_compile_time_eval():
        return [np.asarray(jax.device_get(a))[()] for a in jx.bind(eqn, [v.array for v in ins])]


class _NeedsTrace(Exception):
    """Raised for an equation that would change if it were retraced."""


def with_open_calls(traced: jx.Traced) -> jx.Traced | None:
    """Opens calls and custom derivative rules, as a `primal` `Inliner` does.

    Returns:
        The function with the same inputs and outputs. None if it must be retraced: it has effects
        or a conditional (which becomes a selection), or types would change.
    """
    # Retracing would turn single numbers into literals.
    if any(np.shape(c) == () for c in traced.consts):
        return None
    eqns: list[Any] = []
    try:
        outs = _copy(traced.jaxpr, traced.jaxpr.invars, eqns)
    except _NeedsTrace:
        return None
    jaxpr = jx.sub_jaxpr(traced.jaxpr, eqns, traced.jaxpr.invars, outs)
    return dataclasses.replace(traced, jaxpr=jaxpr)


def _copy(jaxpr: Any, operands: Sequence[Any], eqns: list[Any]) -> list[Any]:
    """Appends a jaxpr's equations, applied to the operands; returns its new results."""
    # With different operand types than in its trace, its result types might differ, too.
    if any(a.aval != v.aval for a, v in zip(operands, jaxpr.invars, strict=True)):
        raise _NeedsTrace

    def results_of(eqn: Any, ins: list[Any]) -> list[Any]:
        inner = jx.called(eqn, CALLS | CUSTOM_RULES)
        if eqn.primitive.name == "cond" or inner and inner.consts or not inner and eqn.effects:
            raise _NeedsTrace
        if inner is not None:
            return _copy(inner.jaxpr, ins, eqns)
        if (numbers := _numbers(eqn, ins)) is not None:
            return numbers
        # New variables, because all calls of a function share one jaxpr.
        outs = [jex.Var(v.aval) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=ins, outvars=outs))
        return outs

    return jx.interpret(jaxpr, operands, results_of, lambda atom: atom)


def _numbers(eqn: Any, ins: Sequence[Any]) -> list[Any] | None:
    """The results of an equation on literals alone, as literals if they are single numbers."""
    if jx.variables(ins):
        return None
    values = [constant(a.val) for a in ins]
    if not is_constant_scalar(eqn, values):
        return None
    # A computed number's weak type would propagate to the equations that read it.
    if any(v.aval.weak_type for v in eqn.outvars):
        raise _NeedsTrace
    results = zip(folded(eqn, values), eqn.outvars, strict=True)
    return [jex.Literal(value, v.aval) for value, v in results]
