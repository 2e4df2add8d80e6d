"""Matrix products that XLA should compute by cuBLAS, without trying Triton.

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
from collections.abc import Callable, Iterator
from typing import Any

import jax

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.float8 import CODE, is_float8_product
from megatrain_jax._src.engine.program.primitives import PRODUCTS

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

    def run(*args: Any) -> Any:
        traced = jx.trace(function, *args)
        return traced.outputs(args, lambda jaxpr, ins: jx.evaluate(_with_algorithm(jaxpr), ins))

    return run


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
