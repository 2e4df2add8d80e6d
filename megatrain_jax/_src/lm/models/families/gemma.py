"""Gemma 1 to 3, and Gemma 3's vision part.

The 1B model of Gemma 3 is only a decoder; all larger models also have a SigLIP tower and a
projector to the decoder's width.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.decoder_options import DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.families.patch_tower import Tower, TowerConfig, Vision
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.images import FixedImages
from megatrain_jax._src.lm.models.layers import RMSNorm

_SIGLIP = "siglip_vision_model"


def read_siglip(fields: Fields) -> TowerConfig:
    """Reads the `vision_config` of a checkpoint.

    Raises:
        TypeError: If a field has a wrong type.
        ValueError: If it is a different tower, or a field has a value that isn't supported.
    """
    kind = fields.take("model_type", _SIGLIP)
    if kind != _SIGLIP:
        raise ValueError(f"`model_type` = {kind!r} of `vision_config` isn't {_SIGLIP}")
    hf_common.refuse_unsupported(fields)
    fields.take("vision_use_head", True)  # images become the hidden states before that head
    config = TowerConfig(
        hidden_size=fields.integer("hidden_size", 768),
        intermediate_size=fields.integer("intermediate_size", 3072),
        num_layers=fields.integer("num_hidden_layers", 12),
        num_heads=fields.integer("num_attention_heads", 12),
        channels=fields.integer("num_channels", 3),
        image_size=fields.integer("image_size", 224),
        patch_size=fields.integer("patch_size", 16),
        activation=hf_common.read_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        norm_eps=fields.number("layer_norm_eps", 1e-6, least=0),
    )
    fields.finish()
    if config.hidden_size % config.num_heads or config.patch_size > config.image_size:
        raise ValueError(
            "`vision_config` must have `num_attention_heads` that divide `hidden_size`, and a "
            f"`patch_size` up to `image_size`, but has {config}"
        )
    return config


# Older checkpoints have the tower's tensors inside a further module.
_INSIDE = "vision_model."


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig(FixedImages):
    """The sizes of Gemma 3's vision part.

    Attributes:
        inside: Part of the names of the tower's tensors in the checkpoint.
    """

    inside: str = field(default="", compare=False)

    def make(self, decoder: DecoderOptions, make: ParameterMaker) -> Vision:
        """Makes the module."""
        return Vision(Tower(self.tower, decoder, make), Projector(self, decoder, make))

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

    def __init__(self, config: Gemma3VisionConfig, decoder: DecoderOptions, make: ParameterMaker):
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


def _gemma(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    # The released files mean its approximation, as in Transformers.
    return {"activation": "gelu_tanh"} if sizes["activation"] == "gelu" else {}


# Gemma 1 and CodeGemma: scaled embeddings, and norms with an offset. Transformers doesn't read the
# unread field.
GEMMA = Family(
    model_type="gemma",
    unread="hidden_activation",
    sizes={"kv_heads": 16, "head_dim": 256, "tied": True, "hidden_act": "gelu_pytorch_tanh"},
    always={"norm_offset": 1.0, "scale_embedding": True},
    more=_gemma,
)


def _gemma2(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "windows": hf_common.windows_by_step(fields, 2, hf_common.window(fields)),
        "attention_scale": fields.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
        "attention_softcap": fields.number("attn_logit_softcapping", 50.0, above=0, null=True),
        "final_softcap": fields.number("final_logit_softcapping", 30.0, above=0, null=True),
    }


# Transformers reads `hidden_activation`; early checkpoints have a different `hidden_act`.
_GEMMA_SIZES: dict[str, Any] = {
    "kv_heads": 4,
    "head_dim": 256,
    "tied": True,
    "hidden_act": "gelu_pytorch_tanh",
    "act_name": "hidden_activation",
    "act_null": True,
}
# Gemma 2: capped scores and logits, four norms per layer, a window in every other layer.
GEMMA2 = Family(
    model_type="gemma2",
    sizes=_GEMMA_SIZES,
    always={"norm_offset": 1.0, "sandwich_norms": True, "scale_embedding": True},
    more=_gemma2,
)


def _gemma3(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    second = fields.integer("sliding_window_pattern", 6)
    step = fields.integer("_sliding_window_pattern", None) or second
    full = {"rope_theta": fields.take("rope_theta", 1e6)}
    local = {"rope_theta": fields.take("rope_local_base_freq", 1e4)}
    return {
        **hf_common.two_ropes(fields, sizes["head_dim"], full, local, max_length=131_072),
        "windows": hf_common.windows_by_step(fields, step, hf_common.window(fields)),
        "attention_scale": fields.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
        "final_softcap": fields.number("final_logit_softcapping", None, above=0),
    }


# Gemma 3: layers with a window have their own rotary embedding. Configurations of checkpoints with
# a vision tower omit two of the sizes.
GEMMA3 = Family(
    model_type="gemma3_text",
    scorer="Gemma3TextForSequenceClassification",
    has_tagger=False,
    sizes={**_GEMMA_SIZES, "vocab_size": 262_208, "num_attention_heads": 8},
    rope=None,
    always={**GEMMA2.always, "qk_norm": True},
    more=_gemma3,
)
GEMMA3_MULTIMODAL = multimodal_family(
    GEMMA3,
    model_type="gemma3",
    kept=("vision_tower.", "multi_modal_projector."),
    beside="mm_tokens_per_image boi_token_index eoi_token_index image_token_index",
    tied=True,
    vision=read_gemma3_vision,
)
