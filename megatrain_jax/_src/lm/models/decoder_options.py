"""`DecoderOptions`: what a decoder's layers are made from, with a vision part if it has one."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models.moe import Experts
from megatrain_jax._src.lm.models.rotary import Integers, Rope

Activation = Callable[[Float[Array, "..."]], Float[Array, "..."]]
"""An elementwise function."""
ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class ParameterMaker:
    """Makes parameters; shared by all layers of a model."""

    def __init__(self, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike, std: float):
        """Keeps the random keys, the dtype and the standard deviation of fresh weights."""
        self.rngs, self.dtype = rngs, dtype
        self.normal = nnx.initializers.normal(std)
        self.metadata: dict[str, Any] = {}

    def untrained(self) -> "ParameterMaker":
        """Returns a maker of parameters that no run trains."""
        other = copy.copy(self)
        other.metadata = {"trainable": False}
        return other

    def key(self) -> jax.Array:
        """Returns the key that `rngs.params()` would return, and advances its count.

        That call looks up the sharding of its count. A traced count has none, and JAX then walks
        all equations so far for the error message: quadratic in the number of parameters.
        """
        stream = self.rngs.params
        key = jax.random.fold_in(stream.key[...], stream.count[...])
        stream.count.set_value(stream.count[...] + 1)
        return key

    def weight(self, *shape: int) -> nnx.Param[jax.Array]:
        """Returns a parameter with normally distributed numbers."""
        return nnx.Param(self.normal(self.key(), shape, self.dtype), **self.metadata)

    def constant(self, value: float, *shape: int) -> nnx.Param[jax.Array]:
        """Returns a parameter filled with one number."""
        return nnx.Param(jnp.full(shape, value, self.dtype), **self.metadata)


class Placed(NamedTuple):
    """What a decoder's layers read of rows with images.

    Attributes:
        x: Hidden states, with the images' vectors in place of their placeholders' embeddings.
        segments: The argument `segments` of layers.
        positions: The argument `positions` of `rotation`.
        added: Arrays like `x`, added to the results of the first layers, one to each.
    """

    x: Float[Array, "rows length width"]
    segments: Any
    positions: Any
    added: Sequence[Float[Array, "rows length width"]] = ()


@dataclass(frozen=True, kw_only=True)
class VisionConfig(ABC):
    """The vision part of a checkpoint; each family that trains with images derives a class.

    Attributes:
        token: The placeholder of an image in `tokens`: one for each of its vectors.
        video: The placeholder of a video; None if videos have that of images, or there are none.
    """

    token: int
    video: int | None = None

    def is_placeholder(self, tokens: Any) -> Any:
        """Returns whether each token is a placeholder, of an image or a video."""
        images = tokens == self.token
        return images if self.video is None else images | (tokens == self.video)

    @property
    @abstractmethod
    def tower_widths(self) -> tuple[int, int]:
        """The widths of the tower's hidden states and of its MLPs."""

    @abstractmethod
    def num_patches(self, shape: tuple[int, ...]) -> int:
        """Returns the number of patches in a row's `pixel_values` of this shape."""

    @abstractmethod
    def make(self, decoder: "DecoderOptions", make: ParameterMaker) -> nnx.Module:
        """Makes the module `vision` of a decoder.

        Args:
            decoder: Sizes and options of the decoder.
            make: Makes the parameters.
        """

    @abstractmethod
    def place(
        self, decoder: Any, tokens: Integers, rows: Placed, images: Mapping[str, Any]
    ) -> Placed:
        """Puts the vectors of images in their places.

        Args:
            decoder: The decoder, with the module `vision`.
            tokens: The tokens.
            rows: What layers would read if there were no images: the tokens' embeddings, documents
                and positions.
            images: The arrays of a batch that hold images, by name.

        Raises:
            TypeError: If one of these is not an array.
            ValueError: If one is missing, or shapes don't match.
        """

    @abstractmethod
    def tensor_name(self, path: tuple[str, ...]) -> str:
        """Returns the name in a checkpoint of a parameter, from its path within the module."""

    @abstractmethod
    def batch_shapes(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch whose rows are full of images, for plans."""

    @abstractmethod
    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Checks that the rows of a batch have as many images as placeholders.

        Args:
            batch: Arrays by name; NumPy arrays are checked.

        Raises:
            ValueError: If they haven't, or an array has another shape.
        """

    def placeholders(self, row: int, count: int) -> str:
        """Returns the beginning of an error about a row's number of placeholders."""
        tokens = f"token {self.token}" + (f" or {self.video}" if self.video is not None else "")
        return f"row {row} of batch['tokens'] has {count:,} placeholders of images ({tokens})"

    def advance(self, images: Mapping[str, np.ndarray]) -> int:
        """Returns how much further positions go on after a row's images than after so many tokens.

        Args:
            images: The row's arrays of images, by name, without the axis of rows.
        """
        return 0

    def as_in(self, names: frozenset[str]) -> "VisionConfig":
        """Returns the configuration for a checkpoint with tensors of these names."""
        return self


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """The sizes and options that layers read; `DecoderConfig` describes each."""

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
    output_norms: bool = False
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
    residual_scale: float = 1.0
    tie_embeddings: bool = False
    head_bias: bool = False
    scores: int | None = None
    experts: Experts | None = None
    layer: Callable[..., Any] | None = None
    attention: Callable[..., Any] | None = None
    linear: Callable[..., Any] | None = None
    dense: Callable[..., Any] | None = None
    mixture: Callable[..., Any] | None = None
    memory: Callable[..., Any] | None = None
    unread: tuple[str, ...] = ()
    vision: VisionConfig | None = None
    options: Any = None
    init_std: float = 0.02

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
        if self.head_bias and self.tie_embeddings and not self.scores:
            raise ValueError("a head with `head_bias` can't be the embedding, as `tie_embeddings`")

    def _check_types(self) -> None:
        positive = ("attention_scale", "attention_softcap", "final_softcap", "logit_scale")
        checks.numbers(self, DecoderOptions, **dict.fromkeys(positive, {"above": 0}))
        if not isinstance(self.scale_embedding, bool):
            checks.number("scale_embedding", self.scale_embedding, above=0)
        checks.word("norm", self.norm, ("rms", "layer"))
        checks.word("activation", self.activation, ACTIVATIONS)
        checks.instance("windows", self.windows, tuple, "a tuple of integers and None")
        for window in self.windows:
            if window is not None:
                checks.integer("windows", window)
        checks.ascending("unrotated", self.unrotated)
        for name, kind in (("rope", Rope), ("local_rope", Rope), ("experts", Experts)):
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name == "rope"):
                raise TypeError(checks.refused(name, f"of models.{kind.__name__}", value))

    def window(self, layer: int) -> int | None:
        """Returns the layer's window: the number of tokens each token attends to; None for all."""
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> Rope | None:
        """Returns the layer's rotary embedding; None if it has none."""
        if layer in self.unrotated:
            return None
        local = self.local_rope is not None and self.window(layer) is not None
        return self.local_rope if local and self.local_rope else self.rope
