"""Stand-ins for cuDNN attention, traced by plans made on a machine without that GPU.

Without a GPU there is no cuDNN to call, so a plan traces a call with a known name instead. The
stand-in has the kernel's operands and results, saves the same arrays for backward, and needs no
array of the scores' shape. Flop and byte counts recognise it by name. It is never computed.

Example: 4 queries, 2 heads of width 8, traced for their gradient::

    out = attend(q, k, v, None, None)    # saves bf16[1, 4, 2, 8] and statistics, fp32[1, 2, 4]
"""

import jax
import jax.numpy as jnp
import numpy as np

FORWARD, BACKWARD = "planned_attention_fwd", "planned_attention_bwd"


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    window: int | None,
    *,
    causal: bool = True,
) -> jax.Array:
    """Attention that can be traced but not computed.

    Args:
        q: Queries, (rows, length, heads, width).
        k: Keys, (rows, length, kv_heads, width).
        v: Values, as `k`.
        mask: Whether each query sees each key, (rows, 1, length, length); None if nothing is
            masked.
        window: Number of tokens each token attends to, itself included; None for all earlier ones.
        causal: Whether tokens attend only to earlier ones; otherwise to all.

    Returns:
        The shape and dtype of `q`.
    """
    # JAX passes a mask to cuDNN as numbers that are added to scores.
    added = () if mask is None else (jnp.where(mask, 0, jnp.finfo(q.dtype).min).astype(q.dtype),)
    return _attend(q, k, v, added, window, causal)


def _forward(q, k, v, added, window, causal):
    rows, length, heads, _ = q.shape
    results = [_like(q), jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)]
    out, statistics = _call(FORWARD, results, (window, causal), q, k, v, *added)
    return out, (q, k, v, *added, statistics, out)


def _backward(window, causal, kept, cotangent):
    results = [_like(x) for x in kept[:3]]
    return *_call(BACKWARD, results, (window, causal), *kept, cotangent), None


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(name, results, seen, *operands):
    # Never lowered, so no such function has to be registered with XLA.
    call = jax.ffi.ffi_call(name, results, vmap_method="broadcast_all")
    window, causal = seen
    return call(*operands, window=np.int64(window or 0), causal=np.int64(causal))


_attend = jax.custom_vjp(lambda *operands: _forward(*operands)[0], nondiff_argnums=(4, 5))
_attend.defvjp(_forward, _backward)
