"""Trains Llama of Levanter, unchanged: named arrays of Haliax, and layers that are stacked.

    git clone https://github.com/marin-community/levanter
    python experiments/repositories/levanter.py levanter/src --steps=5
    python experiments/repositories/levanter.py levanter/src 7b --hardware="RTX 4090"

A configuration is "small", or "7b", the default of Levanter's `LlamaConfig`.
"""

from typing import Any

import jax
import numpy as np
import optax
from running import Training, main, part

SMALL = {"seq_len": 16, "hidden_dim": 64, "intermediate_dim": 128, "num_layers": 4}
SMALL |= {"num_heads": 4, "num_kv_heads": 2}
VOCABULARY = {"small": 256, "7b": 32000}


def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
    """The loss of Levanter's `train_lm`, of tokens without names of axes."""

    def mean(losses: Any, where: Any, axis: Any) -> Any:
        # Levanter's mask is a float, which newer releases of JAX refuse.
        return hax.mean(losses, axis, where=where.astype(bool))

    hax, models = part("haliax"), part("levanter.models.lm_model")
    rows = hax.Axis("batch", len(batch["tokens"]))
    tokens = hax.named(batch["tokens"], (rows, model.Pos))
    examples = hax.vmap(models.LmExample.causal, rows)(tokens)
    return models.compute_next_token_loss(model, examples, reduction=mean).scalar()


def make(configuration: str, rows: int) -> Training:
    """The training of a configuration."""
    llama, hax = part("levanter.models.llama"), part("haliax")
    config = llama.LlamaConfig(**SMALL if configuration == "small" else {})
    words = hax.Axis("vocab", VOCABULARY[configuration])

    def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"tokens": rng.integers(0, words.size, (rows, config.seq_len), dtype=np.int32)}

    return Training(
        model=lambda: llama.LlamaLMHeadModel.init(words, config, key=jax.random.key(0)),
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-4),
        draw=draw,
    )


if __name__ == "__main__":
    main(__doc__, make, "levanter")
