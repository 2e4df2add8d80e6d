"""Families with state-space layers.

A state-space layer (Mamba-2, https://arxiv.org/abs/2405.21060) is linear attention with a decay
that depends on the token, and one pair of keys and queries for many heads.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.decoder_options import ACTIVATIONS, DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.families.deepseek import (
    BiasedMixture,
    GroupedRouting,
    grouped_experts,
)
from megatrain_jax._src.lm.models.families.dense import granite_scales
from megatrain_jax._src.lm.models.families.hybrids import Convolution
from megatrain_jax._src.lm.models.family import ATTENTION_BIAS, MLP_BIAS, Family
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.layers import (
    MLP,
    Attention,
    ExpertMatrix,
    FusedMLP,
    HiddenStates,
    Layer,
    Linear,
    MixtureOfExperts,
    PlainMLP,
    Segments,
    Tallied,
    make_norm,
)
from megatrain_jax._src.lm.models.linear_attention import gated_delta_rule
from megatrain_jax._src.lm.models.moe import Experts, Routed, Weights, gated_fused, plain, route
from megatrain_jax._src.lm.models.rotary import Rotation


@dataclass(frozen=True, kw_only=True)
class StateSpaceOptions:
    """The sizes and options of state-space layers.

    Attributes:
        layers: Numbers of the layers that are one.
        heads: Number of heads.
        head_dim: Width of a head.
        groups: Number of pairs of keys and queries; divides `heads`.
        state_dim: Width of keys and queries.
        taps: Number of tokens the convolution sums, including the token itself.
        conv_bias: Whether the convolution has a bias.
        in_bias: Whether the product before it has a bias.
        out_bias: Whether the last product has a bias.
        normed: Whether results are normalised, in `groups` groups.
        norm_first: Whether the norm is before the gate.
        step_limits: Bounds of the time steps.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    normed: bool = True
    norm_first: bool = False
    step_limits: tuple[float, float]


class GroupedNorm(nnx.Module):
    """A root-mean-square norm of each group of channels, in fp32, before or after a gate."""

    def __init__(self, dim: int, config: DecoderOptions, make: ParameterMaker):
        """Makes the weight."""
        self.eps, self.groups = config.norm_eps, config.options.groups
        self.first, self.weight = config.options.norm_first, make.constant(1.0, dim)

    def __call__(
        self, x: Float[Array, "rows length dim"], gate: Float[Array, "rows length dim"]
    ) -> Float[Array, "rows length dim"]:
        """Normalises x and multiplies it by the gate's SiLU, in fp32."""
        gate = jax.nn.silu(gate.astype(jnp.float32))
        y = (x if self.first else x * gate).reshape(*x.shape[:2], self.groups, -1)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = self.weight[...] * y.reshape(x.shape)
        return y * gate if self.first else y


