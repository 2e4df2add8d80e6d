"""Means of losses that have one number per example, such as a pair of answers.

An example is a pair, an answer, or a pair of scores. Examples in a batch's padding have weight 0,
and may hold any numbers, even NaN.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from megatrain_jax._src.lm.cross_entropy import REAL, array_of


def columns(given: Mapping[str, Any], mask: Any) -> list[Float[Array, "*examples"]]:
    """Returns arguments with one number per example as arrays in fp32.

    Examples without weight have 0 in all of them: zeros alone don't make gradients NaN.

    Args:
        given: The arguments by name; all have the shape of the first, which is an array of floats.
        mask: See `mean`.

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
    if mask is None:
        return found
    there = _weights(mask, found[0].shape, first) != 0
    return [jnp.where(there, array, 0) for array in found]


def mean(values: Float[Array, "*examples"], mask: Any, count: Any, first: str) -> Float[Array, ""]:
    """Returns the weighted mean of each example's loss; 0 if nothing counts.

    Args:
        values: The loss of each example, from numbers of `columns`.
        mask: Weights of examples, or whether they count; None counts all.
        count: Divisor; None takes the sum of the weights.
        first: Name of the argument with the same shape as `mask`, for errors.

    Raises:
        TypeError: If `mask` has a wrong kind of numbers.
        ValueError: If its shape is wrong.
    """
    weights = _weights(mask, values.shape, first)
    divisor = weights.sum() if count is None else jnp.asarray(count, jnp.float32)
    return jnp.sum(values * weights) / jnp.maximum(divisor, jnp.finfo(jnp.float32).tiny)


def _weights(mask: Any, shape: tuple[int, ...], first: str) -> Float[Array, "*examples"]:
    if mask is None:
        return jnp.ones(shape)
    weights = array_of("mask", mask, "real numbers", *REAL)
    if weights.shape != shape:
        raise ValueError(f"`mask` has shape {weights.shape}, but `{first}` {shape}")
    return weights.astype(jnp.float32)
