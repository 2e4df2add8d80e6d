"""Matrix products that give fp32, because their results are added to fp32 sums.

A gradient of weights is a product. If its result is bfloat16, a GPU writes it to memory, and reads
it again to add it to the sum. A product in fp32 adds to the sum while it computes: the gradient is
never in memory, and is not rounded before it is added.

Example: the gradient of `w` in `y = x @ w`, with bfloat16 arrays::

    t = dot_general dy x        # bfloat16; with fp32 asked for: float32
    dw = transpose t            # likewise
    sum + dw
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.primitives import REMAT

_WIDE = jnp.dtype("float32")
# Primitives that only reorder elements, so that their result has the dtype of their operand.
_REORDERING = ("reshape", "transpose")


def with_fp32_products(
    function: Callable, are_wide: Sequence[bool], *, casts_operands: bool = False
) -> Callable:
    """A function with some of its results in fp32, if they come from narrower products.

    Args:
        function: The function, of trees of arrays, without effects.
        are_wide: For each array that it returns, whether it should be in fp32 if possible.
        casts_operands: Whether operands are cast to fp32 first, because the platform has no
            products of narrow numbers that give fp32. The results are the same.
    """

    def run(*args: Any) -> Any:
        traced = jx.trace(function, *args)
        wide = [*are_wide, *[False] * (len(traced.jaxpr.outvars) - len(are_wide))]
        return traced.outputs(args, lambda jaxpr, ins: _evaluate(jaxpr, ins, wide, casts_operands))

    return run


def _evaluate(
    jaxpr: Any, args: Sequence[Any], are_wide: Sequence[bool], casts_operands: bool
) -> list[Any]:
    """Evaluates an open jaxpr, with the flagged results in fp32 where `with_fp32_products` can."""
    sources = _sources(jaxpr, are_wide)

    def compute(_: int, eqn: Any, value: Callable[[Any], Any]) -> list[Any]:
        ins = [value(atom) for atom in eqn.invars]
        wide = [v in sources for v in eqn.outvars]
        if not any(wide):
            return jx.bind(eqn, ins)
        if (inner := jx.called(eqn)) is not None:
            return _evaluate(inner.jaxpr, [*inner.consts, *ins], wide, casts_operands)
        ins = [x.astype(_WIDE) for x in ins] if casts_operands else ins
        params = {**eqn.params, "preferred_element_type": _WIDE}
        return jx.bind(eqn.replace(params=params), ins)

    return jx.evaluate_by(jaxpr, args, compute)


def _sources(jaxpr: Any, are_wide: Sequence[bool]) -> set[Any]:
    """The variables that products, or calls, give in fp32 so that the flagged results are fp32."""
    producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    num_readers = jx.num_readers(jaxpr)
    found = set()
    for v, wide in zip(jaxpr.outvars, are_wide, strict=True):
        if not wide or jx.is_literal(v):
            continue
        # Other readers would get a different dtype than they expect.
        while (eqn := producer.get(v)) is not None and num_readers[v] == 1:
            if eqn.primitive.name in _REORDERING:
                v = eqn.invars[0]
                continue
            if _is_narrow_product(eqn) or is_open(eqn):
                found.add(v)
            break
    return found


def _is_narrow_product(eqn: Any) -> bool:
    dtype = eqn.outvars[0].aval.dtype
    is_narrow = dtype in (jnp.bfloat16, jnp.float16)
    return eqn.primitive.name == "dot_general" and is_narrow and _operands_have(eqn, dtype)


def _operands_have(eqn: Any, dtype: Any) -> bool:
    return all(atom.aval.dtype == dtype for atom in eqn.invars)


def is_open(eqn: Any) -> bool:
    """Whether a call's equations may be evaluated one by one."""
    # With `prevent_cse`, a compiler must not merge equations of a remat with equal ones outside.
    closed = eqn.primitive.name in REMAT and eqn.params.get("prevent_cse")
    return jx.called(eqn) is not None and not closed
