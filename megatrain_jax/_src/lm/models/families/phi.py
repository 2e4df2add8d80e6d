"""Phi 1, 1.5 and 2: attention and a plain MLP in parallel, layer norms, biases everywhere."""

from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import BiasedMLP, ParallelLayer


class PhiLayer(ParallelLayer):
    """A layer with a plain MLP beside attention."""

    dense = BiasedMLP


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(resid_pdrop=0.0, embd_pdrop=0.0, qk_layernorm=False, tie_word_embeddings=False)
    sizes = hf_common.sizes(
        fields,
        eps=1e-5,
        eps_name="layer_norm_eps",
        activation=hf_common.read_activation(fields, "hidden_act", "gelu_new"),
    )
    return {
        **sizes,
        "rope": hf_common.rope(fields, sizes["head_dim"], share=0.5),
        "norm": "layer",
        "qkv_bias": True,
        "out_bias": True,
        "head_bias": True,
        "layer": PhiLayer,
    }


PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    read=_read,
    renames={"norm": "final_layernorm", "o_proj": "dense"},
)
