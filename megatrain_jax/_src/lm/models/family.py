"""`Family`: how the files of a family of open-weights models are read and written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.vision import VisionConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of open-weights models; each file in `families/` defines one or two.

    Attributes:
        model_type: Its name in a `config.json`.
        architecture: The Transformers class of its checkpoints.
        read: Function from the fields of a `config.json` to the arguments of `DecoderConfig`. A
            field that it doesn't read is refused.
        renames: Parts of parameter paths that differ in the files: from the part in the model, such
            as `mlp`, to the part of a tensor's name, `block_sparse_moe`; an empty name drops the
            part.
        body: Prefix of all tensor names in the files, except the head's.
        head: Prefix of the head's tensor names.
        stacked: Whether the files also hold the experts of a layer as one tensor.
        joined_experts: Whether a fresh decoder's experts are written in the second format of
            `expert_tensors`. A decoder read from a checkpoint keeps its format.
        kept: Prefixes of tensor names outside the decoder, such as a vision tower's: these tensors
            are not trained, and are written as they were read. `{num_layers}` stands for the number
            of layers.
        multimodal: Whether checkpoints are incomplete without such tensors.
        vision: Function from the object in a `config.json` to the sizes of the vision part; None if
            the family can't be trained with images.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], dict[str, Any]]
    renames: Mapping[str, str] = field(default_factory=dict)
    body: str = "model"
    head: str = "lm_head"
    stacked: bool = False
    joined_experts: bool = False
    kept: tuple[str, ...] = ()
    multimodal: bool = False
    vision: Callable[[Mapping[str, Any]], VisionConfig] | None = None

    def keeps(self, name: str, num_layers: int, unread: tuple[str, ...]) -> bool:
        """Whether a tensor with this name is kept beside a decoder.

        Args:
            name: The tensor's name.
            num_layers: Number of the decoder's layers.
            unread: See `DecoderConfig`.
        """
        kept = [start.format(num_layers=num_layers) for start in self.kept]
        return name.startswith((*kept, *(f"{self.body}.{start}" for start in unread)))


def multimodal_family(
    *texts: Family,
    model_type: str,
    architecture: str,
    kept: tuple[str, ...],
    beside: str,
    tied: bool,
    body: str = "language_model.model",
    head: str = "language_model.lm_head",
    older: bool = False,
    vision: Callable[[Mapping[str, Any]], VisionConfig] | None = None,
) -> Family:
    """Returns the family of multimodal checkpoints that have a decoder's `text_config`.

    Args:
        *texts: Families that the decoder may belong to; the first if `text_config` names none.
        model_type: See `Family`.
        architecture: See `Family`.
        kept: See `Family`.
        beside: Names of further fields, which don't affect text.
        tied: Default of `tie_word_embeddings`: whether the head is the embedding.
        body: See `Family`.
        head: See `Family`.
        older: Whether older checkpoints have the decoder's fields outside `text_config`, or
            `tie_word_embeddings` inside it.
        vision: See `Family`.
    """

    def read(fields: Fields) -> dict[str, Any]:
        outside = (*beside.split(), "vision_config")
        for name in outside:
            fields.take(name, None)
        values = fields.mapping("text_config")
        if older and not values:
            names = set(fields.values) - {*outside, "text_config", "model_type", "architectures"}
            values = {name: fields.take(name, None) for name in names}
        if not values:
            raise ValueError(f"the configuration of this {model_type} has no `text_config`")
        values = {"model_type": texts[0].model_type} | values
        inside = Fields(values).flag("tie_word_embeddings", tied)
        values["tie_word_embeddings"] = fields.flag("tie_word_embeddings", tied) or (
            older and inside
        )
        known = {family.model_type: family for family in texts}
        name = values["model_type"]
        if not isinstance(name, str) or name not in known:
            allowed = f"one of {', '.join(known)} in `text_config`"
            raise ValueError(checks.refused("model_type", allowed, name))
        text = Fields(values, fields.ignore)
        hf_common.refuse_unsupported(text)
        arguments = known[name].read(text)
        text.finish()
        return arguments

    return Family(
        model_type=model_type,
        architecture=architecture,
        read=read,
        renames=texts[0].renames,
        body=body,
        head=head,
        stacked=texts[0].stacked,
        joined_experts=texts[0].joined_experts,
        kept=kept,
        multimodal=True,
        vision=vision,
    )
