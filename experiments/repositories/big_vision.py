"""Trains a ViT of big_vision, unchanged, with big_vision's own loss and optimizer.

    git clone https://github.com/google-research/big_vision
    python experiments/repositories/big_vision.py big_vision --steps=5
    python experiments/repositories/big_vision.py big_vision G/14 --hardware="RTX 4090"

A configuration is "small", or a variant in `big_vision/models/vit.py`.
"""

from typing import Any

import jax
import numpy as np
from running import Training, main, part

# As in the repository's configurations.
OPTIMIZER = {"optax_name": "scale_by_adam", "optax": {}, "grad_clip_norm": 1.0, "lr": 1e-3}
OPTIMIZER |= {"wd": 1e-4, "schedule": {"warmup_steps": 2, "decay_type": "cosine"}}
CLASSES = 1000
STEPS = 1000


def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
    """The loss of big_vision's `train.py`."""
    logits, _ = model(batch["image"], train=True)
    return part("big_vision.utils").sigmoid_xent(logits=logits, labels=batch["labels"])


def make(configuration: str, rows: int) -> Training:
    """The training of a configuration."""
    vit, config_dict = part("big_vision.models.vit"), part("ml_collections").ConfigDict
    is_small = configuration == "small"
    kind = {"variant": "mu/8", "depth": 4} if is_small else {"variant": configuration}
    dtype = "float32" if is_small else "bfloat16"
    model = vit.Model(CLASSES, **kind, dtype_mm=dtype)
    size = 32 if is_small else 224

    def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
        labels = np.eye(CLASSES, dtype=np.float32)[rng.integers(0, CLASSES, rows)]
        return {
            "image": rng.uniform(-1, 1, (rows, size, size, 3)).astype(np.float32),
            "labels": labels,
        }

    image = jax.ShapeDtypeStruct((rows, size, size, 3), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
    schedule = {"total_steps": STEPS, "batch_size": rows, "data_size": rows}
    optimizer, _ = part("big_vision.optax").make(config_dict(OPTIMIZER), shapes, sched_kw=schedule)
    return Training(model=model, loss_fn=loss_fn, optimizer=optimizer, draw=draw)


if __name__ == "__main__":
    main(__doc__, make, "big_vision")
