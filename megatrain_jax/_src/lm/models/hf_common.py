"""The fields of a Hugging Face configuration, read with type checks by readers for all families.

The file is untrusted: a string instead of a number, a null, or a size that no machine can hold is
refused under the field's name, before anything is built from it.

A reader returns arguments of `DecoderConfig`, or a part of one. Defaults are Transformers'; a
default that differs between families is an argument here. Rotary embeddings have an older and a
newer form.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.lm.models.moe import Experts
from megatrain_jax._src.lm.models.quantised import check_quantisation
from megatrain_jax._src.lm.models.rotary import Rope
from megatrain_jax._src.lm.models.tensors import some

# Fields that affect neither parameters nor logits.
_IGNORED = frozenset(
    """
    architectures attn_implementation auto_map bos_token_id cache_implementation
    chunk_size_feed_forward decoder_start_token_id do_sample dtype eos_token_id finetuning_task
    id2label initializer_range is_llama_config label2id length_penalty max_length
    max_position_embeddings max_sequence_length max_window_layers min_length model_type
    name_or_path num_beam_groups num_beams num_labels num_return_sequences
    original_max_position_embeddings output_attentions output_hidden_states output_router_logits
    pad_token_id prefix problem_type repetition_penalty return_dict return_dict_in_generate
    sep_token_id sliding_window_size task_specific_params temperature tokenizer_class top_k top_p
    torch_dtype torchscript transformers.js_config transformers_version typical_p unsloth_fixed
    unsloth_version use_cache
    """.split()
)
_REQUIRED = object()
# Bounds far above any real model; all further integers may be up to 2^31 - 1.
_MOST = {
    "num_hidden_layers": 2**10,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "vocab_size": 2**24,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
}


class Fields:
    """A configuration that tracks which of its fields have been read."""

    def __init__(self, values: Mapping[str, Any], ignore: frozenset[str] = frozenset()):
        """Keeps the values, and the names of fields that the user wants ignored."""
        self.values, self.ignore = values, ignore
        self._read: set[str] = set(_IGNORED)
        self.family = str(values.get("model_type"))

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a field, or the default if it is missing.

        Raises:
            ValueError: If it is missing and has no default.
        """
        self._read.add(name)
        if default is _REQUIRED and self.values.get(name) is None:
            raise ValueError(f"the configuration of this {self.family} has no `{name}`")
        return self.values.get(name, default)

    def integer(
        self, name: str, default: Any = _REQUIRED, *, least: int = 1, null: bool = False
    ) -> Any:
        """Returns an integer, or None if the field is null and null is allowed.

        Raises:
            TypeError: If it is not an integer.
            ValueError: If it is out of bounds.
        """
        value = self.take(name, default)
        if value is None and (null or default is None):
            return None
        return checks.integer(name, value, least=least, most=_MOST.get(name, 2**31 - 1))

    def number(
        self, name: str, default: Any = _REQUIRED, *, null: bool = False, **bounds: float
    ) -> Any:
        """Returns a finite float within `bounds`, or None if the field is null and that is allowed.

        Raises:
            TypeError: If it is not a number.
            ValueError: If it is not finite or out of bounds.
        """
        value = self.take(name, default)
        if value is None and (null or default is None):
            return None
        return checks.number(name, value, **bounds)

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false.

        Raises:
            TypeError: If it is neither.
        """
        return checks.boolean(name, self.take(name, default))

    def listed(self, name: str, kind: type, what: str) -> list[Any] | None:
        """Returns a list of values of one type, or None if it is missing.

        Raises:
            TypeError: If it is not a list, or has values of a different type.
        """
        values = self.take(name, None)
        if values is not None and not (
            isinstance(values, list | tuple) and all(type(v) is kind for v in values)
        ):
            raise TypeError(checks.refused(name, f"a list of {what}", values))
        return None if values is None else list(values)

    def mapping(self, name: str) -> dict[str, Any]:
        """Returns an object's fields, {} if it is missing.

        Raises:
            TypeError: If it is not an object.
        """
        values = self.take(name, None)
        values = {} if values is None else values
        checks.instance(name, values, Mapping, "an object")
        return dict(values)

    def neutral(self, **expected: Any) -> None:
        """Refuses fields with any value but the one that has no effect."""
        for name, value in expected.items():
            found = self.take(name, value)
            if found != value and found is not None and name not in self.ignore:
                raise ValueError(
                    f"`{name}` = {checks.shown(found)} in a {self.family} isn't supported; only "
                    f"{value!r} is"
                )

    def finish(self) -> None:
        """Refuses fields that have not been read, unless they are empty or off."""
        unknown = {
            name: value
            for name, value in self.values.items()
            # An unknown option that is empty or off has no effect; names with `_` are the writer's
            # notes.
            if name not in self._read | self.ignore and not name.startswith("_") and value
        }
        if unknown:
            found = [f"`{name}` = {checks.shown(value)}" for name, value in unknown.items()]
            raise ValueError(
                f"a {self.family} isn't known to have these fields, which may change what it "
                f"computes: {some(found)}. Name fields without an effect in `ignore`."
            )


def as_ignored(ignore: Sequence[str]) -> frozenset[str]:
    """Returns the names of fields to ignore.

    Raises:
        TypeError: If they are not names, or only one name.
    """
    names = ignore if isinstance(ignore, list | tuple | set | frozenset) else [None]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(checks.refused("ignore", "a list of names of fields", ignore))
    return frozenset(map(str, names))


_OPTIONS = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor",
    "proportional": "factor",
    "yarn": "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate "
    "original_max_position_embeddings",
    "longrope": "factor attention_factor short_factor long_factor short_mscale long_mscale "
    "original_max_position_embeddings",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
}
KINDS = {kind: kind for kind in _OPTIONS if kind != "proportional"}
_COMMON = "rope_type type rope_theta partial_rotary_factor"
# Found in released checkpoints, but not read by Transformers: some programs take this as the scale
# of attention, where Transformers uses `attention_factor`.
_NOT_READ = {"yarn": {"attn_factor"}}


def read_rope(
    fields: Fields,
    values: Mapping[str, Any],
    head_dim: int,
    *,
    max_length: int,
    original_length: int | None = None,
    kinds: Mapping[str, str] = KINDS,
    partial: bool = False,
    interleaved: bool = False,
) -> Rope:
    """Returns a rotary embedding.

    Args:
        fields: The configuration.
        values: `rope_parameters`, or `rope_scaling` with `rope_theta`.
        head_dim: Width of a head.
        max_length: Default of `max_position_embeddings`.
        original_length: `original_max_position_embeddings` of the configuration itself.
        kinds: The supported values of `rope_type`, and the kind that each selects.
        partial: Whether the family may rotate a part of each head.
        interleaved: See `Rope`.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If a kind or an option isn't supported. The message names it.
    """
    max_length = fields.integer("max_position_embeddings", max_length, least=min(max_length, 1))
    # Older files call it `type`.
    kind = next((values[k] for k in ("rope_type", "type") if values.get(k) is not None), "default")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"`rope_type` = {checks.shown(kind)} isn't supported in a {fields.family}")
    kind = kinds[kind]
    _check_options(values, kind, fields.ignore)
    share = _number(values, "partial_rotary_factor", 1.0)
    whole = kind == "proportional"  # all dimensions, but only some of them turn
    if share != 1.0 and not (partial or whole):
        raise ValueError(f"`partial_rotary_factor` = {share} isn't supported in a {fields.family}")
    if share > 1 or int(head_dim * share) % 2 or not int(head_dim * share):
        raise ValueError(
            f"`partial_rotary_factor` = {share} of `head_dim` = {head_dim} must be an even number "
            "of dimensions, at most all of them"
        )
    inner = values.get("original_max_position_embeddings")
    if inner is not None:
        inner = checks.integer("original_max_position_embeddings", inner)
    # Phi-3 keeps it outside the embedding's options, most families inside.
    original = original_length or inner or max_length
    shape: dict[str, Any] = {
        "dim": head_dim if whole else int(head_dim * share),
        "base": _number(values, "rope_theta"),
        "kind": kind,
        "interleaved": interleaved,
    }
    if kind == "proportional":
        shape["factor"] = _number(values, "factor", 1.0)
        shape["turning"] = int(share * head_dim // 2)
    elif kind in ("linear", "dynamic", "llama3"):
        shape["factor"] = _number(values, "factor")
    elif kind != "default":
        shape |= _stretching(values, kind, original, max_length)
    if kind == "dynamic":
        shape["max_length"] = max_length
    if kind == "llama3":
        shape["original_length"] = original
        for name in ("low_freq_factor", "high_freq_factor"):
            shape[name] = _number(values, name)
    return Rope(**shape)


def _check_options(values: Mapping[str, Any], kind: str, ignore: Collection[str]) -> None:
    """Refuses options that nothing reads, except those that Transformers does not read either."""
    known = {*_OPTIONS[kind].split(), *_COMMON.split(), *ignore}
    unknown = {name for name, value in values.items() if value is not None} - known
    if not_read := unknown & _NOT_READ.get(kind, set()):
        warn_user(
            f"{some(sorted(not_read))} of rotary embeddings of type {kind!r} is not read, as by "
            "Transformers",
        )
        unknown -= not_read
    if unknown:
        raise ValueError(
            f"rotary embeddings of type {kind!r} aren't known to have "
            f"{some(sorted(unknown))}: name fields without an effect in `ignore`"
        )


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name)
    if value is None and default is None:
        raise ValueError(f"these rotary embeddings need a number `{name}`")
    return checks.number(name, default if value is None else value, above=0)


def _stretching(
    values: Mapping[str, Any], kind: str, original: int, max_length: int
) -> dict[str, Any]:
    """Returns the arguments of a `Rope` of the kind "yarn" or "longrope"."""
    if kind == "yarn" and "factor" not in values:  # null means the ratio of the lengths
        raise ValueError("rotary embeddings of type 'yarn' need a number `factor`")
    for name in ("short_mscale", "long_mscale"):
        if kind == "longrope" and values.get(name) not in (None, 1.0):
            raise ValueError(
                f"`{name}` = {checks.shown(values[name])} of a longrope isn't supported"
            )
    if original < 2:
        raise ValueError(
            "`original_max_position_embeddings`, or `max_position_embeddings` where it is missing, "
            f"must be at least 2, but is {original}"
        )
    factor = _number(values, "factor", max_length / original or None)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = values.get("attention_factor")
    if attention is None and kind == "yarn":
        attention = magnitude(1.0)
        if values.get("mscale") and values.get("mscale_all_dim"):
            one, all_dims = (_number(values, name) for name in ("mscale", "mscale_all_dim"))
            attention = magnitude(one) / magnitude(all_dims)
    elif attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    found: dict[str, Any] = {"original_length": original}
    found["attention_factor"] = checks.number("attention_factor", attention, above=0)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            given = values.get(name)
            if not isinstance(given, list | tuple):
                raise TypeError(checks.refused(name, "a list of numbers", given))
            found[f"{name}s"] = tuple(checks.number(name, value, above=0) for value in given)
        return found
    return found | {
        "factor": factor,
        "beta_fast": _number(values, "beta_fast", 32.0),
        "beta_slow": _number(values, "beta_slow", 1.0),
        "truncate": checks.boolean("truncate", values.get("truncate", True)),
    }


Windows = tuple[int | None, ...]
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def refuse_unsupported(fields: Fields) -> None:
    """Refuses fields that no family supports, unless they have no effect."""
    if "quantization_config" not in fields.ignore:
        check_quantisation(fields.values)
    fields.take("quantization_config", None)  # weights are decoded where they are read
    fields.neutral(attention_dropout=0.0)
    # This value affects only tokens of an image, and text has none.
    if fields.take("use_bidirectional_attention", False) != "vision":
        fields.neutral(use_bidirectional_attention=False)


def sizes(
    fields: Fields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    head_dim_null: bool = False,
    head_dim_fixed: bool = False,
    eps: float = 1e-6,
    eps_name: str = "rms_norm_eps",
    tied: bool = False,
    std: float = 0.02,
    hidden_act: str = "silu",
    act_name: str = "hidden_act",
    act_null: bool = False,
    activation: str | None = None,
    inside: int | None = None,
    **others: int,
) -> dict[str, Any]:
    """Returns the arguments that every family has.

    Args:
        fields: The configuration.
        kv_heads: Default of `num_key_value_heads`; None for the number of heads.
        head_dim: Default of `head_dim`; None for the width divided by the heads.
        head_dim_null: Whether a null in place of `head_dim` means this quotient, not the default.
        head_dim_fixed: Whether `head_dim` can't be anything else than this quotient.
        eps: Default of the number that norms add to the mean square.
        eps_name: The field with that number.
        tied: Default of `tie_word_embeddings`.
        std: Default of `initializer_range`.
        hidden_act: Default of the field with the MLPs' activation.
        act_name: The name of that field.
        act_null: Whether a null in it means the default.
        activation: The MLPs' activation under its name in `DecoderConfig`; None to read the field.
        inside: The width inside an MLP; None to read `intermediate_size`.
        **others: Defaults of further sizes, in a family with configurations that may omit them.
    """

    def size(name: str) -> int:
        return fields.integer(name, others[name]) if name in others else fields.integer(name)

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    if head_dim_null and fields.take("head_dim", head_dim) is None:
        head_dim = None
    found = {
        "vocab_size": size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": inside or size("intermediate_size"),
        "num_layers": size("num_hidden_layers"),
        "num_heads": heads,
        # Null means as many as there are heads.
        "num_kv_heads": fields.integer("num_key_value_heads", kv_heads, null=True) or heads,
        "head_dim": _head_dim(fields, hidden, heads, head_dim),
        "activation": activation or read_activation(fields, act_name, hidden_act, null=act_null),
        "norm_eps": fields.number(eps_name, eps, least=0),
        "tie_embeddings": fields.flag("tie_word_embeddings", tied),
        "init_std": fields.number("initializer_range", std, least=0),
    }
    if head_dim_fixed:
        fields.neutral(head_dim=hidden // heads)
    return found


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    given = fields.integer("head_dim", None) or default
    if given is None and hidden % heads:
        raise ValueError(
            f"`num_attention_heads` must divide `hidden_size`, {hidden}, or `head_dim` be there, "
            f"but it is {heads}"
        )
    return given or hidden // heads


def read_activation(fields: Fields, name: str, default: str, *, null: bool = False) -> str:
    """Returns the activation named by a field, under its name in `DecoderConfig`.

    Args:
        fields: The configuration.
        name: The field.
        default: The value of a missing field.
        null: Whether null means the default too.
    """
    value = fields.take(name, default)
    value = default if value is None and null else value
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ValueError(f"`{name}` = {checks.shown(value)} isn't supported in a {fields.family}")
    return _ACTIVATIONS[value]


def rope(
    fields: Fields,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    original_length: int | None = None,
    kinds: Mapping[str, str] = KINDS,
    share: float | None = None,
    interleaved: bool = False,
    default: Mapping[str, Any] | None = None,
    images: bool = False,
    parameters: dict[str, Any] | None = None,
) -> Rope:
    """Returns the rotary embedding of `rope_parameters`, or of `rope_scaling` and `rope_theta`.

    Args:
        fields: The configuration.
        head_dim: Width of a head.
        theta: Default of `rope_theta`.
        original_length: Default of `original_max_position_embeddings`.
        kinds: See `read_rope`.
        share: Default of `partial_rotary_factor` in a family that may rotate a part of each head.
        interleaved: See `Rope`.
        default: The parameters if both fields are missing.
        images: Whether the model also has positions within images. Such a position has three
            numbers, all equal in text, so their arrangement has no effect.
        parameters: Replaces both fields if the family has already read them.
    """
    values = rope_parameters(fields, default) if parameters is None else parameters
    if images:
        for name in ("mrope_section", "mrope_interleaved"):
            values.pop(name, None)
        for name in ("rope_type", "type"):
            if values.get(name) == "mrope":
                values[name] = "default"
    # Taken even if `rope_scaling` is also there, because fields that nothing takes are refused.
    fields.take("rope_parameters", None)
    theta = fields.take("rope_theta", theta)
    given = fields.take("partial_rotary_factor", None)
    given = share if given is None else given
    values = {"rope_theta": theta} | values
    if given is not None:
        values = {"partial_rotary_factor": given} | values
    length = fields.integer("original_max_position_embeddings", original_length, null=True)
    return read_rope(
        fields,
        values,
        head_dim,
        max_length=0,
        original_length=length,
        kinds=kinds,
        partial=share is not None,
        interleaved=interleaved,
    )


def rope_parameters(fields: Fields, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the parameters of rotary embeddings under either name, or their default."""
    given = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    return given or dict(default or {})


