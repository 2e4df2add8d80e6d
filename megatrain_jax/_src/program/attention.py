"""Attention that a kernel computes without its scores in memory: which equations do, and what.

Such a kernel is one opaque equation, so that its operations follow from a formula rather than from
equations within. For every pair of a query and a key that it attends to, a head of width h takes
2·h operations for the score and 2·h for the value. The gradient takes five such products where the
forward takes two: the scores once more, and the gradients of values, weights, queries and keys.

A worked example, 4 queries and keys in 2 heads of width 8::

                                  pairs a head    forward                backward
    all to all                    16              2 * 16 * 4 * 8 = 1024  2560
    causal                        10              640                    1600
    causal, a window of 2         7               448                    1120
"""

import math
from collections.abc import Mapping
from typing import Any

from megatrain_jax._src.common import attention_kernel

# The kernels of `jax.nn.dot_product_attention(implementation="cudnn")`, traced and being lowered.
# Those of plans for a GPU that isn't here are calls of other functions, by name.
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
# The primitives of equations that may be kernels of attention.
KERNELS = (*_FORWARD, *_BACKWARD, _CALL)


def is_attention(eqn: Any) -> bool:
    """Whether an equation is a kernel of attention."""
    return _name(eqn.primitive, eqn.params) in (*_FORWARD, *_BACKWARD)


def heads_axis(eqn: Any) -> int:
    """The axis of heads in queries, keys and values of a kernel of attention, from the last one."""
    # Layouts of cuDNN's calls: 0 is (rows, length, heads, width), 1 has heads before the length.
    return -3 if eqn.params.get("layout") == 1 else -2


def is_attention_forward(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Whether a primitive with these parameters is attention's forward."""
    return _name(primitive, params) in _FORWARD


def _name(primitive: Any, params: Mapping[str, Any]) -> str:
    return params["target_name"] if primitive.name == _CALL else primitive.name


def attention_flops(eqn: Any) -> int:
    """Counts the operations of a kernel of attention: those of its products, not its softmax's.

    Calls of other functions count nothing.

    A causal mask leaves half of them, a window its band. What masks, biases and the lengths of
    sequences leave out is known when a step runs, not before: it counts as computed, and documents
    that are packed into one sequence count as one.
    """
    if not is_attention(eqn):
        return 0
    query, key, value = (v.aval.shape for v in eqn.invars[:3])
    if eqn.primitive.name == _CALL:
        causal = True
        window = int(dict(eqn.params["attributes"])["window"]) or None
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
        num_queries: Number of queries; query i stands where key i does.
        num_keys: Number of keys.
        causal: Whether a query attends to keys up to its own only.
        window: Number of keys up to its own that a query attends to; None for all of them.
    """
    if not causal and window is None:
        return num_queries * num_keys
    left_out = 0 if window is None else _ramp(max(0, num_queries - window), num_keys)
    return _ramp(num_queries, num_keys) - left_out


def _ramp(count: int, most: int) -> int:
    """The sum of min(i, most) over i from 1 to `count`."""
    rising = min(count, most)
    return rising * (rising + 1) // 2 + (count - rising) * most
