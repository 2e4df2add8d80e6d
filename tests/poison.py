"""A value whose gradient a batch can spoil, where the loss shows nothing, and such batches."""

import jax
import jax.numpy as jnp
import numpy as np

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
