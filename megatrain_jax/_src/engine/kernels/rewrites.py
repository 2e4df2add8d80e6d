"""Rewrites of traced functions that XLA compiles to slower code.

Gradients of looked-up rows are added to the same rows of a sum, not to the whole sum.

The gradient of an embedding's table is zero except for the rows that a microbatch looks up. If it
is computed as an array of its own, a GPU writes zeros and adds the rows to them. It then reads this
array and the whole sum, and writes the sum.

Example: a table of 152,064 rows of 3,584 numbers, of which 8,192 tokens look up one row each::

    z = broadcast_in_dim 0           # bfloat16: 1.1 GB
    g = scatter-add z ids rows
    sum + convert_element_type g     # float32: 5.5 GB

    scatter-add sum ids rows         # in float32: 0.3 GB

On a GPU, float8 products themselves add gradients to fp32 sums.

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

XLA should compute large matrix products by cuBLAS, without trying Triton.

XLA finds the fastest code of a product by running it: by cuBLAS, and by some dozens of Triton
functions that it compiles first. In profiles of steps in bfloat16 on an H100, cuBLAS computed all
products of a 14B model and 96% of a 7B model's, by time. Triton's functions took most of the
seconds of compilation. Float8 products are also fastest by cuBLAS, and XLA would time Triton's
functions for 20 s per product. But attention in plain operations is faster by Triton, which masks
and transposes scores while it multiplies them.

Example: a block of 8 x 1,024 tokens, of width 5,120::

    bf16[8192,5120] @ bf16[5120,13824]      large: by cuBLAS
    bf16[8192,5120] @ bf16[5120,16]         small, as LoRA's: XLA tries both for the whole kernel
    f8[8192,5120] @ f8[5120,13824]          in the same kernel: by cuBLAS
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.float8 import CODE, is_float8_product
from megatrain_jax._src.engine.program.primitives import PRODUCTS

# A result's elements in another shape or dtype.
_SAME_ELEMENTS = ("reshape", "convert_element_type")


def with_scattered_sums(function: Callable) -> Callable:
    """A function that scatters rows directly into the arguments that they are added to.

    Args:
        function: The function, of trees of arrays, without effects.
    """

    def evaluate(jaxpr: Any, ins: Sequence[Any]) -> list[Any]:
        scattered, left_out = _scattered(jaxpr)

        def compute(number: int, eqn: Any, value: Callable[[Any], Any]) -> list[Any] | None:
            if number in scattered:
                added_to, scatter = scattered[number]
                return [_onto(value(added_to), scatter, *map(value, scatter.invars[1:]))]
            if number in left_out:
                return None
            return jx.bind(eqn, [value(atom) for atom in eqn.invars])

        return jx.evaluate_by(jaxpr, ins, compute)

    return jx.rewritten(function, evaluate)


def looks_up_inputs(jaxpr: Any) -> bool:
    """Whether an open jaxpr looks up rows of one of its inputs, in any shape and dtype."""
    tables = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "gather" and eqn.invars[0] in tables:
            return True
        if eqn.primitive.name in _SAME_ELEMENTS and eqn.invars[0] in tables:
            tables.update(eqn.outvars)
    return False


def _scattered(jaxpr: Any) -> tuple[dict[int, tuple[Any, Any]], set[int]]:
    """The additions of scattered rows to inputs, and the equations that are left out for them.

    Returns:
        For each addition, by its number, the input and the equation that scatters the rows; and the
        numbers of these equations and of all between them and the additions.
    """
    producer = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    num_readers = jx.num_readers(jaxpr)
    found, left_out, inputs = {}, set(), set(jaxpr.invars)
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name not in ("add", "add_any"):
            continue
        for v, added_to in (eqn.invars, eqn.invars[::-1]):
            if jx.is_literal(added_to) or jx.is_literal(v) or added_to not in inputs:
                continue
            chain = []
            while (at := producer.get(v)) is not None and num_readers[v] == 1:
                chain.append(at)
                if jaxpr.eqns[at].primitive.name not in _SAME_ELEMENTS:
                    break
                v = jaxpr.eqns[at].invars[0]
            scatter = jaxpr.eqns[chain[-1]] if chain else eqn
            if scatter.primitive.name == "scatter-add" and _is_zero(jaxpr, producer, scatter):
                found[number] = added_to, scatter
                left_out.update(chain)
                break
    return found, left_out


def _is_zero(jaxpr: Any, producer: dict[Any, int], scatter: Any) -> bool:
    """Whether the operand of a scatter consists of zeros."""
    at = producer.get(scatter.invars[0])
    if at is None or jaxpr.eqns[at].primitive.name != "broadcast_in_dim":
        return False
    (number, *_) = jaxpr.eqns[at].invars
    return jx.is_literal(number) and number.val == 0


def _onto(added_to: jax.Array, scatter: Any, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The sum of an array, in any shape, and the result of a scatter onto zeros."""
    params = scatter.params
    found = jax.lax.scatter_add(
        added_to.reshape(scatter.outvars[0].aval.shape),
        indices,
        rows.astype(added_to.dtype),
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
    return found.reshape(added_to.shape)


# ---- sums of scaled float8 products

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


# ---- products by cuBLAS

NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
"""XLA's option by which only cuBLAS computes products."""

# The fewest rows, columns and summands of a product that is known to be faster by cuBLAS. Smaller
# ones take little time, and may be faster together with the operations around them.
_LARGE = 256
_WIDEST_BYTES = 2
# XLA has no function of Triton for this algorithm. cuBLAS uses it anyway.
_BY_CUBLAS = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM


def has_only_large_products(jaxpr: Any) -> bool:
    """Whether an open jaxpr has products, and all of them are large ones of narrow numbers."""
    sizes = list(_are_large(jaxpr))
    return bool(sizes) and all(sizes)


def _are_large(jaxpr: Any) -> Iterator[bool]:
    """Whether each product of an open jaxpr is large, in order."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in PRODUCTS:
            yield name == "dot_general" and _is_large(eqn)
        # The products inside a kernel of Pallas are not XLA's.
        elif name != "pallas_call":
            for inner in jx.inner_jaxprs(eqn):
                yield from _are_large(inner)


def _is_large(eqn: Any) -> bool:
    """Whether a `dot_general` is one large product of narrow numbers."""
    _, (batch, _) = eqn.params["dimension_numbers"]
    if batch or max(v.aval.dtype.itemsize for v in eqn.invars) > _WIDEST_BYTES:
        return False
    return min(_sizes(eqn)) >= _LARGE


def _sizes(eqn: Any) -> tuple[int, int, int]:
    """The rows, columns and summands of a `dot_general`, in each of its batches."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (v.aval for v in eqn.invars)
    summands, batches = (math.prod(left.shape[a] for a in axes) for axes in (contracted, batch))
    own = summands * batches
    return left.size // own, right.size // own, summands


@functools.cache
def compiles_float8_by_cublas(device: Any) -> bool:
    """Whether JAX compiles `with_float8_by_cublas` for a device; JAX 0.12.0 does not."""
    if device is None:
        return False
    shape = jax.ShapeDtypeStruct((16, 16), CODE, sharding=jax.sharding.SingleDeviceSharding(device))
    product = functools.partial(jax.lax.dot, precision=_BY_CUBLAS)
    try:
        jax.jit(product).lower(shape, shape).compile()
    except (RuntimeError, ValueError):
        return False
    return True


def with_float8_by_cublas(function: Callable) -> Callable:
    """A function for a GPU with its float8 products computed by cuBLAS alone.

    Args:
        function: The function, of trees of arrays.
    """
    return jx.rewritten(function, lambda jaxpr, ins: jx.evaluate(_with_algorithm(jaxpr), ins))


def _with_algorithm(jaxpr: Any) -> Any:
    """An open jaxpr with the algorithm of cuBLAS in its float8 products."""

    def changed(eqn: Any) -> Any:
        # XLA computes products with a vector as sums, which have no algorithm.
        if is_float8_product(eqn) and min(_sizes(eqn)[:2]) > 1:
            return eqn.replace(params={**eqn.params, "precision": _BY_CUBLAS})
        if any(jx.contains(e, is_float8_product) for j in jx.inner_jaxprs(eqn) for e in j.eqns):
            return jx.with_bodies(eqn, lambda _, body: _with_algorithm(body))
        return eqn

    return jaxpr.replace(eqns=[changed(eqn) for eqn in jaxpr.eqns])
