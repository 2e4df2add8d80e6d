"""The vision part of Qwen2.5-VL, Qwen3-VL and Qwen3.5: images and videos of any size.

A tower, a transformer over the patches of each image, and a projector, which merges squares of
patches into one vector of the decoder's width. Attributes are named as in checkpoints; the modules
`tower` and `projector` around them aren't there. Tokens of images have positions in three
dimensions (https://arxiv.org/abs/2409.12191).

A row of a batch has the patches of all its images after each other, in squares, and the number of
patches of each image along its sides. The padding behind them attends only to itself. A video has
several patches along time, each of them over a few frames. To the tower, these are images.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer

from megatrain_jax._src.common import checks
from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.arrays import check_array
from megatrain_jax._src.lm.models.causal_attention import full_attention
from megatrain_jax._src.lm.models.decoder_options import (
    ACTIVATIONS,
    DecoderOptions,
    ParameterMaker,
    Placed,
    VisionConfig,
)
from megatrain_jax._src.lm.models.families.patch_tower import own_options
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.images import with_images
from megatrain_jax._src.lm.models.layers import MLP, BiasedMLP, Embedding, Linear, make_norm
from megatrain_jax._src.lm.models.rotary import CosSin, Integers, Rope, cos_sin_tables, rotate

_PATCHES = "(rows, patches, numbers of a patch)"
_GRIDS = "(rows, images, 3)"
# How parts are named in the files, without and with `older`.
_NAMES = (
    {"fc1": "linear_fc1", "fc2": "linear_fc2"},
    {"norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"},
)
_EPS = 1e-6
Hidden = Float[Array, "rows patches width"]
Vectors = Float[Array, "rows squares wide"]
Patches = Float[Array, "rows patches numbers"]
PerPatch = Int[Array, "rows patches"]
PerSquare = Int[Array, "rows squares"]


class Squares(NamedTuple):
    """The places of a row's squares of patches, each (rows, squares).

    Attributes:
        image: Number of the image, from 0, where each patch of a video along time counts as one;
            the number of images for padding.
        time: Number of the patch along time, from 0; 0 for padding.
        seconds: Seconds from one of these patches to the next.
        row: Place from the top of the image, in squares; 0 for padding.
        column: Place from its left; 0 for padding.
        height: Squares along the height of the image; 1 for padding.
        width: Squares along its width; 1 for padding.
    """

    image: PerSquare
    time: PerSquare
    seconds: Float[Array, "rows squares"]
    row: PerSquare
    column: PerSquare
    height: PerSquare
    width: PerSquare


def squares_of(
    grids: Integer[Array, "rows images 3"],
    seconds: Float[Array, "rows images"],
    count: int,
    merge: int,
) -> Squares:
    """Returns the places of squares.

    Args:
        grids: Patches of each image or video along time, height and width; zeros behind the last.
        seconds: Seconds from one patch of a video along time to the next.
        count: Number of squares of a row, with padding.
        merge: Patches along a side of a square.
    """
    ends = jnp.cumsum(jnp.prod(grids, axis=2) // merge**2, axis=1)
    at = jnp.arange(count)
    entry = jnp.sum(at[None, :, None] >= ends[:, None], axis=2, dtype=jnp.int32)

    def of_entry(values: Array, first: int, last: int) -> Array:
        padded = jnp.pad(values, ((0, 0), (first, last)), constant_values=last)
        return jnp.take_along_axis(padded, entry, axis=1)

    height, width = (of_entry(grids[..., side] // merge, 0, 1) for side in (1, 2))
    inside = jnp.where(entry < grids.shape[1], at - of_entry(ends, 1, 0), 0)
    time, inside = jnp.divmod(inside, height * width)
    image = of_entry(jnp.cumsum(grids[..., 0], axis=1), 1, 0) + time
    seconds = of_entry(seconds, 0, 1)
    return Squares(image, time, seconds, inside // width, inside % width, height, width)


def windows_of(squares: Squares, size: int) -> PerSquare:
    """Returns the number of each square's window; numbers ascend with those of images.

    Args:
        squares: The squares.
        size: Squares along a side of a window; windows at the edges of images are smaller.
    """
    row, column = squares.row // size, squares.column // size
    own = row * -(-squares.width // size) + column
    # An image has at most as many windows as a row has squares.
    return squares.image * squares.image.shape[1] + own


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig(VisionConfig):
    """The sizes of a vision part.

    Attributes:
        older: Whether it is that of Qwen2.5-VL, whose blocks have norms without means and gated
            MLPs, and whose patches have neither a bias nor vectors of their places.
        prefix: Beginning of the tensors' names in the files.
        hidden_size: Width of the hidden states.
        intermediate_size: Width inside an MLP.
        num_layers: Number of blocks.
        num_heads: Number of heads; divides `hidden_size`.
        channels: Channels of an image.
        frames: Frames of a patch; an image has the same one repeated.
        patch_size: Height and width of a patch, in pixels.
        merge: Patches along a side of a square, which becomes one vector.
        wide: Width of these vectors.
        activation: See `DecoderConfig`.
        theta: Base of the wavelengths of the rotary embedding.
        side: Vectors of places along a side of their table; 0 without them.
        window: Squares along a side of a window; 0 without windows.
        full: Blocks that attend to whole images in spite of windows.
        deep: Blocks whose hidden states are added to those of the first layers of the decoder.
        sections: Numbers of pairs of the decoder's rotary embedding that turn by the position in
            time, height and width.
        per_second: Positions in time of a second of a video; with 0, each patch of a video along
            time is an image to the decoder, too, with text before it that tells its time.
    """

    older: bool
    prefix: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    channels: int
    frames: int
    patch_size: int
    merge: int
    wide: int
    activation: str
    theta: float
    side: int
    window: int
    full: tuple[int, ...]
    deep: tuple[int, ...]
    sections: tuple[int, ...]
    per_second: float

    @property
    def tower_widths(self) -> tuple[int, int]:
        """See `VisionConfig`."""
        return self.hidden_size, self.intermediate_size

    def num_patches(self, shape: tuple[int, ...]) -> int:
        """See `VisionConfig`."""
        return shape[0]

    @property
    def patch(self) -> int:
        """The numbers of a patch."""
        return self.channels * self.frames * self.patch_size**2

    def make(self, decoder: DecoderOptions, make: ParameterMaker) -> "QwenVision":
        """Makes the module.

        Raises:
            ValueError: If it doesn't fit the decoder.
        """
        if self.wide != decoder.hidden_size:
            raise ValueError(
                f"`out_hidden_size` = {self.wide} of `vision_config` must be `hidden_size`, "
                f"{decoder.hidden_size}"
            )
        self.axes(decoder.rope)
        return QwenVision(self, decoder, make)

    def axes(self, rope: Rope) -> np.ndarray:
        """Returns the dimension of each pair of a rotary embedding: 0 for time, 1, or 2 for width.

        Raises:
            ValueError: If there are too few or too many pairs.
        """
        pairs = rope.dim // 2
        if self.older:
            found = np.repeat(np.arange(3), self.sections)
        else:
            found = np.zeros(pairs, int)
            for axis in (1, 2):
                found[axis : 3 * self.sections[axis] : 3] = axis
        if len(found) != pairs:
            raise ValueError(
                f"`mrope_section` = {list(self.sections)} must sum to {pairs}, half the rotated "
                "dimensions of a head"
            )
        return found

    def place(
        self, decoder: Any, tokens: Integers, rows: Placed, images: Mapping[str, Any]
    ) -> Placed:
        """Puts the vectors of images in their places; see `VisionConfig`."""
        patches: Any = images["pixel_values"]
        grids: Any = images.get("image_grid_thw")
        self._check_shapes(patches, grids, tokens.shape[0])
        grids, inside = jnp.asarray(grids, jnp.int32), self.is_placeholder(jnp.asarray(tokens))
        seconds: Any = images.get("second_per_grid_ts", np.ones(grids.shape[:2]))
        if np.shape(seconds) != grids.shape[:2]:
            raise ValueError(
                f"`second_per_grid_ts` must have the shape {grids.shape[:2]}, (rows, images) as "
                f"`image_grid_thw`, but has {np.shape(seconds)}"
            )
        count = patches.shape[1] // self.merge**2
        squares = squares_of(grids, jnp.asarray(seconds, jnp.float32), count, self.merge)
        vectors, *deep = decoder.vision(jnp.asarray(patches), squares)
        nothing = jnp.zeros_like(rows.x)
        positions = self.positions(inside, rows.segments, squares)
        return rows._replace(
            x=with_images(rows.x, inside, vectors),
            positions=positions[..., self.axes(decoder.config.rope)],
            added=[with_images(nothing, inside, one) for one in deep],
        )

    def positions(
        self,
        inside: Bool[Array, "rows length"],
        segments: Integer[Array, "rows length"] | None,
        squares: Squares,
    ) -> Int[Array, "rows length 3"]:
        """Returns the positions of tokens in time, height and width.

        A text's tokens count on in all three. An image stays at one time; the text after it goes on
        behind its longer side. For example, a token, an image of 1 × 2 squares and a token have the
        positions (0, 0, 0), (1, 1, 1), (1, 1, 2) and (3, 3, 3). In a video with `per_second`, only
        the time grows from one patch to the next, and the text after it doesn't wait for its end.

        Args:
            inside: Whether each token is a placeholder.
            segments: The document of each token.
            squares: The squares, whose vectors are in these places.
        """
        at = jnp.maximum(jnp.cumsum(inside, axis=1, dtype=jnp.int32) - 1, 0)
        passed, seconds, row, column, height, width = (
            jnp.where(inside, jnp.take_along_axis(values, at, axis=1, mode="clip"), 0)
            for values in squares[1:]
        )
        first, longer = (row == 0) & (column == 0), jnp.maximum(height, width)
        if self.per_second:
            first &= passed == 0
        steps = jnp.where(inside, jnp.where(first, longer, 0), 1)
        before = jnp.cumsum(steps, axis=1, dtype=jnp.int32) - steps
        if segments is not None:
            starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
            before = before - jax.lax.cummax(jnp.where(starts, before, 0), axis=1)
        start = before - jnp.where(first, 0, longer)
        time = start + (passed * (self.per_second * seconds)).astype(jnp.int32)
        return jnp.stack([time, start + row, start + column], axis=-1)

    def advance(self, images: Mapping[str, np.ndarray]) -> int:
        """See `VisionConfig`: an image counts as many positions as its longer side has squares."""
        times, sides = images["image_grid_thw"][:, 0], images["image_grid_thw"][:, 1:] // self.merge
        counted = np.minimum(times, 1) if self.per_second else times
        return int((counted * sides.max(axis=1) - times * sides.prod(axis=1)).sum())

    def tensor_name(self, path: tuple[str, ...]) -> str:
        """Returns the name of a parameter in the checkpoint."""
        names = _NAMES[self.older]
        return ".".join([self.prefix, *(names.get(part, part) for part in path[1:])])

    def batch_shapes(self, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch whose rows are full of images, for plans."""
        patches = (rows, length * self.merge**2, self.patch)
        grids = (rows, max(1, length // 64), 3)
        return {
            "pixel_values": jax.ShapeDtypeStruct(patches, jnp.float32),
            "image_grid_thw": jax.ShapeDtypeStruct(grids, jnp.int32),
        }

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Checks that the rows of a batch have as many images as placeholders."""
        tokens, patches, grids = map(batch.get, ("tokens", "pixel_values", "image_grid_thw"))
        if not isinstance(tokens, np.ndarray):
            return
        counts = self.is_placeholder(tokens).sum(axis=-1)
        if patches is None:
            sizes, room = np.zeros_like(counts), 0
        elif isinstance(patches, np.ndarray):
            self._check_shapes(patches, grids, len(tokens), "batch['{}']")
            grids = np.asarray(grids)
            self._check_grids(grids)
            sizes, room = grids.prod(axis=-1).sum(axis=-1) // self.merge**2, patches.shape[1]
        else:
            return
        for row, (count, size) in enumerate(zip(counts.tolist(), sizes.tolist(), strict=True)):
            if count != size or size * self.merge**2 > room:
                raise ValueError(
                    f"{self.placeholders(row, count)}, batch['image_grid_thw'] has {size:,} "
                    f"vectors for it, and batch['pixel_values'] has room for "
                    f"{room // self.merge**2:,}"
                )

    def _check_grids(self, grids: np.ndarray) -> None:
        wrong = (grids[..., 1:] % self.merge != 0).any(axis=-1)
        if wrong.any():
            row, image = np.argwhere(wrong)[0]
            raise ValueError(
                f"batch['image_grid_thw'] has {grids[row, image].tolist()} for image {image} of "
                f"row {row}: an image has a multiple of {self.merge} patches along height and width"
            )

    def _check_shapes(self, patches: Any, grids: Any, rows: int, name: str = "{}") -> None:
        of_patches, of_grids = name.format("pixel_values"), name.format("image_grid_thw")
        check_array(of_patches, patches, _PATCHES, num_axes=3)
        check_array(of_grids, grids, _GRIDS, num_axes=3, of_integers=True)
        each = self.merge**2
        if patches.shape[::2] != (rows, self.patch) or patches.shape[1] % each:
            raise ValueError(
                f"`{of_patches}` must have the shape {_PATCHES} with {rows} rows, a multiple of "
                f"{each} patches and {self.patch:,} numbers of each, but has {patches.shape}"
            )
        if grids.shape[::2] != (rows, 3):
            raise ValueError(
                f"`{of_grids}` must have the shape {_GRIDS} with {rows} rows, but has {grids.shape}"
            )


def read_vision(
    config: Mapping[str, Any],
    *,
    prefix: str,
    token: int,
    sections: tuple[int, int, int],
    older: bool = False,
    deep: tuple[int, ...] = (),
) -> QwenVisionConfig:
    """Reads the vision part of a checkpoint.

    Args:
        config: The object in its `config.json`.
        prefix: See `QwenVisionConfig`.
        token: Default of `image_token_id`.
        sections: Default of `mrope_section`.
        older: See `QwenVisionConfig`.
        deep: Default of `deepstack_visual_indexes`.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If a field has a value that isn't supported.
    """
    outer = Fields(config)
    fields, text = (Fields(outer.mapping(name)) for name in ("vision_config", "text_config"))
    if not text.values:  # in older checkpoints, the decoder's fields are outside
        text = outer
    kind, own = fields.take("model_type", None), config["model_type"]
    if kind not in (None, own, f"{own}_vision"):
        raise ValueError(f"`model_type` = {kind!r} of `vision_config` isn't {own}_vision")
    hf_common.refuse_unsupported(fields)
    # Transformers doesn't read these.
    for name in ("in_chans", "spatial_patch_size", *([] if older else ["tokens_per_second"])):
        fields.take(name, None)
    turned = fields.mapping("rope_parameters")
    if turned.get("rope_type", "axial") not in ("axial", "default"):
        raise ValueError(f"`rope_type` = {turned['rope_type']!r} of `vision_config` isn't axial")
    rope = hf_common.rope_parameters(text)
    given = Fields(rope).listed("mrope_section", int, "integers")
    places = 0 if older else fields.integer("num_position_embeddings", 2304)
    size = fields.integer("patch_size", 14 if older else 16)
    merge = fields.integer("spatial_merge_size", 2)
    window = fields.integer("window_size", 112) // merge // size if older else 0

    def layers(name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        found = fields.listed(name, int, "integers")
        return default if found is None else tuple(found)

    found = QwenVisionConfig(
        token=outer.integer("image_token_id", token, least=0),
        video=outer.integer("video_token_id", token + 1, least=0),
        older=older,
        prefix=prefix,
        hidden_size=fields.integer("hidden_size", 3584 if older else 1152),
        intermediate_size=fields.integer("intermediate_size", 3420 if older else 4304),
        num_layers=fields.integer("depth", 32 if older else 27),
        num_heads=fields.integer("num_heads", 16),
        channels=fields.integer("in_channels", 3),
        frames=fields.integer("temporal_patch_size", 2),
        patch_size=size,
        merge=merge,
        wide=fields.integer("out_hidden_size", 3584),
        activation=hf_common.read_activation(
            fields, "hidden_act", "silu" if older else "gelu_pytorch_tanh"
        ),
        theta=Fields(turned).number("rope_theta", 10_000.0, above=0),
        side=math.isqrt(places),
        window=window,
        full=layers("fullatt_block_indexes", (7, 15, 23, 31)) if older else (),
        deep=layers("deepstack_visual_indexes", deep) if not older else (),
        sections=tuple(sections if given is None else given),
        per_second=fields.number("tokens_per_second", 4, above=0) if older else 0,
    )
    fields.finish()
    _check(found, places, window)
    return found


def _check(config: QwenVisionConfig, places: int, window: int) -> None:
    checks.ascending("deepstack_visual_indexes", config.deep)
    head_dim, rest = divmod(config.hidden_size, config.num_heads)
    if rest or head_dim % 4:
        raise ValueError(
            f"`num_heads` = {config.num_heads} of `vision_config` must divide `hidden_size`, "
            f"{config.hidden_size}, into heads of a multiple of 4"
        )
    if config.older and window < 1:
        raise ValueError("`window_size` of `vision_config` must be that of a square, at least")
    if config.side**2 != places:
        raise ValueError(
            f"`num_position_embeddings` = {places} of `vision_config` must be a square"
        )
    if len(config.sections) != 3 or min(config.sections) < 0:
        raise ValueError(f"`mrope_section` = {list(config.sections)} must have three numbers")
    if config.deep and config.deep[-1] >= config.num_layers:
        raise ValueError(
            f"`deepstack_visual_indexes` = {list(config.deep)} must be below `depth`, "
            f"{config.num_layers}"
        )


class Convolution(nnx.Module):
    """A convolution without overlap: (out, channels, frames, size, size)."""

    def __init__(self, config: QwenVisionConfig, make: ParameterMaker):
        """Makes the parameters."""
        size = (config.channels, config.frames, config.patch_size, config.patch_size)
        self.weight = make.weight(config.hidden_size, *size)
        self.bias = None if config.older else make.constant(0.0, config.hidden_size)


class PatchEmbedding(nnx.Module):
    """A product with each patch."""

    def __init__(self, config: QwenVisionConfig, make: ParameterMaker):
        """Makes the parameters."""
        self.proj = Convolution(config, make)

    def __call__(self, patches: Patches) -> Hidden:
        """Embeds patches."""
        weight, bias = self.proj.weight[...], self.proj.bias
        matrix = weight.reshape(weight.shape[0], -1)
        y = jax.lax.dot_general(patches.astype(matrix.dtype), matrix, (((2,), (1,)), ((), ())))
        return y if bias is None else y + bias[...]


class PatchAttention(nnx.Module):
    """Attention of every patch to all patches of its image or window."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.num_heads, wide = config.num_heads, config.hidden_size
        self.qkv = Linear(wide, 3 * wide, make, bias=True)
        self.proj = Linear(wide, wide, make, bias=True)

    def __call__(self, x: Hidden, turned: CosSin, segments: PerPatch, most: int | None) -> Hidden:
        """Mixes the patches of each segment, of which none has more than `most`."""
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, -1), 2, 0)
        mixed = full_attention(rotate(q, turned), rotate(k, turned), v, segments, most)
        return self.proj(mixed.reshape(x.shape))


