"""Distillation from a teacher's stored top-k logits, without all logits of the student.

The student's logits exist for one chunk of tokens at a time: once in forward, and again in
backward. Only the log-probabilities of the stored tokens and of the label leave a chunk.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Integer, Shaped

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.cross_entropy import (
    REAL,
    LossOptions,
    array_of,
    checked_arrays,
    label_logits,
    loss_options,
    next_token,
    scan_chunks,
)
from megatrain_jax._src.lm.objectives.example_losses import mean


def distillation(
    hidden: Float[Array, "*rows width"],
    head: Float[Array, "vocabulary width"],
    labels: Integer[ArrayLike, "*rows"],
    topk_token_ids: Integer[ArrayLike, "*rows k"],
    topk_logprobs: Float[ArrayLike, "*rows k"],
    *,
    alpha: float = 0.5,
    temperature: float = 1.0,
    tail: bool = True,
    mask: Shaped[ArrayLike, "*rows"] | None = None,
    count: Shaped[ArrayLike, ""] | None = None,
    softcap: float | None = None,
    chunk: int = 4096,
) -> Float[Array, ""]:
    """Loss of distillation: `alpha` times the divergence from a teacher, plus that of next tokens.

    The divergence is the mean over positions of the forward Kullback-Leibler divergence
    `sum(p * log(p / q))`, where `p` is the teacher's and `q` the student's distribution over the k
    stored tokens and the tail. The cross-entropy of the labels counts with `1 - alpha`.

    The tail is the rest of the vocabulary. With `tail`, it is one more token: its probability is 1
    minus the sum of the k. Without it, both distributions are renormalised over the k tokens, so
    the student learns nothing about the rest of its probability.

    Args:
        hidden: See `next_token`.
        head: See `next_token`.
        labels: See `next_token`.
        topk_token_ids: The k most likely tokens of each position according to the teacher: the
            candidates for its label.
        topk_logprobs: Their log-probabilities; without `tail`, logits are as good. Entries of minus
            infinity don't count, so that positions may have fewer than k.
        alpha: Weight of the divergence, from 0 to 1.
        temperature: Divides the logits of both; above 0. Only 1 goes with `tail`, because the
            tail's probability at another temperature is not known from the k log-probabilities.
        tail: Whether the rest of the vocabulary is one more token.
        mask: See `next_token`.
        count: See `next_token`.
        softcap: See `next_token`.
        chunk: See `next_token`.

    Returns:
        The loss in fp32; 0 if nothing counts. It can be differentiated once, by `hidden` and
        `head`.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't match, or an option is out of range.

    Examples:
        Teacher and student find all of 50 tokens as likely.

        >>> hidden, head = jnp.zeros((1, 3, 8)), jnp.ones((50, 8))
        >>> ids = jnp.arange(6).reshape(1, 3, 2)
        >>> logs = jnp.full((1, 3, 2), -jnp.log(50.0))
        >>> loss = distillation(hidden, head, ids[..., 0], ids, logs, alpha=1.0)
        >>> abs(round(float(loss), 5))
        0.0
    """
    hidden, head, labels = checked_arrays(hidden, head, labels)
    ids = array_of("topk_token_ids", topk_token_ids, "integers", jnp.integer)
    teacher = array_of("topk_logprobs", topk_logprobs, "real numbers", *REAL).astype(jnp.float32)
    for name, array in (("topk_token_ids", ids), ("topk_logprobs", teacher)):
        if array.shape[:-1] != labels.shape or array.shape != ids.shape:
            raise ValueError(f"`{name}` has shape {array.shape}, but `labels` {labels.shape}")
    checks.number("alpha", alpha, least=0, most=1)
    options = loss_options(head, labels, chunk, softcap, temperature=temperature)
    if checks.boolean("tail", tail) and temperature != 1:
        raise ValueError(
            f"`temperature`={temperature} needs `tail`=False: the probability of the tokens beyond "
            "the stored ones is known at temperature 1 only"
        )
    flat, size = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
    # A negative id is none: it would be counted from the end of the vocabulary.
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
    ids = jnp.where(ids < 0, head.shape[0], ids)
    logs: Array = _logs(options, flat, head, ids.reshape(-1, size))
    logs = logs.reshape(ids.shape)
    counts = labels >= 0
    weights = counts if mask is None else counts * array_of("mask", mask, "real numbers", *REAL)
    # Tokens that don't count may have any numbers, and must not make gradients NaN.
    logs = jnp.where((weights != 0)[..., None], logs, 0)
    far = mean(_divergence(logs, teacher / temperature, tail), weights, count, "labels")
    near = next_token(
        hidden, head, labels, mask=mask, count=count, softcap=softcap, chunk=options.chunk
    )
    return alpha * far + (1 - alpha) * near


def _divergence(
    student: Float[Array, "*rows k"], teacher: Float[Array, "*rows k"], tail: bool
) -> Float[Array, "*rows"]:
    """Forward divergences over the stored tokens and the tail."""
    there = jnp.isfinite(teacher)
    both = [jnp.where(there, logs, -jnp.inf) for logs in (teacher, student)]
    if tail:
        both = [jnp.concatenate([logs, _log_rest(logs)], axis=-1) for logs in both]
        there = jnp.concatenate([there, jnp.ones_like(there[..., :1])], axis=-1)
    else:
        both = [jax.nn.log_softmax(logs, axis=-1, where=there) for logs in both]
    wanted, found = (jnp.where(there, logs, 0) for logs in both)
    return jnp.sum(jnp.where(there, jnp.exp(wanted) * (wanted - found), 0), axis=-1)


def _log_rest(logs: Float[Array, "*rows k"]) -> Float[Array, "*rows 1"]:
    """The log-probability of the tail, all tokens but the given ones; at least log(1e-7)."""
    total = jax.nn.logsumexp(logs, axis=-1, keepdims=True)
    # Rounded log-probabilities may sum to slightly more than 1.
    return jnp.log(-jnp.expm1(jnp.minimum(total, -1e-7)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logs(
    options: LossOptions,
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocabulary width"],
    ids: Integer[Array, "tokens k"],
) -> Float[Array, "tokens k"]:
    """The student's log-probabilities of the stored tokens, chunk by chunk."""

    def of_chunk(_: None, rows: Any) -> tuple[None, Array]:
        logits = _logits(options, head, rows[0])[0]
        found = jnp.take_along_axis(logits, rows[1], axis=1, mode="fill")
        return None, found - jax.nn.logsumexp(logits, axis=1, keepdims=True)

    return scan_chunks(options, of_chunk, None, hidden, ids)[1]


