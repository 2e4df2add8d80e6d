"""Qwen 3 with experts in all layers or some."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(use_qk_norm=True)
    sizes = hf_common.sizes(fields, kv_heads=4)
    used, window = fields.flag("use_sliding_window", False), hf_common.window(fields)
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "windows": (window,) * sizes["num_layers"] if used and window else (),
        "qk_norm": True,
        "experts": hf_common.experts(
            fields,
            ("num_experts", "num_local_experts"),
            num=128,
            per_token=8,
            intermediate_size=fields.integer("moe_intermediate_size", 768),
            normalize=fields.flag("norm_topk_prob", False),
            layers=hf_common.sparse_layers(fields),
        ),
    }


QWEN3_MOE = Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=_read)
