"""Kimi Linear: linear attention with a decay for each channel, latent attention, many experts."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.decoder_options import DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.families import deepseek
from megatrain_jax._src.lm.models.families.hybrids import (
    LAYER_KINDS,
    GatedNorm,
    LinearAttentionOptions,
    OlmoDeltaNet,
)
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.layers import HiddenStates, Linear, rms_normalized


@dataclass(frozen=True, kw_only=True)
class KimiOptions(deepseek.DeepseekOptions):
    """The sizes of latent attention, the options of routing, and the sizes of linear attention.

    Attributes:
        linear: The sizes of linear attention.
    """

    linear: LinearAttentionOptions

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers with linear attention."""
        return self.linear.layers


class SigmoidNorm(GatedNorm):
    """The same norm with another gate, and with all products in fp32."""

    def __call__(
        self, x: Float[Array, "*rows dim"], gate: Float[Array, "*rows dim"]
    ) -> Float[Array, "*rows dim"]:
        """Normalises the last axis and multiplies it by the gate's sigmoid; keeps the dtype."""
        y = rms_normalized(x, self.eps) * self.weight[...].astype(jnp.float32)
        return (y * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)


class KimiDeltaNet(OlmoDeltaNet):
    """Linear attention with a decay for each channel; decays and gates come from narrow vectors."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(replace(config, options=config.options.linear), make)
        # Fresh decays are between 0.2 and 1, as of time steps from 0.001 to 0.1.
        steps = jnp.exp(jax.random.uniform(make.key(), (self.key_size,), minval=-6.9, maxval=-2.3))
        self.dt_bias = nnx.Param(jnp.log(jnp.expm1(steps)).astype(make.dtype))
        self.A_log = nnx.Param(self.A_log[...].reshape(1, 1, -1, 1))

    def make_projections(self, wide: int, make: ParameterMaker) -> None:
        """Makes the matrices for `project`."""
        narrow, inside = self.sizes.key_dim, self.key_size
        self.q_proj, self.k_proj, self.v_proj = (Linear(wide, inside, make) for _ in "qkv")
        self.f_a_proj, self.g_a_proj = (Linear(wide, narrow, make) for _ in "fg")
        self.f_b_proj, self.g_b_proj = (Linear(narrow, inside, make) for _ in "fg")
        self.b_proj = Linear(wide, self.sizes.value_heads, make)

    def make_output(self, config: DecoderOptions, make: ParameterMaker) -> None:
        """Makes the parameters for `output`."""
        self.o_norm = SigmoidNorm(self.sizes.value_dim, config, make)
        self.o_proj = Linear(self.value_size, config.hidden_size, make)

    def project(self, x: HiddenStates) -> tuple[Array, Array, Array, Array]:
        """Returns queries, keys and values side by side, gates, logits of rates, and time steps.

        The time steps have an axis of heads and one of channels.
        """
        mixed = jnp.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        steps = self.f_b_proj(self.f_a_proj(x)).reshape(*x.shape[:2], -1, self.sizes.key_dim)
        return mixed, self.g_b_proj(self.g_a_proj(x)), self.b_proj(x), steps


# The names of fields in released files, which count more than the usual ones, as in Transformers.
_USUAL = {
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def _sizes(fields: Fields) -> dict[str, Any]:
    values = {_USUAL[name]: fields.take(name, None) for name in _USUAL if name in fields.values}
    fields.values = {**fields.values, **values}
    return deepseek.latent_sizes(fields, kv_heads=32, eps=1e-5)


def _layer_types(given: Fields, num_layers: int) -> list[str]:
    """Returns the kind of each layer by two lists of numbers from 1 on, or the default."""
    names = ("full_attn_layers", "kda_layers")
    full, linear = (given.listed(name, int, "integers") for name in names)
    if full is None or linear is None:
        return [[*LAYER_KINDS][i > 0 and i % 4 == 0] for i in range(num_layers)]
    if sorted(full + linear) != [*range(1, num_layers + 1)]:
        allowed = f"numbers from 1 to {num_layers}, each in this list or in `kda_layers`"
        raise ValueError(checks.refused("full_attn_layers", allowed, full))
    return [[*LAYER_KINDS][i + 1 in full] for i in range(num_layers)]


def _kimi_linear(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers, first = sizes["num_layers"], fields.integer("first_k_dense_replace", 1, least=0)
    given = Fields({"model_type": fields.family, **fields.mapping("linear_attn_config")})
    types = _layer_types(given, num_layers)
    heads = given.integer("num_heads", fields.integer("linear_num_heads", 32))
    dim = given.integer("head_dim", fields.integer("linear_head_dim", 128))
    taps = fields.integer("linear_conv_kernel_dim", 4)
    linear = LinearAttentionOptions(
        layers=hf_common.layers_of_kind(fields, "layer_types", LAYER_KINDS, types, num_layers),
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        taps=given.integer("short_conv_kernel_size", taps),
    )
    given.finish()
    attention, options = deepseek.latent_attention(fields, sizes, query_rank=None)
    experts = deepseek.grouped_experts(
        fields,
        sizes,
        options=KimiOptions,
        layers=deepseek.sparse_layers(fields, num_layers, first),
        moe_intermediate_size=1024,
        n_routed_experts=256,
        routed_scaling_factor=2.446,
        names=("num_local_experts", "num_local_experts"),
        linear=linear,
        **options,
    )
    return attention | experts | {"unrotated": tuple(range(num_layers))}


# Transformers doesn't read the neutral and the unread fields: no layer rotates.
KIMI_LINEAR = Family(
    model_type="kimi_linear",
    scorer=None,
    neutral={
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
    },
    unread="model_max_length pretraining_tp qk_head_dim",
    sizes=_sizes,
    rope=None,
    always={**deepseek.DEEPSEEK_V3.always, "linear": KimiDeltaNet},
    more=_kimi_linear,
    renames={
        "linear_attn": "self_attn",
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts": "block_sparse_moe.experts",
        "mlp.shared_experts": "block_sparse_moe.shared_experts",
        "experts.gate_proj": "experts.w1",
        "experts.up_proj": "experts.w3",
        "experts.down_proj": "experts.w2",
    },
)
