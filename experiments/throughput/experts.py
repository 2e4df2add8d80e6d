"""Measures a mixture of experts in this process: writes a JSON file and prints a row.

The shape is Qwen3-30B-A3B's (https://huggingface.co/Qwen/Qwen3-30B-A3B): 30.5B parameters, of which
3.3B compute for each token. All of them are trained; an expert that no token of a step chose still
gets the update that Optax gives it.
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
from dispatch import dispatch_seconds
from flax import nnx
from machine import hardware, peak_device_gib, peak_host_gib, process_seconds, versions
from measure import budget, compute_dtype, figures_of_plan
from record import add_origin_options, find_origin, write
from timing import MIN_STEPS, Work, time_steps

import megatrain_jax as mt
from megatrain_jax import losses, models

_WARM_UP_STEPS = 3
_BATCHES = 8


def chosen_config(args: argparse.Namespace) -> models.DecoderConfig:
    """Returns the shape: Qwen3-30B-A3B's, or one to try this script with."""
    num_layers = args.layers
    experts = models.Experts(
        num=8 if args.tiny else 128,
        per_token=2 if args.tiny else 8,
        intermediate_size=16 if args.tiny else 768,
        normalize=True,
        layers=tuple(range(num_layers)),
        balance_weight=0.001,
    )
    head_dim = 16 if args.tiny else 128
    return models.DecoderConfig(
        vocab_size=512 if args.tiny else 151_936,
        hidden_size=64 if args.tiny else 2048,
        intermediate_size=128 if args.tiny else 6144,
        num_layers=num_layers,
        num_heads=4 if args.tiny else 32,
        num_kv_heads=2 if args.tiny else 4,
        head_dim=head_dim,
        rope=models.Rope(dim=head_dim, base=1e6),
        qk_norm=True,
        experts=experts,
    )


def loss_fn(model: Any, batch: Any) -> Any:
    """Returns the mean cross-entropy in nats per token, and the weighted load balance."""
    hidden, balance = model.hidden(batch["tokens"])
    loss = losses.next_token(hidden, model.head_weight(), batch["labels"])
    return loss + model.config.experts.balance_weight * balance


def active_parameters(config: models.DecoderConfig, total: int) -> int:
    """Returns how many parameters compute for one token: without the experts not chosen."""
    experts = config.experts
    assert experts is not None, "a mixture of experts"
    one = 3 * config.hidden_size * experts.intermediate_size
    return total - len(experts.layers) * (experts.num - experts.per_token) * one


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Trains a few steps and returns their figures."""
    config, compute = chosen_config(args), compute_dtype()

    def random_batch(seed: int) -> dict[str, np.ndarray]:
        size = (args.batch, args.seq + 1)
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, size, dtype=np.int32)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    start = time.perf_counter()
    trainer = mt.Trainer(
        lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
        loss_fn,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)),
        random_batch(0),
        microbatches=args.microbatches,
        precision=mt.Precision(compute=compute, master=args.master, state=args.state),
        device_budget=budget(args.device_budget),
    )
    prepared = time.perf_counter()
    print(trainer.plan, flush=True)
    batches = cycle([random_batch(seed) for seed in range(_BATCHES)])
    found = [trainer.read(trainer.step(next(batches)))["loss"]]
    first_over, since_process_start = time.perf_counter(), process_seconds()
    work = Work(
        begin=lambda: trainer.step(next(batches)),
        finish=lambda metrics: trainer.read(metrics)["loss"],
        drain=trainer.flush,
    )
    found += [work.finish(work.begin()) for _ in range(_WARM_UP_STEPS - 1)]
    times = time_steps(work, args.steps)
    dispatch = dispatch_seconds(trainer, [next(batches) for _ in range(2)])
    active = active_parameters(config, trainer.plan.num_parameters)
    tokens = args.batch * args.seq
    return {
        **figures_of_plan(trainer.plan),
        **times.figures(),
        "active_parameters": active,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / times.mean,
        "tflops_per_second": 6 * active * tokens / times.mean / 1e12,
        "bound": str(trainer.plan.bound),
        "dispatch_seconds_per_step": dispatch,
        "driver_cpu_seconds_per_step": times.driver_cpu,
        "peak_device_gib": peak_device_gib(),
        "peak_host_gib": peak_host_gib(),
        "seconds_to_prepare": prepared - start,
        "seconds_of_start": trainer.startup,
        "seconds_of_first_step": first_over - prepared,
        "seconds_from_process_start_to_first_step": since_process_start,
        "losses": found + times.losses,
    }


def main() -> None:
    """Measures, prints the row and writes everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--seq", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--device-budget", default="auto", help="least, auto, or GiB")
    for held, default in (("master", "bfloat16"), ("state", "int8")):
        parser.add_argument(f"--{held}", default=default, help="form that the host holds it in")
    parser.add_argument("--steps", type=int, default=MIN_STEPS, help="steps that the mean is of")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try this script")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/experts.json"))
    add_origin_options(parser)
    args = parser.parse_args()
    origin = find_origin(args)
    result = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device_budget": args.device_budget,
        "held": {"master": args.master, "state": args.state},
        "hardware": hardware(),
        "versions": versions(),
        **measure(args),
    }
    write(args.out, result, origin)
    print(
        f"{result['mean_seconds_per_step']:.4g} s/step, {result['tokens_per_second']:,.0f} "
        f"tokens/s, {result['tflops_per_second']:.4g} TFLOP/s of active parameters",
        flush=True,
    )


if __name__ == "__main__":
    main()
