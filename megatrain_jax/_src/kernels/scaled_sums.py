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

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.float8 import is_float8_product

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
        leaves = [*traced.consts, *jax.tree.leaves(args)]
        values = dict(zip(traced.jaxpr.invars, leaves, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if jx.is_literal(atom) else values[atom]

        for eqn in traced.jaxpr.eqns:
            if (one := scaled.get(id(eqn))) is not None:
                scales = one.first.invars[1], one.second.invars[1]
                rows = zip(one.product.invars, scales, strict=True)
                # Powers of two and codes are exact in fp32, and so are their products.
                ins = [value(c).astype(jnp.float32) * value(s).astype(jnp.float32) for c, s in rows]
                params = {**one.product.params, "preferred_element_type": jnp.dtype(jnp.float32)}
                results = jx.bind(one.product.replace(params=params), ins)
            elif id(eqn) in left_out:
                continue
            else:
                results = jx.bind(eqn, [value(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        results = [value(atom) for atom in traced.jaxpr.outvars]
        return jax.tree.unflatten(traced.out_tree, results)

    return run


def _scaled_products(jaxpr: Any) -> list[_ScaledProduct]:
    """The float8 products of a jaxpr in bfloat16 that are scaled and added to an fp32 sum."""
    readers: dict[Any, Any] = {}
    atoms = [*(a for eqn in jaxpr.eqns for a in eqn.invars), *jaxpr.outvars]
    num_readers = Counter(jx.variables(atoms))
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
