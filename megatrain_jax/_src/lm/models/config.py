"""`DecoderConfig`: sizes and options of a decoder; `from_hf` reads a Hugging Face configuration."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import too_deep
from megatrain_jax._src.lm.common.hf_folder import end_tokens_of
from megatrain_jax._src.lm.models.activation_functions import ACTIVATIONS
from megatrain_jax._src.lm.models.families.registry import read_config, read_vision
from megatrain_jax._src.lm.models.hf_fields import as_ignored
from megatrain_jax._src.lm.models.moe import Experts
from megatrain_jax._src.lm.models.rotary import Rope
from megatrain_jax._src.lm.models.vision import VisionConfig

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)
# Where a configuration of several parts may have its decoder's, in Transformers' order.
_DECODERS = ("decoder", "generator", "text_config")
_FLAGS = (
    "norm_in_fp32",
    "norm_bias",
    "sandwich_norms",
    "qk_norm",
    "qkv_bias",
    "out_bias",
    "mlp_bias",
    "fused",
    "head_bias",
    "tie_embeddings",
    "scores",
)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
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
        tie_embeddings: Whether the embedding is also the head.
        head_bias: Whether the head has a bias: it is the last column of `Decoder.head_weight`.
        scores: Whether the head gives one score per token instead of logits; see `reward_model`.
        experts: A mixture of experts in place of MLPs.
        layer: Class of the layers, in a family that has its own; called with this configuration,
            the number of the layer and a maker of parameters.
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
        source: The folder this was read from.
        saved_dtype: The dtype of most parameters in that folder.
        saved_apart: Names and dtypes of the tensors there that have a different dtype.
        saved_stacked: Whether a tensor there holds all experts of a layer.
        original: The Hugging Face configuration this was read from, as JSON.
        end_tokens: Ids of the tokens that end a text, as the checkpoint says.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    local_rope: Rope | None = None
    unrotated: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    activation: str = "silu"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_in_fp32: bool = False
    norm_bias: bool = True
    sandwich_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    scale_embedding: bool | float = False
    logit_scale: float = 1.0
    tie_embeddings: bool = False
    head_bias: bool = False
    scores: bool = False
    experts: Experts | None = None
    layer: Callable[..., Any] | None = None
    memory: Callable[..., Any] | None = None
    unread: tuple[str, ...] = ()
    vision: VisionConfig | None = None
    options: Any = None
    init_std: float = 0.02
    # Decoders of equal sizes are equal, no matter which files they came from.
    source: str | None = field(default=None, compare=False)
    saved_dtype: str | None = field(default=None, compare=False)
    saved_apart: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    saved_stacked: bool = field(default=False, compare=False)
    original: str | None = field(default=None, compare=False, repr=False)
    end_tokens: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self):
        """Checks each field, and that the fields are consistent."""
        self._check_types()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_kv_heads` must divide `num_heads`, {self.num_heads}, "
                f"but is {self.num_kv_heads}"
            )
        for name, rope in (("rope", self.rope), ("local_rope", self.local_rope)):
            if rope and rope.dim > self.head_dim:
                raise ValueError(f"`{name}` turns {rope.dim} dimensions of {self.head_dim}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"`windows` must have {self.num_layers} entries, one a layer")
        # The numbers ascend, so the last is the largest.
        sparse = self.experts.layers if self.experts else ()
        for name, layers in (("layers` of `experts", sparse), ("unrotated", self.unrotated)):
            if layers and layers[-1] >= self.num_layers:
                raise ValueError(
                    f"`{name}` must be below `num_layers`, {self.num_layers}, but are {layers}"
                )
        if self.fused and (self.qkv_bias or self.mlp_bias):
            raise ValueError("`fused` products have no bias")
        if self.head_bias and self.tie_embeddings:
            raise ValueError("a head with `head_bias` can't be the embedding, as `tie_embeddings`")

    def _check_types(self) -> None:
        for name in _SIZES:
            checks.integer(name, getattr(self, name))
        for name in _FLAGS:
            checks.boolean(name, getattr(self, name))
        for name in ("norm_eps", "norm_offset", "init_std"):
            checks.number(name, getattr(self, name), least=0)
        for name in ("attention_scale", "attention_softcap", "final_softcap"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), above=0)
        checks.number("logit_scale", self.logit_scale, above=0)
        if not isinstance(self.scale_embedding, bool):
            checks.number("scale_embedding", self.scale_embedding, above=0)
        if self.norm not in ("rms", "layer"):
            raise ValueError(checks.refused("norm", '"rms" or "layer"', self.norm))
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            allowed = f"one of {', '.join(ACTIVATIONS)}"
            raise ValueError(checks.refused("activation", allowed, self.activation))
        if not isinstance(self.windows, tuple):
            raise TypeError(checks.refused("windows", "a tuple of integers and None", self.windows))
        for window in self.windows:
            if window is not None:
                checks.integer("windows", window)
        checks.ascending("unrotated", self.unrotated)
        for name, kind in (("rope", Rope), ("local_rope", Rope), ("experts", Experts)):
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name == "rope"):
                raise TypeError(checks.refused(name, f"of models.{kind.__name__}", value))

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

    def window(self, layer: int) -> int | None:
        """Returns the layer's window: the number of tokens each token attends to; None for all."""
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> Rope | None:
        """Returns the layer's rotary embedding; None if it has none."""
        if layer in self.unrotated:
            return None
        local = self.local_rope is not None and self.window(layer) is not None
        return self.local_rope if local and self.local_rope else self.rope


def config_end_tokens(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text by a config.json alone, as Transformers reads them.

    They count only where there is no generation_config.json beside it.
    """
    inner = next((values[name] for name in _DECODERS if values.get(name)), {})
    own = values if values.get("eos_token_id") is not None else inner
    return end_tokens_of(own) if isinstance(own, Mapping) else ()
