"""Checks of array arguments of the models' functions; JAX tracers count as arrays."""

from typing import Any

import jax.numpy as jnp

from megatrain_jax._src.common.checks import refused


def check_array(
    name: str, value: Any, axes: str, *, num_axes: int, of_integers: bool = False
) -> None:
    """Checks that an argument is an array with this number of axes.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        axes: Names of the axes, for the message.
        num_axes: Number of axes.
        of_integers: Whether its numbers must be integers.

    Raises:
        TypeError: If it is not an array, or not of integers where they are required.
        ValueError: If it has a different number of axes.
    """
    what = f"an array {axes}{' of integers' if of_integers else ''}"
    if not (hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "ndim")):
        raise TypeError(refused(name, what, value))
    if of_integers and not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be {what}, but is of {value.dtype}")
    if value.ndim != num_axes:
        raise ValueError(f"`{name}` must be {what}, but has shape {tuple(value.shape)}")


def check_floating(name: str, value: Any) -> None:
    """Checks that an argument is a floating-point dtype.

    Raises:
        TypeError: If it is not.
    """
    try:
        floating = jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise TypeError(refused(name, "a dtype of floating numbers", value))
