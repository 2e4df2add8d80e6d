"""Losses of language models that never store the logits of all tokens."""

from megatrain_jax._src.common.suggestions import explain as _explain
from megatrain_jax._src.lm.cross_entropy import log_probabilities, next_token, num_labels
from megatrain_jax._src.lm.objectives.distillation import distillation
from megatrain_jax._src.lm.objectives.example_losses import (
    dpo,
    ipo,
    kto,
    kto_baseline,
    orpo,
    reward,
    simpo,
)
from megatrain_jax._src.lm.objectives.policy_losses import group_advantages, grpo

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
