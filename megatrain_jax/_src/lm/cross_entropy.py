"""Losses of language models that never store the logits of all tokens.

With 131,072 tokens and a vocabulary of 152,064, logits alone are 80 GB in fp32. Here they exist for
one chunk of tokens at a time, and their gradient is computed while they exist, so nothing is
computed twice.

Log-probabilities of tokens are computed in the same chunks. Each token has its own cotangent, known
only in backward, so forward can't compute gradients as `next_token` does. A chunk's logits are
computed in forward and again in backward. Backward computes the gradients of `next_token`, with the
negated cotangents as the tokens' weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Shaped

from megatrain_jax import trace_target
from megatrain_jax._src.common import checks

REAL = (jnp.floating, jnp.integer, jnp.bool_)
# Arrays of all tokens, or of one chunk of them.
Hidden = Float[Array, "tokens width"]
Labels = Integer[Array, " tokens"]
PerToken = Float[Array, " tokens"]
Logits = Float[Array, "tokens vocabulary"]
Head = Float[Array, "vocabulary width"]


class LossOptions(NamedTuple):
    """The options of a loss over all logits that are fixed when it is traced."""

    chunk: int
    z_loss: float
    softcap: float | None
    parts: int
    head_dtype: str
    temperature: float


def next_token(
    hidden: Float[Array, "*rows width"],
    head: Float[Array, "vocabulary width"],
    labels: Integer[ArrayLike, "*rows"],
    *,
    mask: Shaped[ArrayLike, "*rows"] | None = None,
    count: Shaped[ArrayLike, ""] | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int = 4096,
) -> Float[Array, ""]:
    """Mean cross-entropy of the labels, from hidden states and the head's weights.

    Products are accumulated, and everything else is computed, in fp32. With gradients, memory in
    addition to the arguments is: one chunk's logits in fp32 and again in the dtype of `hidden`, the
    head's gradient in fp32, and both results.

    Args:
        hidden: Final hidden states, after the last norm, with any float dtype.
        head: The head's weights, or a tied embedding's.
        labels: The token that each position should predict, already shifted. Negative ones, such as
            Hugging Face's -100, do not count. A counted label beyond the vocabulary makes the loss
            and its gradients NaN.
        mask: Weights of labels, or whether they count; None counts all.
        count: Divisor of the sum over the labels; None takes the sum of their weights. If a batch
            is cut into microbatches, whose losses are averaged, the mean over all its labels needs
            the same count in each: the batch's count divided by the number of microbatches.
        z_loss: Weight of the mean squared logarithm of the softmax's denominator, which keeps
            logits from drifting (PaLM, arXiv 2204.02311, section 5).
        softcap: Bounds logits to `softcap * tanh(logits / softcap)`, as Gemma 2 does; above 0.
        chunk: Number of tokens whose logits exist at once, on each device. Larger is faster,
            because each chunk reads and writes the head's gradient.

    Returns:
        The loss in fp32; 0 if nothing counts. It can be differentiated once, by `hidden`
        and `head`.

    Raises:
        TypeError: If an argument has a wrong type, or labels are not integers.
        ValueError: If shapes don't match, or a number is out of range.

    Examples:
        Nothing is known yet: the loss is the logarithm of the vocabulary's size.

        >>> hidden, head = jnp.zeros((2, 3, 8)), jnp.ones((50, 8))
        >>> labels = jnp.array([[4, 0, 49], [7, -100, -100]])
        >>> float(next_token(hidden, head, labels))
        3.912...
    """
    hidden, head, labels = checked_arrays(hidden, head, labels)
    if mask is not None:
        mask = array_of("mask", mask, "real numbers", *REAL)
        if mask.shape != labels.shape:
            raise ValueError(f"`mask` has shape {mask.shape}, but `labels` {labels.shape}")
    if count is not None:
        count = array_of("count", count, "real numbers", *REAL)
        if count.shape:
            raise ValueError(f"`count` must be a scalar, but has shape {count.shape}")
    options = loss_options(head, labels, chunk, softcap, z_loss=z_loss)
    weights = _weights(labels, mask)
    # Such a label has no logit, so its loss would lack the term `- logits[label]`.
    beyond = (labels >= head.shape[0]) & (weights != 0)
    weights = jnp.where(beyond, jnp.nan, weights)
    flat = hidden.reshape(-1, hidden.shape[-1])
    # Divided outside, so that gradients of single tokens are large enough for half precision.
    total: Array = _sum(options, flat, head, labels.reshape(-1), weights.reshape(-1))
    divisor = weights.sum() if count is None else count.astype(jnp.float32)
    return total / jnp.maximum(divisor, jnp.finfo(jnp.float32).tiny)


def num_labels(
    labels: Integer[ArrayLike, "*rows"], mask: Shaped[ArrayLike, "*rows"] | None = None
) -> Float[Array, ""]:
    """Returns the number of labels that count, the default divisor of `next_token`.

    If a loss function returns it as the metric `weight`, its evaluations are weighted by it.

    Args:
        labels: See `next_token`.
        mask: See `next_token`.

    Returns:
        The sum of the labels' weights, in fp32.

    Examples:
        >>> float(num_labels(jnp.array([[4, 0, 49], [7, -100, -100]])))
        4.0
    """
    return _weights(jnp.asarray(labels), mask).sum()


def _weights(
    labels: Integer[Array, "*rows"], mask: Shaped[ArrayLike, "*rows"] | None
) -> Float[Array, "*rows"]:
    """Returns the weight of each label; 0 for negative ones."""
    weights = (labels >= 0).astype(jnp.float32)
    return weights if mask is None else weights * jnp.asarray(mask, jnp.float32)


def checked_arrays(hidden: Any, head: Any, labels: Any) -> tuple[Array, Array, Array]:
    """Returns hidden states, the head's weights and labels as matching arrays.

    Raises:
        TypeError: If an array has a wrong kind of numbers.
        ValueError: If shapes don't match.
    """
    hidden = array_of("hidden", hidden, "floating-point numbers", jnp.floating)
    head = array_of("head", head, "floating-point numbers", jnp.floating)
    labels = array_of("labels", labels, "integers", jnp.integer)
    if labels.dtype.itemsize < 4:  # too few bits to compare vocabulary ids
        labels = labels.astype(jnp.int32)
    if not hidden.ndim or hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"`hidden` has shape {hidden.shape} and `labels` {labels.shape}: they must agree in "
            "all axes but the last one of `hidden`"
        )
    if head.ndim != 2 or head.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"`head` has shape {head.shape}, but must be (vocabulary, {hidden.shape[-1]})"
        )
    return hidden, head, labels


def loss_options(
    head: Array,
    labels: Array,
    chunk: Any,
    softcap: Any,
    *,
    z_loss: Any = 0.0,
    temperature: Any = 1.0,
) -> LossOptions:
    """Returns the options of a loss over some labels, checked.

    Raises:
        TypeError: If one is no number.
        ValueError: If one is out of range.
    """
    num_devices = trace_target().num_devices
    return LossOptions(
        chunk=checks.integer("chunk", chunk),
        z_loss=checks.number("z_loss", z_loss, least=0),
        softcap=None if softcap is None else checks.number("softcap", softcap, above=0),
        # The devices share the tokens, if they can do so equally.
        parts=num_devices if labels.size % num_devices == 0 else 1,
        head_dtype=head.dtype.name,
        temperature=checks.number("temperature", temperature, above=0),
    )


def array_of(name: str, value: Any, what: str, *kinds: Any) -> Array:
    """Returns an argument as an array, or raises a `TypeError` that names it."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(checks.refused(name, f"an array of {what}", value)) from error
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(f"`{name}` must be an array of {what}, but has dtype {array.dtype}")
    return array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(
    options: LossOptions, hidden: Hidden, head: Head, labels: Labels, weights: PerToken
) -> Float[Array, ""]:
    """Sums the weighted losses of all tokens, chunk by chunk."""

    def add(total, rows):
        loss, _ = _chunk(options, head, *rows)
        return total + loss, None

    return scan_chunks(options, add, jnp.float32(0), hidden, labels, weights)[0].sum()


