"""A process that runs commands of the command line one after the other, as a launcher starts it.

Usage: commands.py CALLS; a list as JSON, of each call its arguments and the step after which the
last process gets SIGINT, or null. The environment's RESULT names the file that gets the exit
statuses. What a command prints comes after a line with its number.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from contexts import shared_contexts
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.cli.run_report import ProgressLines

BEGINS = "the command "


def status(arguments: list[str], stop: int | None) -> int:
    """The exit status of a command; an error counts as -1."""
    tell = ProgressLines.__call__

    def telling(self: ProgressLines, trainer: Any, record: dict[str, Any]) -> None:
        tell(self, trainer, record)
        if record["step"] == stop and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGINT)

    with mock.patch.object(ProgressLines, "__call__", telling):
        try:
            return main(arguments)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return -1


def run() -> None:
    found = []
    with shared_contexts():
        for number, (arguments, stop) in enumerate(json.loads(sys.argv[1])):
            print(f"\n{BEGINS}{number}", flush=True)
            found.append(status(arguments, stop))
    Path(os.environ["RESULT"]).write_text(json.dumps(found))


if __name__ == "__main__":
    run()
