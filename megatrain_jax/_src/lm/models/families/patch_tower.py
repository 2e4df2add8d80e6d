"""A vision tower for images of one size: a transformer over the patches of an image.

SigLIP (arXiv 2303.15343) has a vector for each place, and a norm behind the blocks. InternViT
(arXiv 2312.14238) has one more token, and factors of what a block adds. Attributes are as in SigLIP
checkpoints, except `blocks`, which are `encoder.layers` there: patterns for the decoder's layers,
such as `layers/.*/q_proj`, don't match the tower.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from megatrain_jax._src.lm.models.causal_attention import full_attention
from megatrain_jax._src.lm.models.decoder_options import DecoderOptions, ParameterMaker
from megatrain_jax._src.lm.models.layers import BiasedMLP, LayerNorm, Linear, RMSNorm, make_norm
from megatrain_jax._src.lm.models.rotary import CosSin, rotate

Hidden = Float[Array, "images patches width"]
Pixels = Float[Array, "images channels height width"]


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """The sizes of a tower.

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
        norm: Kind of the norms; see `DecoderConfig`.
        qkv_bias: Whether queries, keys and values have a bias.
        qk_norm: Whether queries and keys are normalised, all heads together.
        scale: Fresh factor of what a block adds, which is trained; None for no factors.
        first: Whether a further token precedes the patches; without it, a norm follows the blocks.
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
    norm: Literal["rms", "layer"] = "layer"
    qkv_bias: bool = True
    qk_norm: bool = False
    scale: float | None = None
    first: bool = False

    @property
    def patches_per_side(self) -> int:
        """The number of patches along a side of an image."""
        return self.image_size // self.patch_size


def own_options(decoder: DecoderOptions, tower: Any, **more: Any) -> DecoderOptions:
    """Returns the options of a tower's blocks: those of the decoder that are not their own.

    Args:
        decoder: The decoder.
        tower: The tower's sizes.
        **more: Further options of the blocks.
    """
    names = ("hidden_size", "intermediate_size", "num_heads", "activation")
    sizes = {name: getattr(tower, name) for name in names} | {"num_kv_heads": tower.num_heads}
    norms = {"norm_offset": 0.0, "norm_in_fp32": False, "norm_bias": True}
    return replace(decoder, **{**sizes, **norms, **more})


def patches_of(pixels: Pixels, size: int, sides: int) -> Float[Array, "images patches numbers"]:
    """Returns the patches of images, row by row.

    Args:
        pixels: The images. The pixels behind the last whole patch of a side are not used.
        size: Pixels along a side of a patch.
        sides: Patches along a side of an image.
    """
    images, channels, *_ = pixels.shape
    used = sides * size
    split = pixels[:, :, :used, :used].reshape(images, channels, sides, size, sides, size)
    return split.transpose(0, 2, 4, 1, 3, 5).reshape(images, sides**2, -1)


def joined_squares(x: Hidden, merge: int) -> Float[Array, "images squares joined"]:
    """Returns the hidden states of each square of patches after each other, row by row.

    Args:
        x: The hidden states of images as wide as high.
        merge: Patches along a side of a square.
    """
    count = math.isqrt(x.shape[1]) // merge
    squares = x.reshape(len(x), count, merge, count, merge, -1).transpose(0, 1, 3, 2, 4, 5)
    return squares.reshape(len(x), count**2, -1)


class PatchEmbedding(nnx.Module):
    """A product with each patch: a convolution without overlap, (out, channels, size, size)."""

    def __init__(self, config: TowerConfig, make: ParameterMaker):
        """Makes the parameters."""
        size = config.patch_size
        self.size, self.sides = size, config.patches_per_side
        self.weight = make.weight(config.hidden_size, config.channels, size, size)
        self.bias = make.constant(0.0, config.hidden_size)

    def __call__(self, pixels: Pixels) -> Hidden:
        """Embeds the patches of each image, row by row."""
        patches = patches_of(pixels, self.size, self.sides)
        weight = self.weight[...]
        matrix = weight.reshape(weight.shape[0], -1)
        products = jax.lax.dot_general(
            patches.astype(matrix.dtype), matrix, (((2,), (1,)), ((), ()))
        )
        return products + self.bias[...]


class PositionEmbedding(nnx.Module):
    """A vector for each place of a patch."""

    def __init__(self, config: TowerConfig, make: ParameterMaker):
        """Makes the vectors."""
        self.weight = make.weight(config.patches_per_side**2, config.hidden_size)


