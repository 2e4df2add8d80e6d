"""The codecs that a run's precision asks for: how each master and each state array is held."""

import jax.numpy as jnp

from megatrain_jax._src.build.precision import Precision
from megatrain_jax._src.program.optimizer.trace import StateLeaf
from megatrain_jax._src.state.codec import Plain, Rounded


def master_codec(precision: Precision) -> Plain:
    """The codec of a trained parameter."""
    if precision.master == precision.update:
        return Plain()
    return _rounded(precision)


def state_codec(precision: Precision, leaf: StateLeaf) -> Plain:
    """The codec of an array of optimizer state: only one that mirrors a parameter is coded."""
    if precision.state is None or leaf.mirrors is None or leaf.dtype != jnp.float32:
        return Plain()
    return _rounded(precision)


def _rounded(precision: Precision) -> Rounded:
    return Rounded(dtype="bfloat16", stochastic=precision.rounding == "stochastic")
