"""Qwen2.5-VL: a Qwen 2 beside a vision tower; positions within images don't affect text."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families import qwen2
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    sizes = hf_common.sizes(fields, kv_heads=8, eps=1e-5)
    # Transformers' attention doesn't read this field.
    fields.neutral(head_dim=sizes["hidden_size"] // sizes["num_heads"])
    parameters = hf_common.rope_parameters_of_text(fields)
    rope = hf_common.rope(fields, sizes["head_dim"], theta=1_000_000.0, parameters=parameters)
    return {**sizes, "rope": rope, "windows": qwen2.windows(fields, first=80), "qkv_bias": True}


QWEN2_5_VL = multimodal_family(
    Family(model_type="qwen2_5_vl_text", architecture="Qwen2_5_VLTextModel", read=_read),
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    kept=("visual.",),
    beside="image_token_id video_token_id vision_start_token_id vision_end_token_id "
    "vision_token_id",
    tied=False,
    body="model",
    head="lm_head",
    older=True,
)
