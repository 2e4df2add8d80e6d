"""`fit` compared with a loop of plain JAX and Optax."""

import functools
import signal
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from megatrain_jax._src.engine.fit import fit, train
from megatrain_jax._src.engine.options.precision import Precision
from megatrain_jax._src.engine.train.result import DataRanOutError, FitResult
from megatrain_jax._src.engine.trainer import Trainer
from messages import refuses, tells


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + nnx.tanh(block(x))
        return self.head(x)


def build() -> Mlp:
    return Mlp(nnx.Rngs(0))


def squared_error(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def regression(count: int, examples: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": (x := rng.standard_normal((examples, 6), np.float32)),
            "y": np.stack([x.sum(-1), x[:, 0] * x[:, 1]], -1),
        }
        for _ in range(count)
    ]


def adam() -> optax.GradientTransformation:
    return optax.adam(1e-2, eps=1e-3)


FP32 = Precision(compute=jnp.float32)

OPTIONS = {"precision": FP32, "progress": False}


@functools.cache
def plain_step() -> tuple[Any, optax.GradientTransformation, Any]:
    graphdef, params = nnx.split(build())
    optimizer = adam()

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return squared_error(nnx.merge(graphdef, params), batch)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    return params, optimizer, step


def plain_run(batches: list[Any]) -> tuple[list[float], list[np.ndarray]]:
    """The losses and the parameters of a plain JAX and Optax loop."""
    params, optimizer, step = plain_step()
    state = optimizer.init(params)
    losses = []
    for batch in batches:
        value, params, state = step(params, state, batch)
        losses.append(float(value))
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def assert_same_run(result: FitResult, batches: list[Any]) -> None:
    losses, params = plain_run(batches)
    got = [record["loss"] for record in result.history]
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(result.params), params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_fit_trains_like_plain_optax():
    batches = regression(6)
    # A last batch of another size is trained on as it is.
    batches.append({name: value[:4] for name, value in batches[0].items()})
    result = fit(build, squared_error, iter(batches), adam(), **OPTIONS)
    assert not result.interrupted
    assert [record["step"] for record in result.history] == [1, 2, 3, 4, 5, 6, 7]
    assert_same_run(result, batches)
    last = result.history[-1]
    assert list(last) == ["step", "loss", "grad_norm", "seconds"]
    assert all(type(value) is float for name, value in last.items() if name != "step")
    x = batches[0]["x"]
    np.testing.assert_allclose(
        result.model(x), nnx.merge(nnx.graphdef(build()), result.params)(x), rtol=1e-5
    )


def test_fit_makes_no_implicit_transfers():
    batches = regression(3)
    trainer = Trainer(build, squared_error, adam(), batches[0], precision=FP32)
    with jax.transfer_guard("disallow"):
        result = train(trainer, batches, progress=False)
    assert_same_run(result, batches)


def test_fit_goes_on_after_its_steps_and_after_an_interrupt():
    batches = regression(8)

    def interrupt_at_four(trainer: Any, record: dict[str, Any]) -> None:
        if record["step"] == 4:
            signal.raise_signal(signal.SIGINT)

    data = iter(batches)
    result = fit(build, squared_error, data, adam(), steps=2, **OPTIONS)
    result = train(
        result.trainer, batches[2:], callbacks=[interrupt_at_four], steps=6, progress=False
    )
    assert result.interrupted
    done = result.trainer.num_steps
    assert done == 5
    assert_same_run(result, batches[:done])
    result = train(result.trainer, islice(data, done - 2, None), progress=False)
    assert_same_run(result, batches)


def test_fit_evaluates_with_the_parameters_of_the_step():
    batches = regression(4)
    result = fit(
        build, squared_error, batches, adam(), eval_data=batches[:1], eval_every=2, **OPTIONS
    )
    evaluations = {r["step"]: r["eval_loss"] for r in result.history if "eval_loss" in r}
    assert sorted(evaluations) == [2, 4]
    for step, value in evaluations.items():
        # The loss of one more plain step on that batch is its loss under these parameters.
        expected = plain_run(batches[:step] + batches[:1])[0][-1]
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_fit_stops_at_a_loss_that_is_not_finite():
    batches = regression(4)
    batches[1]["x"][0, 0] = np.nan
    with pytest.raises(FloatingPointError, match="step"):
        fit(build, squared_error, batches, adam(), **OPTIONS)


def test_fit_names_a_batch_that_microbatches_do_not_divide():
    with refuses(ValueError, "`microbatches`=3", 8):
        fit(build, squared_error, regression(1), adam(), microbatches=3, **OPTIONS)


def test_a_later_batch_that_microbatches_do_not_divide_is_named_with_its_step(tmp_path):
    good, bad = regression(3), regression(1, examples=7)
    given = {"microbatches": 2, "checkpoint_dir": tmp_path, "checkpoint_every": 1, **OPTIONS}
    with refuses(ValueError, 7, "step 3") as caught:
        fit(build, squared_error, good[:2] + bad, adam(), **given)
    assert any(tells(note, "`data`", 3) for note in caught.value.__notes__)
    # Steps and batches are counted from the run's begin, also if it resumes.
    with refuses(ValueError, 7, "step 4") as caught:
        fit(build, squared_error, good + bad, adam(), **given)
    assert any(tells(note, "`data`", 4) for note in caught.value.__notes__)
    error: Any = caught.value
    trainer = error.result.trainer
    with refuses(ValueError, 7, "step 4"):
        trainer.step(bad[0])


def test_fit_hands_back_the_steps_done_when_data_runs_out():
    batches = regression(3)
    with refuses(DataRanOutError, 3, "`steps`=9") as caught:
        fit(build, squared_error, batches, adam(), steps=9, **OPTIONS)
    assert_same_run(caught.value.result, batches)
