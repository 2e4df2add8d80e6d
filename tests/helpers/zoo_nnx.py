"""The zoo's Flax NNX models: decoders whose blocks are wired in every way a user might.

They are written as users write them, with nothing that helps the cutting along.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from zoo_case import (
    DIM,
    HIDDEN,
    SEQ,
    VOCAB,
    Case,
    causal_attention,
    cross_entropy,
    next_token_loss,
)


class Embed(nnx.Embed):
    """An embedding that computes in its parameter's dtype, as Flax's other layers do.

    Flax's own remembers the dtype it was built with and would keep a model whose parameters are
    cast to bf16 in fp32.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(VOCAB, DIM, rngs=rngs)
        self.dtype = None


class Attention(nnx.Module):
    """Causal attention without biases: a key bias would have a gradient of pure rounding."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(DIM, 3 * DIM, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(causal_attention(*jnp.split(self.qkv(x), 3, axis=-1)))


class Linear(nnx.Linear):
    """A layer whose bias isn't zero at first, so that rounding in it can be told from its size."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rngs: nnx.Rngs):
        bias_init = nnx.initializers.normal(0.1)
        super().__init__(num_inputs, num_outputs, bias_init=bias_init, rngs=rngs)


class MLP(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = Linear(DIM, HIDDEN, rngs=rngs)
        self.down = Linear(HIDDEN, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to its input times `scale`."""

    def __init__(self, *, scale: float = 1.0, rngs: nnx.Rngs):
        self.scale = scale
        self.norm1 = nnx.RMSNorm(DIM, rngs=rngs)
        self.attention = Attention(rngs=rngs)
        self.norm2 = nnx.RMSNorm(DIM, rngs=rngs)
        self.mlp = MLP(rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.scale * self.attention(self.norm1(x))
        return x + self.scale * self.mlp(self.norm2(x))


class MLPBlock(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.mlp = MLP(rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(self.norm(x))


class DropoutBlock(MLPBlock):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.mlp(self.norm(x)))


class BatchNormBlock(nnx.Module):
    """No bias before the normalisation, which would cancel it; its statistics stay in fp32."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(DIM, HIDDEN, use_bias=False, rngs=rngs)
        bias_init = nnx.initializers.normal(0.1)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, bias_init=bias_init, rngs=rngs)
        self.down = Linear(HIDDEN, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.norm(self.up(x)).astype(x.dtype)))


class SpareBlock(MLPBlock):
    """A block one of whose parameters takes no part."""

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.spare = nnx.Param(jnp.ones((DIM,)))


