"""A small run with statistics and dropout, for tests of runs that end early or go on."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import megatrain_jax as mt
from poison import WIDTH, batch, loss_fn, poisoned

STEPS = 8


class Net(nnx.Module):
    """Blocks with statistics that a NaN would spoil."""

    def __init__(self, rngs):
        self.blocks = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x, poison):
        x = x + nnx.relu(self.blocks[0](x))
        return self.blocks[1](poisoned(self.drop(self.norm(x)), poison))


BATCHES = [batch(seed) for seed in range(STEPS)]
OPTIMIZERS = {
    "immediate": optax.adamw(1e-2),
    "deferred": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
}


def run(optimizer: Any, data: Any = BATCHES, **options: Any) -> mt.FitResult:
    """Trains `Net` on all batches."""
    options = {"precision": mt.Precision(compute=jnp.float32), "progress": False, **options}
    return mt.fit(lambda: Net(nnx.Rngs(0)), loss_fn, data, optimizer, **options)


def everything(trainer: mt.Trainer) -> list[Any]:
    """Copies of all state; the trainer may free its own."""

    def copied(x: Any) -> np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(copied, [trainer.params, trainer.opt_state, trainer.variables])


def losses(result: mt.FitResult) -> list[float]:
    """The loss of every step."""
    return [record["loss"] for record in result.history]


@functools.cache
def whole(mode: str) -> SimpleNamespace:
    """The losses, the last state and the schedule of an undisturbed run."""
    result = run(OPTIMIZERS[mode])
    return SimpleNamespace(
        losses=losses(result),
        state=everything(result.trainer),
        schedule=result.trainer.schedule,
    )
