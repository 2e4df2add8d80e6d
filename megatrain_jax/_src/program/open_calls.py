"""Opens the calls of a traced function by renaming variables, where nothing has to be computed.

`Inliner` traces a function again, equation by equation, since slices of stacked parameters take the
place of arrays. Where nothing is stacked, the equations stay what they are but for their variables,
and to copy them takes a tenth of the time.

A worked example, with two calls of `f(x) = sin(2 * x)`::

    a = f p;  b = f a                                      # two equations; x is one variable

    c = mul 2 p;  a = sin c;  d = mul 2 a;  b = sin d      # four, and each call has its own 2 * x
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.inline import folded, is_constant_scalar
from megatrain_jax._src.program.pieces import constant
from megatrain_jax._src.program.primitives import CALLS, CUSTOM_RULES


class _NeedsTrace(Exception):
    """The error of an equation that would be another one, traced again."""


def with_open_calls(traced: jx.Traced) -> jx.Traced | None:
    """Opens calls and custom derivative rules, as an `Inliner` does that is `primal`.

    Returns:
        The function with the same inputs and outputs; None if it has to be traced again: for a
        conditional, which becomes a selection, for effects, or since types would change.
    """
    # Single numbers become literals when they are traced again.
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
    """Appends a jaxpr's equations on some operands, with new results; gives those of the jaxpr."""
    # Of operands of other types than it was traced for, its results may have others, too.
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
            # New ones, since all calls of a function have one jaxpr.
            outs = [jex.Var(v.aval) for v in eqn.outvars]
            eqns.append(eqn.replace(invars=ins, outvars=outs))
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(jaxpr.outvars)


def _called(eqn: Any) -> Any | None:
    """The open jaxpr that an equation only calls, or None."""
    name = eqn.primitive.name
    if name not in CALLS and name not in CUSTOM_RULES:
        return None
    jaxpr = eqn.params[CALLS.get(name, "call_jaxpr")]
    if jx.constants(jaxpr):
        raise _NeedsTrace
    return jx.opened(jaxpr)


def _numbers(eqn: Any, ins: Sequence[Any]) -> list[Any] | None:
    """The results of an equation on literals alone, as literals, if they are single numbers."""
    if jx.variables(ins):
        return None
    values = [constant(a.val) for a in ins]
    if not is_constant_scalar(eqn, values):
        return None
    # A number that is computed has a type of its own, which is handed on to what reads it.
    if any(v.aval.weak_type for v in eqn.outvars):
        raise _NeedsTrace
    results = zip(folded(eqn, values), eqn.outvars, strict=True)
    return [jex.Literal(value, v.aval) for value, v in results]
