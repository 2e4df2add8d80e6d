"""Kernels with more attention elements than cuDNN can index; see `program/rewriting.py`.

Attention is split after tracing, because only then is its gradient an equation. A kernel keeps its
key, because its results stay the same. Example: the forward of a block of 1,048,576 tokens with 28
heads calls cuDNN twice.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.rewriting import in_pieces


def with_split_attention(kernel: Kernel, num_devices: int) -> Kernel:
    """The kernel with attention computed for as few heads at a time as cuDNN needs.

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
