"""Beam search: a few beams look for the most likely text, by the rules of Transformers.

The beams of a search are neighbouring rows. A step adds a token to each, and keeps the best of all
texts that may follow: one beam may be continued twice, and another not at all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from megatrain_jax._src.common import checks

# The score of a beam that isn't continued yet, as in Transformers.
_NONE = -1e9
EARLY_STOPPING = (False, True, "never")


class FoundTexts(NamedTuple):
    """The best finished texts of searches: as many as beams, best first, one in each row.

    Attributes:
        scores: Their log-probabilities, divided by a power of their lengths.
        ids: Their tokens, without the prompts.
        log_probs: The tokens' log-probabilities.
        lengths: Their numbers of tokens; 0 if there is no text yet.
    """

    scores: Float[Array, " rows"]
    ids: Int[Array, "rows length"]
    log_probs: Float[Array, "rows length"]
    lengths: Int[Array, " rows"]


class Beams(NamedTuple):
    """The texts that are being continued, one in each row.

    Attributes:
        parents: The row whose caches hold the text, before the next step moves them.
        scores: The texts' log-probabilities.
        ids: Their tokens, without the prompts.
        log_probs: The tokens' log-probabilities.
        found: The texts that have ended.
    """

    parents: Int[Array, " rows"]
    scores: Float[Array, " rows"]
    ids: Int[Array, "rows length"]
    log_probs: Float[Array, "rows length"]
    found: FoundTexts


class SearchParams(NamedTuple):
    """The rules of a search.

    Attributes:
        length_penalty: The power of the length that divides a text's log-probability.
        early_stopping: Number of the rule by which a search ends, in `EARLY_STOPPING`.
    """

    length_penalty: Float[Array, ""]
    early_stopping: Int[Array, ""]


def search_params(
    num_beams: Any, length_penalty: Any = 1.0, early_stopping: Any = False
) -> SearchParams | None:
    """Returns the rules of a search, None with one beam; see `models.generate`.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If one is out of range, or there is one beam and a rule of more.
    """
    checks.integer("num_beams", num_beams)
    checks.number("length_penalty", length_penalty)
    if not isinstance(early_stopping, bool):
        checks.word("early_stopping", early_stopping, ["never"], ", True or False")
    if num_beams > 1:
        rule = np.int32(EARLY_STOPPING.index(early_stopping))
        return SearchParams(np.float32(length_penalty), rule)  # type: ignore[arg-type]
    given = {"length_penalty": (length_penalty, 1), "early_stopping": (early_stopping, False)}
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(f"`{name}`={value!r} needs beam search: `num_beams` above 1")
    return None


def empty_beams(parents: np.ndarray, num_beams: int, length: int) -> Any:
    """Returns beams without tokens, on the host.

    Args:
        parents: Number of each row.
        num_beams: Number of beams of a search.
        length: Maximum number of tokens.
    """
    number = len(parents)
    ids, log_probs = np.zeros((number, length), np.int32), np.zeros((number, length), np.float32)
    nothing, none = np.full(number, -np.inf, np.float32), np.zeros(number, np.int32)
    found: Any = FoundTexts(nothing, ids, log_probs, none)  # type: ignore[arg-type]
    # The beams of a search are equal at first, so only one is continued.
    scores = np.where(np.arange(number) % num_beams == 0, 0, _NONE).astype(np.float32)
    return Beams(parents, scores, ids, log_probs, found)  # type: ignore[arg-type]


def continued(
    beams: Beams,
    num_beams: int,
    log_probs: Float[Array, "rows vocab_size"],
    scores: Float[Array, "rows vocab_size"],
    stops: Int[Array, " stops"],
    written: Int[Array, " rows"],
    limits: Int[Array, " rows"],
    params: SearchParams,
) -> tuple[Beams, Int[Array, " rows"], Bool[Array, " rows"]]:
    """Adds a token to each beam.

    Args:
        beams: The beams.
        num_beams: Number of beams of a search.
        log_probs: Log-probabilities of the next tokens.
        scores: The same after `repetition_penalty`.
        stops: Ids that end a text.
        written: Number of tokens of each row.
        limits: Maximum number of tokens of each row.
        params: The rules.

    Returns:
        The beams, their new tokens, and whether the row's search goes on.
    """
    rows, vocab_size = scores.shape
    # Among these are as many as there are beams that end no text.
    number = min(num_beams + len(stops), vocab_size)
    best, tokens = jax.lax.top_k(scores, number)
    totals = (best + beams.scores[:, None]).reshape(-1, num_beams * number)
    ends = (tokens[..., None] == stops).any(-1).reshape(totals.shape)
    tokens, first = tokens.reshape(totals.shape), jnp.arange(0, rows, num_beams)[:, None]

    def extended(at: Array) -> tuple[Array, Array, Array, Array]:
        """Returns texts by their places among the candidates: rows, tokens and histories."""
        parents = (first + at // number).reshape(rows)
        new = jnp.take_along_axis(tokens, at, axis=1).reshape(rows)
        place = jnp.arange(rows), written
        ids = beams.ids[parents].at[place].set(new)
        return parents, new, ids, beams.log_probs[parents].at[place].set(log_probs[parents, new])

    own, at = jax.lax.top_k(jnp.where(ends, -jnp.inf, totals), num_beams)
    parents, new, ids, own_log_probs = extended(at)
    length, limit = (x.reshape(-1, num_beams)[:, :1] for x in (written + 1, limits))
    totals, at = jax.lax.top_k(totals, num_beams)
    ended = jnp.take_along_axis(ends, at, axis=1) | (length >= limit)
    power = length.astype(jnp.float32) ** params.length_penalty
    # A text is better than none, however strong the penalty.
    scores = jnp.where(ended, jnp.nan_to_num(totals / power), -jnp.inf).reshape(rows)
    last = FoundTexts(scores, *extended(at)[2:], written + 1)

    def by_search(x: Array) -> Array:
        return x.reshape(-1, num_beams, *x.shape[1:])

    # The best ones of those found before and now.
    both = jax.tree.map(lambda *x: jnp.concatenate([*map(by_search, x)], axis=1), beams.found, last)
    kept = jax.lax.top_k(both.scores, num_beams)[1]
    found = jax.tree.map(lambda x: jax.vmap(lambda x, at: x[at])(x, kept), both)
    is_early, is_never = (params.early_stopping == EARLY_STOPPING.index(x) for x in (True, "never"))
    longest = jnp.where(is_never & (params.length_penalty > 0), limit, length)
    possible = jnp.nan_to_num(own[:, :1] / longest.astype(jnp.float32) ** params.length_penalty)
    going = (length < limit) & (possible > found.scores.min(axis=1, keepdims=True))
    going &= ~(is_early & (found.lengths > 0).all(axis=1, keepdims=True))
    going = jnp.broadcast_to(going, own.shape).reshape(rows)
    found = jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), found)
    return Beams(parents, own.reshape(rows), ids, own_log_probs, found), new, going
