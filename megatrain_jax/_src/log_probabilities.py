"""Log-probabilities of tokens in chunks, without all logits, and the losses of preference learning.

Their cotangents come per token and are known only in backward, unlike a sum's. So a chunk's logits
are computed once in forward and again in backward, which is that of `next_token` with the tokens'
cotangents as weights.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Integer, Shaped

from megatrain_jax._src.common import checks
from megatrain_jax._src.losses import (
    REAL,
    LossOptions,
    array_of,
    checked_arrays,
    chunked,
    label_logits,
    num_parts,
    of_parts,
    sum_and_gradients,
)


def log_probabilities(
    hidden: Float[Array, "*rows width"],
    head: Float[Array, "vocabulary width"],
    labels: Integer[ArrayLike, "*rows"],
    *,
    softcap: float | None = None,
    chunk: int = 4096,
) -> Float[Array, "*rows"]:
    """The log-probability of each label, from hidden states and the head's weights.

    Products are accumulated, and everything else is computed, in fp32. Memory is that of
    `next_token`; with gradients, each logit is computed twice.

    Args:
        hidden: Final hidden states, after the last norm, with any float dtype.
        head: The head's weights, or a tied embedding's.
        labels: The token that each position should predict, already shifted. For negative ones,
            such as Hugging Face's -100, the result is 0; for ids beyond the vocabulary it is NaN.
        softcap: Bounds logits to `softcap * tanh(logits / softcap)`, as Gemma 2 does; above 0.
        chunk: Number of tokens whose logits exist at once, on each device.

    Returns:
        The log-probabilities in fp32. They can be differentiated once, by `hidden` and `head`.

    Raises:
        TypeError: If an argument has a wrong type, or labels are not integers.
        ValueError: If shapes don't match, or a number is out of range.

    Examples:
        Nothing is known yet: all of 50 tokens are as likely.

        >>> hidden, head = jnp.zeros((1, 3, 8)), jnp.ones((50, 8))
        >>> log_probabilities(hidden, head, jnp.array([[4, 0, -100]])).tolist()
        [[-3.912..., -3.912..., 0.0]]
    """
    hidden, head, labels = checked_arrays(hidden, head, labels)
    options = LossOptions(
        checks.integer("chunk", chunk),
        0.0,
        None if softcap is None else checks.number("softcap", softcap, above=0),
        parts=num_parts(labels.size),
        head_dtype=head.dtype.name,
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    logs: Array = _logs(options, flat, head, labels.reshape(-1))
    return logs.reshape(labels.shape)


def dpo(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    reference_chosen: Float[ArrayLike, "*pairs"],
    reference_rejected: Float[ArrayLike, "*pairs"],
    *,
    beta: float = 0.1,
    mask: Shaped[ArrayLike, "*pairs"] | None = None,
    count: Shaped[ArrayLike, ""] | None = None,
) -> Float[Array, ""]:
    """Loss of direct preference optimisation (equation 7 of https://arxiv.org/abs/2305.18290).

    The mean over pairs of `-log sigmoid(beta * ((chosen - rejected) - (reference_chosen -
    reference_rejected)))`.

    Args:
        chosen: Log-probability of each pair's chosen answer under the model: the sum of its tokens'
            `log_probabilities`.
        rejected: The same for its rejected answer.
        reference_chosen: The chosen answer's log-probability under the model before training. No
            gradient flows into it.
        reference_rejected: The same for the rejected answer.
        beta: How strongly the model is kept close to the reference; above 0.
        mask: Weights of pairs, or whether they count; None counts all.
        count: Divisor of the sum over pairs; None takes the sum of their weights. See `next_token`.

    Returns:
        The loss in fp32; 0 if nothing counts.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't agree, or `beta` is out of range.

    Examples:
        A model that is the reference prefers neither answer.

        >>> logs = jnp.array([-20.0, -31.0]), jnp.array([-25.0, -30.0])
        >>> float(dpo(*logs, *logs))
        0.693...
    """
    beta = checks.number("beta", beta, above=0)
    given = {
        "chosen": chosen,
        "rejected": rejected,
        "reference_chosen": reference_chosen,
        "reference_rejected": reference_rejected,
    }
    arrays = {
        name: array_of(name, x, "floating-point numbers", jnp.floating).astype(jnp.float32)
        for name, x in given.items()
    }
    shape = arrays["chosen"].shape
    weights = jnp.ones(shape) if mask is None else array_of("mask", mask, "real numbers", *REAL)
    for name, array in {**arrays, "mask": weights}.items():
        if array.shape != shape:
            raise ValueError(f"`{name}` has shape {array.shape}, but `chosen` {shape}")
    ours, wrong, before, before_wrong = arrays.values()
    margin = (ours - wrong) - jax.lax.stop_gradient(before - before_wrong)
    weights = weights.astype(jnp.float32)
    # Values of pairs that don't exist may be anything, even NaN.
    losses = jnp.where(weights != 0, -jax.nn.log_sigmoid(beta * margin), 0)
    divisor = weights.sum() if count is None else jnp.asarray(count, jnp.float32)
    return jnp.sum(losses * weights) / jnp.maximum(divisor, jnp.finfo(jnp.float32).tiny)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logs(
    options: LossOptions,
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocabulary width"],
    labels: Integer[Array, " tokens"],
) -> Float[Array, " tokens"]:
    """The log-probabilities of all tokens, chunk by chunk."""

    def of_part(*arrays: Array) -> Array:
        def of_chunk(rows: Any) -> Array:
            logits = label_logits(options, head, *rows)
            return logits.of_label - logits.log_sum

        logs = jax.lax.map(of_chunk, tuple(chunked(options.chunk, *arrays)))
        return logs.reshape(-1)[: arrays[0].shape[0]]

    logs = of_parts(options.parts, of_part, hidden, labels).reshape(-1)
    # Such labels have no logit, so `of_label` is 0 and the result would look like a probability.
    beyond = jnp.where(labels >= head.shape[0], jnp.nan, logs)
    return jnp.where(labels < 0, 0, beyond)


def _forward(options: LossOptions, hidden, head, labels):
    return _logs(options, hidden, head, labels), (hidden, head, labels)


def _backward(options: LossOptions, saved, cotangent):
    """The gradients: `log p` is minus a token's loss, so the cotangent is a weight."""
    hidden, head, labels = saved
    weights = jnp.where(labels < 0, 0, -cotangent)
    weights = jnp.where((labels >= head.shape[0]) & (weights != 0), jnp.nan, weights)
    # Each token has its own cotangent, so the forward can't compute the gradients as in `_sum`.
    _, (by_hidden, by_head, _) = sum_and_gradients(options, hidden, head, labels, weights)
    return by_hidden, by_head.astype(head.dtype), None


_logs.defvjp(_forward, _backward)
