"""GLM 4.5 to 4.7, DeepSeek V2, V3 and R1, and their relatives: grouped experts, latent attention.

Experts are chosen by scores with a load-balancing bias, except in DeepSeek V2. The bias is adapted
only in pre-training; here, as in Transformers, it stays constant. In DeepSeek and GLM 4.7, keys and
values of all heads are computed from one narrow vector per token, the latent
(https://arxiv.org/abs/2405.04434, section 2.1); all heads share the rotated part of the keys.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.causal_attention import attend_to_chosen, attention
from megatrain_jax._src.lm.models.decoder_options import DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.families.dense import exaone4_layers
from megatrain_jax._src.lm.models.family import ATTENTION_BIAS, MLP_BIAS, Family
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.layers import (
    MLP,
    Attention,
    Buffer,
    HiddenStates,
    Linear,
    MixtureOfExperts,
    RMSNorm,
    Segments,
)
from megatrain_jax._src.lm.models.moe import Experts, Routed
from megatrain_jax._src.lm.models.past import LatentHeads, Past
from megatrain_jax._src.lm.models.rotary import Rotation, rotate


@dataclass(frozen=True, kw_only=True)
class GroupedRouting:
    """Options of expert routing that not every mixture has.

    Attributes:
        groups: Number of groups of experts, equally large.
        groups_per_token: Number of groups from which a token's experts may come: the groups with
            the highest sum of their two best scores.
        scale: Factor of the shares.
    """

    groups: int
    groups_per_token: int
    scale: float


class BiasedRouter(nnx.Module):
    """A router with a bias that affects the choice of experts, but not their shares."""

    def __init__(self, wide: int, num: int, make: ParameterMaker):
        """Makes the parameter, and the bias."""
        self.weight = make.weight(num, wide)
        self.e_score_correction_bias = Buffer(jnp.zeros(num))


class BiasedMixture(MixtureOfExperts):
    """Experts with a biased router, and perhaps one expert that all tokens share.

    Attributes:
        router: Class of the router; called with the width, the number of experts and a maker.
        least: Number added to the sum by which shares are divided: sigmoids may all be 0 in fp32.
    """

    router: ClassVar[Callable[..., Any]] = BiasedRouter
    least: ClassVar[float] = 1e-20

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(config, experts, make)
        self.routing = config.options
        self.gate = self.router(config.hidden_size, experts.num, make)
        size = experts.shared_size
        self.shared_experts = None if size is None else MLP(config, make, size)

    def __call__(self, x: HiddenStates, segments: Segments) -> tuple[HiddenStates, None]:
        """Returns the result of all experts for x, and None: no loss balances them."""
        return super().__call__(x, segments)[0], None

    def bias(self) -> Float[Array, " num"]:
        """Returns the bias that affects the choice of experts."""
        return self.gate.e_score_correction_bias[...].astype(jnp.float32)

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and all scores.

        For example, with groups of scores [0.5, 0.1] and [0.4, 0.3], a token's first group is the
        second one, with the sum 0.7.
        """
        weight = self.gate.weight[...].astype(jnp.float32)
        scores = jax.nn.sigmoid(tokens.astype(jnp.float32) @ weight.T)
        biased = scores + self.bias()
        grouped = biased.reshape(scores.shape[0], self.routing.groups, -1)
        # The bias balances loads: it affects the choice, but not the shares.
        best = jax.lax.top_k(grouped, 2)[0].sum(-1)
        _, groups = jax.lax.top_k(best, self.routing.groups_per_token)
        allowed = jax.nn.one_hot(groups, self.routing.groups).any(1)
        grouped = jnp.where(allowed[..., None], grouped, -jnp.inf)
        _, chosen = jax.lax.top_k(grouped.reshape(scores.shape), self.settings.per_token)
        shares = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.settings.normalize:
            shares = shares / (shares.sum(-1, keepdims=True) + self.least)
        return chosen, shares * self.routing.scale, scores


