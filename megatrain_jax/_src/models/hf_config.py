"""Reads Hugging Face configurations of the families that the decoder covers.

Every field is either read, known not to change results, or refused by name: a checkpoint never
loads with an option silently dropped. Defaults are those of Transformers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.models.hf_fields import Fields, shown
from megatrain_jax._src.models.hf_rope import read_rope
from megatrain_jax._src.models.moe import Experts
from megatrain_jax._src.models.rotary import Rope
from megatrain_jax._src.models.tensors import some

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read(config: Mapping[str, Any], ignore: frozenset[str]) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` for a Hugging Face configuration.

    Raises:
        ValueError: See `DecoderConfig.from_hf`.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ValueError(
            f"`model_type` = {shown(family)} isn't supported; these are: "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    expected, extra = _FAMILIES[family]
    fields = Fields(config)
    others = [n for n in fields.listed("architectures", str, "names") or [] if n != expected]
    if others:
        raise ValueError(
            f"`architectures` = {some(others)} isn't supported; of {family}, {expected} is"
        )
    fields.neutral(attention_dropout=0.0, quantization_config=None, is_encoder_decoder=False)
    fields.neutral(tie_encoder_decoder=False, add_cross_attention=False, is_decoder=False)
    fields.neutral(use_bidirectional_attention=False)
    arguments = _common(fields) | extra(fields)
    fields.finish(ignore)
    return arguments


def _common(fields: Fields) -> dict[str, Any]:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    gemma = fields.family.startswith("gemma")
    name, activation = "hidden_act", fields.take("hidden_act", "silu")
    if gemma:  # which Transformers reads; early checkpoints have another `hidden_act`
        name = "hidden_activation"
        activation = fields.take(name, None)
        activation = "gelu_pytorch_tanh" if activation is None else activation
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"`{name}` = {shown(activation)} isn't supported in a {fields.family}")
    default_eps = 1e-5 if fields.family in ("mixtral", "phi3") else 1e-6
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": _num_kv_heads(fields, heads),
        "head_dim": _head_dim(fields, hidden, heads),
        "activation": _ACTIVATIONS[activation],
        "norm_eps": fields.number("rms_norm_eps", default_eps, least=0),
        "tie_embeddings": fields.flag("tie_word_embeddings", gemma),
        "init_std": fields.number("initializer_range", 0.02, least=0),
    }


def _num_kv_heads(fields: Fields, heads: int) -> int:
    """Returns the number of key heads; a field that is null asks for that of all heads."""
    default = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32}.get(fields.family)
    if fields.family in ("qwen3_moe", "gemma2", "gemma3_text"):
        default = 4
    return fields.integer("num_key_value_heads", default, null=True) or heads


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    default = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}.get(fields.family)
    given = fields.integer("head_dim", None) or default
    if given is None and hidden % heads:
        raise ValueError(
            f"`num_attention_heads` must divide `hidden_size`, {hidden}, or `head_dim` be there, "
            f"but it is {heads}"
        )
    return given or hidden // heads


def _rope(fields: Fields, *, theta: float = 10_000.0) -> Rope:
    values = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    fields.take("rope_parameters", None)
    theta = fields.take("rope_theta", theta)
    share = fields.take("partial_rotary_factor", None)
    return read_rope(
        {"rope_theta": theta}
        | ({} if share is None else {"partial_rotary_factor": share})
        | values,
        family=fields.family,
        head_dim=_common(fields)["head_dim"],
        max_length=fields.integer("max_position_embeddings", 0, least=0),
        original_length=fields.integer(
            "original_max_position_embeddings",
            4096 if fields.family == "phi3" else None,
            null=True,
        ),
    )


def _llama(fields: Fields) -> dict[str, Any]:
    fields.neutral(pretraining_tp=1)
    bias = fields.flag("attention_bias", False)
    return {
        "rope": _rope(fields),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def _window(fields: Fields, default: int | None = 4096) -> int | None:
    return fields.integer("sliding_window", default, least=0, null=True) or None


def _everywhere(fields: Fields, default: int | None) -> tuple[int | None, ...]:
    window = _window(fields, default)
    return (window,) * fields.integer("num_hidden_layers") if window else ()


def _mistral(fields: Fields) -> dict[str, Any]:
    return {"rope": _rope(fields), "windows": _everywhere(fields, 4096)}


def _by_type(fields: Fields, types: list[str], window: int | None) -> tuple[int | None, ...]:
    known = {"full_attention": None, "sliding_attention": window}
    types = fields.listed("layer_types", str, "names") or types
    for kind in types:
        if kind not in known or (kind == "sliding_attention" and not window):
            raise ValueError(f"`layer_types` has {kind!r}, with `sliding_window` = {window!r}")
    if len(types) != fields.integer("num_hidden_layers"):
        raise ValueError(
            f"`layer_types` has {len(types)} entries, not one for each of "
            f"`num_hidden_layers`, {fields.integer('num_hidden_layers')}"
        )
    return tuple(known[kind] for kind in types)


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    fields.take("sliding_window", None)
    first = fields.integer("max_window_layers", 28, least=0)
    types = [
        "sliding_attention" if window and i >= first else "full_attention"
        for i in range(fields.integer("num_hidden_layers"))
    ]
    return _by_type(fields, types, window)


def _qwen2(fields: Fields) -> dict[str, Any]:
    fields.neutral(use_mrope=False)
    return {"rope": _rope(fields), "windows": _qwen_windows(fields), "qkv_bias": True}


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {
        "rope": _rope(fields),
        "windows": _qwen_windows(fields),
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    dense = set(fields.listed("mlp_only_layers", int, "integers") or ())
    sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    used, window = fields.flag("use_sliding_window", False), _window(fields)
    experts = _experts(fields, "num_experts", "num_local_experts", 128)
    return {
        "rope": _rope(fields),
        "windows": (window,) * layers if used and window else (),
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "experts": Experts(
            **experts,
            per_token=fields.integer("num_experts_per_tok", 8),
            intermediate_size=fields.integer("moe_intermediate_size", 768),
            normalize=fields.flag("norm_topk_prob", False),
            layers=sparse,
        )
        if sparse
        else None,
    }


def _experts(fields: Fields, name: str, other: str, default: int) -> dict[str, Any]:
    """Returns how many experts there are, which has two names, and how they are balanced."""
    second = fields.integer(other, None)
    return {
        "num": fields.integer(name, None) or second or default,
        "balance_weight": fields.number("router_aux_loss_coef", 0.001, least=0),
    }


def _mixtral(fields: Fields) -> dict[str, Any]:
    fields.neutral(router_jitter_noise=0.0)
    experts = Experts(
        **_experts(fields, "num_local_experts", "num_experts", 8),
        per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size"),
        normalize=True,
        layers=tuple(range(fields.integer("num_hidden_layers"))),
    )
    rope = _rope(fields, theta=1_000_000.0)
    return {"rope": rope, "windows": _everywhere(fields, None), "experts": experts}


def _gemma(fields: Fields, types: list[str]) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {
        "windows": _by_type(fields, types, _window(fields)),
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "scale_embedding": True,
        "attention_scale": fields.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers")
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return _gemma(fields, types) | {
        "rope": _rope(fields),
        "attention_softcap": fields.number("attn_logit_softcapping", 50.0, above=0, null=True),
        "final_softcap": fields.number("final_logit_softcapping", 30.0, above=0, null=True),
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    fields.neutral(attn_logit_softcapping=None)  # which Transformers doesn't apply either
    layers = fields.integer("num_hidden_layers")
    second = fields.integer("sliding_window_pattern", 6)
    step = fields.integer("_sliding_window_pattern", None) or second
    types = ["sliding_attention" if (i + 1) % step else "full_attention" for i in range(layers)]
    both = fields.mapping("rope_parameters")
    if not all(isinstance(v, Mapping | None) for v in both.values()):
        raise TypeError(checks.refused("rope_parameters", "an object of objects", both))
    full = {"rope_theta": fields.take("rope_theta", 1e6)} | (both.get("full_attention") or {})
    full |= fields.mapping("rope_scaling")
    local = {"rope_theta": fields.take("rope_local_base_freq", 1e4)}
    local |= both.get("sliding_attention") or {}
    extra = set(both) - {"full_attention", "sliding_attention"}
    if extra:
        raise ValueError(f"`rope_parameters` has {some(sorted(extra))}, which isn't supported")
    shared = {
        "family": fields.family,
        "head_dim": _common(fields)["head_dim"],
        "max_length": fields.integer("max_position_embeddings", 131_072),
        "original_length": None,
    }
    return _gemma(fields, types) | {
        "rope": read_rope(full, **shared),
        "local_rope": read_rope(local, **shared),
        "qk_norm": True,
        "final_softcap": fields.number("final_logit_softcapping", None, above=0),
    }


def _phi3(fields: Fields) -> dict[str, Any]:
    fields.neutral(resid_pdrop=0.0, embd_pdrop=0.0, attention_bias=False, mlp_bias=False)
    # Fields of Phi-4-mini that only its own code reads.
    fields.neutral(lm_head_bias=False, interpolate_factor=1, full_attn_mod=1)
    return {"rope": _rope(fields), "windows": _everywhere(fields, None), "fused": True}


_FAMILIES: dict[str, tuple[str, Callable[[Fields], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _mistral),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", _gemma3),
    "phi3": ("Phi3ForCausalLM", _phi3),
}
