"""Small layers, with batches so large that activations are most of a step's memory."""

import jax.numpy as jnp
import numpy as np

WIDTH, ROWS = 16, 4096


def layers(params, batch):
    """A loss of layers of tanh."""
    x = batch["x"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    return (x**2).mean()


def make_params(num_layers=12):
    """Random parameters of `layers`."""
    rng = np.random.default_rng(0)
    draw = lambda: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4  # noqa: E731
    return {"layers": [{"w": draw()} for _ in range(num_layers)]}


BATCH = {"x": np.ones((ROWS, WIDTH), np.float32)}


def wide_layers(params, batch):
    """Layers whose second product takes far longer, for its bytes, than their first."""
    x = batch["x"]
    for layer in params["layers"]:
        x = x + jnp.tanh(jnp.tanh(x @ layer["up"]) @ layer["up"].T)
    return (x**2).mean()
