"""Families with linear attention or short convolutions in some layers.

A layer of linear attention has a state instead of keys and values of all tokens (`delta_rule.py`).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.decoder_options import ACTIVATIONS, DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.delta_rule import short_convolution
from megatrain_jax._src.lm.models.families.deepseek import GroupedRouting, OuterBiasMixture
from megatrain_jax._src.lm.models.families.dense import WideNormAttention
from megatrain_jax._src.lm.models.families.mixtures import GatedSharedMixture
from megatrain_jax._src.lm.models.families.qwen_vision import read_vision
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.layers import (
    MLP,
    Attention,
    Heads,
    HiddenStates,
    Layer,
    Linear,
    Segments,
    Tallied,
    make_norm,
    rms_normalized,
)
from megatrain_jax._src.lm.models.linear_attention import gated_delta_rule
from megatrain_jax._src.lm.models.rotary import Rotation


@dataclass(frozen=True, kw_only=True)
class LinearAttentionOptions:
    """The sizes of linear attention.

    Attributes:
        layers: Numbers of the layers that have it.
        key_heads: Number of query and key heads.
        value_heads: Number of value heads; a multiple of `key_heads`.
        key_dim: Width of a head's queries and keys.
        value_dim: Width of a head's values.
        taps: Number of tokens the convolution sums, including the token itself.
        signed: Whether rates are up to 2, so that a key's old value may return with the other sign.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    signed: bool = False

    def __post_init__(self) -> None:
        """Checks the numbers of heads, as a configuration has them."""
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"`linear_num_key_heads` = {self.key_heads} must divide `linear_num_value_heads` = "
                f"{self.value_heads}"
            )


class Convolution(nnx.Module):
    """A convolution of each channel with its last tokens, and an optional bias."""

    def __init__(self, channels: int, taps: int, make: ParameterMaker, *, bias: bool = False):
        """Makes the parameters."""
        self.weight = make.weight(channels, 1, taps)
        self.bias = make.constant(0.0, channels) if bias else None

    def __call__(
        self, x: Float[Array, "rows length channels"], segments: Segments
    ) -> Float[Array, "rows length channels"]:
        """Sums the last tokens of the same document."""
        y = short_convolution(x, self.weight[...], segments)
        return y if self.bias is None else y + self.bias[...]


class GatedNorm(nnx.Module):
    """A root-mean-square norm over the last axis, in fp32, multiplied by a gate."""

    def __init__(self, dim: int, config: DecoderOptions, make: ParameterMaker):
        """Makes the weight."""
        self.eps, self.weight = config.norm_eps, make.constant(1.0, dim)

    def __call__(
        self, x: Float[Array, "*rows dim"], gate: Float[Array, "*rows dim"]
    ) -> Float[Array, "*rows dim"]:
        """Normalises the last axis and multiplies it by the gate's SiLU; keeps the dtype."""
        y = self.weight[...] * rms_normalized(x, self.eps).astype(x.dtype)
        return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


