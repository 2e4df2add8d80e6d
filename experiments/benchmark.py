"""Times training steps of a decoder: state streamed from the host against all of it on the device.

A streamed step is only as good as its ratio to the same step with everything resident, so this
measures both on random tokens, each in a process of its own, and writes a table and a JSON file.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import megatrain_jax as mt
from megatrain_jax.stream.laps import Op, Record

_GIB = 2**30
# The first step compiles and starts at rest, the second compiles what only a steady step does.
_WARM_UP_STEPS = 3
_EVERYTHING = 10**15
_TOKENS_AT_ONCE = 1024

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes, and the batch it is measured with unless the command line says otherwise.

    Attributes:
        dim: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values; they divide `num_heads`.
        head_dim: Width of a head.
        mlp_dim: Width inside an MLP.
        vocab_size: Tokens; embedding and head are separate parameters.
        batch_size: Sequences in a step.
        seq_len: Tokens in a sequence.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    batch_size: int
    seq_len: int


SHAPES = {
    # https://huggingface.co/Qwen/Qwen2.5-3B, but with a head of its own.
    "qwen2.5-3b-untied": Shape(
        dim=2048,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        mlp_dim=11008,
        vocab_size=151936,
        batch_size=16,
        seq_len=2048,
    ),
    "tiny": Shape(
        dim=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=128,
        vocab_size=512,
        batch_size=4,
        seq_len=32,
    ),
}


def rotary_tables(length: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of the rotary embedding, [length, 1, head_dim / 2] in fp32.

    RoFormer (https://arxiv.org/abs/2104.09864) with the base that Qwen2.5 uses.
    """
    frequencies = 1e6 ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns each pair (i, i + head_dim / 2) of x [batch, length, heads, head_dim] by its angle."""
    cosines, sines = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


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

    def __call__(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Maps x to the same shape: [batch, length, dim]."""
        y = self.attention_norm(x)
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (f(y).reshape(heads) for f in (self.query, self.key, self.value))
        mixed = causal_attention(rotate(q, tables), rotate(k, tables), v)
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
        """Maps tokens [batch, length] to what the head reads: [batch, length, dim]."""
        x = self.embedding(tokens)
        tables = rotary_tables(tokens.shape[1], self.shape.head_dim)
        for block in self.blocks:
            x = block(x, tables)
        return self.norm(x)


