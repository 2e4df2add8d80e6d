"""Measures LoRA on a large frozen model in this process: writes a JSON file and prints a row.

The shape is that of Llama 3 with 70B parameters (https://arxiv.org/abs/2407.21783, table 3), with
random weights. Adapters of attention's queries and values are trained; the frozen parameters are
held in 8 bits.
"""

import argparse
import shlex
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx
from machine import hardware, peak_device_gib, peak_host_gib, process_seconds, versions
from measure import budget, compute_dtype, figures_of_plan
from record import add_origin_options, find_origin, write
from timing import Work, time_long_steps

import megatrain_jax as mt
from megatrain_jax import models

_BATCHES = 4
_TARGETS = r"self_attn/(q|v)_proj"


def chosen_config(args: argparse.Namespace) -> models.DecoderConfig:
    """Returns the shape: the 70B's, or one to try this script with."""
    head_dim = 16 if args.tiny else 128
    return models.DecoderConfig(
        vocab_size=512 if args.tiny else 128_256,
        hidden_size=64 if args.tiny else 8192,
        intermediate_size=128 if args.tiny else 28_672,
        num_layers=args.layers,
        num_heads=4 if args.tiny else 64,
        num_kv_heads=2 if args.tiny else 8,
        head_dim=head_dim,
        rope=models.Rope(dim=head_dim, base=5e5),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Trains a few steps and returns their figures."""
    config = chosen_config(args)

    def random_batch(seed: int) -> dict[str, np.ndarray]:
        size = (args.batch, args.seq + 1)
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, size, dtype=np.int32)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def build() -> models.Decoder:
        return models.Decoder(config, rngs=nnx.Rngs(0))

    adapted = models.lora(build, targets=_TARGETS, rank=args.rank)
    start = time.perf_counter()
    trainer = mt.Trainer(
        adapted.model,
        models.next_token_loss,
        optax.adamw(1e-4),
        random_batch(0),
        trainable=adapted.trainable,
        precision=mt.Precision(compute=compute_dtype(), frozen=args.frozen),
        device_budget=budget(args.device_budget),
    )
    prepared = time.perf_counter()
    print(trainer.plan, flush=True)
    batches = cycle([random_batch(seed) for seed in range(_BATCHES)])
    ends: list[float] = []

    def finish(metrics: Any) -> float:
        loss = trainer.read(metrics)["loss"]
        ends.append(process_seconds())
        return loss

    work = Work(begin=lambda: trainer.step(next(batches)), finish=finish, drain=trainer.flush)
    times = time_long_steps(work, args.steps)
    plan, tokens = trainer.plan, args.batch * args.seq
    return {
        **figures_of_plan(plan),
        **times.figures(),
        "num_frozen": plan.num_frozen,
        "frozen_gib": plan.frozen_bytes / 2**30,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / times.mean,
        "bound": str(plan.bound),
        "driver_cpu_seconds_per_step": times.driver_cpu,
        "peak_device_gib": peak_device_gib(),
        "peak_host_gib": peak_host_gib(),
        "seconds_to_prepare": prepared - start,
        "seconds_of_start": trainer.startup,
        "seconds_from_process_start_to_first_step": ends[0],
        "losses": times.losses,
    }


def main() -> None:
    """Measures, prints the row and writes everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--seq", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--frozen", default="int8", help="form that frozen parameters are held in")
    parser.add_argument("--device-budget", default="auto", help="least, auto, or GiB")
    parser.add_argument("--steps", type=int, default=3, help="steps that the mean is of")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try this script")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/adapters.json"))
    add_origin_options(parser)
    args = parser.parse_args()
    origin = find_origin(args)
    result = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device_budget": args.device_budget,
        "hardware": hardware(),
        "versions": versions(),
        **measure(args),
    }
    write(args.out, result, origin)
    print(
        f"{result['mean_seconds_per_step']:.4g} s/step, {result['tokens_per_second']:,.0f} "
        f"tokens/s, {result['peak_device_gib'] or 0:.1f} GiB of the GPU at peak",
        flush=True,
    )


if __name__ == "__main__":
    main()
