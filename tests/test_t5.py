"""T5-3B at its published sizes, on shapes: a foreign encoder and decoder with shared biases."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import megatrain_jax as mt

WIDTH, HEADS, HEAD, HIDDEN, VOCAB, LAYERS = 1024, 32, 128, 16384, 32128, 24
BUCKETS, FARTHEST = 32, 128


def buckets(length: int, is_causal: bool) -> np.ndarray:
    """The bucket of each pair of a query and a key: T5's, exact when near and logarithmic after."""
    distance = np.arange(length) - np.arange(length)[:, None]
    count = BUCKETS if is_causal else BUCKETS // 2
    later = 0 if is_causal else count * (distance > 0)
    distance = np.maximum(-distance, 0) if is_causal else abs(distance)
    near = count // 2
    share = np.log(np.maximum(distance, 1) / near) / np.log(FARTHEST / near)
    far = np.minimum(near + (share * (count - near)).astype(int), count - 1)
    return later + np.where(distance < near, distance, far)


def linear(rngs: nnx.Rngs, *sizes: int) -> nnx.Linear:
    return nnx.Linear(*sizes, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, has_bias: bool):
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.q, self.k, self.v = (linear(rngs, WIDTH, HEADS * HEAD) for _ in range(3))
        self.o = linear(rngs, HEADS * HEAD, WIDTH)
        if has_bias:
            self.bias = nnx.Embed(BUCKETS, HEADS, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array, bias: Any, memory: jax.Array | None = None) -> jax.Array:
        y = self.norm(x)
        others = y if memory is None else memory
        rows = self.q(y), self.k(others), self.v(others)
        q, k, v = (row.reshape(*row.shape[:-1], HEADS, HEAD) for row in rows)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return x + self.o(mixed.reshape(*x.shape[:-1], HEADS * HEAD))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, is_decoder: bool, is_first: bool):
        self.attention = Attention(rngs, is_first)
        self.cross = Attention(rngs, False) if is_decoder else None
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.wi, self.wo = linear(rngs, WIDTH, HIDDEN), linear(rngs, HIDDEN, WIDTH)

    def __call__(self, x: jax.Array, bias: jax.Array, memory: jax.Array | None) -> jax.Array:
        x = self.attention(x, bias)
        x = x if self.cross is None else self.cross(x, 0, memory)
        return x + self.wo(jax.nn.relu(self.wi(self.norm(x))))


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, is_decoder: bool):
        self.block = nnx.List([Block(rngs, is_decoder, i == 0) for i in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.is_decoder = is_decoder

    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        length = x.shape[1]
        # The first layer has the biases of all layers.
        rows = jnp.asarray(buckets(length, self.is_decoder))
        bias = self.block[0].attention.bias(rows).transpose(2, 0, 1)
        if self.is_decoder:
            bias += jnp.where(np.tri(length, dtype=bool), 0, -1e9).astype(bias.dtype)
        for block in self.block:
            x = block(x, bias, memory)
        return self.norm(x)


class T5(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.shared = nnx.Embed(VOCAB, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.encoder, self.decoder = Stack(rngs, False), Stack(rngs, True)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        memory = self.encoder(self.shared(source))
        return self.shared.attend(self.decoder(self.shared(target), memory) * WIDTH**-0.5)


def loss_fn(model: T5, batch: dict[str, jax.Array]) -> jax.Array:
    before = jnp.pad(batch["target"][:, :-1], ((0, 0), (1, 0)))
    logits = model(batch["source"], before).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"]).mean()


def test_t5_3b_is_cut_into_its_blocks_from_shapes():
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    batch = {"source": tokens, "target": tokens}
    plan = mt.plan(lambda: T5(nnx.Rngs(0)), loss_fn, optax.sgd(1e-3), batch)
    assert not plan.warnings and 2.8e9 < plan.num_parameters < 2.9e9
    # The embedding, 24 blocks and the norm of each stack; the decoder's norm has the head.
    assert (plan.num_stages, plan.num_templates) == (2 * LAYERS + 3, 5)
    groups = {row.name: row.count for row in plan.groups}
    assert groups == {
        "shared": 1,
        "encoder.block.0.attention.bias": 1,
        "encoder.block.0 … encoder.block.23": LAYERS,
        "encoder.norm": 1,
        "decoder.block.0.attention.bias": 1,
        "decoder.block.0 … decoder.block.23": LAYERS,
        "decoder.norm": 1,
    }
