"""Measures a mixture of experts in this process: writes a JSON file and prints a row.

The shape is Qwen3-30B-A3B's (https://huggingface.co/Qwen/Qwen3-30B-A3B): 30.5B parameters, of which
3.3B compute for each token. All of them are trained; an expert that no token of a step chose still
gets the update that Optax gives it.
"""

import argparse
from typing import Any

import optax
from decoder_run import DecoderRun, record_run, run_options
from dispatch import dispatch_seconds
from flax import nnx
from measure import budget, compute_dtype
from timing import MIN_STEPS, time_long_steps, time_steps

import megatrain_jax as mt
from megatrain_jax import losses, models

_WARM_UP_STEPS = 3


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
    clip = [] if args.no_clip else [optax.clip_by_global_norm(1.0)]
    run = DecoderRun(
        lambda batch: mt.Trainer(
            lambda: models.Decoder(config, rngs=nnx.Rngs(0)),
            loss_fn,
            optax.chain(*clip, optax.adamw(1e-4)),
            batch,
            microbatches=args.microbatches,
            precision=mt.Precision(compute=compute, master=args.master, state=args.state),
            device_budget=budget(args.device_budget),
        ),
        args,
        config.vocab_size,
    )
    if args.steps < MIN_STEPS:
        found, times, dispatch = [], time_long_steps(run.work, args.steps), None
    else:
        found = [run.work.finish(run.work.begin()) for _ in range(_WARM_UP_STEPS)]
        times = time_steps(run.work, args.steps)
        dispatch = dispatch_seconds(run.trainer, [next(run.batches) for _ in range(2)])
    active = active_parameters(config, run.trainer.plan.num_parameters)
    figures = run.figures(times)
    return {
        "held": {"master": args.master, "state": args.state},
        **figures,
        "active_parameters": active,
        "tflops_per_second": 6 * active * figures["tokens_per_second"] / 1e12,
        "dispatch_seconds_per_step": dispatch,
        "losses": found + times.losses,
    }


def main() -> None:
    """Measures, prints the row and writes everything."""
    parser = run_options(__doc__, "experts", layers=48, steps=MIN_STEPS)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--no-clip", action="store_true", help="without clipping by a global norm")
    for held, default in (("master", "bfloat16"), ("state", "int8")):
        parser.add_argument(f"--{held}", default=default, help="form that the host holds it in")
    result = record_run(parser.parse_args(), measure)
    print(
        f"{result['mean_seconds_per_step']:.4g} s/step, {result['tokens_per_second']:,.0f} "
        f"tokens/s, {result['tflops_per_second']:.4g} TFLOP/s of active parameters",
        flush=True,
    )


if __name__ == "__main__":
    main()
