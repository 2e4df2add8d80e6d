"""Falcon-H1: a state-space layer and attention side by side, with a factor for each product."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families.granitemoehybrid import (
    StateSpace,
    StateSpaceOptions,
    read_state_space,
)
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import MLP, Attention, HiddenStates, Segments, make_norm
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.rotary import Rotation

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class FalconOptions(StateSpaceOptions):
    """The factors of a layer's products, in addition to the state-space options.

    Attributes:
        attention_in: Factor of attention's inputs.
        attention_out: Factor of attention's results.
        space_in: Factor of the state-space layer's inputs.
        space_out: Factor of its results.
        space: Factors of its gates, values, keys, queries and time steps.
        gate: Factor of the MLP's gate.
        down: Factor of the MLP's results.
    """

    attention_in: float
    attention_out: float
    space_in: float
    space_out: float
    space: tuple[float, ...]
    gate: float
    down: float


class FalconStateSpace(StateSpace):
    """A state-space layer with factors of its inputs and products."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(config, make)
        self.factor, self.factors = config.options.space_in, config.options.space

    def project(self, x: HiddenStates) -> Array:
        """Returns gates, values, keys, queries and time steps, side by side."""
        widths = (self.inside, self.inside, self.keys, self.keys, self.sizes.heads)
        factors = jnp.asarray(np.repeat(np.float32(self.factors), widths), x.dtype)
        return self.in_proj(x * self.factor) * factors


class FalconMLP(MLP):
    """A gated MLP with factors of its gate and its results."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(config, make)
        self.gate, self.down = config.options.gate, config.options.down

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row separately."""
        y = self.up_proj(x) * self.activation(self.gate_proj(x) * self.gate)
        return self.down_proj(y) * self.down


class FalconLayer(nnx.Module):
    """A state-space layer and attention on the same normalised input, then an MLP."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        self.factors: FalconOptions = config.options
        self.input_layernorm = make_norm(config.hidden_size, config, make)
        self.mamba = FalconStateSpace(config, make)
        self.self_attn = Attention(config, layer, make)
        self.pre_ff_layernorm = make_norm(config.hidden_size, config, make)
        self.feed_forward = FalconMLP(config, make)

    def __call__(
        self, x: HiddenStates, rotation: Rotation | None, segments: Segments
    ) -> tuple[HiddenStates, None]:
        """Returns the layer's result, and None: there are no experts to tally."""
        y, factors = self.input_layernorm(x), self.factors
        mixed = self.self_attn(y * factors.attention_in, rotation, segments)
        spaced = self.mamba(y, segments) * factors.space_out
        x = x + (spaced + mixed * factors.attention_out)
        return x + self.feed_forward(self.pre_ff_layernorm(x)), None


def _factors(fields: Fields, name: str, num: int) -> tuple[float, ...]:
    """Returns a list of factors, all 1 if it is missing."""
    given = fields.take(name, None)
    given = [1.0] * num if given is None else given
    if not isinstance(given, list | tuple) or len(given) != num:
        raise TypeError(checks.refused(name, f"a list of {num} numbers", given))
    return tuple(checks.number(name, value) for value in given)


def _read(fields: Fields) -> dict[str, Any]:
    fields.integer("num_logits_to_keep", 1, least=0, null=True)  # matters in generation only
    # Fields that only the original code reads.
    fields.neutral(attn_layer_indices=None, mamba_use_mlp=True)
    for name in ("mlp_expansion_factor", "expansion_factor"):
        fields.take(name, None)
    sizes = hf_common.sizes(fields, kv_heads=8, eps=1e-5)
    inside = fields.integer("mamba_d_ssm", 1024, null=True)
    expand = fields.integer("mamba_expand", 2)
    options = FalconOptions(
        layers=tuple(range(sizes["num_layers"])),
        out_bias=fields.flag("projectors_bias", False),
        normed=fields.flag("mamba_rms_norm", False),
        norm_first=fields.flag("mamba_norm_before_gate", True),
        attention_in=fields.number("attention_in_multiplier", 1.0),
        attention_out=fields.number("attention_out_multiplier", 1.0),
        space_in=fields.number("ssm_in_multiplier", 1.0),
        space_out=fields.number("ssm_out_multiplier", 1.0),
        space=_factors(fields, "ssm_multipliers", 5),
        **dict(zip(("gate", "down"), _factors(fields, "mlp_multipliers", 2), strict=True)),
        **read_state_space(fields, inside or expand * sizes["hidden_size"]),
    )
    # A factor of the keys has the effect of a factor of the scores.
    key = fields.number("key_multiplier", 1.0, above=0)
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "mlp_bias": fields.flag("mlp_bias", False),
        "attention_scale": key * sizes["head_dim"] ** -0.5,
        "scale_embedding": fields.number("embedding_multiplier", 1.0, above=0),
        "logit_scale": fields.number("lm_head_multiplier", 1.0, above=0),
        "layer": FalconLayer,
        "options": options,
    }


FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    read=_read,
    renames={"norm": "final_layernorm", "gated_norm": "norm"},
)
