"""Loops on stacked values whose slices never meet, as one loop for each slice.

An optimizer may iterate on all layers of a stacked parameter at once, under a `vmap`. No layer
needs another one for that, so each gets a loop of its own. Values that are not stacked, such as a
counter, are computed in each of these loops again.

A worked example, `w` of shape (3, 4, 4) with the slices `w0`, `w1`, `w2`::

    5 trips with (k, w):     k + 1, w - w w      one loop, its products with the layers as a batch

    5 trips with (k, w0):    k + 1, w0 - w0 w0   three loops, with w0, w1 and w2; one of k alone
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.index import remaining
from megatrain_jax._src.program.pieces import Pieces, Value, piece, sliced, stack

# Evaluates a jaxpr on values: (jaxpr, operands) -> results.
_Call = Callable[[Any, Sequence[Value | Pieces]], Sequence[Value | Pieces]]


class _SlicesMeet(Exception):
    """The error of a loop in which a slice depends on another one."""


def loop_by_slice(eqn: Any, ins: Sequence[Value | Pieces], call: _Call) -> list | None:
    """Makes one loop for each slice of stacked operands of a `scan` or a `while`.

    Args:
        eqn: The loop.
        ins: Its operands, at least one of them stacked; none that a `scan` goes through is sliced
            along axis 0.
        call: Evaluates the loop's jaxprs on values.

    Returns:
        The results of the loop; None if its slices depend on each other.
    """
    grids = {v.grid.shape for v in ins if isinstance(v, Pieces)}
    if eqn.effects or len(grids) > 1:
        return None
    places = list(np.ndindex(*grids.pop()))
    try:
        make = _whiles if eqn.primitive.name == "while" else _scans
        return make(eqn, ins, places, call)
    except _SlicesMeet:
        return None


def _scans(eqn, ins, places, call: _Call) -> list:
    num_consts, num_carry = jx.scan_parts(eqn)
    first = num_consts + num_carry  # of what the scan goes through, along axis 0
    # Along the axes of what a trip gets and gives, of which the scan's own axis 0 is none.
    axes = [tuple(a - (k >= first) for a in _axes(v)) for k, v in enumerate(ins)]
    body = _SlicedBody.of(eqn.params["jaxpr"], call, places, num_consts, num_carry, axes)
    before = [tuple(a + (k >= first) for a in own) for k, own in enumerate(body.operands)]
    after = [tuple(a + (k >= num_carry) for a in own) for k, own in enumerate(body.results)]

    def run(p: int | None) -> list[Any]:
        function, taken = body.of_slice(p)
        values = [_cell(ins[k], eqn.invars[k], before[k], places, p) for k in taken]
        at = [sum(k < end for k in taken) for end in (num_consts, first)]
        consts, carry, xs = values[: at[0]], values[at[0] : at[1]], values[at[1] :]

        def trip(carry, x):
            out = function([*consts, *carry, *x])
            return out[: len(carry)], out[len(carry) :]

        params = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(trip, carry, xs, **params)
        return [*carry, *ys]

    return _joined(eqn, run, after, places)


def _whiles(eqn, ins, places, call: _Call) -> list:
    skipped, num_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    first = skipped + num_consts
    num_carry = len(ins) - first
    axes = [_axes(v) for v in ins]
    body = _SlicedBody.of(
        eqn.params["body_jaxpr"], call, places, num_consts, num_carry, axes[skipped:]
    )
    carried = body.operands[num_consts:]
    condition = _SlicedBody.of(
        eqn.params["cond_jaxpr"], call, places, skipped + num_carry, 0,
        [*axes[:skipped], *carried],
    )  # fmt: skip
    ins_axes = [*axes[:skipped], *body.operands]

    def run(p: int | None) -> list[Any]:
        function, taken = body.of_slice(p)
        goes_on, asked = condition.of_slice(p)

        def cells(numbers):
            return [_cell(ins[k], eqn.invars[k], ins_axes[k], places, p) for k in numbers]

        consts = cells(skipped + k for k in taken if k < num_consts)
        init = cells(skipped + k for k in taken if k >= num_consts)
        known = cells(k for k in asked if k < skipped)
        return jax.lax.while_loop(
            lambda carry: goes_on([*known, *carry])[0],
            lambda carry: function([*consts, *carry]),
            init,
        )

    return _joined(eqn, run, body.results, places)


def _axes(value: Value | Pieces) -> tuple[int, ...]:
    return value.axes if isinstance(value, Pieces) else ()


def _cell(value, atom, axes: tuple[int, ...], places, p: int | None) -> Any:
    """A slice of an operand as an array of its own type, or all of an operand without slices."""
    if axes:
        value = piece(value, axes, places[p])
    array = value.array
    is_key = jnp.issubdtype(atom.aval.dtype, jax.dtypes.extended)
    return array if is_key else jnp.asarray(array, atom.aval.dtype)


def _joined(eqn, run: Callable[[int | None], list[Any]], axes, places) -> list[Value | Pieces]:
    """The results of all loops, from one loop for each slice and one of what has no slices."""
    columns = [run(p) for p in range(len(places))]
    alone = iter(run(None) if not all(axes) else ())
    return [
        sliced(v.aval.shape, own, [Value(column[k]) for column in columns])
        if own else Value(next(alone))
        for k, (v, own) in enumerate(zip(eqn.outvars, axes, strict=True))
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SlicedBody:
    """A loop's body, or its condition, on slices.

    Attributes:
        traced: The jaxpr on all slices of its operands, which gives all slices of its results.
        operands: The axes along which each operand is sliced; `()` if it is whole.
        results: Likewise for each result.
        places: The positions of all slices.
    """

    traced: jx.Traced
    operands: list[tuple[int, ...]]
    results: list[tuple[int, ...]]
    places: list[tuple[int, ...]]

    @classmethod
    def of(cls, jaxpr, call: _Call, places, num_consts: int, num_carry: int, axes) -> "_SlicedBody":
        """Traces a jaxpr on slices; what is carried is sliced alike before and after.

        Raises:
            _SlicesMeet: A slice of a result depends on other slices.
        """
        avals = [v.aval for v in jx.opened(jaxpr).invars]
        axes, results = list(axes), []
        last, grid = num_consts + num_carry, tuple(n + 1 for n in places[-1])

        def on_slices(rows):
            args = [
                sliced(a.shape, own, list(map(Value, row))) if own else Value(row[0])
                for row, a, own in zip(rows, avals, axes, strict=True)
            ]
            values = call(jaxpr, args)
            # What begins whole, as zeros do, may be sliced after a trip. The other way round, the
            # slices of what the trip gives depend on one slice each, or they meet.
            given = [*axes[num_consts:last], *[()] * (len(values) - num_carry)]
            results[:] = [own or _axes(v) for own, v in zip(given, values, strict=True)]
            if {v.grid.shape for v in values if isinstance(v, Pieces)} - {grid}:
                raise _SlicesMeet  # a part of the slices, or some of them together
            return [
                [piece(v, own, at).array for at in places] if own else [stack(v).array]
                for v, own in zip(values, results, strict=True)
            ]

        while True:
            rows = [
                [jax.ShapeDtypeStruct(remaining(a.shape, own), a.dtype)]
                * len(places if own else [0])
                for a, own in zip(avals, axes, strict=True)
            ]
            traced = jx.trace(on_slices, rows)
            if axes[num_consts:last] == results[:num_carry]:
                break
            axes[num_consts:last] = results[:num_carry]
        body = cls(traced=traced, operands=axes, results=list(results), places=places)
        body._check()
        return body

    def _rows(self, atoms: Sequence[Any], axes: Sequence[tuple[int, ...]]) -> list[list[Any]]:
        """Variables by operand or result, with one for each slice of those that are sliced."""
        rest = iter(atoms)
        return [[next(rest) for _ in (self.places if own else [0])] for own in axes]

    def _inputs(self) -> list[list[Any]]:
        return self._rows(self.traced.jaxpr.invars[len(self.traced.consts) :], self.operands)

    def _outputs(self) -> list[list[Any]]:
        return self._rows(self.traced.jaxpr.outvars, self.results)

    def _check(self) -> None:
        # By variable, the slices that it depends on, as the bits of a number.
        behind: dict[Any, int] = {}
        for row, own in zip(self._inputs(), self.operands, strict=True):
            behind.update((v, 1 << p if own else 0) for p, v in enumerate(row))
        for eqn in self.traced.jaxpr.eqns:
            union = 0
            for v in jx.variables(eqn.invars):
                union |= behind.get(v, 0)
            behind.update(dict.fromkeys(eqn.outvars, union))
        for row, own in zip(self._outputs(), self.results, strict=True):
            for p, v in enumerate(row):
                if not jx.is_literal(v) and behind.get(v, 0) & ~(1 << p if own else 0):
                    raise _SlicesMeet

    def of_slice(self, p: int | None) -> tuple[Callable[[Sequence[Any]], list[Any]], list[int]]:
        """The function of one slice, or with None of what is whole.

        Returns:
            `operands -> results` on arrays, and the numbers of the operands that it takes.
        """
        taken = [k for k, own in enumerate(self.operands) if p is not None or not own]
        ins, outs = self._inputs(), self._outputs()
        given = [r for r, own in enumerate(self.results) if p is not None or not own]
        consts, jaxpr = self.traced.consts, self.traced.jaxpr

        def chosen(row):
            return row[p if len(row) > 1 and p is not None else 0]

        one = jx.sub_jaxpr(
            jaxpr,
            jaxpr.eqns,
            [*jaxpr.invars[: len(consts)], *(chosen(ins[k]) for k in taken)],
            [chosen(outs[r]) for r in given],
        )
        traced = jx.without_dead_code(dataclasses.replace(self.traced, jaxpr=one))
        return lambda args: jx.evaluate(traced.jaxpr, [*consts, *args]), taken
