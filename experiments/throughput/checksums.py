"""The cost of checksums: saves and restores of one state, in turn with and without them."""

import argparse
import json
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from decoder import Decoder, loss_fn, random_batch
from flax import nnx
from machine import GIB, hardware, versions
from record import add_origin_options, find_origin, write
from shapes import add_shape_options, chosen_shape

import megatrain_jax as mt
from megatrain_jax._src.engine.checkpoint import save
from megatrain_jax._src.engine.checkpoint.contents import Checksums


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_shape_options(parser, "qwen2.5-7b-untied")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("runs/throughput/checksums"))
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/checksums.json"))
    add_origin_options(parser)
    args = parser.parse_args()
    shape, origin = chosen_shape(args), find_origin(args)
    compute = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    batch = random_batch(shape, 0)
    trainer = mt.Trainer(
        lambda: Decoder(shape, compute, nnx.Rngs(0)),
        loss_fn,
        optax.adamw(1e-4),
        batch,
        precision=mt.Precision(compute=compute),
    )
    trainer.read(trainer.step(batch))
    trainer.flush()
    figures = {
        "command": shlex.join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": versions(),
        "state_gib": trainer.plan.host_bytes / GIB,
        **measured(trainer, args.folder, args.pairs),
    }
    print(json.dumps(write(args.out, figures, origin), indent=2))


def measured(trainer: mt.Trainer, folder: Path, pairs: int) -> dict[str, Any]:
    """Returns the seconds of each save and restore; which of a pair comes first changes."""
    without_checksums = mock.patch.object(save, "checksum", lambda chunk: "")
    without_comparing = mock.patch.object(Checksums, "verify", lambda *_: None)
    rows: dict[str, list[float]] = {
        f"{kind}_{how}_seconds": [] for kind in ("save", "restore") for how in ("with", "without")
    }
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(pairs):
        order = ("with", "without")[:: 1 if i % 2 else -1]
        for how in order:
            path = folder / how
            if how == "with":
                took = seconds(lambda path=path: trainer.save(path))
            else:
                with without_checksums:
                    took = seconds(lambda path=path: trainer.save(path))
                shutil.rmtree(path)
            rows[f"save_{how}_seconds"].append(took)
        for how in order:
            if how == "with":
                took = seconds(lambda: trainer.restore(folder / "with"))
            else:
                with without_comparing:
                    took = seconds(lambda: trainer.restore(folder / "with"))
            rows[f"restore_{how}_seconds"].append(took)
        shutil.rmtree(folder / "with")
    return {**rows, "means": {name: statistics.mean(row) for name, row in rows.items()}}


def seconds(call: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