class StateSpace(nnx.Module):
    """A state-space layer: a convolution, a decayed sum over tokens, and a gate."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        sizes: StateSpaceOptions = config.options
        self.sizes, self.activation = sizes, ACTIVATIONS[config.activation]
        self.inside, self.keys = sizes.heads * sizes.head_dim, sizes.groups * sizes.state_dim
        channels = self.inside + 2 * self.keys
        wide, outputs = config.hidden_size, self.inside + channels + sizes.heads
        self.in_proj = Linear(wide, outputs, make, bias=sizes.in_bias)
        self.conv1d = Convolution(channels, sizes.taps, make, bias=sizes.conv_bias)
        self.dt_bias, self.D = make.constant(1.0, sizes.heads), make.constant(1.0, sizes.heads)
        self.A_log = nnx.Param(jnp.log(jnp.arange(1.0, sizes.heads + 1)).astype(make.dtype))
        self.gated_norm = GroupedNorm(self.inside, config, make) if sizes.normed else None
        self.out_proj = Linear(self.inside, wide, make, bias=sizes.out_bias)

    def project(self, x: HiddenStates) -> Array:
        """Returns gates, values, keys, queries and time steps, side by side."""
        return self.in_proj(x)

    def __call__(self, x: HiddenStates, segments: Segments) -> HiddenStates:
        """Mixes the tokens of each row, or of each document if `segments` numbers them."""
        sizes, both = self.sizes, x.shape[:2]
        channels = self.inside + 2 * self.keys
        gate, mixed, steps = jnp.split(
            self.project(x), [self.inside, self.inside + channels], axis=-1
        )
        mixed = self.activation(self.conv1d(mixed, segments))
        v, k, q = jnp.split(mixed, [self.inside, self.inside + self.keys], axis=-1)
        steps = steps.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)
        steps = jnp.clip(jax.nn.softplus(steps), *sizes.step_limits)
        v = v.reshape(*both, sizes.heads, -1).astype(jnp.float32)
        y = gated_delta_rule(
            q.reshape(*both, sizes.groups, -1),
            k.reshape(*both, sizes.groups, -1),
            v * steps[..., None],
            -jnp.exp(self.A_log[...].astype(jnp.float32)) * steps,
            None,
            segments,
        )
        y = (y + self.D[...].astype(jnp.float32)[:, None] * v).reshape(*both, -1)
        if self.gated_norm is None:
            y = y * jax.nn.silu(gate)
        else:
            y = self.gated_norm(y, gate)
        return self.out_proj(y.astype(x.dtype))


class GraniteRouter(nnx.Module):
    """A router, under its name in the files."""

    def __init__(self, wide: int, num: int, make: ParameterMaker):
        """Makes the parameter."""
        self.layer = Linear(wide, num, make)


class GraniteMixture(MixtureOfExperts):
    """Experts with gate and up matrices joined in one, each a tensor of all experts."""

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        # The base class's constructor is not called: its experts have three matrices.
        wide, inside = config.hidden_size, experts.intermediate_size
        self.settings, self.expert = experts, gated_fused(ACTIVATIONS[config.activation])
        self.router = GraniteRouter(wide, experts.num, make)
        self.gate_up_proj = ExpertMatrix(experts.num, wide, 2 * inside, make)
        self.down_proj = ExpertMatrix(experts.num, inside, wide, make)

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and the probabilities of all experts."""
        return route(self.router.layer(tokens), self.settings)

    def weights(self) -> Weights:
        """Returns the experts' weights; each array has the experts as its first axis."""
        return self.gate_up_proj(), self.down_proj()


