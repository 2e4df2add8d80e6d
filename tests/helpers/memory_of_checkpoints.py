"""A program that saves and restores many times and prints the KiB that each takes for good.

It is a program because memory is a process's, and other tests' would come and go meanwhile.
Arguments: a folder, the number of saves and that of restores.
"""

import ctypes
import gc
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import megatrain_jax as mt

NUM_LAYERS = 16


def loss_fn(params, batch):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"])
    return jnp.mean(x**2)


def make_trainer() -> mt.Trainer:
    params = [{"w": np.eye(4, dtype=np.float32)} for _ in range(NUM_LAYERS)]
    batch = {"x": np.ones((4, 4), np.float32)}
    precision = mt.Precision(compute=jnp.float32)
    options = {"precision": precision, "progress": False}
    return mt.Trainer(params, loss_fn, optax.adam(1e-2), batch, **options)


def resident_kib() -> int:
    """The process's memory, without what the C library keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def growth(action: Callable[[int], object], times: int) -> float:
    """The KiB by which each of the later calls has memory grow; a third warms up."""
    first = times // 3
    for number in range(first):
        action(number)
    before = resident_kib()
    for number in range(first, times):
        action(number)
    return (resident_kib() - before) / (times - first)


def main() -> None:
    folder, num_saves, num_restores = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    trainer = make_trainer()

    def save(number: int) -> None:
        trainer.save(folder / str(number))
        shutil.rmtree(folder / str(number))

    os.fsync = lambda opened: None  # takes most of the time, and no memory
    found = {"save": growth(save, num_saves)}
    trainer.save(folder / "whole")
    found["restore"] = growth(lambda _: trainer.restore(folder / "whole"), num_restores)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
