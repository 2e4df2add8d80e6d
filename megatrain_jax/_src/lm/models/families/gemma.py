"""Gemma 1 and CodeGemma: scaled embeddings, and norms with an offset."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.take("hidden_activation", None)  # not read by Transformers
    activation = hf_common.read_activation(fields, "hidden_act", "gelu_pytorch_tanh")
    if activation == "gelu":  # the released files mean its approximation, as in Transformers
        activation = "gelu_tanh"
    sizes = hf_common.sizes(fields, kv_heads=16, head_dim=256, tied=True, activation=activation)
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "norm_offset": 1.0,
        "scale_embedding": True,
    }


GEMMA = Family(model_type="gemma", architecture="GemmaForCausalLM", read=_read)
