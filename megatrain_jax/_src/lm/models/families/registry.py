"""All families by the `model_type` of a Hugging Face configuration, and the reading of one.

A new family is two lines here and a file in this folder that reads its fields.
"""

from collections.abc import Mapping
from os.path import commonprefix
from typing import Any

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.families.apertus import APERTUS
from megatrain_jax._src.lm.models.families.cohere2 import COHERE2
from megatrain_jax._src.lm.models.families.deepseek_v2 import DEEPSEEK_V2
from megatrain_jax._src.lm.models.families.deepseek_v3 import DEEPSEEK_V3
from megatrain_jax._src.lm.models.families.ernie4_5 import ERNIE4_5
from megatrain_jax._src.lm.models.families.ernie4_5_moe import ERNIE4_5_MOE
from megatrain_jax._src.lm.models.families.exaone4 import EXAONE4
from megatrain_jax._src.lm.models.families.falcon_h1 import FALCON_H1
from megatrain_jax._src.lm.models.families.gemma import GEMMA
from megatrain_jax._src.lm.models.families.gemma2 import GEMMA2
from megatrain_jax._src.lm.models.families.gemma3 import GEMMA3, GEMMA3_MULTIMODAL
from megatrain_jax._src.lm.models.families.gemma3n import GEMMA3N, GEMMA3N_MULTIMODAL
from megatrain_jax._src.lm.models.families.gemma4 import GEMMA4, GEMMA4_MULTIMODAL
from megatrain_jax._src.lm.models.families.glm4 import GLM4
from megatrain_jax._src.lm.models.families.glm4_moe import GLM4_MOE
from megatrain_jax._src.lm.models.families.glm4_moe_lite import GLM4_MOE_LITE
from megatrain_jax._src.lm.models.families.gpt_oss import GPT_OSS
from megatrain_jax._src.lm.models.families.granite import GRANITE
from megatrain_jax._src.lm.models.families.granitemoehybrid import GRANITEMOEHYBRID
from megatrain_jax._src.lm.models.families.hunyuan_v1_dense import HUNYUAN_V1_DENSE
from megatrain_jax._src.lm.models.families.lfm2 import LFM2
from megatrain_jax._src.lm.models.families.llama import LLAMA
from megatrain_jax._src.lm.models.families.llama4 import LLAMA4, LLAMA4_MULTIMODAL
from megatrain_jax._src.lm.models.families.minimax_m2 import MINIMAX_M2
from megatrain_jax._src.lm.models.families.ministral3 import MINISTRAL3, MISTRAL3
from megatrain_jax._src.lm.models.families.mistral import MISTRAL
from megatrain_jax._src.lm.models.families.mixtral import MIXTRAL
from megatrain_jax._src.lm.models.families.nemotron import NEMOTRON
from megatrain_jax._src.lm.models.families.olmo2 import OLMO2
from megatrain_jax._src.lm.models.families.olmo3 import OLMO3
from megatrain_jax._src.lm.models.families.olmoe import OLMOE
from megatrain_jax._src.lm.models.families.phi import PHI
from megatrain_jax._src.lm.models.families.phi3 import PHI3
from megatrain_jax._src.lm.models.families.qwen2 import QWEN2
from megatrain_jax._src.lm.models.families.qwen2_5_vl import QWEN2_5_VL
from megatrain_jax._src.lm.models.families.qwen2_moe import QWEN2_MOE
from megatrain_jax._src.lm.models.families.qwen3 import QWEN3
from megatrain_jax._src.lm.models.families.qwen3_5 import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
)
from megatrain_jax._src.lm.models.families.qwen3_moe import QWEN3_MOE
from megatrain_jax._src.lm.models.families.qwen3_next import QWEN3_NEXT
from megatrain_jax._src.lm.models.families.qwen3_vl import QWEN3_VL
from megatrain_jax._src.lm.models.families.seed_oss import SEED_OSS
from megatrain_jax._src.lm.models.families.smollm3 import SMOLLM3
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_fields import Fields, shown
from megatrain_jax._src.lm.models.tensors import some
from megatrain_jax._src.lm.models.vision import VisionConfig

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        APERTUS,
        COHERE2,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        ERNIE4_5,
        ERNIE4_5_MOE,
        EXAONE4,
        FALCON_H1,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GEMMA3N,
        GEMMA3N_MULTIMODAL,
        GEMMA3_MULTIMODAL,
        GEMMA4,
        GEMMA4_MULTIMODAL,
        GLM4,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GPT_OSS,
        GRANITE,
        GRANITEMOEHYBRID,
        HUNYUAN_V1_DENSE,
        LFM2,
        LLAMA,
        LLAMA4,
        LLAMA4_MULTIMODAL,
        MINIMAX_M2,
        MINISTRAL3,
        MISTRAL,
        MISTRAL3,
        MIXTRAL,
        NEMOTRON,
        OLMO2,
        OLMO3,
        OLMOE,
        PHI,
        PHI3,
        QWEN2,
        QWEN2_5_VL,
        QWEN2_MOE,
        QWEN3,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_5_MOE_TEXT,
        QWEN3_5_TEXT,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_VL,
        SEED_OSS,
        SMOLLM3,
    )
}


