"""Reads Hugging Face configurations of the families that the decoder covers.

Every field is either read, known not to change results, or refused by name: a checkpoint never
loads with an option silently dropped. Defaults are those of Transformers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatrain_jax.models.hf_rope import read_rope
from megatrain_jax.models.moe import Experts
from megatrain_jax.models.rotary import Rope

# What changes neither parameters nor logits.
_IGNORED = frozenset(
    """
    architectures auto_map bos_token_id cache_implementation chunk_size_feed_forward dtype
    eos_token_id finetuning_task id2label initializer_range label2id max_length max_window_layers
    min_length model_type name_or_path num_labels num_return_sequences output_attentions
    original_max_position_embeddings output_hidden_states output_router_logits pad_token_id
    prefix problem_type return_dict return_dict_in_generate sep_token_id task_specific_params
    temperature tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
    unsloth_fixed unsloth_version use_cache attn_implementation max_position_embeddings
    """.split()
)
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_REQUIRED = object()


class Fields:
    """A configuration that knows which of its fields have been read."""

    def __init__(self, values: Mapping[str, Any]):
        """Keeps the values."""
        self.values = values
        self._read: set[str] = set(_IGNORED)
        self.family = str(values.get("model_type"))

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a field, or the default where it is missing.

        Raises:
            ValueError: If it is missing and has no default.
        """
        self._read.add(name)
        if default is _REQUIRED and self.values.get(name) is None:
            raise ValueError(f"the configuration of this {self.family} has no `{name}`")
        return self.values.get(name, default)

    def neutral(self, **expected: Any) -> None:
        """Refuses fields that are there with another value than the one that does nothing."""
        for name, value in expected.items():
            found = self.take(name, value)
            if found != value and found is not None:
                raise ValueError(
                    f"`{name}` = {found!r} in a {self.family} isn't supported; only {value!r} is"
                )

    def finish(self, ignore: frozenset[str]) -> None:
        """Refuses fields that nobody read, unless they are empty or off."""
        unknown = {
            name: value
            for name, value in self.values.items()
            if name not in self._read | ignore and not name.startswith("_") and value
        }
        if unknown:
            found = ", ".join(f"`{name}` = {value!r}" for name, value in unknown.items())
            raise ValueError(
                f"a {self.family} isn't known to have these fields, which may change what it "
                f"computes: {found}. Name in `ignore` those that don't."
            )


