"""`load` gives what the trainer of a checkpoint has, without a loss, an optimizer or a batch."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import megatrain_jax as mt
from messages import refuses

X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


class Layers(nnx.Module):
    def __init__(self, width: int = 4):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, width, rngs=rngs)])
        self.norm, self.dropout = nnx.BatchNorm(width, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.layers[0](x)))


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.BatchNorm(use_running_average=False)(linen.Dense(4)(x))


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
