"""Computes tiny values once if an update repeats them.

Optax computes the learning rate for every parameter. Without this, each of these values would be a
separate message to its parameter's group, or a separate equation in *combine*.

Example, for two parameters and a count::

    before   a = 0.1 / count;  p0 - a * g0;  b = 0.1 / count;  p1 - b * g1
    after    a = 0.1 / count;  p0 - a * g0;                    p1 - a * g1
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.optimizer.slicing import TINY


def without_repeats(traced: jx.Traced) -> jx.Traced:
    """Computes each tiny value once: Optax repeats, say, the learning rate for every parameter."""
    same: dict[Any, Any] = {}
    known: dict[Hashable, Sequence[Any]] = {}
    eqns = []
    for eqn in traced.jaxpr.eqns:
        ins = [a if jx.is_literal(a) else same.get(a, a) for a in eqn.invars]
        if any(a is not b for a, b in zip(ins, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=ins)
        key = _repeat_key(eqn)
        first = eqn.outvars if key is None else known.setdefault(key, eqn.outvars)
        if first is eqn.outvars:
            eqns.append(eqn)
        else:
            same.update(zip(eqn.outvars, first, strict=True))
    outs = [a if jx.is_literal(a) else same.get(a, a) for a in traced.jaxpr.outvars]
    jaxpr = jx.sub_jaxpr(traced.jaxpr, eqns, traced.jaxpr.invars, outs)
    return dataclasses.replace(traced, jaxpr=jaxpr)


def _repeat_key(eqn) -> Hashable | None:
    small = all(jx.num_elements(v.aval) <= TINY for v in [*eqn.outvars, *jx.variables(eqn.invars)])
    if not small or eqn.effects:
        return None
    ins = tuple((str(a.val), str(a.aval)) if jx.is_literal(a) else a for a in eqn.invars)
    key = (eqn.primitive, ins, tuple(sorted(eqn.params.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key
