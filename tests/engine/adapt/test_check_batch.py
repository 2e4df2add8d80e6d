"""Batches that a model refuses by its own `check_batch`, in every way to run it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import megatrain_jax as mt
from megatrain_jax._src.engine.adapt.adapters import adapt
from messages import refuses, tells


class LinenModel(linen.Module):
    limit: int

    def setup(self):
        self.scale = self.param("scale", linen.initializers.ones, (1,))

    def __call__(self, x):
        return x * self.scale

    def check_batch(self, batch):
        refuse(self.limit, batch)


class NnxModel(nnx.Module):
    def __init__(self, limit):
        self.limit, self.scale = limit, nnx.Param(jnp.ones(1))

    def __call__(self, x):
        return x * self.scale[...]

    def check_batch(self, batch):
        refuse(self.limit, batch)


class EquinoxModel(eqx.Module):
    scale: jax.Array
    limit: int = eqx.field(static=True)

    def __call__(self, x):
        return x * self.scale

    def check_batch(self, batch):
        refuse(self.limit, batch)


def refuse(limit, batch):
    if batch["x"].max() > limit:
        raise ValueError(f"x is above {limit}")


def loss_fn(model, batch):
    return model(batch["x"]).mean()


KINDS = {
    "linen": lambda: LinenModel(3),
    "nnx": lambda: NnxModel(3),
    "nnx-builder": lambda: lambda: NnxModel(3),
    "equinox": lambda: EquinoxModel(jnp.ones(1), 3),
    "equinox-builder": lambda: lambda: EquinoxModel(jnp.ones(1), 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_any_kind_checks_batches_that_are_on_the_host(kind):
    low, high = {"x": np.ones((2, 1), np.float32)}, {"x": np.full((2, 1), 4, np.float32)}
    adapted, _ = adapt(KINDS[kind](), loss_fn, low, 0)
    adapted.check_batch(low)
    with refuses(ValueError, "x", 3):
        adapted.check_batch(high)
    # What is on a device is not brought back.
    adapted.check_batch(jax.device_put(high))
    adapted.check_batch(high | {"y": jax.device_put(high["x"])})


@pytest.mark.parametrize("model", [{"scale": jnp.ones(1)}, {"check_batch": jnp.ones(1)}])
def test_a_model_without_a_check_takes_any_batch(model):
    adapted, _ = adapt(model, lambda m, b: jnp.sum(next(iter(m.values()))), {"x": np.ones(1)}, 0)
    adapted.check_batch(object())


# In a run


def make_batch(value: float = 1) -> dict[str, np.ndarray]:
    return {"x": np.full((2, 1), value, np.float32)}


def build():
    return NnxModel(3)


def make_trainer(**options: Any) -> mt.Trainer:
    return mt.Trainer(build, loss_fn, optax.sgd(0.1), make_batch(), **options)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_trainer_refuses_a_batch_and_goes_on(on_nonfinite):
    trainer = make_trainer(on_nonfinite=on_nonfinite)
    for call in (lambda b: trainer.step(b), lambda b: trainer.evaluate([b])):
        with refuses(ValueError, "x", 3):
            call(make_batch(4))
    assert trainer.num_steps == 0
    assert np.isfinite(trainer.read(trainer.step(make_batch(2)))["loss"])


def fit(batches: list[Any], **options: Any) -> mt.FitResult:
    return mt.fit(build, loss_fn, batches, optax.sgd(0.1), progress=False, **options)


def test_a_run_ends_at_a_refused_batch_with_what_it_has():
    with refuses(ValueError, "x", 3) as caught:
        fit([make_batch(value) for value in (1, 2, 4, 1)], on_nonfinite="skip")
    assert tells(str(caught.value.__notes__), "`data`", 3)
    error: Any = caught.value
    assert [record["step"] for record in error.result.history] == [1, 2]


def test_evaluation_data_are_refused():
    with refuses(ValueError, "x", 3):
        fit([make_batch()], eval_data=[make_batch(4)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_integers_of_64_bits_do_not_become_others(number):
    def loss_fn(model, batch):
        return (model["w"] * batch["count"]).mean()

    batch = {"count": np.ones(2, np.int64)}
    trainer = mt.Trainer({"w": jnp.ones(1)}, loss_fn, optax.sgd(0.1), batch)
    assert np.isfinite(trainer.read(trainer.step(batch))["loss"])
    batch["count"][0] = number
    with refuses(ValueError, "batch['count']", "int64", number, "int32"):
        trainer.step(batch)
