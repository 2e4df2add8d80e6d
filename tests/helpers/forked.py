"""Processes that run a script as a new one does, without importing JAX and the library again.

They are forks of a process that has imported both and hasn't started JAX's backends, since imports
take two thirds of a small run's seconds. Run as a script, this file is that process.
"""

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.02


class Forked:
    """A process with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, command: list[str], environment: dict[str, str], printed: Path):
        """Starts it.

        Args:
            command: A script and its arguments.
            environment: All its variables. JAX's own are those of this process, as they were when
                it forked for the first time.
            printed: A file for what it prints, errors too.
        """
        request = {"command": command, "environment": environment, "printed": str(printed)}
        self.pid: int = _ask(request)
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self._status is None:
            self._status = _ask({"pid": self.pid})
        return self._status

    def wait(self, seconds: float = float("inf")) -> int:
        """Waits until it has ended; raises `TimeoutError` after some seconds."""
        until = time.monotonic() + seconds
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} runs on after {seconds} s")
            time.sleep(_POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it hasn't ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, if it hasn't ended."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> Any:
    """The process whose forks run scripts; it ends with this one."""
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server


def _ask(request: dict[str, Any]) -> Any:
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def _serve() -> dict[str, Any] | None:
    """Answers requests; returns a fork's own, and nothing when there are no more."""
    for line in sys.stdin:
        request, answer = json.loads(line), None
        if pid := request.get("pid"):
            ended, status = os.waitpid(pid, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif not (answer := os.fork()):
            return request
        print(json.dumps(answer), flush=True)
    return None


def _main() -> None:
    # So that a signal from the keyboard is for pytest alone, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import gc

    import megatrain_jax as mt
    from contexts import shared_contexts

    _ = mt.fit, mt.distributed.initialize  # imported when they are used
    gc.freeze()
    # JAX warns of threads, of which there are none yet.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    if request := _serve():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(os.devnull) as nothing, open(request["printed"], "w") as printed:
            for file, number in ((nothing, 0), (printed, 1), (printed, 2)):
                os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = request["command"]
        with shared_contexts():
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
