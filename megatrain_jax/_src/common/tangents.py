"""Cotangents of integer arrays in derivative rules."""

from typing import Any

import jax
import numpy as np


def float0_cotangents(integers: Any) -> Any:
    """The cotangents of a tree of integer arrays, as a `jax.custom_vjp` has to return them."""
    return jax.tree.map(lambda i: np.zeros(i.shape, jax.dtypes.float0), integers)
