"""Activations of gated MLPs, under the names used in configurations."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Callable[[Float[Array, "..."]], Float[Array, "..."]]
"""An elementwise function."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
