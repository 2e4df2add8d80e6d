"""Families of decoders with experts that are chosen one by one, and attention in every layer."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.decoder_options import ACTIVATIONS, DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.families.dense import ERNIE4_5, QWEN3_VL_FILES, WideNormAttention
from megatrain_jax._src.lm.models.families.llama4_vision import read_llama4_vision
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.layers import (
    MLP,
    Attention,
    Buffer,
    Heads,
    HiddenStates,
    Linear,
    MixtureOfExperts,
    Segments,
    rms_normalized,
)
from megatrain_jax._src.lm.models.moe import (
    Expert,
    Experts,
    LastProduct,
    Routed,
    Weights,
    gated_fused,
    route,
    route_biased,
)
from megatrain_jax._src.lm.models.rotary import Rotation, positions_in

# Mixtral: experts in all layers, under different tensor names.
MIXTRAL = Family(
    model_type="mixtral",
    flags={},
    neutral={"router_jitter_noise": 0.0},
    sizes={"kv_heads": 8, "eps": 1e-5},
    rope={"theta": 1_000_000.0},
    experts={"num": 8, "per_token": 2, "normalize": True},
    more=lambda fields, _: {"windows": hf_common.windows_everywhere(fields, None)},
    renames={"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)


# OLMoE: experts in all layers, and norms of queries and keys over all heads together. Transformers'
# norm of the queries is as wide as the hidden states.
OLMOE = Family(
    model_type="olmoe",
    scorer=None,
    sizes={"eps": 1e-5, "head_dim_fixed": True},
    experts={"num": 64, "per_token": 8, "balance": 0.01},
    always={"attention": WideNormAttention},
)


class GatedSharedMixture(MixtureOfExperts):
    """Experts, and a shared expert with a gate that scales its result for each token."""

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(config, experts, make)
        self.shared_expert = MLP(config, make, experts.shared_size)
        self.shared_expert_gate = Linear(config.hidden_size, 1, make)

    def with_shared(self, mixed: HiddenStates, x: HiddenStates) -> HiddenStates:
        """Adds the shared expert's result."""
        return mixed + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


def _qwen2_moe(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    # A window may be given but unused. If it is used, every second one of the first layers has it.
    used, size = fields.flag("use_sliding_window", False), hf_common.window(fields)
    window, first = size if used else None, fields.integer("max_window_layers", 28, least=0)
    windowed = [window and i % 2 == 0 and i < first for i in range(sizes["num_layers"])]
    return {"windows": hf_common.windows_by_type(fields, windowed, window)}


# Qwen 1.5 and 2 with experts, plus one shared expert for all tokens.
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    sizes={"kv_heads": 16},
    flags={"qkv_bias": (True, "qkv_bias")},
    experts={"num": 60, "per_token": 4, "inside": 1408, "shared": 5632, "sparse": True},
    always={"mixture": GatedSharedMixture},
    more=_qwen2_moe,
)


def _qwen3_moe(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    used, window = fields.flag("use_sliding_window", False), hf_common.window(fields)
    return {"windows": (window,) * sizes["num_layers"] if used and window else ()}


# Qwen 3 with experts in all layers or some.
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    neutral={"use_qk_norm": True},
    sizes={"kv_heads": 4},
    experts={"num": 128, "per_token": 8, "inside": 768, "sparse": True},
    always={"qk_norm": True},
    more=_qwen3_moe,
)


class InFirstExperts(nnx.Module):
    """The parameters of all experts of one layer, laid out as in the files: (experts, in, out)."""

    def __init__(self, experts: Experts, wide: int, make: ParameterMaker):
        """Makes the parameters; the first half of `gate_up_proj` is the gate's."""
        num, inside = experts.num, experts.intermediate_size
        self.gate_up_proj = make.weight(num, wide, 2 * inside)
        self.down_proj = make.weight(num, inside, wide)


class InFirstMixture(MixtureOfExperts):
    """A router, and experts whose matrices are laid out (experts, in, out)."""

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        # The base class's constructor is not called: its experts have three matrices.
        self.settings = experts
        self.expert = gated_fused(ACTIVATIONS[config.activation], out_first=False)
        self.gate = Linear(config.hidden_size, experts.num, make)
        self.experts = InFirstExperts(experts, config.hidden_size, make)

    def weights(self) -> Weights:
        """Returns the experts' weights; each array has the experts as its first axis."""
        return self.experts.gate_up_proj[...], self.experts.down_proj[...]