class GraniteHybridLayer(Layer):
    """A state-space layer or attention, then an MLP and perhaps experts, side by side."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        # Experts are beside the MLP, not in place of it.
        super().__init__(replace(config, experts=None), layer, make)
        experts = config.experts
        self.block_sparse_moe = None if experts is None else GraniteMixture(config, experts, make)

    def feed_forward(self, x: HiddenStates, segments: Segments) -> Tallied:
        """Returns the sum of the MLP and the experts, if any, and the tally of their load."""
        mixed, tally = super().feed_forward(x, segments)
        if self.block_sparse_moe is not None:
            routed, tally = self.block_sparse_moe(x, segments)
            mixed = routed + mixed
        return mixed, tally


def read_state_space(fields: Fields, inside: int) -> dict[str, Any]:
    """Returns the arguments of `StateSpaceOptions` that all families read alike.

    Args:
        fields: The configuration.
        inside: The width of all heads together.
    """
    fields.take("mamba_chunk_size", None)  # has no effect on results
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    automatic = fields.take("mamba_d_head", "auto") == "auto"
    head_dim = inside // heads if automatic else fields.integer("mamba_d_head")
    if heads * head_dim != inside or heads % groups:
        raise ValueError(
            f"`mamba_n_heads` = {heads} of `mamba_d_head` = {head_dim} must be {inside} wide "
            f"together, and a multiple of `mamba_n_groups` = {groups}"
        )
    return {
        "heads": heads,
        "head_dim": head_dim,
        "groups": groups,
        "state_dim": fields.integer("mamba_d_state", 256),
        "taps": fields.integer("mamba_d_conv", 4),
        "conv_bias": fields.flag("mamba_conv_bias", True),
        "in_bias": fields.flag("mamba_proj_bias", False),
        "step_limits": _limits(fields),
    }


def _limits(fields: Fields) -> tuple[float, float]:
    """Returns the bounds of time steps; Transformers writes infinity as an object."""
    given = fields.take("time_step_limit", (0.0, np.inf))
    infinite = {"__float__": "Infinity"}
    limits = list(given) if isinstance(given, list | tuple) else []
    limits = [np.inf if x == infinite else x for x in limits]
    if len(limits) != 2 or not all(type(x) in (int, float) and x >= 0 for x in limits):
        raise TypeError(checks.refused("time_step_limit", "a list of two numbers", given))
    return float(limits[0]), float(limits[1])


def _granitemoehybrid(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers = sizes["num_layers"]
    kinds = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
    types = fields.listed("layers_block_type", str, "names") or ["mamba"] * num_layers
    linear = hf_common.layers_of_kind(fields, "layer_types", kinds, types, num_layers)
    state_space = read_state_space(fields, fields.integer("mamba_expand", 2) * sizes["hidden_size"])
    positions = fields.take("position_embedding_type", None)
    checks.instance("position_embedding_type", positions, str | None, "a string or null")
    num = fields.integer("num_local_experts", 8, least=0)
    for name in ("num_experts_per_tok", "router_aux_loss_coef"):
        fields.take(name, None)  # have no effect without experts
    experts = None
    if num:
        names = ("num_local_experts", "num_local_experts")
        usual = {"num": num, "per_token": 2, "normalize": True}
        experts = hf_common.experts(fields, sizes, names=names, **usual)
    return {
        **granite_scales(fields, sizes),
        "unrotated": linear if positions == "rope" else tuple(range(num_layers)),
        "experts": experts,
        "intermediate_size": fields.integer("shared_intermediate_size", 1024),
        "options": StateSpaceOptions(layers=linear, out_bias=state_space["in_bias"], **state_space),
    }


# Granite 4: a state-space layer in most layers, attention in the rest; experts in some models.
# Transformers doesn't read the neutral and the unread field.
GRANITEMOEHYBRID = Family(
    model_type="granitemoehybrid",
    class_name="GraniteMoeHybridForCausalLM",
    scorer=None,
    neutral={"normalization_function": "rmsnorm"},
    unread="init_method",
    always={"layer": GraniteHybridLayer, "linear": StateSpace, "dense": FusedMLP},
    more=_granitemoehybrid,
    stacked=True,
    renames={
        "linear_attn": "mamba",
        "gated_norm": "norm",
        "mlp": "shared_mlp",
        "gate_up_proj": "input_linear",
        "down_proj": "output_linear",
    },
)


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

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
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

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(config, make)
        self.gate, self.down = config.options.gate, config.options.down

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row separately."""
        y = self.up_proj(x) * self.activation(self.gate_proj(x) * self.gate)
        return self.down_proj(y) * self.down


