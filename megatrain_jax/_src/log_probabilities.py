"""Log-probabilities of single tokens without the logits of all, and what preferences make of them.

Their gradients, unlike those of a sum, are wanted by token and known in backward only. So a chunk's
logits are made once in forward and once more in backward, which is `next_token`'s with the tokens'
own gradients for weights.
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
    """Logarithm of each label's probability, from hidden states and the head's weights.

    Products are accumulated, and everything else is computed, in fp32. Memory is that of
    `next_token`; with gradients, each logit is computed twice.

    Args:
        hidden: Final hidden states, after the last norm, of any float dtype.
        head: The head's weights, or a tied embedding's.
        labels: The token that each position should predict, already shifted. Of negative ones, as
            Hugging Face's -100, the result is 0; of one beyond the vocabulary it is NaN.
        softcap: Bounds logits to `softcap * tanh(logits / softcap)`, as Gemma 2 does; above 0.
        chunk: Number of tokens whose logits exist at once, on each device.

    Returns:
        The logarithms in fp32. They can be differentiated once, by `hidden` and `head`.

    Raises:
        TypeError: If an argument is of another kind, or labels are no integers.
        ValueError: If shapes don't fit together, or a number is out of its range.

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
        chosen: Logarithm of the probability of each pair's chosen answer, as the model has it: the
            sum of its tokens' `log_probabilities`.
        rejected: That of its rejected answer.
        reference_chosen: That of the chosen answer, as the model had it before training. No
            gradient goes there.
        reference_rejected: That of the rejected answer.
        beta: How much the model is held to the reference; above 0.
        mask: Weights of pairs, or whether they count; None counts all.
        count: Divisor of the sum over pairs; None takes the sum of their weights. See `next_token`.

    Returns:
        The loss in fp32; 0 if nothing counts.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If shapes don't agree, or `beta` is out of its range.

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
    # Numbers of pairs that aren't there may be anything, NaN too.
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
    """The logarithms of all tokens, chunk by chunk."""

    def of_part(*arrays: Array) -> Array:
        def of_chunk(rows: Any) -> Array:
            logits = label_logits(options, head, *rows)
            return logits.of_label - logits.log_sum

        logs = jax.lax.map(of_chunk, tuple(chunked(options.chunk, *arrays)))
        return logs.reshape(-1)[: arrays[0].shape[0]]

    logs = of_parts(options.parts, of_part, hidden, labels).reshape(-1)
    # No logit is theirs, so that `of_label` is 0 and the result would look like a probability.
    beyond = jnp.where(labels >= head.shape[0], jnp.nan, logs)
    return jnp.where(labels < 0, 0, beyond)


def _forward(options: LossOptions, hidden, head, labels):
    return _logs(options, hidden, head, labels), (hidden, head, labels)


def _backward(options: LossOptions, saved, cotangent):
    """The gradients: a token's `log p` is minus its loss, weighed by what comes back to it."""
    hidden, head, labels = saved
    weights = jnp.where(labels < 0, 0, -cotangent)
    weights = jnp.where((labels >= head.shape[0]) & (weights != 0), jnp.nan, weights)
    # A cotangent for each token, so the gradients can't be taken in the forward as `_sum` does.
    _, (by_hidden, by_head, _) = sum_and_gradients(options, hidden, head, labels, weights)
    return by_hidden, by_head, None


_logs.defvjp(_forward, _backward)
