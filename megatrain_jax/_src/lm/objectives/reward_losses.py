"""The loss of reward models: scores of conversations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Shaped

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.objectives.example_losses import columns, mean


def reward(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    margins: Float[ArrayLike, "*pairs"] | None = None,
    *,
    center_rewards_coefficient: float | None = None,
    mask: Shaped[ArrayLike, "*pairs"] | None = None,
    count: Shaped[ArrayLike, ""] | None = None,
) -> Float[Array, ""]:
    """Loss of a reward model: that of Bradley and Terry's model of preferences.

    The mean over pairs of `-log sigmoid(chosen - rejected - margins)`, plus
    `center_rewards_coefficient` times the mean of `(chosen + rejected) ** 2`, to keep scores
    around 0 (equation 2 of https://arxiv.org/abs/2312.09244).

    Args:
        chosen: Score of each pair's chosen conversation.
        rejected: Score of its rejected conversation.
        margins: Minimum difference that the scores should have; None for 0.
        center_rewards_coefficient: Weight of the second term, at least 0; None leaves it out.
        mask: Weights of pairs, or whether they count; None counts all.
        count: Divisor of the sums over pairs; None takes the sum of their weights. See
            `next_token`.

    Returns:
        The loss in fp32; 0 if nothing counts.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't agree, or the coefficient is out of range.

    Examples:
        >>> scores = jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0])
        >>> float(reward(*scores))
        0.693...
    """
    good, bad, least = columns(
        {
            "chosen": chosen,
            "rejected": rejected,
            "margins": jnp.zeros(jnp.shape(chosen)) if margins is None else margins,
        },
        mask,
    )
    values = -jax.nn.log_sigmoid(good - bad - least)
    if center_rewards_coefficient is not None:
        name = "center_rewards_coefficient"
        weight = checks.number(name, center_rewards_coefficient, least=0)
        values += weight * (good + bad) ** 2
    return mean(values, mask, count, "chosen")