def sum_and_gradients(options: LossOptions, hidden, head, labels, weights):
    """The forward of `_sum`: its result, and the gradients by `hidden` and `head`.

    A chunk's logits are computed once, and everything is derived from them:

        logits = hidden @ head.T
        loss += weight * (log_sum_exp(logits) - logits[label])
        logits_gradient = weight * (softmax(logits) - one_hot(label))
        hidden_gradient = logits_gradient @ head
        head_gradient += logits_gradient.T @ hidden
    """

    def add(carry, rows):
        total, head_gradient = carry
        loss, logits_gradient = _chunk(options, head, *rows)
        logits_gradient = logits_gradient.astype(hidden.dtype)
        # In fp32, because thousands of chunks may be summed; rounded once, at the end.
        head_gradient += _product(logits_gradient, rows[0], 0, 0)
        hidden_gradient = _product(logits_gradient, head, 1, 0).astype(hidden.dtype)
        return (total + loss, head_gradient), hidden_gradient

    start = jnp.float32(0), jnp.zeros(head.shape, jnp.float32)
    sums, hidden_gradient = scan_chunks(options, add, start, hidden, labels, weights)
    total, head_gradient = sums
    # Cast first, so that devices exchange no more bytes than for ordinary gradients. Not to
    # float16: it can't hold a sum over many tokens before the division by their number.
    kept = "float32" if options.head_dtype == "float16" else options.head_dtype
    head_gradient = jax.lax.reduce_sum(head_gradient.astype(kept), axes=(0,))
    return total.sum(), (hidden_gradient, head_gradient, labels)


