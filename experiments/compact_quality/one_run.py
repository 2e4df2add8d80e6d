"""One run in this process: trains the decoder with one setting and seed, and writes a JSON file.

    python experiments/compact_quality/one_run.py --row fp32 --seed 0 --out runs/fp32.json

The learning rate warms up from 0: step 1 changes no parameter, in all committed results, too.

Stopped by SIGTERM it saves a checkpoint beside the file, and the same command goes on from there.
"""

import argparse
import dataclasses
import json
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).resolve().parents[1]
sys.path += [str(EXPERIMENTS), str(EXPERIMENTS / "throughput")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import tokens  # noqa: E402
from flax import nnx  # noqa: E402
from machine import hardware, peak_device_gib, process_seconds, versions  # noqa: E402
from optax.contrib import MuonDimensionNumbers, muon  # noqa: E402
from quickstart import Decoder, loss_fn, random_batches, spread_batches  # noqa: E402
from record import add_origin_options, find_origin, write  # noqa: E402
from settings import FULL, SETTINGS, Setting, Sizes  # noqa: E402

import megatrain_jax as mt  # noqa: E402

_EVERYTHING = 10**15
_START, _EVALUATION = "start_seconds", "evaluation_seconds"
Text = tuple[np.ndarray, np.ndarray, dict[str, Any]]


def train(
    setting: Setting, sizes: Sizes, seed: int, text: Text, checkpoints: Path
) -> dict[str, Any]:
    """Trains, or goes on, and returns the run's figures.

    All state is on the device, and so are sums of gradients between waves: they have the same bits
    there as in the host, and runs side by side would wait for the link that they share.

    Initial values and the order of the data follow from the seed, whatever the setting.

    Args:
        setting: How masters and state are held, and the optimizer.
        sizes: The sizes.
        seed: Of initial values, data and rounding.
        text: The training text, the held-out text, and the figures of both.
        checkpoints: Folder from which a stopped run resumes.

    Raises:
        SystemExit: If a signal ended the run.
    """
    compute = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    to_train_on, held_out, text_figures = text

    def held_out_batches(count: int) -> list[dict[str, Any]]:
        return spread_batches(held_out, sizes.eval_batch_size, sizes.seq_len, count)

    def build() -> Decoder:
        rngs = nnx.Rngs(seed)
        return Decoder(sizes.dim, sizes.heads, sizes.layers, compute, rngs, sizes.vocab)

    watch = _Watch(held_out_batches(sizes.eval_batches))
    result = mt.fit(
        build,
        loss_fn,
        random_batches(to_train_on, sizes.batch_size, sizes.seq_len, seed),
        optimizer(setting, sizes),
        steps=sizes.steps,
        seed=seed if setting.held else 0,  # rounding draws from it, and nothing else
        precision=mt.Precision(compute=compute, **setting.held),
        microbatches=setting.waves,
        waves=setting.waves,
        device_budget=_EVERYTHING,
        eval_data=watch,
        eval_every=sizes.eval_every,
        checkpoint_dir=checkpoints,
        keep=1,
        callbacks=[watch],
        progress=False,
    )
    plan, history = result.trainer.plan, list(result.history)
    if result.interrupted:
        pace = f", {1000 * _seconds_per_step(history):.0f} ms a step" if history else ""
        sys.exit(f"stopped after step {result.trainer.num_steps}{pace}")
    began = time.perf_counter()
    final = result.trainer.evaluate(held_out_batches(sizes.final_batches))
    return {
        "num_parameters": plan.num_parameters,
        "host_bytes_per_parameter": plan.host_bytes / plan.num_parameters,
        "copied_bytes_per_step": plan.bytes_in + plan.bytes_out,
        "text": text_figures,
        "loss_unit": sizes.loss_unit,
        "held_out_loss": final["loss"],
        "curve": {str(r["step"]): r["eval_loss"] for r in history if "eval_loss" in r},
        "training_curve": {
            str(part[-1]["step"]): round(statistics.mean(r["loss"] for r in part), 5)
            for part in (
                history[i : i + sizes.loss_every] for i in range(0, len(history), sizes.loss_every)
            )
        },
        # Further runs use the same device, so this is no measure of speed.
        "median_seconds_per_step_beside_others": _seconds_per_step(history),
        # A value for each process that the run had; functions that evaluate are compiled by the
        # first evaluation of each.
        "start_seconds": [r[_START] for r in history if _START in r],
        "evaluation_seconds": [r[_EVALUATION] for r in history if _EVALUATION in r],
        "final_evaluation_seconds": time.perf_counter() - began,
        "peak_device_gib": peak_device_gib(),
    }


def optimizer(setting: Setting, sizes: Sizes) -> optax.GradientTransformation:
    """Returns the row's optimizer after clipping, with warmup and a cosine down to zero."""
    rate = sizes.learning_rate * setting.rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, sizes.steps // 20, sizes.steps)
    # The product of learning rate and weight decay is the same in all rows.
    decay = 0.1 / setting.rate
    if setting.optimizer == "adamw":
        chosen = optax.adamw(schedule, b2=0.95, weight_decay=decay)
    elif setting.optimizer == "lion":
        chosen = optax.lion(schedule, b1=0.95, b2=0.98, weight_decay=decay)
    elif setting.optimizer == "adafactor":
        # `optax.adafactor(schedule, multiply_by_parameter_scale=False)`, whose own weight decay
        # does not follow the learning rate.
        chosen = optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(decay),
            optax.scale_by_learning_rate(schedule),
        )
    else:
        # Updates of the size of AdamW's, so that one schedule serves both.
        chosen = muon(
            schedule,
            weight_decay=decay,
            adam_b2=0.95,
            adam_weight_decay=decay,
            muon_weight_dimension_numbers=_matrices_of_blocks,
            consistent_rms=0.2,
        )
    return optax.chain(optax.clip_by_global_norm(1.0), chosen)


