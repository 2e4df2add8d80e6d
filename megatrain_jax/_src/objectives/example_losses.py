"""Means of losses that have one number per example, such as a pair of answers.

An example is a pair, an answer, or a pair of scores. Examples in a batch's padding have weight 0,
and may hold any numbers, even NaN.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from megatrain_jax._src.cross_entropy import REAL, array_of


def columns(given: Mapping[str, Any]) -> list[Float[Array, "*examples"]]:
    """Returns arguments with one number per example as arrays in fp32.

    Args:
        given: The arguments by name; all have the shape of the first, which is an array of floats.

    Raises:
        TypeError: If one has a wrong kind of numbers.
        ValueError: If a shape differs from the first.
    """
    first = next(iter(given))
    found: list[Array] = []
    for name, value in given.items():
        if name == first:
            array = array_of(name, value, "floating-point numbers", jnp.floating)
        else:
            array = array_of(name, value, "real numbers", *REAL)
        if found and array.shape != found[0].shape:
            raise ValueError(f"`{name}` has shape {array.shape}, but `{first}` {found[0].shape}")
        found.append(array.astype(jnp.float32))
    return found


def mean(values: Float[Array, "*examples"], mask: Any, count: Any, first: str) -> Float[Array, ""]:
    """Returns the weighted mean of each example's loss; 0 if nothing counts.

    Args:
        values: The loss of each example.
        mask: Weights of examples, or whether they count; None counts all.
        count: Divisor; None takes the sum of the weights.
        first: Name of the argument with the same shape as `mask`, for errors.

    Raises:
        TypeError: If `mask` has a wrong kind of numbers.
        ValueError: If its shape is wrong.
    """
    weights = (
        jnp.ones(values.shape) if mask is None else array_of("mask", mask, "real numbers", *REAL)
    )
    if weights.shape != values.shape:
        raise ValueError(f"`mask` has shape {weights.shape}, but `{first}` {values.shape}")
    weights = weights.astype(jnp.float32)
    divisor = weights.sum() if count is None else jnp.asarray(count, jnp.float32)
    # Values of examples that don't exist may be anything, even NaN.
    values = jnp.where(weights != 0, values, 0)
    return jnp.sum(values * weights) / jnp.maximum(divisor, jnp.finfo(jnp.float32).tiny)
