"""A value with a gradient that a batch can spoil, unseen in the loss; batches and a model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import megatrain_jax as mt

WIDTH, EXAMPLES = 8, 4


@jax.custom_vjp
def poisoned(x, poison):
    return x


def _forward(x, poison):
    return x, poison


def _backward(poison, cotangent):
    return cotangent * jnp.mean(poison), jnp.zeros_like(poison)


poisoned.defvjp(_forward, _backward)


def loss_fn(model, batch):
    return ((model(batch["x"], batch["poison"]) - batch["y"][:, None]) ** 2).mean()


def batch(seed, **changes):
    """A batch whose first example has other values in some arrays."""
    rng = np.random.default_rng(seed)
    made = {
        "x": rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32),
        "y": rng.normal(size=EXAMPLES).astype(np.float32),
        "poison": np.ones(EXAMPLES, np.float32),
    }
    for name, value in changes.items():
        made[name][0] = value
    return made


class Spoiled(nnx.Module):
    """Blocks with gradients that a batch can spoil, without statistics of the batch."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))

    def __call__(self, x, poison):
        for layer in self.layers[:2]:
            x = x + nnx.relu(layer(x))
        return self.layers[2](poisoned(x, poison))


def spoiled_trainer(**options: Any) -> mt.Trainer:
    """A trainer of `Spoiled` with one microbatch per example."""
    given: dict[str, Any] = {"precision": mt.Precision(compute=jnp.float32), **options}
    return mt.Trainer(
        lambda: Spoiled(nnx.Rngs(0)),
        loss_fn,
        optax.adamw(1e-2),
        batch(0),
        microbatches=EXAMPLES,
        progress=False,
        **given,
    )
