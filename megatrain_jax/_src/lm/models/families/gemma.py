"""Gemma 1 to 3, and Gemma 3's vision part.

The 1B model of Gemma 3 is only a decoder; all larger models also have a SigLIP tower (a transformer
over the patches of an image, arXiv 2303.15343), and a projector to the decoder's width. The tower's
attributes are named as in checkpoints, except `blocks`, which are `encoder.layers` there: patterns
for the decoder's layers, such as `layers/.*/q_proj`, don't match the tower.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.causal_attention import full_attention
from megatrain_jax._src.lm.models.decoder_options import (
    DecoderOptions,
    ParameterMaker,
)
from megatrain_jax._src.lm.models.family import Family, multimodal_family
from megatrain_jax._src.lm.models.hf_common import Fields
from megatrain_jax._src.lm.models.images import FixedImages
from megatrain_jax._src.lm.models.layers import BiasedMLP, LayerNorm, Linear, RMSNorm

_SIGLIP = "siglip_vision_model"
Hidden = Float[Array, "images patches width"]


@dataclass(frozen=True, kw_only=True)
class SiglipConfig:
    """The sizes of a SigLIP tower.

    Attributes:
        hidden_size: Width of the hidden states.
        intermediate_size: Width inside an MLP.
        num_layers: Number of layers.
        num_heads: Number of heads; divides `hidden_size`.
        channels: Channels of an image.
        image_size: Height and width of an image, in pixels.
        patch_size: Height and width of a patch.
        activation: See `DecoderConfig`.
        norm_eps: Number that norms add to the variance.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    channels: int
    image_size: int
    patch_size: int
    activation: str
    norm_eps: float

    @property
    def patches_per_side(self) -> int:
        """The number of patches along a side of an image."""
        return self.image_size // self.patch_size


