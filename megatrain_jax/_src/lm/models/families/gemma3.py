"""Gemma 3: layers with a window have their own rotary embedding.

The 1B model is only a decoder; all larger models also have a vision tower.
"""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families import gemma2
from megatrain_jax._src.lm.models.families.gemma3_vision import read_gemma3_vision
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(attn_logit_softcapping=None)  # Transformers doesn't apply it either
    layers = fields.integer("num_hidden_layers")
    second = fields.integer("sliding_window_pattern", 6)
    step = fields.integer("_sliding_window_pattern", None) or second
    types = ["sliding_attention" if (i + 1) % step else "full_attention" for i in range(layers)]
    # Configurations of checkpoints with a vision tower omit these sizes.
    arguments = gemma2.common(fields, types, vocab_size=262_208, num_attention_heads=8)
    full = {"rope_theta": fields.take("rope_theta", 1e6)}
    local = {"rope_theta": fields.take("rope_local_base_freq", 1e4)}
    return {
        **arguments,
        **hf_common.two_ropes(fields, arguments["head_dim"], full, local, max_length=131_072),
        "qk_norm": True,
        "final_softcap": fields.number("final_logit_softcapping", None, above=0),
    }


GEMMA3 = Family(model_type="gemma3_text", architecture="Gemma3ForCausalLM", read=_read)
GEMMA3_MULTIMODAL = multimodal_family(
    GEMMA3,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    kept=("vision_tower.", "multi_modal_projector."),
    beside="mm_tokens_per_image boi_token_index eoi_token_index image_token_index",
    tied=True,
    vision=read_gemma3_vision,
)
