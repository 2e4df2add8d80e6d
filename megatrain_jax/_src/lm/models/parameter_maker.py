"""Makes a decoder's parameters, all in one dtype and from one source of random numbers."""

import jax
import jax.numpy as jnp
from flax import nnx


class ParameterMaker:
    """Makes parameters; shared by all layers of a model."""

    def __init__(self, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike, std: float):
        """Keeps the random keys, the dtype and the standard deviation of fresh weights."""
        self.rngs, self.dtype = rngs, dtype
        self.normal = nnx.initializers.normal(std)

    def key(self) -> jax.Array:
        """Returns the key that `rngs.params()` would return, and advances its count.

        That call looks up the sharding of its count. A traced count has none, and JAX then walks
        all equations so far for the error message: quadratic in the number of parameters.
        """
        stream = self.rngs.params
        key = jax.random.fold_in(stream.key[...], stream.count[...])
        stream.count.set_value(stream.count[...] + 1)
        return key

    def weight(self, *shape: int) -> nnx.Param[jax.Array]:
        """Returns a parameter with normally distributed numbers."""
        return nnx.Param(self.normal(self.key(), shape, self.dtype))

    def constant(self, value: float, *shape: int) -> nnx.Param[jax.Array]:
        """Returns a parameter filled with one number."""
        return nnx.Param(jnp.full(shape, value, self.dtype))