def scan_chunks(
    options: LossOptions, step: Callable[..., Any], start: Any, *arrays: Shaped[Array, "tokens ..."]
) -> tuple[Any, Any]:
    """Carries a value through chunks of tokens, in equal parts of them, one for each device.

    A device with a part's tokens runs its loop alone, with its own sums, which are added once at
    the end. With 8 tokens on 2 devices, in chunks of 2:

        step    first device     second device
        0       tokens 0, 1      tokens 4, 5
        1       tokens 2, 3      tokens 6, 7

    Args:
        options: The size of a chunk, and the number of parts.
        step: Function of the value and a chunk's arrays; returns the next value, and the results of
            the chunk's tokens, or None.
        start: The value before a part's first chunk.
        *arrays: The tokens' arrays.

    Returns:
        The last value of each part, stacked; and the results of all tokens, or None.
    """

    def of_part(*arrays):
        last, found = jax.lax.scan(step, start, chunked(options.chunk, *arrays))
        found = jax.tree.map(lambda x: _joined(x)[: arrays[0].shape[0]], found)
        return last, found

    if options.parts == 1:
        last, found = jax.tree.map(lambda x: x[None], of_part(*arrays))
    else:
        parts = (x.reshape(options.parts, -1, *x.shape[1:]) for x in arrays)
        last, found = jax.vmap(of_part)(*parts)
    return last, jax.tree.map(_joined, found)


def _joined(x: Shaped[Array, "parts tokens ..."]) -> Shaped[Array, "tokens ..."]:
    return x.reshape(-1, *x.shape[2:])


def _backward(options: LossOptions, gradients, cotangent):
    """The backward of `_sum`: scales the gradients computed by its forward."""
    hidden, head, labels = gradients
    # Gradients are linear in the cotangent, a scalar, so the forward computed them for 1.
    pairs = (hidden, hidden.dtype), (head, options.head_dtype)
    scaled = [(g * cotangent).astype(dtype) for g, dtype in pairs]
    return *scaled, np.zeros(labels.shape, jax.dtypes.float0), None


_sum.defvjp(sum_and_gradients, _backward)


