"""The objective of reward models. The metrics have TRL's names."""

import jax
from jaxtyping import Array

from megatrain_jax import losses, models
from megatrain_jax._src.lm.cli.answers import (
    Batch,
    Loss,
    LossContext,
    mean_where,
    num_tokens,
    sides,
)


def reward(context: LossContext, *, center_rewards_coefficient: float | None) -> Loss:
    """Scores of conversations, learned from pairs; see `losses.reward`."""

    def loss_fn(model: models.Decoder, batch: Batch) -> tuple[Array, dict[str, Array]]:
        pairs, count = batch["pairs"], batch["pairs_per_row"].sum()
        scores = models.conversation_scores(model, batch, segments=2 * pairs.shape[1])
        chosen, rejected = sides(scores)
        loss = losses.reward(
            chosen,
            rejected,
            batch["margins"],
            center_rewards_coefficient=center_rewards_coefficient,
            mask=pairs,
            count=count,
        )
        good, bad = jax.lax.stop_gradient((chosen, rejected))
        means = {"mean_reward": (good + bad) / 2, "margin": good - bad, "accuracy": good > bad}
        return loss, {
            **{name: mean_where(values, pairs, count) for name, values in means.items()},
            "weight": count,
            "tokens": num_tokens(batch, context.microbatches),
        }

    return loss_fn
