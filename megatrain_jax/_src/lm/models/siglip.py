"""SigLIP's vision tower: a transformer over the patches of an image (arXiv 2303.15343).

Attributes are named as in checkpoints, except `blocks`, which are `encoder.layers` there: patterns
for the decoder's layers, such as `layers/.*/q_proj`, don't match the tower.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models import hf_common
from megatrain_jax._src.lm.models.hf_fields import Fields
from megatrain_jax._src.lm.models.image_attention import full_attention
from megatrain_jax._src.lm.models.layers import BiasedMLP, LayerNorm, Linear
from megatrain_jax._src.lm.models.parameter_maker import ParameterMaker

if TYPE_CHECKING:  # avoids a cycle: configurations are read by families, and these use towers
    from megatrain_jax._src.lm.models.config import DecoderConfig

MODEL_TYPE = "siglip_vision_model"
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
    kind = fields.take("model_type", MODEL_TYPE)
    if kind != MODEL_TYPE:
        raise ValueError(f"`model_type` = {kind!r} of `vision_config` isn't {MODEL_TYPE}")
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

    def __init__(self, config: SiglipConfig, make: ParameterMaker):
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

    def __init__(self, config: SiglipConfig, norms: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters; `norms` has the options of the norms."""
        self.layer_norm1 = LayerNorm(config.hidden_size, norms, make)
        self.self_attn = SiglipAttention(config, make)
        self.layer_norm2 = LayerNorm(config.hidden_size, norms, make)
        self.mlp = BiasedMLP(config, make)

    def __call__(self, x: Hidden) -> Hidden:
        """Returns the layer's result."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SiglipTower(nnx.Module):
    """Images to the hidden states of their patches."""

    def __init__(self, config: SiglipConfig, decoder: "DecoderConfig", make: ParameterMaker):
        """Makes the parameters; norms have the options of `decoder` that are not SigLIP's own."""
        norms = replace(decoder, norm_eps=config.norm_eps, norm_offset=0.0, norm_bias=True)
        self.embeddings = Embeddings(config, make)
        self.blocks = nnx.List([SiglipBlock(config, norms, make) for _ in range(config.num_layers)])
        self.post_layernorm = LayerNorm(config.hidden_size, norms, make)

    def __call__(self, pixels: Float[Array, "images channels height width"]) -> Hidden:
        """Returns the hidden states of all patches, row by row, after the last norm."""
        x = self.embeddings(pixels)
        for block in self.blocks:
            x = block(x)
        return self.post_layernorm(x)
