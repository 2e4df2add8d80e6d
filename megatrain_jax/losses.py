"""Losses of language models that never store the logits of all tokens."""

from megatrain_jax._src.log_probabilities import dpo, log_probabilities
from megatrain_jax._src.losses import next_token, num_labels

__all__ = ["dpo", "log_probabilities", "next_token", "num_labels"]