class FalconLayer(nnx.Module):
    """A state-space layer and attention on the same normalised input, then an MLP."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        self.factors: FalconOptions = config.options
        self.input_layernorm = make_norm(config.hidden_size, config, make)
        self.mamba = FalconStateSpace(config, make)
        self.self_attn = Attention(config, layer, make)
        self.pre_ff_layernorm = make_norm(config.hidden_size, config, make)
        self.feed_forward = FalconMLP(config, make)

    def __call__(self, x: HiddenStates, rotation: Rotation | None, segments: Segments) -> Tallied:
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


def _falcon_h1(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    fields.integer("num_logits_to_keep", 1, least=0, null=True)  # matters in generation only
    inside = fields.integer("mamba_d_ssm", 1024, null=True)
    expand = fields.integer("mamba_expand", 2)
    options = FalconOptions(
        layers=(),  # no layer is one of state space alone
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
        "attention_scale": key * sizes["head_dim"] ** -0.5,
        "scale_embedding": fields.number("embedding_multiplier", 1.0, above=0),
        "logit_scale": fields.number("lm_head_multiplier", 1.0, above=0),
        "options": options,
    }


# Falcon-H1: a state-space layer and attention side by side, with a factor for each product. Only
# the original code reads the neutral and the unread fields.
FALCON_H1 = Family(
    model_type="falcon_h1",
    scorer=None,
    neutral={"mamba_use_mlp": True},
    unread="mlp_expansion_factor expansion_factor",
    sizes={"kv_heads": 8, "eps": 1e-5},
    flags=ATTENTION_BIAS | MLP_BIAS,
    always={"layer": FalconLayer},
    more=_falcon_h1,
    renames={"norm": "final_layernorm", "gated_norm": "norm"},
)


@dataclass(frozen=True, kw_only=True)
class NemotronHOptions(StateSpaceOptions):
    """What each layer is, in addition to the state-space options.

    Attributes:
        kinds: The kind of each layer: a key of `_NEMOTRON_H_KINDS`.
        routing: The options of expert routing.
        latent: Width of the vectors that experts read and write; None for the hidden states' width.
    """

    kinds: tuple[str, ...]
    routing: GroupedRouting
    latent: int | None


class PlainExperts(nnx.Module):
    """The two matrices of all experts of one layer."""

    def __init__(self, experts: Experts, wide: int, make: ParameterMaker):
        """Makes the matrices."""
        self.up_proj = ExpertMatrix(experts.num, wide, experts.intermediate_size, make)
        self.down_proj = ExpertMatrix(experts.num, experts.intermediate_size, wide, make)


class NemotronHMixture(BiasedMixture):
    """Experts without gates, which may read and write narrower vectors, and a shared one."""

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        # The base class's constructor is not called: its experts have three matrices.
        wide, options = config.hidden_size, config.options
        self.settings, self.routing = experts, options.routing
        self.expert = plain(ACTIVATIONS[config.activation])
        self.gate = self.router(wide, experts.num, make)
        self.experts = PlainExperts(experts, options.latent or wide, make)
        self.shared_experts = PlainMLP(
            replace(config, intermediate_size=experts.shared_size or 0), make
        )
        between, bias = options.latent, config.mlp_bias
        self.fc1_latent_proj = Linear(wide, between, make, bias=bias) if between else None
        self.fc2_latent_proj = Linear(between, wide, make, bias=bias) if between else None

    def __call__(self, x: HiddenStates, segments: Segments) -> tuple[HiddenStates, None]:
        """Returns the result of all experts for x, and None: no loss balances them."""
        y = x.reshape(-1, x.shape[-1])
        chosen, shares, _ = self.route(y)
        y = y if self.fc1_latent_proj is None else self.fc1_latent_proj(y)
        y = mix(y, chosen, shares, self.weights(), self.expert)
        y = y if self.fc2_latent_proj is None else self.fc2_latent_proj(y)
        return self.with_shared(y.reshape(x.shape), x), None

    def weights(self) -> Weights:
        """Returns the experts' weights; each array has the experts as its first axis."""
        return self.experts.up_proj(), self.experts.down_proj()


class NemotronHLayer(nnx.Module):
    """One part alone, with a norm and a residual connection.

    Attributes:
        mixes_tokens: Whether this part mixes tokens, so that generation keeps a cache for it.
    """

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        self.input_layernorm = make_norm(config.hidden_size, config, make)
        kind, experts = config.options.kinds[layer], config.experts
        self.mixes_tokens = kind in ("linear_attention", "full_attention")
        if kind == "linear_attention":
            # The configuration's activation is that of MLPs.
            self.mixer = StateSpace(replace(config, activation="silu"), make)
        elif kind == "full_attention":
            self.mixer = Attention(config, layer, make)
        elif experts and kind == "moe":
            self.mixer = NemotronHMixture(config, experts, make)
        else:
            self.mixer = PlainMLP(config, make)

    def __call__(self, x: HiddenStates, rotation: Rotation | None, segments: Segments) -> Tallied:
        """Returns the layer's result, and None: there are no experts to tally."""
        y = self.input_layernorm(x)
        if isinstance(self.mixer, Attention):
            y = self.mixer(y, rotation, segments)
        elif isinstance(self.mixer, NemotronHMixture):
            y, _ = self.mixer(y, segments)
        elif isinstance(self.mixer, StateSpace):
            y = self.mixer(y, segments)
        else:
            y = self.mixer(y)
        return x + y, None


