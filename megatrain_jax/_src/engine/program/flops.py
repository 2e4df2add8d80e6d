"""Counts of a jaxpr's floating-point operations, with attention's, and of the kernels of its loops.

Operations are counted from a jaxpr's equations.

The plan compares computation with transfers before anything is compiled, so the count cannot come
from a compiler. It needs only shapes, so it also works for models too large for this machine.

Fused attention kernels are recognised, and their operations counted.

A fused kernel never stores the scores and is one opaque equation, so its operations come from a
formula. For each pair of a query and a key it attends to, a head of width h takes 2·h operations
for the score and 2·h for the value. Where forward takes two such products, the gradient takes five:
the scores once more, and the gradients of values, weights, queries and keys.

Example: 4 queries and keys in 2 heads of width 8::

           pairs per head    forward                backward
    all to all                    16              2 * 16 * 4 * 8 = 1024  2560
    causal                        10              640                    1600
    causal, a window of 2         7               448                    1120

The short kernels of loops can cost a device more time than their arithmetic.

A device launches a loop's kernels one after another, at a few microseconds each, however little
they compute. A mixture of experts may process its tokens in blocks, each with one expert, and
linear attention works in chunks of a row: hundreds of short products per layer.
Example: a loop over 640 blocks of 512 rows with 2,048 numbers; each block passes through an expert
with three matrices of 2,048 x 768::

    kernels      3 slices of the weights, 3 products, a slice of the rows, a result written: 640 * 8
    operations   640 * 3 * 2 * 512 * 2048 * 768

At 6 microseconds per kernel they take 31 ms, and the operations at 700 TFLOP/s 4.4 ms. Done in 10
turns of 64 blocks, there are 80 kernels, each on the weights of 64 experts. They copy as many bytes
as before, and the device does nothing else meanwhile::

    copied       640 * 3 * 2048 * 768 numbers, 6 GB in bf16, read and written: 2.5 ms at 4.8 TB/s
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from megatrain_jax._src.common import attention_kernel
from megatrain_jax._src.common.kernel_primitives import kernel_costs
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program import primitives
from megatrain_jax._src.engine.program.float8 import is_float8_product

# The kernels of `jax.nn.dot_product_attention(implementation="cudnn")`, before and after lowering.
# Plans made without the GPU call stand-ins, recognised by name.
_CALL = "ffi_call"
_FORWARD = (
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_fwd",
    attention_kernel.FORWARD,
)
_BACKWARD = (
    "dot_product_attention_bwd_wrapper",
    "dot_product_attention_bwd",
    attention_kernel.BACKWARD,
)
# Primitives of equations that may be attention kernels.
KERNELS = (*_FORWARD, *_BACKWARD, _CALL)


def is_attention(eqn: Any) -> bool:
    """Whether an equation is an attention kernel."""
    return _name(eqn.primitive, eqn.params) in (*_FORWARD, *_BACKWARD)


def heads_axis(eqn: Any) -> int:
    """The heads' axis in queries, keys and values of an attention kernel, counted from the end."""
    # cuDNN's layout 0 is (rows, length, heads, width); layout 1 has heads before length.
    return -3 if eqn.params.get("layout") == 1 else -2


