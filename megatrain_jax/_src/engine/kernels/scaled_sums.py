"""Gradients of float8 products, added to fp32 sums by the products themselves, on a GPU.

A gradient is a product of codes in bfloat16, times both scales. XLA writes the product to memory,
and a second kernel reads it, scales it and adds it to the sum. If the scales come before the
product instead, XLA gives them to cuBLASLt, with the sum to add to. Then the gradient is not
rounded to bfloat16 before. The codes are never expanded in memory.

Example, with codes c and d, and their scales::

    t = dot c d               # bfloat16
    u = mul (mul t s_c) s_d
    sum + float32 u
    # becomes
    sum + dot (c * s_c) (d * s_d)    # float32
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.float8 import is_float8_product

_REORDERING = ("reshape", "transpose")


class _ScaledProduct(NamedTuple):
    """A product of codes, and the two equations that scale its result."""

    product: Any
    first: Any
    second: Any


def with_scaled_sums(function: Callable) -> Callable:
    """A function with its float8 products scaled before they are computed, if they enter fp32 sums.

    Args:
        function: The function, of trees of arrays.
    """

    def run(*args: Any) -> Any:
        traced = jx.trace(function, *args)
        found = _scaled_products(traced.jaxpr)
        if not found or traced.jaxpr.effects:
            return function(*args)
        left_out = {id(eqn) for one in found for eqn in (one.product, one.first)}
        scaled = {id(one.second): one for one in found}

        def compute(_: int, eqn: Any, value: Callable[[Any], Any]) -> list[Any] | None:
            if id(eqn) in left_out:
                return None
            if (one := scaled.get(id(eqn))) is None:
                return jx.bind(eqn, [value(atom) for atom in eqn.invars])
            scales = one.first.invars[1], one.second.invars[1]
            rows = zip(one.product.invars, scales, strict=True)
            # Powers of two and codes are exact in fp32, and so are their products.
            ins = [value(c).astype(jnp.float32) * value(s).astype(jnp.float32) for c, s in rows]
            params = {**one.product.params, "preferred_element_type": jnp.dtype(jnp.float32)}
            return jx.bind(one.product.replace(params=params), ins)

        return traced.outputs(args, lambda jaxpr, ins: jx.evaluate_by(jaxpr, ins, compute))

    return run


def _scaled_products(jaxpr: Any) -> list[_ScaledProduct]:
    """The float8 products of a jaxpr in bfloat16 that are scaled and added to an fp32 sum."""
    readers: dict[Any, Any] = {}
    num_readers = jx.num_readers(jaxpr)
    for eqn in jaxpr.eqns:
        readers.update(dict.fromkeys(jx.variables(eqn.invars), eqn))

    def only_reader(eqn: Any) -> Any:
        (v,) = eqn.outvars
        return readers.get(v) if num_readers[v] == 1 else None

    def is_scaling(eqn: Any, of: Any) -> bool:
        if eqn is None or eqn.primitive.name != "mul":
            return False
        return eqn.invars[0] is of.outvars[0] and not eqn.invars[1].aval.shape

    found = []
    for product in filter(is_float8_product, jaxpr.eqns):
        if not is_scaling(first := only_reader(product), product):
            continue
        if not is_scaling(second := only_reader(first), first):
            continue
        last = only_reader(second)
        while last is not None and last.primitive.name in _REORDERING:
            last = only_reader(last)
        if last is None or last.primitive.name != "convert_element_type":
            continue
        adds = only_reader(last)
        is_wide = last.outvars[0].aval.dtype == jnp.dtype(jnp.float32)
        if is_wide and adds is not None and adds.primitive.name == "add":
            found.append(_ScaledProduct(product, first, second))
    return found
