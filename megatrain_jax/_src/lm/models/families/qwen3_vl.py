"""Qwen3-VL: a Qwen 3 beside a vision tower; positions within images don't affect text."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    sizes = hf_common.sizes(fields, kv_heads=32, head_dim=128)
    parameters = hf_common.rope_parameters_of_text(fields)
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"], theta=500_000.0, parameters=parameters),
        "qk_norm": True,
    }


QWEN3_VL = multimodal_family(
    Family(model_type="qwen3_vl_text", architecture="Qwen3VLTextModel", read=_read),
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    kept=("model.visual.",),
    beside="image_token_id video_token_id vision_start_token_id vision_end_token_id",
    tied=False,
    body="model.language_model",
    head="lm_head",
)
