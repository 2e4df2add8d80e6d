"""How far a plan's seconds are off for a T5, a UNet, a Vision Transformer and a Mamba 2.

Records the seconds of a step as planned from operations and bytes, as planned after a run has timed
its functions, and as measured. The Mamba 2 is that of https://github.com/jax-ml/bonsai in its
published size of 1.3B; its source is one file, and not in this repository:

    python experiments/throughput/planned_times.py t5
    python experiments/throughput/planned_times.py mamba2 --source bonsai/models/mamba2/modeling.py
"""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import t5_model
import unet_model
import vit
from flax import nnx
from foreign_qwen3 import imported
from machine import hardware, peak_device_gib, versions
from measure import figures_of_plan
from record import add_origin_options, find_origin, write
from shapes import SHAPES
from timing import MIN_STEPS, Work, time_steps

import megatrain_jax as mt

_WARM_UP_STEPS = 3


def _t5(_source: Path | None, *, tiny: bool) -> tuple[Callable[[], Any], Any, Any, dict[str, Any]]:
    sizes = t5_model.TINY if tiny else t5_model.Sizes()
    batch = t5_model.random_batch(sizes, *((4, 16) if tiny else (32, 512)))
    return lambda: t5_model.T5(sizes, nnx.Rngs(0)), t5_model.loss_fn, batch, {}


def _unet(
    _source: Path | None, *, tiny: bool
) -> tuple[Callable[[], Any], Any, Any, dict[str, Any]]:
    sizes = unet_model.TINY if tiny else unet_model.Sizes()
    batch = unet_model.random_batch(sizes, *((2, 16) if tiny else (48, 64)))
    return lambda: unet_model.UNet(sizes, nnx.Rngs(0)), unet_model.loss_fn, batch, {}


def _vit(_source: Path | None, *, tiny: bool) -> tuple[Callable[[], Any], Any, Any, dict[str, Any]]:
    shape = SHAPES["vit-tiny"] if tiny else dataclasses.replace(SHAPES["vit-g"], num_layers=12)
    return vit.builder(shape), vit.loss_fn, vit.random_batch(shape, 0), {"microbatches": 4}


def _mamba2(
    source: Path | None, *, tiny: bool
) -> tuple[Callable[[], Any], Any, Any, dict[str, Any]]:
    assert source is not None, "--source names the file of the model"
    module = imported(source)
    sizes = module.ModelConfig(hidden_size=2048, num_hidden_layers=48)
    config = module.ModelConfig.tiny() if tiny else sizes
    shape = (2, 64) if tiny else (8, 1024)
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, shape).astype(np.int32)

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(batch["tokens"], labels=batch["tokens"])["loss"]

    def build() -> Any:
        return module.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))

    return build, loss_fn, {"tokens": tokens}, {}


MODELS = {"t5": _t5, "unet": _unet, "vit": _vit, "mamba2": _mamba2}


def measured(name: str, source: Path | None, *, tiny: bool, num_steps: int) -> dict[str, Any]:
    """Plans and trains a model for a few steps, clipping to 1, and returns the figures."""
    build, loss_fn, batch, options = MODELS[name](source, tiny=tiny)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    machine = mt.this_machine() or mt.card("H100")
    planned = mt.plan(build, loss_fn, optimizer, shapes, hardware=machine, **options)
    trainer = mt.Trainer(build, loss_fn, optimizer, batch, **options)
    print(trainer.plan, flush=True)
    batches = repeat(batch)
    work = Work(
        begin=lambda: trainer.step(next(batches)),
        finish=lambda metrics: trainer.read(metrics)["loss"],
        drain=trainer.flush,
    )
    for _ in range(_WARM_UP_STEPS):
        work.finish(work.begin())
    times = time_steps(work, num_steps)
    return {
        "model": name,
        "planned_without_timing": planned.seconds_per_step,
        **figures_of_plan(trainer.plan),
        **times.figures(),
        "peak_device_gib": peak_device_gib(),
        "seconds_of_start": dict(trainer.startup),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measures, prints the row and writes everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--source", type=Path, help="the file of mamba2")
    parser.add_argument("--tiny", action="store_true", help="tries the script without a GPU")
    parser.add_argument("--steps", type=int, default=MIN_STEPS)
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/planned_times.json"))
    add_origin_options(parser)
    args = parser.parse_args(arguments)
    origin = find_origin(args)
    figures = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
        **measured(args.model, args.source, tiny=args.tiny, num_steps=args.steps),
    }
    found = write(args.out, figures, origin)
    seconds = found["mean_seconds_per_step"]
    plans = found["planned_without_timing"], found["predicted_seconds_per_step"]
    errors = [f"{plan:.4f} s ({plan / seconds - 1:+.1%})" for plan in plans if plan]
    print(f"{args.model}: planned {' and after timing '.join(errors)}, measured {seconds:.4f} s")
    return found


if __name__ == "__main__":
    main()
