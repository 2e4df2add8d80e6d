"""Saves and restores the state of a decoder: seconds, extra host memory, and what `dd` reaches.

The state is as large as `--shape` and `--layers` make it and has to fit the disk under `--folder`.
Several `dd` processes write as many bytes to the same place, side by side, from memory, each with
an `fsync` at its end, as Orbax has one at the end of each file.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from decoder import Decoder, loss_fn, random_batch
from flax import nnx
from machine import GIB, hardware, versions
from record import add_origin_options, find_origin, write
from shapes import add_shape_options, chosen_shape

import megatrain_jax as mt

_BLOCK = 16 << 20


def main() -> None:
    """Measures, prints and writes the figures."""
    args = parse_arguments()
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
    state = trainer.plan.host_bytes
    loss = trainer.read(trainer.step(batch))["loss"]
    trainer.flush()
    path = args.folder / "checkpoint"
    shutil.rmtree(path, ignore_errors=True)
    figures: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": versions(),
        "num_parameters": trainer.plan.num_parameters,
        "state_gib": state / GIB,
        "save": measured(lambda: trainer.save(path)),
    }
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    next_loss = trainer.read(trainer.step(batch))["loss"]
    figures["restore"] = measured(lambda: trainer.restore(path))
    again = trainer.read(trainer.step(batch))["loss"]
    assert again == next_loss != loss, (loss, next_loss, again)
    shutil.rmtree(path)
    figures["dd"] = {n: {"seconds": dd(args.folder, size, n)} for n in args.writers}
    for row in (figures["save"], figures["restore"], *figures["dd"].values()):
        row["gib_per_s"] = size / GIB / row["seconds"]
    fastest = max(row["gib_per_s"] for row in figures["dd"].values())
    figures["save_share_of_dd"] = figures["save"]["gib_per_s"] / fastest
    print(json.dumps(write(args.out, figures, origin), indent=2))


def measured(call: Callable[[], object]) -> dict[str, float]:
    """Returns the seconds a call takes, and by how much resident memory grew at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew, Linux only
    before, start = resident_gib("VmRSS"), time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "extra_host_gib": resident_gib("VmHWM") - before}


def resident_gib(field: str) -> float:
    """Returns a field of this process's status, such as its peak resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 2**20


def dd(folder: Path, num_bytes: int, writers: int) -> float:
    """Returns the seconds in which `dd` processes write files of `num_bytes` in all."""
    count = num_bytes // writers // _BLOCK
    files = [folder / f"dd.{i}" for i in range(writers)]
    start = time.perf_counter()
    processes = [
        subprocess.Popen(
            ["dd", "if=/dev/zero", f"of={file}", f"bs={_BLOCK}", f"count={count}", "conv=fsync"],
            stderr=subprocess.DEVNULL,
        )
        for file in files
    ]
    codes = [process.wait() for process in processes]
    seconds = time.perf_counter() - start
    for file in files:
        file.unlink(missing_ok=True)
    if any(codes):
        sys.exit(f"dd failed in {folder}: is there room for {num_bytes / GIB:.1f} GiB?")
    return seconds


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape_options(parser, "qwen2.5-7b-untied")
    parser.add_argument("--folder", type=Path, default=Path("runs/throughput/checkpoint"))
    parser.add_argument(
        "--writers", type=int, nargs="+", default=[1, os.cpu_count() or 1], help="dd processes"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/checkpoint.json"))
    add_origin_options(parser)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