class GatedDeltaNet(nnx.Module):
    """Linear attention: a convolution of queries, keys and values, and the gated delta rule."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        sizes: LinearAttentionOptions = config.options
        self.sizes, self.activation = sizes, ACTIVATIONS[config.activation]
        self.rate_scale = 2.0 if sizes.signed else 1.0
        self.key_size = sizes.key_heads * sizes.key_dim
        self.value_size = sizes.value_heads * sizes.value_dim
        self.make_projections(config.hidden_size, make)
        self.make_convolutions(make)
        self.dt_bias = make.constant(1.0, sizes.value_heads)
        factors = jax.random.uniform(make.key(), (sizes.value_heads,), minval=0.01, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(factors).astype(make.dtype))
        self.make_output(config, make)

    def make_output(self, config: DecoderOptions, make: ParameterMaker) -> None:
        """Makes the parameters for `output`."""
        self.norm = GatedNorm(self.sizes.value_dim, config, make)
        self.out_proj = Linear(self.value_size, config.hidden_size, make)

    def make_convolutions(self, make: ParameterMaker) -> None:
        """Makes the parameters for `convolve`."""
        self.conv1d = Convolution(2 * self.key_size + self.value_size, self.sizes.taps, make)

    def make_projections(self, wide: int, make: ParameterMaker) -> None:
        """Makes the matrices for `project`."""
        self.in_proj_qkvz = Linear(wide, 2 * self.key_size + 2 * self.value_size, make)
        self.in_proj_ba = Linear(wide, 2 * self.sizes.value_heads, make)

    def project(self, x: HiddenStates) -> tuple[Array, Array, Array, Array]:
        """Returns queries, keys and values side by side, gates, logits of rates, and time steps.

        The files group them by key head: its queries and keys, then the values and the gates of the
        value heads that it serves.
        """
        sizes, group = self.sizes, self.sizes.value_heads // self.sizes.key_heads
        served = group * sizes.value_dim
        both = self.in_proj_qkvz(x).reshape(*x.shape[:2], sizes.key_heads, -1)
        at = [sizes.key_dim, 2 * sizes.key_dim, 2 * sizes.key_dim + served]
        q, k, v, z = (y.reshape(*x.shape[:2], -1) for y in jnp.split(both, at, axis=-1))
        numbers = self.in_proj_ba(x).reshape(*x.shape[:2], sizes.key_heads, -1)
        b, a = (y.reshape(*x.shape[:2], -1) for y in jnp.split(numbers, 2, axis=-1))
        return jnp.concatenate([q, k, v], axis=-1), z, b, a

    def __call__(self, x: HiddenStates, segments: Segments) -> HiddenStates:
        """Mixes the tokens of each row, or of each document if `segments` numbers them."""
        sizes, both = self.sizes, x.shape[:2]
        mixed, z, b, a = self.project(x)
        mixed = self.activation(self.convolve(mixed, segments))
        q, k, v = jnp.split(mixed, [self.key_size, 2 * self.key_size], axis=-1)
        steps = jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[...].reshape(a.shape[2:]))
        y = gated_delta_rule(
            q.reshape(*both, sizes.key_heads, -1),
            k.reshape(*both, sizes.key_heads, -1),
            v.reshape(*both, sizes.value_heads, -1),
            # Logarithms of each token's decay, in fp32 because they are summed within chunks.
            -jnp.exp(self.A_log[...].astype(jnp.float32)) * steps,
            self.rate_scale * jax.nn.sigmoid(b),
            segments,
        )
        return self.output(y, z.reshape(y.shape))

    def convolve(self, mixed: HiddenStates, segments: Segments) -> HiddenStates:
        """Returns queries, keys and values, each channel convolved with its last tokens."""
        return self.conv1d(mixed, segments)

    def output(self, y: Heads, z: Heads) -> HiddenStates:
        """Returns the product of the normalised and gated heads."""
        return self.out_proj(self.norm(y, z).reshape(*y.shape[:2], -1))


class GatedAttention(Attention):
    """Attention with results multiplied by a gate that is projected beside the queries."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        self.q_proj = Linear(config.hidden_size, 2 * self.query_size, make, bias=config.qkv_bias)

    def __call__(
        self, x: HiddenStates, rotation: Rotation | None, segments: Segments
    ) -> HiddenStates:
        """Computes attention within rows, or within documents if `segments` numbers them."""

        def heads(y: Array) -> Array:
            return y.reshape(*x.shape[:2], -1, self.head_dim)

        both = self.q_proj(x).reshape(*x.shape[:2], -1, 2 * self.head_dim)
        q, gate = jnp.split(both, 2, axis=-1)
        q, k = self.q_norm(q), self.k_norm(heads(self.k_proj(x)))
        if rotation is not None:
            q, k = self.rotate(q, k, rotation)
        mixed = self.attend(q, k, heads(self.v_proj(x)), segments) * jax.nn.sigmoid(gate)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


LAYER_KINDS = {"linear_attention": True, "full_attention": False}


