"""Splits a loop over stacked values with independent slices into one loop per slice.

An optimizer may iterate on all layers of a stacked parameter at once, under a `vmap`. No layer
depends on another, so each gets its own loop. Values that are not stacked, such as a counter, are
recomputed in each of these loops.

Example: `w` of shape (3, 4, 4) with the slices `w0`, `w1`, `w2`::

    5 trips with (k, w):     k + 1, w - w w      one loop, its products with the layers as a batch

    5 trips with (k, w0):    k + 1, w0 - w0 w0   three loops, for w0, w1 and w2; one for k alone
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.sliced_values import SlicedValue, Slicing, Value

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
        values = [_cell(before[k], ins[k], eqn.invars[k], p) for k in taken]
        at = [sum(k < end for k in taken) for end in (num_consts, first)]
        consts, carry, xs = values[: at[0]], values[at[0] : at[1]], values[at[1] :]

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
            args = [
                own.whole(list(map(Value, row))) for row, own in zip(rows, operands, strict=True)
            ]
            values = call(body, args)
            # A carried value that starts whole, such as zeros, may be sliced after a trip.
            # Conversely, if the trip returns a sliced operand whole, each of its slices must depend
            # on one slice, or slices meet.
            found = [Slicing.of(v) for v in values]
            given = [*operands[num_consts:last], *found[num_carry:]]
            results[:] = [g if g.axes else f for g, f in zip(given, found, strict=True)]
            if any(own.axes and own.count != count for own in found):
                raise _SlicesDependError  # only part of the slices, or several together
            return [
                [own.cell(v, p).array for p in range(own.count)]
                for v, own in zip(values, results, strict=True)
            ]

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

    def _inputs(self) -> list[list[Any]]:
        """The variables of each operand's slices."""
        rest = iter(self.traced.jaxpr.invars[len(self.traced.consts) :])
        return [[next(rest) for _ in range(own.count)] for own in self.operands]

    def _outputs(self) -> list[list[Any]]:
        """The variables of each result's slices."""
        rest = iter(self.traced.jaxpr.outvars)
        return [[next(rest) for _ in range(own.count)] for own in self.results]

    def _check(self) -> None:
        # Bit mask of the slices that each variable depends on.
        behind: dict[Any, int] = {}
        for row, own in zip(self._inputs(), self.operands, strict=True):
            behind.update((v, 1 << p if own.axes else 0) for p, v in enumerate(row))
        for eqn in self.traced.jaxpr.eqns:
            union = 0
            for v in jx.variables(eqn.invars):
                union |= behind.get(v, 0)
            behind.update(dict.fromkeys(eqn.outvars, union))
        for row, own in zip(self._outputs(), self.results, strict=True):
            for p, v in enumerate(row):
                if not jx.is_literal(v) and behind.get(v, 0) & ~(1 << p if own.axes else 0):
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

        ins = chosen(self._inputs(), self.operands)
        outs = chosen(self._outputs(), self.results)
        consts, jaxpr = self.traced.consts, self.traced.jaxpr
        invars = [*jaxpr.invars[: len(consts)], *ins.values()]
        one = jx.sub_jaxpr(jaxpr, jaxpr.eqns, invars, list(outs.values()))
        traced = jx.without_dead_code(dataclasses.replace(self.traced, jaxpr=one))
        return lambda args: jx.evaluate(traced.jaxpr, [*consts, *args]), list(ins)
