"""Granite 4: a state-space layer in most layers, attention in the rest; experts in some models.

A state-space layer (Mamba-2, https://arxiv.org/abs/2405.21060) is linear attention with a decay
that depends on the token, and one pair of keys and queries for many heads.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.activation_functions import ACTIVATIONS
from megatrain_jax._src.lm.models.expert_functions import Weights, gated_fused
from megatrain_jax._src.lm.models.families.qwen3_next import Convolution, HybridLayer
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import (
    Attention,
    ExpertMatrix,
    FusedMLP,
    HiddenStates,
    Linear,
    MixtureOfExperts,
    Segments,
)
from megatrain_jax._src.lm.models.linear_attention import gated_delta_rule
from megatrain_jax._src.lm.models.moe import Experts, Routed, route
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.rotary import Rotation

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


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

    def __init__(self, dim: int, config: "DecoderConfig", make: ParameterMaker):
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

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
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


@dataclass(frozen=True, kw_only=True)
class GraniteHybridOptions(StateSpaceOptions):
    """Options of Granite 4's layers, in addition to the state-space ones.

    Attributes:
        residual_scale: Factor of a layer's two outputs before they are added.
        shared_size: Width inside the MLP.
    """

    residual_scale: float
    shared_size: int


class SharedMLP(FusedMLP):
    """The MLP that all tokens share."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(replace(config, intermediate_size=config.options.shared_size), make)


class GraniteRouter(nnx.Module):
    """A router, under its name in the files."""

    def __init__(self, wide: int, num: int, make: ParameterMaker):
        """Makes the parameter."""
        self.layer = Linear(wide, num, make)


class GraniteMixture(MixtureOfExperts):
    """Experts with gate and up matrices joined in one, each a tensor of all experts."""

    def __init__(self, config: "DecoderConfig", experts: Experts, make: ParameterMaker):
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


class GraniteHybridLayer(HybridLayer):
    """A state-space layer or attention, then an MLP and perhaps experts, side by side."""

    attention = Attention
    linear = StateSpace
    dense = SharedMLP

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        # Experts are beside the MLP, not in place of it.
        super().__init__(replace(config, experts=None), layer, make)
        self.residual_scale, experts = config.options.residual_scale, config.experts
        self.block_sparse_moe = None if experts is None else GraniteMixture(config, experts, make)

    def __call__(
        self, x: HiddenStates, rotation: Rotation | None, segments: Segments
    ) -> tuple[HiddenStates, Float[Array, "3 num"] | None]:
        """Returns the layer's result, and the tally of its experts' load if it has experts."""
        y = self.input_layernorm(x)
        y = (
            self.linear_attn(y, segments)
            if self.is_linear
            else self.self_attn(y, rotation, segments)
        )
        x = x + y * self.residual_scale
        y, tally = self.post_attention_layernorm(x), None
        mixed, _ = self.feed_forward(y, segments)
        if self.block_sparse_moe is not None:
            routed, tally = self.block_sparse_moe(y, segments)
            mixed = routed + mixed
        return x + mixed * self.residual_scale, tally


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


def _state_space_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    names = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
    second = fields.listed("layers_block_type", str, "names")
    types = fields.listed("layer_types", str, "names") or second or ["mamba"] * num_layers
    if len(types) != num_layers or set(types) - set(names):
        allowed = f"one of {', '.join(names)} for each of {num_layers} layers"
        raise ValueError(checks.refused("layer_types", allowed, types))
    return tuple(i for i, name in enumerate(types) if names[name])


def _experts(fields: Fields, sizes: dict[str, Any]) -> Experts | None:
    num = fields.integer("num_local_experts", 8, least=0)
    per_token = fields.take("num_experts_per_tok", 2)
    balance = fields.number("router_aux_loss_coef", 0.001, least=0)
    if not num:
        return None
    return hf_common.experts(
        fields,
        ("num_local_experts", "num_local_experts"),
        num=num,
        per_token=per_token,
        intermediate_size=sizes["intermediate_size"],
        normalize=True,
        layers=tuple(range(sizes["num_layers"])),
        balance=balance,
    )


def _read(fields: Fields) -> dict[str, Any]:
    fields.neutral(normalization_function="rmsnorm")  # not read by Transformers
    fields.take("init_method", None)
    sizes = hf_common.sizes(fields)
    state_space = read_state_space(fields, fields.integer("mamba_expand", 2) * sizes["hidden_size"])
    linear = _state_space_layers(fields, sizes["num_layers"])
    positions = fields.take("position_embedding_type", None)
    if not isinstance(positions, str | None):
        raise TypeError(checks.refused("position_embedding_type", "a string or null", positions))
    factors = ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    embedding, attention, residual = (fields.number(name, 1.0, above=0) for name in factors)
    options = GraniteHybridOptions(
        layers=linear,
        out_bias=state_space["in_bias"],
        residual_scale=residual,
        shared_size=fields.integer("shared_intermediate_size", 1024),
        **state_space,
    )
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "rope": hf_common.rope(fields, sizes["head_dim"]),
        "unrotated": linear if positions == "rope" else tuple(range(sizes["num_layers"])),
        "scale_embedding": embedding,
        "attention_scale": attention,
        "logit_scale": 1.0 / fields.number("logits_scaling", 1.0, above=0),
        "experts": _experts(fields, sizes),
        "layer": GraniteHybridLayer,
        "options": options,
    }


GRANITEMOEHYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    read=_read,
    stacked=True,
    renames={
        "linear_attn": "mamba",
        "gated_norm": "norm",
        "mlp": "shared_mlp",
        "gate_up_proj": "input_linear",
        "down_proj": "output_linear",
    },
)