def _matrices_of_blocks(params: Any) -> Any:
    """The parameters that Muon updates: AdamW has the embedding, the head and the norms' scales."""

    def numbers(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        in_block = "blocks" in jax.tree_util.keystr(path)
        return MuonDimensionNumbers() if in_block and leaf.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(numbers, params)


class _Watch:
    """A callback that shows evaluations, and notes seconds in the saved history.

    They are the seconds of an evaluation, and from the start of the process to the end of its first
    step, when all of it is compiled.
    """

    def __init__(self, eval_batches: list[dict[str, Any]]):
        self.eval_batches = eval_batches
        self.began = 0.0
        self.is_starting = True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begins an evaluation."""
        self.began = time.perf_counter()
        return iter(self.eval_batches)

    def __call__(self, trainer: mt.Trainer, record: dict[str, Any]) -> None:
        if self.is_starting:
            record[_START] = process_seconds()
            self.is_starting = False
        if "eval_loss" in record:
            record[_EVALUATION] = time.perf_counter() - self.began
            loss, held_out = record["loss"], record["eval_loss"]
            print(f"step {record['step']}: loss {loss:.4f}, held out {held_out:.4f}", flush=True)


def _seconds_per_step(history: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(record["seconds"] for record in history)


def main() -> None:
    """Trains, writes the figures and drops the checkpoints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", choices=SETTINGS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--sizes", type=json.loads, default={}, help="unusual sizes, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    add_origin_options(parser)
    args = parser.parse_args()
    origin, setting = find_origin(args), SETTINGS[args.row]
    sizes = dataclasses.replace(FULL, **args.sizes)
    checkpoints = args.out.with_suffix(".checkpoints")
    figures = train(setting, sizes, args.seed, tokens.read(sizes, args.out.parent), checkpoints)
    result = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "name": args.row,
        "seed": args.seed,
        "held": dict(setting.held),
        "optimizer": setting.optimizer,
        "learning_rate": setting.rate * sizes.learning_rate,
        "sizes": dataclasses.asdict(sizes),
        "hardware": hardware(),
        "versions": versions(),
        **figures,
    }
    write(args.out, result, origin)
    shutil.rmtree(checkpoints)


if __name__ == "__main__":
    main()
