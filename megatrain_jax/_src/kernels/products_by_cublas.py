"""Kernels whose matrix products XLA should not also try in Triton.

XLA finds the fastest code of a product by running it: by cuBLAS, and by some dozens of Triton
functions that it compiles first. In profiles of steps in bfloat16 on an H100, cuBLAS computed all
products of a 14B model and 96% of a 7B model's, by time. Triton's functions took most of the
seconds of compilation.

Example: a block of 8 x 1,024 tokens, of width 5,120::

    bf16[8192,5120] @ bf16[5120,13824]      large: by cuBLAS
    bf16[8192,5120] @ bf16[5120,16]         small, as LoRA's: XLA tries both for the whole kernel
"""

import math
from collections.abc import Iterator
from typing import Any

from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.primitives import PRODUCTS

NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
"""XLA's option by which only cuBLAS computes products."""

# The fewest rows, columns and summands of a product that is known to be faster by cuBLAS. Smaller
# ones take little time, and may be faster together with the operations around them.
_LARGE = 256
_WIDEST_BYTES = 2


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
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (v.aval for v in eqn.invars)
    if batch or max(left.dtype.itemsize, right.dtype.itemsize) > _WIDEST_BYTES:
        return False
    summands = math.prod(left.shape[axis] for axis in contracted)
    return min(summands, left.size // summands, right.size // summands) >= _LARGE
