"""Commands that share a GPU, each in its own process."""

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

# The share of a GPU for all processes together: the default of one.
_FRACTION, _FRACTION_NAMES = 0.85, ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def run_commands(commands: Sequence[Sequence[str]], workers: int = 1) -> None:
    """Runs commands in their order, `workers` at a time.

    Args:
        commands: The words of each command.
        workers: Number of processes at a time; each gets its share of a GPU's memory.

    Raises:
        subprocess.CalledProcessError: If one of them fails.
    """
    environment = dict(os.environ)
    if workers > 1 and not environment.keys() & set(_FRACTION_NAMES):
        environment[_FRACTION_NAMES[0]] = f"{_FRACTION / workers:.4f}"

    def run(words: Sequence[str]) -> None:
        subprocess.run(words, check=True, env=environment)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, commands))