class Block(nnx.Module):
    """Attention, then an MLP, each after a norm and with a residual connection."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.norm1 = make_norm(config.hidden_size, config, make)
        self.attn = PatchAttention(config, make)
        self.norm2 = make_norm(config.hidden_size, config, make)
        self.mlp = MLP(config, make) if config.norm == "rms" else BiasedMLP(config, make)

    def __call__(self, x: Hidden, turned: CosSin, segments: PerPatch, most: int | None) -> Hidden:
        """Returns the block's result."""
        x = x + self.attn(self.norm1(x), turned, segments, most)
        return x + self.mlp(self.norm2(x))


class Tower(nnx.Module):
    """Patches to their hidden states."""

    def __init__(self, config: QwenVisionConfig, own: DecoderOptions, make: ParameterMaker):
        """Makes the parameters; blocks have the options `own`."""
        self.config = config
        self.patch_embed = PatchEmbedding(config, make)
        if config.side:
            self.pos_embed = Embedding(config.side**2, config.hidden_size, make)
        self.blocks = nnx.List([Block(own, make) for _ in range(config.num_layers)])

    def __call__(self, patches: Patches, squares: Squares) -> list[Hidden]:
        """Returns the hidden states after the last block, and after the blocks in `deep`."""
        config, each = self.config, self.config.merge**2
        parts = np.divmod(np.arange(each), config.merge)
        row, column = (
            (config.merge * place[..., None] + part).reshape(place.shape[0], -1)
            for place, part in zip((squares.row, squares.column), parts, strict=True)
        )
        image, height, width = (
            jnp.repeat(values, each, axis=1)
            for values in (
                squares.image,
                config.merge * squares.height,
                config.merge * squares.width,
            )
        )
        x = self.patch_embed(patches)
        if config.side:
            x = x + self.of_places(row, column, height, width).astype(x.dtype)
        rope = Rope(dim=config.hidden_size // config.num_heads // 2, base=config.theta)
        by_side = [cos_sin_tables(rope, place) for place in (row, column)]
        cosines, sines = (jnp.concatenate(tables, -1) for tables in zip(*by_side, strict=True))
        turned = cosines, sines
        near = None
        if config.window:
            near = jnp.repeat(windows_of(squares, config.window), each, axis=1)
        found = []
        for number, block in enumerate(self.blocks):
            if near is None or number in config.full:
                x = block(x, turned, image, None)
            else:
                x = block(x, turned, near, each * config.window**2)
            if number in config.deep:
                found.append(x)
        return [x, *found]

    def of_places(self, row: Array, column: Array, height: Array, width: Array) -> Hidden:
        """Returns the vectors of places: the table, stretched to the image by linear means."""
        side, table = self.config.side, self.pos_embed.weight[...].astype(jnp.float32)

        def neighbours(place: Array, size: Array) -> list[tuple[Array, Array]]:
            at = place.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1)
            low = jnp.floor(at)
            share, low = at - low, low.astype(jnp.int32)
            return [(low, 1 - share), (jnp.minimum(low + 1, side - 1), share)]

        corners = [
            table[side * i + j] * (down * right)[..., None]
            for i, down in neighbours(row, height)
            for j, right in neighbours(column, width)
        ]
        return functools.reduce(jnp.add, corners)


