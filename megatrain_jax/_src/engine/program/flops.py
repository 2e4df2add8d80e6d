"""Counts the floating-point operations of a jaxpr from its equations.

The plan compares computation with transfers before anything is compiled, so the count cannot come
from a compiler. It needs only shapes, so it also works for models too large for this machine.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from megatrain_jax._src.common.kernel_primitives import kernel_costs
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.attention import KERNELS, attention_flops, is_attention
from megatrain_jax._src.engine.program.float8 import is_float8_product
from megatrain_jax._src.engine.program.primitives import (
    ARG_REDUCTIONS,
    ARITHMETIC,
    CUMULATIVE,
    PRODUCTS,
    REDUCTIONS,
)

_COUNTED_BY_OPERAND = REDUCTIONS | ARG_REDUCTIONS | CUMULATIVE


def count_flops(jaxpr: Any, counts: Callable[[Any], bool] = lambda eqn: True) -> int:
    """Counts the floating-point operations that one evaluation of a jaxpr performs.

    A multiplication and an addition are two operations. Matrix products and convolutions count in
    full, elementwise operations one per output element, reductions and running sums one per input
    element, and an FFT of length `n` 5·n·log2(n). Moving, comparing, converting and integer
    arithmetic count nothing. Inner jaxprs count where they are called: a `scan` body times its
    length, the most expensive branch of a `cond`, and the body and condition of a `while` *once*,
    because its trip count is unknown; the result is then a lower bound. It is one for dense
    factorisations too, because they count nothing. Attention kernels count by formula
    (`attention_flops`: a causal mask halves it, packed documents count as one). A Pallas kernel
    counts its `cost_estimate`, or else its body at each point of its grid. All remaining kernels
    count nothing.

    Example, with `x` of shape (8, 4) and `w` of shape (4, 16)::

        a = dot x w      # 2 * (8 * 16) * 4 = 1024
        b = tanh a       # 8 * 16 = 128
        c = reduce_sum b # 128: 1280 in all

    Args:
        jaxpr: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`, as `jax.make_jaxpr` returns it.
        counts: Predicate that selects the innermost equations to count.

    Returns:
        The number of operations on floating or complex numbers.
    """
    # From JAX 0.11 closed and open jaxprs are one class, and `.jaxpr` returns itself.
    return sum(equation_flops(eqn, counts) for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def is_product(eqn: Any, itemsize: int = 0) -> bool:
    """Whether an equation is a matrix product or convolution that computes wider than `itemsize`.

    It computes in the dtype of its wider operand: float32 times bfloat16 in float32.
    """
    if eqn.primitive.name not in PRODUCTS:
        return False
    return max(v.aval.dtype.itemsize for v in eqn.invars[:2]) > itemsize


class FlopsByKind(NamedTuple):
    """Floating-point operations, and the parts of them with rates of their own.

    Attributes:
        total: All operations.
        attention: Operations in attention kernels.
        float8: Operations in float8 products.
        float32: Operations in float32 products.
        depthwise: Operations in depthwise convolutions.
    """

    total: int
    attention: int
    float8: int
    float32: int
    depthwise: int


def flops_by_kind(jaxpr: Any, counts: Callable[[Any], bool] = lambda eqn: True) -> FlopsByKind:
    """Counts like `count_flops`, in total and by kind."""
    kinds = is_attention, is_float8_product, is_float32_product, is_depthwise
    each = (count_flops(jaxpr, lambda e, kind=kind: counts(e) and kind(e)) for kind in kinds)
    return FlopsByKind(count_flops(jaxpr, counts), *each)


def is_float32_product(eqn: Any) -> bool:
    """Whether an equation is a matrix product or convolution that computes in float32."""
    if eqn.primitive.name not in PRODUCTS:
        return False
    left, right = (v.aval.dtype for v in eqn.invars[:2])
    return jnp.promote_types(left, right) == jnp.float32


def is_depthwise(eqn: Any) -> bool:
    """Whether an equation is a convolution that filters each channel by itself."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    groups, channels = (
        eqn.params["feature_group_count"],
        eqn.params["dimension_numbers"].lhs_spec[1],
    )
    return 1 < groups == eqn.invars[0].aval.shape[channels]


def equation_flops(eqn: Any, counts: Callable[[Any], bool] = lambda eqn: True) -> int:
    """The floating-point operations of one equation; see `count_flops`."""
    name = eqn.primitive.name
    if name == "scan":
        return eqn.params["length"] * count_flops(jx.loop_body(eqn).jaxpr, counts)
    if name == "cond":
        return max(count_flops(body.jaxpr, counts) for body in jx.branches(eqn))
    # A special primitive may contain a jaxpr: a scatter contains its addition of two numbers.
    if inner := jx.inner_jaxprs(eqn) if name not in _SPECIAL else []:
        return sum(count_flops(jaxpr, counts) for jaxpr in inner)
    if not counts(eqn):
        return 0
    if name in _SPECIAL:
        return _SPECIAL[name](eqn)
    if costs := kernel_costs(eqn):
        return costs.flops(eqn)
    if name in ARITHMETIC:
        return _size(eqn.outvars[0]) if _is_inexact(eqn.outvars[0]) else 0
    if name in _COUNTED_BY_OPERAND:
        return _size(eqn.invars[0]) if _is_inexact(eqn.invars[0]) else 0
    return 0


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _is_inexact(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _dot_general(eqn: Any) -> int:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2 * _size(eqn.outvars[0]) * math.prod(shape[axis] for axis in contracting)


def _ragged_dot(eqn: Any) -> int:
    # Every row of the left operand meets at most one of the right operand's matrices, along the
    # contracted axes. With a ragged contracted axis, the groups divide that same work.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracting), (_, batch) = numbers.dot_dimension_numbers
    taken = {*contracting, *batch, *numbers.rhs_group_dimensions}
    shape = eqn.invars[1].aval.shape
    free = math.prod(size for axis, size in enumerate(shape) if axis not in taken)
    return 2 * _size(eqn.invars[0]) * free


def _conv_general_dilated(eqn: Any) -> int:
    # The kernel's own input axis is already features / groups. A dilated input (the gradient of a
    # strided convolution) is mostly inserted zeros, which are not useful work.
    kernel = eqn.invars[1].aval.shape
    per_output = math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _size(eqn.outvars[0]) * per_output // math.prod(eqn.params["lhs_dilation"])


def _reduce_window(eqn: Any) -> int:
    return _size(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"])


def _scatter(eqn: Any) -> int:
    return _size(eqn.invars[2]) if _is_inexact(eqn.invars[2]) else 0


def _fft(eqn: Any) -> int:
    # The usual count for a Cooley-Tukey transform; real transforms take half of it.
    lengths = eqn.params["fft_lengths"]
    is_complex = all(jnp.iscomplexobj(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
    points = max(_size(eqn.invars[0]), _size(eqn.outvars[0]))
    return int(5 * points * math.log2(max(2, math.prod(lengths)))) // (1 if is_complex else 2)


def _polynomial(eqn: Any) -> int:
    # Horner's rule: a multiplication and an addition for each coefficient but the first.
    return 2 * _size(eqn.outvars[0]) * (len(eqn.invars) - 2) if _is_inexact(eqn.outvars[0]) else 0


def _pallas_call(eqn: Any) -> int:
    if (estimate := eqn.params["cost_estimate"]) is not None:
        return int(estimate.flops)
    # Grid dimensions unknown before running count once, like loops of unknown length.
    points = math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    return points * count_flops(eqn.params["jaxpr"])


_SPECIAL: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv_general_dilated,
    "reduce_window_sum": _reduce_window,
    "reduce_window_max": _reduce_window,
    "reduce_window_min": _reduce_window,
    # Not an addition, but its parameters hold a jaxpr that would be counted.
    "scatter": lambda eqn: 0,
    "scatter-add": _scatter,
    "scatter-mul": _scatter,
    "fft": _fft,
    "polynomial": _polynomial,
    "pallas_call": _pallas_call,
    **dict.fromkeys(KERNELS, attention_flops),
}
