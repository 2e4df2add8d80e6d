"""The losses of the commands, with the number of tokens that are no padding as a metric."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from megatrain_jax import losses, models

Loss = Callable[[models.Decoder, Mapping[str, Any]], tuple[Array, dict[str, Array]]]


def next_token(model: models.Decoder, batch: Mapping[str, Any]) -> tuple[Array, dict[str, Array]]:
    """`models.next_token_loss`, of packed batches."""
    loss, metrics = models.next_token_loss(model, batch)
    return loss, {**metrics, "tokens": _num_tokens(batch)}


def preferred(beta: float) -> Loss:
    """The loss of direct preference optimisation of a model with adapters.

    The reference is the model without them. A metric `accuracy` says of how many pairs the chosen
    answer has become more likely than the rejected one, compared with the reference.

    Args:
        beta: See `losses.dpo`.
    """

    def loss_fn(model: models.Decoder, batch: Mapping[str, Any]) -> tuple[Array, dict[str, Array]]:
        before = models.without_lora(model)
        assert isinstance(before, models.Decoder)
        reference = _answers(before, batch)
        ours = _answers(model, batch)
        pairs, count = batch["pairs"], batch["pairs_per_row"].sum()
        columns = ours[:, 0::2], ours[:, 1::2], reference[:, 0::2], reference[:, 1::2]
        loss = losses.dpo(*columns, beta=beta, mask=pairs, count=count)
        gained = ours - reference
        right = (gained[:, 0::2] > gained[:, 1::2]) & pairs
        accuracy = right.sum() / jnp.maximum(count, 1)
        return loss, {"weight": count, "accuracy": accuracy, "tokens": _num_tokens(batch)}

    return loss_fn


def _answers(model: models.Decoder, batch: Mapping[str, Any]) -> Array:
    """The logarithm of each answer's probability: chosen, rejected, chosen, ... of each row."""
    hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segments"])
    logs = losses.log_probabilities(
        hidden, model.head_weight(), batch["labels"], softcap=model.config.final_softcap
    )
    numbers = 1 + jnp.arange(2 * batch["pairs"].shape[1])
    belongs = batch["segments"][:, :, None] == numbers
    return jnp.einsum("rl,rla->ra", logs * batch["mask"], belongs.astype(jnp.float32))


def _num_tokens(batch: Mapping[str, Any]) -> Array:
    return (batch["segments"] > 0).sum(dtype=jnp.float32)