_NEMOTRON_H_KINDS = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}


def _nemotron_h_kinds(fields: Fields) -> list[str]:
    """Returns the kind of each layer, by names or letters; Transformers has further names."""
    pattern, found = fields.take("hybrid_override_pattern", None), None
    for name in ("layer_types", "layers_block_type"):
        found = fields.listed(name, str, "names") or found
    letters = {letter: kind for kind, letter in _NEMOTRON_H_KINDS.items()}
    if found is None and pattern is not None:
        if not isinstance(pattern, str) or set(pattern) - set(letters):
            allowed = f"a string of {', '.join(letters)}"
            raise ValueError(checks.refused("hybrid_override_pattern", allowed, pattern))
        return [letters[letter] for letter in pattern]
    older = {"mamba": "linear_attention", "attention": "full_attention"}
    return [older.get(kind, kind) for kind in found or _NEMOTRON_H_KINDS]


def _nemotron_h(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    kinds, num_layers = _nemotron_h_kinds(fields), sizes["num_layers"]

    def layers(kind: str) -> tuple[int, ...]:
        known = {name: name == kind for name in _NEMOTRON_H_KINDS}
        return hf_common.chosen_layers("layers_block_type", kinds, known, num_layers)

    heads, groups = fields.integer("mamba_num_heads", 128), fields.integer("n_groups", 8)
    if heads % groups:
        raise ValueError(f"`n_groups` = {groups} must divide `mamba_num_heads` = {heads}")
    fields.neutral(attention_head_dim=sizes["head_dim"])
    found = grouped_experts(
        fields,
        sizes,
        per_token=2,
        layers=layers("moe"),
        moe_intermediate_size=7688,
        n_routed_experts=8,
        routed_scaling_factor=1.0,
    )
    shared = fields.integer("moe_shared_expert_intermediate_size", 7688)
    experts, bias = found["experts"], fields.flag("use_bias", False)
    return {
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "unrotated": tuple(range(num_layers)),
        "experts": experts and replace(experts, shared_size=shared),
        "options": NemotronHOptions(
            layers=layers("linear_attention"),
            kinds=tuple(kinds),
            routing=found["options"],
            latent=fields.integer("moe_latent_size", None, null=True),
            heads=heads,
            head_dim=fields.integer("mamba_head_dim", 64),
            groups=groups,
            state_dim=fields.integer("ssm_state_size", 128),
            taps=fields.integer("conv_kernel", 4),
            conv_bias=fields.flag("use_conv_bias", True),
            in_bias=bias,
            out_bias=bias,
            step_limits=(fields.number("time_step_min", 0.001, least=0), np.inf),
        ),
    }


# Nemotron-H and Nemotron 3: each layer is a state-space layer, attention, an MLP or experts.
# Transformers doesn't read the unread fields, which matter in generation, for fresh parameters or
# in the original code only; layers that predict further tokens (`mtp`) are kept unchanged.
NEMOTRON_H = Family(
    model_type="nemotron_h",
    scorer=None,
    neutral={"mamba_hidden_act": "silu"},
    unread="chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype moe_shared_expert_overlap "
    "mtp_hybrid_override_pattern mtp_layers_block_type num_logits_to_keep "
    "rescale_prenorm_residual sliding_window time_step_floor time_step_limit time_step_max "
    "use_mamba_kernels",
    sizes=lambda fields: {
        "num_hidden_layers": len(_nemotron_h_kinds(fields)),
        "kv_heads": 8,
        "head_dim": 128,
        "eps": 1e-5,
        "eps_name": "layer_norm_epsilon",
        "act_name": "mlp_hidden_act",
        "hidden_act": "relu2",
    },
    flags=MLP_BIAS,
    rope=None,
    always={"norm_in_fp32": True, "layer": NemotronHLayer},
    more=_nemotron_h,
    renames={
        "embed_tokens": "embeddings",
        "norm": "norm_f",
        "input_layernorm": "norm",
        "gated_norm": "norm",
    },
    body="backbone",
    kept=("mtp.",),
)
