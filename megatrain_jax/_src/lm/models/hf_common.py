"""Readers of configuration fields that several families share.

Each returns arguments of `DecoderConfig`, or a part of one. Defaults are Transformers'; a default
that differs between families is an argument here.
"""

from collections.abc import Mapping
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.hf_fields import Fields, shown
from megatrain_jax._src.lm.models.hf_rope import KINDS, read_rope
from megatrain_jax._src.lm.models.moe import Experts
from megatrain_jax._src.lm.models.quantised import check_quantisation
from megatrain_jax._src.lm.models.rotary import Rope
from megatrain_jax._src.lm.models.tensors import some

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
    fields.neutral(attention_dropout=0.0, is_encoder_decoder=False)
    fields.neutral(tie_encoder_decoder=False, add_cross_attention=False, is_decoder=False)
    # This value affects only tokens of an image, and text has none.
    if fields.take("use_bidirectional_attention", False) != "vision":
        fields.neutral(use_bidirectional_attention=False)


def sizes(
    fields: Fields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    eps_name: str = "rms_norm_eps",
    tied: bool = False,
    activation: str | None = None,
    inside: int | None = None,
    **others: int,
) -> dict[str, Any]:
    """Returns the arguments that every family has.

    Args:
        fields: The configuration.
        kv_heads: Default of `num_key_value_heads`; None for the number of heads.
        head_dim: Default of `head_dim`; None for the width divided by the heads.
        eps: Default of the number that norms add to the mean square.
        eps_name: The field with that number.
        tied: Default of `tie_word_embeddings`.
        activation: The MLPs' activation, from `read_activation`; None to read `hidden_act`.
        inside: The width inside an MLP; None to read `intermediate_size`.
        **others: Defaults of further sizes, in a family with configurations that may omit them.
    """

    def size(name: str) -> int:
        return fields.integer(name, others[name]) if name in others else fields.integer(name)

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    return {
        "vocab_size": size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": inside or size("intermediate_size"),
        "num_layers": size("num_hidden_layers"),
        "num_heads": heads,
        # Null means as many as there are heads.
        "num_kv_heads": fields.integer("num_key_value_heads", kv_heads, null=True) or heads,
        "head_dim": _head_dim(fields, hidden, heads, head_dim),
        "activation": activation or read_activation(fields, "hidden_act", "silu"),
        "norm_eps": fields.number(eps_name, eps, least=0),
        "tie_embeddings": fields.flag("tie_word_embeddings", tied),
        "init_std": fields.number("initializer_range", 0.02, least=0),
    }


def head_dim(fields: Fields, default: int) -> int | None:
    """Returns the default of `head_dim` where null means the width divided by the heads."""
    return default if fields.take("head_dim", default) is not None else None


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
        raise ValueError(f"`{name}` = {shown(value)} isn't supported in a {fields.family}")
    return _ACTIVATIONS[value]


def attention_bias(fields: Fields, default: bool = False) -> dict[str, bool]:
    """Returns whether all four products of attention have a bias."""
    bias = fields.flag("attention_bias", default)
    return {"qkv_bias": bias, "out_bias": bias}


def rope(
    fields: Fields,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    original_length: int | None = None,
    kinds: Mapping[str, str] = KINDS,
    share: float | None = None,
    interleaved: bool = False,
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
        parameters: Replaces both fields if the family has already read them.
    """
    values = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    values = values if parameters is None else parameters
    # Taken even if `rope_scaling` is also there, because fields that nothing takes are refused.
    fields.take("rope_parameters", None)
    theta = fields.take("rope_theta", theta)
    given = fields.take("partial_rotary_factor", None)
    given = share if given is None else given
    return read_rope(
        {"rope_theta": theta}
        | ({} if given is None else {"partial_rotary_factor": given})
        | values,
        family=fields.family,
        head_dim=head_dim,
        max_length=fields.integer("max_position_embeddings", 0, least=0),
        original_length=fields.integer(
            "original_max_position_embeddings", original_length, null=True
        ),
        kinds=kinds,
        partial=share is not None,
        interleaved=interleaved,
        ignore=fields.ignore,
    )


def rope_parameters_of_text(fields: Fields) -> dict[str, Any]:
    """Returns the parameters of `rope` in models that also have positions within images.

    Such a position has three numbers, all equal in text, so their arrangement has no effect.
    """
    values = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    for name in ("mrope_section", "mrope_interleaved"):
        values.pop(name, None)
    for name in ("rope_type", "type"):
        if values.get(name) == "mrope":
            values[name] = "default"
    return values


def two_ropes(
    fields: Fields,
    head_dim: int,
    full: dict[str, Any],
    local: dict[str, Any],
    *,
    max_length: int,
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
    shared = {
        "family": fields.family,
        "head_dim": head_dim,
        "max_length": fields.integer("max_position_embeddings", max_length),
        # Each embedding has its own among its parameters.
        "original_length": None,
        "ignore": fields.ignore,
    }
    return {"rope": read_rope(full, **shared), "local_rope": read_rope(local, **shared)}


def window(fields: Fields, default: int | None = 4096) -> int | None:
    """Returns the window of layers that have one, in tokens; None for all tokens."""
    return fields.integer("sliding_window", default, least=0, null=True) or None


def windows_everywhere(fields: Fields, default: int | None) -> Windows:
    """Returns the same window for all layers."""
    size = window(fields, default)
    return (size,) * fields.integer("num_hidden_layers") if size else ()


def windows_by_type(fields: Fields, types: list[str], size: int | None) -> Windows:
    """Returns windows of this size for the layers that have one by `layer_types`.

    Args:
        fields: The configuration.
        types: Default of `layer_types`.
        size: The window's size.
    """
    known = {"full_attention": None, "sliding_attention": size}
    types = fields.listed("layer_types", str, "names") or types
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
    names: tuple[str, str],
    *,
    num: int,
    per_token: int,
    intermediate_size: int,
    normalize: bool,
    layers: tuple[int, ...],
    shared_size: int | None = None,
    balance: float | None = None,
) -> Experts | None:
    """Returns the experts of these layers, or None if there are no such layers.

    Args:
        fields: The configuration.
        names: The two names of the field with the number of experts.
        num: Default of that number.
        per_token: Default of `num_experts_per_tok`.
        intermediate_size: The width inside an expert.
        normalize: Whether the chosen experts' probabilities are divided by their sum.
        layers: Numbers of the layers with experts.
        shared_size: The width inside the expert that all tokens share.
        balance: Factor of the balancing loss, if `output_router_logits` asks for it; None to read
            `router_aux_loss_coef`.
    """
    # Files of one family use either name; both are taken, so that neither is refused as unknown.
    second = fields.integer(names[1], None)
    num = fields.integer(names[0], None) or second or num
    weight = fields.number("router_aux_loss_coef", 0.001, least=0) if balance is None else balance
    # Transformers adds the loss in training only if it is asked for the routers' logits.
    is_balanced = fields.flag("output_router_logits", False)
    per_token = fields.integer("num_experts_per_tok", per_token)
    if not layers:
        return None
    return Experts(
        num=num,
        per_token=per_token,
        intermediate_size=intermediate_size,
        normalize=normalize,
        layers=layers,
        shared_size=shared_size,
        balance_weight=weight if is_balanced else 0.0,
    )


def sparse_layers(fields: Fields) -> tuple[int, ...]:
    """Returns the layers with experts: every `decoder_sparse_step`-th not in `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = set(fields.listed("mlp_only_layers", int, "integers") or ())
    layers = range(fields.integer("num_hidden_layers"))
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