# Transformers' classes for sequence classification with unusual names, and None for families
# without such a class. All remaining families have a name such as LlamaForSequenceClassification.
_SCORERS: dict[str, str | None] = {
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "qwen3_5_text": "Qwen3_5TextForSequenceClassification",
    **dict.fromkeys(
        "apertus cohere2 ernie4_5 ernie4_5_moe falcon_h1 gemma3n_text gemma4_text glm4_moe "
        "glm4_moe_lite granite granitemoehybrid lfm2 llama4_text minimax_m2 olmoe "
        "qwen3_5_moe_text".split()
    ),
}
# The arguments of `DecoderConfig` that such a class has in place of the model's own.
AS_SCORES: dict[str, Any] = {
    "scores": True,
    "logit_scale": 1.0,
    "head_bias": False,
    "final_softcap": None,
}


def scorer_of(family: Family) -> str | None:
    """The class of Transformers that scores sequences with a family's decoder, if there is one."""
    if family.multimodal:
        return None
    usual = family.architecture.replace("ForCausalLM", "ForSequenceClassification")
    return _SCORERS.get(family.model_type, usual)


def read_vision(config: Mapping[str, Any]) -> VisionConfig:
    """Returns the vision part of a Hugging Face configuration.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If the family can't be trained with images, or a field has a value that isn't
            supported.
    """
    family = FAMILIES[config["model_type"]]
    if family.vision is None:
        known = [name for name, other in FAMILIES.items() if other.vision is not None]
        raise ValueError(
            f"`model_type` = {family.model_type} isn't trained with images; {some(known)} is"
        )
    return family.vision(config)


def _nearest_family(config: Mapping[str, Any], ignore: frozenset[str]) -> Family | None:
    """The family that knows all fields of a configuration of another type, if there is one.

    Among several, it is the one whose name begins alike, or else the plainest, `llama`.
    """
    given, has_experts = (
        str(config.get("model_type")),
        any("expert" in str(name) for name in config),
    )
    fitting = []
    for family in FAMILIES.values():
        fields = Fields({**config, "model_type": family.model_type, "architectures": None}, ignore)
        try:
            hf_common.refuse_unsupported(fields)
            arguments = family.read(fields)
            fields.finish()
        except Exception:  # of any kind, because the configuration is of another family
            continue
        if not family.multimodal and (has_experts or arguments.get("experts") is None):
            fitting.append(family)

    def nearness(family: Family) -> tuple[int, bool, int]:
        name = family.model_type
        alike = len(commonprefix((given, name)))
        return alike if alike > 2 else 0, name == "llama", -len(name)

    return max(fitting, key=nearness, default=None)


def _advice_of_nearest(config: Mapping[str, Any], ignore: frozenset[str]) -> str:
    near = _nearest_family(config, ignore)
    if near is None:
        return ""
    return (
        f" The nearest one, {near.model_type}, knows all fields of this configuration. If the "
        f"layers compute the same, too, set `model_type` to {near.model_type!r} and "
        f"`architectures` to [{near.architecture!r}], and compare the logits with Transformers' "
        "before training."
    )


def read_config(config: Mapping[str, Any], ignore: frozenset[str]) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` for a Hugging Face configuration.

    Every field is either read, known not to affect results, or refused by name: a checkpoint never
    loads with an option silently dropped.

    Raises:
        ValueError: See `DecoderConfig.from_hf`.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"`model_type` = {shown(name)} has no family here; docs/models.md lists them."
            f"{_advice_of_nearest(config, ignore)} Any Flax module can be trained without a "
            "family: docs/your_model.md"
        )
    family = FAMILIES[name]
    fields = Fields(config, ignore)
    names = fields.listed("architectures", str, "names") or []
    # A classifier on the same body has a different head, and no logits of tokens.
    scorer = scorer_of(family)
    scores = scorer is not None and names == [scorer] and len(config.get("id2label", ())) == 1
    others = [n for n in names if n != family.architecture and not scores]
    if others:
        raise ValueError(
            f"`architectures` = {some(others)} isn't supported; of {name}, {family.architecture} is"
        )
    hf_common.refuse_unsupported(fields)
    arguments = family.read(fields)
    fields.finish()
    return arguments | AS_SCORES if scores else arguments
