"""Gemma 2: capped scores and logits, four norms per layer, a window in every other layer."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def common(fields: Fields, types: list[str], **sizes: Any) -> dict[str, Any]:
    """Returns the arguments that Gemma 2 and 3 share.

    Args:
        fields: The configuration.
        types: Default of `layer_types`.
        **sizes: See `hf_common.sizes`.
    """
    # Transformers reads this field; early checkpoints have a different `hidden_act`.
    activation = hf_common.read_activation(
        fields, "hidden_activation", "gelu_pytorch_tanh", null=True
    )
    return {
        **hf_common.sizes(
            fields, kv_heads=4, head_dim=256, tied=True, activation=activation, **sizes
        ),
        **hf_common.attention_bias(fields),
        "windows": hf_common.windows_by_type(fields, types, hf_common.window(fields)),
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "scale_embedding": True,
        "attention_scale": fields.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
    }


def _read(fields: Fields) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers")
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    arguments = common(fields, types)
    return {
        **arguments,
        "rope": hf_common.rope(fields, arguments["head_dim"]),
        "attention_softcap": fields.number("attn_logit_softcapping", 50.0, above=0, null=True),
        "final_softcap": fields.number("final_logit_softcapping", 30.0, above=0, null=True),
    }


GEMMA2 = Family(model_type="gemma2", architecture="Gemma2ForCausalLM", read=_read)
