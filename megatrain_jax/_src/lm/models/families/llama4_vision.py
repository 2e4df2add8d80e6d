"""The vision part of Llama 4: tiles of one size, as in InternVL.

A tower like SigLIP's with rotary embeddings, a norm before its blocks, and a further token behind
the patches. Squares of a tile's patches become one vector. Attributes are named as in checkpoints,
except those of `patch_tower` and the modules `tower` and `projector`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.decoder_options import ACTIVATIONS, DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.families import patch_tower
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.images import FixedImages
from megatrain_jax._src.lm.models.layers import LayerNorm, Linear
from megatrain_jax._src.lm.models.rotary import CosSin, Rope, cos_sin_tables

# Names of the parts of blocks in the files.
_NAMES = {
    "blocks": "model.layers",
    "layer_norm1": "input_layernorm",
    "layer_norm2": "post_attention_layernorm",
    "out_proj": "o_proj",
}
_ACTIVATION = ACTIVATIONS["gelu"]  # Transformers doesn't read `hidden_act`
_EPS = 1e-5  # nor `norm_eps`


@dataclass(frozen=True, kw_only=True)
class Llama4VisionConfig(FixedImages):
    """The sizes of Llama 4's vision part.

    Attributes:
        merge: Patches along a side of a square, which becomes one vector.
        wide: Width of vectors before the last product.
        theta: Base of the wavelengths of the rotary embedding.
    """

    merge: int
    wide: int
    theta: float

    def make(self, decoder: DecoderOptions, make: ParameterMaker) -> patch_tower.Vision:
        """Makes the module."""
        return patch_tower.Vision(Tower(self, decoder, make), Projector(self, decoder, make))

    def tensor_name(self, path: tuple[str, ...]) -> str:
        """Returns the name of a parameter in the checkpoint."""
        part, *rest = path
        if part == "projector":
            inside = "vision_model.vision_adapter" if rest[0] == "mlp" else "multi_modal_projector"
            return ".".join([inside, *rest])
        return ".".join(["vision_model", *(_NAMES.get(name, name) for name in rest)])


def read_llama4_vision(config: Mapping[str, Any]) -> Llama4VisionConfig:
    """Reads the vision part of a checkpoint.

    Args:
        config: The object in its `config.json`.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If a field has a value that isn't supported.
    """
    outer = Fields(config)
    fields = Fields(outer.mapping("vision_config"))
    fields.neutral(model_type="llama4_vision_model", projector_dropout=0.0)
    hf_common.refuse_unsupported(fields)
    # Transformers doesn't read these.
    unread = "hidden_act norm_eps multi_modal_projector_bias vision_feature_layer"
    for name in (*unread.split(), "vision_feature_select_strategy"):
        fields.take(name, None)
    outside = {"rope_theta": fields.take("rope_theta", 10_000.0)}
    turned = Fields(outside | hf_common.rope_parameters(fields))
    turned.neutral(rope_type="default")
    tower = patch_tower.TowerConfig(
        hidden_size=fields.integer("hidden_size", 768),
        intermediate_size=fields.integer("intermediate_size", 5632),
        num_layers=fields.integer("num_hidden_layers", 34),
        num_heads=fields.integer("num_attention_heads", 16),
        channels=fields.integer("num_channels", 3),
        image_size=fields.integer("image_size", 448),
        patch_size=fields.integer("patch_size", 14),
        activation="gelu",
        norm_eps=_EPS,
    )
    merge = int(1 / fields.number("pixel_shuffle_ratio", 0.5, above=0))
    given = {"vision_output_dim": 7680, "projector_input_dim": 4096, "projector_output_dim": 4096}
    widths = {name: fields.integer(name, default) for name, default in given.items()}
    fields.finish()
    _check(tower, merge, widths)
    return Llama4VisionConfig(
        token=outer.integer("image_token_index", 200_092, least=0),
        tokens_per_image=(tower.patches_per_side // merge) ** 2,
        pixels=(tower.channels, tower.image_size, tower.image_size),
        mutual=False,
        tower=tower,
        merge=merge,
        wide=widths["vision_output_dim"],
        theta=turned.number("rope_theta", 10_000.0, above=0),
    )


def _check(tower: patch_tower.TowerConfig, merge: int, widths: dict[str, int]) -> None:
    head_dim, rest = divmod(tower.hidden_size, tower.num_heads)
    if rest or head_dim % 4 or tower.image_size % tower.patch_size:
        raise ValueError(
            "`vision_config` must have `num_attention_heads` that divide `hidden_size` into heads "
            "of a multiple of 4, and a `patch_size` that divides `image_size`, but has "
            f"{tower}"
        )
    if not merge or tower.patches_per_side % merge:
        raise ValueError(
            f"`pixel_shuffle_ratio` of `vision_config` makes no squares of {merge} × {merge} of "
            f"{tower.patches_per_side} × {tower.patches_per_side} patches"
        )
    if tower.hidden_size * merge**2 != tower.intermediate_size:
        raise ValueError(
            f"`intermediate_size` = {tower.intermediate_size} of `vision_config` must be that of "
            f"{merge} × {merge} patches, {tower.hidden_size * merge**2}"
        )
    if len(set(widths.values())) > 1:
        raise ValueError(f"{', '.join(widths)} of `vision_config` must be equal, but are {widths}")


class PatchEmbedding(nnx.Module):
    """A product with each patch."""

    def __init__(self, tower: patch_tower.TowerConfig, make: ParameterMaker):
        """Makes the parameters."""
        self.size, self.sides = tower.patch_size, tower.patches_per_side
        self.linear = Linear(tower.channels * self.size**2, tower.hidden_size, make)

    def __call__(self, pixels: patch_tower.Pixels) -> patch_tower.Hidden:
        """Embeds the patches of each tile, row by row."""
        patches = patch_tower.patches_of(pixels, self.size, self.sides)
        return self.linear(patches.astype(self.linear.weight[...].dtype))


class Tower(nnx.Module):
    """Tiles to the hidden states of their patches."""

    def __init__(self, config: Llama4VisionConfig, decoder: DecoderOptions, make: ParameterMaker):
        """Makes the parameters; blocks have the options of `decoder` that are not their own."""
        tower = config.tower
        own = patch_tower.own_options(
            decoder, tower, norm="layer", norm_eps=_EPS, qkv_bias=True, qk_norm=False
        )
        self.sides = tower.patches_per_side
        self.rope = Rope(dim=tower.hidden_size // tower.num_heads // 2, base=config.theta)
        self.patch_embedding = PatchEmbedding(tower, make)
        self.class_embedding = make.weight(tower.hidden_size)
        self.positional_embedding_vlm = make.weight(self.sides**2 + 1, tower.hidden_size)
        self.layernorm_pre = LayerNorm(tower.hidden_size, own, make)
        self.blocks = nnx.List(
            [patch_tower.Block(own, None, make) for _ in range(tower.num_layers)]
        )
        self.layernorm_post = LayerNorm(tower.hidden_size, own, make)

    def __call__(self, pixels: patch_tower.Pixels) -> patch_tower.Hidden:
        """Returns the hidden states of all patches, row by row, after the last norm."""
        x = self.patch_embedding(pixels)
        last = jnp.broadcast_to(self.class_embedding[...], (len(x), 1, x.shape[2]))
        x = jnp.concatenate([x, last], axis=1) + self.positional_embedding_vlm[...]
        x, turned = self.layernorm_pre(x), self.turned()
        for block in self.blocks:
            x = block(x, turned)
        return self.layernorm_post(x)[:, :-1]

    def turned(self) -> CosSin:
        """The rotary embedding: half of the pairs by columns, half by rows; from 1 in a tile.

        The further token is in place 0: it does not turn.
        """
        rows, columns = jnp.divmod(jnp.arange(self.sides**2), self.sides)
        places = (jnp.append(place + 1, 0)[None] for place in (columns, rows))
        tables = [cos_sin_tables(self.rope, place) for place in places]
        cosines, sines = (jnp.concatenate(both, axis=-1) for both in zip(*tables, strict=True))
        return cosines, sines


class Adapter(nnx.Module):
    """Two products without biases, each with an activation behind it."""

    def __init__(self, config: Llama4VisionConfig, make: ParameterMaker):
        """Makes the parameters."""
        self.fc1 = Linear(config.tower.intermediate_size, config.wide, make)
        self.fc2 = Linear(config.wide, config.wide, make)

    def __call__(self, x: Float[Array, "tiles squares joined"]) -> Array:
        """Returns the vectors of squares."""
        return _ACTIVATION(self.fc2(_ACTIVATION(self.fc1(x))))


class Projector(nnx.Module):
    """Squares of patches to vectors of the decoder's width."""

    def __init__(self, config: Llama4VisionConfig, decoder: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.merge = config.merge
        self.mlp = Adapter(config, make)
        self.linear_1 = Linear(config.wide, decoder.hidden_size, make)

    def __call__(self, x: patch_tower.Hidden) -> Float[Array, "tiles squares wide"]:
        """Returns the vectors of each tile."""
        return self.linear_1(self.mlp(patch_tower.joined_squares(x, self.merge)))
