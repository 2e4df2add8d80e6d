"""Steps of a Qwen3 by others in bfloat16 and in float8, with all state on one GPU.

The model is the Qwen3 1.7B of https://github.com/jax-ml/bonsai as published. Its source is one
file, and not in this repository:

    python experiments/throughput/foreign_qwen3.py bonsai/models/qwen3/modeling.py
"""

import argparse
import dataclasses
import gc
import importlib.util
import math
import shlex
import sys
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from machine import hardware, peak_device_gib, versions
from record import add_origin_options, find_origin, write
from timing import MIN_STEPS, Work, time_steps

import megatrain_jax as mt

_WARM_UP_STEPS = 3
_SHAPE, _TINY_SHAPE = (8, 1024), (2, 64)  # rows and their tokens
_FORMS: dict[str, Any] = {
    "bfloat16": None,
    "float8": "float8",
    "float8_and_head": {"layers/*": "float8", "lm_head/*": "float8"},
}
_TINY = {
    "num_layers": 2,
    "emb_dim": 64,
    "mlp_dim": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}


def imported(source: Path) -> ModuleType:
    """Imports the model's source from a file."""
    spec = importlib.util.spec_from_file_location("foreign_qwen3_source", source)
    assert spec is not None and spec.loader is not None, f"{source} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def loss_of(source: ModuleType, config: Any) -> Callable[[Any, Any], Any]:
    """Returns the mean cross-entropy of next tokens, in nats per token."""

    def loss_fn(model: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        rows, length = tokens.shape
        cache = source.init_cache(config, rows, length, 0, model.lm_head.kernel[...].dtype)
        segments = jnp.ones(tokens.shape, jnp.int32)
        logits = model(tokens, cache=cache, segment_ids=segments)[:, :-1].astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()

    return loss_fn


def measured(
    source: ModuleType, config: Any, products: Any, shape: tuple[int, int], num_steps: int
) -> dict[str, Any]:
    """Trains a few steps with products in one form, and returns their figures."""
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, shape)
    batch = {"tokens": tokens.astype(np.int32)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    loss_fn, optimizer = loss_of(source, config), optax.adamw(1e-4)
    precision = mt.Precision(products=products)

    def build() -> Any:
        return source.Qwen3(config, rngs=nnx.Rngs(0))

    machine = mt.this_machine() or mt.card("H100")
    planned = mt.plan(build, loss_fn, optimizer, shapes, hardware=machine, precision=precision)
    trainer = mt.Trainer(build, loss_fn, optimizer, batch, precision=precision)
    batches = repeat(batch)
    work = Work(
        begin=lambda: trainer.step(next(batches)),
        finish=lambda metrics: trainer.read(metrics)["loss"],
        drain=trainer.flush,
    )
    losses = [work.finish(work.begin()) for _ in range(_WARM_UP_STEPS)]
    times = time_steps(work, num_steps)
    seconds = times.figures()["mean_seconds_per_step"]
    return {
        "seconds": seconds,
        "tokens_per_second": math.prod(shape) / seconds,
        "planned_without_timing": planned.seconds_per_step,
        "planned_seconds": trainer.plan.seconds_per_step,
        "stages_that_keep_residuals": len(trainer.schedule.kept),
        "losses": losses,
        "peak_gib": peak_device_gib(),
        **times.figures(),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measures all forms one after another, prints a line for each, and writes everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the model's file")
    parser.add_argument("--tiny", action="store_true", help="tries the script without a GPU")
    parser.add_argument("--steps", type=int, default=2 * MIN_STEPS)
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/foreign_qwen3.json"))
    add_origin_options(parser)
    args = parser.parse_args(arguments)
    origin = find_origin(args)
    source = imported(args.source)
    config = dataclasses.replace(source.ModelConfig.qwen3_1_7b(), **(_TINY if args.tiny else {}))
    shape = _TINY_SHAPE if args.tiny else _SHAPE
    figures: dict[str, Any] = {
        "name": f"Qwen3 1.7B of jax-ml/bonsai, {shape[0]} rows of {shape[1]:,} tokens, AdamW in "
        "fp32, all state on the GPU",
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
    }
    for form, products in _FORMS.items():
        row = measured(source, config, products, shape, args.steps)
        gc.collect()  # the trainer's memory is needed for the next one
        figures[form] = row
        row["over_bfloat16"] = figures["bfloat16"]["seconds"] / row["seconds"]
        found = write(args.out, figures, origin)
        print(
            f"{form}: {row['seconds']:.4f} s, {row['over_bfloat16']:.3f} times as fast, planned "
            f"{row['planned_without_timing'] or 0:.4f} and {row['planned_seconds'] or 0:.4f} s",
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