class ExpertBlock(nnx.Module):
    """Top-2 of 4 experts; also returns its auxiliary losses, each a mean over examples."""

    def __init__(self, *, num_experts: int = 4, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.router = nnx.Linear(DIM, num_experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (num_experts, DIM, HIDDEN)))
        self.down = nnx.Param(init(rngs.params(), (num_experts, HIDDEN, DIM)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = self.norm(x)
        logits = self.router(h)
        probs = jax.nn.softmax(logits)
        _, chosen = jax.lax.top_k(probs, 2)
        picked = jax.nn.one_hot(chosen, probs.shape[-1], dtype=probs.dtype).sum(axis=-2)
        gates = probs * picked / jnp.sum(probs * picked, axis=-1, keepdims=True)
        hidden = jax.nn.gelu(jnp.einsum("btd,edh->bteh", h, self.up[...]))
        out = jnp.einsum("bteh,ehd,bte->btd", hidden, self.down[...], gates)
        # Per example, so that the mean over microbatches is the mean over the batch.
        balance = jnp.mean(jnp.sum(picked.mean(axis=1) * probs.mean(axis=1), axis=-1))
        z_loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
        return x + out, (balance + 0.1 * z_loss).astype(jnp.float32)


class MergeBlock(MLPBlock):
    """A late block of a U-Net: takes the output of an early block by concatenation."""

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.merge = nnx.Linear(2 * DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, skip: jax.Array) -> jax.Array:
        return super().__call__(self.merge(jnp.concatenate([x, skip], axis=-1)))


class Decoder(nnx.Module):
    """Embedding, the given blocks, head. The subclasses below wire the blocks otherwise."""

    def __init__(self, blocks: Sequence[nnx.Module], *, rngs: nnx.Rngs):
        self.embed = Embed(rngs=rngs)
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.head = Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TiedDecoder(nnx.Module):
    """The embedding is also the head; learned positions."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = Embed(rngs=rngs)
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (SEQ, DIM)))
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(3)])
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class ScanDecoder(nnx.Module):
    """One block object that holds all layers' parameters, stacked, and a scan over it."""

    def __init__(self, *, num_blocks: int = 3, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=num_blocks)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> Block:
            return Block(rngs=rngs)

        self.embed = Embed(rngs=rngs)
        self.blocks = create(rngs)
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.head = Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        return self.head(self.norm(run(self.blocks, self.embed(tokens))))


class ExpertDecoder(Decoder):
    def __call__(self, tokens: jax.Array) -> Any:
        x, aux = self.embed(tokens), jnp.float32(0)
        for block in self.blocks:
            x, block_aux = block(x)
            aux = aux + block_aux
        return self.head(self.norm(x)), aux


class UNet(Decoder):
    """Early blocks' outputs reach the late blocks in reverse order."""

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__([MLPBlock(rngs=rngs) for _ in range(2)], rngs=rngs)
        self.late = nnx.List([MergeBlock(rngs=rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x, skips = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            skips.append(x)
        for block in self.late:
            x = block(jnp.tanh(x), skips.pop())
        return self.head(self.norm(x))


class PartialDecoder(Decoder):
    """Never calls its last block."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.head(self.norm(x))


class BridgedDecoder(Decoder):
    """A projection without a number stands between two lists of equal blocks."""

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__([MLPBlock(rngs=rngs) for _ in range(2)], rngs=rngs)
        self.bridge = Linear(DIM, DIM, rngs=rngs)
        self.late = nnx.List([MLPBlock(rngs=rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = jnp.tanh(self.bridge(x))
        for block in self.late:
            x = block(x)
        return self.head(self.norm(x))


def stack(kinds: Sequence[Callable[..., nnx.Module]], cls: type = Decoder) -> Callable[[], Any]:
    """Return a builder of a decoder with one block of each kind."""

    def build() -> nnx.Module:
        rngs = nnx.Rngs(0)
        return cls([kind(rngs=rngs) for kind in kinds], rngs=rngs)

    return build


def once(build: Callable[[], nnx.Module]) -> Callable[[], nnx.Module]:
    """Return a builder of equal models that share the first one's arrays: drawing takes long.

    A traced call builds a model of its own, since its tracers must not outlive the trace.
    """
    parts = functools.cache(lambda: nnx.split(build()))

    def model() -> nnx.Module:
        is_traced = isinstance(jnp.zeros(()), Tracer)
        return build() if is_traced else nnx.merge(*parts(), copy=True)

    return model


def scaled(scale: float) -> Callable[..., Block]:
    return lambda *, rngs: Block(scale=scale, rngs=rngs)


def build_shared() -> nnx.Module:
    """Return a decoder whose list holds one and the same block three times."""
    rngs = nnx.Rngs(0)
    return Decoder([Block(rngs=rngs)] * 3, rngs=rngs)


def expert_loss(model: Any, batch: dict[str, Any]) -> jax.Array:
    logits, aux = model(batch["tokens"][:, :-1])
    return cross_entropy(logits, batch["tokens"][:, 1:]) + 0.1 * aux


def l2_loss(model: Any, batch: dict[str, Any]) -> jax.Array:
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    penalty = sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves)
    return next_token_loss(model, batch) + 1e-3 * penalty


def metrics_loss(model: Any, batch: dict[str, Any], rng: jax.Array) -> Any:
    """Replace tokens at random; report how many and the accuracy over the rest."""
    tokens = batch["tokens"]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    replaced = jax.random.bernoulli(rng, 0.2, inputs.shape)
    logits = model(jnp.where(replaced, 0, inputs))
    right = jnp.where(replaced, 0, jnp.argmax(logits, axis=-1) == targets)
    return cross_entropy(logits, targets), {
        "accuracy": jnp.mean(right.astype(jnp.float32)),
        "replaced": jnp.mean(replaced.astype(jnp.float32)),
    }


CASES = (
    Case(
        name="nnx_tied",
        build=once(lambda: TiedDecoder(rngs=nnx.Rngs(0))),
        loss_fn=next_token_loss,
        blocks=3,
        templates=1,
    ),
    Case(
        name="nnx_scan",
        build=once(lambda: ScanDecoder(rngs=nnx.Rngs(0))),
        loss_fn=next_token_loss,
        blocks=3,
        templates=1,
    ),
    Case(
        name="alternating",
        build=once(stack([Block, MLPBlock, Block, MLPBlock])),
        loss_fn=next_token_loss,
        blocks=4,
        templates=2,
    ),
    Case(
        name="moe",
        build=once(stack([ExpertBlock] * 3, ExpertDecoder)),
        loss_fn=expert_loss,
        blocks=3,
        templates=1,
    ),
    Case(
        name="unet",
        build=once(lambda: UNet(rngs=nnx.Rngs(0))),
        loss_fn=next_token_loss,
        blocks=4,
        templates=2,
    ),
    Case(
        name="shared_block",
        build=once(build_shared),
        loss_fn=next_token_loss,
        blocks=1,
        templates=1,
        passes=3,
    ),
    Case(
        name="python_constant",
        build=once(stack([scaled(1.0), scaled(0.5), scaled(1.0), scaled(0.5)])),
        loss_fn=next_token_loss,
        blocks=4,
        templates=1,
    ),
    Case(
        name="unused",
        build=once(stack([SpareBlock] * 4, PartialDecoder)),
        loss_fn=next_token_loss,
        blocks=3,
        templates=1,
        zero_gradients=True,
    ),
    Case(
        name="dropout_nnx",
        build=once(stack([DropoutBlock] * 3)),
        loss_fn=next_token_loss,
        blocks=3,
        templates=1,
        random=True,
    ),
    Case(
        name="batchnorm_nnx",
        build=once(stack([BatchNormBlock] * 3)),
        loss_fn=next_token_loss,
        blocks=3,
        templates=1,
        microbatches=False,
    ),
    Case(
        name="metrics",
        build=once(stack([MLPBlock] * 3)),
        loss_fn=metrics_loss,
        blocks=3,
        templates=1,
        random=True,
    ),
    Case(
        name="l2_regulariser",
        build=once(stack([MLPBlock] * 3)),
        loss_fn=l2_loss,
        blocks=3,
        templates=1,
    ),
    Case(
        name="mid_rest",
        build=once(lambda: BridgedDecoder(rngs=nnx.Rngs(0))),
        loss_fn=next_token_loss,
        blocks=4,
        templates=1,
    ),
    Case(
        name="builder",
        build=lambda: stack([Block] * 3),
        loss_fn=next_token_loss,
        blocks=3,
        templates=1,
    ),
)
