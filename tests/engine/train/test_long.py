"""What only a long run or a large state shows: nothing grows, and nothing is held twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from places import HELPERS, ROOT

pytestmark = pytest.mark.long

STEPS = """
import gc, itertools, json, os, sys
import jax, numpy as np, optax
from flax import nnx
import megatrain_jax as mt

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + nnx.tanh(block(x))
        return x

def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()

def look(trainer, record):
    if record["step"] % 100 == 50:
        gc.collect()
        pinned = [x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host"]
        rows.append({
            "step": record["step"], "rss": rss(), "arrays": len(jax.live_arrays()),
            "pinned": sum(x.nbytes for x in pinned), "files": len(os.listdir("/proc/self/fd")),
        })

rows = []
rng = np.random.default_rng(0)
batches = ({"x": (x := rng.normal(size=(8, 32)).astype(np.float32)), "y": x} for _ in
           itertools.count())
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
mt.fit(lambda: Model(nnx.Rngs(0)), loss_fn, batches, tx, steps=2000, progress=False,
       checkpoint_dir=sys.argv[1], checkpoint_every=100, callbacks=[look])
print(json.dumps(rows))
"""

LARGE = """
import json, os, sys, threading, time
import jax, numpy as np, optax
from flax import nnx
import megatrain_jax as mt
from inside import spec_of
from megatrain_jax._src.common.keys import LASTING

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(4096, 4096, rngs=rngs) for _ in range(21)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + nnx.tanh(block(x))
        return x

def loss_fn(model, batch):
    return (model(batch["x"]) ** 2).mean()

def watched(function, *args):
    peak, stop, before = 0, threading.Event(), rss()
    def watch():
        nonlocal peak
        while not stop.wait(0.005):
            peak = max(peak, rss())
    thread = threading.Thread(target=watch)
    thread.start()
    begun = time.monotonic()
    function(*args)
    seconds = time.monotonic() - begun
    stop.set()
    thread.join()
    return {"extra": peak - before, "seconds": seconds}

trainer = mt.Trainer(lambda: Model(nnx.Rngs(0)), loss_fn, optax.adamw(1e-3),
                     {"x": np.ones((2, 4096), np.float32)})
sizes = spec_of(trainer).first.workload.sizes
path = sys.argv[1] + "/large"
result = {
    "state": trainer.plan.host_bytes,
    "group": max(sum(size[kind] for kind in LASTING) for size in sizes),
    "save": watched(trainer.save, path),
    "restore": watched(trainer.restore, path),
}
print(json.dumps(result))
"""


def run(script: str, folder: Path):
    """Runs a script in a process of its own, as memory and files are the process's."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HELPERS, ROOT)))}
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    return json.loads(out.splitlines()[-1])


def test_two_thousand_steps_with_checkpoints_grow_nothing(tmp_path):
    rows = run(STEPS, tmp_path)
    assert len(rows) == 20
    settled = rows[1:]
    for name in ("arrays", "pinned", "files"):
        assert len({row[name] for row in settled}) == 1, (name, rows)
    grown = settled[-1]["rss"] - settled[0]["rss"]
    assert grown < 32 * 2**20, rows
    assert len(list(tmp_path.iterdir())) == 3


def test_saving_and_restoring_need_little_memory_beside_the_state(tmp_path):
    result = run(LARGE, tmp_path)
    assert result["state"] > 3.9 * 2**30
    print(result)
    for what in ("save", "restore"):
        assert result[what]["extra"] <= 2**30 + result["group"], result
