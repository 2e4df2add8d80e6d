"""Small hidden states, heads and labels, and losses on their full logits."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from megatrain_jax._src.engine.program import jaxpr as jx

WIDTH, VOCAB = 16, 53


def arrays(shape, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(*shape, WIDTH)), dtype),
        jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), dtype),
        jnp.asarray(rng.integers(-3, VOCAB, shape), jnp.int32),
        jnp.asarray(rng.uniform(size=shape), jnp.float32),
    )


def sizes(jaxpr):
    """The number of elements of each result, also in inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield from (jx.num_elements(v.aval) for v in eqn.outvars)
        for inner in jx.inner_jaxprs(eqn):
            yield from sizes(inner)


K = 5


def teacher(labels, seed=0, k=K):
    """The top-k tokens of random logits, with log-probabilities and logits; some have fewer."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(3 * rng.normal(size=(*labels.shape, VOCAB)), jnp.float32)
    found, ids = jax.lax.top_k(logits, k)
    logs = found - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    short = rng.random(labels.shape) < 0.2
    logs = jnp.where(short[..., None] & (np.arange(k) >= 2), -jnp.inf, logs)
    return ids, logs


def full(hidden, head, labels, ids, teacher, alpha, temperature, tail, mask, softcap):
    """The same loss from all logits, with each term written out."""
    logits = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    there = jnp.isfinite(teacher)
    p = jnp.where(there, jnp.exp(teacher / temperature), 0)
    q = jnp.take_along_axis(jax.nn.softmax(logits / temperature), ids, -1) * there
    if tail:
        p, q = (jnp.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in (p, q))
    else:
        p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    ratio = jnp.log(jnp.where(p > 0, p, 1) / jnp.where(p > 0, q, 1))
    gaps = (p * ratio).sum(-1)
    each = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1)[
        ..., 0
    ]
    weights = mask * (labels >= 0)
    return ((alpha * gaps + (1 - alpha) * each) * weights).sum() / weights.sum()
