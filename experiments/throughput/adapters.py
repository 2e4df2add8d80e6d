"""Measures LoRA on a large frozen model in this process: writes a JSON file and prints a row.

The shape is that of Llama 3 with 70B parameters (https://arxiv.org/abs/2407.21783, table 3), with
random weights. Adapters of attention's queries and values are trained; the frozen parameters are
held in 8 bits.
"""

import argparse
from typing import Any

import optax
from decoder_run import DecoderRun, record_run, run_options
from flax import nnx
from machine import GIB
from measure import budget, compute_dtype
from timing import time_long_steps

import megatrain_jax as mt
from megatrain_jax import models

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
    adapted = models.lora(
        lambda: models.Decoder(config, rngs=nnx.Rngs(0)), targets=_TARGETS, rank=args.rank
    )
    run = DecoderRun(
        lambda batch: mt.Trainer(
            adapted.model,
            models.next_token_loss,
            optax.adamw(1e-4),
            batch,
            trainable=adapted.trainable,
            precision=mt.Precision(compute=compute_dtype(), frozen=args.frozen),
            device_budget=budget(args.device_budget),
        ),
        args,
        config.vocab_size,
    )
    times = time_long_steps(run.work, args.steps)
    return {
        **run.figures(times),
        "num_frozen": run.trainer.plan.num_frozen,
        "frozen_gib": run.trainer.plan.frozen_bytes / GIB,
        "losses": times.losses,
    }


def main() -> None:
    """Measures, prints the row and writes everything."""
    parser = run_options(__doc__, "adapters", layers=80, steps=3)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--frozen", default="int8", help="form that frozen parameters are held in")
    result = record_run(parser.parse_args(), measure)
    print(
        f"{result['mean_seconds_per_step']:.4g} s/step, {result['tokens_per_second']:,.0f} "
        f"tokens/s, {result['peak_device_gib'] or 0:.1f} GiB of the GPU at peak",
        flush=True,
    )


if __name__ == "__main__":
    main()
