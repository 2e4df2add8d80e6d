"""The options of GRPO that `models.GrpoOptions` and the command's settings share.

This file needs no JAX.
"""

from dataclasses import dataclass
from typing import Any, Literal

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
ScaleRewards = Literal["group", "batch", "none"]
BOUNDS: dict[str, Any] = {
    "num_generations": {"least": 2},
    "temperature": {"above": 0},
    **dict.fromkeys(("top_k", "log_completions"), {"least": 0}),
}
"""The bounds of numbers that differ from those of `checks.numbers`."""


@dataclass(frozen=True, kw_only=True)
class GrpoFields:
    """The options, with TRL's names and defaults; `models.GrpoOptions` describes each."""

    num_generations: int = 8
    prompts_per_step: int = 8
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    loss_type: LossType = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    scale_rewards: ScaleRewards = "group"
    num_iterations: int = 1
    mask_truncated_completions: bool = False
    max_tool_calling_iterations: int | None = None
    log_completions: int = 0
