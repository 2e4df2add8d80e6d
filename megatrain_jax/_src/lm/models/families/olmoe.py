"""OLMoE: experts in all layers, and norms of queries and keys over all heads together."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families.olmo2 import WideNormAttention
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import Layer


class OlmoeLayer(Layer):
    """A layer that normalises queries and keys over all heads together."""

    attention = WideNormAttention


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(clip_qkv=None)
    sizes = hf_common.sizes(fields, eps=1e-5)
    # Transformers' norm of the queries is as wide as the hidden states.
    fields.neutral(head_dim=sizes["hidden_size"] // sizes["num_heads"])
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "layer": OlmoeLayer,
        "experts": hf_common.experts(
            fields,
            ("num_local_experts", "num_experts"),
            num=64,
            per_token=8,
            intermediate_size=sizes["intermediate_size"],
            normalize=fields.flag("norm_topk_prob", False),
            layers=tuple(range(sizes["num_layers"])),
            balance=fields.number("router_aux_loss_coef", 0.01, least=0),
        ),
    }


OLMOE = Family(model_type="olmoe", architecture="OlmoeForCausalLM", read=_read)
