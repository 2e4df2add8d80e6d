"""Families of decoders without experts, with attention in every layer."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.decoder_options import DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.families.qwen_vision import read_vision
from megatrain_jax._src.lm.models.family import ATTENTION_BIAS, MLP_BIAS, Family, multimodal_family
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.layers import (
    Attention,
    BiasedMLP,
    Buffer,
    FusedMLP,
    Heads,
    HiddenStates,
    LayerNorm,
    Linear,
    ParallelLayer,
    PlainMLP,
    Projected,
    RMSNorm,
)
from megatrain_jax._src.lm.models.rotary import Rotation

# Llama 2 and 3: the plain decoder.
LLAMA = Family(
    model_type="llama",
    neutral={"pretraining_tp": 1},
    flags=ATTENTION_BIAS | MLP_BIAS,
)


# Mistral 7B and similar models: a window in all layers.
MISTRAL = Family(
    model_type="mistral",
    flags={},
    sizes={"kv_heads": 8},
    more=lambda fields, _: {"windows": hf_common.windows_everywhere(fields, 4096)},
)


def _ministral3(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    default = {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    parameters = hf_common.rope_parameters(fields, default)
    growth = checks.number("llama_4_scaling_beta", parameters.pop("llama_4_scaling_beta", None))
    checks.integer(
        "original_max_position_embeddings", parameters.get("original_max_position_embeddings")
    )
    parameters.pop("max_position_embeddings", None)  # the configuration has its own
    rope = hf_common.rope(fields, sizes["head_dim"], parameters=parameters)
    return {
        "rope": replace(rope, query_growth=growth),
        "windows": hf_common.windows_everywhere(fields, None),
    }


# Ministral 3: wavelengths are stretched for long texts, and queries grow with their position.
MINISTRAL3 = Family(
    model_type="ministral3",
    flags={},
    sizes={"kv_heads": 8, "head_dim": 128, "eps": 1e-5},
    rope=None,
    more=_ministral3,
)
MISTRAL3 = multimodal_family(
    MISTRAL,
    MINISTRAL3,
    model_type="mistral3",
    kept=("vision_tower.", "multi_modal_projector."),
    beside="image_token_index projector_hidden_act vision_feature_layer spatial_merge_size "
    "multimodal_projector_bias",
    tied=True,
)


# Phi 1, 1.5 and 2: attention and a plain MLP in parallel, layer norms, biases everywhere.
PHI = Family(
    model_type="phi",
    flags={},
    neutral={"tie_word_embeddings": False},
    sizes={"eps": 1e-5, "eps_name": "layer_norm_eps", "hidden_act": "gelu_new"},
    rope={"share": 0.5},
    always={
        "norm": "layer",
        "qkv_bias": True,
        "out_bias": True,
        "head_bias": True,
        "layer": ParallelLayer,
        "dense": BiasedMLP,
    },
    renames={"norm": "final_layernorm", "o_proj": "dense"},
)


# Phi 3 and 4: fused projections, and rotary embeddings of a part of each head. Early checkpoints
# call longrope `su` or `yarn`; the neutral fields are of Phi-4-mini's original code, which alone
# reads them.
_PHI3_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
PHI3 = Family(
    model_type="phi3",
    flags={},
    neutral={"interpolate_factor": 1, "full_attn_mod": 1},
    sizes={"eps": 1e-5},
    rope={"original_length": 4096, "kinds": _PHI3_KINDS, "share": 1.0},
    always={"fused": True},
    more=lambda fields, _: {"windows": hf_common.windows_everywhere(fields, None)},
)


def _upper_windows(fields: Fields, first: int = 28) -> hf_common.Windows:
    """Returns the windows of Qwen 2 and 3: in layers from `max_window_layers` on.

    Args:
        fields: The configuration.
        first: Default of `max_window_layers`.
    """
    size = hf_common.window(fields) if fields.flag("use_sliding_window", False) else None
    fields.take("sliding_window", None)
    first = fields.integer("max_window_layers", first, least=0)
    layers = range(fields.integer("num_hidden_layers"))
    return hf_common.windows_by_type(fields, [size and i >= first for i in layers], size)


# Qwen 2 and 2.5: biases for queries, keys and values, and windows in the upper layers.
QWEN2 = Family(
    model_type="qwen2",
    flags={},
    sizes={"kv_heads": 32},
    always={"qkv_bias": True},
    more=lambda fields, _: {"windows": _upper_windows(fields)},
)


# Qwen2.5-VL: a Qwen 2 beside a vision tower; positions within images don't affect text, and
# Transformers' attention doesn't read `head_dim`.
QWEN2_5_VL = multimodal_family(
    Family(
        model_type="qwen2_5_vl_text",
        class_name="Qwen2_5_VLTextModel",
        flags={},
        sizes={"kv_heads": 8, "eps": 1e-5, "head_dim_fixed": True},
        rope={"theta": 1_000_000.0, "images": True},
        always={"qkv_bias": True},
        more=lambda fields, _: {"windows": _upper_windows(fields, first=80)},
    ),
    model_type="qwen2_5_vl",
    class_name="Qwen2_5_VLForConditionalGeneration",
    kept=("visual.",),
    beside="image_token_id video_token_id vision_start_token_id vision_end_token_id "
    "vision_token_id",
    body="model",
    head="lm_head",
    older=True,
    vision=partial(read_vision, prefix="visual", token=151_655, sections=(16, 24, 24), older=True),
)


# Qwen 3: norms for each head's queries and keys.
QWEN3 = Family(
    model_type="qwen3",
    neutral={"use_qk_norm": True},
    sizes={"kv_heads": 32, "head_dim": 128},
    always={"qk_norm": True},
    more=lambda fields, _: {"windows": _upper_windows(fields)},
)


QWEN3_VL_FILES: dict[str, Any] = {
    "kept": ("model.visual.",),
    "beside": "image_token_id video_token_id vision_start_token_id vision_end_token_id",
    "body": "model.language_model",
    "head": "lm_head",
    "vision": partial(
        read_vision,
        prefix="model.visual",
        token=151_655,
        sections=(24, 20, 20),
        deep=(8, 16, 24),
    ),
}
# Qwen3-VL: a Qwen 3 beside a vision tower; positions within images don't affect text.
QWEN3_VL = multimodal_family(
    Family(
        model_type="qwen3_vl_text",
        class_name="Qwen3VLTextModel",
        sizes={"kv_heads": 32, "head_dim": 128},
        rope={"theta": 500_000.0, "images": True},
        always={"qk_norm": True},
    ),
    model_type="qwen3_vl",
    class_name="Qwen3VLForConditionalGeneration",
    **QWEN3_VL_FILES,
)


# GLM 4: four norms per layer, and rotary embeddings of neighbours in half of each head. The norms
# are the usual ones, but the files use one name for a different norm.
GLM4 = Family(
    model_type="glm4",
    sizes={"kv_heads": 2, "head_dim": 128, "eps": 0.00000015625},
    flags={"attention_bias": (True, "qkv_bias")},
    rope={"share": 0.5, "interleaved": True},
    always={"sandwich_norms": True, "dense": FusedMLP},
    renames={
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
)
# GLM 4 of 2024: the same with two norms per layer.
GLM = replace(
    GLM4,
    model_type="glm",
    always={"dense": FusedMLP},
    renames={},
)


# Nemotron 3 and 4, Minitron: layer norms with an offset, and a plain MLP with a squared ReLU.
NEMOTRON = Family(
    model_type="nemotron",
    unread="kv_channels",
    sizes={"eps": 1e-5, "eps_name": "norm_eps", "hidden_act": "relu2", "std": 0.0134},
    flags=ATTENTION_BIAS | MLP_BIAS,
    rope={"share": 0.5},
    always={"norm": "layer", "norm_offset": 1.0, "dense": PlainMLP},
)


# Arcee's AFM: a Llama with a plain MLP and a squared ReLU.
ARCEE = Family(
    model_type="arcee",
    sizes={"eps": 1e-5, "hidden_act": "relu2"},
    flags=ATTENTION_BIAS | MLP_BIAS,
    always={"dense": PlainMLP},
)


# StarCoder 2: layer norms, a plain MLP, and one option for all biases; dropout in its released
# configurations. Only the original code reads the neutral fields.
STARCODER2 = Family(
    model_type="starcoder2",
    neutral={"mlp_type": "default", "norm_type": "layer_norm"},
    sizes={
        "kv_heads": 2,
        "eps": 1e-5,
        "eps_name": "norm_epsilon",
        "tied": True,
        "std": 0.018042,
        "hidden_act": "gelu_pytorch_tanh",
    },
    flags={"use_bias": (True, "qkv_bias out_bias mlp_bias")},
    always={"norm": "layer", "dense": PlainMLP},
    more=lambda fields, _: {"windows": hf_common.windows_everywhere(fields, None)},
    renames={"up_proj": "c_fc", "down_proj": "c_proj"},
)


def _stretched_rope(theta: float, factor: float) -> dict[str, Any]:
    """Returns arguments of `hf_common.rope`: by default, Llama 3's stretching by a factor."""
    default = {"rope_type": "llama3", "rope_theta": theta, "factor": factor}
    default |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"theta": theta, "default": default | {"original_max_position_embeddings": 8192}}