def two_ropes(
    fields: Fields, head_dim: int, full: dict[str, Any], local: dict[str, Any], *, max_length: int
) -> dict[str, Rope]:
    """Returns the rotary embeddings of layers without and with a window.

    Args:
        fields: The configuration; `rope_parameters` holds an object for each kind of layer.
        head_dim: Width of a head.
        full: Default parameters of layers without a window.
        local: Default parameters of layers with a window.
        max_length: Default of `max_position_embeddings`.
    """
    both = fields.mapping("rope_parameters")
    if not all(isinstance(value, Mapping | None) for value in both.values()):
        raise TypeError(checks.refused("rope_parameters", "an object of objects", both))
    extra = set(both) - {"full_attention", "sliding_attention"}
    if extra:
        raise ValueError(f"`rope_parameters` has {some(sorted(extra))}, which isn't supported")
    full = full | (both.get("full_attention") or {}) | fields.mapping("rope_scaling")
    local = local | (both.get("sliding_attention") or {})
    return {
        "rope": read_rope(fields, full, head_dim, max_length=max_length),
        "local_rope": read_rope(fields, local, head_dim, max_length=max_length),
    }


def window(fields: Fields, default: int | None = 4096) -> int | None:
    """Returns the window of layers that have one, in tokens; None for all tokens."""
    return fields.integer("sliding_window", default, least=0, null=True) or None


