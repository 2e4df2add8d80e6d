"""Trains Mamba-2 of bonsai, unchanged, with the loss that the model itself returns.

    git clone https://github.com/jax-ml/bonsai
    python experiments/repositories/bonsai.py bonsai --steps=5
    python experiments/repositories/bonsai.py bonsai 2.7b --hardware="RTX 4090" --microbatches=8

A configuration is "small", or "2.7b", whose sizes are those of the published Mamba-2 2.7B.
"""

from typing import Any

import numpy as np
import optax
from flax import nnx
from running import Training, main, part

SIZES = {
    "small": {"vocab_size": 256, "hidden_size": 64, "state_size": 16, "head_dim": 16}
    | {"chunk_size": 16, "num_hidden_layers": 4},
    "2.7b": {"hidden_size": 2560, "num_hidden_layers": 64},
}


def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
    """The loss of bonsai's model, with the tokens as labels."""
    return model(batch["tokens"], labels=batch["tokens"])["loss"]


def make(configuration: str, rows: int) -> Training:
    """The training of a configuration."""
    mamba2 = part("bonsai.models.mamba2.modeling")
    config = mamba2.ModelConfig(**SIZES[configuration])
    length = 32 if configuration == "small" else 2048

    def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"tokens": rng.integers(0, config.vocab_size, (rows, length), dtype=np.int32)}

    return Training(
        model=lambda: mamba2.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)),
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-4),
        draw=draw,
    )


if __name__ == "__main__":
    main(__doc__, make, "bonsai")
