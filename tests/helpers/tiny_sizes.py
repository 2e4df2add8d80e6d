"""The configurations of small decoders: a Qwen3 in the files' words, and one of width 8."""

from typing import Any

from megatrain_jax.models import DecoderConfig, Rope

TINY = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def tiny_decoder(**sizes: Any) -> DecoderConfig:
    """A decoder of one layer with one head, 8 wide, and 16 tokens, unless sizes say otherwise."""
    given: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 8}
    given |= {"vocab_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    given |= {"rope": Rope(dim=8), **sizes}
    return DecoderConfig(**given)
