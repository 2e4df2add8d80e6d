"""The vision part of Gemma 4: images of any size, each as patches with their places.

An image is resized so that its patches nearly fill a budget, the same for all images. The mean
over each square of patches becomes a vector, so the number of vectors depends on the image's shape.
Attributes are named as in checkpoints, except `blocks` (`encoder.layers` in checkpoints), `tower`
(`vision_tower`) and `projector` (`embed_vision`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.arrays import check_array
from megatrain_jax._src.lm.models.causal_attention import ImageRows, full_attention
from megatrain_jax._src.lm.models.decoder_options import (
    ACTIVATIONS,
    DecoderOptions,
    ParameterMaker,
    Placed,
    VisionConfig,
)
from megatrain_jax._src.lm.models.families.patch_tower import Hidden, Vision, own_options
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.images import image_numbers, with_images
from megatrain_jax._src.lm.models.layers import MLP, Buffer, Linear, RMSNorm, rms_normalized
from megatrain_jax._src.lm.models.rotary import CosSin, Integers, Rope, cos_sin_tables, rotate

_CHANNELS = 3
_PATCHES = "(rows, images, patches, numbers of a patch)"
_PLACES = "(rows, images, patches, 2)"
Places = Integer[Array | np.ndarray, "... patches 2"]
Patches = Float[Array, "images patches numbers"]
Inside = Bool[Array, "images patches"]
Squares = Float[Array, "images squares width"]


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(VisionConfig):
    """The sizes of Gemma 4's vision part.

    Attributes:
        sound: Placeholder of sound, which isn't supported; None if there is none.
        pad: The token whose embeddings of each layer the placeholders of images get.
        mutual: Whether the vectors of an image attend to each other in both directions, in layers
            with a window.
        tokens_per_image: Vectors of an image at most, for plans; a processor may make others.
        hidden_size: Width of the hidden states.
        intermediate_size: Width inside an MLP.
        num_layers: Number of blocks.
        num_heads: Number of heads of queries.
        num_kv_heads: Number of heads of keys and values; divides `num_heads`.
        head_dim: Width of a head.
        patch_size: Height and width of a patch, in pixels.
        merge: Patches along a side of a square, which becomes one vector.
        sides: Patches along a side of an image at most.
        activation: See `DecoderConfig`.
        norm_eps: Number that norms add to the variance.
        theta: Base of the wavelengths of the rotary embedding.
        clipped: Whether operands and results of products are clipped.
        standardized: Whether vectors are shifted and scaled by numbers that aren't trained.
    """

    sound: int | None
    pad: int
    mutual: bool
    tokens_per_image: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    patch_size: int
    merge: int
    sides: int
    activation: str
    norm_eps: float
    theta: float
    clipped: bool
    standardized: bool

    @property
    def tower_widths(self) -> tuple[int, int]:
        """See `VisionConfig`."""
        return self.hidden_size, self.intermediate_size

    def num_patches(self, shape: tuple[int, ...]) -> int:
        """See `VisionConfig`."""
        return shape[0] * shape[1]

    @property
    def patch(self) -> int:
        """The numbers of a patch."""
        return _CHANNELS * self.patch_size**2

    def make(self, decoder: DecoderOptions, make: ParameterMaker) -> Vision:
        """Makes the module."""
        return Vision(Tower(self, decoder, make), Projector(self, decoder, make))

    def tensor_name(self, path: tuple[str, ...]) -> str:
        """Returns the name of a parameter in the checkpoint."""
        part, *rest = path
        if part == "projector":
            return ".".join(["model.embed_vision", *rest])
        rest = ["encoder.layers", *rest[1:]] if rest[0] == "blocks" else rest
        return ".".join(["model.vision_tower", *rest])

    def place(
        self, decoder: Any, tokens: Integers, rows: Placed, images: Mapping[str, Any]
    ) -> Placed:
        """Puts the vectors of images in their places; see `VisionConfig`."""
        patches: Any = images["pixel_values"]
        places: Any = images.get("image_position_ids")
        self._check_shapes(patches, places, tokens.shape[0])
        given = (jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in (patches, places))
        vectors = decoder.vision(*given)
        vectors = vectors.reshape(*patches.shape[:2], *vectors.shape[1:])
        counts = self.num_vectors(jnp.asarray(places))
        inside = self.is_placeholder(jnp.asarray(tokens))
        rows = rows._replace(x=with_images(rows.x, inside, vectors, counts))
        if not self.mutual:
            return rows
        own = image_numbers(inside)
        seen = ImageRows(rows.segments, own, vectors.shape[2], local=True)
        return rows._replace(segments=seen)

    def num_vectors(self, places: Any) -> Any:
        """Returns the number of vectors of each image, from the places of its patches."""
        return (places >= 0).all(axis=-1).sum(axis=-1) // self.merge**2

    def batch_shapes(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch whose rows are full of images, for plans."""
        images = max(1, length // (self.tokens_per_image + 4))
        shape = (rows, images, self.tokens_per_image * self.merge**2)
        return {
            "pixel_values": jax.ShapeDtypeStruct((*shape, self.patch), jnp.float32),
            "image_position_ids": jax.ShapeDtypeStruct((*shape, 2), jnp.int32),
        }

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Checks that the rows of a batch have as many vectors as placeholders, and no sound."""
        names = ("tokens", "pixel_values", "image_position_ids")
        tokens, patches, places = map(batch.get, names)
        if not isinstance(tokens, np.ndarray):
            return
        if self.sound is not None and (rows := (tokens == self.sound).any(axis=-1)).any():
            raise ValueError(
                f"row {rows.argmax()} of batch['tokens'] has token {self.sound}, a placeholder of "
                "sound: only text, images and videos are supported"
            )
        counts, sizes = self.is_placeholder(tokens).sum(axis=-1), np.zeros(len(tokens), int)
        if isinstance(patches, np.ndarray):
            self._check_shapes(patches, places, len(tokens), "batch['{}']")
            places = np.asarray(places)
            if places.size and places.max() >= self.sides:
                raise ValueError(
                    f"batch['image_position_ids'] has the place {places.max():,}: an image has at "
                    f"most {self.sides:,} patches along a side, `position_embedding_size`"
                )
            sizes = self.num_vectors(places).sum(axis=-1)
        elif patches is not None:
            return
        for row, (count, size) in enumerate(zip(counts.tolist(), sizes.tolist(), strict=True)):
            if count != size:
                raise ValueError(
                    f"{self.placeholders(row, count)}, but its images have {size:,} squares of "
                    f"{self.merge} × {self.merge} patches in batch['image_position_ids']"
                )

    def _check_shapes(self, patches: Any, places: Any, rows: int, name: str = "{}") -> None:
        of_patches, of_places = (name.format(x) for x in ("pixel_values", "image_position_ids"))
        check_array(of_patches, patches, _PATCHES, num_axes=4)
        check_array(of_places, places, _PLACES, num_axes=4, of_integers=True)
        each = self.merge**2
        if patches.shape[::3] != (rows, self.patch) or patches.shape[2] % each:
            raise ValueError(
                f"`{of_patches}` must have the shape {_PATCHES} with {rows} rows, a multiple of "
                f"{each} patches and {self.patch:,} numbers of each, but has {patches.shape}"
            )
        if places.shape != (*patches.shape[:3], 2):
            raise ValueError(
                f"`{of_places}` must have the shape {(*patches.shape[:3], 2)} of {_PLACES}, but "
                f"has {places.shape}"
            )


def read_gemma4_vision(config: Mapping[str, Any]) -> Gemma4VisionConfig:
    """Reads the vision part of a checkpoint.

    Args:
        config: The object in its `config.json`.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If there is none, or a field has a value that isn't supported.
    """
    outer = Fields(config)
    if outer.take("vision_config", None) is None:
        raise ValueError("this gemma4 has no `vision_config`: it can't be trained with images")
    fields, text = (Fields(outer.mapping(name)) for name in ("vision_config", "text_config"))
    fields.neutral(model_type="gemma4_vision")
    hf_common.refuse_unsupported(fields)
    # Transformers doesn't read these.
    for name in ("attention_bias", "default_output_length", "global_head_dim"):
        fields.take(name, None)
    turned = fields.mapping("rope_parameters")
    if turned.get("rope_type", "axial") not in ("axial", "default"):
        raise ValueError(f"`rope_type` = {turned['rope_type']!r} of `vision_config` isn't axial")
    found = Gemma4VisionConfig(
        token=outer.integer("image_token_id", 258_880, least=0),
        video=outer.integer("video_token_id", 258_884, null=True),
        sound=outer.integer("audio_token_id", 258_881, null=True),
        pad=text.integer("pad_token_id", 0, least=0),
        mutual=text.take("use_bidirectional_attention", None) == "vision",
        tokens_per_image=outer.integer("vision_soft_tokens_per_image", 280),
        hidden_size=fields.integer("hidden_size", 768),
        intermediate_size=fields.integer("intermediate_size", 3072),
        num_layers=fields.integer("num_hidden_layers", 16),
        num_heads=fields.integer("num_attention_heads", 12),
        num_kv_heads=fields.integer("num_key_value_heads", 12),
        head_dim=fields.integer("head_dim", 64),
        patch_size=fields.integer("patch_size", 16),
        merge=fields.integer("pooling_kernel_size", 3),
        sides=fields.integer("position_embedding_size", 10_240),
        activation=hf_common.read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        norm_eps=fields.number("rms_norm_eps", 1e-6, least=0),
        theta=Fields(turned).number("rope_theta", 100.0, above=0),
        clipped=fields.flag("use_clipped_linears", False),
        standardized=fields.flag("standardize", False),
    )
    fields.finish()
    if found.head_dim % 4 or found.num_heads % found.num_kv_heads:
        raise ValueError(
            "`vision_config` must have a `head_dim` that is a multiple of 4, and "
            f"`num_key_value_heads` that divide `num_attention_heads`, but has {found}"
        )
    return found


class ClippedLinear(nnx.Module):
    """A product whose operand and result are clipped, if the checkpoint has bounds for them."""

    def __init__(self, dim_in: int, dim_out: int, make: ParameterMaker, *, clipped: bool):
        """Makes the parameters."""
        self.linear, self.clipped = Linear(dim_in, dim_out, make), clipped
        if clipped:
            self.input_min, self.input_max = Buffer(jnp.array(-jnp.inf)), Buffer(jnp.array(jnp.inf))
            self.output_min = Buffer(jnp.array(-jnp.inf))
            self.output_max = Buffer(jnp.array(jnp.inf))

    def __call__(self, x: Float[Array, "*rows dim_in"]) -> Float[Array, "*rows dim_out"]:
        """Multiplies the last axis by the matrix."""
        if not self.clipped:
            return self.linear(x)
        y = self.linear(_clipped(x, self.input_min, self.input_max))
        return _clipped(y, self.output_min, self.output_max)


def _clipped(x: Array, low: Buffer, high: Buffer) -> Array:
    return jnp.clip(x, low[...].astype(x.dtype), high[...].astype(x.dtype))


class ClippedMLP(MLP):
    """A gated MLP of such products."""

    def __init__(self, config: Gemma4VisionConfig, make: ParameterMaker):
        """Makes the parameters."""
        wide, inside, clipped = config.hidden_size, config.intermediate_size, config.clipped
        self.activation = ACTIVATIONS[config.activation]
        self.gate_proj = ClippedLinear(wide, inside, make, clipped=clipped)
        self.up_proj = ClippedLinear(wide, inside, make, clipped=clipped)
        self.down_proj = ClippedLinear(inside, wide, make, clipped=clipped)


class PatchEmbedder(nnx.Module):
    """A product with each patch, and two vectors of its place: of its column, and of its row."""

    def __init__(self, config: Gemma4VisionConfig, make: ParameterMaker):
        """Makes the parameters."""
        self.input_proj = Linear(config.patch, config.hidden_size, make)
        self.position_embedding_table = make.weight(2, config.sides, config.hidden_size)

    def __call__(self, patches: Patches, places: Places) -> Hidden:
        """Embeds patches of pixels from 0 to 1."""
        dtype = self.input_proj.weight[...].dtype
        x = self.input_proj((2 * (patches - 0.5)).astype(dtype))
        columns, rows = self.position_embedding_table[...]
        return x + columns[places[..., 0]] + rows[places[..., 1]]


class PatchAttention(nnx.Module):
    """Attention of every patch to all patches of its image, with normalised heads."""

    def __init__(self, config: Gemma4VisionConfig, own: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.head_dim, self.eps = config.head_dim, config.norm_eps
        wide, clipped = config.hidden_size, config.clipped
        query_size, key_size = (n * self.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q_proj = ClippedLinear(wide, query_size, make, clipped=clipped)
        self.k_proj = ClippedLinear(wide, key_size, make, clipped=clipped)
        self.v_proj = ClippedLinear(wide, key_size, make, clipped=clipped)
        self.o_proj = ClippedLinear(query_size, wide, make, clipped=clipped)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, own, make) for _ in range(2))

    def __call__(self, x: Hidden, turns: list[CosSin], inside: Inside) -> Hidden:
        """Mixes the patches of each image.

        Args:
            x: The hidden states.
            turns: Rotary embeddings of the first half of a head, by columns, and the second, by
                rows.
            inside: Whether a patch belongs to the image; the rest is padding.
        """

        def heads(y: Array) -> Array:
            return y.reshape(*x.shape[:2], -1, self.head_dim)

        def turned(y: Array) -> Array:
            halves = zip(jnp.split(y, 2, axis=-1), turns, strict=True)
            return jnp.concatenate([rotate(half, turn) for half, turn in halves], axis=-1)

        q = turned(self.q_norm(heads(self.q_proj(x))))
        k = turned(self.k_norm(heads(self.k_proj(x))))
        v = heads(self.v_proj(x))
        v = rms_normalized(v, self.eps).astype(v.dtype)
        mixed = full_attention(q, k, v, inside.astype(jnp.int32), scale=1.0)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    """Attention, then an MLP, with norms before and after each and residual connections."""

    def __init__(self, config: Gemma4VisionConfig, own: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, own, make)

        self.input_layernorm = norm()
        self.self_attn = PatchAttention(config, own, make)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = ClippedMLP(config, make)
        self.post_feedforward_layernorm = norm()

    def __call__(self, x: Hidden, turns: list[CosSin], inside: Inside) -> Hidden:
        """Returns the block's result; see `PatchAttention`."""
        y = self.self_attn(self.input_layernorm(x), turns, inside)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y)


