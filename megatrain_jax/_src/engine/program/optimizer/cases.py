"""Precomputes both cases of scalars that depend on a Boolean over all groups.

Optax guards its norms with `norm(where(total == 0, 1, x))`. If `x` is one layer of a stacked
parameter, this would need all groups twice: for the condition, and for the norm.

Example, for group 0 with its array x0 and a total over all groups:

    before  total -> c = (total == 0) -> s = norm(where(c, 1, x0))        reduce after combine
    after   s_false = norm(where(False, 1, x0)), s_true = norm(where(True, 1, x0))      reduce
            s = select(c, s_false, s_true)                                             combine

Two conditions make four cases. The selected one equals the original result.
"""

import itertools
from collections import ChainMap
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.optimizer.slicing import MIXED, Slicer

# Each condition doubles the number of cases, and all are computed.
_MOST_CONDITIONS = 2


def split_cases(slicer: Slicer) -> jx.Traced | None:
    """Rewrites an update so that entangled scalars are computed for each case and selected.

    Returns:
        The flat update, to be cut again; None if no scalar can be rewritten.
    """
    plans = {}
    for eqn in slicer.jaxpr.eqns:
        for v in eqn.outvars:
            if v in slicer.scalar and slicer.is_entangled(v):
                if (plan := _plan(slicer, v)) is not None:
                    plans[v] = plan
    return _rewritten(slicer, plans) if plans else None


def _plan(slicer: Slicer, v: Any) -> tuple[list[Any], list[int]] | None:
    """Finds the conditions that a scalar depends on, and the equations in between.

    Returns:
        The conditions and the equations' numbers, ascending; None if it depends on any further
        value from all groups, or on too many conditions.
    """
    conditions: dict[Any, None] = {}
    between: set[int] = set()
    todo = [v]
    while todo:
        u = todo.pop()
        # A value computed by its group alone is the same in each case.
        if u not in slicer.late and slicer.group[u] != MIXED:
            continue
        # The walk ends at a Boolean, because both its values will be substituted.
        if u.aval.dtype == np.bool_ and jx.num_elements(u.aval) == 1:
            conditions[u] = None
        # Any other value over all groups could take more than two values.
        elif u in slicer.junctions or u not in slicer.producer:
            return None
        elif slicer.producer[u] not in between:
            between.add(slicer.producer[u])
            todo += jx.variables(slicer.jaxpr.eqns[slicer.producer[u]].invars)
    known = 0 < len(conditions) <= _MOST_CONDITIONS
    return (list(conditions), sorted(between)) if known else None


def _rewritten(slicer: Slicer, plans: dict[Any, tuple[list[Any], list[int]]]) -> jx.Traced:
    """Traces the update again, with planned scalars selected from their cases."""
    jaxpr, num_consts = slicer.jaxpr, len(slicer.consts)

    def flat(*args):
        env = dict(zip(jaxpr.invars, [*slicer.consts.values(), *args], strict=True))
        for eqn in jaxpr.eqns:
            _bind(eqn, env)
            for v in eqn.outvars:
                # Bound first, because it may have further readers; without any, it is dead code.
                if v in plans:
                    env[v] = _selected(jaxpr, env, v, *plans[v])
        return [_read(a, env) for a in jaxpr.outvars]

    avals = [jx.shape_of(v.aval) for v in jaxpr.invars[num_consts:]]
    return jx.without_dead_code(jx.trace(flat, *avals))


def _selected(jaxpr, env, v, conditions, between):
    """The value of a scalar: its equations for each case, then a tree of selections."""
    cases = []
    for values in itertools.product((False, True), repeat=len(conditions)):
        local = ChainMap({}, env)
        local.update((c, np.full(c.aval.shape, x)) for c, x in zip(conditions, values, strict=True))
        for i in between:
            _bind(jaxpr.eqns[i], local)
        cases.append(local[v])
    # In `product` the last condition changes fastest, so it selects between neighbours first.
    for condition in reversed(conditions):
        which = jax.lax.reshape(env[condition], ())
        cases = [jax.lax.select_n(which, *cases[i : i + 2]) for i in range(0, len(cases), 2)]
    return cases[0]


def _bind(eqn, env) -> None:
    outs = jx.bind(eqn, [_read(a, env) for a in eqn.invars])
    env.update(zip(eqn.outvars, outs, strict=True))


def _read(atom, env):
    return atom.val if jx.is_literal(atom) else env[atom]
