"""Reads the rotary embeddings of a Hugging Face configuration, in its older and newer form."""

import math
from collections.abc import Mapping
from typing import Any

from megatrain_jax.models.rotary import Rope

_KINDS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
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
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def read_rope(
    values: Mapping[str, Any],
    *,
    family: str,
    head_dim: int,
    max_length: int,
    original_length: int | None,
) -> Rope:
    """Returns a rotary embedding.

    Args:
        values: `rope_parameters`, or `rope_scaling` with `rope_theta`.
        family: The `model_type`.
        head_dim: Width of a head.
        max_length: `max_position_embeddings`.
        original_length: `original_max_position_embeddings` of the configuration itself.

    Raises:
        ValueError: If a kind or an option isn't supported. The message names it.
    """
    kind = values.get("rope_type") or values.get("type") or "default"
    if family == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # what early checkpoints called it
    if kind not in _KINDS or (family == "phi3" and kind not in ("default", "longrope")):
        raise ValueError(f"rotary embeddings of type {kind!r} aren't supported in a {family}")
    unknown = [
        name for name, v in values.items() if name not in _KINDS[kind] | _COMMON and v is not None
    ]
    if unknown:
        raise ValueError(
            f"rotary embeddings of type {kind!r} aren't known to have {', '.join(unknown)}"
        )
    share = values.get("partial_rotary_factor", 1.0)
    if share != 1.0 and family != "phi3":
        raise ValueError(f"`partial_rotary_factor` = {share} isn't supported in a {family}")
    original = original_length or values.get("original_max_position_embeddings") or max_length
    shape: dict[str, Any] = {
        "dim": int(head_dim * share),
        "base": float(values["rope_theta"]),
        "kind": kind,
    }
    match kind:
        case "default":
            return Rope(**shape)
        case "linear":
            return Rope(**shape, factor=_number(values, "factor", kind))
        case "dynamic":
            return Rope(**shape, factor=_number(values, "factor", kind), max_length=max_length)
        case "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            factor, low, high = (_number(values, name, kind) for name in names)
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


def _number(values: Mapping[str, Any], name: str, kind: str) -> float:
    value = values.get(name)
    if not isinstance(value, int | float):
        raise ValueError(f"rotary embeddings of type {kind!r} need a number `{name}`, not {value}")
    return float(value)


def _yarn(values: Mapping[str, Any], shape: dict, original: int, max_length: int) -> Rope:
    factor = values.get("factor") or max_length / original
    attention = values.get("attention_factor")
    if attention is None:

        def magnitude(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        one, all_dims = values.get("mscale"), values.get("mscale_all_dim")
        attention = magnitude(one) / magnitude(all_dims) if one and all_dims else magnitude(1.0)
    return Rope(
        **shape,
        factor=factor,
        original_length=original,
        attention_factor=float(attention),
        beta_fast=values.get("beta_fast") or 32.0,
        beta_slow=values.get("beta_slow") or 1.0,
        truncate=values.get("truncate", True),
    )


def _longrope(values: Mapping[str, Any], shape: dict, original: int, max_length: int) -> Rope:
    for name in ("short_mscale", "long_mscale"):
        if values.get(name) not in (None, 1.0):
            raise ValueError(f"`{name}` = {values[name]} of a longrope isn't supported")
    factor = values.get("factor") or max_length / original
    attention = values.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(
        **shape,
        original_length=original,
        attention_factor=float(attention),
        short_factors=tuple(map(float, values.get("short_factor") or ())),
        long_factors=tuple(map(float, values.get("long_factor") or ())),
    )
