"""`Family`: how the files of a family of open-weights models are read and written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.decoder_options import VisionConfig
from megatrain_jax._src.lm.models.hf_common import Fields

Flags = dict[str, tuple[bool, str]]
ATTENTION_BIAS: Flags = {"attention_bias": (False, "qkv_bias out_bias")}
"""The field of most families for a bias of all four products of attention."""
MLP_BIAS: Flags = {"mlp_bias": (False, "mlp_bias")}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of open-weights models. A file in `families/` defines each.

    A field of a `config.json` that nothing here reads is refused.

    Attributes:
        model_type: Its name in a `config.json`.
        class_name: The Transformers class of its checkpoints. Empty for the usual name, such as
            LlamaForCausalLM.
        scorer: The Transformers class for sequence classification; None if there is none. Empty for
            the usual name, such as LlamaForSequenceClassification.
        has_tagger: Whether Transformers has a class for token classification, of the usual name;
            None if it has one exactly if it has one for sequence classification.
        neutral: Fields that have no effect with this value, and are refused with any other one. Any
            field that is empty or off has none, and needs no entry.
        unread: Names of fields that have no effect, because Transformers doesn't read them or for
            another reason given there.
        sizes: Arguments of `hf_common.sizes`, mostly defaults, or a function of the fields that
            returns them.
        flags: Fields that are true or false, each with its default and the arguments of
            `DecoderConfig` that it sets; by default, the usual one for the biases of attention.
        rope: Arguments of `hf_common.rope`; None if `more` reads rotary embeddings.
        experts: Arguments of `hf_common.experts`; None if there are none, or `more` reads
            them.
        always: Arguments of `DecoderConfig` for all models of the family.
        more: Function from the fields and the arguments of `DecoderConfig` so far to further ones.
        renames: Parts of parameter paths that differ in the files: from the part in the model, such
            as `mlp` or `mlp.gate`, to the part of a tensor's name, `block_sparse_moe`; an empty
            name drops the part. They are applied one after another.
        body: Prefix of all tensor names in the files, except the head's.
        head: Prefix of the head's tensor names.
        stacked: Whether the files also hold the experts of a layer as one tensor.
        joined_experts: Whether a fresh decoder's experts are written in the second format of
            `tensors.py`. A decoder read from a checkpoint keeps its format.
        kept: Prefixes of tensor names outside the decoder, such as a vision tower's: these tensors
            are not trained, and are written as they were read. `{num_layers}` stands for the number
            of layers.
        texts: For multimodal checkpoints, which are incomplete without such tensors: the families
            that the decoder in `text_config` may belong to; the first if it names none.
        beside: For multimodal checkpoints: names of fields beside `text_config` that don't affect
            text.
        tied: For multimodal checkpoints: default of `tie_word_embeddings`.
        older: Whether older multimodal checkpoints have the decoder's fields outside `text_config`,
            or `tie_word_embeddings` inside it.
        vision: Function from the object in a `config.json` to the sizes of the vision part; None if
            the family can't be trained with images.
    """

    model_type: str
    class_name: str = ""
    scorer: str | None = ""
    has_tagger: bool | None = None
    neutral: Mapping[str, Any] = field(default_factory=dict)
    unread: str = ""
    sizes: Mapping[str, Any] | Callable[[Fields], Mapping[str, Any]] = field(default_factory=dict)
    flags: Flags = field(default_factory=ATTENTION_BIAS.copy)
    rope: Mapping[str, Any] | None = field(default_factory=dict)
    experts: Mapping[str, Any] | None = None
    always: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Fields, dict[str, Any]], dict[str, Any]] | None = None
    renames: Mapping[str, str] = field(default_factory=dict)
    body: str = "model"
    head: str = "lm_head"
    stacked: bool = False
    joined_experts: bool = False
    kept: tuple[str, ...] = ()
    texts: "tuple[Family, ...]" = ()
    beside: str = ""
    tied: bool = False
    older: bool = False
    vision: Callable[[Mapping[str, Any]], VisionConfig] | None = None

    @property
    def multimodal(self) -> bool:
        """Whether checkpoints have parts beside the decoder without which they are incomplete."""
        return bool(self.texts)

    @property
    def architecture(self) -> str:
        """The Transformers class of its checkpoints."""
        usual = "".join(map(str.capitalize, self.model_type.removesuffix("_text").split("_")))
        end = "ForConditionalGeneration" if self.multimodal else "ForCausalLM"
        return self.class_name or f"{usual}{end}"

    @property
    def scorer_class(self) -> str | None:
        """The Transformers class that scores sequences with the decoder; None if there is none."""
        usual = self.architecture.replace("ForCausalLM", "ForSequenceClassification")
        return usual if self.scorer == "" else self.scorer

    @property
    def tagger_class(self) -> str | None:
        """The Transformers class that scores each token with the decoder; None if there is none."""
        there = self.scorer is not None if self.has_tagger is None else self.has_tagger
        usual = self.architecture.replace("ForCausalLM", "ForTokenClassification")
        return usual if there else None

    def keeps(self, name: str, num_layers: int, unread: tuple[str, ...]) -> bool:
        """Whether a tensor with this name is kept beside a decoder.

        Args:
            name: The tensor's name.
            num_layers: Number of the decoder's layers.
            unread: See `DecoderConfig`.
        """
        kept = [start.format(num_layers=num_layers) for start in self.kept]
        return name.startswith((*kept, *(f"{self.body}.{start}" for start in unread)))

    def read(self, fields: Fields) -> dict[str, Any]:
        """Returns the arguments of `DecoderConfig` for the fields of a `config.json`.

        Every field is either read, known not to affect results, or refused by name.

        Raises:
            TypeError: If a field has a wrong type.
            ValueError: If a field is missing, unknown, or has a value that isn't supported.
        """
        hf_common.refuse_unsupported(fields)
        found = self._read_text(fields) if self.texts else self._read_decoder(fields)
        fields.finish()
        return found

    def _read_decoder(self, fields: Fields) -> dict[str, Any]:
        fields.neutral(**self.neutral)
        for name in self.unread.split():
            fields.take(name, None)
        sizes = self.sizes(fields) if callable(self.sizes) else self.sizes
        found = hf_common.sizes(fields, **sizes)
        for name, (default, arguments) in self.flags.items():
            found |= dict.fromkeys(arguments.split(), fields.flag(name, default))
        if self.rope is not None:
            found["rope"] = hf_common.rope(fields, found["head_dim"], **self.rope)
        if self.experts is not None:
            found["experts"] = hf_common.experts(fields, found, **self.experts)
        found |= self.always
        return found if self.more is None else found | self.more(fields, found)

    def _read_text(self, fields: Fields) -> dict[str, Any]:
        outside = (*self.beside.split(), "vision_config")
        for name in outside:
            fields.take(name, None)
        values = fields.mapping("text_config")
        if self.older and not values:
            names = set(fields.values) - {*outside, "text_config", "model_type", "architectures"}
            values = {name: fields.take(name, None) for name in names}
        if not values:
            raise ValueError(f"the configuration of this {self.model_type} has no `text_config`")
        known = {family.model_type: family for family in self.texts}
        values = {"model_type": self.texts[0].model_type} | values
        inside = Fields(values).flag("tie_word_embeddings", self.tied)
        tied = fields.flag("tie_word_embeddings", self.tied) or (self.older and inside)
        name = values["model_type"]
        if not isinstance(name, str) or name not in known:
            allowed = f"one of {', '.join(known)} in `text_config`"
            raise ValueError(checks.refused("model_type", allowed, name))
        return known[name].read(Fields(values | {"tie_word_embeddings": tied}, fields.ignore))


def multimodal_family(
    *texts: Family,
    body: str = "language_model.model",
    head: str = "language_model.lm_head",
    class_name: str = "",
    **own: Any,
) -> Family:
    """Returns the family of multimodal checkpoints that have a decoder's `text_config`.

    Args:
        *texts: See `Family`; files are written as by the first.
        body: See `Family`.
        head: See `Family`.
        class_name: See `Family`.
        **own: Further fields of the `Family`, at least `model_type`.
    """
    own |= {"body": body, "head": head, "class_name": class_name}
    return replace(texts[0], texts=texts, scorer=None, **own)
