"""Evaluation data is looked at before the first step, and nothing of it is lost by that."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from messages import refuses, tells
from optimizers import OPTIMIZERS
from runs import make_spec, make_trainer
from zoo import CASES

DIM, ROWS = 4, 6


def build():
    return {"w": jnp.linspace(-1, 1, DIM), "table": jnp.linspace(0, 1, ROWS)}


def loss_fn(model, batch):
    found = jnp.tanh(batch["x"] @ model["w"]) + model["table"][batch["ids"]]
    return ((found - batch["y"]) ** 2).mean()


def make_batch(seed: int, rows: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, DIM)).astype(np.float32),
        "ids": rng.integers(0, ROWS, rows).astype(np.int32),
        "y": rng.normal(size=rows).astype(np.float32),
        "unread": np.zeros(rows, np.float32),
    }


class Iterable:
    def __init__(self, batches: list[Any]):
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


def fitted(optimizer: optax.GradientTransformation | None = None, **options: Any) -> mt.FitResult:
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    data, precision = [make_batch(n) for n in range(3)], mt.Precision(compute=jnp.float32)
    return mt.fit(build, loss_fn, data, optimizer, precision=precision, progress=False, **options)


def without_y() -> Any:
    return {name: x for name, x in make_batch(9).items() if name != "y"}


FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "iterable": Iterable,
    "function": lambda batches: lambda: batches,
    "generator": lambda batches: lambda: iter(batches),
}


@pytest.mark.by_default(
    *("missing-list", "missing-iterable", "missing-function", "missing-generator"),
    *("kind-generator", "shape-list", "scalar-iterable"),
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (without_y, ["batch['y']", "missing"]),
        (
            lambda: make_batch(9) | {"ids": np.zeros(4, np.float32)},
            ["batch['ids']", "float32", "int32"],
        ),
        (
            lambda: make_batch(9) | {"x": np.zeros((4, DIM, 3), np.float32)},
            ["batch['x']", (4, 4, 3), (4, 4)],
        ),
        (lambda: make_batch(9) | {"y": np.float32(1)}, ["batch['y']", "float32"]),
    ],
    ids=["missing", "kind", "shape", "scalar"],
)
def test_a_batch_that_can_not_be_evaluated_is_told_before_the_first_step(make, named, form):
    with pytest.raises(Exception) as caught:
        fitted(eval_data=FORMS[form]([make()]))
    error: Any = caught.value
    told = " ".join([str(error), *error.__notes__])
    assert tells(told, *named, "`eval_data`", "checked")
    assert error.result.trainer.num_steps == 0 and not error.result.history
    # `train` looks at it, too.
    trainer = fitted(steps=1).trainer
    with pytest.raises(type(error)):
        mt.train(trainer, [make_batch(0)], eval_data=FORMS[form]([make()]), progress=False)
    assert trainer.num_steps == 1


@pytest.mark.by_default("function", "generator")
@pytest.mark.parametrize("form", FORMS)
def test_all_that_the_loss_can_compute_with_is_evaluated(form):
    batches = [make_batch(7, rows) for rows in (3, 4, 8)]
    del batches[0]["unread"]
    batches[0]["more"] = np.zeros((3, 2, 2), np.int8)
    batches[0]["ids"] = batches[0]["ids"].astype(np.uint8)
    batches[1]["x"] = batches[1]["x"].astype(np.float16)
    result = fitted(eval_data=FORMS[form](batches))
    expected = result.trainer.evaluate(batches)["loss"]
    assert [record.get("eval_loss") for record in result.history] == [None, None, expected]
    assert result.history.cut_off is None


@pytest.mark.parametrize("as_list", [True, False])
def test_a_function_that_goes_on_in_its_data_loses_no_batch(as_list):
    batches = [make_batch(n) for n in range(10, 16)]
    stream, calls = iter(batches), []

    def evaluated() -> Any:
        calls.append(1)
        two = islice(stream, 2)
        return list(two) if as_list else two

    result = fitted(optax.sgd(0.0), eval_data=evaluated, eval_every=1)
    pairs = [batches[n : n + 2] for n in (0, 2, 4)]
    expected = [result.trainer.evaluate(pair)["loss"] for pair in pairs]
    assert [record["eval_loss"] for record in result.history] == expected
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(3, ["step", "bound", "step", "step"]), (8, ["bound", "step", "step", "step"])],
)
def test_an_evaluation_is_bound_before_the_first_step_if_it_may_not_fit(
    rows, expected, monkeypatch
):
    """Of a batch no larger than those of training, the loss is only traced at first."""
    real, order = RunSpec.bound_step, []

    def bound_step(self: RunSpec, *args: Any, **options: Any) -> Any:
        order.append("bound")
        return real(self, *args, **options)

    monkeypatch.setattr(RunSpec, "bound_step", bound_step)
    fitted(
        eval_data=[make_batch(7, rows=rows)],
        eval_every=2,
        callbacks=[lambda trainer, record: order.append("step")],
    )
    assert order == expected


def test_the_metrics_of_an_evaluation_are_known_before_it(monkeypatch):
    """Also where it is scheduled at once, because the batch is larger than those of training."""
    real, bound = RunSpec.bound_step, []

    def bound_step(self: RunSpec, *args: Any, **options: Any) -> Any:
        bound.append(options.get("averages", False))
        return real(self, *args, **options)

    def with_metric(model, batch):
        loss = loss_fn(model, batch)
        return loss, {"twice": 2 * loss}

    trainer = mt.Trainer(
        build, with_metric, optax.sgd(0.1), make_batch(0), ema_decay=0.5, progress=False
    )
    monkeypatch.setattr(RunSpec, "bound_step", bound_step)
    for rows in (4, 8):
        for params in ("trained", "ema"):
            batch = make_batch(7, rows)
            found = trainer.check_eval_batch(batch, params=params)
            assert bound == ([params == "ema"] if rows > 4 else [])
            assert sorted(found) == sorted(trainer.evaluate([batch], params=params))
            bound.clear()


def test_evaluation_data_that_exceed_the_budget_are_told_before_the_first_step():
    case, adam = CASES["nnx_tied"], OPTIMIZERS["adam"]
    least = make_spec(case, adam).first.schedule.smallest_bytes
    trainer = make_trainer(case, adam, budget=round(1.2 * least))
    tokens = case.batch(0)["tokens"]
    trainer.check_eval_batch({"tokens": tokens})
    with refuses(ValueError, "evaluation"):
        trainer.check_eval_batch({"tokens": np.tile(tokens, (64, 1))})


def test_an_evaluation_without_batches_is_told_before_the_first_step():
    with refuses(ValueError, "`eval_data`") as caught:
        fitted(eval_data=lambda: iter(()))
    assert caught.value.result.trainer.num_steps == 0  # type: ignore[attr-defined]
