"""Finds loops that slice a stacked array by their iteration number.

`for i in range(n): x = layer(x, w[i])` in a `scan` or a `fori_loop` passes all of `w` to the body
as a constant, and the body slices it by a counter.

Example: the body of that loop with `w` of shape (3, 4, 4), and `i` and `x` carried::

    j = add i 1                          # i starts at a constant and depends on itself: a counter
    h = select_n (i < 0) i (i + 3)       # made from a counter and constants: a counter
    s = dynamic_slice[sizes=(1, 4, 4)] w h 0 0    # one position of axis 0, by a counter: found
    y = tanh (dot x s)                   # a float: unknown

If `i` depended on `x`, the first walk would show that, and the second walk would treat `h` as
unknown.
"""

from collections.abc import Sequence
from typing import Any

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers import known
from megatrain_jax._src.engine.program.primitives import LAYOUT, is_elementwise

# Levels of knowledge of a value: unknown, constant, or computed from a counter.
_UNKNOWN, _CONSTANT, _COUNTER = range(3)


def reads_by_counter(eqn: Any, stacked: Sequence[bool], integers: Sequence[bool]) -> bool:
    """Whether a loop slices one of the marked operands by a counter.

    Args:
        eqn: A `scan` or `while` equation.
        stacked: Mask of the operands to look for.
        integers: Whether each of its operands is a known integer.
    """
    if not any(stacked):
        return False
    levels = [_CONSTANT if k else _UNKNOWN for k in integers]
    return _Search().loop(eqn, list(stacked), levels)


class _Search:
    """Searches a loop's body, following stacked values and counters through its equations."""

    def __init__(self):
        self.found = False

    def loop(self, eqn, stacked, levels) -> bool:
        """Whether a loop slices a stacked operand by a counter; see `reads_by_counter`."""
        if eqn.primitive.name == "while":
            # Operands of a `while`: constants of its condition, constants of its body, then the
            # carry.
            skipped, count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            stacked, levels = stacked[skipped:], levels[skipped:]
            carry = len(stacked) - count
        else:
            count, carry = jx.scan_parts(eqn)
        counters = [_COUNTER if level and k >= count else level for k, level in enumerate(levels)]
        # A carried number is a counter if it depends only on itself and constants. At first, each
        # carried number with a known start is assumed to be a counter; each walk removes the wrong
        # ones, so this ends.
        while True:
            given = self._follow(jx.loop_body(eqn).jaxpr, stacked, counters)
            lost = [k for k, level in enumerate(given[:carry], count) if counters[k] and not level]
            if not lost:
                return self.found
            # The finding may have relied on numbers that turned out not to be counters.
            self.found = False
            for k in lost:
                counters[k] = _UNKNOWN

    def _follow(self, jaxpr, stacked, levels) -> list[int]:
        """Walks a body and notes slices by a counter; returns the level of each result."""
        level: dict[Any, int] = dict(zip(jaxpr.invars, levels, strict=True))
        level.update((v, _UNKNOWN) for v in jaxpr.constvars)
        whole = {v for v, s in zip(jaxpr.invars, stacked, strict=True) if s}

        def of(atom):
            return _CONSTANT if jx.is_literal(atom) else level.get(atom, _UNKNOWN)

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            ins = [of(a) for a in eqn.invars]
            flags = [not jx.is_literal(a) and a in whole for a in eqn.invars]
            if inner := jx.called(eqn):
                results = self._follow(inner.jaxpr, flags, ins)
                level.update(zip(eqn.outvars, results, strict=True))
            elif name in ("scan", "while") and any(flags):
                self.found |= _Search().loop(eqn, flags, ins)
            elif all(ins) and all(known.is_index(v.aval) for v in eqn.outvars):
                level.update((v, max(ins, default=_CONSTANT)) for v in eqn.outvars)
            if name in ("dynamic_slice", "gather") and flags[0]:
                self.found |= all(ins[1:]) and _COUNTER in ins[1:] and _takes_one(eqn)
            elif any(flags) and (name in LAYOUT or is_elementwise(eqn)):
                whole.update(eqn.outvars)
        return [of(a) for a in jaxpr.outvars]


def _takes_one(eqn) -> bool:
    """Whether a slice takes a single position of some axis."""
    sizes, shape = eqn.params["slice_sizes"], eqn.invars[0].aval.shape
    return any(size == 1 < n for size, n in zip(sizes, shape, strict=True))
