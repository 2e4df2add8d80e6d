"""The configurations of released checkpoints, as they are on the Hugging Face Hub."""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from megatrain_jax._src.lm.models.decoder_options import ParameterMaker
from megatrain_jax._src.lm.models.layers import Layer
from megatrain_jax.models import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Published:
    """A released checkpoint's configuration.

    Attributes:
        source: The address of its `config.json`.
        config: The fields.
        millions: Its number of parameters, in millions.
        ignore: Fields that have to be ignored.
        note: How the number was counted, or which checkpoint it is; for readers.
    """

    source: str
    config: dict[str, Any]
    millions: int
    ignore: list[str]
    note: str = ""

    def __post_init__(self) -> None:
        assert self.source.startswith("https://huggingface.co/") and self.millions > 0
        assert "model_type" in self.config


def _read() -> dict[str, Published]:
    table = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return {name: Published(**entry) for name, entry in table.items()}


PUBLISHED = _read()


def num_parameters(config: DecoderConfig) -> int:
    """The number of parameters of a decoder, of which a layer of each kind is counted."""
    layer = config.layer or Layer
    sparse = config.experts.layers if config.experts else ()

    shared = getattr(config.options, "first_shared", config.num_layers)

    @functools.cache
    def size(module: Any, *number: int) -> int:
        def make() -> nnx.Module:
            return module(config, *number, ParameterMaker(nnx.Rngs(0), jnp.float32, 0.0))

        state = nnx.state(nnx.eval_shape(make), nnx.Param)
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))

    numbers = range(config.num_layers)
    linear, indexed = (getattr(config.options, name, ()) for name in ("layers", "indexed"))
    kinds = [
        (i in sparse, i in linear, i in indexed, i < shared, config.window(i), config.rope_of(i))
        for i in numbers
    ]
    total = sum(size(layer, kinds.index(kind)) for kind in kinds)
    total += size(config.memory) if config.memory else 0
    head = config.vocab_size * (config.hidden_size + config.head_bias)
    total += config.vocab_size * config.hidden_size + (0 if config.tie_embeddings else head)
    biased = config.norm == "layer" and config.norm_bias
    return total + config.hidden_size * (2 if biased else 1)
