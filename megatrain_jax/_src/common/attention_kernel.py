"""Attention as a kernel of a GPU that isn't here: a stand-in for plans, which is never computed.

Without a GPU there is no cuDNN to call. A plan for a GPU traces calls of these names in its place:
they have the kernel's operands and results, and so what it keeps for backward, and need nothing of
the shape of scores. Who counts operations and bytes knows them by name.

A worked example, 4 queries in 2 heads of width 8, whose gradient is asked for::

    with planned_for(128):
        out = attend(q, k, v, None)    # bf16[1, 4, 2, 8] and statistics, fp32[1, 2, 4], are kept
"""

from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np

FORWARD, BACKWARD = "planned_attention_fwd", "planned_attention_bwd"

# As a context of JAX's, a part of what its caches of traces go by: no later run finds a stand-in.
_widest_heads = jax.make_user_context(None)


def planned_for(widest_heads: int | None) -> AbstractContextManager[None]:
    """Traces the body for a GPU with a kernel for heads up to this wide; None for no such GPU."""
    return _widest_heads(widest_heads)


def planned_width() -> int | None:
    """The width of the widest heads for which the GPU that is planned for has a kernel, if any."""
    return _widest_heads.value


def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """The stand-in of causal attention, to be traced only.

    Args:
        q: Queries, (rows, length, heads, width).
        k: Keys, (rows, length, kv_heads, width).
        v: Values, as `k`.
        window: Number of tokens that one attends to, with itself; None for all before it.

    Returns:
        The shape and dtype of `q`.
    """
    return _attend(q, k, v, window)


def _forward(q, k, v, window):
    rows, length, heads, _ = q.shape
    results = [_like(q), jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)]
    out, statistics = _call(FORWARD, results, window, q, k, v)
    return out, (q, k, v, statistics, out)


def _backward(window, kept, cotangent):
    return tuple(_call(BACKWARD, [_like(x) for x in kept[:3]], window, *kept, cotangent))


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(name, results, window, *operands):
    # Never lowered, so that no such function needs to be registered.
    call = jax.ffi.ffi_call(name, results, vmap_method="broadcast_all")
    return call(*operands, window=np.int64(window or 0))


_attend = jax.custom_vjp(lambda *operands: _forward(*operands)[0], nondiff_argnums=(3,))
_attend.defvjp(_forward, _backward)
