"""GLM 4: four norms per layer, and rotary embeddings of neighbours in half of each head."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import FusedMLP, Layer


class Glm4Layer(Layer):
    """A layer with gate and up matrices of the MLP joined in one."""

    dense = FusedMLP


def _read(fields: Fields) -> dict[str, Any]:
    sizes = hf_common.sizes(fields, kv_heads=2, head_dim=128, eps=0.00000015625)
    return {
        **sizes,
        "rope": hf_common.rope(fields, sizes["head_dim"], share=0.5, interleaved=True),
        "qkv_bias": fields.flag("attention_bias", True),
        "sandwich_norms": True,
        "layer": Glm4Layer,
    }


GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    read=_read,
    # The usual four norms, but the files use one name for a different norm.
    renames={
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
)