class Merger(nnx.Module):
    """Squares of patches to vectors of the decoder's width, by an MLP.

    Attributes:
        whole: Whether a square is normalised as a whole, instead of each patch.
    """

    def __init__(
        self, config: QwenVisionConfig, own: DecoderOptions, make: ParameterMaker, *, whole: bool
    ):
        """Makes the parameters."""
        joined = config.hidden_size * config.merge**2
        self.whole, self.joined = whole, joined
        self.norm = make_norm(joined if whole else config.hidden_size, own, make)
        self.fc1 = Linear(joined, joined, make, bias=True)
        self.fc2 = Linear(joined, config.wide, make, bias=True)

    def __call__(self, x: Hidden) -> Vectors:
        """Returns the vectors of squares."""
        x = x if self.whole else self.norm(x)
        x = x.reshape(x.shape[0], -1, self.joined)
        x = self.norm(x) if self.whole else x
        return self.fc2(ACTIVATIONS["gelu"](self.fc1(x)))


class Projector(nnx.Module):
    """The mergers of the last hidden states, and of those of earlier blocks."""

    def __init__(self, config: QwenVisionConfig, own: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.merger = Merger(config, own, make, whole=False)
        self.deepstack_merger_list = nnx.List(
            [Merger(config, own, make, whole=True) for _ in config.deep]
        )


class QwenVision(nnx.Module):
    """Patches to vectors in place of their placeholders' embeddings."""

    def __init__(self, config: QwenVisionConfig, decoder: DecoderOptions, make: ParameterMaker):
        """Makes the parameters; blocks have the options of `decoder` that are not their own."""
        norm = "rms" if config.older else "layer"
        own = own_options(decoder, config, norm=norm, norm_eps=_EPS, mlp_bias=True)
        self.config = config
        self.tower = Tower(config, own, make)
        self.projector = Projector(config, own, make)

    def __call__(self, patches: Patches, squares: Squares) -> list[Vectors]:
        """Returns the vectors of all squares, and those to be added to the first layers' results.

        With windows, patches are in the order of windows within the tower.
        """
        window = self.config.window
        if not window:
            return self._merged(patches, squares)
        order = jnp.argsort(windows_of(squares, window), axis=1)

        def ordered(x: Array, order: Array) -> Array:
            at = order.reshape(*order.shape, *[1] * (x.ndim - 2))
            return jnp.take_along_axis(x, at, axis=1)

        together = patches.reshape(*order.shape, -1)
        patches = ordered(together, order).reshape(patches.shape)
        squares = Squares(*(ordered(values, order) for values in squares))
        back = jnp.argsort(order, axis=1)
        return [ordered(x, back) for x in self._merged(patches, squares)]

    def _merged(self, patches: Patches, squares: Squares) -> list[Vectors]:
        mergers = [self.projector.merger, *self.projector.deepstack_merger_list]
        hidden = self.tower(patches, squares)
        return [merge(x) for merge, x in zip(mergers, hidden, strict=True)]