def is_attention_forward(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Whether a primitive with these parameters is the forward of attention."""
    return _name(primitive, params) in _FORWARD


def _name(primitive: Any, params: Mapping[str, Any]) -> str:
    return params["target_name"] if primitive.name == _CALL else primitive.name


def attention_flops(eqn: Any) -> int:
    """Counts the floating-point operations of an attention kernel's products, without its softmax.

    Any foreign call that is not attention counts 0.

    A causal mask halves the count, a window leaves its band. Masks, biases and sequence lengths are
    known only when a step runs, so masked pairs count as computed, and documents packed into one
    sequence count as one.
    """
    if not is_attention(eqn):
        return 0
    score, mixed = (eqn.invars[at].aval.shape[-1] for at in (0, 2))
    is_forward = is_attention_forward(eqn.primitive, eqn.params)
    products = score + mixed if is_forward else 3 * score + 2 * mixed
    return 2 * _computed_pairs(eqn) * products


def masked_pairs(eqn: Any) -> int:
    """Counts the pairs of a query and a key, of all rows and heads, whose mask attention reads."""
    if not is_attention(eqn) or len(eqn.invars) < 4:
        return 0
    query, key, _, mask = (v.aval.shape for v in eqn.invars[:4])
    length = _length_axis(eqn)
    # Without a mask, that operand is empty or has fewer axes.
    if len(mask) != len(query) or mask[-2:] != (query[length], key[length]):
        return 0
    return _computed_pairs(eqn)


def _computed_pairs(eqn: Any) -> int:
    """Counts the pairs of a query and a key, of all rows and heads, that attention computes."""
    query, key = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive.name == _CALL:
        attributes = dict(eqn.params["attributes"])
        causal, window = bool(attributes["causal"]), int(attributes["window"]) or None
    else:
        causal = eqn.params["mask_type"].name.endswith("CAUSAL")
        window = eqn.params["sliding_window_length"]
    length = _length_axis(eqn)
    pairs = attended_pairs(query[length], key[length], causal=causal, window=window)
    return math.prod(query[:-3]) * query[heads_axis(eqn)] * pairs


def _length_axis(eqn: Any) -> int:
    """The tokens' axis in queries, keys and values, counted from the end."""
    return -5 - heads_axis(eqn)


def attended_pairs(num_queries: int, num_keys: int, *, causal: bool, window: int | None) -> int:
    """Counts the pairs of a query and a key that attention computes.

    Args:
        num_queries: Number of queries; query i has the position of key i.
        num_keys: Number of keys.
        causal: Whether a query attends only to keys up to its own position.
        window: Number of keys, up to its own, that a query attends to; None for all of them.
    """
    if not causal and window is None:
        return num_queries * num_keys
    left_out = 0 if window is None else _ramp(max(0, num_queries - window), num_keys)
    return _ramp(num_queries, num_keys) - left_out


def _ramp(count: int, most: int) -> int:
    """The sum of min(i, most) over i from 1 to `count`."""
    rising = min(count, most)
    return rising * (rising + 1) // 2 + (count - rising) * most


_COUNTED_BY_OPERAND = primitives.REDUCTIONS | primitives.ARG_REDUCTIONS | primitives.CUMULATIVE


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
    if eqn.primitive.name not in primitives.PRODUCTS:
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
    if eqn.primitive.name not in primitives.PRODUCTS:
        return False
    left, right = (v.aval.dtype for v in eqn.invars[:2])
    return jnp.promote_types(left, right) == jnp.float32


def is_depthwise(eqn: Any) -> bool:
    """Whether an equation is a convolution that filters each channel by itself."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    channels = eqn.params["dimension_numbers"].lhs_spec[1]
    return 1 < eqn.params["feature_group_count"] == eqn.invars[0].aval.shape[channels]


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
    if name in primitives.ARITHMETIC:
        return _num_floats(eqn.outvars[0])
    return _num_floats(eqn.invars[0]) if name in _COUNTED_BY_OPERAND else 0


def _size(var: Any) -> int:
    return jx.num_elements(var.aval)


def _num_floats(var: Any) -> int:
    return _size(var) if jx.is_float(var.aval) else 0


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


def _fft(eqn: Any) -> int:
    # The usual count for a Cooley-Tukey transform; real transforms take half of it.
    lengths = eqn.params["fft_lengths"]
    is_complex = all(jnp.iscomplexobj(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
    points = max(_size(eqn.invars[0]), _size(eqn.outvars[0]))
    return int(5 * points * math.log2(max(2, math.prod(lengths)))) // (1 if is_complex else 2)


def _polynomial(eqn: Any) -> int:
    # Horner's rule: a multiplication and an addition for each coefficient but the first.
    return 2 * _num_floats(eqn.outvars[0]) * (len(eqn.invars) - 2)


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
    **dict.fromkeys(primitives.WINDOW_REDUCTIONS, _reduce_window),
    # Not an addition, but its parameters hold a jaxpr that would be counted.
    "scatter": lambda eqn: 0,
    **dict.fromkeys(("scatter-add", "scatter-mul"), lambda eqn: _num_floats(eqn.invars[2])),
    "fft": _fft,
    "polynomial": _polynomial,
    "pallas_call": _pallas_call,
    **dict.fromkeys(KERNELS, attention_flops),
}


# Operations that copy parts of an array unchanged, such as one expert's weights.
_COPIES = ("dynamic_slice", "gather")


class Loops(NamedTuple):
    """Kernels, operations and copies of the loops in one evaluation.

    Attributes:
        kernels: Approximate number of kernels: elementwise operations fuse with their reader.
        flops: Their floating-point operations; see `count_flops`.
        copied: Bytes that they copy unchanged.
    """

    kernels: int
    flops: int
    copied: int

    def plus(self, other: "Loops", times: int = 1) -> "Loops":
        """The sum of these counts and `times` the given ones."""
        return Loops(*(own + times * more for own, more in zip(self, other, strict=True)))


def count_loops(jaxpr: Any) -> Loops:
    """Counts the kernels and operations of the loops in a jaxpr.

    The trip count of a `while` is unknown: the loops inside it count for one trip.

    Args:
        jaxpr: A `jax.extend.core.Jaxpr` or `ClosedJaxpr`.
    """
    found = Loops(kernels=0, flops=0, copied=0)
    for eqn in jx.opened(jaxpr).eqns:
        if eqn.primitive.name == "scan":
            kernels, copied = _trip(eqn)
            of_trip = Loops(kernels, count_flops(jx.loop_body(eqn).jaxpr), copied)
            found = found.plus(of_trip, eqn.params["length"])
        elif inner := _inner(eqn):
            found = found.plus(max(map(count_loops, inner)))  # for a `cond`, the costliest branch
    return found


def _inner(eqn: Any) -> list[Any]:
    """The jaxprs that an equation calls: one, or all branches of a `cond`."""
    if eqn.primitive.name == "while":
        return [jx.loop_body(eqn).jaxpr]
    if eqn.primitive.name == "cond":
        return [body.jaxpr for body in jx.branches(eqn)]
    inner = jx.called(eqn, primitives.CALLS | primitives.REMAT | primitives.CUSTOM_RULES)
    return [inner.jaxpr] if inner else []


def _trip(scan: Any) -> tuple[int, int]:
    """Kernels and copied bytes of one trip; slicing inputs and writing results are kernels too."""
    _, carry, taken = jx.scan_operands(scan, scan.invars)
    kernels, copied = _kernels_and_copies(jx.loop_body(scan).jaxpr)
    return max(1, kernels + (len(taken) > 0) + (len(scan.outvars) > len(carry))), copied


def _kernels_and_copies(jaxpr: Any) -> tuple[int, int]:
    kernels, copied = 0, 0
    for eqn in jx.opened(jaxpr).eqns:
        name, times = eqn.primitive.name, 1
        if name == "scan":
            times, rows = eqn.params["length"], [_trip(eqn)]
        elif inner := _inner(eqn):
            rows = list(map(_kernels_and_copies, inner))
        else:
            num_bytes = sum(jx.num_bytes(v.aval) for v in eqn.outvars)
            rows = [(int(name not in primitives.FUSED), num_bytes if name in _COPIES else 0)]
        kernels += times * max(row[0] for row in rows)
        copied += times * max(row[1] for row in rows)
    return kernels, copied
