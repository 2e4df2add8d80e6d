"""Estimates a function's temporary memory from its equations.

The estimate replaces the compiler's figure if a function can't be compiled for its device.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

from megatrain_jax._src.engine.kernels.sharding_prediction import (
    ShardedAxes,
    gathered_operands,
    replicates,
    sharded_axes,
    sharded_axes_within,
)
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import CALLS, FREE, FUSED, FUSING

_ADDITIONS = ("add", "add_any")
_REORDERING = ("reshape", "transpose")
# Results that have their operand's bytes, so that a product can read the operand.
_RENAMING = FREE - {"convert_element_type", "broadcast_in_dim", "iota"}


def temporary_bytes(jaxpr: Any, axes: ShardedAxes | None = None, num_devices: int = 1) -> int:
    """Estimates the peak bytes of a jaxpr's intermediate values.

    The estimate goes through the equations in order. A value takes its bytes from the equation that
    makes it to the last one that reads it. Arguments and results don't count, because they belong
    to the caller. An equation with inner jaxprs adds the largest of their peaks.

    Rules imitate the compiler's fusion. An elementwise result gets no array if a single elementwise
    equation or reduction reads it, possibly after a reshape, conversion or broadcast; its operands
    stay alive instead. Equations that are elementwise all the way to the results form one pass,
    such as the update of a slab. A product that is only added to a value, possibly reshaped or
    transposed, is written into the sum. A loop's carry stays in one place, and so does an array
    that is partly overwritten.

    Example, with arrays of 4 bytes::

        a = dot x y      # a: 4
        b = sin a        # one elementwise equation reads b: a stays
        c = mul b a      # a, c: 8, the peak; then a is free
        d = dot c c      # d is the result

    Args:
        jaxpr: A jaxpr, open or closed.
        axes: For each input that devices divide, the divided axis.
        num_devices: Number of devices; the result is per device.
    """
    jaxpr = jx.opened(jaxpr)
    axes = sharded_axes(jaxpr, axes or {}, num_devices)

    # A gathered array is cut into leaves with their own arrays, so it counts twice.
    twice = {eqn.outvars[0] for eqn in jaxpr.eqns if replicates(eqn)}

    def size(v: Any) -> int:
        num_bytes = jx.num_bytes(v.aval) // (num_devices if v in axes else 1)
        return 2 * num_bytes if v in twice else num_bytes

    results = set(jx.variables(jaxpr.outvars))
    readers: dict[Any, list[bool]] = {}  # whether each reader can be fused with the producer
    for eqn in jaxpr.eqns:
        for v in dict.fromkeys(jx.variables(eqn.invars)):
            readers.setdefault(v, []).append(_is_fused(eqn, FUSING))
    passed, added = _passed(jaxpr), _added(jaxpr)
    # For each value, the allocated arrays that it is read from.
    roots: dict[Any, frozenset[Any]] = {}
    for eqn in jaxpr.eqns:
        behind = jx.union(roots, eqn.invars)
        changed = jx.overwritten(eqn, ("dynamic_update_slice",))
        if eqn.primitive.name == "optimization_barrier":  # its results are its operands
            given = (frozenset() if jx.is_literal(a) else roots.get(a, ()) for a in eqn.invars)
            roots.update((v, frozenset(a)) for v, a in zip(eqn.outvars, given, strict=True))
            continue
        for v in eqn.outvars:
            read = readers.get(v, [])
            once = eqn.primitive.name in FREE or (_is_fused(eqn, FUSED) and len(read) == 1)
            summed = eqn.primitive.name == "dot_general" and len(read) == 1 and v in added
            fused = summed or v in passed or once and (eqn.primitive.name in _RENAMING or all(read))
            # A changed operand is overwritten in place if it has no further reader.
            start = changed.get(v)
            if start in roots and len(readers[start]) == 1 and v not in results:
                roots[v] = roots[start]
            else:
                roots[v] = behind if fused else frozenset() if v in results else frozenset((v,))
    # An array is free after the last equation that reads it through any value.
    steps = []
    for eqn in jaxpr.eqns:
        inner = sharded_axes_within(eqn, axes, num_devices)
        within = max((temporary_bytes(*body, num_devices) for body in inner), default=0)
        within += sum(jx.num_bytes(v.aval) for v in gathered_operands(eqn, axes))
        made = [v for v in eqn.outvars if v in roots[v]]
        steps.append((made, jx.union(roots, eqn.invars), within))
    return jx.peak_bytes(steps, size)


def _passed(jaxpr: Any) -> set[Any]:
    """The elementwise values with only elementwise equations between them and the results."""
    mixed: set[Any] = set()  # an equation that is not elementwise depends on these
    passed: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        if _is_fused(eqn, FUSED) and mixed.isdisjoint(eqn.outvars):
            passed.update(eqn.outvars)
        else:
            mixed.update(jx.variables(eqn.invars))
    return passed


def _added(jaxpr: Any) -> set[Any]:
    """The values that an addition reads, possibly reshaped or transposed."""
    added: set[Any] = set()
    num_readers = Counter(v for eqn in jaxpr.eqns for v in jx.variables(eqn.invars))
    for eqn in reversed(jaxpr.eqns):
        only_added = all(v in added and num_readers[v] == 1 for v in eqn.outvars)
        is_reordered = eqn.primitive.name in _REORDERING and only_added
        if is_reordered or eqn.primitive.name in _ADDITIONS:
            added.update(jx.variables(eqn.invars))
    return added


def _is_fused(eqn: Any, names: Collection[str]) -> bool:
    """Whether an equation has one of these names, or only calls such equations (`jnp.where`)."""
    if inner := jx.called(eqn, CALLS):
        return all(_is_fused(e, names) for e in inner.jaxpr.eqns)
    return eqn.primitive.name in names