def read(config: Mapping[str, Any], ignore: frozenset[str]) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` for a Hugging Face configuration.

    Raises:
        ValueError: See `DecoderConfig.from_hf`.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(
            f"model_type {family!r} isn't supported; these are: {', '.join(sorted(_FAMILIES))}"
        )
    expected, extra = _FAMILIES[family]
    others = [name for name in config.get("architectures") or [] if name != expected]
    if others:
        raise ValueError(
            f"architecture {', '.join(others)} isn't supported; of {family}, {expected} is"
        )
    fields = Fields(config)
    fields.neutral(attention_dropout=0.0, quantization_config=None, is_encoder_decoder=False)
    fields.neutral(tie_encoder_decoder=False, add_cross_attention=False, is_decoder=False)
    fields.neutral(use_bidirectional_attention=False)
    arguments = _common(fields) | extra(fields)
    fields.finish(ignore)
    return arguments


def _common(fields: Fields) -> dict[str, Any]:
    heads, hidden = fields.take("num_attention_heads"), fields.take("hidden_size")
    gemma = fields.family.startswith("gemma")
    activation = fields.take("hidden_act", "silu")
    if gemma:  # which Transformers reads; early checkpoints have another `hidden_act`
        activation = fields.take("hidden_activation", None) or "gelu_pytorch_tanh"
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation!r} isn't supported in a {fields.family}")
    default_eps = 1e-5 if fields.family in ("mixtral", "phi3") else 1e-6
    return {
        "vocab_size": fields.take("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.take("intermediate_size"),
        "num_layers": fields.take("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.take("num_key_value_heads", None) or heads,
        "head_dim": fields.take("head_dim", None) or _default_head_dim(fields, hidden, heads),
        "activation": _ACTIVATIONS[activation],
        "norm_eps": fields.take("rms_norm_eps", default_eps),
        "tie_embeddings": bool(fields.take("tie_word_embeddings", gemma)),
        "init_std": fields.take("initializer_range", 0.02),
    }


def _default_head_dim(fields: Fields, hidden: int, heads: int) -> int:
    return {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}.get(fields.family, hidden // heads)


def _rope(fields: Fields, *, theta: float = 10_000.0) -> Rope:
    values = fields.take("rope_scaling", None) or fields.take("rope_parameters", None) or {}
    fields.take("rope_parameters", None)
    theta = fields.take("rope_theta", theta)
    share = fields.take("partial_rotary_factor", None)
    return read_rope(
        {"rope_theta": theta}
        | ({} if share is None else {"partial_rotary_factor": share})
        | values,
        family=fields.family,
        head_dim=_common(fields)["head_dim"],
        max_length=fields.take("max_position_embeddings", 0),
        original_length=fields.take(
            "original_max_position_embeddings", 4096 if fields.family == "phi3" else None
        ),
    )


def _llama(fields: Fields) -> dict[str, Any]:
    fields.neutral(pretraining_tp=1)
    bias = bool(fields.take("attention_bias", False))
    return {
        "rope": _rope(fields),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bool(fields.take("mlp_bias", False)),
    }


def _everywhere(fields: Fields, default: int | None) -> tuple[int | None, ...]:
    window = fields.take("sliding_window", default)
    return (window,) * fields.take("num_hidden_layers") if window else ()


def _mistral(fields: Fields) -> dict[str, Any]:
    return {"rope": _rope(fields), "windows": _everywhere(fields, 4096)}


def _by_type(fields: Fields, types: list[str], window: int | None) -> tuple[int | None, ...]:
    known = {"full_attention": None, "sliding_attention": window}
    for kind in types:
        if kind not in known or (kind == "sliding_attention" and not window):
            raise ValueError(f"`layer_types` has {kind!r}, with `sliding_window` = {window!r}")
    if len(types) != fields.take("num_hidden_layers"):
        raise ValueError("`layer_types` doesn't have one entry for each layer")
    return tuple(known[kind] for kind in types)


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    layers = fields.take("num_hidden_layers")
    window = fields.take("sliding_window", 4096)
    window = window if fields.take("use_sliding_window", False) else None
    first = fields.take("max_window_layers", 28)
    types = fields.take("layer_types", None) or [
        "sliding_attention" if window and i >= first else "full_attention" for i in range(layers)
    ]
    return _by_type(fields, types, window)


def _qwen2(fields: Fields) -> dict[str, Any]:
    fields.neutral(use_mrope=False)
    return {"rope": _rope(fields), "windows": _qwen_windows(fields), "qkv_bias": True}


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias = bool(fields.take("attention_bias", False))
    return {
        "rope": _rope(fields),
        "windows": _qwen_windows(fields),
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    bias = bool(fields.take("attention_bias", False))
    layers = fields.take("num_hidden_layers")
    dense, step = fields.take("mlp_only_layers", None) or [], fields.take("decoder_sparse_step", 1)
    sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    num = fields.take("num_experts", None) or fields.take("num_local_experts", 128)
    fields.take("num_local_experts", None)
    used = fields.take("use_sliding_window", False)
    experts = Experts(
        num=num,
        per_token=fields.take("num_experts_per_tok", 8),
        intermediate_size=fields.take("moe_intermediate_size", 768),
        normalize=bool(fields.take("norm_topk_prob", False)),
        layers=sparse,
        balance_weight=fields.take("router_aux_loss_coef", 0.001),
    )
    window = fields.take("sliding_window", 4096)
    return {
        "rope": _rope(fields),
        "windows": (window,) * layers if used and window else (),
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "experts": experts if sparse else None,
    }


def _mixtral(fields: Fields) -> dict[str, Any]:
    fields.neutral(router_jitter_noise=0.0)
    experts = Experts(
        num=fields.take("num_local_experts", None) or fields.take("num_experts", 8),
        per_token=fields.take("num_experts_per_tok", 2),
        intermediate_size=fields.take("intermediate_size"),
        normalize=True,
        layers=tuple(range(fields.take("num_hidden_layers"))),
        balance_weight=fields.take("router_aux_loss_coef", 0.001),
    )
    fields.take("num_experts", None)
    rope = _rope(fields, theta=1_000_000.0)
    return {"rope": rope, "windows": _everywhere(fields, None), "experts": experts}


def _gemma(fields: Fields, types: list[str]) -> dict[str, Any]:
    bias = bool(fields.take("attention_bias", False))
    return {
        "windows": _by_type(
            fields, fields.take("layer_types", None) or types, fields.take("sliding_window", 4096)
        ),
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "scale_embedding": True,
        "attention_scale": fields.take("query_pre_attn_scalar", 256) ** -0.5,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    layers = fields.take("num_hidden_layers")
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return _gemma(fields, types) | {
        "rope": _rope(fields),
        "attention_softcap": fields.take("attn_logit_softcapping", 50.0),
        "final_softcap": fields.take("final_logit_softcapping", 30.0),
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    fields.neutral(attn_logit_softcapping=None)  # which Transformers doesn't apply either
    layers = fields.take("num_hidden_layers")
    step = fields.take("_sliding_window_pattern", None) or fields.take("sliding_window_pattern", 6)
    fields.take("sliding_window_pattern", None)
    types = ["sliding_attention" if (i + 1) % step else "full_attention" for i in range(layers)]
    both = fields.take("rope_parameters", None) or {}
    full = {"rope_theta": fields.take("rope_theta", 1e6)} | (both.get("full_attention") or {})
    full |= fields.take("rope_scaling", None) or {}
    local = {"rope_theta": fields.take("rope_local_base_freq", 1e4)}
    local |= both.get("sliding_attention") or {}
    extra = set(both) - {"full_attention", "sliding_attention"}
    if extra:
        raise ValueError(f"`rope_parameters` has {', '.join(sorted(extra))}, which isn't supported")
    shared = {
        "family": fields.family,
        "head_dim": _common(fields)["head_dim"],
        "max_length": fields.take("max_position_embeddings", 131_072),
        "original_length": None,
    }
    return _gemma(fields, types) | {
        "rope": read_rope(full, **shared),
        "local_rope": read_rope(local, **shared),
        "qk_norm": True,
        "final_softcap": fields.take("final_logit_softcapping", None),
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
