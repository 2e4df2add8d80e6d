"""The activations of gated MLPs, by the names that configurations give them."""

from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Array, Float

Activation = Callable[[Float[Array, "..."]], Float[Array, "..."]]
"""A function of single elements."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