# Qwen3-VL with experts: Transformers has no field for the shares, which always sum to 1.
QWEN3_VL_MOE = multimodal_family(
    Family(
        model_type="qwen3_vl_moe_text",
        class_name="Qwen3VLMoeTextModel",
        neutral={"norm_topk_prob": True},
        sizes={"kv_heads": 16},
        rope={"theta": 500_000.0, "images": True},
        experts={"num": 60, "per_token": 4, "inside": 1408, "normalize": True, "sparse": True},
        always={"qk_norm": True, "mixture": InFirstMixture},
        stacked=True,
    ),
    model_type="qwen3_vl_moe",
    class_name="Qwen3VLMoeForConditionalGeneration",
    **QWEN3_VL_FILES,
)


class MiniMaxMixture(MixtureOfExperts):
    """Experts with sigmoids as scores, chosen with a bias that balances their loads."""

    biased = True

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters, and the bias."""
        super().__init__(config, experts, make)
        self.e_score_correction_bias = Buffer(jnp.zeros(experts.num))

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and the probabilities of all experts."""
        logits = self.gate(tokens).astype(jnp.float32)
        bias = self.e_score_correction_bias[...]
        chosen, shares = route_biased(jax.nn.sigmoid(logits), bias, self.settings)
        return chosen, shares, jax.nn.softmax(logits, axis=-1)


