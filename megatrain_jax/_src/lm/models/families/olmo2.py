"""OLMo 2: attention and MLP are normalised at their output, and so are queries and keys.

CONTRIBUTING.md uses this file as its worked example: the fields read from `config.json`, the
layers' differences from the usual ones, and the record that the registry lists.
"""

from typing import TYPE_CHECKING, Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import (
    MLP,
    Attention,
    HiddenStates,
    Layer,
    Projected,
    RMSNorm,
    Segments,
)
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.rotary import Rotation

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


class WideNormAttention(Attention):
    """Attention that normalises queries and keys over all heads together."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        self.q_norm = RMSNorm(self.query_size, config, make)
        self.k_norm = RMSNorm(self.key_size, config, make)

    def project(self, x: HiddenStates) -> Projected:
        """Returns normalised queries and keys, and values."""
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class Olmo2Layer(Layer):
    """Attention, then an MLP, each with a norm at its output and a residual connection.

    Attributes have the names in the files: `layers/0/post_attention_layernorm/weight` is the tensor
    `model.layers.0.post_attention_layernorm.weight`.
    """

    attention = WideNormAttention

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        # `Layer`'s own constructor would make norms before attention and MLP.
        self.self_attn = self.attention(config, layer, make)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config, make)
        self.mlp = MLP(config, make)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config, make)

    def __call__(
        self, x: HiddenStates, rotation: Rotation | None, segments: Segments
    ) -> tuple[HiddenStates, None]:
        """Returns the layer's result, and None: there are no experts to tally."""
        x = x + self.post_attention_layernorm(self.self_attn(x, rotation, segments))
        return x + self.post_feedforward_layernorm(self.mlp(x)), None


def common(fields: Fields) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` that OLMo 2 and 3 share."""
    return {
        **hf_common.sizes(fields, eps=1e-5),
        **hf_common.attention_bias(fields),
        "layer": Olmo2Layer,
    }


def _read(fields: Fields) -> dict[str, Any]:
    arguments = common(fields)
    return {**arguments, "rope": hf_common.rope(fields, arguments["head_dim"])}


OLMO2 = Family(model_type="olmo2", architecture="Olmo2ForCausalLM", read=_read)
