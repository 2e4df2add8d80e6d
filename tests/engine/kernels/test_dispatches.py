"""How many functions and copies a step dispatches: what a deeper model adds, counted one by one."""

from collections import Counter

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from inside import engine_of, spec_of
from megatrain_jax._src.engine.kernels.cache import KernelCache

BATCH = {"x": np.ones((8, 16), np.float32)}
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


class Layers(nnx.Module):
    """Equal layers between two that are not."""

    def __init__(self, depth: int):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(depth)])
        self.last = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return self.last(x)


def loss_fn(model, batch):
    return (model(batch["x"]) ** 2).mean()


def dispatched(depth, optimizer, microbatches, budget, monkeypatch):
    """What a steady step dispatches: compiled functions by kind, and copies by where they go."""
    counts, put, get = Counter(), jax.device_put, KernelCache.get

    def watched_put(xs, target):
        counts[target.memory_kind] += len(xs)
        return put(xs, target)

    def watched_get(self, kernel):
        function = get(self, kernel)

        def run(*args):
            # With or without values kept for backward, in one step a layer has one way.
            counts[kernel.name.split()[0]] += 1
            return function(*args)

        run.trace = function.trace  # by which the memory that it needs is estimated
        return run

    arrays = jax.device_put(jax.tree.leaves(BATCH), jax.devices()[0])
    with monkeypatch.context() as patch:
        patch.setattr(KernelCache, "get", watched_get)
        trainer = mt.Trainer(
            lambda: Layers(depth),
            loss_fn,
            optimizer,
            BATCH,
            microbatches=microbatches,
            device_budget=budget,
        )
        trainer.step(BATCH)
        trainer.step(BATCH)
        counts.clear()
        patch.setattr(jax, "device_put", watched_put)
        engine_of(trainer).train(spec_of(trainer).first, arrays)
    return counts


MORE = 4  # layers


# Where everything is streamed, weights come for forward and backward and leave once, AdamW's two
# moments come and leave once, and so does what the layer was given, for each microbatch. A gradient
# that waits for the norm leaves and comes back.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("optimizer", "microbatches", "budget", "fetched", "offloaded"),
    [
        pytest.param(ADAMW, 1, "least", 2 + 2 + 1, 1 + 2 + 1, marks=pytest.mark.long),
        (ADAMW, 4, "least", 2 + 2 + 4, 1 + 2 + 4),
        pytest.param(CLIPPED, 1, "least", 2 + 2 + 1 + 1, 1 + 2 + 1 + 1, marks=pytest.mark.long),
        (CLIPPED, 4, "least", 2 + 2 + 4 + 1, 1 + 2 + 4 + 1),
        (ADAMW, 1, 10**9, 0, 0),
        (CLIPPED, 4, 10**9, 0, 0),
    ],
)
def test_a_layer_adds_one_call_of_each_kind_and_one_copy_of_each_part(
    optimizer, microbatches, budget, fetched, offloaded, monkeypatch
):
    few, many = (
        dispatched(depth, optimizer, microbatches, budget, monkeypatch) for depth in (6, 6 + MORE)
    )
    assert many - few == Counter(
        {
            "forward": MORE * microbatches,
            "backward": MORE * microbatches,
            "zeros": MORE if microbatches > 1 else 0,
            "reduce": MORE if optimizer is CLIPPED else 0,
            "update": MORE,
            "device": MORE * fetched,
            "pinned_host": MORE * offloaded,
        }
    )
    # Beside the layers a step calls what begins and ends it, and the last stage has no forward.
    once = {"begin": 1, "means": 1, "combine": 1, "end": 1}
    assert {name: few[name] for name in once} == once
    assert few["forward"] == 7 * microbatches and few["backward"] == 8 * microbatches
