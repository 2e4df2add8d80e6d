"""Granite 3: scaled embeddings, attention scores, residual branches and logits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import HiddenStates, Layer, Segments
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.rotary import Rotation

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class GraniteOptions:
    """Options of a Granite's layers beyond those of every decoder.

    Attributes:
        residual_scale: Factor of the outputs of attention and MLP before they are added.
    """

    residual_scale: float


class GraniteLayer(Layer):
    """A layer whose attention and MLP are scaled before they are added."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        super().__init__(config, layer, make)
        self.residual_scale = config.options.residual_scale

    def __call__(
        self, x: HiddenStates, rotation: Rotation | None, segments: Segments
    ) -> tuple[HiddenStates, Float[Array, "3 num"] | None]:
        """Returns the layer's result, and the tally of its experts' load if it has experts."""
        y = self.self_attn(self.input_layernorm(x), rotation, segments)
        x = x + y * self.residual_scale
        y, tally = self.feed_forward(self.post_attention_layernorm(x), segments)
        return x + y * self.residual_scale, tally


def _read(fields: Fields) -> dict[str, Any]:
    sizes = hf_common.sizes(fields)
    # Granite's attention factor replaces 1 / sqrt(head_dim), and is independent of it.
    factors = ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    embedding, attention, residual = (fields.number(name, 1.0, above=0) for name in factors)
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "mlp_bias": fields.flag("mlp_bias", False),
        "scale_embedding": embedding,
        "attention_scale": attention,
        "logit_scale": 1.0 / fields.number("logits_scaling", 1.0, above=0),
        "layer": GraniteLayer,
        "options": GraniteOptions(residual_scale=residual),
    }


GRANITE = Family(model_type="granite", architecture="GraniteForCausalLM", read=_read)
