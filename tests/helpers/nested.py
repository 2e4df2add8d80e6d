"""Models whose layers lie in nested lists, at their real sizes: they are cut on shapes alone.

Parameters are trees of shapes. A function that runs them takes the arrays in their place.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Tree = Any


def is_shape(node: Tree) -> bool:
    """Whether a node of a tree of shapes is a shape."""
    return isinstance(node, tuple) and all(isinstance(n, int) for n in node)


def zeros(shapes: Tree) -> Tree:
    """Arrays of these shapes; only ever traced."""
    return jax.tree.map(jnp.zeros, shapes, is_leaf=is_shape)


def count(shapes: Tree) -> int:
    """The number of parameters."""
    return sum(math.prod(s) for s in jax.tree.leaves(shapes, is_leaf=is_shape))


def image_batch(size: int) -> dict[str, np.ndarray]:
    return {"image": np.zeros((2, size, size, 3), np.float32)}


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def conv(kernel: jax.Array, x: jax.Array, stride: int = 1) -> jax.Array:
    groups = x.shape[-1] // kernel.shape[2]
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def attend(p: Tree, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
    memory = x if memory is None else memory
    q, k, v = (
        t.reshape(*t.shape[:-1], -1, 64) for t in (x @ p["q"], memory @ p["k"], memory @ p["v"])
    )
    out = jax.nn.dot_product_attention(q, k, v)
    return out.reshape(*out.shape[:-2], -1) @ p["o"]


def attention(dim: int) -> Tree:
    return {name: (dim, dim) for name in "qkvo"}


def mlp(dim: int) -> Tree:
    return {"up": (dim, 4 * dim), "down": (4 * dim, dim)}


def run_mlp(p: Tree, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def layer(dim: int) -> Tree:
    """A transformer's layer."""
    return {"norm1": (dim,), "attention": attention(dim), "norm2": (dim,), "mlp": mlp(dim)}


def run_layer(p: Tree, x: jax.Array) -> jax.Array:
    x = x + attend(p["attention"], norm(p["norm1"], x))
    return x + run_mlp(p["mlp"], norm(p["norm2"], x))


# ConvNeXt


def convnext(depths: list[int], dims: list[int]) -> Tree:
    def block(d: int) -> Tree:
        return {
            "dwconv": (7, 7, 1, d), "norm": (d,), "pwconv1": (d, 4 * d), "b1": (4 * d,),
            "pwconv2": (4 * d, d), "b2": (d,), "gamma": (d,),
        }  # fmt: skip

    tree: Tree = {"embeddings": (4, 4, 3, dims[0]), "norm": (dims[-1],), "head": (dims[-1], 1000)}
    stages = []
    for before, d, depth in zip([dims[0], *dims], dims, depths, strict=False):
        stage: Tree = {"layers": [block(d) for _ in range(depth)]}
        if before != d:
            stage["downsample"] = {"norm": (before,), "kernel": (2, 2, before, d)}
        stages.append(stage)
    return tree | {"stages": stages}


def convnext_loss(p: Tree, batch: Tree) -> jax.Array:
    x = conv(p["embeddings"], batch["image"].astype(jnp.bfloat16), 4)
    for stage in p["stages"]:
        if "downsample" in stage:
            x = conv(stage["downsample"]["kernel"], norm(stage["downsample"]["norm"], x), 2)
        for block in stage["layers"]:
            y = norm(block["norm"], conv(block["dwconv"], x))
            y = jax.nn.gelu(y @ block["pwconv1"] + block["b1"]) @ block["pwconv2"] + block["b2"]
            x = x + block["gamma"] * y
    return jnp.mean((norm(p["norm"], x.mean((1, 2))) @ p["head"]).astype(jnp.float32) ** 2)


# A variational autoencoder, named as Diffusers names its parts


def resnet(before: int, d: int) -> Tree:
    tree: Tree = {"norm1": (before,), "conv1": (3, 3, before, d), "norm2": (d,),
                  "conv2": (3, 3, d, d)}  # fmt: skip
    return tree | ({"conv_shortcut": (1, 1, before, d)} if before != d else {})


def run_resnet(p: Tree, x: jax.Array) -> jax.Array:
    y = conv(p["conv1"], jax.nn.silu(norm(p["norm1"], x)))
    y = conv(p["conv2"], jax.nn.silu(norm(p["norm2"], y)))
    return y + (conv(p["conv_shortcut"], x) if "conv_shortcut" in p else x)


def mid(d: int) -> Tree:
    return {"resnets_0": resnet(d, d), "attentions_0": attention(d), "resnets_1": resnet(d, d)}


def run_mid(p: Tree, x: jax.Array) -> jax.Array:
    x = run_resnet(p["resnets_0"], x)
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    x = x + attend(p["attentions_0"], flat).reshape(x.shape)
    return run_resnet(p["resnets_1"], x)


def vae(dims: list[int]) -> Tree:
    encoder: Tree = {"conv_in": (3, 3, 3, dims[0])}
    decoder: Tree = {"conv_in": (3, 3, 4, dims[-1])}
    for k, (before, d) in enumerate(zip([dims[0], *dims], dims, strict=False)):
        encoder[f"down_blocks_{k}"] = {"resnets_0": resnet(before, d), "resnets_1": resnet(d, d)}
        if k < len(dims) - 1:
            encoder[f"down_blocks_{k}"]["downsamplers_0"] = {"conv": (3, 3, d, d)}
    for k, (before, d) in enumerate(zip([dims[-1], *dims[::-1]], dims[::-1], strict=False)):
        rows = [resnet(before, d), resnet(d, d), resnet(d, d)]
        decoder[f"up_blocks_{k}"] = {f"resnets_{j}": row for j, row in enumerate(rows)}
        if k < len(dims) - 1:
            decoder[f"up_blocks_{k}"]["upsamplers_0"] = {"conv": (3, 3, d, d)}
    encoder |= {
        "mid_block": mid(dims[-1]),
        "norm_out": (dims[-1],),
        "conv_out": (3, 3, dims[-1], 8),
    }
    decoder |= {"mid_block": mid(dims[-1]), "norm_out": (dims[0],), "conv_out": (3, 3, dims[0], 3)}
    return {"encoder": encoder, "decoder": decoder}


def vae_loss(p: Tree, batch: Tree) -> jax.Array:
    image = batch["image"].astype(jnp.bfloat16)
    encoder, decoder = p["encoder"], p["decoder"]
    x = conv(encoder["conv_in"], image)
    for k in range(sum(name.startswith("down_blocks") for name in encoder)):
        block = encoder[f"down_blocks_{k}"]
        x = run_resnet(block["resnets_1"], run_resnet(block["resnets_0"], x))
        if "downsamplers_0" in block:
            x = conv(block["downsamplers_0"]["conv"], x, 2)
    x = norm(encoder["norm_out"], run_mid(encoder["mid_block"], x))
    x = conv(decoder["conv_in"], conv(encoder["conv_out"], x)[..., :4])
    x = run_mid(decoder["mid_block"], x)
    for k in range(sum(name.startswith("up_blocks") for name in decoder)):
        block = decoder[f"up_blocks_{k}"]
        for j in range(3):
            x = run_resnet(block[f"resnets_{j}"], x)
        if "upsamplers_0" in block:
            x = conv(block["upsamplers_0"]["conv"], x.repeat(2, 1).repeat(2, 2))
    x = conv(decoder["conv_out"], norm(decoder["norm_out"], x))
    return jnp.mean((x - image).astype(jnp.float32) ** 2)
