"""A model of somebody else: the Vision Transformer of Equimo, which is written in Equinox.

Nothing of it is changed or known to the library (`pip install equimo`).
"""

# Equimo is no dependency of this repository.
# pyright: reportMissingImports=false

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from shapes import Shape

_PATCH = 14
_KEY = 0


def builder(shape: Shape) -> Callable[[], Any]:
    """Returns a function that builds the model: `seq_len` patches of 14 × 14, a class token."""
    from equimo.models.vit import VisionTransformer

    return lambda: VisionTransformer(
        img_size=_side(shape),
        in_channels=3,
        dim=shape.dim,
        patch_size=_PATCH,
        num_heads=[shape.num_heads],
        depths=[shape.num_layers],
        mlp_ratio=shape.mlp_dim / shape.dim,
        reg_tokens=0,
        num_classes=shape.vocab_size,
        key=jax.random.key(_KEY),
    )


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy of the images' classes, in nats; nothing is dropped."""
    key = jax.random.key(_KEY)
    images = batch["images"].astype(model.cls_token.dtype)
    logits = jax.vmap(lambda image: model(image, key=key, inference=True))(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch["classes"]
    )
    return losses.mean()


def random_batch(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """Returns random images, [batch, 3, side, side] in fp32, and random classes."""
    rng = np.random.default_rng(seed)
    side = _side(shape)
    size = (shape.batch_size, 3, side, side)
    return {
        "images": rng.standard_normal(size, dtype=np.float32),
        "classes": rng.integers(0, shape.vocab_size, shape.batch_size, dtype=np.int32),
    }


def _side(shape: Shape) -> int:
    """The width and height of an image in pixels."""
    patches = math.isqrt(shape.seq_len)
    if patches**2 != shape.seq_len:
        raise ValueError(f"seq_len of a ViT is a square number of patches, not {shape.seq_len}")
    return patches * _PATCH