def loss_fn(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy in nats per token, a thousand tokens' logits at a time.

    The fp32 logits of a whole batch with a large vocabulary would be the largest array by far.
    """
    kernel = model.head.kernel[...]

    @jax.checkpoint
    def chunk_loss(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = chunk
        logits = (x @ kernel).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    x, targets = model(batch["inputs"]), batch["targets"]
    size = math.gcd(targets.size, _TOKENS_AT_ONCE)
    chunks = (x.reshape(-1, size, x.shape[-1]), targets.reshape(-1, size))
    return jax.lax.map(chunk_loss, chunks).mean()


def random_batch(shape: Shape, seed: int) -> Batch:
    """Returns random tokens and the same shifted by one."""
    rng = np.random.default_rng(seed)
    size = (shape.batch_size, shape.seq_len + 1)
    tokens = rng.integers(0, shape.vocab_size, size, dtype=np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def peak_gib() -> float | None:
    """Returns the most device memory this process has ever used; None where JAX doesn't tell."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / _GIB if "peak_bytes_in_use" in stats else None


def measure(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Trains a few steps with one configuration and returns its figures."""
    optimizer = optax.adamw(1e-4)
    if args.clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(args.clip), optimizer)
    batches = [random_batch(shape, seed) for seed in range(_WARM_UP_STEPS + args.steps)]
    compute = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    start = time.perf_counter()
    trainer = mt.Trainer(
        lambda: Decoder(shape, compute, nnx.Rngs(0)),
        loss_fn,
        optimizer,
        batches[0],
        precision=mt.Precision(compute=compute),
        device_budget=args.device_budget,
    )
    prepared, peak_of_start = time.perf_counter(), peak_gib()
    plan = trainer.plan
    print(plan, flush=True)
    warm_up = iter(batches[:_WARM_UP_STEPS])
    losses = [trainer.read(trainer.step(next(warm_up)))["loss"]]
    compiled = time.perf_counter()
    losses += [trainer.read(trainer.step(batch))["loss"] for batch in warm_up]
    more_losses, intervals = time_steps(trainer, batches[_WARM_UP_STEPS:])
    losses += more_losses
    dispatch = dispatch_seconds(trainer, batches[:3])
    trainer.flush()
    if args.profile is not None:
        with jax.profiler.trace(args.profile):
            time_steps(trainer, batches[:2])
        trainer.flush()
    seconds = statistics.median(intervals)
    num_tokens = shape.batch_size * shape.seq_len
    return {
        "device_budget": args.device_budget,
        "clip": args.clip,
        "update_mode": plan.update_mode,
        "num_parameters": plan.num_parameters,
        "tokens_per_step": num_tokens,
        "seconds_per_step": seconds,
        "mean_seconds_per_step": sum(intervals) / len(intervals),
        "seconds_of_steps": intervals,
        "tokens_per_second": num_tokens / seconds,
        "tflops_per_second": 6 * plan.num_parameters * num_tokens / seconds / 1e12,
        "peak_device_gib": peak_gib(),
        "peak_device_gib_of_start": peak_of_start,
        "planned_device_gib": plan.device_bytes / _GIB,
        "planned_state_gib": plan.device_state_bytes / _GIB,
        "predicted_seconds_per_step": plan.seconds_per_step,
        "dispatch_seconds_per_step": dispatch,
        "link_gib_per_s": link_gib_per_s(),
        "planned_gib_in_and_out": [plan.bytes_in / _GIB, plan.bytes_out / _GIB],
        "seconds_to_prepare": prepared - start,
        "seconds_of_first_step": compiled - prepared,
        "losses": losses,
    }


def time_steps(trainer: mt.Trainer, batches: list[Batch]) -> tuple[list[float], list[float]]:
    """Runs steps of which the next is always dispatched before one is waited for.

    Returns:
        Each step's loss, and the seconds between the moments at which a step was seen to be over
        and the next one was dispatched. As dispatching a streamed step itself takes most of a
        step, the first of these intervals holds nearly two steps, and the last one nearly none.
    """
    losses, ends = [], [time.perf_counter()]

    def finish(metrics: Mapping[str, jax.Array]) -> None:
        jax.block_until_ready(dict(metrics))
        ends.append(time.perf_counter())
        losses.append(trainer.read(metrics)["loss"])

    before = trainer.step(batches[0])
    for batch in batches[1:]:
        dispatched = trainer.step(batch)
        finish(before)
        before = dispatched
    finish(before)
    return losses, [end - start for start, end in zip(ends[:-1], ends[1:], strict=True)]


def dispatch_seconds(trainer: mt.Trainer, batches: list[Batch]) -> float:
    """Returns what Python needs to dispatch a step, without the time in which it waits."""
    engine, waits = trainer._engine, (Op.WAIT, Op.LAND)
    obey, seconds = engine.obey, []

    def timed(record: Record, step: Any) -> None:
        start = time.perf_counter()
        obey(record, step)
        if record.op not in waits:
            seconds.append(time.perf_counter() - start)

    engine.obey = timed
    for batch in batches:
        seconds.clear()
        trainer.read(trainer.step(batch))
    engine.obey = obey
    return sum(seconds)


def link_gib_per_s(gib: float = 1.0) -> dict[str, float]:
    """Returns what plain copies of one large array reach, each direction alone."""
    shardings = [
        jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        for kind in ("pinned_host", "device")
    ]
    array = jax.device_put(np.zeros(int(gib * _GIB), np.uint8), shardings[0])
    rates = {}
    for name, target in (("in", shardings[1]), ("out", shardings[0])):
        times = []
        for _ in range(4):
            start = time.perf_counter()
            copy = jax.block_until_ready(jax.device_put(array, target))
            times.append(time.perf_counter() - start)
        rates[name] = gib / min(times)
        array = copy
    return rates


def measure_all(args: argparse.Namespace, shape: Shape) -> list[dict[str, Any]]:
    """Measures resident, streamed, and streamed with clipping, each in a process of its own.

    JAX tells the peak of a process's whole life only.
    """
    clip = 1.0 if args.clip is None else args.clip
    configurations = {
        "resident": ["--device-budget", "all"],
        "streamed": [],
        f"streamed, clip {clip:g}": ["--clip", str(clip)],
    }
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for name, options in configurations.items():
            print(f"=== {name}", flush=True)
            out = Path(folder, f"{len(runs)}.json")
            command = [sys.executable, __file__, "--one", "--shape", args.shape, "--out", str(out)]
            command += ["--batch", str(shape.batch_size), "--seq", str(shape.seq_len)]
            subprocess.run([*command, "--steps", str(args.steps), *options], check=True)
            (run,) = json.loads(out.read_text())["runs"]
            runs.append({**run, "name": name})
            print(f"{run['seconds_per_step']:.3f} s/step, losses {run['losses']}", flush=True)
    return runs


def machine() -> dict[str, Any]:
    """Returns what the figures depend on besides this repository."""
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "device": device.device_kind,
        "platform_version": device.client.platform_version,
        "python": sys.version.split()[0],
        **{name: version(name) for name in packages},
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Returns the runs as a Markdown table; the first is the yardstick."""
    rows = [
        "| | s/step | tokens/s | TFLOP/s | peak device memory | of the first row | last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        peak = run["peak_device_gib"]
        cells = [
            run["name"],
            f"{run['seconds_per_step']:.4g}",
            f"{run['tokens_per_second']:,.0f}",
            f"{run['tflops_per_second']:.4g}",
            "" if peak is None else f"{peak:.1f} GiB",
            f"{runs[0]['seconds_per_step'] / run['seconds_per_step']:.2f}",
            f"{run['losses'][-1]:.6f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def budget(text: str) -> int:
    """Reads a device budget: "all", or GiB."""
    return _EVERYTHING if text == "all" else int(float(text) * _GIB)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-3b-untied")
    parser.add_argument("--batch", type=int, help="sequences in a step; the shape has a default")
    parser.add_argument("--seq", type=int, help="tokens in a sequence; the shape has a default")
    parser.add_argument(
        "--steps", type=int, default=8, help=f"measured steps, after {_WARM_UP_STEPS} others"
    )
    parser.add_argument(
        "--one",
        action="store_true",
        help="measure only the configuration of the next two options, in this process",
    )
    parser.add_argument(
        "--device-budget",
        type=budget,
        metavar="GIB",
        help='device memory for state, or "all" for everything resident; without it, the least',
    )
    parser.add_argument("--clip", type=float, help="clip the gradients' global norm to this")
    parser.add_argument("--profile", type=Path, help="write a trace of two more steps here")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark.json"))
    args = parser.parse_args()
    if args.device_budget is not None and not args.one:
        parser.error("--device-budget is for --one; without that, the standard ones are measured")
    return args


def main() -> None:
    """Measures, prints the table and writes everything."""
    args = parse_arguments()
    shape = SHAPES[args.shape]
    shape = replace(
        shape, batch_size=args.batch or shape.batch_size, seq_len=args.seq or shape.seq_len
    )
    if args.one:
        state = "least" if args.device_budget is None else f"{args.device_budget / _GIB:.3g} GiB"
        runs = [{"name": f"device budget: {state}", **measure(args, shape)}]
    else:
        runs = measure_all(args, shape)
    print(table(runs))
    result = {"shape": args.shape, **asdict(shape), **machine(), "runs": runs}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
