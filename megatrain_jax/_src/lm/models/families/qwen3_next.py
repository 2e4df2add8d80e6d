"""Qwen3-Next: linear attention in most layers, gated attention in the rest.

A layer of linear attention has a state instead of keys and values of all tokens (`delta_rule`).
Qwen3.5 derives from this family, with different names for its projections.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.activation_functions import ACTIVATIONS
from megatrain_jax._src.lm.models.delta_rule import short_convolution
from megatrain_jax._src.lm.models.families.qwen2_moe import GatedSharedMixture
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import (
    Attention,
    HiddenStates,
    Layer,
    Linear,
    Segments,
    make_norm,
)
from megatrain_jax._src.lm.models.linear_attention import gated_delta_rule
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.rotary import Rotation

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


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
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int


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

    def __init__(self, dim: int, config: "DecoderConfig", make: ParameterMaker):
        """Makes the weight."""
        self.eps, self.weight = config.norm_eps, make.constant(1.0, dim)

    def __call__(
        self, x: Float[Array, "*rows dim"], gate: Float[Array, "*rows dim"]
    ) -> Float[Array, "*rows dim"]:
        """Normalises the last axis and multiplies it by the gate's SiLU; keeps the dtype."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = self.weight[...] * y.astype(x.dtype)
        return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


class GatedDeltaNet(nnx.Module):
    """Linear attention: a convolution of queries, keys and values, and the gated delta rule."""

    def __init__(self, config: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        sizes: LinearAttentionOptions = config.options
        self.sizes, self.activation = sizes, ACTIVATIONS[config.activation]
        self.key_size = sizes.key_heads * sizes.key_dim
        self.value_size = sizes.value_heads * sizes.value_dim
        self.make_projections(config.hidden_size, make)
        self.conv1d = Convolution(2 * self.key_size + self.value_size, sizes.taps, make)
        self.dt_bias = make.constant(1.0, sizes.value_heads)
        factors = jax.random.uniform(make.key(), (sizes.value_heads,), minval=0.01, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(factors).astype(make.dtype))
        self.norm = GatedNorm(sizes.value_dim, config, make)
        self.out_proj = Linear(self.value_size, config.hidden_size, make)

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
        mixed = self.activation(self.conv1d(mixed, segments))
        q, k, v = jnp.split(mixed, [self.key_size, 2 * self.key_size], axis=-1)
        steps = jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[...])
        y = gated_delta_rule(
            q.reshape(*both, sizes.key_heads, -1),
            k.reshape(*both, sizes.key_heads, -1),
            v.reshape(*both, sizes.value_heads, -1),
            # Logarithms of each token's decay, in fp32 because they are summed within chunks.
            -jnp.exp(self.A_log[...].astype(jnp.float32)) * steps,
            jax.nn.sigmoid(b),
            segments,
        )
        y = self.norm(y, z.reshape(y.shape))
        return self.out_proj(y.reshape(*both, -1))


class GatedAttention(Attention):
    """Attention with results multiplied by a gate that is projected beside the queries."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
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


class HybridLayer(Layer):
    """Linear attention or attention, then an MLP or experts.

    Attributes:
        linear: Class of linear attention.
    """

    attention = GatedAttention
    linear: ClassVar[type[Any]] = GatedDeltaNet
    mixture = GatedSharedMixture

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer."""
        experts = config.experts
        self.input_layernorm = make_norm(config.hidden_size, config, make)
        # `Layer`'s constructor is not called: a layer has only one of the two, under its name in
        # the files.
        self.is_linear = layer in config.options.layers
        if self.is_linear:
            self.linear_attn = self.linear(config, make)
        else:
            self.self_attn = self.attention(config, layer, make)
        self.post_attention_layernorm = make_norm(config.hidden_size, config, make)
        if experts and layer in experts.layers:
            self.mlp = self.mixture(config, experts, make)
        else:
            self.mlp = self.dense(config, make)

    def __call__(
        self, x: HiddenStates, rotation: Rotation | None, segments: Segments
    ) -> tuple[HiddenStates, Float[Array, "3 num"] | None]:
        """Returns the layer's result, and the tally of its experts' load if it has experts."""
        y = self.input_layernorm(x)
        if self.is_linear:
            x = x + self.linear_attn(y, segments)
        else:
            x = x + self.self_attn(y, rotation, segments)
        y, tally = self.feed_forward(self.post_attention_layernorm(x), segments)
        return x + y, tally


def common(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` that Qwen3-Next and Qwen3.5 share.

    Args:
        fields: The configuration.
        sizes: The result of `hf_common.sizes`.
    """
    linear = _linear_layers(fields, sizes["num_layers"])
    options = LinearAttentionOptions(
        layers=linear,
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        taps=fields.integer("linear_conv_kernel_dim", 4),
    )
    if options.value_heads % options.key_heads:
        raise ValueError(
            f"`linear_num_key_heads` = {options.key_heads} must divide `linear_num_value_heads` = "
            f"{options.value_heads}"
        )
    return {
        **sizes,
        **hf_common.attention_bias(fields),
        "options": options,
        "unrotated": linear,
        "norm_offset": 1.0,
        "qk_norm": True,
        "layer": HybridLayer,
    }


def _linear_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers with linear attention: by `layer_types`, or all but every fourth."""
    step = fields.integer("full_attention_interval", 4)
    names = "linear_attention", "full_attention"
    types = fields.listed("layer_types", str, "names")
    types = types or [names[(i + 1) % step == 0] for i in range(num_layers)]
    unknown = sorted(set(types) - set(names))
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"`layer_types` must have one of {', '.join(names)} for each of the {num_layers} "
            f"layers of `num_hidden_layers`, but has {len(types)} entries"
            + (f" and {unknown[0]!r} among them" if unknown else "")
        )
    return tuple(i for i, name in enumerate(types) if name == names[0])


def _read(fields: Fields) -> dict[str, Any]:
    sizes = hf_common.sizes(fields, kv_heads=2, head_dim=256)
    return {
        **common(fields, sizes),
        "rope": hf_common.rope(fields, sizes["head_dim"], share=0.25),
        "experts": hf_common.experts(
            fields,
            ("num_experts", "num_local_experts"),
            num=512,
            per_token=10,
            intermediate_size=fields.integer("moe_intermediate_size", 512),
            shared_size=fields.integer("shared_expert_intermediate_size", 512),
            normalize=fields.flag("norm_topk_prob", True),
            layers=hf_common.sparse_layers(fields),
        ),
    }


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=_read,
    kept=("mtp.",),
)