def chunked(chunk: int, *arrays: Shaped[Array, "tokens ..."]) -> list[Array]:
    """Cuts the first axis into equal chunks of at most `chunk`; the last one is padded with zeros.

    For example, 10 tokens in chunks of at most 4 are 3 chunks of 4, padded with 2 zeros; their
    weight is 0 too.
    """
    size = arrays[0].shape[0]
    count = max(1, -(-size // chunk))
    # Chunks of equal size: the last one lacks a few tokens instead of being nearly empty.
    rows = -(-size // count)
    missing = count * rows - size
    if missing:
        arrays = tuple(jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in arrays)
    return [x.reshape(count, rows, *x.shape[1:]) for x in arrays]


class LabelLogits(NamedTuple):
    """A chunk's logits, and the terms of the labels' probabilities.

    Attributes:
        logits: The logits.
        slope: Derivative of the logits by the head's products.
        is_label: Whether each belongs to the label.
        of_label: The label's own logit, 0 if it has none.
        log_sum: The logarithm of the softmax's denominator.
    """

    logits: Logits
    slope: Logits | float
    is_label: Bool[Array, "tokens vocabulary"]
    of_label: PerToken
    log_sum: PerToken


def label_logits(options: LossOptions, head: Head, hidden: Hidden, labels: Labels) -> LabelLogits:
    """Returns a chunk's logits in fp32, with the logits of its labels."""
    logits = _product(hidden, head.astype(hidden.dtype), 1, 1)
    slope = 1.0
    if options.softcap is not None:
        tanh = jnp.tanh(logits / options.softcap)
        logits, slope = options.softcap * tanh, 1 - tanh * tanh
    if options.temperature != 1:
        logits, slope = logits / options.temperature, slope / options.temperature
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    # A comparison instead of a gather: it is fused with the operations that read the logits anyway.
    is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 1) == labels[:, None]
    of_label = jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    return LabelLogits(logits, slope, is_label, of_label, log_sum)


def _chunk(
    options: LossOptions, head: Head, hidden: Hidden, labels: Labels, weights: PerToken
) -> tuple[Float[Array, ""], Logits]:
    """Returns a chunk's contribution to the loss, and its gradient by the logits, in fp32."""
    logits, slope, is_label, of_label, log_sum = label_logits(options, head, hidden, labels)
    losses = log_sum - of_label + options.z_loss * log_sum**2
    probabilities = jnp.exp(logits - log_sum[:, None])
    # The derivative of `log_sum - of_label + z log_sum^2`; that of `log_sum` is the softmax.
    gradient = probabilities * (1 + 2 * options.z_loss * log_sum)[:, None] - is_label
    return jnp.sum(losses * weights), gradient * (slope * weights[:, None])


def _product(
    x: Float[Array, "a b"], y: Float[Array, "c d"], x_axis: int, y_axis: int
) -> Float[Array, "..."]:
    """Returns the matrix product over one axis of each, accumulated in fp32."""
    return jax.lax.dot_general(
        x, y, (((x_axis,), (y_axis,)), ((), ())), preferred_element_type=jnp.float32
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
    options = loss_options(head, labels, chunk, softcap, temperature=temperature)
    flat = hidden.reshape(-1, hidden.shape[-1])
    logs: Array = _logs(options, flat, head, labels.reshape(-1))
    return logs.reshape(labels.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logs(options: LossOptions, hidden: Hidden, head: Head, labels: Labels) -> PerToken:
    """The log-probabilities of all tokens, chunk by chunk."""

    def of_chunk(_: None, rows: Any) -> tuple[None, Array]:
        logits = label_logits(options, head, *rows)
        return None, logits.of_label - logits.log_sum

    _, logs = scan_chunks(options, of_chunk, None, hidden, labels)
    # Such labels have no logit, so `of_label` is 0 and the result would look like a probability.
    beyond = jnp.where(labels >= head.shape[0], jnp.nan, logs)
    return jnp.where(labels < 0, 0, beyond)


def _logs_forward(options: LossOptions, hidden, head, labels):
    return _logs(options, hidden, head, labels), (hidden, head, labels)


def _logs_backward(options: LossOptions, saved, cotangent):
    """The gradients: `log p` is minus a token's loss, so its weight is the negated cotangent."""
    hidden, head, labels = saved
    weights = jnp.where(labels < 0, 0, -cotangent)
    weights = jnp.where((labels >= head.shape[0]) & (weights != 0), jnp.nan, weights)
    # Each token has its own cotangent, so the forward can't compute the gradients as in `_sum`.
    _, (by_hidden, by_head, _) = sum_and_gradients(options, hidden, head, labels, weights)
    return by_hidden, by_head.astype(head.dtype), None


_logs.defvjp(_logs_forward, _logs_backward)
