"""Reward models: decoders with a score of each token in place of logits.

A conversation's score is that of its last token, as in the classes for sequence classification of
Transformers, which load an exported reward model.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.decoder import Decoder
from megatrain_jax._src.lm.models.families.registry import AS_SCORES, scorer_of
from megatrain_jax._src.lm.models.names import family_of
from megatrain_jax._src.lm.models.pretrained import Pretrained, with_config


def reward_model(
    pretrained: Pretrained, *, pad_token_id: int | None = None, seed: int = 0
) -> Pretrained:
    """Returns a checkpoint's decoder with a score head in place of its language-model head.

    The head is a fresh matrix (1, hidden_size), the parameter `score/weight`. `save_pretrained`
    writes a folder that Transformers' `AutoModelForSequenceClassification` loads, and
    `load_pretrained` reads again, with its head.

    Args:
        pretrained: The checkpoint; a score head that it has already is kept.
        pad_token_id: The padding token, without a score; None for the one in `config.json`.
            Transformers needs one for batches of several rows.
        seed: Seed of the fresh head.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If Transformers has no such class for the family, or the token is out of range.
    """
    if not isinstance(pretrained, Pretrained):
        raise TypeError(checks.refused("pretrained", "of load_pretrained", pretrained))
    config, seed = pretrained.config, checks.integer("seed", seed, least=0)
    scorer = scorer_of(family_of(config))
    if scorer is None:
        raise ValueError(
            f"`pretrained` is a {config.family}, for which Transformers has no class for sequence "
            "classification that would load the result"
        )
    original = json.loads(config.original or "{}")
    if pad_token_id is not None:
        most = config.vocab_size - 1
        pad_token_id = checks.integer("pad_token_id", pad_token_id, least=0, most=most)
        original["pad_token_id"] = pad_token_id
    original |= {
        "architectures": [scorer],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    params = {name: tree for name, tree in pretrained.params.items() if name != "lm_head"}
    if not config.scores:
        draws = np.random.default_rng(seed).normal(0, config.init_std, (1, config.hidden_size))
        params["score"] = {"weight": draws.astype(np.float32)}
    config = replace(config, **AS_SCORES, original=json.dumps(original))
    return with_config(replace(pretrained, params=params), config)


def conversation_scores(
    model: Decoder, batch: Mapping[str, Any], *, segments: int
) -> Float[Array, "rows segments"]:
    """The score of each conversation in a packed batch: that of its last token.

    Padding tokens at a conversation's end are skipped, as in Transformers: if the tokenizer pads
    with the token that ends turns, the last token is the one before.

    Args:
        model: A decoder of `reward_model`.
        batch: `tokens`, `segments` and `positions`, as made by `megatrain_jax.data`.
        segments: Maximum number of conversations in a row.

    Returns:
        The scores in fp32. For a segment that a row doesn't have, it is a score of another token.

    Raises:
        ValueError: If the model has no score head.
    """
    if not model.config.scores:
        raise ValueError("`model` has no score head; models.reward_model adds one")
    tokens, numbers = jnp.asarray(batch["tokens"]), jnp.asarray(batch["segments"])
    hidden, _ = model.hidden(tokens, batch["positions"], numbers)
    pad = json.loads(model.config.original or "{}").get("pad_token_id")
    belongs = numbers[:, :, None] == 1 + jnp.arange(segments)
    scored = belongs if pad is None else belongs & (tokens != pad)[:, :, None]
    places = jnp.arange(tokens.shape[1])[None, :, None]
    # A conversation of nothing but padding tokens has the score of its first.
    first = jnp.min(jnp.where(belongs, places, tokens.shape[1] - 1), axis=1)
    last = jnp.maximum(jnp.max(jnp.where(scored, places, 0), axis=1), first)
    of_last = jnp.take_along_axis(hidden, last[:, :, None], axis=1)
    return jax.lax.dot_general(
        of_last,
        model.head_weight()[0].astype(of_last.dtype),
        (((2,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
