"""NEFTune: noise on a decoder's embeddings while it trains (https://arxiv.org/abs/2310.05914)."""

import zlib
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.decoder import Decoder


class EmbeddingNoise(nnx.Module):
    """Uniform noise within alpha / sqrt(length * width); `.eval()` turns it off.

    Attributes:
        alpha: Bound of the noise before the division by sqrt(length * width).
        deterministic: Whether the noise is off.
    """

    def __init__(self, alpha: float, rngs: nnx.Rngs):
        """Keeps the options."""
        self.alpha, self.rngs = alpha, rngs
        self.deterministic = False

    def __call__(self, x: Float[Array, "rows length width"]) -> Float[Array, "rows length width"]:
        """Adds fresh noise, drawn in fp32, in the dtype of the embeddings."""
        if self.deterministic:
            return x
        most = self.alpha / (x.shape[1] * x.shape[2]) ** 0.5
        noise = jax.random.uniform(self.rngs.noise(), x.shape, jnp.float32, -most, most)
        return x + noise.astype(x.dtype)


@overload
def neftune(model: Decoder, *, alpha: float = ..., seed: int = ...) -> Decoder: ...


@overload
def neftune(
    model: Callable[[], nnx.Module], *, alpha: float = ..., seed: int = ...
) -> Callable[[], Decoder]: ...


def neftune(model: Any, *, alpha: float = 5.0, seed: int = 0) -> Any:
    """Adds noise to a decoder's embeddings in training (NEFTune), as Transformers does.

    In each step, each number of the embeddings gets noise that is uniform within
    `alpha / sqrt(length * hidden_size)`, where `length` is the length of the batch's rows with
    padding, also if documents are packed. Each microbatch draws its own noise. There is none in
    evaluations, in generation, and in a model after `.eval()`.

    Args:
        model: A `Decoder`, also one with adapters; it is not modified. Or a function that builds
            one.
        alpha: Size of the noise, such as 5, 10 or 15.
        seed: Seed of the noise. Checkpoints save its place, so a resumed run draws the same.

    Returns:
        The decoder, or a function that builds it. Its parameters keep their paths.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a number is out of range, or the model has noise already.
    """
    alpha = checks.number("alpha", alpha, above=0)
    seed = checks.integer("seed", seed, least=0)

    def noisy(made: Any) -> Decoder:
        if not isinstance(made, Decoder):
            raise TypeError(checks.refused("model", "a models.Decoder", made))
        if made.noise is not None:
            raise ValueError("`model` has noise on its embeddings already")
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"neftune"))
        made.noise = EmbeddingNoise(alpha, nnx.Rngs(noise=key))
        return made

    if isinstance(model, nnx.Module):
        return noisy(nnx.merge(*nnx.split(model), copy=True))
    if not callable(model) or isinstance(model, type):
        allowed = "a models.Decoder or a function that builds one"
        raise TypeError(checks.refused("model", allowed, model))
    return lambda: noisy(model())
