"""A process of two that chooses to hold all state, then shares it, and counts its cable's bytes.

Usage: network_bytes.py INDEX ADDRESS FILE; the file gets a pair for each of the two ways: planned
bytes per step, and received ones.
"""

import json
import sys
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import megatrain_jax as mt

_WIDTH, _STEPS = 512, 4
_CABLE = Path("/sys/class/net/veth0/statistics/rx_bytes")


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def main() -> None:
    index, address, file = sys.argv[1:]
    mt.distributed.initialize(address, 2, int(index))
    ways: list[Literal["auto"] | bool] = ["auto", False]
    Path(file).write_text(json.dumps([counted(int(index), way) for way in ways]))


def counted(index: int, way: Literal["auto"] | bool) -> tuple[int, float]:
    """Planned and received bytes of a step with this `state_per_process`."""
    params = [np.eye(_WIDTH, dtype=np.float32) for _ in range(8)]
    batch = np.full((8, _WIDTH), 1 + index, np.float32)
    trainer = mt.Trainer(
        params,
        loss_fn,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        batch,
        microbatches=8,
        precision="float32",
        # Its rates are those of the choice alone; the cable's is measured.
        hardware="H100",
        state_per_process=way,
        progress=False,
    )
    assert trainer.plan.num_copies == (2 if way else 1), trainer.plan.state_choice
    print(trainer.plan.state_choice, flush=True)
    trainer.read(trainer.step(batch))  # connects the devices
    before = int(_CABLE.read_text())
    for _ in range(_STEPS):
        trainer.read(trainer.step(batch))
    received = (int(_CABLE.read_text()) - before) / _STEPS
    return trainer.plan.network_bytes, received


if __name__ == "__main__":
    main()
