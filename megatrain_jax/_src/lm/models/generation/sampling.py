"""The choice of each next token: greedy, or drawn after Transformers' warpers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from megatrain_jax._src.common import checks


def check_restriction(top_p: Any, top_k: Any) -> None:
    """Checks `top_p` and `top_k`; see `models.generate`.

    Raises:
        TypeError: If one is no number.
        ValueError: If one is out of range.
    """
    if checks.number("top_p", top_p, above=0) > 1:
        raise ValueError(checks.refused("top_p", "at most 1", top_p))
    if top_k is not None:
        checks.integer("top_k", top_k, least=0, other=", or None")


@dataclass(frozen=True, kw_only=True)
class SamplingKind:
    """The parts of sampling that are compiled in.

    Attributes:
        greedy: Whether the most likely token is taken.
        top_k: Number of tokens that can be drawn; None for all.
        has_top_p: Whether tokens outside the nucleus are left out.
    """

    greedy: bool
    top_k: int | None
    has_top_p: bool


class SamplingParams(NamedTuple):
    """The parts of sampling that may change without a compilation.

    Attributes:
        temperature: Divisor of the logits.
        top_p: Probability of the nucleus.
        key: The key of all draws.
    """

    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    key: Array


class SampledTokens(NamedTuple):
    """The next token of each row.

    Attributes:
        tokens: The tokens (rows,).
        log_probs: Their log-probabilities by the logits (rows,), in fp32.
        tempered_log_probs: The same by the logits divided by the temperature.
        drawn_log_probs: Their log-probabilities in the distribution that they are drawn from.
    """

    tokens: Int[Array, " rows"]
    log_probs: Float[Array, " rows"]
    tempered_log_probs: Float[Array, " rows"]
    drawn_log_probs: Float[Array, " rows"]


def choose(
    logits: Float[Array, "rows vocab_size"],
    sampling_params: SamplingParams,
    draws: tuple[Int[Array, " rows"], ...],
    sampling_kind: SamplingKind,
) -> SampledTokens:
    """Chooses the next token of each row.

    Args:
        logits: The logits.
        sampling_params: Temperature, nucleus and key.
        draws: For each row, the numbers that identify its draw; they are folded into the key. So a
            draw doesn't depend on the rows beside it.
        sampling_kind: The kind of sampling.
    """
    logits = logits.astype(jnp.float32)
    plain = jax.nn.log_softmax(logits, axis=-1)
    if sampling_kind.greedy:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        found = _at(plain, tokens)
        return SampledTokens(tokens, found, found, found)
    warped = jax.nn.log_softmax(warp(logits, sampling_params, sampling_kind), axis=-1)

    def draw(row: Array, *numbers: Array) -> Array:
        key = sampling_params.key
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return jax.random.categorical(key, row)

    tokens = jax.vmap(draw)(warped, *draws).astype(jnp.int32)
    tempered = jax.nn.log_softmax(logits / sampling_params.temperature, axis=-1)
    return SampledTokens(tokens, *(_at(x, tokens) for x in (plain, tempered, warped)))


def warp(
    logits: Float[Array, "rows vocab_size"],
    sampling_params: SamplingParams,
    sampling_kind: SamplingKind,
) -> Float[Array, "rows vocab_size"]:
    """Returns the logits of the distribution that is drawn from: temperature, top-k, then top-p.

    The order and the rules for ties are those of Transformers.
    """
    scores = logits / sampling_params.temperature
    if sampling_kind.top_k is not None and sampling_kind.top_k < scores.shape[-1]:
        least = jax.lax.top_k(scores, sampling_kind.top_k)[0][:, -1:]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    if not sampling_kind.has_top_p:
        return scores
    order = jnp.argsort(scores, axis=-1)
    ascending = jnp.take_along_axis(scores, order, axis=-1)
    sums = jnp.cumsum(jax.nn.softmax(ascending, axis=-1), axis=-1)
    # The most likely token always stays.
    removed = (sums <= 1 - sampling_params.top_p).at[:, -1].set(False)
    kept = jnp.where(removed, -jnp.inf, ascending)
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)


def _at(values: Float[Array, "rows vocab_size"], tokens: Int[Array, " rows"]) -> Array:
    return jnp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]