class Embeddings(nnx.Module):
    """The hidden states that the first layer reads."""

    def __init__(self, config: TowerConfig, make: ParameterMaker):
        """Makes the parameters."""
        self.patch_embedding = PatchEmbedding(config, make)
        self.first = config.first
        if config.first:
            places = config.patches_per_side**2 + 1
            self.cls_token = make.weight(1, 1, config.hidden_size)
            self.position_embeddings = make.weight(1, places, config.hidden_size)
        else:
            self.position_embedding = PositionEmbedding(config, make)

    def __call__(self, pixels: Pixels) -> Hidden:
        """Embeds patches and adds the vectors of their places."""
        x = self.patch_embedding(pixels)
        if not self.first:
            return x + self.position_embedding.weight[...]
        first = jnp.broadcast_to(self.cls_token[...], (len(x), 1, x.shape[2]))
        return jnp.concatenate([first, x], axis=1) + self.position_embeddings[...]


class PatchAttention(nnx.Module):
    """Attention of every patch to all patches of its image."""

    def __init__(self, config: DecoderOptions, make: ParameterMaker):
        """Makes the parameters."""
        self.num_heads, wide = config.num_heads, config.hidden_size
        self.q_proj = Linear(wide, wide, make, bias=config.qkv_bias)
        self.k_proj = Linear(wide, wide, make, bias=config.qkv_bias)
        self.v_proj = Linear(wide, wide, make, bias=config.qkv_bias)
        self.out_proj = Linear(wide, wide, make, bias=True)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            norm = replace(config, norm_eps=1e-6)
            self.q_norm, self.k_norm = RMSNorm(wide, norm, make), RMSNorm(wide, norm, make)

    def __call__(self, x: Hidden, turned: CosSin | None = None) -> Hidden:
        """Mixes the patches of each image; `turned` is their rotary embedding, if there is one."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.reshape(*x.shape[:2], self.num_heads, -1) for y in (q, k, v))
        if turned is not None:
            q, k = (rotate(y, turned, interleaved=True) for y in (q, k))
        return self.out_proj(full_attention(q, k, v).reshape(x.shape))


class Block(nnx.Module):
    """Attention, then an MLP, each after a norm and with a residual connection."""

    def __init__(self, config: DecoderOptions, scale: float | None, make: ParameterMaker):
        """Makes the parameters; `scale` is that of `TowerConfig`."""
        self.layer_norm1 = make_norm(config.hidden_size, config, make)
        self.self_attn = PatchAttention(config, make)
        self.layer_norm2 = make_norm(config.hidden_size, config, make)
        self.mlp = BiasedMLP(config, make)
        self.scaled = scale is not None
        if scale is not None:
            self.lambda_1 = make.constant(scale, config.hidden_size)
            self.lambda_2 = make.constant(scale, config.hidden_size)

    def __call__(self, x: Hidden, turned: CosSin | None = None) -> Hidden:
        """Returns the layer's result; see `PatchAttention`."""
        y = self.self_attn(self.layer_norm1(x), turned)
        x = x + (y * self.lambda_1[...] if self.scaled else y)
        y = self.mlp(self.layer_norm2(x))
        return x + (y * self.lambda_2[...] if self.scaled else y)


class Tower(nnx.Module):
    """Images to the hidden states of their patches."""

    def __init__(self, config: TowerConfig, decoder: DecoderOptions, make: ParameterMaker):
        """Makes the parameters; blocks have the options of `decoder` that are not their own."""
        names = ("norm_eps", "norm", "qkv_bias", "qk_norm")
        own = own_options(decoder, config, **{name: getattr(config, name) for name in names})
        self.embeddings = Embeddings(config, make)
        blocks = [Block(own, config.scale, make) for _ in range(config.num_layers)]
        self.blocks = nnx.List(blocks)
        self.first = config.first
        if not config.first:
            self.post_layernorm = LayerNorm(config.hidden_size, own, make)

    def __call__(self, pixels: Pixels) -> Hidden:
        """Returns the hidden states of all patches, row by row, after the last block or norm."""
        x = self.embeddings(pixels)
        for block in self.blocks:
            x = block(x)
        return x[:, 1:] if self.first else self.post_layernorm(x)


class Vision(nnx.Module):
    """Images to vectors in place of their placeholders' embeddings."""

    def __init__(self, tower: nnx.Module, projector: nnx.Module):
        """Takes both modules."""
        self.tower: Any = tower
        self.projector: Any = projector

    def __call__(self, *images: Array) -> Float[Array, "images vectors wide"]:
        """Returns the vectors of each image, from the arrays that the tower reads."""
        return self.projector(self.tower(*images))
