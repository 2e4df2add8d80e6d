"""Lookup tables among a model's parameters: what is gathered from by position, as embeddings are.

Of `take(e.astype(bfloat16), tokens, axis=0) @ w`, `e` is one and `w` is none.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.loss.stages import Stage

# What leaves a table a table.
_KEPT = frozenset("convert_element_type copy mul optimization_barrier reshape transpose".split())


def lookup_tables(stages: Iterable[Stage]) -> frozenset[int]:
    """The numbers of the leaves that some stage gathers from."""
    found: set[int] = set()
    for stage in stages:
        first = len(stage.consts)
        leaves = [{i} for i in stage.leaves]
        rest = len(stage.jaxpr.invars) - first - len(leaves)
        _walk(stage.jaxpr, [*[set()] * first, *leaves, *[set()] * rest], found)
    return frozenset(found)


def _walk(jaxpr: Any, given: Sequence[Iterable[int]], found: set[int]) -> list[set[int]]:
    """Adds what is gathered from to `found`; gives the leaves that each output is a form of."""
    forms = {v: set(row) for v, row in zip(jaxpr.invars, given, strict=True)}

    def form(atom: Any) -> set[int]:
        return set() if jx.is_literal(atom) else forms.get(atom, set())

    for eqn in jaxpr.eqns:
        operands = [form(a) for a in eqn.invars]
        inner = jx.called(eqn)
        if inner is not None:
            forms.update(zip(eqn.outvars, _walk(inner, operands, found), strict=True))
        elif eqn.primitive.name == "gather":
            found |= operands[0]
        elif eqn.primitive.name in _KEPT:
            forms.update(dict.fromkeys(eqn.outvars, set().union(*operands)))
    return [form(a) for a in jaxpr.outvars]
