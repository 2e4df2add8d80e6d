"""Recognises fused attention kernels in traced equations and counts their operations.

A fused kernel never stores the scores and is one opaque equation, so its operations come from a
formula. For each pair of a query and a key it attends to, a head of width h takes 2·h operations
for the score and 2·h for the value. Where forward takes two such products, the gradient takes five:
the scores once more, and the gradients of values, weights, queries and keys.

Example: 4 queries and keys in 2 heads of width 8::

           pairs per head    forward                backward
    all to all                    16              2 * 16 * 4 * 8 = 1024  2560
    causal                        10              640                    1600
    causal, a window of 2         7               448                    1120
"""

import math
from collections.abc import Mapping
from typing import Any

from megatrain_jax._src.common import attention_kernel

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
    query, key, value = (v.aval.shape for v in eqn.invars[:3])
    if eqn.primitive.name == _CALL:
        attributes = dict(eqn.params["attributes"])
        causal, window = bool(attributes["causal"]), int(attributes["window"]) or None
    else:
        causal = eqn.params["mask_type"].name.endswith("CAUSAL")
        window = eqn.params["sliding_window_length"]
    heads = heads_axis(eqn)
    length = -5 - heads
    pairs = attended_pairs(query[length], key[length], causal=causal, window=window)
    score, mixed = query[-1], value[-1]
    is_forward = is_attention_forward(eqn.primitive, eqn.params)
    products = score + mixed if is_forward else 3 * score + 2 * mixed
    return 2 * math.prod(query[:-3]) * query[heads] * pairs * products


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
