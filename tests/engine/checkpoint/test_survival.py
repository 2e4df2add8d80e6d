"""Whatever ends a run, the checkpoints it leaves are whole and training goes on from the newest."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatrain_jax._src.engine.checkpoint import folder, manifest
from places import HELPERS, ROOT

NUM_STEPS = 30
# Python and the libraries are loaded once; each run is a fork of that, which starts JAX anew.
SERVER = """
import contextlib, json, os, signal, sys
import jax, numpy as np, optax
from flax import nnx
import megatrain_jax as mt
from disks import state_on_disk

class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(6)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = x + self.dropout(nnx.relu(block(x)))
        return self.head(x)

def loss_fn(model, batch):
    return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

def batches():
    rng = np.random.default_rng(0)
    while True:
        x = rng.normal(size=(16, 64)).astype(np.float32)
        yield {"x": x, "y": x.sum(1)}

def run(path, optimizer, steps):
    tx = optax.adamw(1e-3)
    if optimizer != "plain":
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    parts = {}
    if optimizer.startswith("clipped, in waves"):
        parts = {"microbatches": 4, "waves": 2}
    if optimizer.endswith("on two devices"):
        parts["mesh"] = jax.sharding.Mesh(jax.devices()[:2], "data")
    place = contextlib.nullcontext()
    if optimizer.endswith("on a disk"):
        parts["disk_dir"], parts["device_budget"] = os.path.join(path, "../disk"), "minimum"
        place = state_on_disk()
    with place:
        result = mt.fit(lambda: Model(nnx.Rngs(0)), loss_fn, batches(), tx, steps=steps, **parts,
                        checkpoint_dir=path, checkpoint_every=2, keep=2, progress=False)
    print("ended", result.trainer.num_steps, result.interrupted, flush=True)

for line in sys.stdin:
    path, optimizer, steps, ignored = json.loads(line)
    child = os.fork()
    if child == 0:
        # A shell's background jobs ignore SIGINT; pytest may be one.
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
        run(path, optimizer, steps)
        os._exit(0)
    print("child", child, flush=True)
    _, status = os.waitpid(child, 0)
    print("over", status, flush=True)
"""


class Server:
    """Starts runs of `fit` one after the other."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}"},
        )

    def start(self, path: Path, optimizer: str, steps: int, ignored: bool = False) -> int:
        """Returns the run's process; SIGINT may be ignored in it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(path), optimizer, steps, ignored]) + "\n")
        self.process.stdin.flush()
        return int(self.read("child")[1])

    def read(self, word: str) -> list[str]:
        """The next line that begins with a word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.split()
        raise AssertionError("the server died")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


def history(path: Path) -> tuple[list[float], Any]:
    """The losses until the newest checkpoint, and the checksums of all its arrays."""
    (*_, newest) = folder.steps(path)
    facts = manifest.facts_of(path / str(newest))
    return [record["loss"] for record in facts["history"]], facts["arrays"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("optimizer", "kills"),
    [
        ("clipped, in waves, on two devices", 2),
        pytest.param("clipped, on a disk", 20, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
        pytest.param("plain", 25, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
        pytest.param("clipped", 25, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
        pytest.param("clipped, in waves", 5, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_killed_runs_go_on_as_if_nothing_had_happened(server, optimizer, kills, tmp_path):
    for name in ("first", "whole"):  # the first one compiles, which takes longer than all the rest
        server.start(tmp_path / name, optimizer, NUM_STEPS)
        begun = time.monotonic()
        assert server.read("over") == ["over", "0"]
        longest = time.monotonic() - begun
    rng, parts, newest, killed = random.Random(optimizer), tmp_path / "parts", 0, 0
    while killed < kills:
        pid = server.start(parts, optimizer, NUM_STEPS)
        # Some die while they resume or compile, most while they train and save.
        time.sleep(rng.uniform(0.3, 1.1) * longest * 0.6)
        with suppress(ProcessLookupError):  # it was faster
            os.kill(pid, signal.SIGKILL)
        over = server.read("over")
        killed += over[1] != "0"
        found = folder.steps(parts)
        for step in found:
            manifest.facts_of(parts / str(step))  # whole
        assert max(found, default=0) >= newest
        assert not (tmp_path / "disk").exists() or not os.listdir(tmp_path / "disk")
        newest = max(found, default=0)
        if over[1] == "0" or newest == NUM_STEPS:
            assert history(parts) == history(tmp_path / "whole")
            parts, newest = tmp_path / f"parts{killed}", 0
    server.start(parts, optimizer, NUM_STEPS)
    assert server.read("over") == ["over", "0"]
    assert history(parts) == history(tmp_path / "whole")
    assert sorted(path.name for path in parts.iterdir()) == ["28", "30"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "ignored"),
    [
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.long),
        (signal.SIGTERM, True),
        (signal.SIGINT, False),
    ],
)
def test_a_signal_ends_the_run_after_a_saved_step(server, number, ignored, tmp_path):
    pid = server.start(tmp_path, "clipped", 100000, ignored)
    while not folder.steps(tmp_path):
        time.sleep(0.01)
    os.kill(pid, number)
    if number == signal.SIGTERM:  # ends the process, too
        (_, status) = server.read("over")
        assert os.waitstatus_to_exitcode(int(status)) == 143
    else:
        _, steps, interrupted = server.read("ended")
        assert server.read("over") == ["over", "0"]
        assert interrupted == "True"
        assert folder.steps(tmp_path)[-1] == int(steps)
    # The last step is there, not only those that were due.
    newest = folder.steps(tmp_path)[-1]
    assert len(manifest.facts_of(tmp_path / str(newest))["history"]) == newest
