"""Effects of a loss (`jax.debug.print`, callbacks): finds them and fires each one once.

A stage's backward recomputes its forward. Effects that the forward has already fired are removed
from the backward's trace. An effect that depends on a cotangent belongs to the backward and stays,
and so does one that the forward doesn't have, such as a print of saved values in a derivative rule.

Example: the traced backward of a stage that prints `w` and returns `sin(w)`::

    debug_print w    # removed: it does not depend on the cotangent, and forward fired it
    a = cos w
    d = mul dy a     # `dy` is the cotangent; `d` depends on it, so `d` is "late"
    debug_print d    # stays, if a derivative rule prints it

The last stage has no separate forward, so in its backward both stay.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from megatrain_jax._src.engine.program import jaxpr as jx

# By name, because JAX keeps the classes private; every second one is ordered.
_KINDS = ("DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect")


def has_side_effects(eqn_or_jaxpr: Any) -> bool:
    """Whether evaluating an equation or a jaxpr has an effect visible outside."""
    return any(type(effect).__name__ in _KINDS for effect in eqn_or_jaxpr.effects)


def is_ordered(eqn: Any) -> bool:
    """Whether an equation has effects that must keep their order."""
    return any(type(effect).__name__ in _KINDS[1::2] for effect in eqn.effects)


def ordered_callbacks(jaxpr: Any) -> list[str]:
    """The ordered prints and callbacks of a jaxpr, as users write them: `io_callback(log)`."""
    found: dict[str, None] = {}
    for eqn in filter(is_ordered, jaxpr.eqns):
        inner = jx.inner_jaxprs(eqn)
        names = itertools.chain(*map(ordered_callbacks, inner)) if inner else [_shown(eqn)]
        found.update(dict.fromkeys(names))
    return list(found)


def _shown(eqn: Any) -> str:
    if "fmt" in eqn.params:
        return f"jax.debug.print({eqn.params['fmt']!r})"
    function = getattr(eqn.params.get("callback"), "callback_func", None)
    name = getattr(function, "__name__", None)
    kind = eqn.primitive.name.replace("debug_", "jax.debug.")
    return f"{kind}({name})" if name else kind


def has_read_callback(eqn: Any) -> bool:
    """Whether a callback inside an equation's jaxprs returns a result that is read."""
    for inner in jx.inner_jaxprs(eqn):
        fires = [e for e in inner.eqns if has_side_effects(e) and not jx.inner_jaxprs(e)]
        if not jx.num_readers(inner).keys().isdisjoint(v for e in fires for v in e.outvars):
            return True
        if any(map(has_read_callback, inner.eqns)):
            return True
    return False


def silent(jaxpr: Any) -> Any:
    """A jaxpr without its effects, except for callbacks with results that are read."""
    return _without(jaxpr, [False] * len(jaxpr.invars), False, lambda eqn: True)[0]


def _fired_by(jaxpr: Any) -> Callable[[Any], bool]:
    """Tells an equation with an effect that a jaxpr has, too."""

    def effects_of(jaxpr: Any) -> Iterator[Any]:
        for eqn in filter(has_side_effects, jaxpr.eqns):
            inner = jx.inner_jaxprs(eqn)
            yield from itertools.chain(*map(effects_of, inner)) if inner else [eqn]

    fired = [(eqn.primitive, eqn.params) for eqn in effects_of(jaxpr)]
    return lambda eqn: (eqn.primitive, eqn.params) in fired


def firing_once(
    differentiated: Callable, forward: Any, position: int, has_forward: bool
) -> Callable:
    """Wraps a function that recomputes a forward, so that it does not fire effects twice.

    Args:
        differentiated: The function; one of its arguments is the cotangents, a list of arrays.
        forward: The forward's jaxpr.
        position: Position of that argument.
        has_forward: Whether this is the only forward, so that it must fire the effects.
    """
    is_fired = _fired_by(forward)

    @functools.wraps(differentiated)
    def run(*args):
        cotangents = args[position]
        others = [*args[:position], *args[position + 1 :]]

        def reordered(cotangents, others):
            return differentiated(*others[:position], cotangents, *others[position:])

        traced = jx.trace(reordered, cotangents, others)
        values = [*traced.consts, *jax.tree.leaves((cotangents, others))]
        # Cotangents were traced as the first arguments, so they are the first inputs.
        first, count = len(traced.consts), len(cotangents)
        late = [first <= i < first + count for i in range(len(values))]
        jaxpr, _ = _without(traced.jaxpr, late, has_forward, is_fired)
        return jax.tree.unflatten(traced.out_tree, jx.evaluate(jaxpr, values))

    return run