def _logits(
    options: LossOptions, head: Array, hidden: Array
) -> tuple[Float[Array, "chunk vocabulary"], Float[Array, "chunk vocabulary"] | float]:
    """A chunk's logits, and their derivative by the head's products."""
    no_labels = jnp.full(hidden.shape[:1], -1, jnp.int32)
    found = label_logits(options, head, hidden, no_labels)
    return found.logits, found.slope


def _forward(options: LossOptions, hidden, head, ids):
    return _logs(options, hidden, head, ids), (hidden, head, ids)


def _backward(options: LossOptions, saved, cotangent):
    """The gradients, from logits that are computed again.

    The derivative of `log q[id]` by the logits is `one_hot(id) - q`.
    """
    hidden, head, ids = saved

    def add(total: Array, rows: Any) -> tuple[Array, Array]:
        own, chosen, weights = rows
        logits, slope = _logits(options, head, own)
        by_logits = -jax.nn.softmax(logits, axis=1) * weights.sum(axis=1, keepdims=True)
        numbers = jnp.arange(own.shape[0])[:, None]
        by_logits = (by_logits.at[numbers, chosen].add(weights) * slope).astype(own.dtype)
        # In fp32, because thousands of chunks may be summed.
        by_head = jnp.einsum("tv,td->vd", by_logits, own, preferred_element_type=jnp.float32)
        by_own = jnp.einsum("tv,vd->td", by_logits, head, preferred_element_type=jnp.float32)
        return total + by_head, by_own.astype(hidden.dtype)

    start = jnp.zeros(head.shape, jnp.float32)
    by_head, by_hidden = scan_chunks(options, add, start, hidden, ids, cotangent)
    return by_hidden, by_head.sum(axis=0).astype(head.dtype), None


_logs.defvjp(_forward, _backward)
