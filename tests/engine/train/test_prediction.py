"""Predictions are what plain JAX computes from the same parameters, with the rows in order."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import megatrain_jax as mt
import small
from inside import bound_functions, num_programs
from messages import refuses
from runs import make_trainer
from zoo import CASES
from zoo_pytree import forward_scan

NUM_ROWS = (8, 3, 8)  # the second batch can't be divided


def rows_of(model: Any, batch: Any) -> Any:
    """Rows of several dtypes and shapes; the last ones depend on no parameter."""
    tokens = batch["tokens"][:, :-1]
    logits = forward_scan(model, tokens) if isinstance(model, dict) else model(tokens)
    last = logits[:, -1]
    return {"logits": logits, "next": (last.argmax(-1), last.astype(jnp.bfloat16)), "in": tokens}


@pytest.mark.by_default("nnx_tied-2-2")
@pytest.mark.parametrize(
    ("name", "microbatches", "devices"),
    [("nnx_tied", 2, 2), ("linen_numbered", 2, 1), ("lax_scan_pytree", 1, 2)],
)
def test_rows_are_those_of_plain_jax_in_order(name, microbatches, devices):
    case = CASES[name]
    mesh = Mesh(jax.devices()[:devices], "data")
    options: dict[str, Any] = {"microbatches": microbatches, "mesh": mesh, "progress": False}
    trainer = make_trainer(case, lambda _: optax.sgd(0.1), **options)
    batches = [{"tokens": case.batch(seed)["tokens"][:n]} for seed, n in enumerate(NUM_ROWS)]
    found = trainer.predict(iter(batches), rows_of)
    whole = {"tokens": np.concatenate([batch["tokens"] for batch in batches])}
    model = jax.tree.map(jnp.asarray, trainer.model) if name == "lax_scan_pytree" else trainer.model
    expected = jax.device_get(jax.jit(lambda batch: rows_of(model, batch))(whole))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(ours) is np.ndarray and ours.dtype == theirs.dtype
        tolerance = {"float32": 2e-6, "bfloat16": 2**-7}.get(ours.dtype.name, 0)
        ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
        # Sums of terms that cancel are as far off as their terms are large.
        atol = tolerance * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=atol)


@pytest.fixture(scope="module")
def linear() -> mt.Trainer:
    model = {"w": np.ones((3, 1), np.float32)}
    return mt.Trainer(model, mean_of, optax.sgd(0.1), batch_of(2), progress=False)


def batch_of(rows: int, width: int = 3) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, width), np.float32)}


def outputs(model, batch):
    return batch["x"][:, :3] @ model["w"]


def mean_of(model, batch):
    return outputs(model, batch).mean()


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (mean_of, ["fn (mean_of)", "first axis", "2 examples", "shape ()"]),
        (lambda model, batch: {"w": model["w"]}, ["result['w']", "shape (3, 1)", "2 examples"]),
        (lambda model, batch: [outputs(model, batch), "text"], ["result[1]", "str"]),
        (lambda model, batch: {}, ["fn", "dict", "no arrays"]),
        (lambda model, batch: batch["x"], ["fn", "not depend on any parameter"]),
        (lambda model, batch: outputs(model, batch).tolist(), ["fn", "needs the value"]),
    ],
)
def test_what_are_no_rows_of_the_batch_is_refused(linear, fn, named):
    with refuses((TypeError, ValueError), *named):
        linear.predict([batch_of(2)], fn)


def test_arguments_are_checked_before_anything_is_drawn(linear):
    def batches() -> Iterator[Any]:
        raise AssertionError
        yield

    with refuses(TypeError, "fn(model, batch)", "fn(model, batch, rng)"):
        linear.predict(batches(), lambda model: model["w"])
    with refuses(ValueError, "`batches`"):
        linear.predict([], outputs)
    with refuses(TypeError, "`batches`", "[batch]"):
        linear.predict(batch_of(2), outputs)


def test_rows_that_cannot_be_joined_are_told_at_their_batch(linear):
    drawn = []

    def batches() -> Iterator[Any]:
        for width in (3, 4, 5):
            drawn.append(width)
            yield batch_of(2, width)

    with refuses(ValueError, "fn", "first of `batches`", "(3,)", "batch 2", "(4,)"):
        linear.predict(batches(), lambda model, batch: batch["x"] * model["w"][0])
    assert drawn == [3, 4]


def test_functions_of_long_ago_are_forgotten_with_their_programs():
    """As a notebook's lambda, which is a new function each time that its cell runs."""
    trainer, batches = small.trainer(), [small.batch(1)]
    trainer.read(trainer.step(batches[0]))
    made, expected = [], trainer.evaluate(batches)["loss"]

    def evaluate() -> int:
        loss, fn = lambda p, x: small.loss_fn(p, x), lambda p, x: x["x"] @ p[0]["w"]
        made.extend([weakref.ref(loss), weakref.ref(fn)])
        assert trainer.evaluate(batches, loss)["loss"] == expected
        trainer.predict(batches, fn)
        return num_programs(trainer)

    numbers = [evaluate() for _ in range(6)]
    gc.collect()
    assert [function() is not None for function in made] == [False] * 4 + [True] * 8
    assert numbers[-1] == numbers[-2] and len(bound_functions(trainer)) == 10
    # One that is used again stays, and so do the run's own functions.
    used = made[4]()
    for _ in range(3):
        assert trainer.evaluate(batches, used)["loss"] == expected
        evaluate()
        assert used in bound_functions(trainer)
    own = bound_functions(trainer)
    trainer.evaluate(batches)
    trainer.read(trainer.step(batches[0]))
    assert bound_functions(trainer) == own
