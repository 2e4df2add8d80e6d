"""Reads Hugging Face configurations of the supported families.

Every field is either read, known not to affect results, or refused by name: a checkpoint never
loads with an option silently dropped. A family's own fields are read in its file.
"""

from collections.abc import Mapping
from typing import Any

from megatrain_jax._src.models import hf_common
from megatrain_jax._src.models.families.registry import FAMILIES
from megatrain_jax._src.models.hf_fields import Fields, shown
from megatrain_jax._src.models.tensors import some


def read(config: Mapping[str, Any], ignore: frozenset[str]) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` for a Hugging Face configuration.

    Raises:
        ValueError: See `DecoderConfig.from_hf`.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"`model_type` = {shown(name)} isn't supported; these are: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[name]
    fields = Fields(config, ignore)
    names = fields.listed("architectures", str, "names") or []
    # A classifier on the same body has a different head, and no logits of tokens.
    others = [n for n in names if n != family.architecture]
    if others:
        raise ValueError(
            f"`architectures` = {some(others)} isn't supported; of {name}, {family.architecture} is"
        )
    hf_common.refuse_others(fields)
    arguments = family.read(fields)
    fields.finish()
    return arguments