def windows_everywhere(fields: Fields, default: int | None) -> Windows:
    """Returns the same window for all layers."""
    size = window(fields, default)
    return (size,) * fields.integer("num_hidden_layers") if size else ()


def windows_by_step(fields: Fields, step: int, size: int | None) -> Windows:
    """Returns windows of this size for all but every `step`-th layer, or by `layer_types`."""
    layers = range(fields.integer("num_hidden_layers"))
    return windows_by_type(fields, [(i + 1) % step for i in layers], size)


def windows_by_type(fields: Fields, windowed: Sequence[Any], size: int | None) -> Windows:
    """Returns windows of this size for the layers that have one by `layer_types`.

    Args:
        fields: The configuration.
        windowed: For each layer, whether it has one if the field is missing.
        size: The window's size.
    """
    known = {"full_attention": None, "sliding_attention": size}
    default = [[*known][bool(has)] for has in windowed]
    types = fields.listed("layer_types", str, "names") or default
    for kind in types:
        if kind not in known or (kind == "sliding_attention" and not size):
            raise ValueError(f"`layer_types` has {kind!r}, with `sliding_window` = {size!r}")
    if len(types) != fields.integer("num_hidden_layers"):
        raise ValueError(
            f"`layer_types` has {len(types)} entries, not one for each of "
            f"`num_hidden_layers`, {fields.integer('num_hidden_layers')}"
        )
    return tuple(known[kind] for kind in types)


