"""An error in the user's own code shows that code, and not the way to it."""

import traceback
from typing import Any

import flax.linen
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from messages import refuses

X = np.ones((4, 3), np.float32)


class Net(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return flax.linen.Dense(2)(x)


def inner(x: Any) -> Any:
    return x @ jnp.ones((5, 5))


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean(inner(model(batch)) ** 2)


def fails_late(trainer: Any, record: Any) -> None:
    raise RuntimeError("mine")


def good_loss(model: Any, batch: Any) -> Any:
    return jnp.mean(model(batch) ** 2)


def schedule(step: Any) -> Any:
    return 0.1 if step > 10 else 1.0


def needs_value(model: Any, batch: Any) -> Any:
    return float(good_loss(model, batch))


def wrong_init(params: Any) -> Any:
    raise KeyError("mine")


WRONG = optax.chain(optax.GradientTransformation(wrong_init, optax.sgd(0.1).update))
CALLS = {
    "loss": lambda: mt.fit(Net(), loss_fn, [X], optax.sgd(0.1), progress=False),
    "plan": lambda: mt.plan(Net(), loss_fn, optax.sgd(0.1), X),
    "callback": lambda: mt.fit(
        Net(), good_loss, [X], optax.sgd(0.1), callbacks=[fails_late], progress=False
    ),
    "trainer": lambda: mt.Trainer(Net(), good_loss, optax.sgd(0.1), X, progress=False).evaluate(
        [X], loss_fn
    ),
    "value": lambda: mt.plan(Net(), needs_value, optax.sgd(0.1), X),
    "schedule": lambda: mt.plan(Net(), good_loss, optax.adamw(schedule), X),
    "optimizer": lambda: mt.plan(Net(), good_loss, WRONG, X),
}
OWN = {
    "callback": ["fails_late"],
    "value": ["needs_value"],
    "schedule": ["schedule"],
    "optimizer": ["wrong_init"],
}


def frames(call: Any) -> list[str]:
    with pytest.raises((TypeError, RuntimeError, ValueError)) as caught:
        call()
    assert caught.value.__cause__ is None  # whose frames would stand before the user's
    found = traceback.extract_tb(caught.value.__traceback__)
    return [
        frame.name
        for frame in found
        if frame.filename == __file__ or "megatrain_jax/_src" in frame.filename
    ]


@pytest.mark.parametrize("name", CALLS)
def test_the_frames_are_the_users(name: str):
    own = OWN.get(name, ["loss_fn", "inner"])
    assert [f for f in frames(CALLS[name]) if f not in ("frames", "<lambda>")] == own


def test_an_optimizer_that_branches_on_the_step_is_named():
    with refuses(TypeError, "`optimizer`", "test_user_tracebacks.py", "step > 10", "jnp.where"):
        CALLS["schedule"]()


def test_all_frames_are_shown_where_jax_shows_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    assert len(frames(CALLS["loss"])) > 8


def test_an_error_of_the_library_keeps_its_frames():
    with pytest.raises(TypeError) as caught:
        mt.fit(Net(), good_loss, 3, optax.sgd(0.1))  # type: ignore[arg-type]
    found = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "check_data" in found
