"""Qwen 3: norms for each head's queries and keys."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families import qwen2
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(use_qk_norm=True)
    sizes = hf_common.sizes(fields, kv_heads=32, head_dim=128)
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "windows": qwen2.windows(fields),
        "qk_norm": True,
    }


QWEN3 = Family(model_type="qwen3", architecture="Qwen3ForCausalLM", read=_read)
