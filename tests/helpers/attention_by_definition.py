"""Attention as it is defined, without any economy."""

import jax
import jax.numpy as jnp
import numpy as np


def defined(q, k, v, *, segments=None, window=None, chunk=None, softcap=None, scale=None):
    """Attention as its definition has it, with a mask for all pairs of tokens."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bmhd,bnhd->bhmn", q, k) * (scale or q.shape[3] ** -0.5)
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    here, there = np.mgrid[: q.shape[1], : q.shape[1]]
    mask = there <= here
    if window:
        mask &= here - there < window
    if chunk and segments is not None:
        first = np.argmax(segments[:, :, None] == segments[:, None, :], axis=-1)[:, :, None]
        mask = mask & ((here - first) // chunk == (there - first) // chunk)[:, None]
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhmn,bnhd->bmhd", weights, v)