def _qwen3_next(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers = sizes["num_layers"]
    step = fields.integer("full_attention_interval", 4)
    types = [[*LAYER_KINDS][(i + 1) % step == 0] for i in range(num_layers)]
    linear = hf_common.layers_of_kind(fields, "layer_types", LAYER_KINDS, types, num_layers)
    options = LinearAttentionOptions(
        layers=linear,
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        taps=fields.integer("linear_conv_kernel_dim", 4),
    )
    return {"options": options, "unrotated": linear}


# Qwen3-Next: linear attention in most layers, gated attention in the rest.
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    sizes={"kv_heads": 2, "head_dim": 256},
    rope={"share": 0.25},
    experts={
        "num": 512,
        "per_token": 10,
        "inside": 512,
        "shared": 512,
        "norm_topk_prob": True,
        "sparse": True,
    },
    always={
        "norm_offset": 1.0,
        "qk_norm": True,
        "attention": GatedAttention,
        "linear": GatedDeltaNet,
        "mixture": GatedSharedMixture,
    },
    more=_qwen3_next,
    kept=("mtp.",),
)


class SeparateDeltaNet(GatedDeltaNet):
    """Linear attention with separate projections for q/k/v, gates, rates and time steps."""

    def make_projections(self, wide: int, make: ParameterMaker) -> None:
        """Makes the matrices for `project`."""
        self.in_proj_qkv = Linear(wide, 2 * self.key_size + self.value_size, make)
        self.in_proj_z = Linear(wide, self.value_size, make)
        self.in_proj_b = Linear(wide, self.sizes.value_heads, make)
        self.in_proj_a = Linear(wide, self.sizes.value_heads, make)

    def project(self, x: HiddenStates) -> tuple[Array, Array, Array, Array]:
        """Returns queries, keys and values side by side, gates, logits of rates, and time steps."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)


# Qwen3.5: Qwen3-Next's layers with separate projections instead of fused ones, beside a vision
# tower. Positions in images don't affect text; layers that predict further tokens (`mtp`) are kept
# unchanged.
QWEN3_5_TEXT = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    scorer="Qwen3_5TextForSequenceClassification",
    has_tagger=False,
    neutral={
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
    },
    unread="mtp_num_hidden_layers mtp_use_dedicated_embeddings",
    sizes={"kv_heads": 4, "head_dim": 256},
    rope={"share": 0.25, "images": True},
    experts=None,
    always={**QWEN3_NEXT.always, "linear": SeparateDeltaNet},
)
# Transformers has no fields for two further neutral ones: every layer has experts, and their shares
# sum to 1.
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    scorer=None,
    neutral={**QWEN3_5_TEXT.neutral, "decoder_sparse_step": 1, "norm_topk_prob": True},
    sizes=lambda fields: {
        "kv_heads": 2,
        "head_dim": 256,
        "intermediate_size": fields.integer("moe_intermediate_size", 512),
    },
    experts={"num": 256, "per_token": 8, "inside": 512, "shared": 512, "normalize": True},
)
_QWEN3_5_FILES: dict[str, Any] = {
    "kept": ("model.visual.", "mtp."),
    "beside": "image_token_id video_token_id vision_start_token_id vision_end_token_id "
    "language_model_only",
    "body": "model.language_model",
    "head": "lm_head",
    "vision": partial(read_vision, prefix="model.visual", token=248_056, sections=(11, 11, 10)),
}
QWEN3_5 = multimodal_family(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    class_name="Qwen3_5ForConditionalGeneration",
    **_QWEN3_5_FILES,
)
QWEN3_5_MOE = multimodal_family(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_5_moe",
    class_name="Qwen3_5MoeForConditionalGeneration",
    **_QWEN3_5_FILES,
)


class OlmoDeltaNet(GatedDeltaNet):
    """Linear attention with a matrix for each product."""

    def make_projections(self, wide: int, make: ParameterMaker) -> None:
        """Makes the matrices for `project`."""
        self.q_proj, self.k_proj = (Linear(wide, self.key_size, make) for _ in "qk")
        self.v_proj, self.g_proj = (Linear(wide, self.value_size, make) for _ in "vg")
        self.a_proj, self.b_proj = (Linear(wide, self.sizes.value_heads, make) for _ in "ab")

    def make_convolutions(self, make: ParameterMaker) -> None:
        """Makes the parameters for `convolve`."""
        taps = self.sizes.taps
        self.q_conv1d, self.k_conv1d = (Convolution(self.key_size, taps, make) for _ in "qk")
        self.v_conv1d = Convolution(self.value_size, taps, make)

    def make_output(self, config: DecoderOptions, make: ParameterMaker) -> None:
        """Makes the parameters for `output`."""
        self.o_norm = GatedNorm(self.sizes.value_dim, config, make)
        self.o_norm.eps = 1e-5  # for any configuration, as in Transformers
        self.o_proj = Linear(self.value_size, config.hidden_size, make)

    def project(self, x: HiddenStates) -> tuple[Array, Array, Array, Array]:
        """Returns queries, keys and values side by side, gates, logits of rates, and time steps."""
        mixed = jnp.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        return mixed, self.g_proj(x), self.b_proj(x), self.a_proj(x)

    def convolve(self, mixed: HiddenStates, segments: Segments) -> HiddenStates:
        """Returns queries, keys and values, each channel convolved with its last tokens."""
        # In one call, because generation keeps one convolution's last tokens for each layer.
        parts = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        weight = jnp.concatenate([part.weight[...] for part in parts])
        return short_convolution(mixed, weight, segments)

    def output(self, y: Heads, z: Heads) -> HiddenStates:
        """Returns the product of the normalised and gated heads."""
        return self.o_proj(self.o_norm(y, z).reshape(*y.shape[:2], -1))


class OlmoLinearLayer(nnx.Module):
    """Linear attention, then an MLP, each with a norm at its input."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        self.attention_layer_norm = make_norm(config.hidden_size, config, make)
        self.linear_attn = OlmoDeltaNet(config, make)
        self.feedforward_layer_norm = make_norm(config.hidden_size, config, make)
        self.mlp = MLP(config, make)

    def __call__(self, x: HiddenStates, rotation: Rotation | None, segments: Segments) -> Tallied:
        """Returns the layer's result, and None: there are no experts to tally."""
        x = x + self.linear_attn(self.attention_layer_norm(x), segments)
        return x + self.mlp(self.feedforward_layer_norm(x)), None