def read_siglip(fields: Fields) -> SiglipConfig:
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
    config = SiglipConfig(
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


class PatchEmbedding(nnx.Module):
    """A product with each patch: a convolution without overlap, (out, channels, size, size)."""

    def __init__(self, config: SiglipConfig, make: ParameterMaker):
        """Makes the parameters."""
        size = config.patch_size
        self.size, self.sides = size, config.patches_per_side
        self.weight = make.weight(config.hidden_size, config.channels, size, size)
        self.bias = make.constant(0.0, config.hidden_size)

    def __call__(self, pixels: Float[Array, "images channels height width"]) -> Hidden:
        """Embeds the patches of each image, row by row."""
        images, channels, *_ = pixels.shape
        used = self.sides * self.size
        split = pixels[:, :, :used, :used].reshape(
            images, channels, self.sides, self.size, self.sides, self.size
        )
        patches = split.transpose(0, 2, 4, 1, 3, 5).reshape(images, self.sides**2, -1)
        weight = self.weight[...]
        matrix = weight.reshape(weight.shape[0], -1)
        products = jax.lax.dot_general(
            patches.astype(matrix.dtype), matrix, (((2,), (1,)), ((), ()))
        )
        return products + self.bias[...]


class PositionEmbedding(nnx.Module):
    """A vector for each place of a patch."""

    def __init__(self, config: SiglipConfig, make: ParameterMaker):
        """Makes the vectors."""
        self.weight = make.weight(config.patches_per_side**2, config.hidden_size)


class Embeddings(nnx.Module):
    """The hidden states that the first layer reads."""

    def __init__(self, config: SiglipConfig, make: ParameterMaker):
        """Makes the parameters."""
        self.patch_embedding = PatchEmbedding(config, make)
        self.position_embedding = PositionEmbedding(config, make)

    def __call__(self, pixels: Float[Array, "images channels height width"]) -> Hidden:
        """Embeds patches and adds the vectors of their places."""
        return self.patch_embedding(pixels) + self.position_embedding.weight[...]


class SiglipAttention(nnx.Module):
    """Attention of every patch to all patches of its image."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.num_heads, wide = config.num_heads, config.hidden_size
        self.q_proj = Linear(wide, wide, make, bias=True)
        self.k_proj = Linear(wide, wide, make, bias=True)
        self.v_proj = Linear(wide, wide, make, bias=True)
        self.out_proj = Linear(wide, wide, make, bias=True)

    def __call__(self, x: Hidden) -> Hidden:
        """Mixes the patches of each image."""
        q, k, v = (
            project(x).reshape(*x.shape[:2], self.num_heads, -1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(full_attention(q, k, v).reshape(x.shape))


class SiglipBlock(nnx.Module):
    """Attention, then an MLP, each after a norm and with a residual connection."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.layer_norm1 = LayerNorm(config.hidden_size, config, make)
        self.self_attn = SiglipAttention(config, make)
        self.layer_norm2 = LayerNorm(config.hidden_size, config, make)
        self.mlp = BiasedMLP(config, make)

    def __call__(self, x: Hidden) -> Hidden:
        """Returns the layer's result."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SiglipTower(nnx.Module):
    """Images to the hidden states of their patches."""

    def __init__(self, config: SiglipConfig, decoder: DecoderOptions, make: ParameterMaker):
        """Makes the parameters; layers have the options of `decoder` that are not SigLIP's own."""
        own = replace(
            decoder,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            activation=config.activation,
            norm_eps=config.norm_eps,
            norm_offset=0.0,
            norm_bias=True,
        )
        self.embeddings = Embeddings(config, make)
        self.blocks = nnx.List([SiglipBlock(own, make) for _ in range(config.num_layers)])
        self.post_layernorm = LayerNorm(config.hidden_size, own, make)

    def __call__(self, pixels: Float[Array, "images channels height width"]) -> Hidden:
        """Returns the hidden states of all patches, row by row, after the last norm."""
        x = self.embeddings(pixels)
        for block in self.blocks:
            x = block(x)
        return self.post_layernorm(x)


# Older checkpoints have the tower's tensors inside a further module.
_INSIDE = "vision_model."


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig(FixedImages):
    """The sizes of Gemma 3's vision part.

    Attributes:
        tower: The sizes of its tower.
        inside: Part of the names of the tower's tensors in the checkpoint.
    """

    tower: SiglipConfig
    inside: str = field(default="", compare=False)

    def make(self, decoder: DecoderOptions, make: ParameterMaker) -> "Gemma3Vision":
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


class Gemma3Vision(nnx.Module):
    """Images to vectors in place of their placeholders' embeddings."""

    def __init__(self, config: Gemma3VisionConfig, decoder: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.tower = SiglipTower(config.tower, decoder, make)
        self.projector = Projector(config, decoder, make)

    def __call__(
        self, pixels: Float[Array, "images channels height width"]
    ) -> Float[Array, "images vectors wide"]:
        """Returns the vectors of each image."""
        return self.projector(self.tower(pixels))


def _gemma(fields: Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    # The released files mean its approximation, as in Transformers.
    return {"activation": "gelu_tanh"} if sizes["activation"] == "gelu" else {}


# Gemma 1 and CodeGemma: scaled embeddings, and norms with an offset. Transformers doesn't read the
# unread field.
GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
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
    architecture="Gemma2ForCausalLM",
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


# Gemma 3: layers with a window have their own rotary embedding. Transformers doesn't apply the
# neutral field either; configurations of checkpoints with a vision tower omit two of the sizes.
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    scorer="Gemma3TextForSequenceClassification",
    neutral={"attn_logit_softcapping": None},
    sizes={**_GEMMA_SIZES, "vocab_size": 262_208, "num_attention_heads": 8},
    rope=None,
    always={**GEMMA2.always, "qk_norm": True},
    more=_gemma3,
)
GEMMA3_MULTIMODAL = multimodal_family(
    GEMMA3,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    kept=("vision_tower.", "multi_modal_projector."),
    beside="mm_tokens_per_image boi_token_index eoi_token_index image_token_index",
    tied=True,
    vision=read_gemma3_vision,
)