class Tower(nnx.Module):
    """Patches of images to the means of squares of their hidden states."""

    def __init__(self, config: Gemma4VisionConfig, decoder: DecoderOptions, make: ParameterMaker):
        """Makes the parameters; blocks have the options of `decoder` that are not their own."""
        own = own_options(decoder, config, norm_eps=config.norm_eps, norm_in_fp32=True)
        self.config = config
        self.patch_embedder = PatchEmbedder(config, make)
        self.blocks = nnx.List([Block(config, own, make) for _ in range(config.num_layers)])
        if config.standardized:
            self.std_bias = Buffer(jnp.zeros(config.hidden_size))
            self.std_scale = Buffer(jnp.ones(config.hidden_size))

    def __call__(self, patches: Patches, places: Places) -> Squares:
        """Returns the vectors of each image, row by row, followed by unused vectors."""
        inside, at = jnp.all(places >= 0, axis=-1), jnp.maximum(places, 0)
        x = self.patch_embedder(patches, at)
        rope = Rope(dim=self.config.head_dim // 2, base=self.config.theta)
        turns = [cos_sin_tables(rope, at[..., axis]) for axis in (0, 1)]
        for block in self.blocks:
            x = block(x, turns, inside)
        # The numbers may exceed those of half precision, until they are standardised.
        pooled = self.means(x, inside, at).astype(jnp.float32) * x.shape[-1] ** 0.5
        if self.config.standardized:
            bias, scale = self.std_bias[...], self.std_scale[...]
            pooled = (pooled - bias.astype(jnp.float32)) * scale.astype(jnp.float32)
        return pooled.astype(x.dtype)

    def means(self, x: Hidden, inside: Inside, at: Places) -> Squares:
        """Returns the mean of each square of patches."""
        merge = self.config.merge
        row, column = at[..., 1] // merge, at[..., 0] // merge
        width = jnp.max(at[..., 0], axis=1, keepdims=True) // merge + 1
        square = jnp.where(inside, row * width + column, -1)
        parts = jax.nn.one_hot(square, x.shape[1] // merge**2, dtype=jnp.float32)
        sums = jnp.einsum("ips,ipw->isw", parts, x.astype(jnp.float32))
        return (sums / merge**2).astype(x.dtype)


class Projector(nnx.Module):
    """Normalised vectors to those of the decoder's width."""

    def __init__(self, config: Gemma4VisionConfig, decoder: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.eps = config.norm_eps
        self.embedding_projection = Linear(config.hidden_size, decoder.hidden_size, make)

    def __call__(self, x: Squares) -> Float[Array, "images squares wide"]:
        """Returns the vectors of each image."""
        return self.embedding_projection(rms_normalized(x, self.eps).astype(x.dtype))