def _without(
    jaxpr: Any, late: Sequence[bool], has_forward: bool, is_fired: Callable[[Any], bool]
) -> tuple[Any, list[bool]]:
    """Drops effects that don't depend on `late` inputs, unless their results are read.

    Args:
        jaxpr: The open jaxpr.
        late: For each input, whether it is a cotangent or depends on one.
        has_forward: Whether equations without late operands fire here, and so stay.
        is_fired: Whether an equation's effect, if it isn't late, fires elsewhere.

    Returns:
        The jaxpr, and for each output whether it is late.
    """
    found = {v for v, is_late in zip(jaxpr.invars, late, strict=True) if is_late}
    used = jx.num_readers(jaxpr).keys()
    eqns = []
    for eqn in jaxpr.eqns:
        flags = [not jx.is_literal(a) and a in found for a in eqn.invars]
        if any(flags):
            found.update(eqn.outvars)
        if has_side_effects(eqn) and not (has_forward and not any(flags)):
            if jx.inner_jaxprs(eqn):
                eqn = _within(eqn, flags, is_fired)
            # A callback with a result that is read must run again, fired or not.
            elif not any(flags) and used.isdisjoint(eqn.outvars) and is_fired(eqn):
                continue
        eqns.append(eqn)
    outs = [not jx.is_literal(a) and a in found for a in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, effects=_effects(jaxpr, eqns)), outs


def _effects(before: Any, eqns: Sequence[Any]) -> frozenset:
    """The effects that remain with these equations; further kinds of effects stay as before."""
    left = {effect for eqn in eqns for effect in eqn.effects}
    kept = (e for e in before.effects if type(e).__name__ not in _KINDS or e in left)
    return frozenset(kept)


def _within(eqn: Any, flags: Sequence[bool], is_fired: Callable[[Any], bool]) -> Any:
    """An equation without the effects in its inner jaxprs that do not depend on late values."""
    params = dict(eqn.params)
    inner = []
    for name, value in params.items():
        rows = list(value) if isinstance(value, (tuple, list)) else [value]
        for k, row in enumerate(rows):
            if jx.is_jaxpr(row):
                jaxpr = _repeated(eqn, jx.opened(row), flags, is_fired)
                inner.append(jaxpr)
                rows[k] = jx.with_body(row, jaxpr)
        params[name] = type(value)(rows) if isinstance(value, (tuple, list)) else rows[0]
    return eqn.replace(params=params, effects=_effects(eqn, inner))


def _repeated(eqn: Any, jaxpr: Any, flags: Sequence[bool], is_fired: Callable[[Any], bool]) -> Any:
    """An inner jaxpr without the effects that are not late in any iteration."""
    # The first operand of a `cond` selects the branch; it is not an input of the branches.
    operands = list(flags[1:] if eqn.primitive.name == "cond" else flags)
    if len(operands) != len(jaxpr.invars):  # a `while`, with two jaxprs
        # Operands are not matched to the two jaxprs: if any is late, all effects stay.
        operands = [any(flags)] * len(jaxpr.invars)
    silenced, outs = _without(jaxpr, operands, False, is_fired)
    if eqn.primitive.name == "scan":
        consts, carry = jx.scan_parts(eqn)
        # A carry that becomes late in one iteration is late from the start of the next.
        carried = slice(consts, consts + carry)
        while any(o and not i for o, i in zip(outs[:carry], operands[carried], strict=True)):
            pairs = zip(outs[:carry], operands[carried], strict=True)
            operands[carried] = [o or i for o, i in pairs]
            silenced, outs = _without(jaxpr, operands, False, is_fired)
    return silenced
