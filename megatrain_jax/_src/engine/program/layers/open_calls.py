"""Opens the calls in a traced function by renaming variables, if nothing has to be retraced.

`Inliner` retraces a function equation by equation, because slices of stacked parameters replace
arrays. Without stacked parameters, only the variables of the equations change, and copying them
takes a tenth of the time.

Example, with two calls of `f(x) = sin(2 * x)`::

    a = f p;  b = f a                                      # two equations; x is one variable

    c = mul 2 p;  a = sin c;  d = mul 2 a;  b = sin d      # four; each call has its own 2 * x
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.inline import folded, is_constant_scalar
from megatrain_jax._src.engine.program.layers.sliced_values import constant
from megatrain_jax._src.engine.program.primitives import CALLS, CUSTOM_RULES


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
    env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [a if jx.is_literal(a) else env[a] for a in atoms]

    for eqn in jaxpr.eqns:
        ins, inner = read(eqn.invars), _called(eqn)
        if inner is not None:
            outs = _copy(inner, ins, eqns)
        elif eqn.primitive.name == "cond" or eqn.effects:
            raise _NeedsTrace
        elif (numbers := _numbers(eqn, ins)) is not None:
            outs = numbers
        else:
            # New variables, because all calls of a function share one jaxpr.
            outs = [jex.Var(v.aval) for v in eqn.outvars]
            eqns.append(eqn.replace(invars=ins, outvars=outs))
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(jaxpr.outvars)


def _called(eqn: Any) -> Any | None:
    """The open jaxpr of an equation that only calls one, or None."""
    inner = jx.called(eqn, CALLS | CUSTOM_RULES)
    if inner is not None and inner.consts:
        raise _NeedsTrace
    return inner and inner.jaxpr


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
