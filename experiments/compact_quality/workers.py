"""Runs side by side on one or more GPUs, each in its own process, as far as the time goes."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from record import Origin
from settings import FULL, Sizes, file_name

_ONE_RUN = Path(__file__).with_name("one_run.py")
# The share of a GPU for all workers together: the default of one process.
_FRACTION, _FRACTION_NAMES = 0.85, ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def run_all(
    jobs: Sequence[tuple[str, int]],
    sizes: Sizes,
    origin: Origin,
    out: Path,
    workers: int,
    seconds: float,
    gpus: int = 1,
) -> dict[str, list[str]]:
    """Starts the runs without a result file, in order, and stops them when the time is over.

    Args:
        jobs: Names of rows, and seeds.
        sizes: The sizes of every run.
        origin: The origin of the results.
        out: Folder of the runs' JSON files, logs and checkpoints.
        workers: Number of runs that share a GPU.
        seconds: Time after which runs are told to save a checkpoint and end.
        gpus: Number of GPUs. A process sees one of them.

    Returns:
        The names of the files of runs that are "done", "failed" and "left" for another call.
    """
    end = time.monotonic() + seconds
    environment = dict(os.environ)
    if not environment.keys() & set(_FRACTION_NAMES):
        environment[_FRACTION_NAMES[0]] = f"{_FRACTION / workers:.4f}"
    free: SimpleQueue[int] = SimpleQueue()
    for number in range(workers * gpus):
        free.put(number % gpus)

    def run(job: tuple[str, int]) -> tuple[str, str]:
        path = out / file_name(*job)
        if path.exists():
            return "done", path.name
        log = path.with_suffix(".log")
        if time.monotonic() >= end:
            return "left", path.name
        if not _ends(_command(job, sizes, origin, path), log):
            # It says where it stopped, unless it had not even begun to train.
            print(f"{path.stem}:", *log.read_text().splitlines()[-1:], flush=True)
            return "left", path.name
        print(_told(path, log), flush=True)
        return ("done" if path.exists() else "failed"), path.name

    def _ends(command: list[str], log: Path) -> bool:
        """Whether a process ends in time; it is told to stop if not."""
        gpu = free.get()
        own = environment if gpus == 1 else environment | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        try:
            with log.open("a") as stream:
                process = subprocess.Popen(
                    command, stdout=stream, stderr=subprocess.STDOUT, env=own
                )
                try:
                    process.wait(max(0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.terminate()
                    process.wait()
                    return False
            return True
        finally:
            free.put(gpu)

    found: dict[str, list[str]] = {"done": [], "failed": [], "left": []}
    with ThreadPoolExecutor(workers * gpus) as threads:
        for state, name in threads.map(run, jobs):
            found[state].append(name)
    return found


def _command(job: tuple[str, int], sizes: Sizes, origin: Origin, path: Path) -> list[str]:
    usual, chosen = dataclasses.asdict(FULL), dataclasses.asdict(sizes)
    changes = {key: value for key, value in chosen.items() if value != usual[key]}
    options = {"row": job[0], "seed": str(job[1]), "sizes": json.dumps(changes), "out": str(path)}
    options |= origin.options()
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    return [sys.executable, str(_ONE_RUN), *words]


def _told(path: Path, log: Path) -> str:
    """A line on a run that is over: its loss, or the last lines it printed."""
    if not path.exists():
        return f"{path.stem} failed:\n  " + "\n  ".join(log.read_text().splitlines()[-12:])
    result = json.loads(path.read_text())
    seconds = result["median_seconds_per_step_beside_others"]
    return f"{path.stem}: held out {result['held_out_loss']:.4f}, {1000 * seconds:.0f} ms a step"


def check_folder(folder: Path, run: str, sizes: Sizes) -> None:
    """Refuses a folder with results of a different run or of different sizes.

    Raises:
        SystemExit: If a file there is of a different run or of different sizes.
    """
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        if (found["record"]["run"], Sizes(**found["sizes"])) != (run, sizes):
            sys.exit(f"{path} is of another run or of other sizes: give another --out")