def experts(
    fields: Fields,
    sizes: Mapping[str, Any],
    *,
    num: int,
    per_token: int,
    names: tuple[str, str] = ("num_experts", "num_local_experts"),
    inside: int | None = None,
    shared: int | None = None,
    num_shared: tuple[str, int, int] | None = None,
    shared_size: int | None = None,
    normalize: bool | None = None,
    norm_topk_prob: bool = False,
    layers: Iterable[int] | None = None,
    sparse: bool = False,
    balance: float | None = 0.001,
) -> Experts | None:
    """Returns the experts of a decoder, or None if no layer has some.

    Args:
        fields: The configuration.
        sizes: The arguments of `DecoderConfig` so far.
        num: Default of the number of experts.
        per_token: Default of `num_experts_per_tok`.
        names: The two names of the field with the number of experts.
        inside: Default of `moe_intermediate_size`; None if experts are as wide as MLPs.
        shared: Default of `shared_expert_intermediate_size`; None if this isn't read.
        num_shared: The field with the number of experts that all tokens share, its default and its
            minimum; None if there is none.
        shared_size: The width inside the expert that all tokens share, if no field has it.
        normalize: Whether the chosen experts' probabilities are divided by their sum; None to read
            `norm_topk_prob`.
        norm_topk_prob: Default of this field.
        layers: Numbers of the layers with experts; None for all.
        sparse: Whether `decoder_sparse_step` and `mlp_only_layers` choose among them.
        balance: Default of `router_aux_loss_coef`, the factor of the balancing loss, if
            `output_router_logits` asks for it; None if there is no such loss.
    """
    # Files of one family use either name; both are taken, so that neither is refused as unknown.
    first, second = (fields.integer(name, None) for name in names)
    if first and second and first != second:
        raise ValueError(f"`{names[0]}` = {first} contradicts `{names[1]}` = {second}")
    layers = range(sizes["num_layers"]) if layers is None else layers
    if sparse:
        step = fields.integer("decoder_sparse_step", 1)
        dense = set(fields.listed("mlp_only_layers", int, "integers") or ())
        layers = [i for i in layers if i not in dense and (i + 1) % step == 0]
    width = sizes["intermediate_size"]
    if inside is not None:
        width = fields.integer("moe_intermediate_size", inside)
    if shared is not None:
        shared_size = fields.integer("shared_expert_intermediate_size", shared)
    if num_shared is not None:
        name, default, least = num_shared
        shared_size = width * fields.integer(name, default, least=least) or None
    if normalize is None:
        normalize = fields.flag("norm_topk_prob", norm_topk_prob)
    # Transformers adds the loss in training only if it is asked for the routers' logits.
    is_balanced = fields.flag("output_router_logits", False)
    weight = 0.0
    if balance is not None:
        weight = fields.number("router_aux_loss_coef", balance, least=0)
    per_token = fields.integer("num_experts_per_tok", per_token)
    if not (layers := tuple(layers)):
        return None
    return Experts(
        num=first or second or num,
        per_token=per_token,
        intermediate_size=width,
        normalize=normalize,
        layers=layers,
        shared_size=shared_size,
        balance_weight=weight if is_balanced else 0.0,
    )