class OuterBiasMixture(BiasedMixture):
    """The same with a bias that is no part of the router in the files."""

    router = Linear

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters, and the bias."""
        super().__init__(config, experts, make)
        self.e_score_correction_bias = Buffer(jnp.zeros(experts.num))

    def bias(self) -> Float[Array, " num"]:
        """Returns the bias that affects the choice of experts."""
        return self.e_score_correction_bias[...].astype(jnp.float32)


def grouped_experts(
    fields: Fields,
    sizes: dict[str, Any],
    *,
    options: type[GroupedRouting] = GroupedRouting,
    per_token: int = 8,
    layers: tuple[int, ...] | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    first_k_dense_replace: int = 1,
    moe_intermediate_size: int,
    n_routed_experts: int,
    routed_scaling_factor: float,
    norm_topk_prob: bool = True,
    names: tuple[str, str] = ("n_routed_experts", "num_local_experts"),
    shared: str = "n_shared_experts",
    **others: Any,
) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` about experts and routing.

    Args:
        fields: The configuration.
        sizes: The arguments of `DecoderConfig` so far.
        options: Class of the family's options.
        per_token: Default of `num_experts_per_tok`.
        layers: Numbers of the layers with experts; None for all from `first_k_dense_replace` on.
        n_group: Default of this field.
        topk_group: Default of this field.
        first_k_dense_replace: Default of this field.
        moe_intermediate_size: Default of this field.
        n_routed_experts: Default of this field.
        routed_scaling_factor: Default of this field.
        norm_topk_prob: Default of this field.
        names: See `hf_common.experts`.
        shared: The field with the number of experts that all tokens share.
        **others: Further options.
    """
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        fields.take(name, None)  # multi-token prediction layers are kept unchanged
    groups, chosen = fields.integer("n_group", n_group), fields.integer("topk_group", topk_group)
    first = fields.integer("first_k_dense_replace", first_k_dense_replace, least=0)
    experts = hf_common.experts(
        fields,
        sizes,
        names=names,
        num=n_routed_experts,
        per_token=per_token,
        inside=moe_intermediate_size,
        num_shared=(shared, 1, 1),
        norm_topk_prob=norm_topk_prob,
        layers=range(first, sizes["num_layers"]) if layers is None else layers,
        balance=None,
    )
    if experts and (experts.num % groups or experts.num < 2 * groups or chosen > groups):
        raise ValueError(
            f"`n_group` = {groups} must divide the {experts.num} experts into groups of two at "
            f"least, and `topk_group` = {chosen} be at most as many"
        )
    scale = fields.number("routed_scaling_factor", routed_scaling_factor)
    routing = options(groups=groups, groups_per_token=chosen, scale=scale, **others)
    return {"experts": experts, "options": routing}


# GLM 4.5 and 4.6.
GLM4_MOE = Family(
    model_type="glm4_moe",
    scorer=None,
    sizes={"kv_heads": 8, "eps": 1e-5},
    flags={"attention_bias": (False, "qkv_bias"), "use_qk_norm": (False, "qk_norm")},
    rope={"share": 0.5},
    always={"mixture": BiasedMixture},
    more=partial(
        grouped_experts,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        routed_scaling_factor=1.0,
    ),
    kept=("model.layers.{num_layers}.",),
)


