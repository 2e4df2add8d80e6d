"""Losses of language models that never store the logits of all tokens."""

from megatrain_jax._src.common.suggestions import explain as _explain
from megatrain_jax._src.lm.cross_entropy import log_probabilities, next_token, num_labels
from megatrain_jax._src.lm.objectives.distillation import distillation
from megatrain_jax._src.lm.objectives.pair_losses import dpo, ipo, orpo, simpo
from megatrain_jax._src.lm.objectives.policy_losses import group_advantages, grpo
from megatrain_jax._src.lm.objectives.reward_losses import reward
from megatrain_jax._src.lm.objectives.unpaired_losses import kto, kto_baseline

__all__ = [
    "distillation",
    "dpo",
    "group_advantages",
    "grpo",
    "ipo",
    "kto",
    "kto_baseline",
    "log_probabilities",
    "next_token",
    "num_labels",
    "orpo",
    "reward",
    "simpo",
]

_explain(globals())
