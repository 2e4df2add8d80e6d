"""Finds layers that differ between adapters and base: a sign of adapters of a different base.

PEFT adapts all modules that its settings ask for. If the base has more layers than the model that
the adapters were trained with, the additional layers silently get no adapters. If it has fewer, the
adapters of the missing layers are silently left out.

Example: adapters of `q_proj` in three layers, and a base with four::

    adapted    layers.0.q_proj  layers.1.q_proj  layers.2.q_proj
    base       layers.0.q_proj  layers.1.q_proj  layers.2.q_proj  layers.3.q_proj  layers.0.up ...
    different                                                     layers.3.q_proj
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Modules with a row for each token, by the names that Transformers' architectures give them.
EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|word_embeddings|wte|embed_in|tok_embeddings)\b")
HEADS = re.compile(r"(^|\.)(lm_head|embed_out|output_layer)\b|^output\b")


def different_layers(
    adapted: Iterable[str], modules: Iterable[str], settings: Mapping[str, Any]
) -> list[str]:
    """Modules that only the adapters or only the base has, while both have them in some layer.

    Args:
        adapted: Names of the modules with adapters, as in the base.
        modules: Names of the base's modules.
        settings: The contents of adapter_config.json. Modules that they don't ask for have no
            adapters.

    Returns:
        The names, sorted.
    """
    given, there = set(adapted), set(modules)
    of_given, of_base = ({_kind(name) for name in names} for names in (given, there))
    beyond = {name for name in given - there if _kind(name) in of_base}
    without = {name for name in there - given if _kind(name) in of_given}
    return sorted(beyond | {name for name in without if _is_asked_for(name, settings)})


def _kind(module: str) -> str:
    """A module's name without the number of its layer."""
    return re.sub(r"(^|\.)\d+(?=\.)", r"\1*", module, count=1)


def _is_asked_for(module: str, settings: Mapping[str, Any]) -> bool:
    # Layer 0 may be an integer by itself.
    if settings.get("layers_to_transform") not in (None, []) or settings.get("exclude_modules"):
        return False
    targets = settings.get("target_modules") or ()
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets)
