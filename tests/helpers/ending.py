"""A process of several that share a run, which something ends; see `test_endings`.

Usage: ending.py INDEX COUNT ADDRESS VICTIM EVENT FOLDER CHECKPOINTS. A file FOLDER/reached-INDEX
tells that the process has come to the event, which is what the victim does at its sixth batch:
"stuck" waits for data, "busy" does so where Python's handlers of signals don't run, "stop" stops
itself, "kill" kills itself, "error" raises an error, as a callback does with "callback" for step 4,
"late" calls `fit` late, "slow" does nothing. "midstep" kills itself instead of computing its fifth
step, for which all others wait in JAX. All others go on slowly. With "none", all go on fast,
and the first process leaves the final parameters in FOLDER/final.npz. All state rests in the folder
DISK, a variable of the environment, if there is one; with COPIES, each process holds all of it.
"""

import ctypes
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import optax

import megatrain_jax as mt
from megatrain_jax._src.engine.runtime.engine import Engine
from megatrain_jax._src.engine.state import processes

STOPS = 6
LAST = 10


def act(event: str) -> None:
    """Does what ends the run."""
    if event == "stuck":
        time.sleep(10_000)
    elif event == "busy":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # the second time it waits for itself, in C
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    elif event == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif event == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif event == "error":
        raise OSError("a disk of this process alone")


def batches(folder: Path, index: int, event: str, pause: float) -> Iterator[dict[str, np.ndarray]]:
    """Batches of this process, of which one does what ends the run."""
    for number in range(1, LAST + 1):
        if number == STOPS:
            time.sleep(pause)  # until the step before is complete
            (folder / f"reached-{index}").touch()
            act(event)
        time.sleep(pause)
        yield {"x": np.random.default_rng([number, index]).normal(size=(2, 4)).astype(np.float32)}


def main() -> None:
    index, count, address, victim, event, path, checkpoints = sys.argv[1:]
    folder, own = Path(path), event if index == victim else "none"
    if patience := os.environ.get("PATIENCE"):
        processes.PATIENCE_SECONDS = float(patience)
    mt.distributed.initialize(address, int(count), int(index))
    print("connected", flush=True)
    if own == "late":
        (folder / f"reached-{index}").touch()
        time.sleep(20)  # longer than the others wait

    def callback(trainer: mt.Trainer, record: dict[str, float]) -> None:
        if own == "callback" and record["step"] == 4:
            raise OSError("a callback of this process alone")

    if own == "midstep":
        train, steps = Engine.train, itertools.count(1)

        def killed(engine: Engine, *given: Any) -> Any:
            if next(steps) == STOPS - 1:
                (folder / f"reached-{index}").touch()
                act("kill")
            return train(engine, *given)

        Engine.train = killed  # type: ignore[method-assign]
    disk = os.environ.get("DISK")
    with ExitStack() as place:
        if disk:
            from disks import state_on_disk, timed_briefly  # which imports pytest

            place.enter_context(state_on_disk())
            place.enter_context(timed_briefly())
        result = mt.fit(
            {"layers": [{"w": np.eye(4, dtype=np.float32)} for _ in range(2)]},
            lambda model, batch: (
                (batch["x"] @ model["layers"][0]["w"] @ model["layers"][1]["w"]) ** 2
            ).mean(),
            batches(folder, int(index), own, 0.0 if event == "none" else 0.5),
            optax.adam(1e-3),
            checkpoint_dir=checkpoints,
            callbacks=[callback],
            checkpoint_every=2,
            stall_seconds=float(os.environ.get("STALL", 600)),
            progress=False,
            disk_dir=disk,
            state_per_process=bool(os.environ.get("COPIES")),
        )
    params = {str(i): layer["w"] for i, layer in enumerate(result.trainer.params["layers"])}
    if index == "0" and result.trainer.num_steps == LAST:
        np.savez(folder / "final.npz", **params)
    print("finished", result.trainer.num_steps, flush=True)


if __name__ == "__main__":
    main()
