"""LFM2: a short convolution between two gates in most layers, attention in the rest."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families.qwen3_next import Convolution, HybridLayer
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import Attention, HiddenStates, Linear, Segments
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class ConvolutionOptions:
    """The sizes of the convolutions.

    Attributes:
        layers: Numbers of the layers that have one.
        taps: Number of tokens it sums, including the token itself.
        bias: Whether it and the products around it have a bias.
    """

    layers: tuple[int, ...]
    taps: int
    bias: bool


class ShortConvolution(nnx.Module):
    """A convolution of gated tokens; its result is gated again."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        wide, sizes = config.hidden_size, config.options
        self.in_proj = Linear(wide, 3 * wide, make, bias=sizes.bias)
        self.conv = Convolution(wide, sizes.taps, make, bias=sizes.bias)
        self.out_proj = Linear(wide, wide, make, bias=sizes.bias)

    def __call__(self, x: HiddenStates, segments: Segments) -> HiddenStates:
        """Mixes the tokens of each row, or of each document if `segments` numbers them."""
        before, after, x = jnp.split(self.in_proj(x), 3, axis=-1)
        return self.out_proj(after * self.conv(before * x, segments))


class Lfm2Layer(HybridLayer):
    """A convolution or attention, then an MLP."""

    attention = Attention
    linear = ShortConvolution


def _convolutions(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers with a convolution: by `layer_types`, or by `full_attn_idxs`."""
    types = fields.listed("layer_types", str, "names")
    indices = fields.listed("full_attn_idxs", int, "integers")
    if types is None:
        attends = set(range(num_layers) if indices is None else indices)
        return tuple(i for i in range(num_layers) if i not in attends)
    if len(types) != num_layers or set(types) - {"conv", "full_attention"}:
        allowed = f'"conv" or "full_attention" for each of {num_layers} layers'
        raise ValueError(checks.refused("layer_types", allowed, types))
    return tuple(i for i, name in enumerate(types) if name == "conv")


def _inside(fields: Fields, given: int) -> int:
    """Returns the width inside an MLP: two thirds of the given one, rounded up."""
    given = fields.integer("block_ff_dim", None) or given  # its older name
    step = fields.integer("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0, above=0, null=True)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return given
    given = int(2 * given / 3)
    return given if factor is None else step * -(-int(factor * given) // step)


def _read(fields: Fields) -> dict[str, Any]:
    # Not read by Transformers: other names of its fields, and settings of fresh parameters.
    for name in ("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads"):
        fields.take(name, None)
    for name in ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"):
        fields.take(name, None)
    fields.take("conv_use_xavier_init", None)
    fields.neutral(block_use_swiglu=True, use_pos_enc=True, hidden_act="silu")
    sizes = hf_common.sizes(
        fields,
        kv_heads=8,
        eps=1e-5,
        eps_name="norm_eps",
        tied=True,
        activation="silu",
        intermediate_size=12_288,
    )
    options = ConvolutionOptions(
        layers=_convolutions(fields, sizes["num_layers"]),
        taps=fields.integer("conv_L_cache", 3),
        bias=fields.flag("conv_bias", False),
    )
    return {
        **sizes,
        "intermediate_size": _inside(fields, sizes["intermediate_size"]),
        "tie_embeddings": fields.flag("tie_embedding", sizes["tie_embeddings"]),
        "rope": hf_common.rope(fields, sizes["head_dim"], theta=1_000_000.0),
        "unrotated": options.layers,
        "qk_norm": True,
        "layer": Lfm2Layer,
        "options": options,
    }


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    read=_read,
    renames={
        "norm": "embedding_norm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "linear_attn": "conv",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "o_proj": "out_proj",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
)
