"""Gemma 3's vision part: a SigLIP tower, and a projector to the decoder's width."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.layers import RMSNorm
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker
from megatrain_jax._src.lm.models.siglip import SiglipConfig, SiglipTower, read_siglip
from megatrain_jax._src.lm.models.vision import VisionConfig

if TYPE_CHECKING:  # avoids a cycle: configurations contain vision parts
    from megatrain_jax._src.lm.models.config import DecoderConfig

# Older checkpoints have the tower's tensors inside a further module.
_INSIDE = "vision_model."


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig(VisionConfig):
    """The sizes of Gemma 3's vision part.

    Attributes:
        tower: The sizes of its tower.
        inside: Part of the names of the tower's tensors in the checkpoint.
    """

    tower: SiglipConfig
    inside: str = field(default="", compare=False)

    def make(self, decoder: "DecoderConfig", make: ParameterMaker) -> "Gemma3Vision":
        """Makes the module."""
        return Gemma3Vision(self, decoder, make)

    def as_in(self, names: frozenset[str]) -> "Gemma3VisionConfig":
        """Returns the configuration for a checkpoint whose tensors have these names."""
        older = any(name.startswith(f"vision_tower.{_INSIDE}") for name in names)
        return replace(self, inside=_INSIDE if older else "")

    def tensor_name(self, path: tuple[str, ...]) -> str:
        """Returns the name of a parameter in the checkpoint."""
        part, *rest = path
        if part == "projector":
            return ".".join(["multi_modal_projector", *rest])
        rest = ["encoder.layers", *rest[1:]] if rest[0] == "blocks" else rest
        return f"vision_tower.{self.inside}{'.'.join(rest)}"


def read_gemma3_vision(config: Mapping[str, Any]) -> Gemma3VisionConfig:
    """Reads the vision part of a checkpoint.

    Args:
        config: The object in its `config.json`.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If a field has a value that isn't supported.
    """
    fields = Fields(config)
    tower = read_siglip(Fields(fields.mapping("vision_config")))
    count = fields.integer("mm_tokens_per_image", 256)
    side = math.isqrt(count)
    if side**2 != count or tower.patches_per_side % side:
        raise ValueError(
            f"`mm_tokens_per_image` = {count} must be the square of a number that divides the "
            f"{tower.patches_per_side} patches along a side of an image"
        )
    token = fields.integer("image_token_index", 262_144, least=0)
    vocabulary = Fields(fields.mapping("text_config")).integer("vocab_size", 262_208)
    if token >= vocabulary:
        raise ValueError(f"`image_token_index` = {token} must be below `vocab_size`, {vocabulary}")
    return Gemma3VisionConfig(
        token=token,
        tokens_per_image=count,
        pixels=(tower.channels, tower.image_size, tower.image_size),
        mutual=True,
        tower=tower,
    )


class Projector(nnx.Module):
    """Means over squares of patches, normalised and multiplied to the decoder's width."""

    def __init__(self, config: Gemma3VisionConfig, decoder: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        wide = config.tower.hidden_size
        self.patches, self.side = config.tower.patches_per_side, math.isqrt(config.tokens_per_image)
        norm = replace(decoder, norm_eps=config.tower.norm_eps)
        self.mm_soft_emb_norm = RMSNorm(wide, norm, make)
        self.mm_input_projection_weight = make.weight(wide, decoder.hidden_size)

    def __call__(
        self, x: Float[Array, "images patches width"]
    ) -> Float[Array, "images vectors wide"]:
        """Returns the vectors of each image."""
        images, _, width = x.shape
        square = self.patches // self.side
        squares = x.reshape(images, self.side, square, self.side, square, width)
        means = jnp.mean(squares, axis=(2, 4)).reshape(images, -1, width)
        return self.mm_soft_emb_norm(means) @ self.mm_input_projection_weight[...]


class Gemma3Vision(nnx.Module):
    """Images to vectors in place of their placeholders' embeddings."""

    def __init__(self, config: Gemma3VisionConfig, decoder: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters."""
        self.tower = SiglipTower(config.tower, decoder, make)
        self.projector = Projector(config, decoder, make)

    def __call__(
        self, pixels: Float[Array, "images channels height width"]
    ) -> Float[Array, "images vectors wide"]:
        """Returns the vectors of each image."""
        return self.projector(self.tower(pixels))
