"""Losses of pairs of answers, a preferred and a rejected one: DPO, IPO, SimPO and ORPO.

Each equals the loss that TRL's trainers compute, with their names and defaults of options.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Shaped

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.objectives.example_losses import columns, mean

Column = Float[ArrayLike, "*pairs"]
Mask = Shaped[ArrayLike, "*pairs"] | None
Count = Shaped[ArrayLike, ""] | None
# Mean log-probabilities closer to 0 are rounding errors of a probability of 1.
_LEAST_GAP = 1e-7


def dpo(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    reference_chosen: Column,
    reference_rejected: Column,
    *,
    beta: float = 0.1,
    mask: Mask = None,
    count: Count = None,
) -> Float[Array, ""]:
    """Loss of direct preference optimisation (equation 7 of https://arxiv.org/abs/2305.18290).

    The mean over pairs of `-log sigmoid(beta * ((chosen - rejected) - (reference_chosen -
    reference_rejected)))`.

    Args:
        chosen: Log-probability of each pair's chosen answer under the model: the sum of its tokens'
            `log_probabilities`.
        rejected: The same for its rejected answer.
        reference_chosen: The chosen answer's log-probability under the model before training. No
            gradient flows into it.
        reference_rejected: The same for the rejected answer.
        beta: How strongly the model is kept close to the reference; above 0.
        mask: Weights of pairs, or whether they count; None counts all.
        count: Divisor of the sum over pairs; None takes the sum of their weights. See `next_token`.

    Returns:
        The loss in fp32; 0 if nothing counts.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't agree, or `beta` is out of range.

    Examples:
        A model that is the reference prefers neither answer.

        >>> logs = jnp.array([-20.0, -31.0]), jnp.array([-25.0, -30.0])
        >>> float(dpo(*logs, *logs))
        0.693...
    """
    beta = checks.number("beta", beta, above=0)
    ours, wrong, before, before_wrong = columns(
        {
            "chosen": chosen,
            "rejected": rejected,
            "reference_chosen": reference_chosen,
            "reference_rejected": reference_rejected,
        },
        mask,
    )
    margin = (ours - wrong) - jax.lax.stop_gradient(before - before_wrong)
    return mean(-jax.nn.log_sigmoid(beta * margin), mask, count, "chosen")


def ipo(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    reference_chosen: Column,
    reference_rejected: Column,
    chosen_tokens: Column,
    rejected_tokens: Column,
    *,
    beta: float = 0.1,
    mask: Mask = None,
    count: Count = None,
) -> Float[Array, ""]:
    """Loss of identity preference optimisation (equation 17 of https://arxiv.org/abs/2310.12036).

    The mean over pairs of `(gained - lost - 1 / (2 * beta)) ** 2`, where `gained` is `(chosen -
    reference_chosen) / chosen_tokens`, and `lost` the same for the rejected answer. The paper has
    no division by lengths; its authors' results, and TRL, do.

    Args:
        chosen: See `dpo`.
        rejected: See `dpo`.
        reference_chosen: See `dpo`.
        reference_rejected: See `dpo`.
        chosen_tokens: Number of tokens of each chosen answer; 0 counts as 1.
        rejected_tokens: The same for the rejected answer.
        beta: Called tau in the paper: the margin to reach is 1 / (2 * beta); above 0.
        mask: See `dpo`.
        count: See `dpo`.

    Returns:
        The loss in fp32; 0 if nothing counts.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't agree, or `beta` is out of range.

    Examples:
        A model that is the reference misses the whole margin, 1 / (2 * 0.1).

        >>> logs = jnp.array([-20.0, -31.0]), jnp.array([-25.0, -30.0])
        >>> float(ipo(*logs, *logs, jnp.array([4, 8]), jnp.array([5, 5])))
        25.0
    """
    beta = checks.number("beta", beta, above=0)
    ours, wrong, before, before_wrong, sizes, wrong_sizes = columns(
        {
            "chosen": chosen,
            "rejected": rejected,
            "reference_chosen": reference_chosen,
            "reference_rejected": reference_rejected,
            "chosen_tokens": chosen_tokens,
            "rejected_tokens": rejected_tokens,
        },
        mask,
    )
    gained = (ours - jax.lax.stop_gradient(before)) / jnp.maximum(sizes, 1)
    lost = (wrong - jax.lax.stop_gradient(before_wrong)) / jnp.maximum(wrong_sizes, 1)
    return mean((gained - lost - 1 / (2 * beta)) ** 2, mask, count, "chosen")


def simpo(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    chosen_tokens: Column,
    rejected_tokens: Column,
    nll: Float[ArrayLike, ""],
    *,
    beta: float = 0.1,
    simpo_gamma: float = 0.5,
    cpo_alpha: float = 1.0,
    mask: Mask = None,
    count: Count = None,
) -> Float[Array, ""]:
    """Loss of SimPO (equation 6 of https://arxiv.org/abs/2405.14734).

    The mean over pairs of `-log sigmoid(beta * (chosen / chosen_tokens - rejected /
    rejected_tokens) - simpo_gamma)`, plus `cpo_alpha * nll`. The second term is not part of the
    paper: TRL's `CPOTrainer` adds it by default; `cpo_alpha=0` leaves it out.

    Args:
        chosen: See `dpo`.
        rejected: See `dpo`.
        chosen_tokens: See `ipo`.
        rejected_tokens: See `ipo`.
        nll: Mean cross-entropy of the chosen answers' tokens over the whole batch.
        beta: Factor of the mean log-probabilities; above 0. The paper uses 2 to 10.
        simpo_gamma: Margin that the chosen answer has to reach; at least 0.
        cpo_alpha: Weight of `nll`; at least 0.
        mask: See `dpo`.
        count: See `dpo`.

    Returns:
        The loss in fp32.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't agree, or an option is out of range.

    Examples:
        >>> logs = jnp.array([-20.0]), jnp.array([-30.0])
        >>> sizes = jnp.array([4]), jnp.array([6])
        >>> float(simpo(*logs, *sizes, 0.0, simpo_gamma=0.0))
        0.693...
    """
    beta = checks.number("beta", beta, above=0)
    margin = checks.number("simpo_gamma", simpo_gamma, least=0)
    alpha = checks.number("cpo_alpha", cpo_alpha, least=0)
    ours, wrong = _means(chosen, rejected, chosen_tokens, rejected_tokens, mask)
    values = -jax.nn.log_sigmoid(beta * (ours - wrong) - margin)
    return mean(values, mask, count, "chosen") + alpha * jnp.asarray(nll, jnp.float32)


def orpo(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    chosen_tokens: Column,
    rejected_tokens: Column,
    nll: Float[ArrayLike, ""],
    *,
    beta: float = 0.1,
    mask: Mask = None,
    count: Count = None,
) -> Float[Array, ""]:
    """Loss of ORPO (equation 6 of https://arxiv.org/abs/2403.07691).

    `nll` plus `beta` times the mean over pairs of `-log sigmoid(log_odds(chosen) -
    log_odds(rejected))`, where the odds are `p / (1 - p)` of each answer's geometric mean
    probability per token. In float32 that may round to 1, whose odds are infinite: logarithms of
    probabilities within 1e-7 of 0 count as -1e-7.

    Args:
        chosen: See `dpo`.
        rejected: See `dpo`.
        chosen_tokens: See `ipo`.
        rejected_tokens: See `ipo`.
        nll: Mean cross-entropy of the chosen conversations' tokens over the whole batch. TRL counts
            the prompts' tokens, too.
        beta: Weight of the odds; above 0. The paper calls it lambda.
        mask: See `dpo`.
        count: See `dpo`.

    Returns:
        The loss in fp32.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't agree, or `beta` is out of range.

    Examples:
        >>> logs = jnp.array([-20.0]), jnp.array([-30.0])
        >>> sizes = jnp.array([4]), jnp.array([6])
        >>> float(orpo(*logs, *sizes, 2.0))
        2.069...
    """
    beta = checks.number("beta", beta, above=0)
    both = _means(chosen, rejected, chosen_tokens, rejected_tokens, mask)
    ours, wrong = map(_below_zero, both)
    log_odds = (ours - wrong) - (_log_complement(ours) - _log_complement(wrong))
    odds = mean(-jax.nn.log_sigmoid(log_odds), mask, count, "chosen")
    return jnp.asarray(nll, jnp.float32) + beta * odds


def _means(
    chosen: Column, rejected: Column, chosen_tokens: Column, rejected_tokens: Column, mask: Mask
) -> tuple[Float[Array, "*pairs"], Float[Array, "*pairs"]]:
    """Returns the mean log-probability per token of both answers."""
    ours, wrong, sizes, wrong_sizes = columns(
        {
            "chosen": chosen,
            "rejected": rejected,
            "chosen_tokens": chosen_tokens,
            "rejected_tokens": rejected_tokens,
        },
        mask,
    )
    return ours / jnp.maximum(sizes, 1), wrong / jnp.maximum(wrong_sizes, 1)


def _below_zero(logs: Float[Array, "*pairs"]) -> Float[Array, "*pairs"]:
    """Returns logarithms with those near 0 moved to -1e-7; gradients flow as if none had moved."""
    moved = jnp.where(jnp.abs(logs) < _LEAST_GAP, -_LEAST_GAP, logs)
    return logs + jax.lax.stop_gradient(moved - logs)


def _log_complement(logs: Float[Array, "*pairs"]) -> Float[Array, "*pairs"]:
    """Returns `log(1 - exp(logs))`, exact for probabilities near 0 and near 1."""
    is_large = logs > -math.log(2)
    # Each branch gets numbers that it is finite for, so the gradient of neither is NaN.
    large = jnp.log(-jnp.expm1(jnp.where(is_large, logs, -1.0)))
    small = jnp.log1p(-jnp.exp(jnp.where(is_large, -1.0, logs)))
    return jnp.where(is_large, large, small)
