"""Commands that share a GPU, each in its own process."""

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatrain_jax._src.engine.startup import allocator


def run_commands(commands: Sequence[Sequence[str]], workers: int = 1) -> None:
    """Runs commands in their order, `workers` at a time; one that fails doesn't stop the others.

    Args:
        commands: The words of each command.
        workers: Number of processes at a time; they divide this process's share of a GPU's memory.

    Raises:
        RuntimeError: If one of them fails, after all have ended.
    """
    environment = dict(os.environ)
    if workers > 1:
        # Importing the library sets the share of one process, so that it is never missing here.
        environment.pop(allocator.OLD_FRACTION, None)
        environment[allocator.FRACTION] = f"{allocator.fraction() / workers:.4f}"

    def run(words: Sequence[str]) -> int:
        return subprocess.run(words, env=environment).returncode

    with ThreadPoolExecutor(workers) as pool:
        codes = list(pool.map(run, commands))
    failed = [" ".join(words) for words, code in zip(commands, codes, strict=True) if code]
    if failed:
        raise RuntimeError("these commands failed:\n" + "\n".join(failed))
