"""GLM 4.7 Flash: latent attention as in DeepSeek V3, and experts as in GLM 4.5."""

from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.families import deepseek_v3, glm4_moe
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _sparse(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers with experts: by `mlp_layer_types`, or all but the first."""
    kinds = fields.listed("mlp_layer_types", str, "names")
    kinds = ["dense"] + ["sparse"] * (num_layers - 1) if kinds is None else kinds
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        allowed = f'"dense" or "sparse" for each of {num_layers} layers'
        raise ValueError(checks.refused("mlp_layer_types", allowed, kinds))
    return tuple(i for i, kind in enumerate(kinds) if kind == "sparse")


def _read(fields: Fields) -> dict[str, Any]:
    for name in ("pretraining_tp", "qk_head_dim"):
        fields.take(name, None)  # not read by Transformers
    fields.neutral(topk_method="noaux_tc", first_k_dense_replace=1)
    arguments, options = deepseek_v3.read_latent(
        fields, kv_heads=20, query_rank=768, plain_dim=192, value_dim=256, eps=1e-5
    )
    # In Transformers, `head_dim` is another name of this field.
    fields.neutral(head_dim=options["rotated_dim"])
    experts = glm4_moe.read_experts(
        fields,
        deepseek_v3.DeepseekOptions,
        per_token=4,
        layers=_sparse(fields, arguments["num_layers"]),
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=1536,
        n_routed_experts=64,
        routed_scaling_factor=1.8,
        **options,
    )
    return {**arguments, **experts, "layer": deepseek_v3.DeepseekLayer}


GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    read=_read,
    kept=("model.layers.{num_layers}.",),
)
