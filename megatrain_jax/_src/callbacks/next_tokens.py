"""Computes the next token of each row by an evaluation, because streamed models return no logits.

`samples.py` calls this. An evaluation returns means of scalar metrics over its microbatches. So
each row's token is a metric of its own, with the value 0 in microbatches without the row. The
metric "weight" counts microbatches: a mean times "weight" is the token.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from megatrain_jax import Trainer
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


def next_tokens_loss(logits: Logits, num_rows: int) -> Callable[..., Any]:
    """A `loss_fn` for `Trainer.evaluate` that returns the next token of each row as metrics.

    Args:
        logits: Function that returns logits of the batch, (rows, length, vocabulary), or only the
            logits at `last`, (rows, vocabulary).
        num_rows: Number of rows with tokens to return; their numbers, from 0, are in `row`.
    """

    def next_tokens(model: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        found = logits(model, batch)
        rows, length = batch["tokens"].shape
        shape = getattr(found, "shape", None)
        if shape is None or (shape[:-1] != (rows,) and shape[:-1] != (rows, length)):
            allowed = f"({rows}, {length}, vocabulary) or, at `last`, ({rows}, vocabulary)"
            given = f"shape {shape}" if shape is not None else type(found).__name__
            raise ValueError(f"`logits` must return an array of shape {allowed}, but gave {given}")
        if len(shape) == 3:
            found = jnp.take_along_axis(found, batch["last"][:, None, None], axis=1)[:, 0]
        tokens = choose(found, batch["temperatures"], batch["draws"])
        # Each row is in one microbatch; only the first process's rows count.
        each = {f"row {k}": jnp.where(batch["row"] == k, tokens, 0).sum() for k in range(num_rows)}
        loss = jax.nn.logsumexp(found.astype(jnp.float32), axis=-1).mean()
        return loss, each | {"weight": jnp.float32(1)}

    return next_tokens


def find_next_tokens(
    trainer: Trainer, loss_fn: Callable[..., Any], batch: dict[str, np.ndarray]
) -> list[int]:
    """The next token of each row of a batch, computed by one pass through the streamed model."""
    rows = len(batch["row"])
    numbers = batch["row"] + trainer.processes.index * rows
    means = trainer.evaluate([{**batch, "row": numbers.astype(np.int32)}], loss_fn)
    return [round(means[f"row {k}"] * means["weight"]) for k in range(rows)]
