"""Log-probabilities of tokens in chunks, without all logits.

Each token has its own cotangent, known only in backward, so forward can't compute gradients as
`next_token` does. A chunk's logits are computed in forward and again in backward. Backward computes
the gradients of `next_token`, with the negated cotangents as the tokens' weights.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Integer

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.cross_entropy import (
    LossOptions,
    checked_arrays,
    chunked,
    label_logits,
    map_token_parts,
    num_parts,
    sum_and_gradients,
)


def log_probabilities(
    hidden: Float[Array, "*rows width"],
    head: Float[Array, "vocabulary width"],
    labels: Integer[ArrayLike, "*rows"],
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
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
        temperature: Divides the logits, after `softcap`; above 0.
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
        temperature=checks.number("temperature", temperature, above=0),
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    logs: Array = _logs(options, flat, head, labels.reshape(-1))
    return logs.reshape(labels.shape)


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

    logs = map_token_parts(options.parts, of_part, hidden, labels).reshape(-1)
    # Such labels have no logit, so `of_label` is 0 and the result would look like a probability.
    beyond = jnp.where(labels >= head.shape[0], jnp.nan, logs)
    return jnp.where(labels < 0, 0, beyond)


def _forward(options: LossOptions, hidden, head, labels):
    return _logs(options, hidden, head, labels), (hidden, head, labels)


def _backward(options: LossOptions, saved, cotangent):
    """The gradients: `log p` is minus a token's loss, so its weight is the negated cotangent."""
    hidden, head, labels = saved
    weights = jnp.where(labels < 0, 0, -cotangent)
    weights = jnp.where((labels >= head.shape[0]) & (weights != 0), jnp.nan, weights)
    # Each token has its own cotangent, so the forward can't compute the gradients as in `_sum`.
    _, (by_hidden, by_head, _) = sum_and_gradients(options, hidden, head, labels, weights)
    return by_hidden, by_head.astype(head.dtype), None


_logs.defvjp(_forward, _backward)
