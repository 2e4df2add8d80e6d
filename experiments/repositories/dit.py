"""Trains a diffusion transformer of jax-diffusion-transformer, unchanged.

    git clone https://github.com/kvfrans/jax-diffusion-transformer
    python experiments/repositories/dit.py jax-diffusion-transformer --steps=5
    python experiments/repositories/dit.py jax-diffusion-transformer XL/2 --hardware="RTX 4090"

A configuration is "small", "B/2", "L/2" or "XL/2", which the repository's README lists.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from running import Training, main, part

# Width, layers, heads.
SIZES = {"small": (64, 4, 4), "B/2": (768, 12, 12), "L/2": (1024, 24, 16), "XL/2": (1152, 28, 16)}
CLASSES = 1000
TIMESTEPS = 500


def definition(configuration: str) -> Any:
    """The module of a configuration."""
    width, depth, heads = SIZES[configuration]
    return part("diffusion_transformer").DiT(
        patch_size=2,
        hidden_size=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=4,
        class_dropout_prob=0.1,
        num_classes=CLASSES,
    )


def make(configuration: str, rows: int) -> Training:
    """The training of a configuration."""
    model = definition(configuration)
    scheduler = part("schedulers").GaussianDiffusion(TIMESTEPS)
    size = 8 if configuration == "small" else 32

    def loss_fn(params: Any, batch: dict[str, Any], rng: jax.Array) -> jax.Array:
        """The loss inside of the repository's `DiffusionTrainer.update`, with its keys."""
        _, label_key, time_key, noise_key = jax.random.split(rng, 4)
        images = batch["images"]
        times = jax.random.randint(time_key, (len(images),), 0, TIMESTEPS)
        noise = jax.random.normal(noise_key, images.shape)
        noisy = scheduler.q_sample(images, times, noise)
        found = model.apply(
            {"params": params},
            noisy,
            times,
            batch["labels"],
            train=True,
            rngs={"label_dropout": label_key},
        )
        return jnp.mean((found - noise) ** 2)

    def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
        images = rng.normal(size=(rows, size, size, 4)).astype(np.float32)
        return {"images": images, "labels": rng.integers(0, CLASSES, rows, dtype=np.int32)}

    def build() -> Any:
        """The parameters, as the repository initialises them."""
        params, dropout = jax.random.split(jax.random.key(0))
        keys = {"params": params, "label_dropout": dropout}
        image, number = jnp.zeros((1, size, size, 4)), jnp.zeros(1, jnp.int32)
        return model.init(keys, image, number, number)["params"]

    return Training(
        model=build,
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-4, b1=0.9, b2=0.99),
        draw=draw,
        options={"ema_decay": 0.9999},
    )


if __name__ == "__main__":
    main(__doc__, make, "diffusion_transformer")
