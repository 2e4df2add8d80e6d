"""Trains a byte-level decoder on the sources of Python's standard library.

The shortest whole use of megatrain_jax: a model and a loss as a user would write them, a plan,
a run whose parameters and optimizer state stay in host memory, and a sample at the end.
"""

import argparse
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import megatrain_jax as mt

VOCAB_SIZE = 256
Batch = dict[str, np.ndarray]


def distance_penalty(length: int, num_heads: int) -> jax.Array:
    """Returns the penalty on scores of distant tokens: [1, heads, length, length], fp32.

    This is ALiBi (Press et al., https://arxiv.org/abs/2108.12409). Its steepest heads look at the
    last few bytes from the first step on, so a short run already learns from them.
    """
    slopes = 2.0 ** (1 - 8 * np.arange(num_heads) / num_heads)
    distances = jnp.arange(length) - jnp.arange(length)[:, None]
    return (jnp.asarray(slopes, jnp.float32)[:, None, None] * distances)[None]


class Block(nnx.Module):
    """Pre-norm causal self-attention, then an MLP."""

    def __init__(self, dim: int, num_heads: int, rngs: nnx.Rngs):
        """Makes the parameters of one block."""
        # With outputs that start at zero, each block starts as the identity.
        zeros = nnx.initializers.zeros
        self.num_heads = num_heads
        self.attention_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.qkv = nnx.Linear(dim, 3 * dim, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(dim, dim, use_bias=False, kernel_init=zeros, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=False, kernel_init=zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x to the same shape: [batch, length, dim]."""
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * self.num_heads, -1), 3, axis=2)
        bias = distance_penalty(x.shape[1], self.num_heads).astype(x.dtype)
        mixed = jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    """A decoder over bytes, or over tokens of another vocabulary."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_layers: int,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        vocab_size: int = VOCAB_SIZE,
    ):
        """Makes the parameters of an embedding, the blocks and a head."""
        normal = nnx.initializers.normal
        # An embedding's dtype is that of all layers after it, which adapt to what they are given.
        self.embedding = nnx.Embed(
            vocab_size, dim, dtype=dtype, embedding_init=normal(1.0), rngs=rngs
        )
        self.blocks = nnx.List([Block(dim, num_heads, rngs) for _ in range(num_layers)])
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, vocab_size, use_bias=False, kernel_init=normal(0.01), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens [batch, length] to fp32 logits [batch, length, vocab_size]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def loss_fn(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy in nats per byte or token."""
    logits = model(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def read_sources(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes to train on and those of the files held out (one in ten).

    Raises:
        SystemExit: If this Python comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    # Tests and what pip installed are left out: not every machine has the same ones.
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = sorted(
        path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts)
    )
    if len(files) < 100:
        raise SystemExit(f"{root} holds only {len(files)} Python files to train on")
    random.Random(seed).shuffle(files)
    num_held_out = len(files) // 10
    texts = [
        b"".join(path.read_bytes() for path in part)
        for part in (files[num_held_out:], files[:num_held_out])
    ]
    train, held_out = (np.frombuffer(text, np.uint8) for text in texts)
    print(
        f"{root}: {len(files)} files, {train.size:,} bytes to train on, {held_out.size:,} held out"
    )
    return train, held_out


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    """Cuts one window of `length` bytes at each start; the targets lie one byte further on."""
    bytes_ = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"inputs": bytes_[:, :-1], "targets": bytes_[:, 1:]}


def random_batches(text: np.ndarray, batch_size: int, length: int, seed: int) -> Iterator[Batch]:
    """Draws batches of random windows without end."""
    rng = np.random.default_rng(seed)
    while True:
        yield windows(text, rng.integers(0, text.size - length, batch_size), length)


def spread_batches(text: np.ndarray, batch_size: int, length: int, num_batches: int) -> list[Batch]:
    """Cuts windows at even distances over the whole text."""
    starts = np.linspace(0, text.size - length - 1, batch_size * num_batches, dtype=int)
    # Each batch reaches over the whole text, so that their losses are alike.
    return [windows(text, starts[i::num_batches], length) for i in range(num_batches)]


def sample(
    model: Decoder, prompt: bytes, num_bytes: int, length: int, temperature: float, seed: int
) -> bytes:
    """Continues the prompt byte by byte, each time from the `length` bytes before it."""
    graph, state = nnx.split(model)
    # The trained arrays are on the host; sampling has room for them all on the device.
    state = jax.device_put(state, jax.devices()[0])

    @jax.jit
    def next_byte(state: nnx.State, window: jax.Array, last: int, key: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, state)(window[None])[0, last]
        return jax.random.categorical(key, logits / temperature)

    text = list(prompt)
    for key in jax.random.split(jax.random.key(seed), num_bytes):
        # Causal attention never looks at the padding behind the last byte.
        window = text[-length:]
        last = len(window) - 1
        padded = np.array(window + [0] * (length - len(window)), np.int32)
        text.append(int(next_byte(state, padded, last, key)))
    return bytes(text)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    model = parser.add_argument_group("the model (the defaults make about 10M parameters)")
    model.add_argument("--dim", type=int, default=448, help="width")
    model.add_argument("--layers", type=int, default=4, help="number of blocks")
    model.add_argument("--heads", type=int, default=8, help="attention heads; they divide --dim")
    run = parser.add_argument_group("the run")
    run.add_argument("--steps", type=int, default=360, help="training steps")
    run.add_argument("--batch-size", type=int, default=4, help="windows in a step")
    run.add_argument("--seq-len", type=int, default=64, help="bytes in a window")
    run.add_argument("--learning-rate", type=float, default=6e-4, help="its peak")
    run.add_argument("--microbatches", type=int, default=1, help="parts a batch is cut into")
    run.add_argument("--seed", type=int, default=0, help="of parameters, data and sampling")
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--device-budget",
        type=float,
        metavar="GIB",
        help="device memory that parameters and optimizer state may take; without it, the least",
    )
    memory.add_argument(
        "--precision",
        choices=["auto", "fp32", "bf16"],
        default="auto",
        help="dtype of the computation; auto is bf16 except on a CPU",
    )
    output = parser.add_argument_group("the output")
    output.add_argument("--eval-every", type=int, default=180, help="steps between evaluations")
    output.add_argument("--eval-batches", type=int, default=8, help="held-out batches in each")
    output.add_argument("--prompt", default="def ", help="what the sample starts with")
    output.add_argument("--sample-bytes", type=int, default=200, help="how long the sample is")
    output.add_argument("--temperature", type=float, default=0.7, help="of the sample")
    output.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder to write")
    arguments = parser.parse_args()
    if arguments.dim % arguments.heads:
        parser.error("--dim must be a multiple of --heads")
    if not arguments.prompt:
        parser.error("--prompt must not be empty")
    return arguments


def rising_and_falling(highest: float, steps: int) -> optax.Schedule:
    """Returns a learning rate that rises from above 0, so that the first step learns, too."""
    rising = steps // 20
    return optax.warmup_cosine_decay_schedule(
        init_value=highest / (rising + 1),
        peak_value=highest,
        warmup_steps=rising,
        decay_steps=steps,
    )


def main() -> None:
    """Plans, trains, samples, and writes the history and its curve."""
    args = parse_arguments()
    train, held_out = read_sources(args.seed)
    on_cpu = jax.default_backend() == "cpu"
    bf16 = args.precision == "bf16" or (args.precision == "auto" and not on_cpu)
    dtype = jnp.bfloat16 if bf16 else jnp.float32
    optimizer = optax.adamw(
        rising_and_falling(args.learning_rate, args.steps), b2=0.95, weight_decay=0.0
    )
    settings = {
        "microbatches": args.microbatches,
        "precision": mt.Precision(compute=dtype),
        "device_budget": None if args.device_budget is None else int(args.device_budget * 2**30),
    }

    def build() -> Decoder:
        return Decoder(args.dim, args.heads, args.layers, dtype, nnx.Rngs(args.seed))

    batches = random_batches(train, args.batch_size, args.seq_len, args.seed)
    # Evaluating keeps no gradients, so its batches can be larger, and fewer passes stream.
    held_out_batches = spread_batches(
        held_out, 8 * args.batch_size, args.seq_len, args.eval_batches
    )
    print(mt.plan(build, loss_fn, optimizer, next(batches), **settings))
    result = mt.fit(
        build,
        loss_fn,
        batches,
        optimizer,
        steps=args.steps,
        eval_data=held_out_batches,
        eval_every=args.eval_every,
        **settings,
    )

    history = result.history
    if not history:
        raise SystemExit("interrupted before the first step was done")
    print(f"loss of the first step: {history[0]['loss']:.3f} nats per byte")
    if "eval_loss" in history[-1]:
        print(f"loss on held-out files: {history[-1]['eval_loss']:.3f} nats per byte")
    text = sample(
        result.model,
        args.prompt.encode(),
        args.sample_bytes,
        args.seq_len,
        args.temperature,
        args.seed,
    )
    print(f"\n--- a sample ---\n{text.decode(errors='replace')}\n---\n")
    args.out.mkdir(parents=True, exist_ok=True)
    history.save(args.out / "history.json")
    history.plot().savefig(args.out / "loss.png", dpi=120)
    print(f"history: {args.out / 'history.json'}\nloss curve: {args.out / 'loss.png'}")


if __name__ == "__main__":
    main()
