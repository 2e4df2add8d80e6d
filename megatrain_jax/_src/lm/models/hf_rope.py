"""Reads the rotary embeddings of a Hugging Face configuration, in its older and newer form."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.user_warnings import warn_user
from megatrain_jax._src.lm.models.hf_fields import shown
from megatrain_jax._src.lm.models.rotary import Rope
from megatrain_jax._src.lm.models.tensors import some

_OPTIONS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "proportional": frozenset({"factor"}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
        | {"truncate", "original_max_position_embeddings"}
    ),
    "longrope": frozenset(
        {"factor", "attention_factor", "short_factor", "long_factor"}
        | {"original_max_position_embeddings", "short_mscale", "long_mscale"}
    ),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
}
KINDS = {kind: kind for kind in _OPTIONS if kind != "proportional"}
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# Found in released checkpoints, but not read by Transformers: some programs take this as the scale
# of attention, where Transformers uses `attention_factor`.
_NOT_READ = {"yarn": frozenset({"attn_factor"})}


def read_rope(
    values: Mapping[str, Any],
    *,
    family: str,
    head_dim: int,
    max_length: int,
    original_length: int | None,
    kinds: Mapping[str, str] = KINDS,
    partial: bool = False,
    interleaved: bool = False,
    ignore: Collection[str] = (),
) -> Rope:
    """Returns a rotary embedding.

    Args:
        values: `rope_parameters`, or `rope_scaling` with `rope_theta`.
        family: The `model_type`.
        head_dim: Width of a head.
        max_length: `max_position_embeddings`.
        original_length: `original_max_position_embeddings` of the configuration itself.
        kinds: The supported values of `rope_type`, and the kind that each selects.
        partial: Whether the family may rotate a part of each head.
        interleaved: See `Rope`.
        ignore: Options that the user wants ignored.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If a kind or an option isn't supported. The message names it.
    """
    # Older files call it `type`.
    kind = next((values[k] for k in ("rope_type", "type") if values.get(k) is not None), "default")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"`rope_type` = {shown(kind)} isn't supported in a {family}")
    kind = kinds[kind]
    _check_options(values, kind, ignore)
    share = _number(values, "partial_rotary_factor", 1.0)
    whole = kind == "proportional"  # all dimensions, but only some of them turn
    if share != 1.0 and not (partial or whole):
        raise ValueError(f"`partial_rotary_factor` = {share} isn't supported in a {family}")
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
    match kind:
        case "default":
            return Rope(**shape)
        case "proportional":
            factor = _number(values, "factor", 1.0)
            return Rope(**shape, factor=factor, turning=int(share * head_dim // 2))
        case "linear":
            return Rope(**shape, factor=_number(values, "factor"))
        case "dynamic":
            return Rope(**shape, factor=_number(values, "factor"), max_length=max_length)
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            factor, low, high = (_number(values, name) for name in names)
            return Rope(
                **shape,
                factor=factor,
                low_freq_factor=low,
                high_freq_factor=high,
                original_length=original,
            )
        case "yarn":
            return _yarn(values, shape, original, max_length)
        case _:
            return _longrope(values, shape, original, max_length)


def _check_options(values: Mapping[str, Any], kind: str, ignore: Collection[str]) -> None:
    """Refuses options that nothing reads, except those that Transformers does not read either."""
    unknown = {
        name for name, v in values.items() if name not in _OPTIONS[kind] | _COMMON and v is not None
    }
    unknown -= set(ignore)
    if not_read := unknown & _NOT_READ.get(kind, frozenset()):
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


def _numbers(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    given = values.get(name)
    if not isinstance(given, list | tuple):
        raise TypeError(checks.refused(name, "a list of numbers", given))
    return tuple(checks.number(name, value, above=0) for value in given)


def _stretch(values: Mapping[str, Any], original: int, max_length: int) -> float:
    if original < 2:
        raise ValueError(
            "`original_max_position_embeddings`, or `max_position_embeddings` where it is missing, "
            f"must be at least 2, but is {original}"
        )
    return _number(values, "factor", max_length / original or None)


def _yarn(values: Mapping[str, Any], shape: dict, original: int, max_length: int) -> Rope:
    if "factor" not in values:  # null means the ratio of the lengths
        raise ValueError("rotary embeddings of type 'yarn' need a number `factor`")
    factor = _stretch(values, original, max_length)
    attention = values.get("attention_factor")
    if attention is None:

        def magnitude(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        one, all_dims = values.get("mscale"), values.get("mscale_all_dim")
        attention = magnitude(1.0)
        if one and all_dims:
            one, all_dims = _number(values, "mscale"), _number(values, "mscale_all_dim")
            attention = magnitude(one) / magnitude(all_dims)
    return Rope(
        **shape,
        factor=factor,
        original_length=original,
        attention_factor=checks.number("attention_factor", attention, above=0),
        beta_fast=_number(values, "beta_fast", 32.0),
        beta_slow=_number(values, "beta_slow", 1.0),
        truncate=checks.boolean("truncate", values.get("truncate", True)),
    )


def _longrope(values: Mapping[str, Any], shape: dict, original: int, max_length: int) -> Rope:
    for name in ("short_mscale", "long_mscale"):
        if values.get(name) not in (None, 1.0):
            raise ValueError(f"`{name}` = {shown(values[name])} of a longrope isn't supported")
    factor = _stretch(values, original, max_length)
    attention = values.get("attention_factor")
    if attention is None:
        attention = 1.0
        if factor > 1:
            attention = math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(
        **shape,
        original_length=original,
        attention_factor=checks.number("attention_factor", attention, above=0),
        short_factors=_numbers(values, "short_factor"),
        long_factors=_numbers(values, "long_factor"),
    )
