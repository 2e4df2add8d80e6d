"""A small decoder that writes texts, and their probabilities by a plain forward."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megatrain_jax import models
from megatrain_jax._src.lm.models.generation.generation_memory import DecodeForm, GenerationMemory

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rope": models.Rope(dim=8, base=100.0),
    "init_std": 0.4,
}
PROMPTS = [[5, 7, 1], [3], [9, 8, 7, 6, 5, 4], [2, 2]]


def decoder(**changes: Any) -> models.Decoder:
    return models.Decoder(models.DecoderConfig(**(SIZES | changes)), rngs=nnx.Rngs(3))


def plain_log_probs(model: models.Decoder, found: models.Completion, temperature: float = 1.0):
    """The log-probabilities of a completion by one forward over the whole text."""
    ids = np.concatenate([found.prompt_ids, found.ids])[None]
    logits = model(jnp.asarray(ids)).astype(jnp.float32)[0] / temperature
    rows = jax.nn.log_softmax(logits)[len(found.prompt_ids) - 1 : -1]
    return np.take_along_axis(np.asarray(rows), found.ids[:, None], axis=1)[:, 0]


def ids_of(found: list[models.Completion]) -> list[list[int]]:
    return [one.ids.tolist() for one in found]


def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has models be streamed that would fit on the device, with as many pages as possible."""

    def choose(room: GenerationMemory, size: int, wanted: int) -> DecodeForm:
        return DecodeForm(False, wanted, room.pages_of(len(room.pageable)))

    monkeypatch.setattr(GenerationMemory, "choose", choose)
