"""`DecoderConfig`: a decoder's sizes and options, read from a Hugging Face configuration.

All families are known here by their `model_type`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import too_deep
from megatrain_jax._src.lm.common.hf_folder import end_tokens_of
from megatrain_jax._src.lm.models.decoder_options import DecoderOptions, VisionConfig
from megatrain_jax._src.lm.models.families import (
    deepseek,
    dense,
    gemma,
    gemma4,
    hybrids,
    internvl,
    kimi,
    mixtures,
    sparse,
    state_spaces,
)
from megatrain_jax._src.lm.models.family import Family
from megatrain_jax._src.lm.models.hf_common import Fields, as_ignored
from megatrain_jax._src.lm.models.tensors import some

_FILES = (
    *(deepseek, dense, gemma, gemma4, hybrids, internvl, kimi, mixtures, sparse, state_spaces),
)
_FOUND = [x for file in _FILES for x in vars(file).values() if isinstance(x, Family)]
# Every `Family` in these files, in the order of names.
FAMILIES = {family.model_type: family for family in sorted(_FOUND, key=lambda x: x.model_type)}
# Transformers leaves the labels out of config.json if they are these.
_TWO_LABELS = {"0": "LABEL_0", "1": "LABEL_1"}


def as_scorer(num_labels: int, *, of_tokens: bool = False) -> dict[str, Any]:
    """The arguments of `DecoderConfig` that a class for classification changes.

    Args:
        num_labels: Number of labels.
        of_tokens: Whether the class is for token classification, whose head has a bias.
    """
    changes = {"logit_scale": 1.0, "head_bias": of_tokens, "final_softcap": None}
    return {"scores": num_labels, **changes}


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
            arguments = family.read(fields)
        except Exception:  # of any kind, because the configuration is of another family
            continue
        if not family.multimodal and (has_experts or arguments.get("experts") is None):
            fitting.append(family)

    def nearness(family: Family) -> tuple[int, bool, int]:
        name = family.model_type
        alike = len(commonprefix((given, name)))
        return alike if alike > 2 else 0, name == "llama", -len(name)

    return max(fitting, key=nearness, default=None)


def read_config(config: Mapping[str, Any], ignore: frozenset[str]) -> dict[str, Any]:
    """Returns the arguments of `DecoderConfig` for a Hugging Face configuration.

    Every field is either read, known not to affect results, or refused by name: a checkpoint never
    loads with an option silently dropped.

    Raises:
        ValueError: See `DecoderConfig.from_hf`.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        advice = ""
        if near := _nearest_family(config, ignore):
            advice = (
                f" The nearest one, {near.model_type}, knows all fields of this configuration. If "
                f"the layers compute the same, too, set `model_type` to {near.model_type!r} and "
                f"`architectures` to [{near.architecture!r}], and compare the logits with "
                "Transformers' before training."
            )
        raise ValueError(
            f"`model_type` = {checks.shown(name)} has no family here; docs/models.md lists them."
            f"{advice} Any Flax module can be trained without a family: docs/your_model.md"
        )
    family = FAMILIES[name]
    fields = Fields(config, ignore)
    names = fields.listed("architectures", str, "names") or []
    # A classifier on the same body has a different head, and no logits of tokens.
    is_scorer = names in ([family.scorer_class], [family.tagger_class])
    scores = len(fields.mapping("id2label") or _TWO_LABELS) if is_scorer else 0
    others = [n for n in names if n != family.architecture and not scores]
    if others:
        raise ValueError(
            f"`architectures` = {some(others)} isn't supported; of {name}, {family.architecture} is"
        )
    arguments = family.read(fields)
    of_tokens = names == [family.tagger_class]
    return arguments | as_scorer(scores, of_tokens=of_tokens) if scores else arguments


