"""Losses of language models that never hold the logits of all tokens."""

from megatrain_jax._src.losses import next_token, num_labels

__all__ = ["next_token", "num_labels"]
