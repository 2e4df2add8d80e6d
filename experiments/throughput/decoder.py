"""The model that is measured: a decoder as Qwen2.5 has it, its loss, and random tokens."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from shapes import Shape

from megatrain_jax import losses

Batch = dict[str, np.ndarray]


def rotary_tables(length: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of the rotary embedding, [length, 1, head_dim / 2] in fp32.

    RoFormer (https://arxiv.org/abs/2104.09864) with the base that Qwen2.5 uses.
    """
    frequencies = 1e6 ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each pair (i, i + head_dim / 2) of x [batch, length, heads, head_dim]."""
    cosines, sines = cos_sin
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cosines - second * sines, second * cosines + first * sines]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attends with cuDNN where that is possible; shapes as in `jax.nn.dot_product_attention`."""
    fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn" if fused else None
    )


class Block(nnx.Module):
    """Pre-norm attention with grouped queries, then a SwiGLU MLP."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        """Makes the parameters of one block."""
        queries = shape.num_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim
        init = nnx.initializers.normal(0.02)

        def linear(dim_in: int, dim_out: int, use_bias: bool = False) -> nnx.Linear:
            return nnx.Linear(dim_in, dim_out, use_bias=use_bias, kernel_init=init, rngs=rngs)

        self.head_dim = shape.head_dim
        self.attention_norm = nnx.RMSNorm(shape.dim, rngs=rngs)
        self.query = linear(shape.dim, queries, use_bias=True)
        self.key = linear(shape.dim, keys, use_bias=True)
        self.value = linear(shape.dim, keys, use_bias=True)
        self.out = linear(queries, shape.dim)
        self.mlp_norm = nnx.RMSNorm(shape.dim, rngs=rngs)
        self.gate = linear(shape.dim, shape.mlp_dim)
        self.up = linear(shape.dim, shape.mlp_dim)
        self.down = linear(shape.mlp_dim, shape.dim)

    def __call__(self, x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Maps x to the same shape: [batch, length, dim]."""
        y = self.attention_norm(x)
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (f(y).reshape(heads) for f in (self.query, self.key, self.value))
        mixed = causal_attention(rotate(q, cos_sin), rotate(k, cos_sin), v)
        x = x + self.out(mixed.reshape(*x.shape[:2], -1))
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    """A decoder over tokens, without the product with the head's weights, which the loss does."""

    def __init__(self, shape: Shape, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        """Makes all parameters; activations are of `dtype`."""
        init = nnx.initializers.normal(0.02)
        self.shape = shape
        # The other modules go by what they are given, but `nnx.Embed` would return fp32.
        self.embedding = nnx.Embed(
            shape.vocab_size, shape.dim, dtype=dtype, embedding_init=init, rngs=rngs
        )
        self.blocks = nnx.List([Block(shape, rngs) for _ in range(shape.num_layers)])
        self.norm = nnx.RMSNorm(shape.dim, rngs=rngs)
        self.head = nnx.Linear(
            shape.dim, shape.vocab_size, use_bias=False, kernel_init=init, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens [batch, length] to the head's hidden states: [batch, length, dim]."""
        x = self.embedding(tokens)
        cos_sin = rotary_tables(tokens.shape[1], self.shape.head_dim)
        for block in self.blocks:
            x = block(x, cos_sin)
        return self.norm(x)


def loss_fn(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy in nats per token, some tokens' logits at a time.

    The fp32 logits of a whole batch with a large vocabulary would be the largest array by far.
    """
    kernel = model.head.kernel[...]

    @jax.checkpoint
    def chunk_loss(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = chunk
        logits = (x @ kernel).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    x, targets = model(batch["inputs"]), batch["targets"]
    size = math.gcd(targets.size, model.shape.loss_tokens)
    chunks = (x.reshape(-1, size, x.shape[-1]), targets.reshape(-1, size))
    return jax.lax.map(chunk_loss, chunks).mean()


def library_loss_fn(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the same loss by `losses.next_token`, whose chunks each device has of its own tokens.

    The chunks of `loss_fn` are of neighbouring sequences: several devices, each with sequences of
    its own, would exchange them, and the logits, chunk by chunk.
    """
    return losses.next_token(model(batch["inputs"]), model.head.kernel[...].T, batch["targets"])


LOSSES = {"own": loss_fn, "library": library_loss_fn}


def random_batch(shape: Shape, seed: int) -> Batch:
    """Returns random tokens and the same shifted by one."""
    rng = np.random.default_rng(seed)
    size = (shape.batch_size, shape.seq_len + 1)
    tokens = rng.integers(0, shape.vocab_size, size, dtype=np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
