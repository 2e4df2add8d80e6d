"""Phi 1, 1.5 and 2: attention and a plain MLP in parallel, layer norms, biases everywhere."""

from typing import TYPE_CHECKING, Any

from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.models import hf_common
from megatrain_jax._src.models.activation_functions import ACTIVATIONS
from megatrain_jax._src.models.family import Family
from megatrain_jax._src.models.hf_fields import Fields
from megatrain_jax._src.models.layers import Linear, ParallelLayer
from megatrain_jax._src.models.maker import Maker

if TYPE_CHECKING:
    from megatrain_jax._src.models.config import DecoderConfig


class PhiMLP(nnx.Module):
    """Two products with an activation between them."""

    def __init__(self, config: "DecoderConfig", make: Maker):
        """Makes the parameters."""
        self.activation = ACTIVATIONS[config.activation]
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, make, bias=True)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, make, bias=True)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row separately."""
        return self.fc2(self.activation(self.fc1(x)))


class PhiLayer(ParallelLayer):
    """A layer with such an MLP beside attention."""

    dense = PhiMLP


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
