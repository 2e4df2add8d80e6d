"""A value whose gradient a batch can spoil, where the loss shows nothing."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def poisoned(x, poison):
    return x


def _forward(x, poison):
    return x, poison


def _backward(poison, cotangent):
    return cotangent * jnp.mean(poison), jnp.zeros_like(poison)


poisoned.defvjp(_forward, _backward)
