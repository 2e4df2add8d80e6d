"""The loss of group relative policy optimisation, GRPO, and the advantages that it learns from.

Names of options, their defaults and the results are those of TRL's `GRPOTrainer`.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Shaped

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.common.grpo_fields import LossType, ScaleRewards
from megatrain_jax._src.lm.cross_entropy import REAL, array_of
from megatrain_jax._src.lm.objectives.example_losses import columns, mean

# The exponential of a larger number may not be finite in float32.
_MOST_GAINED = 80.0


class PolicyTokens(NamedTuple):
    """The terms of the loss for each token.

    Attributes:
        losses: The loss, with the divergence from the reference.
        divergences: The estimated divergence from the reference; 0 without one.
        clipped: Whether the ratio of probabilities was clipped, so that no gradient flows.
    """

    losses: Float[Array, "rows tokens"]
    divergences: Float[Array, "rows tokens"]
    clipped: Bool[Array, "rows tokens"]


def grpo(
    logs: Float[Array, "rows tokens"],
    old_logs: Float[ArrayLike, "rows tokens"],
    advantages: Float[ArrayLike, "rows ..."],
    *,
    reference: Float[ArrayLike, "rows tokens"] | None = None,
    loss_type: LossType = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    max_completion_length: int | None = None,
    mask: Shaped[ArrayLike, "rows tokens"] | None = None,
    count: Shaped[ArrayLike, ""] | None = None,
) -> Float[Array, ""]:
    """Loss of group relative policy optimisation (GRPO, https://arxiv.org/abs/2402.03300).

    Each token's loss is `-min(ratio * advantage, clip(ratio) * advantage)`, where `ratio` is
    `exp(logs - old_logs)`, clipped to `1 - epsilon` and `1 + epsilon_high`. With a reference,
    `beta * ratio * (exp(d) - d - 1)` is added, where `d` is `reference - logs`. `loss_type` chooses
    the mean:

    * "grpo": the mean over completions of the mean over a completion's tokens.
    * "dapo" or "bnpo": the mean over all tokens (DAPO, https://arxiv.org/abs/2503.14476).
    * "dr_grpo": the sum over all tokens, divided by the number of completions and by
      `max_completion_length` (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Args:
        logs: Log-probability of each token of a completion under the model, one completion per row,
            at the temperature that it was sampled at.
        old_logs: The same under the model that sampled it. No gradient flows into it.
        advantages: The advantage of each completion, or of each token. No gradient flows into it.
        reference: The log-probabilities under the reference model, for `beta` above 0.
        loss_type: The kind of mean.
        epsilon: Relative decrease of a token's probability beyond which the ratio is clipped.
        epsilon_high: The same for an increase; None for `epsilon`. DAPO uses 0.28.
        beta: Weight of the divergence from the reference; at least 0.
        use_bias_correction_kl: Whether the divergence is multiplied by the ratio, which makes its
            gradient unbiased (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556). The original GRPO
            does not.
        max_completion_length: Maximum length of a completion, for "dr_grpo".
        mask: Whether each token belongs to a completion; None counts all.
        count: Divisor of the sum; None takes the number of completions ("grpo", "dr_grpo") or
            tokens (the rest). See `next_token` for its use with microbatches.

    Returns:
        The loss in fp32; 0 if nothing counts.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If shapes don't agree, an option is out of range, or `beta` lacks a reference.

    Examples:
        At the first update the ratios are 1, and the loss is minus the mean advantage.

        >>> logs = jnp.array([[-2.0, -1.0], [-3.0, -0.5]])
        >>> float(grpo(logs, logs, jnp.array([1.0, -0.5])))
        -0.25
    """
    terms = policy_tokens(
        logs,
        old_logs,
        advantages,
        reference=reference,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        beta=beta,
        use_bias_correction_kl=use_bias_correction_kl,
        mask=mask,
    )

    checks.word("loss_type", loss_type, get_args(LossType))
    if loss_type in ("bnpo", "dapo"):
        return mean(terms.losses, mask, count, "logs")
    weights = (
        jnp.ones(terms.losses.shape)
        if mask is None
        else array_of("mask", mask, "real numbers", *REAL).astype(jnp.float32)
    )
    sums = (terms.losses * weights).sum(axis=1)
    if loss_type == "grpo":
        sums /= jnp.maximum(weights.sum(axis=1), 1)
    elif max_completion_length is None:
        raise ValueError('`loss_type`="dr_grpo" needs `max_completion_length`')
    else:
        sums /= checks.integer("max_completion_length", max_completion_length)
    return mean(sums, None, count, "logs")


def policy_tokens(
    logs: Float[Array, "rows tokens"],
    old_logs: Float[ArrayLike, "rows tokens"],
    advantages: Float[ArrayLike, "rows ..."],
    *,
    reference: Float[ArrayLike, "rows tokens"] | None,
    epsilon: float,
    epsilon_high: float | None,
    beta: float,
    use_bias_correction_kl: bool,
    mask: Shaped[ArrayLike, "rows tokens"] | None,
) -> PolicyTokens:
    """The terms of each token; see `grpo` for arguments and errors."""
    low = checks.number("epsilon", epsilon, least=0)
    high = low if epsilon_high is None else checks.number("epsilon_high", epsilon_high, least=0)
    beta = checks.number("beta", beta, least=0)
    if beta and reference is None:
        raise ValueError(f"`beta`={beta} needs `reference`, the reference's log-probabilities")
    gains = jnp.asarray(advantages)
    if gains.ndim == 1 and jnp.ndim(logs) == 2 and len(gains) == len(logs):
        gains = jnp.broadcast_to(gains[:, None], logs.shape)
    given: dict[str, Any] = {"logs": logs, "old_logs": old_logs, "advantages": gains}
    if beta:
        given["reference"] = reference
    found = dict(zip(given, columns(given | {"mask": mask}, *given), strict=True))
    ours = found["logs"]
    if ours.ndim != 2:
        raise ValueError(f"`logs` must have shape (rows, tokens), but has {ours.shape}")
    gains = jax.lax.stop_gradient(found["advantages"])
    gained = ours - jax.lax.stop_gradient(found["old_logs"])
    # Such a ratio is clipped. In float32 it may be infinite, and its gradient, 0, would be NaN.
    gained = jnp.where((gains >= 0) & (gained > _MOST_GAINED), _MOST_GAINED, gained)
    ratio = jnp.exp(gained)
    values = -jnp.minimum(ratio * gains, jnp.clip(ratio, 1 - low, 1 + high) * gains)
    clipped = ((ratio < 1 - low) & (gains < 0)) | ((ratio > 1 + high) & (gains > 0))
    divergences = jnp.zeros_like(values)
    if beta:
        gap = jax.lax.stop_gradient(found["reference"]) - ours
        if checks.boolean("use_bias_correction_kl", use_bias_correction_kl):
            # `ratio * exp(gap)`, whose factors may be 0 and infinite in float32.
            drift = found["reference"] - found["old_logs"]
            divergences = jnp.exp(jax.lax.stop_gradient(drift)) - ratio * (gap + 1)
        else:
            divergences = jnp.exp(gap) - gap - 1
        values += beta * divergences
    return PolicyTokens(values, divergences, clipped)


def group_advantages(
    rewards: Sequence[float] | Float[np.ndarray, " completions"],
    num_generations: int,
    *,
    scale_rewards: ScaleRewards = "group",
) -> Float[np.ndarray, " completions"]:
    """The advantages of completions, from the rewards of all completions of each prompt.

    An advantage is the reward minus the mean reward of the prompt's completions, divided by a
    standard deviation plus 1e-4.

    Args:
        rewards: The reward of each completion: first all completions of the first prompt, then of
            the second, and so on. NaN marks a completion without a reward: it does not count, and
            its advantage is 0.
        num_generations: Number of completions of each prompt; at least 2.
        scale_rewards: The standard deviation: of the prompt's rewards ("group"), of all rewards
            ("batch"), or none, as Dr. GRPO proposes.

    Returns:
        The advantages, fp32.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an option is out of range, or the number of rewards is no multiple of
            `num_generations`.

    Examples:
        >>> group_advantages([1.0, 0.0, 3.0, 3.0], 2, scale_rewards="none").tolist()
        [0.5, -0.5, 0.0, 0.0]
    """
    size = checks.integer("num_generations", num_generations, least=2)
    checks.word("scale_rewards", scale_rewards, get_args(ScaleRewards))
    flat = np.asarray(rewards, np.float64)
    if flat.ndim != 1 or len(flat) % size or not len(flat):
        raise ValueError(
            f"`rewards` has shape {flat.shape}, but must have one reward for each of "
            f"{size} completions (`num_generations`) of each prompt"
        )
    groups = np.where(np.isfinite(flat), flat, np.nan).reshape(-1, size)
    axis = {"group": 1, "batch": None}
    with warnings.catch_warnings():
        # Of a group without rewards, whose mean is NaN, or with one, whose deviation is.
        warnings.simplefilter("ignore", RuntimeWarning)
        found = groups - np.nanmean(groups, axis=1, keepdims=True)
        if scale_rewards in axis:
            found /= np.nanstd(groups, axis[scale_rewards], ddof=1, keepdims=True) + 1e-4
    return np.nan_to_num(found).reshape(-1).astype(np.float32)
