"""The flat update of an Optax transformation: one array per leaf and per piece of state.

If layers are stacked, the update is traced again, slice by slice. Otherwise Optax's trace, with its
calls opened, is the flat update. Tiny values that it repeats are computed once.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.inline import Inliner
from megatrain_jax._src.engine.program.layers.open_calls import with_open_calls
from megatrain_jax._src.engine.program.layers.sliced_values import Value, constant
from megatrain_jax._src.engine.program.optimizer.slicing import TINY
from megatrain_jax._src.engine.program.optimizer.trace_optimizer import LeafMap


def flatten_update(leaf_map: LeafMap) -> jx.Traced:
    """The update `(grads, params, tokens, *numbers) -> (new params, new tokens)`, on leaves.

    The numbers are the loss and, if gradients are scaled, the scale.

    Args:
        leaf_map: The traced optimizer, and the arrays as stored.
    """
    source = leaf_map.traced.update
    flat = with_open_calls(source) if _is_flat(leaf_map) else None
    return _without_repeats(jx.without_dead_code(flat or _traced_again(leaf_map)))


def _is_flat(leaf_map: LeafMap) -> bool:
    """Whether leaves are the parameters, in order, and tokens the leaves of the state."""
    stored = [*leaf_map.leaves, *leaf_map.tokens]
    order = [leaf.parameter for leaf in leaf_map.leaves]
    return order == sorted(order) and not any(s.index for s in stored)


def _traced_again(leaf_map: LeafMap) -> jx.Traced:
    """The update on leaves and tokens, some of which are slices."""
    source, n = leaf_map.traced.update, len(leaf_map.traced.param_shapes)

    def flat(grads, params, tokens, *numbers):
        args = [
            *leaf_map.params(grads),
            *leaf_map.params(params),
            *leaf_map.state(tokens),
            *map(Value, numbers),
        ]
        out = Inliner(primal=True).run(source.jaxpr, (), [*map(constant, source.consts), *args])
        return leaf_map.leaf_values(out[:n]), leaf_map.token_values(out[n:])

    shapes = leaf_map.leaf_shapes()
    tokens = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in leaf_map.tokens]
    numbers = [jax.ShapeDtypeStruct((), jnp.float32)] * leaf_map.traced.num_numbers
    return jx.trace(flat, shapes, shapes, tokens, *numbers)


def flatten_init(leaf_map: LeafMap) -> jx.Traced:
    """Traces `params -> tokens`, the initial state, on leaves and tokens."""
    source = leaf_map.traced.init

    def flat(params):
        args = [*map(constant, source.consts), *leaf_map.params(params)]
        return leaf_map.token_values(Inliner(primal=True).run(source.jaxpr, (), args))

    return jx.without_dead_code(jx.trace(flat, leaf_map.leaf_shapes()))


def _without_repeats(traced: jx.Traced) -> jx.Traced:
    """Removes repeated computations of tiny values.

    Optax computes the learning rate for every parameter. Each of these values would be a separate
    message to its parameter's group, or a separate equation in *combine*.

    Example, for two parameters and a count::

        before   a = 0.1 / count;  p0 - a * g0;  b = 0.1 / count;  p1 - b * g1
        after    a = 0.1 / count;  p0 - a * g0;                    p1 - a * g1
    """
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
