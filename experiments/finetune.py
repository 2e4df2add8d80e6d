"""Fine-tunes an open-weights model on conversations and writes it for Transformers.

    python experiments/finetune.py --model checkpoints/Qwen2.5-7B --data chats.jsonl --out mine

Plans, trains with clipping, evaluates on conversations held out, saves checkpoints as it goes and
resumes from them, and exports. What it did is written to `report.json` in the folder of `--out`.
"""

import argparse
import json
import math
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import megatrain_jax as mt
from megatrain_jax import data, models

GIB = 2**30


def main() -> None:
    """Plans, trains, exports, and writes the report."""
    args = parse_arguments()
    if (args.out / "model").exists():
        sys.exit(f"{args.out / 'model'} exists already: move it away, or choose another --out")
    clock = Clock()
    chats = data.chat(
        args.data,
        args.model,
        length=args.length,
        batch_size=args.batch,
        seed=args.seed,
        epochs=args.epochs,
        train_on=args.train_on,
        too_long=args.too_long,
    )
    train, held_out = chats.split(args.held_out, args.seed)
    print(f"training: {train}\nheld out: {held_out}", flush=True)
    steps = args.steps or len(train)
    clock.lap("data")

    pretrained = models.load_pretrained(args.model)
    optimizer = adamw(args.learning_rate, steps)
    compute = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    settings: dict[str, Any] = {
        "microbatches": args.microbatches,
        "precision": mt.Precision(
            compute=compute, frozen=args.frozen_dtype, master=args.master, state=args.state
        ),
        "trainable": args.trainable,
    }
    result = mt.fit(
        pretrained.model,
        models.next_token_loss,
        train,
        optimizer,
        steps=steps,
        params=pretrained.params,
        eval_data=held_out,
        eval_every=args.eval_every,
        checkpoint_dir=None if args.no_checkpoints else args.out / "checkpoints",
        checkpoint_every=args.checkpoint_every,
        keep=1,
        **settings,
    )
    print(result.trainer.plan, flush=True)
    clock.lap("training")
    exported = models.save_pretrained(result.trainer, args.out / "model")
    clock.lap("export")
    print(f"exported to {exported}", flush=True)
    report = {
        **figures(result, args.batch * args.length),
        "seconds": clock.seconds,
        "tokens_held_out": held_out.num_tokens,
        "history": list(result.history),
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    result.history.plot().savefig(args.out / "loss.png")


def adamw(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with clipping, 3% of the steps to warm up, and a cosine down to a tenth."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, math.ceil(0.03 * steps), steps + 1, 0.1 * learning_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.0)
    )


def figures(result: mt.FitResult, tokens: int) -> dict[str, Any]:
    """The run in numbers: rates, losses, peaks."""
    # The first steps compile; the last ones wait for what is in flight.
    seconds = [record["seconds"] for record in result.history[3:-2]]
    stats = jax.devices()[0].memory_stats() or {}
    mean = statistics.mean(seconds) if seconds else None
    return {
        "steps": result.trainer.num_steps,
        "num_parameters": result.trainer.plan.num_parameters,
        "num_frozen": result.trainer.plan.num_frozen,
        "num_measured_steps": len(seconds),
        "mean_seconds_per_step": mean,
        "stdev_seconds_per_step": statistics.stdev(seconds) if len(seconds) > 1 else None,
        "tokens_per_step": tokens,
        "tokens_per_second": mean and tokens / mean,
        "first_loss": result.history[0]["loss"],
        "last_loss": result.history[-1]["loss"],
        "eval_loss": result.history[-1].get("eval_loss"),
        "peak_device_gib": stats.get("peak_bytes_in_use", 0) / GIB or None,
        "peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


class Clock:
    """The seconds of each part of a run."""

    def __init__(self):
        """Starts the first part."""
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends a part."""
        now = time.perf_counter()
        self.seconds[name], self._start = now - self._start, now
        print(f"{name}: {self.seconds[name]:.1f} s", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint")
    parser.add_argument("--data", nargs="+", required=True, help="JSON, JSONL or Parquet files")
    parser.add_argument("--out", type=Path, required=True, help="a folder for all results")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, help="instead of whole epochs")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--train-on", choices=("assistant", "all"), default="assistant")
    parser.add_argument("--too-long", choices=("error", "cut", "split", "drop"), default="error")
    parser.add_argument("--held-out", type=float, default=0.02, help="share of the conversations")
    parser.add_argument("--trainable", help="train only parameters whose path has this in it")
    parser.add_argument("--frozen-dtype", help="dtype of the others, such as bfloat16")
    parser.add_argument("--master", default="float32", help="dtype of what is trained, at rest")
    parser.add_argument("--state", help="how optimizer state is held, such as bfloat16")
    parser.add_argument("--eval-every", type=int)
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument(
        "--no-checkpoints", action="store_true", help="one takes 12 bytes a parameter on disk"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
