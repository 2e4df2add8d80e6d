"""An estimate of a function's temporary memory, from its equations.

Where it can't be compiled for the device that it is to run on, this stands in for the compiler's
own figure.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

from megatrain_jax._src.kernels.division import (
    Axes,
    divided_axes,
    divided_within,
    gathered_operands,
    makes_whole,
)
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.primitives import CALLS, FREE, FUSED, FUSING

_ADDITIONS = ("add", "add_any")


def temporary_bytes(jaxpr: Any, axes: Axes | None = None, num_devices: int = 1) -> int:
    """Estimates the bytes that a jaxpr's own values take at most at one time.

    Its equations are gone through in order. A value takes its bytes from the equation that makes
    it to the last one that reads it; arguments and results count nothing, since they belong to the
    caller. While an equation runs that has jaxprs within, the largest of their own needs counts.
    A compiler makes no array of an elementwise result that one elementwise equation or reduction
    reads, nor of what only renames, converts or repeats one for such: what these are made from
    stays instead. What is elementwise from there up to the results is one pass that writes these
    alone, as the update of a slab. A product that is only added to something is written where the
    sum will be. What a loop carries stays in one place, and so does an array of which a part is
    replaced.

    A worked example, with arrays of 4 bytes::

        a = dot x y      # a: 4
        b = sin a        # one elementwise equation reads b: a stays
        c = mul b a      # a, c: 8, the most; then a is free
        d = dot c c      # d is the result

    Args:
        jaxpr: A jaxpr, open or closed.
        axes: By input that devices divide, the axis along which they do.
        num_devices: Number of devices; the bytes are of each.
    """
    jaxpr = jx.opened(jaxpr)
    axes = divided_axes(jaxpr, axes or {})

    # A gathered array is cut into leaves, which lie in arrays of their own: both count.
    twice = {eqn.outvars[0] for eqn in jaxpr.eqns if makes_whole(eqn)}

    def size(v: Any) -> int:
        num_bytes = jx.num_bytes(v.aval) // (num_devices if v in axes else 1)
        return 2 * num_bytes if v in twice else num_bytes

    results = set(jx.variables(jaxpr.outvars))
    readers: dict[Any, list[bool]] = {}  # whether each can be one with what makes the value
    added: set[Any] = set()  # the values that an addition reads
    for eqn in jaxpr.eqns:
        for v in dict.fromkeys(jx.variables(eqn.invars)):
            readers.setdefault(v, []).append(_is_fused(eqn, FUSING))
            if eqn.primitive.name in _ADDITIONS:
                added.add(v)
    passed = _passed(jaxpr)
    # The arrays of the function's own that each value is read from.
    roots: dict[Any, frozenset[Any]] = {}
    for eqn in jaxpr.eqns:
        behind = frozenset().union(*(roots.get(v, ()) for v in jx.variables(eqn.invars)))
        changed = _changed(eqn)
        if eqn.primitive.name == "optimization_barrier":  # its results are its operands
            given = (frozenset() if jx.is_literal(a) else roots.get(a, ()) for a in eqn.invars)
            roots.update((v, frozenset(a)) for v, a in zip(eqn.outvars, given, strict=True))
            continue
        for v in eqn.outvars:
            read = readers.get(v, [])
            once = eqn.primitive.name in FREE or (_is_fused(eqn, FUSED) and len(read) == 1)
            summed = eqn.primitive.name == "dot_general" and len(read) == 1 and v in added
            fused = summed or v in passed or once and (_renames(eqn) or all(read))
            # Such results are written where they started, if nothing else reads the start.
            start = changed.get(v)
            if start in roots and len(readers[start]) == 1 and v not in results:
                roots[v] = roots[start]
            else:
                roots[v] = behind if fused else frozenset() if v in results else frozenset((v,))
    # An array is free after the last equation that reads it, under whichever value's name.
    uses = Counter(r for e in jaxpr.eqns for v in jx.variables(e.invars) for r in roots.get(v, ()))
    # An equation reads its operands while it writes its results, so both count in `most`.
    live = most = 0
    for eqn in jaxpr.eqns:
        made = [v for v in eqn.outvars if v in roots[v]]
        live += sum(map(size, made))
        inner = divided_within(eqn, axes)
        within = max((temporary_bytes(*body, num_devices) for body in inner), default=0)
        within += sum(jx.num_bytes(v.aval) for v in gathered_operands(eqn, axes))
        most = max(most, live + within)
        dead = {v for v in made if not uses[v]}
        for v in jx.variables(eqn.invars):
            for root in roots.get(v, ()):
                uses[root] -= 1
                if not uses[root]:
                    dead.add(root)
        live -= sum(map(size, dead))
    return most


def _passed(jaxpr: Any) -> set[Any]:
    """The elementwise values from which all that is computed is elementwise, up to the results."""
    mixed: set[Any] = set()  # an equation that is not elementwise depends on these
    passed: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        if _is_fused(eqn, FUSED) and mixed.isdisjoint(eqn.outvars):
            passed.update(eqn.outvars)
        else:
            mixed.update(jx.variables(eqn.invars))
    return passed


def _is_fused(eqn: Any, names: Collection[str]) -> bool:
    """Whether an equation has one of these names, or calls such equations alone (`jnp.where`)."""
    if eqn.primitive.name in CALLS:
        return all(_is_fused(e, names) for jaxpr in jx.inner_jaxprs(eqn) for e in jaxpr.eqns)
    return eqn.primitive.name in names


def _changed(eqn: Any) -> dict[Any, Any]:
    """The results that are changed operands, as a loop's carry is, with these operands."""
    if eqn.primitive.name == "dynamic_update_slice":
        return {} if jx.is_literal(eqn.invars[0]) else {eqn.outvars[0]: eqn.invars[0]}
    # The operands of either are constants, then the carry, then, of a scan, the arrays it takes
    # row by row; its first results are the carry again.
    if eqn.primitive.name not in ("scan", "while"):
        return {}
    if eqn.primitive.name == "scan":
        first, count = jx.scan_parts(eqn)
    else:
        first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        count = len(eqn.invars) - first
    pairs = zip(eqn.outvars[:count], eqn.invars[first : first + count], strict=True)
    return {v: start for v, start in pairs if not jx.is_literal(start)}


def _renames(eqn: Any) -> bool:
    """Whether a result is the bytes of its operand: no product needs an array of its own for it."""
    return eqn.primitive.name in FREE and eqn.primitive.name not in (
        "convert_element_type",
        "broadcast_in_dim",
        "iota",
    )
