"""Mixtral: experts in all layers, under different tensor names."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(router_jitter_noise=0.0)
    sizes = hf_common.sizes(fields, kv_heads=8, eps=1e-5)
    return {
        **sizes,
        "rope": hf_common.rope(fields, sizes["head_dim"], theta=1_000_000.0),
        "windows": hf_common.windows_everywhere(fields, None),
        "experts": hf_common.experts(
            fields,
            ("num_local_experts", "num_experts"),
            num=8,
            per_token=2,
            intermediate_size=sizes["intermediate_size"],
            normalize=True,
            layers=tuple(range(sizes["num_layers"])),
        ),
    }


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    renames={"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
