"""Predicts which arrays of a function XLA divides over several devices, from its equations.

XLA's partitioner decides this during compilation; the rules of `program/axes.py` predict it without
compiling. An array is divided along the axis that goes together with its operand's, until an
equation sums or mixes over that axis, or a constraint makes the array whole. If devices can't take
equally many entries, it counts as whole.

Example: the backward of `y = x @ w`, with x and dy divided along their examples::

    w_slab   f32[n]     divided: a shard on each device
    w        bf16[d,f]  whole, by a sharding constraint
    dx       dy @ w.T   divided: its first axis is dy's
    dw       x.T @ dy   whole: sums over examples, so each device has a term of the whole array
    d_slab   bf16[n]    divided again, by a constraint
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.axes import Axes, Label, has_rule

ShardedAxes = Mapping[Any, int]
"""The divided axis of each divided variable of a jaxpr; missing variables are whole."""


def sharded_axes(jaxpr: Any, given: ShardedAxes, num_devices: int) -> dict[Any, int]:
    """Finds the divided arrays of an open jaxpr, given its divided inputs."""
    axes = dict(given)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            # The library writes two constraints: whole, and divided along the first axis.
            if not replicates(eqn):
                axes[eqn.outvars[0]] = 0
            continue
        if inner := sharded_axes_within(eqn, axes, num_devices):
            for body, within in inner:
                axes |= _around(eqn, body, within)
            continue
        for number, v in enumerate(eqn.outvars):
            axis = _axis_of_result(eqn, number, axes, num_devices)
            if axis is not None:
                axes[v] = axis
    return axes


def sharded_axes_within(
    eqn: Any, axes: ShardedAxes, num_devices: int
) -> list[tuple[Any, dict[Any, int]]]:
    """The inner jaxprs of an equation, each with its divided arrays."""
    if eqn.primitive.name == "scan":
        return [_divided_in_scan(eqn, axes, num_devices)]
    found = []
    for body in jx.inner_jaxprs(eqn):
        given = {
            inner: axes[v]
            for inner, v in zip(body.invars, _operands(eqn, body), strict=False)
            if _is_in(v, axes)
        }
        found.append((body, sharded_axes(body, given, num_devices)))
    return found


def replicates(eqn: Any) -> bool:
    """Whether an equation is a constraint that its result is whole on every device."""
    if eqn.primitive.name != "sharding_constraint":
        return False
    return eqn.params["sharding"].is_fully_replicated


def gathered_operands(eqn: Any, axes: ShardedAxes) -> list[Any]:
    """The arrays that a loop reads along their divided axis: each device needs them whole."""
    if eqn.primitive.name != "scan":
        return []
    rows = eqn.invars[sum(jx.scan_parts(eqn)) :]
    return [v for v in dict.fromkeys(jx.variables(rows)) if axes.get(v) == 0]


def _divided_in_scan(eqn: Any, axes: ShardedAxes, num_devices: int) -> tuple[Any, dict[Any, int]]:
    """The body of a loop, and its divided arrays.

    An array that is read row by row loses its first axis. A carry is divided if any iteration
    divides it.
    """
    body = jx.loop_body(eqn).jaxpr
    num_consts, num_carry = jx.scan_parts(eqn)
    carried = slice(num_consts, num_consts + num_carry)
    given = {}
    for at, (inner, v) in enumerate(zip(body.invars, eqn.invars, strict=True)):
        if _is_in(v, axes):
            axis = axes[v] - (at >= carried.stop)
            if axis >= 0:
                given[inner] = axis
    # A carry that one iteration divides may divide further carries in the next. Each pass adds a
    # carry, so this ends.
    while True:
        found = sharded_axes(body, given, num_devices)
        carry = zip(body.invars[carried], body.outvars[:num_carry], strict=True)
        new = {v: found[r] for v, r in carry if v not in found and _is_in(r, found)}
        if not new:
            return body, found
        given |= new


def _around(eqn: Any, body: Any, within: ShardedAxes) -> dict[Any, int]:
    """The divided operands and results of an equation, given its divided inner arrays."""
    pairs = zip(reversed(eqn.outvars), reversed(body.outvars), strict=False)
    if eqn.primitive.name != "scan":
        return {v: within[r] for v, r in pairs if _is_in(r, within)}
    num_consts, num_carry = jx.scan_parts(eqn)
    carried = slice(num_consts, num_consts + num_carry)
    stacked = set(eqn.outvars[num_carry:])
    results = {v: within[r] + (v in stacked) for v, r in pairs if _is_in(r, within)}
    # A carry's initial value is divided like the carry: zeros, for example, are made in parts.
    starts = zip(eqn.invars[carried], body.invars[carried], strict=True)
    return results | {v: within[r] for v, r in starts if not jx.is_literal(v) and r in within}


def _is_in(atom: Any, axes: ShardedAxes) -> bool:
    return not jx.is_literal(atom) and atom in axes


def _operands(eqn: Any, body: Any) -> Sequence[Any]:
    """The operands of an equation's inner jaxpr, in order; empty if unknown."""
    name = eqn.primitive.name
    if name == "cond":
        return eqn.invars[1:]
    if name == "while":
        conds, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        is_cond = body is jx.loop_condition(eqn).jaxpr
        own = eqn.invars[:conds] if is_cond else eqn.invars[conds : conds + bodies]
        return [*own, *eqn.invars[conds + bodies :]]
    return eqn.invars if len(body.invars) == len(eqn.invars) else ()


def _axis_of_result(eqn: Any, number: int, axes: ShardedAxes, num_devices: int) -> int | None:
    """The axis along which a result is divided; None if it is whole."""
    shape = eqn.outvars[number].aval.shape
    # The first divided operand that determines an axis decides; the partitioner moves the
    # remaining operands.
    for at, v in enumerate(eqn.invars):
        if not _is_in(v, axes):
            continue
        axis, size = axes[v], v.aval.shape[axes[v]]
        if not has_rule(eqn):  # such as a kernel of attention, which treats examples alike
            return axis if shape[axis : axis + 1] == (size,) else None
        division = Axes(eqn).division(at, Label(axis, 1, size // num_devices), num_devices)
        if division is not None:
            label = division.results[number]
            # Terms of a sum over the divided axis are whole on each device.
            return label.axis if label is not None and label.outer == 1 else None
    return None
