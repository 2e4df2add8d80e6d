"""The next token of each row, for the samples of a streamed model."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from megatrain_jax._src.common import checks

Logits = Callable[[Any, Mapping[str, Any]], jax.Array]


def decoder_logits(model: Any, batch: Mapping[str, Any]) -> jax.Array:
    """The logits of a `models.Decoder`, (rows, vocabulary), at the last token of each row.

    Raises:
        TypeError: If the model has no method for this.
    """
    if not hasattr(model, "logits_at"):
        allowed = "a function (model, batch) -> logits for a model that is no models.Decoder"
        raise TypeError(checks.refused("logits", allowed, None))
    return model.logits_at(batch["tokens"], batch["last"])


def choose(logits: jax.Array, temperatures: ArrayLike, draws: ArrayLike) -> jax.Array:
    """The next token of each row: the most likely one, or one drawn from the distribution.

    A draw u in [0, 1) selects the first token at which cumulative probabilities reach 1 - u. With
    the probabilities 0.25, 0 and 0.75, a draw of 0.8 selects token 0, and a draw of 0.7 token 2.

    Args:
        logits: The logits, (rows, vocabulary).
        temperatures: Divisors of the logits, (rows,); 0 for the most likely token.
        draws: Numbers drawn from [0, 1), (rows,).

    Returns:
        Integers (rows,).
    """
    logits = logits.astype(jnp.float32)
    temperatures = jnp.asarray(temperatures)[:, None]
    scaled = logits / jnp.where(temperatures > 0, temperatures, 1)
    sums = jnp.cumsum(jax.nn.softmax(scaled, axis=-1), axis=-1)
    # Scaled by the actual sum instead of 1, so some token always reaches it.
    wanted = (1 - jnp.asarray(draws)[:, None]) * sums[:, -1:]
    drawn = (sums >= wanted).argmax(-1)
    return jnp.where(temperatures[:, 0] > 0, drawn, logits.argmax(-1))


def next_tokens_by(logits: Logits) -> Callable[..., jax.Array]:
    """A function for `Trainer.predict` that returns the next token of each row.

    Args:
        logits: Function that returns logits of the batch, (rows, length, vocabulary), or only the
            logits at `last`, (rows, vocabulary).
    """

    def next_tokens(model: Any, batch: Mapping[str, Any]) -> jax.Array:
        found = logits(model, batch)
        rows, length = batch["tokens"].shape
        shape = getattr(found, "shape", None)
        if shape is None or (shape[:-1] != (rows,) and shape[:-1] != (rows, length)):
            allowed = f"({rows}, {length}, vocabulary) or, at `last`, ({rows}, vocabulary)"
            given = f"shape {shape}" if shape is not None else type(found).__name__
            raise ValueError(f"`logits` must return an array of shape {allowed}, but gave {given}")
        if len(shape) == 3:
            found = jnp.take_along_axis(found, batch["last"][:, None, None], axis=1)[:, 0]
        return choose(found, batch["temperatures"], batch["draws"])

    return next_tokens