def _dots1(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    size, first = hf_common.window(fields), fields.integer("max_window_layers", 62, least=0)
    windowed = [size and i >= first for i in range(sizes["num_layers"])]
    for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        fields.integer(name)  # has no default
    experts = grouped_experts(
        fields,
        sizes,
        first_k_dense_replace=0,
        moe_intermediate_size=1408,
        n_routed_experts=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
    )
    return experts | {"windows": hf_common.windows_by_type(fields, windowed, size)}


# dots.llm1: experts as in GLM 4.5, and a window in the upper layers. Transformers doesn't read the
# neutral and the unread fields.
DOTS1 = Family(
    model_type="dots1",
    scorer=None,
    neutral={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    unread="ep_size aux_loss_alpha seq_aux pretraining_tp use_sliding_window",
    sizes={"kv_heads": 32},
    always={"qk_norm": True, "mixture": BiasedMixture},
    more=_dots1,
)


def sparse_layers(fields: Fields, num_layers: int, first: int) -> tuple[int, ...]:
    """Returns the layers with experts by `mlp_layer_types`; by default from the `first` on."""
    known = {"dense": False, "sparse": True}
    kinds = ["dense" if i < first else "sparse" for i in range(num_layers)]
    return hf_common.layers_of_kind(fields, "mlp_layer_types", known, kinds, num_layers)


def _exaone_moe(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers, first = sizes["num_layers"], fields.integer("first_k_dense_replace", 1, least=0)
    layers = sparse_layers(fields, num_layers, first)
    fields.neutral(is_moe_layer=[i in layers for i in range(num_layers)])
    experts = grouped_experts(
        fields,
        sizes,
        layers=layers,
        moe_intermediate_size=1024,
        n_routed_experts=64,
        routed_scaling_factor=2.5,
        names=("num_experts", "num_experts"),
        shared="num_shared_experts",
    )
    return experts | exaone4_layers(fields, sizes)


# K-EXAONE: experts as in GLM 4.5, and windows as in EXAONE 4. Transformers doesn't read the neutral
# and the unread fields; layers that predict further tokens (`mtp`) are kept unchanged.
EXAONE_MOE = Family(
    model_type="exaone_moe",
    scorer=None,
    flags={},
    neutral={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    unread="first_last_k_dense_replace",
    sizes={"kv_heads": 32, "eps": 1e-5},
    always={"qk_norm": True, "mixture": OuterBiasMixture},
    more=_exaone_moe,
    kept=("mtp.",),
)


class AfmoeAttention(Attention):
    """Attention with results multiplied by a gate."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        self.gate_proj = Linear(config.hidden_size, self.query_size, make)

    def gated(self, mixed: HiddenStates, x: HiddenStates) -> HiddenStates:
        """Returns attention's results times their gate."""
        return mixed * jax.nn.sigmoid(self.gate_proj(x))


def _afmoe(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    step, num_layers = fields.integer("global_attn_every_n_layers", 4), sizes["num_layers"]
    windows = hf_common.windows_by_step(fields, step, hf_common.window(fields, 1024))
    experts = hf_common.experts(
        fields,
        sizes,
        names=("num_experts", "num_experts"),
        num=64,
        per_token=6,
        inside=1408,
        num_shared=("num_shared_experts", 2, 1),
        normalize=True,
        layers=range(fields.integer("num_dense_layers", 1, least=0), num_layers),
        balance=None,
    )
    scale = fields.number("route_scale", 1.0)
    return {
        "windows": windows,
        "unrotated": tuple(i for i, window in enumerate(windows) if window is None),
        "scale_embedding": fields.flag("mup_enabled", False) and sizes["hidden_size"] ** 0.5,
        "experts": experts,
        "options": GroupedRouting(groups=1, groups_per_token=1, scale=scale),
    }


# Arcee's Trinity: four norms per layer, attention with a gate, experts chosen by biased scores.
# Layers without a window don't rotate. Only the original code reads the neutral and unread fields.
AFMOE = Family(
    model_type="afmoe",
    scorer=None,
    neutral={
        "n_group": 1,
        "topk_group": 1,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "route_norm": True,
        "score_func": "sigmoid",
    },
    unread="load_balance_coeff use_grouped_mm",
    sizes={"head_dim": 128, "eps": 1e-5},
    always={
        "qk_norm": True,
        "sandwich_norms": True,
        "norm_in_fp32": True,
        "attention": AfmoeAttention,
        "mixture": OuterBiasMixture,
    },
    more=_afmoe,
    renames={
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
        "gate": "router.gate",
        "e_score_correction_bias": "expert_bias",
    },
)


@dataclass(frozen=True, kw_only=True)
class DeepseekOptions(GroupedRouting):
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

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
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

    def __call__(
        self, x: HiddenStates, rotation: Rotation | None, segments: Segments
    ) -> HiddenStates:
        """Computes attention within rows, or within documents if `segments` numbers them."""
        narrow = None if self.sizes.query_rank is None else self.narrow(x)
        return self.mix(x, narrow, rotation, segments)

    def narrow(self, x: HiddenStates) -> Float[Array, "rows length query_rank"]:
        """Returns the queries' latent."""
        return self.q_a_layernorm(self.q_a_proj(x))

    def mix(
        self,
        x: HiddenStates,
        narrow: Float[Array, "rows length query_rank"] | None,
        rotation: Rotation | None,
        segments: Segments,
        chosen: Any = None,
    ) -> HiddenStates:
        """Computes attention from the queries' latent; see `attend_to_chosen` for `chosen`."""
        sizes, (rows, length, _) = self.sizes, x.shape
        q = self.q_proj(x) if narrow is None else self.q_b_proj(narrow)
        q = q.reshape(rows, length, -1, sizes.plain_dim + sizes.rotated_dim)
        q, q_rotated = jnp.split(q, [sizes.plain_dim], axis=-1)
        latent, k_rotated = jnp.split(self.kv_a_proj_with_mqa(x), [sizes.latent_rank], axis=-1)
        latent = self.kv_a_layernorm(latent)
        k_rotated = k_rotated[:, :, None]
        if rotation is not None:
            q_rotated, k_rotated = (
                rotate(y, rotation.cos_sin, interleaved=self.interleaved)
                for y in (q_rotated, k_rotated)
            )
        given = LatentHeads(q, q_rotated, latent, k_rotated)
        if isinstance(segments, Past):
            mixed = segments.attend_latent(self, given, chosen)
        else:
            mixed = self.attend(given, segments, chosen)
        return self.o_proj(mixed.reshape(rows, length, -1))

    def attend(
        self, given: LatentHeads, segments: Segments, chosen: Any = None
    ) -> Float[Array, "rows length heads value_dim"]:
        """Returns for each query the mean of the values that its head computes from latents."""
        sizes, (q, q_rotated, latent, k_rotated) = self.sizes, given
        both = self.kv_b_proj(latent)
        both = both.reshape(*q.shape[:3], sizes.plain_dim + sizes.value_dim)
        k, v = jnp.split(both, [sizes.plain_dim], axis=-1)
        # All heads share one rotated part of the keys.
        k_rotated = jnp.broadcast_to(k_rotated, q_rotated.shape)
        q, k = jnp.concatenate([q, q_rotated], -1), jnp.concatenate([k, k_rotated], -1)
        # `attention` requires values as wide as keys; the padding's results are zeros, and cut off.
        v = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[-1] - sizes.value_dim)])
        if chosen is None:
            mixed = attention(q, k, v, segments=segments, scale=self.scale)
        else:
            mixed = attend_to_chosen(q, k, v, chosen, self.scale)
        return mixed[..., : sizes.value_dim]


def _latent_norm(dim: int, config: DecoderOptions, make: ParameterMaker) -> RMSNorm:
    norm = RMSNorm(dim, config, make)
    norm.eps = 1e-6  # for any configuration, as in Transformers
    return norm


def latent_sizes(fields: Fields, **sizes: Any) -> dict[str, Any]:
    """Returns arguments of `hf_common.sizes`; the width of a head is that of its rotated part."""
    return {"head_dim": fields.integer("qk_rope_head_dim", 64), **sizes}


def latent_attention(
    fields: Fields,
    sizes: dict[str, Any],
    *,
    query_rank: int | None = 1536,
    plain_dim: int = 128,
    value_dim: int = 128,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of `DecoderConfig` for attention, and those of its options.

    Args:
        fields: The configuration.
        sizes: The arguments so far.
        query_rank: Default of `q_lora_rank`.
        plain_dim: Default of `qk_nope_head_dim`.
        value_dim: Default of `v_head_dim`.
    """
    plain = fields.integer("qk_nope_head_dim", plain_dim)
    value = fields.integer("v_head_dim", value_dim)
    rotated = fields.integer("qk_rope_head_dim", 64)
    if sizes["num_kv_heads"] != sizes["num_heads"] or value > plain + rotated:
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
    return attention, options


def _scale(fields: Fields, dim: int) -> float:
    """Returns the factor of the scores; it grows as wavelengths are stretched."""
    values = hf_common.rope_parameters(fields)
    weight = values.get("mscale_all_dim")
    stretched = values.get("rope_type", values.get("type", "default")) != "default"
    factor = values.get("factor") or 1.0
    growth = 0.1 * weight * math.log(factor) + 1.0 if weight and stretched and factor > 1 else 1.0
    return dim**-0.5 * growth * growth


def _deepseek_v3(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    attention, options = latent_attention(fields, sizes)
    experts = grouped_experts(
        fields,
        sizes,
        options=DeepseekOptions,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        routed_scaling_factor=2.5,
        **options,
    )
    return attention | experts


# DeepSeek V3 and R1, Moonlight. Transformers doesn't read the unread fields.
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    neutral={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    unread="ep_size aux_loss_alpha seq_aux pretraining_tp qk_head_dim",
    sizes=partial(latent_sizes, kv_heads=128),
    rope=None,
    always={"attention": LatentAttention, "mixture": BiasedMixture},
    more=_deepseek_v3,
    kept=GLM4_MOE.kept,
)


def _glm4_moe_lite(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    attention, options = latent_attention(
        fields, sizes, query_rank=768, plain_dim=192, value_dim=256
    )
    # In Transformers, `head_dim` is another name of this field.
    fields.neutral(head_dim=options["rotated_dim"])
    experts = grouped_experts(
        fields,
        sizes,
        options=DeepseekOptions,
        per_token=4,
        layers=sparse_layers(fields, sizes["num_layers"], 1),
        moe_intermediate_size=1536,
        n_routed_experts=64,
        routed_scaling_factor=1.8,
        **options,
    )
    return attention | experts


# GLM 4.7 Flash: latent attention as in DeepSeek V3, and experts as in GLM 4.5.
GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    scorer=None,
    neutral={"topk_method": "noaux_tc", "first_k_dense_replace": 1},
    unread="pretraining_tp qk_head_dim",
    sizes=partial(latent_sizes, kv_heads=20, eps=1e-5),
    rope=None,
    always=DEEPSEEK_V3.always,
    more=_glm4_moe_lite,
    kept=GLM4_MOE.kept,
)


class ProbableMixture(BiasedMixture):
    """Experts chosen by their probabilities, and one that all tokens share."""

    router = Linear

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and the probabilities of all experts.

        A token's experts come from the groups with the most probable best expert.
        """
        weight = self.gate.weight[...].astype(jnp.float32)
        probabilities = jax.nn.softmax(tokens.astype(jnp.float32) @ weight.T, axis=-1)
        grouped = probabilities.reshape(tokens.shape[0], self.routing.groups, -1)
        _, groups = jax.lax.top_k(grouped.max(-1), self.routing.groups_per_token)
        allowed = jax.nn.one_hot(groups, self.routing.groups).any(1)
        allowed = jnp.where(allowed[..., None], grouped, 0.0).reshape(probabilities.shape)
        shares, chosen = jax.lax.top_k(allowed, self.settings.per_token)
        return chosen, shares * self.routing.scale, probabilities


def _groups(fields: Fields, num: int) -> tuple[int, int]:
    """Returns the number of groups of experts, and the number that a token may choose from."""
    method = fields.take("topk_method", "greedy")
    names = ("n_group", "topk_group")
    if method == "greedy":
        for name in names:
            fields.take(name, None)
        return 1, 1
    if method != "group_limited_greedy":
        fields.neutral(topk_method="greedy")
    groups, chosen = (fields.integer(name) for name in names)
    if num % groups or chosen > groups:
        raise ValueError(
            f"`n_group` = {groups} must divide the {num} experts, and `topk_group` = {chosen} be "
            "at most as many"
        )
    return groups, chosen


def _deepseek_v2(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    attention, options = latent_attention(fields, sizes)
    first = fields.integer("first_k_dense_replace", 0, least=0)
    experts = hf_common.experts(
        fields,
        sizes,
        names=("num_experts", "n_routed_experts"),
        num=64,
        per_token=fields.integer("num_experts_per_tok"),
        inside=1407,
        num_shared=("n_shared_experts", 2, 1),
        normalize=False,
        layers=range(first, sizes["num_layers"]),
        balance=None,
    )
    groups, chosen = _groups(fields, experts.num if experts else 1)
    scale = fields.number("routed_scaling_factor", 1.0)
    routing = DeepseekOptions(groups=groups, groups_per_token=chosen, scale=scale, **options)
    return attention | {"options": routing, "experts": experts}


# DeepSeek V2 and V2-Lite: experts chosen by their probabilities.
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    has_tagger=False,
    neutral={"moe_layer_freq": 1, "scoring_func": "softmax", "rope_interleave": True},
    unread=DEEPSEEK_V3.unread,
    sizes=latent_sizes,
    flags=ATTENTION_BIAS | MLP_BIAS,
    rope=None,
    always={"attention": LatentAttention, "mixture": ProbableMixture},
    more=_deepseek_v2,
)