def olmo_hybrid_layer(config: DecoderOptions, layer: int, make: ParameterMaker) -> nnx.Module:
    """Makes a layer with linear attention, or an OLMo 2's."""
    is_linear = layer in config.options.layers
    return (OlmoLinearLayer if is_linear else Layer)(config, layer, make)


def _olmo_hybrid(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers = sizes["num_layers"]
    types = [[*LAYER_KINDS][i % 4 == 3] for i in range(num_layers)]
    types = types if "full_attention" in types else [*types[:-1], "full_attention"]
    linear = hf_common.layers_of_kind(fields, "layer_types", LAYER_KINDS, types, num_layers)
    if not 0 < len(linear) < num_layers:
        raise ValueError("`layer_types` of an olmo_hybrid must have both kinds of layers")
    heads = [fields.integer(f"linear_num_{name}_heads", None) for name in ("key", "value")]
    key_heads, value_heads = (number or sizes["num_heads"] for number in heads)
    key_dim = fields.integer("linear_key_head_dim", None)
    key_dim = key_dim or int(0.75 * sizes["hidden_size"] / key_heads)
    # A null instead of a base of wavelengths means that no layer rotates.
    parameters, theta = hf_common.rope_parameters(fields), fields.take("rope_theta", 10_000.0)
    rotates = parameters.get("rope_theta", theta) is not None
    if not rotates:
        parameters = {"rope_theta": 10_000.0}
    return {
        "rope": hf_common.rope(fields, sizes["head_dim"], parameters=parameters),
        "unrotated": linear if rotates else tuple(range(num_layers)),
        "options": LinearAttentionOptions(
            layers=linear,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=fields.integer("linear_value_head_dim", None) or 2 * key_dim,
            taps=fields.integer("linear_conv_kernel_dim", 4),
            signed=fields.flag("linear_allow_neg_eigval", True),
        ),
    }


# OLMo Hybrid: linear attention with norms at the inputs in most layers, an OLMo 2's layer in the
# rest. The unread fields are those of fresh parameters.
OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    scorer=None,
    unread="linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor",
    rope=None,
    always={
        "norm_in_fp32": True,
        "output_norms": True,
        "layer": olmo_hybrid_layer,
        "attention": WideNormAttention,
    },
    more=_olmo_hybrid,
)


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

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        wide, sizes = config.hidden_size, config.options
        self.in_proj = Linear(wide, 3 * wide, make, bias=sizes.bias)
        self.conv = Convolution(wide, sizes.taps, make, bias=sizes.bias)
        self.out_proj = Linear(wide, wide, make, bias=sizes.bias)

    def __call__(self, x: HiddenStates, segments: Segments) -> HiddenStates:
        """Mixes the tokens of each row, or of each document if `segments` numbers them."""
        before, after, x = jnp.split(self.in_proj(x), 3, axis=-1)
        return self.out_proj(after * self.conv(before * x, segments))