# Where a configuration of several parts may have its decoder's, in Transformers' order.
_DECODERS = ("decoder", "generator", "text_config")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(DecoderOptions):
    """The sizes and options of a `Decoder`.

    Attributes:
        vocab_size: Rows of the embedding.
        hidden_size: Width of the hidden states between layers.
        intermediate_size: Width inside an MLP.
        num_layers: Number of layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides `num_heads`.
        head_dim: Width of a head.
        rope: Rotary embedding.
        local_rope: Rotary embedding of layers with a window; None for the same one.
        unrotated: Numbers of the layers that rotate neither queries nor keys, ascending from 0.
        windows: For each layer, the number of tokens a token attends to, itself included, or None
            for all. Empty for no windows.
        activation: Activation of the MLPs: "silu", "gelu", "gelu_tanh", "relu" or "relu2", the
            square of "relu".
        norm: Kind of the norms: "rms", or "layer" for norms that subtract the mean.
        norm_eps: Number that norms add to the mean square.
        norm_offset: Number added to the norms' weights, 1.0 in Gemma.
        norm_in_fp32: Whether norms multiply by their weights in fp32; norms with an offset always
            do.
        norm_bias: Whether norms of the kind "layer" have a bias.
        sandwich_norms: Whether the outputs of attention and MLP are normalised too.
        output_norms: Whether attention and MLP have norms at their outputs only.
        qk_norm: Whether each head's queries and keys are normalised.
        qkv_bias: Whether queries, keys and values have a bias.
        out_bias: Whether attention's output has a bias.
        mlp_bias: Whether the MLP's products have a bias.
        fused: Whether `qkv_proj` and `gate_up_proj` are one matrix each, as in Phi-3.
        attention_scale: Factor of attention's scores; None for 1 / sqrt(head_dim).
        attention_softcap: Scores become softcap * tanh(score / softcap).
        final_softcap: The same for the logits.
        scale_embedding: Factor of the embeddings, or True for sqrt(hidden_size).
        logit_scale: Factor of the hidden states that the head reads, and so of the logits.
        residual_scale: Factor of the results of attention and MLP before they are added.
        tie_embeddings: Whether the embedding is also the head.
        head_bias: Whether the head has a bias: it is the last column of `Decoder.head_weight`.
        scores: Number of scores that the head gives each token instead of logits, one for each
            label of a `classifier`; None for logits.
        experts: A mixture of experts in place of MLPs.
        layer: Class of the layers, in a family that has its own; called with this configuration,
            the number of the layer and a maker of parameters.
        attention: Class of their attention, called alike, in a family that has its own.
        linear: Class of linear attention, state spaces or convolutions, which layers have instead
            of attention if `options.layers` has their number; called without it.
        dense: Class of their MLPs, in a family that has its own.
        mixture: Class of their experts, in a family that has its own.
        memory: Class of a module that maps tokens and their embeddings to a value that layers pass
            on beside the hidden states; called with this configuration and a maker of parameters.
            Layers then take this value as a further argument, and return it after their tally. The
            module's `finish` maps the last layer's result and value to the last norm's input.
        unread: Prefixes of tensor names, without the family's `body`, that no layer reads: these
            tensors are kept like a vision tower's.
        vision: The vision part, if the decoder is trained with images.
        options: Options that these classes read beside the fields above: a frozen dataclass of the
            family.
        init_std: Standard deviation of fresh weights.
        source: The folder, or the GGUF file, this was read from.
        saved_dtype: The dtype of most parameters in that folder.
        saved_apart: Names and dtypes of the tensors there that have a different dtype.
        saved_stacked: Whether a tensor there holds all experts of a layer.
        original: The Hugging Face configuration this was read from, as JSON.
        end_tokens: Ids of the tokens that end a text, as the checkpoint says.
    """

    # Decoders of equal sizes are equal, no matter which files they came from.
    source: str | None = field(default=None, compare=False)
    saved_dtype: str | None = field(default=None, compare=False)
    saved_apart: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    saved_stacked: bool = field(default=False, compare=False)
    original: str | None = field(default=None, compare=False, repr=False)
    end_tokens: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, ignore: Sequence[str] = (), images: bool = False
    ) -> "DecoderConfig":
        """Reads the configuration in a `config.json`.

        Args:
            config: The JSON object.
            ignore: Names of fields to ignore.
            images: Whether the decoder is trained with images, and so has a vision part.

        Raises:
            TypeError: If `config` is not a JSON object, or a field has a wrong type.
            ValueError: If the architecture is unknown, or can't be trained with images, or a field
                has a value that is out of bounds or would change results in an unsupported way. The
                message names it.
        """
        if not isinstance(config, Mapping):
            hint = "pass its `.to_dict()`" if hasattr(config, "to_dict") else ""
            allowed = "the object in a config.json"
            raise TypeError(checks.refused("config", allowed, config, hint))
        # Before anything recurses into it, because each level takes a frame of Python's stack.
        if too_deep(dict(config)):
            raise ValueError("`config` is nested too deeply for a configuration")
        fields = read_config(config, as_ignored(ignore))
        if checks.boolean("images", images):
            fields["vision"] = read_vision(config)
        try:
            original = json.dumps(dict(config))
        except TypeError as error:
            raise TypeError(
                f"`config` must hold only values that JSON can represent: {error}"
            ) from error
        return cls(**fields, original=original, end_tokens=config_end_tokens(config))

    @property
    def family(self) -> str | None:
        """The `model_type` this was read as, or None."""
        return None if self.original is None else json.loads(self.original)["model_type"]


def config_end_tokens(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text by a config.json alone, as Transformers reads them.

    They count only where there is no generation_config.json beside it.
    """
    inner = next((values[name] for name in _DECODERS if values.get(name)), {})
    own = values if values.get("eos_token_id") is not None else inner
    return end_tokens_of(own) if isinstance(own, Mapping) else ()