def _cwm(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    windowed, size = [i % 4 for i in range(sizes["num_layers"])], hf_common.window(fields, 8192)
    return {"windows": hf_common.windows_by_type(fields, windowed, size)}


# Code World Model: a Llama with a window in three of four layers.
CWM = Family(
    model_type="cwm",
    scorer=None,
    neutral={"pretraining_tp": 1},
    sizes={"kv_heads": 8, "head_dim": 128, "eps": 1e-5},
    flags=MLP_BIAS,
    rope=_stretched_rope(1_000_000.0, 16.0),
    more=_cwm,
)


# ERNIE 4.5: rotary embeddings of neighbours, and one option for all biases.
ERNIE4_5 = Family(
    model_type="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    scorer=None,
    sizes={"kv_heads": 2, "head_dim": 128, "head_dim_null": True, "eps": 1e-5, "tied": True},
    flags={"use_bias": (False, "qkv_bias out_bias mlp_bias")},
    rope={"theta": 500_000.0, "interleaved": True},
)


def _without_dropout(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    for name in ("attention_dropout", "residual_dropout"):
        # Unlike in most families, a missing field means dropout.
        value = fields.number(name, 0.1, least=0)
        if value and name not in fields.ignore:
            raise ValueError(
                f"`{name}` = {value} in a {fields.family} isn't supported; only 0.0 is. Name it in "
                "`ignore` to train without dropout"
            )
    return {}


# Seed-OSS: biases of queries, keys and values, and dropout in its released configurations.
SEED_OSS = Family(
    model_type="seed_oss",
    neutral={"pretraining_tp": 1},
    sizes={"kv_heads": 8, "head_dim": 128, "head_dim_null": True},
    flags={"attention_bias": (True, "qkv_bias"), "attention_out_bias": (False, "out_bias")}
    | MLP_BIAS,
    more=_without_dropout,
)


def _smollm3(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    given = fields.listed("no_rope_layers", int, "integers")
    rotated = hf_common.rotated_layers(fields, given, sizes["num_layers"])
    size = hf_common.window(fields, None)
    used = size if fields.flag("use_sliding_window", False) else None
    windowed = [used and not rotates for rotates in rotated]
    return {
        "unrotated": tuple(i for i, rotates in enumerate(rotated) if not rotates),
        "windows": hf_common.windows_by_type(fields, windowed, used),
    }


# SmolLM 3: every fourth layer has no rotary embedding.
SMOLLM3 = Family(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    unread="pretraining_tp",
    sizes={"kv_heads": 4, "tied": True},
    flags=ATTENTION_BIAS | MLP_BIAS,
    rope={"theta": 2_000_000.0},
    more=_smollm3,
)


def _cohere2(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    step = fields.integer("sliding_window_pattern", 4)
    windows = hf_common.windows_by_step(fields, step, hf_common.window(fields))
    return {
        "windows": windows,
        "unrotated": tuple(i for i, window in enumerate(windows) if window is None),
        "logit_scale": fields.number("logit_scale", 0.0625, above=0),
    }


# Command R7B and Command A, Tiny Aya: attention beside the MLP, norms without a bias. Layers with a
# window rotate neighbours; layers without one don't rotate. Only the original code reads the
# neutral fields.
COHERE2 = Family(
    model_type="cohere2",
    scorer=None,
    neutral={
        "use_parallel_block": True,
        "use_gated_activation": True,
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "order_of_interleaved_layers": "local_attn_first",
    },
    unread="layer_switch use_embedding_sharing use_parallel_embedding",
    sizes={"eps": 1e-5, "eps_name": "layer_norm_eps", "tied": True},
    rope={"interleaved": True},
    always={"norm": "layer", "norm_bias": False, "layer": ParallelLayer},
    more=_cohere2,
)


class CohereAttention(Attention):
    """Attention that may normalise queries and keys, each head with a weight of its own."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        if config.qk_norm:
            self.q_norm, self.k_norm = (LayerNorm(config.head_dim, config, make) for _ in "qk")
            self.q_norm.weight = make.constant(1.0, config.num_heads, config.head_dim)
            self.k_norm.weight = make.constant(1.0, config.num_kv_heads, config.head_dim)


# Command R and R+, Aya 23: no windows, and in some models norms of queries and keys.
COHERE = replace(
    COHERE2,
    model_type="cohere",
    neutral={},
    unread="",
    flags=ATTENTION_BIAS | {"use_qk_norm": (False, "qk_norm")},
    rope={"theta": 500_000.0, "interleaved": True},
    always={**COHERE2.always, "attention": CohereAttention},
    more=lambda fields, _: {"logit_scale": fields.number("logit_scale", 0.0625, above=0)},
)


def granite_scales(fields: Fields, _: dict[str, Any]) -> dict[str, float]:
    """Returns the scales of embeddings, attention scores, residual branches and logits.

    Granite's attention factor replaces 1 / sqrt(head_dim), and is independent of it.
    """
    return {
        "scale_embedding": fields.number("embedding_multiplier", 1.0, above=0),
        "attention_scale": fields.number("attention_multiplier", 1.0, above=0),
        "residual_scale": fields.number("residual_multiplier", 1.0, above=0),
        "logit_scale": 1.0 / fields.number("logits_scaling", 1.0, above=0),
    }


# Granite 3: scaled embeddings, attention scores, residual branches and logits.
GRANITE = Family(
    model_type="granite",
    scorer=None,
    flags=ATTENTION_BIAS | MLP_BIAS,
    more=granite_scales,
)


class HunyuanAttention(Attention):
    """Attention that normalises each head's queries and keys after they are rotated."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        self.query_layernorm = RMSNorm(config.head_dim, config, make)
        self.key_layernorm = RMSNorm(config.head_dim, config, make)

    def rotate(self, q: Heads, k: Heads, rotation: Rotation) -> tuple[Heads, Heads]:
        """Returns queries and keys rotated to their positions, then normalised."""
        q, k = super().rotate(q, k, rotation)
        return self.query_layernorm(q), self.key_layernorm(k)


def _hunyuan(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the rotary embedding: with `alpha`, the type "dynamic" stretches all texts alike."""
    values, head_dim = hf_common.rope_parameters(fields), sizes["head_dim"]
    alpha = values.get("alpha")
    if alpha is not None and values.get("rope_type", values.get("type")) == "dynamic":
        for name in ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            values.pop(name, None)  # only `alpha` is read by Transformers
        theta = values.get("rope_theta") or fields.take("rope_theta", 10_000.0)
        theta = checks.number("rope_theta", theta, above=0)
        growth = checks.number("alpha", alpha, above=0) ** (head_dim / (head_dim - 2))
        values |= {"rope_type": "default", "type": "default", "rope_theta": theta * growth}
    return {"rope": hf_common.rope(fields, head_dim, parameters=values)}


# Hunyuan's dense models: norms of queries and keys after their rotation. Only the original code
# reads the neutral fields; the unread ones are its own, too, and identifiers of tokens.
HUNYUAN_V1_DENSE = Family(
    model_type="hunyuan_v1_dense",
    class_name="HunYuanDenseV1ForCausalLM",
    has_tagger=False,
    neutral={
        "use_qk_norm": True,
        "pretraining_tp": 1,
        "num_experts": 1,
        "use_rotary_pos_emb": True,
        "norm_type": "rms",
    },
    unread="attention_head_dim cla_share_factor class_num dense_list org_vocab_size pool_type "
    "eod_token_id im_end_id im_newline_id im_start_id mask_init_id pad_id text_end_id "
    "text_start_id",
    sizes={"eps": 1e-5},
    rope=None,
    always={"attention": HunyuanAttention},
    more=_hunyuan,
)


class XIELU(nnx.Module):
    """An activation with trained curvatures (https://arxiv.org/abs/2411.13010).

    It is `p x^2 + beta x` above zero and `n (exp(x) - 1 - x) + beta x` below, with
    `p = softplus(alpha_p)` and `n = beta + softplus(alpha_n)`.
    """

    def __init__(self, make: ParameterMaker):
        """Makes the two parameters, and the constants that files contain."""
        # Their softplus is 0.8, and 0.8 - beta.
        self.alpha_p = make.constant(float(np.log(np.expm1(0.8))), 1)
        self.alpha_n = make.constant(float(np.log(np.expm1(0.3))), 1)
        self.beta = Buffer(jnp.asarray(0.5, make.dtype))
        self.eps = Buffer(jnp.asarray(-1e-6, make.dtype))

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each number separately."""
        beta, eps = self.beta[...].astype(x.dtype), self.eps[...].astype(x.dtype)
        up = jax.nn.softplus(self.alpha_p[...])
        down = beta + jax.nn.softplus(self.alpha_n[...])
        below = (jnp.expm1(jnp.minimum(x, eps)) - x) * down
        return jnp.where(x > 0, up * x * x, below) + beta * x


class ApertusMLP(nnx.Module):
    """Two products with xIELU between them."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, make)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, make)
        self.act_fn = XIELU(make)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Maps each row separately."""
        return self.down_proj(self.act_fn(self.up_proj(x)))


# Apertus: a plain MLP with the activation xIELU, with two trained numbers per layer. Only the
# original code reads the neutral fields.
APERTUS = Family(
    model_type="apertus",
    scorer=None,
    has_tagger=True,
    neutral={"qk_norm": True, "hidden_act": "xielu"},
    sizes={"eps": 1e-5, "activation": "silu"},
    rope=_stretched_rope(12_000_000.0, 8.0),
    always={"qk_norm": True, "dense": ApertusMLP},
    renames={
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    },
)


class WideNormAttention(Attention):
    """Attention that normalises queries and keys over all heads together."""

    def __init__(self, config: DecoderOptions, layer: int, make: ParameterMaker):
        """Makes the parameters of one layer's attention."""
        super().__init__(config, layer, make)
        self.q_norm = RMSNorm(self.query_size, config, make)
        self.k_norm = RMSNorm(self.key_size, config, make)

    def project(self, x: HiddenStates) -> Projected:
        """Returns normalised queries and keys, and values."""
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


# OLMo 2: attention and MLP are normalised at their output, and so are queries and keys.
# CONTRIBUTING.md uses it as its worked example: the layers' differences from the usual ones, and
# the record of the fields that are read from `config.json`.
OLMO2 = Family(
    model_type="olmo2",
    has_tagger=False,
    sizes={"eps": 1e-5},
    always={"output_norms": True, "attention": WideNormAttention},
)


def _olmo3(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    full = {"rope_theta": fields.take("rope_theta", 500_000.0)}
    # `rope_theta` belongs to the layers without a window, as in Transformers.
    local = {"rope_theta": 500_000.0}
    return {
        **hf_common.two_ropes(fields, sizes["head_dim"], full, local, max_length=2048),
        "windows": hf_common.windows_by_step(fields, 4, hf_common.window(fields)),
    }


# OLMo 3: OLMo 2 with a window in most layers; only the rest stretch wavelengths for long texts.
OLMO3 = replace(OLMO2, model_type="olmo3", rope=None, more=_olmo3)


def exaone4_layers(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` about windows, which decide what rotates."""
    size = fields.integer("sliding_window", 4096, null=True)
    fields.take("sliding_window_pattern", None)  # "LLLG" in files that have `layer_types`, too
    if fields.take("layer_types", None) is not None:
        windows = hf_common.windows_by_type(fields, [], size)
    elif size is None:
        raise ValueError(f"an {fields.family} with `sliding_window` = None needs `layer_types`")
    else:
        step = fields.integer("sliding_window_pattern", 4)
        windows = hf_common.windows_by_step(fields, step, size)
    plain = () if size is None else (i for i, window in enumerate(windows) if window is None)
    return {"windows": windows, "unrotated": tuple(plain)}


# EXAONE 4: norms at the end of attention and MLP, and of each head's queries and keys. If some
# layers have a window, only these rotate.
EXAONE4 = Family(
    model_type="exaone4",
    flags={},
    sizes={"kv_heads": 32, "eps": 1e-5},
    always={"qk_norm": True, "output_norms": True},
    more=exaone4_layers,
)