_CONVOLVED = {"conv": True, "full_attention": False}


def _inside(fields: Fields, given: int) -> int:
    """Returns the width inside an MLP: two thirds of the given one, rounded up."""
    given = fields.integer("block_ff_dim", None) or given  # its older name
    step = fields.integer("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0, above=0, null=True)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return given
    given = int(2 * given / 3)
    return given if factor is None else step * -(-int(factor * given) // step)


def _lfm2(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers = sizes["num_layers"]
    indices = fields.listed("full_attn_idxs", int, "integers")
    attends = range(num_layers) if indices is None else indices
    types = ["full_attention" if i in attends else "conv" for i in range(num_layers)]
    layers = hf_common.layers_of_kind(fields, "layer_types", _CONVOLVED, types, num_layers)
    return {
        "intermediate_size": _inside(fields, sizes["intermediate_size"]),
        "tie_embeddings": fields.flag("tie_embedding", sizes["tie_embeddings"]),
        "unrotated": layers,
        "options": ConvolutionOptions(
            layers=layers,
            taps=fields.integer("conv_L_cache", 3),
            bias=fields.flag("conv_bias", False),
        ),
    }


_LFM2_SIZES: dict[str, Any] = {
    "kv_heads": 8,
    "eps": 1e-5,
    "eps_name": "norm_eps",
    "tied": True,
    "activation": "silu",
}


# LFM2: a short convolution between two gates in most layers, attention in the rest. Transformers
# doesn't read the unread fields: other names of its fields, and settings of fresh parameters.
LFM2 = Family(
    model_type="lfm2",
    scorer=None,
    neutral={"block_use_swiglu": True, "use_pos_enc": True, "hidden_act": "silu"},
    unread="block_dim block_norm_eps conv_dim conv_dim_out num_heads block_mlp_init_scale "
    "block_out_init_scale block_use_xavier_init conv_use_xavier_init",
    sizes={**_LFM2_SIZES, "intermediate_size": 12_288},
    rope={"theta": 1_000_000.0},
    always={"qk_norm": True, "linear": ShortConvolution},
    more=_lfm2,
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


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeOptions(ConvolutionOptions, GroupedRouting):
    """The sizes of the convolutions, and the options of routing."""


class Lfm2Mixture(OuterBiasMixture):
    """Experts chosen by biased scores."""

    least = 1e-6


def _lfm2_moe(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers = sizes["num_layers"]
    layers = hf_common.layers_of_kind(fields, "layer_types", _CONVOLVED, [], num_layers)
    experts = hf_common.experts(
        fields,
        sizes,
        names=("num_experts", "num_experts"),
        num=32,
        per_token=4,
        inside=1792,
        norm_topk_prob=True,
        layers=range(fields.integer("num_dense_layers", 2, least=0), num_layers),
        balance=None,
    )
    return {
        "tie_embeddings": fields.flag("tie_embedding", sizes["tie_embeddings"]),
        "unrotated": layers,
        "experts": experts,
        "options": Lfm2MoeOptions(
            layers=layers,
            taps=fields.integer("conv_L_cache", 3),
            bias=fields.flag("conv_bias", False),
            groups=1,
            groups_per_token=1,
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
    }


# LFM2 with experts in all but the first layers, chosen by biased scores.
LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    neutral={"use_expert_bias": True},
    unread="",
    sizes={**_LFM2_SIZES, "intermediate_size": 7168},
    always={**LFM2.always, "mixture": Lfm2Mixture},
    more=_lfm2_moe,
    renames={**LFM2.renames, "e_score_correction_bias": "expert_bias"},
)
