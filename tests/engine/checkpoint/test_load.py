"""`load` gives what the trainer of a checkpoint has, without a loss, an optimizer or a batch."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from orbax.checkpoint import v1 as ocp

import megatrain_jax as mt
from megatrain_jax._src.engine.checkpoint import orbax
from messages import refuses, warns

X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


class Layers(nnx.Module):
    def __init__(self, width: int = 4):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, width, rngs=rngs)])
        self.norm, self.dropout = nnx.BatchNorm(width, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.layers[0](x)))


class Net(linen.Module):
    widths: tuple[int, ...] = (4,)
    norms: bool = True

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths:
            x = linen.Dense(width)(x)
        norm = linen.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)
        return norm(x) if self.norms else x


def of_tree(model: Any, x: Any) -> Any:
    return x @ model["layers"][0]["w"] if isinstance(model, dict) else model(x)


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((of_tree(model, batch) - 1) ** 2)


def build_tree() -> Any:
    return {"layers": [{"w": jnp.eye(4)}], "none": jnp.zeros((0, 3))}


MODELS = {"NNX": Layers(), "a builder": lambda: Layers(), "a pytree": build_tree(), "Linen": Net()}


def run(model: Any, folder: Path | None = None, **options: Any) -> mt.Trainer:
    given: dict[str, Any] = {"checkpoint_dir": folder, "progress": False} | options
    return mt.fit(model, loss_fn, [X] * 2, optax.adam(0.1), **given).trainer


def equal(found: Any, expected: Any) -> None:
    """Equal arrays of equal dtypes in trees of equal paths; keys are no numbers."""
    flat = [
        {
            jax.tree_util.keystr(path): np.asarray(x)
            for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
            if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        }
        for tree in (found, expected)
    ]
    assert flat[0].keys() == flat[1].keys() and len(flat[0]) > 0
    for path, x in flat[0].items():
        assert x.dtype == flat[1][path].dtype, path
        np.testing.assert_array_equal(x, flat[1][path], err_msg=path)


@pytest.mark.by_default("NNX-compact", "a pytree-compact", "Linen-auto", "a builder-auto")
@pytest.mark.parametrize("precision", ["auto", "compact"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_that_of_the_trainer(kind: str, precision: str, tmp_path: Path):
    model = MODELS[kind]
    trainer = run(model, tmp_path, precision=precision)
    found, expected = mt.load(tmp_path, model), trainer.model
    if isinstance(model, linen.Module):
        assert found.keys() == {"params", "batch_stats"}
        equal(found["params"], trainer.params)
        stats = {
            f"batch_stats/BatchNorm_0/{n}": x
            for n, x in found["batch_stats"]["BatchNorm_0"].items()
        }
        equal(stats, trainer.variables)
    elif isinstance(model, dict):
        equal(found, jax.tree.map(lambda x: np.asarray(x, np.float32), expected))
    else:
        assert type(found) is Layers and found.dropout.deterministic
        of_each = (nnx.state(x, nnx.Any(nnx.Param, nnx.BatchStat)) for x in (found, expected))
        equal(*(nnx.to_pure_dict(jax.tree.map(lambda x: x.astype(np.float32), x)) for x in of_each))


def test_parameters_alone_are_nested_dicts(tmp_path: Path):
    trainer = run(MODELS["NNX"], tmp_path)
    found = mt.load(tmp_path)
    equal(found["layers"]["0"]["kernel"], trainer.params["layers"][0]["kernel"][...])
    assert {*found} == {"layers", "norm"} and {*found["norm"]} == {"scale", "bias"}
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(found))


def test_the_newest_step_of_a_run_or_the_one_asked_for(tmp_path: Path):
    trainer = run(MODELS["a pytree"], tmp_path, checkpoint_every=1)
    first, last = (mt.load(tmp_path / step)["layers"]["0"]["w"] for step in ("1", "2"))
    assert not np.array_equal(first, last)
    equal(mt.load(tmp_path)["layers"]["0"]["w"], last)
    given = mt.Trainer(MODELS["a pytree"], loss_fn, optax.sgd(0.1), X, params=tmp_path)
    equal(given.params, trainer.params)
    trainer.save(tmp_path / "alone", params_only=True)
    equal(mt.load(tmp_path / "alone"), mt.load(tmp_path / "2"))


def test_what_does_not_fit_is_named(tmp_path: Path):
    run(MODELS["NNX"], tmp_path)
    with refuses(ValueError, tmp_path / "2", "layers/0/kernel"):
        mt.load(tmp_path, Layers(5))
    with refuses(mt.CheckpointError, "`folder`", tmp_path / "none"):
        mt.load(tmp_path / "none")
    with refuses(TypeError, "model"):
        mt.load(tmp_path, 3)
    (tmp_path / "2" / "megatrain.json").unlink()
    with refuses(mt.CheckpointError, "`folder`"):
        mt.load(tmp_path / "2", Layers())


class Called(linen.Module):
    """Called with arrays in containers, numbers and names, and by a method of its own."""

    width: int = 4
    only_once: bool = False

    def setup(self) -> None:
        self.first, self.second = linen.Dense(self.width), linen.Dense(self.width)

    def __call__(self, inputs: Any, times: int, *, name: str | None = None) -> jax.Array:
        assert times == 2 and name == "x"
        return self.first(inputs[0]["x"]) * times

    def again(self, x: jax.Array) -> jax.Array:
        return x if self.only_once else self.second(x)


def calling_loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model.again(model(({"x": batch}, [1, None]), 2, name="x")) ** 2)


def by_parts_loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model.second(model.first(batch)) ** 2)


def of_calls(loss: Any, folder: Path) -> Path:
    """A checkpoint of `Called`."""
    given: dict[str, Any] = {"checkpoint_dir": folder, "progress": False}
    mt.fit(Called(), loss, [X], optax.sgd(0.1), **given)
    return folder


def test_a_linen_module_is_compared(tmp_path: Path):
    run(Net(), tmp_path / "one")
    run(Net((4, 4)), tmp_path / "two")
    with refuses(ValueError, tmp_path / "one" / "2", "Dense_0/kernel"):
        mt.load(tmp_path / "one", Net((5,)))
    with refuses(ValueError, "batch_stats/BatchNorm_0/mean"):
        mt.load(tmp_path / "one", Net(norms=False))
    with refuses(ValueError, "Dense_1/kernel is missing"):
        mt.load(tmp_path / "one", Net((4, 4)))
    with refuses(ValueError, "Dense_1/kernel"):  # which `apply` wouldn't notice
        mt.load(tmp_path / "two", Net())


def test_a_linen_module_is_called_as_in_training(tmp_path: Path):
    folder = of_calls(calling_loss, tmp_path / "whole")
    assert {*mt.load(folder, Called())["params"]} == {"first", "second"}
    for other in (Called(5), Called(only_once=True)):
        with refuses(ValueError, "second/kernel"):
            mt.load(folder, other)
    with warns(UserWarning, "`model`", "Net"):  # has no method `again`
        assert {*mt.load(folder, Net())["params"]} == {"first", "second"}
    # Calls of parts are not repeated.
    folder = of_calls(by_parts_loss, tmp_path / "parts")
    assert {*mt.load(folder, Called(5))["params"]} == {"first", "second"}


def test_statistics_are_compared(tmp_path: Path):
    trainer = run(MODELS["NNX"], tmp_path / "run")
    trainer.save(tmp_path / "alone", params_only=True)
    with warns(UserWarning, tmp_path / "alone", "norm/mean", "norm/var"):
        mt.load(tmp_path / "alone", Layers())
    other: Any = Layers()
    other.dropout = nnx.Dropout(0.5)  # without keys and their counts, as for inference
    mt.load(tmp_path / "run", other)
    other.norm.mean, other.more = nnx.BatchStat(jnp.zeros(5)), nnx.BatchStat(jnp.zeros(2))
    with refuses(ValueError, "norm/mean", "more is missing"):
        mt.load(tmp_path / "run", other)


@pytest.mark.by_default("NNX-a folder", "Linen-a tree")
@pytest.mark.parametrize("given", ["a folder", "a tree", "Orbax"])
@pytest.mark.parametrize("kind", ["NNX", "Linen"])
def test_a_run_starts_from_the_statistics_too(kind: str, given: str, tmp_path: Path):
    model = MODELS[kind]
    trainer = run(model, tmp_path / "run")
    params: Any = tmp_path / "run" / "2"
    if given != "a folder":
        tree = mt.load(params, model)
        params = tree if kind == "Linen" else nnx.state(tree, nnx.Any(nnx.Param, nnx.BatchStat))
    if given == "Orbax":
        ocp.save(str(tmp_path / "of_others"), nnx.to_pure_dict(params) if kind == "NNX" else params)
        params = tmp_path / "of_others"
    start = mt.Trainer(model, loss_fn, optax.adam(0.1), X, params=params, progress=False)
    equal(start.params, trainer.params)
    of_each = [
        {n: x for n, x in one.variables.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        for one in (start, trainer)
    ]
    equal(*of_each)
    assert len(of_each[0]) == 2
    # Counts of random keys begin anew.
    fresh = mt.Trainer(model, loss_fn, optax.adam(0.1), X, progress=False)
    equal(
        *(
            {n: x for n, x in t.variables.items() if n not in of_each[0]} | {"1": X}
            for t in (start, fresh)
        )
    )


def test_statistics_that_a_checkpoint_lacks_are_named(tmp_path: Path):
    trainer = run(MODELS["NNX"])
    trainer.save(tmp_path / "alone", params_only=True)
    with warns(UserWarning, tmp_path / "alone", "norm/mean", "norm/var"):
        start = run(MODELS["NNX"], params=tmp_path / "alone", steps=1)
    with warns(UserWarning, "`params`", "norm/mean", "norm/var"):
        alone = run(MODELS["NNX"], params=trainer.params, steps=1)
    equal(start.params, alone.params)
    strange = nnx.to_pure_dict(nnx.state(MODELS["NNX"], nnx.Any(nnx.Param, nnx.BatchStat)))
    strange["norm"]["mean"] = np.ones(3, np.float32)
    with warns(UserWarning, "`params`", "norm/mean", "3", "4"):
        run(MODELS["NNX"], params=strange, steps=1)


def test_a_bound_linen_module_goes_on_with_its_variables():
    first = run(MODELS["Linen"])
    again = mt.Trainer(first.model, loss_fn, optax.adam(0.1), X, progress=False)
    equal(again.model.variables, first.model.variables)
    other = jax.tree.map(np.zeros_like, dict(first.model.variables))
    given = mt.Trainer(first.model, loss_fn, optax.adam(0.1), X, params=other, progress=False)
    equal(given.params, other["params"])


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: {"one": model}])
def test_a_trained_model_is_in_evaluation_mode_and_trains_on(wrap):
    def loss(model: Any, batch: Any) -> jax.Array:
        return loss_fn(model["one"] if isinstance(model, dict) else model, batch)

    options: dict[str, Any] = {"steps": 2, "precision": "float32", "progress": False}
    first = mt.fit(wrap(Layers()), loss, [X] * 2, optax.adam(0.1), **options)
    predict = lambda model, x: (model["one"] if isinstance(model, dict) else model)(x)  # noqa: E731
    predicted = first.trainer.predict([X], predict)
    np.testing.assert_array_equal(predict(first.model, X), predicted)
    # Training on has dropout and new statistics again.
    again = mt.fit(first.model, loss, [X] * 2, optax.adam(0.1), **options)
    assert not np.array_equal(predict(again.model, X), predicted)
    one, other = (jax.tree.leaves(nnx.state(r.model, nnx.BatchStat))[0] for r in (first, again))
    assert not np.array_equal(one, other)


def test_a_checkpoint_is_described_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(MODELS["NNX"], tmp_path)
    read, calls = orbax.own_metadata, []
    monkeypatch.setattr(orbax, "own_metadata", lambda path: calls.append(path) or read(path))
    mt.load(tmp_path, Layers())
    assert calls == [tmp_path / "2"]
