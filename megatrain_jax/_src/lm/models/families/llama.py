"""Llama 2 and 3: the plain decoder."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(pretraining_tp=1)
    sizes = hf_common.sizes(fields)
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM", read=_read)
