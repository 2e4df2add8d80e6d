"""Attention on more elements than cuDNN counts; see `program/wide_attention.py`.

After tracing, since the gradient of attention is an equation only then. Its key stays, as the same
is computed: the forward of a block of 1,048,576 tokens in 28 heads, for example, calls cuDNN twice.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from megatrain_jax._src.kernels.kernel import Kernel
from megatrain_jax._src.program import jaxpr as jx
from megatrain_jax._src.program.wide_attention import in_pieces


def with_narrow_attention(kernel: Kernel, num_devices: int) -> Kernel:
    """The kernel with attention in as many pieces of its heads as cuDNN needs.

    Args:
        kernel: A kernel of a stage with wide attention.
        num_devices: Number of devices that divide its rows.
    """

    def build() -> Callable[..., Any]:
        function = kernel.build()

        def divided(*args: Any) -> Any:
            traced = jx.trace(function, *args)
            return traced.outputs(args, lambda jaxpr, ins: in_pieces(jaxpr, (), ins, num_devices))

        return divided

    return dataclasses.replace(kernel, build=build)
