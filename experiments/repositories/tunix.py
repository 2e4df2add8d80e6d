"""Trains Qwen3 of tunix, unchanged, with tunix's own loss.

    git clone https://github.com/google/tunix
    python experiments/repositories/tunix.py tunix --steps=5
    python experiments/repositories/tunix.py tunix qwen3_8b --hardware="RTX 4090" --microbatches=8

A configuration is "small", or the name of one in `tunix/models/qwen3/model.py`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from running import Training, main, part

SMALL = {"num_layers": 4, "vocab_size": 256, "embed_dim": 64, "hidden_dim": 128}
SMALL |= {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2, "norm_eps": 1e-6, "rope_theta": 10_000}


def model_input(batch: dict[str, Any]) -> dict[str, Any]:
    """What tunix's trainer passes to its loss, from tokens and their mask."""
    utils, mask = part("tunix.sft.utils"), batch["input_mask"]
    positions, attended = utils.build_positions_from_mask(mask), utils.make_causal_attn_mask(mask)
    return {**batch, "positions": positions, "attention_mask": attended}


def loss_fn(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The loss of tunix's `PeftTrainer`; its weight is the number of tokens that count."""
    found = part("tunix.sft.peft_trainer")._default_loss_fn(model, **model_input(batch))
    return found.primary_loss.compute(), {"weight": found.primary_loss.denominator}


def make(configuration: str, rows: int) -> Training:
    """The training of a configuration."""
    qwen3 = part("tunix.models.qwen3.model")
    is_small = configuration == "small"
    config = qwen3.ModelConfig(**SMALL) if is_small else getattr(qwen3.ModelConfig, configuration)()
    # tunix computes in the dtype of its configuration, whatever the parameters' is.
    config.dtype = jnp.float32 if is_small else jnp.bfloat16
    length = 16 if is_small else 2048

    def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
        tokens = rng.integers(0, config.vocab_size, (rows, length), dtype=np.int32)
        lengths = rng.integers(length // 2, length + 1, (rows, 1))
        return {"input_tokens": tokens, "input_mask": np.arange(length) < lengths}

    return Training(
        model=lambda: qwen3.Qwen3(config, rngs=nnx.Rngs(0)),
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-3, eps=1e-3),
        draw=draw,
    )


if __name__ == "__main__":
    main(__doc__, make, "tunix")
