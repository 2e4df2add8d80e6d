"""Mistral 7B and similar models: a window in all layers."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    sizes = hf_common.sizes(fields, kv_heads=8)
    return {
        **sizes,
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "windows": hf_common.windows_everywhere(fields, 4096),
    }


MISTRAL = Family(model_type="mistral", architecture="MistralForCausalLM", read=_read)
