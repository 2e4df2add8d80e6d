"""Qwen 2 and 2.5: biases for queries, keys and values, and windows in the upper layers."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def windows(fields: Fields, first: int = 28) -> hf_common.Windows:
    """Returns the windows of Qwen 2 and 3: in layers from `max_window_layers` on.

    Args:
        fields: The configuration.
        first: Default of `max_window_layers`.
    """
    size = hf_common.window(fields) if fields.flag("use_sliding_window", False) else None
    fields.take("sliding_window", None)
    first = fields.integer("max_window_layers", first, least=0)
    types = [
        "sliding_attention" if size and i >= first else "full_attention"
        for i in range(fields.integer("num_hidden_layers"))
    ]
    return hf_common.windows_by_type(fields, types, size)


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(use_mrope=False)
    sizes = hf_common.sizes(fields, kv_heads=32)
    return {
        **sizes,
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "windows": windows(fields),
        "qkv_bias": True,
    }


QWEN2 = Family(model_type="qwen2", architecture="Qwen2ForCausalLM", read=_read)