def rotated_layers(fields: Fields, given: list[int] | None, num_layers: int) -> list[bool]:
    """Returns for each layer whether it rotates: by `no_rope_layers`, despite the field's name.

    Args:
        fields: The configuration.
        given: The value of that field; None for all layers but every
            `no_rope_layer_interval`-th.
        num_layers: Number of layers.
    """
    step = fields.integer("no_rope_layer_interval", 4)
    if given is None:
        return [(i + 1) % step != 0 for i in range(num_layers)]
    if len(given) != num_layers:
        allowed = f"a list of {num_layers} integers, one a layer"
        raise ValueError(checks.refused("no_rope_layers", allowed, given))
    return [bool(rotates) for rotates in given]


def layers_of_kind(
    fields: Fields, name: str, kinds: Mapping[str, bool], default: list[str], num_layers: int
) -> tuple[int, ...]:
    """Returns the numbers of the layers whose kind, by a field, is mapped to True.

    Args:
        fields: The configuration.
        name: See `chosen_layers`.
        kinds: See `chosen_layers`.
        default: The kind of each layer if the field is missing.
        num_layers: See `chosen_layers`.
    """
    given = fields.listed(name, str, "names") or default
    return chosen_layers(name, given, kinds, num_layers)


def chosen_layers(
    name: str, given: list[str], kinds: Mapping[str, bool], num_layers: int
) -> tuple[int, ...]:
    """Returns the numbers of the layers whose kind is mapped to True.

    Args:
        name: The field.
        given: The kind of each layer.
        kinds: The kinds that there are.
        num_layers: Number of layers.
    """
    if len(given) != num_layers or set(given) - set(kinds):
        allowed = f"one of {', '.join(kinds)} for each of {num_layers} layers"
        hint = f"it has {len(given)} entries"
        raise ValueError(checks.refused(name, allowed, given, hint))
    return tuple(i for i, kind in enumerate(given) if kinds[kind])
