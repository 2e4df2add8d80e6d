"""Gemma 3: layers with a window have a rotary embedding of their own."""

from typing import Any

from megatrain_jax._src.models import hf_common
from megatrain_jax._src.models.families import gemma2
from megatrain_jax._src.models.family import Family
from megatrain_jax._src.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(attn_logit_softcapping=None)  # which Transformers doesn't apply either
    layers = fields.integer("num_hidden_layers")
    second = fields.integer("sliding_window_pattern", 6)
    step = fields.integer("_sliding_window_pattern", None) or second
    types = ["sliding_attention" if (i + 1) % step else "full_attention" for i in range(layers)]
    arguments = gemma2.common(fields, types)
    full = {"rope_theta": fields.take("rope_theta", 1e6)}
    local = {"rope_theta": fields.take("rope_local_base_freq", 1e4)}
    return {
        **arguments,
        **hf_common.two_ropes(fields, arguments["head_dim"], full, local, max_length=131_072),
        "qk_norm": True,
        "final_softcap": fields.number("final_logit_softcapping", None, above=0),
    }


GEMMA3 = Family(model_type="gemma3_text", architecture="Gemma3ForCausalLM", read=_read)