def _minimax_m2(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    fields.neutral(attn_type_list=[1] * sizes["num_layers"])
    rotated = fields.integer("rotary_dim", None, null=True)
    share = 1.0 if rotated is None else rotated / sizes["head_dim"]
    return {"rope": hf_common.rope(fields, sizes["head_dim"], theta=5_000_000.0, share=share)}


# MiniMax M2: experts chosen by biased scores, and norms of queries and keys as a whole. Only the
# original code reads the neutral fields; checkpoints have none of the layers in the unread ones.
MINIMAX_M2 = Family(
    model_type="minimax_m2",
    class_name="MiniMaxM2ForCausalLM",
    flags={},
    scorer=None,
    neutral={
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "router_jitter_noise": 0.0,
    },
    unread="use_mtp mtp_transformer_layers num_mtp_modules",
    sizes={"kv_heads": 8, "head_dim": 128},
    rope=None,
    experts={"num": 256, "per_token": 8, "normalize": True},
    always={"attention": WideNormAttention, "mixture": MiniMaxMixture},
    more=_minimax_m2,
    renames=MIXTRAL.renames,
)


@dataclass(frozen=True, kw_only=True)
class GptOssOptions:
    """Options of gpt-oss's experts beyond those of every mixture.

    Attributes:
        alpha: Factor within the gate's sigmoid.
        limit: Upper bound of the gate, and bound in both directions of the up product.
    """

    alpha: float
    limit: float


class GptOssAttention(Attention):
    """Attention with a sink for each head: queries may attend to it, and it contributes nothing."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        self.sinks = make.weight(config.num_heads)

    def attend(self, q: Heads, k: Heads, v: Heads, segments: Segments, **options: Any) -> Heads:
        """Returns for each query the mean of values, with zeros for the sink."""
        return super().attend(q, k, v, segments, sinks=self.sinks[...], **options)


class GptOssExperts(InFirstExperts):
    """The same with biases; even columns of `gate_up_proj` are the gate's."""

    def __init__(self, experts: Experts, wide: int, make: ParameterMaker):
        """Makes the parameters."""
        super().__init__(experts, wide, make)
        self.gate_up_proj_bias = make.constant(0.0, experts.num, 2 * experts.intermediate_size)
        self.down_proj_bias = make.constant(0.0, experts.num, wide)


class GptOssMixture(MixtureOfExperts):
    """Experts with biases, and a router with a bias."""

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        # The base class's constructor is not called: its router has no bias, and its experts have
        # three matrices.
        self.settings = experts
        self.expert = _clamped(config.options.alpha, config.options.limit)
        self.router = Linear(config.hidden_size, experts.num, make, bias=True)
        self.experts = GptOssExperts(experts, config.hidden_size, make)

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and the probabilities of all experts."""
        return route(self.router(tokens), self.settings)

    def weights(self) -> Weights:
        """Returns the experts' matrices and biases."""
        e = self.experts
        arrays = e.gate_up_proj, e.gate_up_proj_bias, e.down_proj, e.down_proj_bias
        return tuple(array[...] for array in arrays)


@cache
def _clamped(alpha: float, limit: float) -> Expert:
    def expert(x, weights, product):
        gate_up, gate_up_bias, down, down_bias = weights
        both = product(x, gate_up, gate_up_bias, out_first=False)
        gate, up = jnp.minimum(both[..., ::2], limit), jnp.clip(both[..., 1::2], -limit, limit)
        inside = (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
        return LastProduct(inside, down, down_bias, out_first=False)

    return expert


def _gpt_oss(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "windows": hf_common.windows_by_step(fields, 2, hf_common.window(fields, 128)),
        "options": GptOssOptions(
            alpha=fields.number("swiglu_alpha", 1.702),
            limit=fields.number("swiglu_limit", 7.0, above=0),
        ),
    }


# gpt-oss: attention with a sink per head, and experts with biases and a clamped gate. Only the
# original code reads the unread fields.
GPT_OSS = Family(
    model_type="gpt_oss",
    unread="experts_per_token initial_context_length",
    sizes={"kv_heads": 8, "head_dim": 64, "eps": 1e-5},
    flags={"attention_bias": (True, "qkv_bias out_bias")},
    rope={
        "theta": 150_000.0,
        "default": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    experts={"num": 128, "per_token": 4, "normalize": True},
    always={"attention": GptOssAttention, "mixture": GptOssMixture},
    more=_gpt_oss,
    stacked=True,
)


@dataclass(frozen=True, kw_only=True)
class ErnieRouting:
    """Options of expert routing that not every mixture has.

    Attributes:
        least: Lower bound of the divisor of shares, their sum.
    """

    least: float


class ErnieStatics(nnx.Module):
    """The bias of the experts' choice, under its name in the files."""

    def __init__(self, num: int):
        """Makes the bias."""
        self.e_score_correction_bias = Buffer(jnp.zeros((1, num)))


class ErnieMixture(MixtureOfExperts):
    """Experts chosen with a bias that balances their loads, and shared experts."""

    biased = True

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters, and the bias."""
        super().__init__(config, experts, make)
        self.least = config.options.least
        self.moe_statics = ErnieStatics(experts.num)
        size = experts.shared_size
        self.shared_experts = None if size is None else MLP(config, make, size)

    def route(self, tokens: Float[Array, "tokens width"]) -> Routed:
        """Returns each token's experts, their shares, and the probabilities of all experts."""
        weight = self.gate.weight[...].astype(jnp.float32)
        probabilities = jax.nn.softmax(tokens.astype(jnp.float32) @ weight.T, axis=-1)
        bias = self.moe_statics.e_score_correction_bias[...][0]
        chosen, shares = route_biased(probabilities, bias, self.settings, least=self.least)
        return chosen, shares.astype(tokens.dtype), probabilities


def _ernie4_5_moe(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers = sizes["num_layers"]
    first = fields.integer("moe_layer_start_index", 1, least=0)
    step = fields.integer("moe_layer_interval", 1)
    last = fields.integer("moe_layer_end_index", -1, least=-1)
    last = num_layers - 1 if last == -1 else min(last, num_layers - 1)
    return {
        "head_bias": sizes["mlp_bias"],
        "options": ErnieRouting(least=fields.number("moe_norm_min", 1e-12, least=0)),
        "experts": hf_common.experts(
            fields,
            sizes,
            names=("num_experts", "moe_num_experts"),
            num=64,
            per_token=fields.integer("moe_k", 6),
            inside=1536,
            num_shared=("moe_num_shared_experts", 2, 0),
            normalize=True,
            layers=[i for i in range(first, last + 1) if (i + 1) % step == 0],
        ),
    }


# ERNIE 4.5 with experts: chosen by biased probabilities, and some that all tokens share. Only the
# original code reads the unread fields; layers that predict further tokens are kept unchanged.
ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    class_name="Ernie4_5_MoeForCausalLM",
    scorer=None,
    unread="num_nextn_predict_layers moe_capacity moe_gate moe_use_aux_free",
    sizes={"kv_heads": 4, "eps": 1e-5, "tied": True},
    flags=ERNIE4_5.flags,
    rope=ERNIE4_5.rope,
    always={"mixture": ErnieMixture},
    more=_ernie4_5_moe,
    kept=("model.mtp",),
)


@dataclass(frozen=True, kw_only=True)
class Llama4Options:
    """Options of Llama 4's layers.

    Attributes:
        chunk: Number of tokens of a chunk.
        chunked: Numbers of the layers in which tokens attend within their chunk only.
        unit_heads: Whether layers that rotate normalise queries and keys, without a weight.
        growth: Queries at position p of layers that don't rotate get the factor 1 + growth * log(1
            + floor((p + 1) / span)); 0 for none.
        span: See `growth`.
    """

    chunk: int | None
    chunked: tuple[int, ...]
    unit_heads: bool
    growth: float
    span: int


class Llama4Attention(Attention):
    """Attention within chunks, or to all tokens before."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        options: Llama4Options = config.options
        self.options, self.eps = options, config.norm_eps
        self.chunk = options.chunk if layer in options.chunked else None
        self.grows = layer in config.unrotated and options.growth > 0

    def rotate(self, q: Heads, k: Heads, rotation: Rotation) -> tuple[Heads, Heads]:
        """Returns queries and keys rotated to their positions, then perhaps normalised."""
        q, k = super().rotate(q, k, rotation)
        if self.options.unit_heads:
            q, k = (rms_normalized(y, self.eps).astype(y.dtype) for y in (q, k))
        return q, k

    def attend(self, q: Heads, k: Heads, v: Heads, segments: Segments, **options: Any) -> Heads:
        """Returns for each query the mean of values, weighted by the match of their keys."""
        if self.grows:
            spans = (positions_in(q.shape[1], segments) + 1) // self.options.span
            growth = 1 + self.options.growth * jnp.log1p(spans.astype(jnp.float32))
            q = (q * growth[:, :, None, None]).astype(q.dtype)
        return super().attend(q, k, v, segments, **options)


class Llama4Mixture(InFirstMixture):
    """Experts, and one that all tokens share; shares scale the experts' inputs."""

    def __init__(self, config: DecoderOptions, experts: Experts, make: ParameterMaker):
        """Makes the parameters."""
        # The base class's constructor is not called: its experts have three matrices.
        self.settings = experts
        self.expert = gated_fused(ACTIVATIONS[config.activation], out_first=False)
        self.router = Linear(config.hidden_size, experts.num, make)
        self.experts = InFirstExperts(experts, config.hidden_size, make)
        self.shared_expert = MLP(config, make, experts.shared_size)

    def __call__(self, x: HiddenStates, segments: Segments) -> tuple[HiddenStates, None]:
        """Returns the result of all experts for x, and None: no loss balances them."""
        tokens = x.reshape(-1, x.shape[-1])
        logits, chosen = jax.lax.top_k(self.router(tokens), self.settings.per_token)
        shares = jax.nn.sigmoid(logits.astype(jnp.float32)).astype(x.dtype)
        # One token for each choice, because an expert is not linear in its input.
        scaled = (tokens[:, None] * shares[..., None]).reshape(-1, x.shape[-1])
        ones = jnp.ones((chosen.size, 1), jnp.float32)
        mixed = mix(scaled, chosen.reshape(-1, 1), ones, self.weights(), self.expert)
        mixed = mixed.reshape(*shares.shape, -1).sum(1)
        return mixed.reshape(x.shape) + self.shared_expert(x), None


def _llama4(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    num_layers = sizes["num_layers"]
    given = fields.listed("no_rope_layers", int, "integers") or None
    rotated = hf_common.rotated_layers(fields, given, num_layers)
    step = fields.integer("interleave_moe_layer_step", 1)
    sparse = fields.listed("moe_layers", int, "integers")
    sparse = range(step - 1, num_layers, step) if sparse is None else sparse
    chunk = fields.integer("attention_chunk_size", 8192, null=True)
    kinds = {"full_attention": False} | ({} if chunk is None else {"chunked_attention": True})
    types = [[*kinds][rotates and chunk is not None] for rotates in rotated]
    growth = fields.number("attn_scale", 0.1, least=0)
    options = Llama4Options(
        chunk=chunk,
        chunked=hf_common.layers_of_kind(fields, "layer_types", kinds, types, num_layers),
        unit_heads=fields.flag("use_qk_norm", True),
        growth=growth if fields.flag("attn_temperature_tuning", True) else 0.0,
        span=fields.integer("floor_scale", 8192),
    )
    return {
        "intermediate_size": fields.integer("intermediate_size_mlp", 16_384),
        "unrotated": tuple(i for i, rotates in enumerate(rotated) if not rotates),
        "options": options,
        "experts": hf_common.experts(
            fields,
            sizes,
            names=("num_local_experts", "num_local_experts"),
            num=16,
            per_token=1,
            shared_size=sizes["intermediate_size"],
            normalize=False,
            layers=sorted({i for i in sparse if 0 <= i < num_layers}),
            balance=None,
        ),
    }


# Llama 4: attention within chunks in most layers, and experts with scaled inputs. Layers that don't
# rotate see all tokens, and their queries grow with their position. Transformers adds no loss for
# balance.
LLAMA4 = Family(
    model_type="llama4_text",
    scorer=None,
    neutral={"router_jitter_noise": 0.0},
    unread="router_aux_loss_coef for_llm_compressor",
    sizes={"kv_heads": 8, "head_dim": 128, "eps": 1e-5},
    rope={"theta": 500_000.0, "interleaved": True},
    always={"attention": Llama4Attention, "mixture": Llama4Mixture},
    more=_llama4,
    stacked=True,
    renames={"mlp": "feed_forward"},
)
LLAMA4_MULTIMODAL = multimodal_family(
    LLAMA4,
    model_type="llama4",
    kept=("vision_model.", "multi_modal_projector."),
    beside="boi_token_index eoi_token_index image_token_index",
    vision=read_llama4_vision,
)
