"""Log-probabilities of a packed batch's answers, shared by the objectives that compare answers.

A step reports the mean of a metric over its microbatches. So a sum, such as the number of tokens,
is multiplied by the number of microbatches. A mean over pairs is divided by a number of pairs that
comes from the whole batch's counts, so each microbatch has the same divisor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from megatrain_jax import losses, models

Batch = Mapping[str, Any]
Loss = Callable[[models.Decoder, Batch], tuple[Array, dict[str, Array]]]


@dataclass(frozen=True, kw_only=True)
class LossContext:
    """The settings of a run that its loss needs.

    Attributes:
        microbatches: Parts that a batch is cut into.
        is_stored: Whether the batch contains the reference's log-probabilities, as `reference`; if
            not, the reference is the model without its adapters.
    """

    microbatches: int = 1
    is_stored: bool = False

    def reference(self, model: models.Decoder, batch: Batch) -> Array:
        """The log-probability of each answer under the reference."""
        if self.is_stored:
            return batch["reference"]
        before = models.without_lora(model)
        assert isinstance(before, models.Decoder)
        return answers(before, batch)


def token_log_probs(model: models.Decoder, batch: Batch) -> Array:
    """The log-probability of each position's label."""
    hidden, _ = model.hidden(batch["tokens"], batch["positions"], batch["segments"])
    return losses.log_probabilities(
        hidden, model.head_weight(), batch["labels"], softcap=model.config.final_softcap
    )


def answers(model: models.Decoder, batch: Batch) -> Array:
    """The log-probability of each answer: chosen, rejected, chosen, ... of each row."""
    return answer_sums(token_log_probs(model, batch) * batch["mask"], batch)


def answer_sums(values: Array, batch: Batch) -> Array:
    """Sums of the tokens' values in each segment, of shape (rows, twice the pairs)."""
    numbers = 1 + jnp.arange(2 * batch["pairs"].shape[1])
    belongs = batch["segments"][:, :, None] == numbers
    return jnp.einsum("rl,rla->ra", values, belongs.astype(jnp.float32))


def answer_sizes(batch: Batch) -> Array:
    """The number of tokens of each answer, of shape (rows, twice the pairs)."""
    return answer_sums(batch["mask"].astype(jnp.float32), batch)


def sides(columns: Array) -> tuple[Array, Array]:
    """The columns of the first and of the second answer of each pair, of shape (rows, pairs)."""
    return columns[:, 0::2], columns[:, 1::2]


def mean_where(values: Array, counts: Array, count: Array) -> Array:
    """The sum of the values under a mask, divided by a count; not divided if the count is 0.

    Args:
        values: The values; masked ones may be anything, even NaN.
        counts: The mask: whether each value counts.
        count: The divisor; in a microbatch it may be below 1.
    """
    return jnp.where(counts, values, 0).sum() / jnp.where(count > 0, count, 1)


def num_tokens(batch: Batch, microbatches: int) -> Array:
    """Tokens without padding, times `microbatches`: their mean over microbatches is the sum."""
    return microbatches * (batch["segments"] > 0).sum(dtype=jnp.float32)
