"""The options of group relative policy optimisation."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.generation.decoding import check_restriction
from megatrain_jax._src.lm.objectives.policy_losses import LossType, ScaleRewards


@dataclass(frozen=True, kw_only=True)
class GrpoOptions:
    """The options of GRPO, with the names and, except for a step's size, the defaults of TRL.

    The size is `prompts_per_step` times `num_generations`.

    Attributes:
        num_generations: Number of completions of each prompt, which are compared with each other;
            at least 2.
        prompts_per_step: Number of prompts of a step. A batch has this number times
            `num_generations` rows.
        max_completion_length: Maximum number of tokens of a completion.
        temperature: Divisor of the logits, in sampling and in the loss; above 0.
        top_p: See `models.generate`. As in TRL, `top_p` and `top_k` restrict only the sampling:
            the loss has log-probabilities among all tokens.
        top_k: See `models.generate`.
        stop: See `models.generate`.
        loss_type: See `losses.grpo`.
        epsilon: See `losses.grpo`.
        epsilon_high: See `losses.grpo`.
        beta: See `losses.grpo`. The reference is the model without its adapters or, if it has none,
            a stored copy of the initial model.
        use_bias_correction_kl: See `losses.grpo`.
        scale_rewards: See `losses.group_advantages`.
        reward_weights: Weight of each reward function; None for 1 each.
        num_iterations: Number of updates on the same completions.
        mask_truncated_completions: Whether completions that reached `max_completion_length` don't
            count in the loss, as DAPO proposes.
        log_completions: Number of steps between records with a table of the first prompt's
            completions, `completions`; 0 for none. With several updates on the same completions,
            the first update's record has it.
        shuffle: Whether prompts are shuffled, anew in each epoch.
        seed: Seed of the order and of sampling.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If one is out of range.
    """

    num_generations: int = 8
    prompts_per_step: int = 8
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop: Collection[int | str] | None = None
    loss_type: LossType = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    scale_rewards: ScaleRewards = "group"
    reward_weights: Sequence[float] | None = None
    num_iterations: int = 1
    mask_truncated_completions: bool = False
    log_completions: int = 0
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the options."""
        checks.integer("num_generations", self.num_generations, least=2)
        for name in ("prompts_per_step", "max_completion_length", "num_iterations"):
            checks.integer(name, getattr(self, name))
        checks.number("temperature", self.temperature, above=0)
        check_restriction(self.top_p, self.top_k)
        for name in ("epsilon", "beta"):
            checks.number(name, getattr(self, name), least=0)
        if self.epsilon_high is not None:
            checks.number("epsilon_high", self.epsilon_high, least=0)
        for name, kinds in (("loss_type", LossType), ("scale_rewards", ScaleRewards)):
            if getattr(self, name) not in get_args(kinds):
                allowed = f"one of {get_args(kinds)}"
                raise ValueError(checks.refused(name, allowed, getattr(self, name)))
        for weight in () if self.reward_weights is None else self.reward_weights:
            checks.number("reward_weights", weight)
        for name in ("use_bias_correction_kl", "mask_truncated_completions", "shuffle"):
            checks.boolean(name, getattr(self, name))
        checks.integer("log_completions", self.log_completions, least=0)
        checks.integer("seed", self.seed, least=0, most=2**32 - 1)
