"""The loss of single answers that are labelled desirable or undesirable: KTO."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Shaped

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.objectives.example_losses import columns, mean


def kto(
    logs: Float[Array, "*answers"],
    reference: Float[ArrayLike, "*answers"],
    desirable: Shaped[ArrayLike, "*answers"],
    baseline: Float[ArrayLike, ""],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    mask: Shaped[ArrayLike, "*answers"] | None = None,
    count: Shaped[ArrayLike, ""] | None = None,
) -> Float[Array, ""]:
    """Loss of Kahneman-Tversky optimisation (equation 8 of https://arxiv.org/abs/2402.01306).

    The mean over answers of `desirable_weight * (1 - sigmoid(beta * (logs - reference -
    baseline)))` for desirable ones, and of `undesirable_weight * (1 - sigmoid(beta * (baseline -
    logs + reference)))` for the rest.

    Args:
        logs: Log-probability of each answer under the model: the sum of its tokens'
            `log_probabilities`.
        reference: The same under the model before training. No gradient flows into it.
        desirable: Whether each answer is desirable.
        baseline: An estimate of the divergence of the model from the reference; see
            `kto_baseline`. No gradient flows into it.
        beta: How strongly the model is kept close to the reference; above 0.
        desirable_weight: Weight of desirable answers; at least 0.
        undesirable_weight: Weight of undesirable answers; at least 0.
        mask: Weights of answers, or whether they count; None counts all.
        count: Divisor of the sum over answers; None takes the sum of their weights. See
            `next_token`.

    Returns:
        The loss in fp32; 0 if nothing counts.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't agree, or an option is out of range.

    Examples:
        A model that is the reference is at the middle of the sigmoid.

        >>> logs = jnp.array([-20.0, -31.0])
        >>> float(kto(logs, logs, jnp.array([True, False]), 0.0))
        0.5
    """
    beta = checks.number("beta", beta, above=0)
    desirable_weight = checks.number("desirable_weight", desirable_weight, least=0)
    undesirable_weight = checks.number("undesirable_weight", undesirable_weight, least=0)
    ours, before, good = columns(
        {"logs": logs, "reference": reference, "desirable": desirable}, mask
    )
    gained = ours - jax.lax.stop_gradient(before)
    above = gained - jax.lax.stop_gradient(jnp.asarray(baseline, jnp.float32))
    # 1 - sigmoid(x) is sigmoid(-x).
    values = jnp.where(
        good != 0,
        desirable_weight * jax.nn.sigmoid(-beta * above),
        undesirable_weight * jax.nn.sigmoid(beta * above),
    )
    return mean(values, mask, count, "logs")


def kto_baseline(
    logs: Float[Array, "*answers"],
    reference: Float[ArrayLike, "*answers"],
    *,
    mask: Shaped[ArrayLike, "*answers"] | None = None,
) -> Float[Array, ""]:
    """The baseline of `kto`: the mean of `logs - reference` over mismatched answers, at least 0.

    Each prompt has the answer of another prompt, as in TRL's `KTOTrainer`. No gradient flows
    through the result.

    Args:
        logs: Log-probability of each prompt's mismatched answer under the model.
        reference: The same under the model before training.
        mask: Weights of answers, or whether they count; None counts all.

    Returns:
        The baseline in fp32.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't agree.

    Examples:
        >>> float(kto_baseline(jnp.array([-20.0, -31.0]), jnp.array([-22.0, -30.0])))
        0.5
    """
    ours, before = columns({"logs": logs, "reference": reference}, mask)
    return jax.lax.stop_gradient(jnp.maximum(mean(ours - before, mask, None, "logs"), 0))
