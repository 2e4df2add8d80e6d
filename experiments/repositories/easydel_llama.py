"""Trains Llama of EasyDeL, unchanged, with EasyDeL's own loss.

    pip install easydel
    python experiments/repositories/easydel_llama.py --steps=5
    python experiments/repositories/easydel_llama.py 8b --hardware="RTX 4090" --microbatches=8

A configuration is "small" or "8b".
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from running import Training, main, part

# EasyDeL would set flags for XLA that not every release knows.
os.environ.setdefault("EASYDEL_AUTO", "0")
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LARGE = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048}
LARGE |= {"num_hidden_layers": 32, "rope_theta": 500000.0}


def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
    """The loss of EasyDeL's `training_step`."""
    with model.mesh:
        outputs, _ = model.compute_loss(**batch)
    return outputs.loss


def make(configuration: str, rows: int) -> Training:
    """The training of a configuration."""
    easydel, is_small = part("easydel"), configuration == "small"
    dtype, length = (jnp.float32, 16) if is_small else (jnp.bfloat16, 2048)
    sizes, attention = SMALL if is_small else LARGE, easydel.AttentionMechanisms.VANILLA
    config = easydel.LlamaConfig(**sizes, attn_mechanism=attention, attn_dtype=dtype)
    # One device: more of them share the work by `mt.fit(mesh=...)`.
    names = config.sharding_axis_names
    devices = np.array(jax.devices()[:1]).reshape([1] * len(names))
    config.set_model_mesh(jax.sharding.Mesh(devices, names))

    def build() -> Any:
        return easydel.LlamaForCausalLM(
            config, dtype=dtype, param_dtype=jnp.float32, precision=None, rngs=nnx.Rngs(0)
        )

    def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
        tokens = rng.integers(1, config.vocab_size, (rows, length), dtype=np.int32)
        mask = np.arange(length) < rng.integers(length // 2, length + 1, (rows, 1))
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}

    return Training(model=build, loss_fn=loss_fn, optimizer=optax.adamw(1e-4), draw=draw)


if __name__ == "__main__":
    main(__doc__, make)
