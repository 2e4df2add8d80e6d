"""Compares plans for an A100 with published training speeds, in tokens per second of one GPU.

    python experiments/throughput/published_a100.py

The training benchmarks of MosaicML's LLM Foundry (github.com/mosaicml/llm-foundry,
scripts/train/benchmarking/README.md) have the speeds of MPT models on eight A100 80GB. The rows
here are all with 7B to 30B parameters, activation checkpoints and at most 4,096 tokens per
sequence. FSDP divides their state, and gathers parameters while the GPUs compute. A plan here
counts only the computations of one GPU, with all blocks recomputed; copies take no time. Plans of
two and of four blocks give the time of a block, and the time of the rest of the model.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import megatrain_jax as mt
from megatrain_jax import losses, models

VOCABULARY = 50_368
TOKENS = 65_536  # per planned step: with so many, the update takes little of the step


@dataclass(frozen=True)
class Published:
    """One row of the benchmarks: a model, its tokens per sequence, and tokens/s of a GPU."""

    name: str
    width: int
    layers: int
    heads: int
    length: int
    tokens_per_second: int


ROWS = (
    Published("7B", 4096, 32, 32, 1024, 4357),
    Published("7B", 4096, 32, 32, 4096, 3684),
    Published("13B", 5120, 40, 40, 1024, 2330),
    Published("13B", 5120, 40, 40, 4096, 2060),
    Published("30B", 7168, 48, 56, 512, 967),
    Published("30B", 7168, 48, 56, 1024, 946),
    Published("30B", 7168, 48, 56, 2048, 916),
    Published("30B", 7168, 48, 56, 4096, 814),
)


class Block(nnx.Module):
    """Attention and an MLP of four times the width, without biases."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        """Initializes the weights of a block."""
        options = {"use_bias": False, "rngs": rngs, "dtype": jnp.bfloat16}
        self.heads = heads
        self.before_attention = nnx.LayerNorm(width, **options)
        self.before_mlp = nnx.LayerNorm(width, **options)
        self.qkv = nnx.Linear(width, 3 * width, **options)
        self.out = nnx.Linear(width, width, **options)
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the block's output, (rows, length, width)."""
        rows, length, width = x.shape
        parts = jnp.split(self.qkv(self.before_attention(x)), 3, -1)
        q, k, v = (y.reshape(rows, length, self.heads, width // self.heads) for y in parts)
        x = x + self.out(models.attention(q, k, v).reshape(rows, length, width))
        return x + self.down(jax.nn.gelu(self.up(self.before_mlp(x))))


class Mpt(nnx.Module):
    """A decoder of these blocks; the embedding is also its head."""

    def __init__(self, row: Published, layers: int, rngs: nnx.Rngs):
        """Initializes the weights."""
        self.embed = nnx.Embed(VOCABULARY, row.width, rngs=rngs, dtype=jnp.bfloat16)
        self.blocks = nnx.List([Block(row.width, row.heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(row.width, use_bias=False, rngs=rngs, dtype=jnp.bfloat16)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """Returns the last hidden states, (rows, length, width)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def loss_fn(model: Mpt, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy of the next tokens."""
    hidden = model.hidden(batch["tokens"])
    return losses.next_token(hidden, model.embed.embedding[...], batch["labels"])


def planned_tokens_per_second(row: Published) -> float:
    """Returns the tokens per second of an A100 by plans of a row's model."""
    two, four = (_computing_seconds(row, layers) for layers in (2, 4))
    return TOKENS / (two + (row.layers - 2) * (four - two) / 2)


def _computing_seconds(row: Published, layers: int) -> float:
    tokens = jax.ShapeDtypeStruct((TOKENS // row.length, row.length), jnp.int32)
    plan = mt.plan(
        lambda: Mpt(row, layers, nnx.Rngs(0)),
        loss_fn,
        optax.sgd(1e-3),
        {"tokens": tokens, "labels": tokens},
        hardware=dataclasses.replace(mt.card("A100"), host_bytes=2**40),
        precision=mt.Precision(compute=jnp.bfloat16),
        device_budget="minimum",
    )
    assert plan.num_kept == 0, "checkpointed blocks are recomputed"
    return plan.busy["device"][1]


def main() -> None:
    """Prints a Markdown table."""
    print("| MPT | tokens per sequence | planned tokens/s | published | error |")
    print("|---|---|---|---|---|")
    for row in ROWS:
        planned = planned_tokens_per_second(row)
        # The error of the step's time, as on all pages: negative if the plan is too fast.
        error = f"{row.tokens_per_second / planned - 1:+.1%}".replace("-", "\N{MINUS SIGN}")
        cells = row.name, f"{row.length:,}", f"{planned:,.0f}", f"{row.tokens_per_second:,}", error
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
