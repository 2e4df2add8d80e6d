"""Losses with one number per example: pairs of answers, labelled answers, pairs of scores.

Each equals the loss that TRL's trainers compute, with their names and defaults of options. Examples
in a batch's padding have weight 0, and may hold any numbers, even NaN.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Shaped

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.cross_entropy import REAL, array_of


def columns(given: Mapping[str, Any], *names: str) -> list[Float[Array, "*examples"]]:
    """Returns arguments with one number per example as arrays in fp32.

    Examples without weight have 0 in all of them: zeros alone don't make gradients NaN.

    Args:
        given: The arguments of a loss, by name, and the `mask` of `mean` among them.
        *names: Names of the arguments; all have the shape of the first, an array of floats.

    Raises:
        TypeError: If one has a wrong kind of numbers.
        ValueError: If a shape differs from the first.
    """
    first, mask = names[0], given["mask"]
    found: list[Array] = []
    for name in names:
        if name == first:
            array = array_of(name, given[name], "floating-point numbers", jnp.floating)
        else:
            array = array_of(name, given[name], "real numbers", *REAL)
        if found and array.shape != found[0].shape:
            raise ValueError(f"`{name}` has shape {array.shape}, but `{first}` {found[0].shape}")
        found.append(array.astype(jnp.float32))
    if mask is None:
        return found
    there = _weights(mask, found[0].shape, first) != 0
    return [jnp.where(there, array, 0) for array in found]


def mean(values: Float[Array, "*examples"], mask: Any, count: Any, first: str) -> Float[Array, ""]:
    """Returns the weighted mean of each example's loss; 0 if nothing counts.

    Args:
        values: The loss of each example, from numbers of `columns`.
        mask: Weights of examples, or whether they count; None counts all.
        count: Divisor; None takes the sum of the weights.
        first: Name of the argument with the same shape as `mask`, for errors.

    Raises:
        TypeError: If `mask` has a wrong kind of numbers.
        ValueError: If its shape is wrong.
    """
    weights = _weights(mask, values.shape, first)
    divisor = weights.sum() if count is None else jnp.asarray(count, jnp.float32)
    return jnp.sum(values * weights) / jnp.maximum(divisor, jnp.finfo(jnp.float32).tiny)


def _weights(mask: Any, shape: tuple[int, ...], first: str) -> Float[Array, "*examples"]:
    if mask is None:
        return jnp.ones(shape)
    weights = array_of("mask", mask, "real numbers", *REAL)
    if weights.shape != shape:
        raise ValueError(f"`mask` has shape {weights.shape}, but `{first}` {shape}")
    return weights.astype(jnp.float32)


Column = Float[ArrayLike, "*pairs"]
Mask = Shaped[ArrayLike, "*pairs"] | None
Count = Shaped[ArrayLike, ""] | None

# Names of the arguments about both answers of a pair.
_BOTH = ("chosen", "rejected")
_BEFORE = ("reference_chosen", "reference_rejected")
_SIZES = ("chosen_tokens", "rejected_tokens")
# Mean log-probabilities closer to 0 are rounding errors of a probability of 1.
_LEAST_GAP = 1e-7
DpoLoss = Literal[
    "sigmoid", "robust", "hinge", "apo_zero", "apo_down", "bco_pair", "nca_pair", "sppo_hard"
]
SMOOTHED = ("sigmoid", "robust")


def dpo(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    reference_chosen: Column,
    reference_rejected: Column,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: DpoLoss = "sigmoid",
    mask: Mask = None,
    count: Count = None,
) -> Float[Array, ""]:
    """Loss of direct preference optimisation (equation 7 of https://arxiv.org/abs/2305.18290).

    The mean over pairs of `-log sigmoid(beta * ((chosen - rejected) - (reference_chosen -
    reference_rejected)))`, or of another `loss_type`. With the rewards `g = beta * (chosen -
    reference_chosen)` and `l` of the rejected answer, and `s = sigmoid`:

    - "sigmoid": `-log s(g - l)`. With `label_smoothing`, `e`: `-(1 - e) log s(g - l) - e log s(l -
      g)`, conservative DPO.
    - "robust": `(e log s(l - g) - (1 - e) log s(g - l)) / (1 - 2 e)`
      (https://arxiv.org/abs/2403.00409).
    - "hinge": `max(0, 1 - (g - l))` (https://arxiv.org/abs/2309.06657).
    - "apo_zero": `s(-g) + s(l)`, and "apo_down": `s(g) + s(l - g)`
      (https://arxiv.org/abs/2408.06266).
    - "bco_pair": `-log s(g) - log s(-l)` (https://arxiv.org/abs/2404.04656, without its shift).
    - "nca_pair": `-log s(g) - (log s(-g) + log s(-l)) / 2` (https://arxiv.org/abs/2402.05369).
    - "sppo_hard": `((g - 1/2) ** 2 + (l + 1/2) ** 2) / beta ** 2`
      (https://arxiv.org/abs/2405.00675).

    Args:
        chosen: Log-probability of each pair's chosen answer under the model: the sum of its tokens'
            `log_probabilities`.
        rejected: The same for its rejected answer.
        reference_chosen: The chosen answer's log-probability under the model before training. No
            gradient flows into it.
        reference_rejected: The same for the rejected answer.
        beta: How strongly the model is kept close to the reference; above 0.
        label_smoothing: Fraction of pairs whose answers are thought to be exchanged, below 0.5; for
            "sigmoid" and "robust".
        loss_type: The loss of a pair, named as in TRL.
        mask: Weights of pairs, or whether they count; None counts all.
        count: Divisor of the sum over pairs; None takes the sum of their weights. See `next_token`.

    Returns:
        The loss in fp32; 0 if nothing counts.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't agree, or an option is out of range or unknown.

    Examples:
        A model that is the reference prefers neither answer.

        >>> logs = jnp.array([-20.0, -31.0]), jnp.array([-25.0, -30.0])
        >>> float(dpo(*logs, *logs))
        0.693...
    """
    beta = checks.number("beta", beta, above=0)
    checks.word("loss_type", loss_type, get_args(DpoLoss))
    epsilon = checks.number("label_smoothing", label_smoothing, least=0, below=0.5)
    if epsilon and loss_type not in SMOOTHED:
        allowed = f"0 unless `loss_type` is {checks.either(SMOOTHED)}"
        raise ValueError(checks.refused("label_smoothing", allowed, label_smoothing))
    ours, wrong, before, before_wrong = columns(locals(), *_BOTH, *_BEFORE)
    before, before_wrong = map(jax.lax.stop_gradient, (before, before_wrong))
    margin = beta * ((ours - wrong) - (before - before_wrong))
    good, bad = beta * (ours - before), beta * (wrong - before_wrong)
    log, step = jax.nn.log_sigmoid, jax.nn.sigmoid
    # An infinite margin would make a part with weight 0 NaN.
    exchanged = epsilon * log(-margin) if epsilon else 0.0
    pairs = {
        "sigmoid": lambda: -(1 - epsilon) * log(margin) - exchanged,
        "robust": lambda: (exchanged - (1 - epsilon) * log(margin)) / (1 - 2 * epsilon),
        "hinge": lambda: jax.nn.relu(1 - margin),
        "apo_zero": lambda: step(-good) + step(bad),
        "apo_down": lambda: step(good) + step(-margin),
        "bco_pair": lambda: -log(good) - log(-bad),
        "nca_pair": lambda: -log(good) - (log(-good) + log(-bad)) / 2,
        "sppo_hard": lambda: ((good - 0.5) ** 2 + (bad + 0.5) ** 2) / beta**2,
    }
    return mean(pairs[loss_type](), mask, count, "chosen")


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
        locals(), *_BOTH, *_BEFORE, *_SIZES
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
    ours, wrong = _means(locals())
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
    both = _means(locals())
    ours, wrong = map(_below_zero, both)
    log_odds = (ours - wrong) - (_log_complement(ours) - _log_complement(wrong))
    odds = mean(-jax.nn.log_sigmoid(log_odds), mask, count, "chosen")
    return jnp.asarray(nll, jnp.float32) + beta * odds


def _means(given: Mapping[str, Any]) -> tuple[Float[Array, "*pairs"], Float[Array, "*pairs"]]:
    """Returns the mean log-probability per token of both answers."""
    ours, wrong, sizes, wrong_sizes = columns(given, *_BOTH, *_SIZES)
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
    margins = jnp.zeros(jnp.shape(chosen)) if margins is None else margins
    good, bad, least = columns(locals(), *_BOTH, "margins")
    values = -jax.nn.log_sigmoid(good - bad - least)
    if center_rewards_coefficient is not None:
        name = "center_rewards_coefficient"
        weight = checks.number(name, center_rewards_coefficient, least=0)
        values += weight * (good + bad) ** 2
    return mean(values, mask, count, "chosen")


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
    ours, before, good = columns(locals(), "logs", "reference", "desirable")
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
    ours, before = columns(locals(), "logs", "reference")
    return jax.lax.stop_gradient(jnp.maximum(mean(ours - before, mask, None, "logs"), 0))
