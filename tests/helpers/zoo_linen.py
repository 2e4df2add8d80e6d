"""The zoo's Flax Linen models: numbered blocks, scan with remat, dropout, batch statistics.

They take the same loss functions as the NNX models.
"""

import jax
from flax import linen as nn

from zoo_case import DIM, HEADS, HIDDEN, VOCAB, Case, next_token_loss

# Biases that aren't zero at first, so that rounding in them can be told from their size.
BIAS = nn.initializers.normal(0.1)


def dense(num_outputs: int, name: str | None = None) -> nn.Dense:
    return nn.Dense(num_outputs, bias_init=BIAS, name=name)


class Block(nn.Module):
    """Attention and MLP. No attention biases: a key bias has a gradient of pure rounding."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS, use_bias=False)
        x = x + attention(nn.LayerNorm(bias_init=BIAS)(x), mask=mask)
        return x + dense(DIM)(nn.gelu(dense(HIDDEN)(nn.LayerNorm(bias_init=BIAS)(x))))


class ScanBlock(Block):
    """The same block in the form `nn.scan` wants."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__call__(x), None


class DropoutBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = dense(DIM)(nn.gelu(dense(HIDDEN)(nn.RMSNorm()(x))))
        return x + nn.Dropout(0.25, deterministic=False)(h)


class BatchNormBlock(nn.Module):
    """No bias before the normalisation, which would cancel it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(HIDDEN, use_bias=False)(x)
        h = nn.BatchNorm(use_running_average=False, momentum=0.9, bias_init=BIAS)(h)
        return x + dense(DIM)(nn.gelu(h))


class Decoder(nn.Module):
    """Embedding, `num_blocks` blocks of one kind with Flax's own numbered names, head."""

    block: type[nn.Module] = Block
    num_blocks: int = 3

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, DIM, name="embed")(tokens)
        for _ in range(self.num_blocks):
            x = self.block()(x)
        return dense(VOCAB, name="head")(nn.RMSNorm(name="norm")(x))


class ScanDecoder(nn.Module):
    """All blocks' parameters are stacked along axis 0; each block is rematerialised."""

    num_blocks: int = 3

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, DIM, name="embed")(tokens)
        blocks = nn.scan(
            nn.remat(ScanBlock),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_blocks,
        )
        x, _ = blocks(name="blocks")(x, None)
        return dense(VOCAB, name="head")(nn.RMSNorm(name="norm")(x))


CASES = (
    Case(
        name="linen_numbered",
        build=Decoder,
        loss_fn=next_token_loss,
        blocks=3,
        templates=1,
    ),
    Case(
        name="linen_scan_remat",
        build=ScanDecoder,
        loss_fn=next_token_loss,
        blocks=3,
        templates=1,
    ),
    Case(
        name="dropout_linen",
        build=lambda: Decoder(block=DropoutBlock),
        loss_fn=next_token_loss,
        blocks=3,
        # Linen folds a hash of each module's path into the key: whether that literal is part of
        # the block's stage decides between one template and three.
        templates=None,
        random=True,
    ),
    Case(
        name="batchnorm_linen",
        build=lambda: Decoder(block=BatchNormBlock),
        loss_fn=next_token_loss,
        blocks=3,
        templates=1,
        microbatches=False,
    ),
)
