"""A model of somebody else: a T5, an encoder and a decoder with shared biases, in Flax NNX.

The sizes are T5-3B's (https://huggingface.co/google-t5/t5-3b) with fewer layers. Attention is
written out, and the first layer of each stack has the biases by relative position of all layers.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a T5.

    Attributes:
        width: Width of the residual stream.
        heads: Attention heads.
        head: Width of a head.
        hidden: Width inside an MLP.
        vocabulary: Tokens.
        layers: Layers of the encoder, and of the decoder.
    """

    width: int = 1024
    heads: int = 32
    head: int = 128
    hidden: int = 16384
    vocabulary: int = 32128
    layers: int = 6


TINY = Sizes(width=64, heads=2, head=32, hidden=128, vocabulary=512, layers=2)
_BUCKETS, _FARTHEST = 32, 128


def _buckets(length: int, *, is_causal: bool) -> np.ndarray:
    """The bucket of each pair of a query and a key: exact if near, logarithmic if far."""
    distance = np.arange(length) - np.arange(length)[:, None]
    count = _BUCKETS if is_causal else _BUCKETS // 2
    later = 0 if is_causal else count * (distance > 0)
    distance = np.maximum(-distance, 0) if is_causal else abs(distance)
    near = count // 2
    share = np.log(np.maximum(distance, 1) / near) / np.log(_FARTHEST / near)
    far = np.minimum(near + (share * (count - near)).astype(int), count - 1)
    return later + np.where(distance < near, distance, far)


def _linear(rngs: nnx.Rngs, given: int, out: int) -> nnx.Linear:
    return nnx.Linear(given, out, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)


class Attention(nnx.Module):
    """Attention of queries to the same rows, or to the encoder's."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, has_bias: bool):
        """Makes the parameters; `has_bias` for the table of biases."""
        width, inside = sizes.width, sizes.heads * sizes.head
        self.sizes = sizes
        self.norm = nnx.RMSNorm(width, dtype=jnp.bfloat16, rngs=rngs)
        self.q, self.k, self.v = (_linear(rngs, width, inside) for _ in range(3))
        self.o = _linear(rngs, inside, width)
        if has_bias:
            self.bias = nnx.Embed(_BUCKETS, sizes.heads, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array, bias: Any, memory: jax.Array | None = None) -> jax.Array:
        """Adds attention to `memory`, or to x itself, to x, [batch, tokens, width]."""
        y = self.norm(x)
        others = y if memory is None else memory
        rows = self.q(y), self.k(others), self.v(others)
        q, k, v = (row.reshape(*row.shape[:-1], self.sizes.heads, -1) for row in rows)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return x + self.o(mixed.reshape(*x.shape[:-1], -1))


class Block(nnx.Module):
    """Attention, attention to the encoder in a decoder, and an MLP."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, is_decoder: bool, is_first: bool):
        """Makes the parameters."""
        self.attention = Attention(sizes, rngs, has_bias=is_first)
        self.cross = Attention(sizes, rngs, has_bias=False) if is_decoder else None
        self.norm = nnx.RMSNorm(sizes.width, dtype=jnp.bfloat16, rngs=rngs)
        self.wi = _linear(rngs, sizes.width, sizes.hidden)
        self.wo = _linear(rngs, sizes.hidden, sizes.width)

    def __call__(self, x: jax.Array, bias: jax.Array, memory: jax.Array | None) -> jax.Array:
        """Returns the next layer's x, [batch, tokens, width]."""
        x = self.attention(x, bias)
        x = x if self.cross is None else self.cross(x, 0, memory)
        return x + self.wo(jax.nn.relu(self.wi(self.norm(x))))


class Stack(nnx.Module):
    """The encoder or the decoder."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs, *, is_decoder: bool):
        """Makes the parameters."""
        self.block = nnx.List(
            [
                Block(sizes, rngs, is_decoder=is_decoder, is_first=i == 0)
                for i in range(sizes.layers)
            ]
        )
        self.norm = nnx.RMSNorm(sizes.width, dtype=jnp.bfloat16, rngs=rngs)
        self.is_decoder = is_decoder

    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        """Returns the last layer's results, normalised, [batch, tokens, width]."""
        length = x.shape[1]
        rows = jnp.asarray(_buckets(length, is_causal=self.is_decoder))
        bias = self.block[0].attention.bias(rows).transpose(2, 0, 1)
        if self.is_decoder:
            bias += jnp.where(np.tri(length, dtype=bool), 0, -1e9).astype(bias.dtype)
        for block in self.block:
            x = block(x, bias, memory)
        return self.norm(x)


class T5(nnx.Module):
    """An encoder, a decoder and the embedding that both share with the head."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        """Makes the parameters."""
        self.scale = sizes.width**-0.5
        self.shared = nnx.Embed(sizes.vocabulary, sizes.width, dtype=jnp.bfloat16, rngs=rngs)
        self.encoder = Stack(sizes, rngs, is_decoder=False)
        self.decoder = Stack(sizes, rngs, is_decoder=True)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """Returns the logits of targets, [batch, tokens, vocabulary]."""
        memory = self.encoder(self.shared(source))
        return self.shared.attend(self.decoder(self.shared(target), memory) * self.scale)


def loss_fn(model: T5, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy of the targets, in nats."""
    before = jnp.pad(batch["target"][:, :-1], ((0, 0), (1, 0)))
    logits = model(batch["source"], before).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"]).mean()


def random_batch(sizes: Sizes, rows: int, length: int) -> dict[str, np.ndarray]:
    """Returns random sources and targets, [rows, length]."""
    rng, shape = np.random.default_rng(0), (2, rows, length)
    source, target = rng.integers(1, sizes.vocabulary, shape, dtype=np.int32)
    return {"source": source, "target": target}
