"""Primitives that a GPU computes by a library's kernels, and JAX's operations elsewhere.

As a primitive, a function is one equation of a trace, so a loss can be cut without looking into the
kernels. Only the compilation for a GPU imports the library. A kernel's costs are defined with its
primitive, and plans look them up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


@dataclass(frozen=True, kw_only=True)
class KernelCosts:
    """A kernel's purpose, operations and memory, from the equation that calls it.

    Attributes:
        purpose: The computation, as plans name it.
        flops: Counts its floating-point operations.
        workspace: Counts the bytes that it needs beside operands and results.
        reads_weights: Whether operands are parameters, of which XLA hands a kernel copies unless
            they are arrays of their own.
    """

    purpose: str
    flops: Callable[[Any], int]
    workspace: Callable[[Any], int] = lambda eqn: 0
    reads_weights: bool = False


_COSTS: dict[str, KernelCosts] = {}


def kernel_costs(eqn: Any) -> KernelCosts | None:
    """Returns the costs of an equation's kernel, None if it is none of those defined here."""
    return _COSTS.get(eqn.primitive.name)


def define(
    name: str,
    shapes: Callable[..., Any],
    on_gpu: Callable[..., Any],
    elsewhere: Callable[..., Any],
    costs: KernelCosts,
    *,
    several: bool = False,
) -> Primitive:
    """Defines a primitive without a derivative.

    Args:
        name: Its name in a jaxpr.
        shapes: Maps abstract operands to abstract results.
        on_gpu: Computes the results on an NVIDIA GPU.
        elsewhere: Computes the results on all remaining devices.
        costs: The costs of the kernel on the GPU.
        several: Whether the results are a list.
    """
    _COSTS[name] = costs
    primitive = Primitive(name)
    primitive.multiple_results = several
    primitive.def_abstract_eval(shapes)
    primitive.def_impl(lambda *args, **params: jax.jit(partial(primitive.bind, **params))(*args))
    for platform, compute in (("cuda", on_gpu), (None, elsewhere)):
        mlir.register_lowering(
            primitive, mlir.lower_fun(compute, multiple_results=several), platform
        )

    def mapped(args, axes, **params):
        """Computes the elements of the mapped axis one by one."""
        size = next(a.shape[axis] for a, axis in zip(args, axes, strict=True) if axis is not None)
        whole = tuple(
            jnp.broadcast_to(a, (size, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
            for a, axis in zip(args, axes, strict=True)
        )
        out = jax.lax.map(lambda one: primitive.bind(*one, **params), whole)
        return out, [0] * len(out) if several else 0

    batching.primitive_batchers[primitive] = mapped
    return primitive


def float0_cotangents(integers: Any) -> Any:
    """The cotangents of a tree of integer arrays, as a `jax.custom_vjp` has to return them."""
    return jax.tree.map(lambda i: np.zeros(i.shape, jax.dtypes.float0), integers)
