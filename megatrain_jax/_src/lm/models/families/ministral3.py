"""Ministral 3: wavelengths are stretched for long texts, and queries grow with their position."""

from dataclasses import replace
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families.mistral import MISTRAL
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_fields import Fields

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _read(fields: Fields) -> dict[str, Any]:
    sizes = hf_common.sizes(fields, kv_heads=8, head_dim=128, eps=1e-5)
    parameters = fields.mapping("rope_scaling") or fields.mapping("rope_parameters") or dict(_ROPE)
    growth = checks.number("llama_4_scaling_beta", parameters.pop("llama_4_scaling_beta", None))
    checks.integer(
        "original_max_position_embeddings", parameters.get("original_max_position_embeddings")
    )
    parameters.pop("max_position_embeddings", None)  # the configuration has its own
    rope = hf_common.rope(fields, sizes["head_dim"], parameters=parameters)
    return {
        **sizes,
        "rope": replace(rope, query_growth=growth),
        "windows": hf_common.windows_everywhere(fields, None),
    }


MINISTRAL3 = Family(model_type="ministral3", architecture="Ministral3ForCausalLM", read=_read)
MISTRAL3 = multimodal_family(
    MISTRAL,
    MINISTRAL3,
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    kept=("vision_tower.", "multi_modal_projector."),
    beside="image_token_index projector_hidden_act vision_feature_layer spatial_merge_size "
    "multimodal_projector_bias",
    tied=True,
)
