"""The products of adapters in a stage (LoRA), found by their equations and not by names.

An adapter adds a product with two trained factors to the product with a frozen matrix. The size
between the factors, the rank, is smaller than both of the outer sizes.

Example: a frozen matrix w of 4096 x 4096, and factors of rank 16::

    y = dot x w
    a = dot x A             # A is trained, 4096 x 16
    b = dot a B             # B is trained, 16 x 4096
    z = add y (mul b 2.0)   # so a and b are products of an adapter
"""

from collections.abc import Iterable, Mapping
from typing import Any

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss.operand_traits import (
    OperandTraits,
    traits_of,
    weight_sizes,
)
from megatrain_jax._src.engine.program.primitives import ELEMENTWISE, LAYOUT

Numbers = frozenset[int]
"""Numbers of equations."""

_NOTHING: Numbers = frozenset()
_ADDING = frozenset(("add", "add_any", "sub"))
_SCALING = frozenset(("mul", "div"))
_KEEPING = LAYOUT | {"convert_element_type", "neg"}


def adapter_products(jaxpr: Any, env: Mapping[Any, OperandTraits]) -> Numbers:
    """The numbers of the equations of an open jaxpr that are products with an adapter's factors.

    Args:
        jaxpr: The jaxpr.
        env: Traits of its variables.
    """
    found, frozen = _NOTHING, set()
    sizes: dict[int, tuple[int, int]] = {}  # of the matrices of trained products
    firsts: dict[int, Numbers] = {}  # by product: possible first products of its adapter
    terms: dict[Any, Numbers] = {}  # by variable: the products in its sum
    sources: dict[Any, Numbers] = {}  # by variable: the trained products before it
    for number, eqn in enumerate(jaxpr.eqns):
        ins, name = traits_of(env, eqn.invars), eqn.primitive.name
        summed = source = _NOTHING
        if (side := _weight_side(eqn, ins)) is not None:
            summed = frozenset((number,))
            if ins[side].is_perturbed:
                rank, outputs = sizes[number] = weight_sizes(eqn, side)
                before = _joined(sources, eqn.invars)
                firsts[number] = frozenset(n for n in before if sizes[n][0] > rank < outputs)
                source = summed
            else:
                frozen.add(number)
        elif name in ELEMENTWISE | LAYOUT:
            source = _joined(sources, eqn.invars)
            is_scaled = name in _SCALING and sum(t.of_batch for t in ins) == 1
            if name in _ADDING | _KEEPING or is_scaled:
                summed = _joined(terms, eqn.invars)
            if name in _ADDING and not frozen.isdisjoint(summed):
                seconds = [n for n in summed if firsts.get(n)]
                found = found.union(seconds, *(firsts[n] for n in seconds))
        for v in eqn.outvars:
            terms[v], sources[v] = summed, source
    return found


def _weight_side(eqn: Any, ins: list[OperandTraits]) -> int | None:
    """The side of a product with its parameter; None for equations without a parameter."""
    if eqn.primitive.name != "dot_general":
        return None
    sides = [side for side, t in enumerate(ins) if t.is_weight]
    return sides[0] if len(sides) == 1 and ins[1 - sides[0]].of_batch else None


def _joined(known: Mapping[Any, Numbers], atoms: Iterable[Any]) -> Numbers:
    """The numbers of all operands together."""
    return _NOTHING.union(*(known.get(v, _NOTHING) for v in jx.variables(atoms)))
