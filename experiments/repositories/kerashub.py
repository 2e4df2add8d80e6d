"""Trains Llama of KerasHub, unchanged, with a loss of Keras 3.

    pip install keras keras-hub
    python experiments/repositories/kerashub.py --steps=5
    python experiments/repositories/kerashub.py 7b --hardware="RTX 4090" --microbatches=8

A configuration is "small" or "7b".
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
from flax import nnx
from running import Training, main, part

os.environ["KERAS_BACKEND"] = "jax"
SMALL = {"vocabulary_size": 256, "num_layers": 4, "num_query_heads": 4, "num_key_value_heads": 2}
SMALL |= {"hidden_dim": 64, "intermediate_dim": 128}
LARGE = {"vocabulary_size": 32000, "num_layers": 32, "num_query_heads": 32}
LARGE |= {"num_key_value_heads": 32, "hidden_dim": 4096, "intermediate_dim": 11008}


class KerasModel(nnx.Module):
    """Any Keras model as a module of Flax: its variables by path, and its call."""

    def __init__(self, build: Callable[[], Any]):
        """Builds the Keras model."""
        self.model = build()
        trained, others = self.model.trainable_variables, self.model.non_trainable_variables
        self.trained = nnx.Dict({x.path: nnx.Param(x.value) for x in trained})
        self.others = nnx.Dict({x.path: nnx.Variable(x.value) for x in others})

    def __call__(self, inputs: Any) -> Any:
        """The Keras model's outputs, with dropout; it may change variables that aren't trained."""
        trained = [self.trained[x.path][...] for x in self.model.trainable_variables]
        others = [self.others[x.path][...] for x in self.model.non_trainable_variables]
        outputs, changed = self.model.stateless_call(trained, others, inputs, training=True)
        for variable, value in zip(self.model.non_trainable_variables, changed, strict=True):
            self.others[variable.path][...] = value
        return outputs


def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
    """The loss that KerasHub compiles its language models with."""
    loss = part("keras").losses.SparseCategoricalCrossentropy(from_logits=True)
    inputs = {name: batch[name] for name in ("token_ids", "padding_mask")}
    return loss(batch["labels"], model(inputs), batch["padding_mask"])


def make(configuration: str, rows: int) -> Training:
    """The training of a configuration."""
    models, is_small = part("keras_hub").models, configuration == "small"
    sizes, length = (SMALL, 16) if is_small else (LARGE, 2048)
    dtype = "float32" if is_small else "mixed_bfloat16"

    def build() -> Any:
        backbone = models.LlamaBackbone(**sizes, dtype=dtype)
        return models.LlamaCausalLM(backbone, dtype=dtype)

    def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
        tokens = rng.integers(1, sizes["vocabulary_size"], (rows, length + 1), dtype=np.int32)
        mask = np.arange(length) < rng.integers(length // 2, length + 1, (rows, 1))
        return {"token_ids": tokens[:, :-1], "padding_mask": mask, "labels": tokens[:, 1:]}

    return Training(
        model=lambda: KerasModel(build), loss_fn=loss_fn, optimizer=optax.adamw(1e-4), draw=draw
    )


if __name__ == "__main__":
    main(__doc__, make)
