"""A program that trains, or pins memory, within a real limit, and prints how that ended.

It is a program because a limit is a process's: one that is exceeded has it killed, or any of its
allocations fail. Arguments: "train", "measure" (which trains, and prints the bytes that were
planned and taken) or "pin", and the MiB that the process may take beside what it
has: of addresses, of data, or 0 for no limit but that of its control group.
"""

import dataclasses
import re
import resource
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import megatrain_jax as mt
from inside import on_one_device
from megatrain_jax._src.common import host_memory
from megatrain_jax._src.engine.state import pool

MIB = 2**20
NUM_LAYERS, WIDTH = 12, 1024
LIMITS = {"addresses": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}


def limit(kind: str, mib: int) -> None:
    """Leaves this process so many MiB beside what counts towards a limit already."""
    number, unlimited = LIMITS[kind], 2**50
    resource.setrlimit(number, (unlimited, unlimited))
    (found,) = host_memory.process_limits()
    allowed = found.used_bytes + mib * MIB
    resource.setrlimit(number, (allowed, allowed))


def train() -> mt.Plan:
    """Trains three steps of 144 MiB of state, saves and restores it; returns the plan."""

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean(x**2)

    def build():
        return [{"w": jnp.full((WIDTH, WIDTH), 1e-3)} for _ in range(NUM_LAYERS)]

    batch = {"x": np.ones((64, WIDTH), np.float32)}
    precision = mt.Precision(compute=jnp.float32)
    options = {"precision": precision, "device_budget": "least", "progress": False}
    trainer = mt.Trainer(build, loss_fn, optax.adam(1e-3), batch, **options)
    for _ in range(3):
        trainer.read(trainer.step(batch))
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(f"{folder}/3")
        trainer.restore(f"{folder}/3")
    return trainer.plan


def measure() -> None:
    """Prints the bytes of the process that were planned, and the most that it had."""
    planned = train().host_process_bytes
    taken = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert taken is not None
    print(planned, int(taken[1]) << 10)


def pin() -> None:
    """Pins 1 GiB in a pool whose machine seems to have as much as it likes."""
    pool.available_bytes = lambda: sys.maxsize
    pool.reserve(dataclasses.replace(on_one_device(), platform="gpu"), 1024 * MIB)


def main() -> None:
    what, kind, mib = sys.argv[1:]
    jax.devices()  # threads and compiler are there before the limit is
    if int(mib):
        limit(kind, int(mib))
    try:
        {"train": train, "measure": measure, "pin": pin}[what]()
    except MemoryError as error:
        print(f"refused: {error}")
    else:
        print("survived")


if __name__ == "__main__":
    main()
