"""InternVL: a decoder of another family beside a vision tower, InternViT.

An image is resized to a grid of tiles of one size, and a tile that shows all of it (arXiv
2404.16821). In batches, tiles are images. Squares of a tile's patches become one vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.decoder_options import ACTIVATIONS, DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.families.dense import LLAMA, QWEN2, QWEN3
from megatrain_jax._src.lm.models.families.patch_tower import (
    Tower,
    TowerConfig,
    Vision,
    joined_squares,
)
from megatrain_jax._src.lm.models.family import multimodal_family
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.images import FixedImages
from megatrain_jax._src.lm.models.layers import LayerNorm, Linear

# Names of the tower's parts in the files.
_NAMES = {
    "blocks": "encoder.layer",
    "patch_embedding": "patch_embeddings.projection",
    "self_attn": "attention",
    "out_proj": "projection_layer",
    "layer_norm1": "layernorm_before",
    "layer_norm2": "layernorm_after",
}


@dataclass(frozen=True, kw_only=True)
class InternVisionConfig(FixedImages):
    """The sizes of InternVL's vision part.

    Attributes:
        merge: Patches along a side of a square, which becomes one vector.
        activation: Activation of the projector.
    """

    merge: int
    activation: str

    def make(self, decoder: DecoderOptions, make: ParameterMaker) -> Vision:
        """Makes the module."""
        return Vision(Tower(self.tower, decoder, make), Projector(self, decoder, make))

    def tensor_name(self, path: tuple[str, ...]) -> str:
        """Returns the name of a parameter in the checkpoint."""
        part, *rest = path
        if part == "projector":
            return ".".join(["multi_modal_projector", *rest])
        return ".".join(["vision_tower", *(_NAMES.get(name, name) for name in rest)])


def read_internvl_vision(config: Mapping[str, Any]) -> InternVisionConfig:
    """Reads the vision part of a checkpoint.

    Args:
        config: The object in its `config.json`.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If a field has a value that isn't supported.
    """
    outer = Fields(config)
    tower = _read_tower(Fields(outer.mapping("vision_config")))
    outer.neutral(vision_feature_layer=-1, vision_feature_select_strategy="default")
    ratio = outer.number("downsample_ratio", 0.5, above=0)
    merge = int(1 / ratio)
    count = outer.integer("image_seq_length", 256)
    if tower.patches_per_side % merge or (tower.patches_per_side // merge) ** 2 != count:
        raise ValueError(
            f"`downsample_ratio` = {ratio} makes no `image_seq_length` = {count} vectors of "
            f"{tower.patches_per_side} × {tower.patches_per_side} patches"
        )
    return InternVisionConfig(
        token=outer.integer("image_token_id", 151_667, least=0),
        tokens_per_image=count,
        pixels=(tower.channels, tower.image_size, tower.image_size),
        mutual=False,
        tower=tower,
        merge=merge,
        activation=hf_common.read_activation(outer, "projector_hidden_act", "gelu"),
    )


def _read_tower(fields: Fields) -> TowerConfig:
    hf_common.refuse_unsupported(fields)
    fields.take("initializer_factor", None)
    fields.neutral(model_type="internvl_vision", use_absolute_position_embeddings=True)
    fields.neutral(use_mean_pooling=True)  # without a norm behind the blocks
    norms = {"layer_norm": "layer", "rms_norm": "rms"}
    if (norm := fields.take("norm_type", "layer_norm")) not in norms:
        raise ValueError(f"`norm_type` = {norm!r} must be one of {', '.join(norms)}")
    config = TowerConfig(
        hidden_size=fields.integer("hidden_size", 1024),
        intermediate_size=fields.integer("intermediate_size", 4096),
        num_layers=fields.integer("num_hidden_layers", 24),
        num_heads=fields.integer("num_attention_heads", 16),
        channels=fields.integer("num_channels", 3),
        image_size=_side(fields, "image_size", 448),
        patch_size=_side(fields, "patch_size", 14),
        activation=hf_common.read_activation(fields, "hidden_act", "gelu"),
        norm_eps=fields.number("layer_norm_eps", 1e-6, least=0),
        norm="rms" if norm == "rms_norm" else "layer",
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        scale=fields.number("layer_scale_init_value", 0.1),
        first=True,
    )
    fields.finish()
    if config.hidden_size % config.num_heads or config.image_size % config.patch_size:
        raise ValueError(
            "`vision_config` must have `num_attention_heads` that divide `hidden_size`, and a "
            f"`patch_size` that divides `image_size`, but has {config}"
        )
    return config


def _side(fields: Fields, name: str, default: int) -> int:
    """A side of a square, given as a number or as height and width."""
    if not isinstance(fields.values.get(name), list | tuple):
        return fields.integer(name, default)
    sides = fields.listed(name, int, "integers")
    if sides is None or len(sides) != 2 or sides[0] != sides[1] or sides[0] < 1:
        raise ValueError(f"`{name}` = {sides} of `vision_config` must be a square")
    return sides[0]


class Projector(nnx.Module):
    """Squares of patches to vectors of the decoder's width, by an MLP."""

    def __init__(self, config: InternVisionConfig, decoder: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        tower, merge = config.tower, config.merge
        self.merge = merge
        self.activation = ACTIVATIONS[config.activation]
        joined, wide = tower.hidden_size * merge**2, decoder.hidden_size
        norm = replace(decoder, norm_eps=1e-5, norm_offset=0.0, norm_bias=True)
        self.layer_norm = LayerNorm(joined, norm, make)
        self.linear_1 = Linear(joined, wide, make, bias=True)
        self.linear_2 = Linear(wide, wide, make, bias=True)

    def __call__(
        self, x: Float[Array, "tiles patches width"]
    ) -> Float[Array, "tiles vectors wide"]:
        """Returns the vectors of each tile."""
        joined = self.layer_norm(joined_squares(x, self.merge))
        return self.linear_2(self.activation(self.linear_1(joined)))


INTERNVL = multimodal_family(
    QWEN2,
    QWEN3,
    LLAMA,
    model_type="internvl",
    class_name="InternVLForConditionalGeneration",
    kept=("vision_tower.", "multi_modal_projector."),
    beside="image_token_id image_seq_length downsample_ratio projector_hidden_act "
    "vision_feature_layer vision_feature_select_strategy",
    tied=True,
    vision=read_internvl_vision,
)
