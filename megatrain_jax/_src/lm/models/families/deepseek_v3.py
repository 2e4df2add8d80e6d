"""DeepSeek V3 and R1, Moonlight: latent attention, and experts as in GLM 4.5.

Keys and values of all heads are computed from one narrow vector per token, the latent
(https://arxiv.org/abs/2405.04434, section 2.1); all heads share the rotated part of the keys.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.causal_attention import attention
from megatrain_jax._src.lm.models.families import glm4_moe
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import HiddenStates, Linear, RMSNorm, Segments
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.past import Past
from megatrain_jax._src.lm.models.rotary import Rotation, rotate

if TYPE_CHECKING:
    from megatrain_jax._src.lm.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class DeepseekOptions(glm4_moe.GroupedRouting):
    """The sizes of latent attention, in addition to expert routing.

    Attributes:
        query_rank: Width of the queries' own latent; None for queries without one.
        latent_rank: Width of the latent of keys and values.
        plain_dim: Width of the unrotated part of a head's queries and keys.
        rotated_dim: Width of the rotated part; the keys' is the same for all heads.
        value_dim: Width of a head's values, at most that of its keys.
    """

    query_rank: int | None
    latent_rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int


class LatentAttention(nnx.Module):
    """Causal attention with keys and values computed from a latent."""

    def __init__(self, config: "DecoderConfig", layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        sizes: DeepseekOptions = config.options
        wide, heads, bias = config.hidden_size, config.num_heads, config.out_bias
        self.sizes, self.scale = sizes, config.attention_scale
        self.interleaved = config.rope.interleaved
        queries = heads * (sizes.plain_dim + sizes.rotated_dim)
        if sizes.query_rank is None:
            self.q_proj = Linear(wide, queries, make)
        else:
            self.q_a_proj = Linear(wide, sizes.query_rank, make, bias=bias)
            self.q_a_layernorm = _latent_norm(sizes.query_rank, config, make)
            self.q_b_proj = Linear(sizes.query_rank, queries, make)
        latent = sizes.latent_rank + sizes.rotated_dim
        self.kv_a_proj_with_mqa = Linear(wide, latent, make, bias=bias)
        self.kv_a_layernorm = _latent_norm(sizes.latent_rank, config, make)
        self.kv_b_proj = Linear(
            sizes.latent_rank, heads * (sizes.plain_dim + sizes.value_dim), make
        )
        self.o_proj = Linear(heads * sizes.value_dim, wide, make, bias=bias)

    def __call__(self, x: HiddenStates, rotation: Rotation, segments: Segments) -> HiddenStates:
        """Computes attention within rows, or within documents if `segments` numbers them."""
        sizes, (rows, length, _) = self.sizes, x.shape
        q = self.q_proj(x) if sizes.query_rank is None else self._queries(x)
        q = q.reshape(rows, length, -1, sizes.plain_dim + sizes.rotated_dim)
        q, q_rotated = jnp.split(q, [sizes.plain_dim], axis=-1)
        latent, k_rotated = jnp.split(self.kv_a_proj_with_mqa(x), [sizes.latent_rank], axis=-1)
        latent = self.kv_a_layernorm(latent)
        q_rotated, k_rotated = (
            rotate(y, rotation.cos_sin, interleaved=self.interleaved)
            for y in (q_rotated, k_rotated[:, :, None])
        )
        if isinstance(segments, Past):
            mixed = segments.attend_latent(self, q, q_rotated, latent, k_rotated)
        else:
            mixed = self.attend(q, q_rotated, latent, k_rotated, segments)
        return self.o_proj(mixed.reshape(rows, length, -1))

    def attend(
        self,
        q: Float[Array, "rows length heads plain_dim"],
        q_rotated: Float[Array, "rows length heads rotated_dim"],
        latent: Float[Array, "rows length latent_rank"],
        k_rotated: Float[Array, "rows length 1 rotated_dim"],
        segments: Segments,
    ) -> Float[Array, "rows length heads value_dim"]:
        """Returns for each query the mean of the values that its head computes from latents."""
        sizes = self.sizes
        both = self.kv_b_proj(latent)
        both = both.reshape(*q.shape[:3], sizes.plain_dim + sizes.value_dim)
        k, v = jnp.split(both, [sizes.plain_dim], axis=-1)
        # All heads share one rotated part of the keys.
        k_rotated = jnp.broadcast_to(k_rotated, q_rotated.shape)
        q, k = jnp.concatenate([q, q_rotated], -1), jnp.concatenate([k, k_rotated], -1)
        # `attention` requires values as wide as keys; the padding's results are zeros, and cut off.
        v = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[-1] - sizes.value_dim)])
        mixed = attention(q, k, v, segments=segments, scale=self.scale)
        return mixed[..., : sizes.value_dim]

    def _queries(self, x: HiddenStates) -> Float[Array, "rows length queries"]:
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


def _latent_norm(dim: int, config: "DecoderConfig", make: ParameterMaker) -> RMSNorm:
    norm = RMSNorm(dim, config, make)
    norm.eps = 1e-6  # for any configuration, as in Transformers
    return norm


class DeepseekLayer(glm4_moe.Glm4MoeLayer):
    """A layer with latent attention."""

    attention = LatentAttention


def read_latent(
    fields: Fields,
    *,
    query_rank: int = 1536,
    plain_dim: int = 128,
    value_dim: int = 128,
    **sizes: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of `DecoderConfig` for sizes and attention, and of its options.

    Args:
        fields: The configuration.
        query_rank: Default of `q_lora_rank`.
        plain_dim: Default of `qk_nope_head_dim`.
        value_dim: Default of `v_head_dim`.
        **sizes: See `hf_common.sizes`.
    """
    plain = fields.integer("qk_nope_head_dim", plain_dim)
    rotated, value = fields.integer("qk_rope_head_dim", 64), fields.integer("v_head_dim", value_dim)
    arguments = hf_common.sizes(fields, head_dim=rotated, **sizes)
    if arguments["num_kv_heads"] != arguments["num_heads"] or value > plain + rotated:
        raise ValueError(
            "`num_key_value_heads` must be as many as `num_attention_heads`, and `v_head_dim` at "
            "most `qk_nope_head_dim` + `qk_rope_head_dim`"
        )
    options = {
        "query_rank": fields.integer("q_lora_rank", query_rank, null=True),
        "latent_rank": fields.integer("kv_lora_rank", 512),
        "plain_dim": plain,
        "rotated_dim": rotated,
        "value_dim": value,
    }
    interleaved = fields.flag("rope_interleave", True)
    attention = {
        "head_dim": plain + rotated,
        "rope": hf_common.rope(fields, rotated, interleaved=interleaved),
        "attention_scale": _scale(fields, plain + rotated),
    }
    return {**arguments, **hf_common.attention_bias(fields), **attention}, options


def _read(fields: Fields) -> dict[str, Any]:
    for name in ("ep_size", "aux_loss_alpha", "seq_aux", "pretraining_tp", "qk_head_dim"):
        fields.take(name, None)  # not read by Transformers
    fields.neutral(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc")
    arguments, options = read_latent(fields, kv_heads=128)
    experts = glm4_moe.read_experts(
        fields,
        DeepseekOptions,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        routed_scaling_factor=2.5,
        **options,
    )
    return {**arguments, **experts, "layer": DeepseekLayer}


def _scale(fields: Fields, dim: int) -> float:
    """Returns the factor of the scores; it grows as wavelengths are stretched."""
    values = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    weight = values.get("mscale_all_dim")
    stretched = values.get("rope_type", values.get("type", "default")) != "default"
    factor = values.get("factor") or 1.0
    growth = 0.1 * weight * math.log(factor) + 1.0 if weight and stretched and factor > 1 else 1.0
    return dim**-0.5 * growth * growth


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read,
    kept=("model.layers.{num_layers}.",),
)
