"""An evaluation gives what one batch of everything would, however it is cut."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.engine.kernels import steps
from megatrain_jax._src.engine.kernels.cache import KernelCache
from messages import refuses, warns

DIM = 4
FP32 = mt.Precision(compute=jnp.float32)


def build():
    return {"w": jnp.linspace(-1, 1, DIM)}


def predict(model, x):
    return jnp.tanh(x @ model["w"])


def mean_of_all(model, batch):
    squares = (predict(model, batch["x"]) - batch["y"]) ** 2
    return squares.mean(), {"size": jnp.abs(batch["y"]).mean()}


def mean_of_some(model, batch):
    """0 / 0 where nothing counts."""
    counts = batch["counts"]
    total = counts.sum()
    squares = (predict(model, batch["x"]) - batch["y"]) ** 2
    means = [jnp.where(counts, x, 0).sum() / total for x in (squares, jnp.abs(batch["y"]))]
    return means[0], {"size": means[1], "weight": total}


def make_batches(sizes, seed):
    """Examples of which a share counts that is another in every batch, and none in the last row."""
    rng = np.random.default_rng(seed)
    batches = []
    for rows in sizes:
        x = rng.normal(size=(rows, DIM)).astype(np.float32)
        counts = rng.random(rows) < rng.random()
        counts[rows // 2 :] &= rows < 4
        counts[0] = True
        y = rng.normal(rng.normal(), size=rows).astype(np.float32)
        batches.append({"x": x, "y": y, "counts": counts})
    return batches


@pytest.fixture(scope="module", autouse=True)
def freed():
    """Other tests look at what is in the pool."""
    yield
    trainer_of.cache_clear()


@functools.cache
def trainer_of(loss_fn, microbatches):
    (sample,) = make_batches([4], 0)
    return mt.Trainer(
        build,
        loss_fn,
        optax.sgd(0.1),
        sample,
        microbatches=microbatches,
        precision=FP32,
        progress=False,
    )


@pytest.mark.by_default("mean_of_all-2")
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("loss_fn", [mean_of_all, mean_of_some])
def test_ragged_batches_are_evaluated_as_one(loss_fn, microbatches):
    trainer = trainer_of(loss_fn, microbatches)
    for seed in range(5):
        sizes = np.random.default_rng(seed).choice([4, 8, 3], 4)
        batches = make_batches([4, *sizes], seed)
        whole = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
        loss, metrics = loss_fn(build(), whole)
        found = trainer.evaluate(batches)
        expected = {"loss": float(loss), **{k: float(v) for k, v in metrics.items()}}
        assert found.keys() == expected.keys()
        for name in found:
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-6, err_msg=name)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_training_step_sums_the_weight_and_means_the_rest(microbatches):
    (batch,) = make_batches([4], 3)
    batch["counts"] = np.array([True, True, False, True])
    trainer = mt.Trainer(
        build,
        mean_of_some,
        optax.sgd(0.1),
        batch,
        microbatches=microbatches,
        precision=FP32,
        progress=False,
    )
    metrics = trainer.read(trainer.step(batch))
    parts = [jax.tree.map(lambda x, p=p: x[p], batch) for p in np.split(np.arange(4), microbatches)]
    rows = [mean_of_some(build(), part) for part in parts]
    assert metrics["weight"] == 3
    np.testing.assert_allclose(metrics["loss"], np.mean([r[0] for r in rows]), rtol=1e-6)
    np.testing.assert_allclose(metrics["size"], np.mean([r[1]["size"] for r in rows]), rtol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_batch_in_which_nothing_counts_changes_nothing(microbatches):
    """Its own means are 0 / 0."""
    trainer = trainer_of(mean_of_some, microbatches)
    batches = make_batches([4, 4, 3], 0)
    expected = trainer.evaluate([batches[0], batches[2]])
    batches[1]["counts"][:] = False
    assert math.isnan(mean_of_some(build(), batches[1])[0])
    assert trainer.evaluate(batches) == expected


def test_data_in_which_nothing_counts_is_refused():
    batches = make_batches([4, 4], 0)
    for batch in batches:
        batch["counts"][:] = False
    with refuses(ValueError, "`batches`", "counts"):
        trainer_of(mean_of_some, 2).evaluate(batches)


@pytest.mark.by_default("2")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_training_on_nothing_is_told_once_and_updates_as_plain_optax(microbatches):
    def mean_or_zero(model, batch):
        squares = (predict(model, batch["x"]) - batch["y"]) ** 2
        total = batch["counts"].sum()
        return (squares * batch["counts"]).sum() / jnp.maximum(total, 1), {"weight": total}

    batches = make_batches([4, 4, 4], 1)
    batches[0]["counts"][:] = True
    for batch in batches[1:]:
        batch["counts"][:] = False
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    with warns(UserWarning, "step 2", '"weight"', 0) as told:
        result = mt.fit(
            build, mean_or_zero, batches, optimizer,
            microbatches=microbatches, precision=FP32, progress=False,
        )  # fmt: skip
    assert len(told) == 1
    assert [record["weight"] for record in result.history] == [4, 0, 0]
    assert [record["loss"] for record in result.history][1:] == [0, 0]
    params: Any = build()
    state = optimizer.init(params)
    for batch in batches:
        gradient = jax.grad(lambda p, b: mean_or_zero(p, b)[0])(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(result.params["w"], params["w"], rtol=2e-6)


def test_means_with_weights_are_a_function_of_their_own():
    """Of a training step, whose microbatches count alike, and of an evaluation."""
    cache, rows = KernelCache(), [[jnp.float32(1), jnp.int32(1)], [jnp.float32(4), jnp.int32(2)]]
    for weighted, mean in ((False, 2.5), (True, 3.0), (False, 2.5)):
        found = cache.get(steps.means(["weight"], weighted=weighted))(rows)
        assert found["loss"] == mean and found["weight"] == 3


@pytest.mark.by_default("2")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_each_batch_draws_numbers_of_its_own_and_the_same_again(microbatches):
    def drawn(model, batch, rng):
        return 0 * predict(model, batch["x"]) + jax.random.uniform(rng)

    def loss_fn(model, batch, rng):
        return drawn(model, batch, rng).mean()

    batches = make_batches([4, 4, 4], 0)
    options: dict[str, Any] = {"microbatches": microbatches, "precision": FP32, "progress": False}
    trainer = mt.Trainer(build(), loss_fn, optax.sgd(0.1), batches[0], seed=3, **options)
    trainer.step(batches[0])

    def key(n, m):
        return jax.random.fold_in(
            jax.random.fold_in(jax.random.fold_in(jax.random.key(3), n), 1), m
        )

    numbers = [float(jax.random.uniform(key(n, m))) for n in range(3) for m in range(microbatches)]
    assert len(set(numbers)) == 3 * microbatches
    for _ in range(2):
        rows = trainer.predict(batches, drawn)
        np.testing.assert_array_equal(
            rows, np.repeat(np.array(numbers, np.float32), 4 // microbatches)
        )
        np.testing.assert_allclose(trainer.evaluate(batches)["loss"], np.mean(numbers), rtol=1e-6)
