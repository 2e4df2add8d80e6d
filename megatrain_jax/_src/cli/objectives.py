"""The losses of the commands, with the number of a step's tokens as a metric.

Padding is not counted. A step's metric is the mean over its microbatches, so each of them returns
its own tokens times the number of microbatches.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from megatrain_jax import losses, models

Loss = Callable[[models.Decoder, Mapping[str, Any]], tuple[Array, dict[str, Array]]]


def next_token(microbatches: int) -> Loss:
    """`models.next_token_loss` for packed batches, cut into this many microbatches."""

    def loss_fn(model: models.Decoder, batch: Mapping[str, Any]) -> tuple[Array, dict[str, Array]]:
        loss, metrics = models.next_token_loss(model, batch)
        return loss, {**metrics, "tokens": _num_tokens(batch, microbatches)}

    return loss_fn


def preferred(beta: float, microbatches: int, *, is_stored: bool) -> Loss:
    """The loss of direct preference optimisation.

    The metric `accuracy` is the fraction of pairs in which the chosen answer has gained more
    probability than the rejected one, compared with the reference.

    Args:
        beta: See `losses.dpo`.
        microbatches: Parts that a batch is cut into.
        is_stored: Whether the batch contains the reference's log-probabilities, as `reference`; if
            not, the reference is the model without its adapters.
    """

    def loss_fn(model: models.Decoder, batch: Mapping[str, Any]) -> tuple[Array, dict[str, Array]]:
        if is_stored:
            reference = batch["reference"]
        else:
            before = models.without_lora(model)
            assert isinstance(before, models.Decoder)
            reference = _answers(before, batch)
        ours = _answers(model, batch)
        pairs, count = batch["pairs"], batch["pairs_per_row"].sum()
        columns = ours[:, 0::2], ours[:, 1::2], reference[:, 0::2], reference[:, 1::2]
        loss = losses.dpo(*columns, beta=beta, mask=pairs, count=count)
        gained = ours - reference
        right = (gained[:, 0::2] > gained[:, 1::2]) & pairs
        # A microbatch may have less than one pair on average; without any pair, accuracy is 0.
        accuracy = right.sum() / jnp.where(count > 0, count, 1)
        tokens = _num_tokens(batch, microbatches)
        return loss, {"weight": count, "accuracy": accuracy, "tokens": tokens}

    return loss_fn


def answers_as_metrics(rows: int, pairs: int) -> Loss:
    """A loss for evaluations whose metrics are the log-probabilities of all answers in a batch.

    The metric for column i of row r is `f"{r} {i}"`, and 0 in parts of the batch without the row.

    Args:
        rows: Rows of the batch; their numbers are in `row`.
        pairs: The maximum number of pairs in a row.
    """

    def loss_fn(model: models.Decoder, batch: Mapping[str, Any]) -> tuple[Array, dict[str, Array]]:
        found = _answers(model, batch)
        each = {
            f"{r} {i}": jnp.where(batch["row"] == r, found[:, i], 0).sum()
            for r in range(rows)
            for i in range(2 * pairs)
        }
        return found.mean(), each | {"weight": jnp.float32(1)}

    return loss_fn


def _answers(model: models.Decoder, batch: Mapping[str, Any]) -> Array:
    """The log-probability of each answer: chosen, rejected, chosen, ... of each row."""
    hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segments"])
    logs = losses.log_probabilities(
        hidden, model.head_weight(), batch["labels"], softcap=model.config.final_softcap
    )
    numbers = 1 + jnp.arange(2 * batch["pairs"].shape[1])
    belongs = batch["segments"][:, :, None] == numbers
    return jnp.einsum("rl,rla->ra", logs * batch["mask"], belongs.astype(jnp.float32))


def _num_tokens(batch: Mapping[str, Any], microbatches: int) -> Array:
    return microbatches * (batch["segments"] > 0).sum(dtype=jnp.float32)
