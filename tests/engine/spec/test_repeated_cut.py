"""Plans of deep models from fewer blocks equal plans of the whole models."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.common.repeated_model import RepeatedModel
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.repeated_cut import NotAlikeError
from megatrain_jax._src.engine.spec.run_spec import RunSpec

_WIDTH = 64
_BATCH = jax.ShapeDtypeStruct((32, _WIDTH), jnp.float32)


def _builder(number: int, period: int) -> Callable[[], Any]:
    def build() -> Any:
        wide = [{"up": (2 + i % period) * _WIDTH} for i in range(number)]
        layers = [
            {"up": jnp.ones((_WIDTH, w["up"])), "down": jnp.ones((w["up"], _WIDTH))} for w in wide
        ]
        ends = {name: jnp.ones((_WIDTH, _WIDTH)) for name in ("embed", "head")}
        return {**ends, "layers": layers, "scale": jnp.ones(())}

    return build


def _of(layer: dict[str, Any], x: Any) -> Any:
    return jnp.tanh(x @ layer["up"]) @ layer["down"]


def _chain(model: Any, batch: Any) -> Any:
    x, mask = batch @ model["embed"], jnp.cos(batch).sum(1, keepdims=True)
    for layer in model["layers"]:
        x = x + _of(layer, x) * mask * model["scale"]
    return (x @ model["head"]).mean()


def _two_values(model: Any, batch: Any) -> Any:
    first = added = x = batch @ model["embed"]
    for layer in model["layers"]:
        own = jnp.cos(batch).sum(1, keepdims=True)  # traced for each layer
        added = _of(layer, x) * added * own + jnp.sin(first) * model["scale"]
        x = x + added
    return (x @ model["head"]).mean()


def _all_at_the_end(model: Any, batch: Any) -> Any:
    x, found = batch @ model["embed"] * model["scale"], []
    for layer in model["layers"]:
        x = x + _of(layer, x)
        found.append(x.mean())
    return (x @ model["head"]).mean() + jnp.stack(found).max()


def _second_differs(model: Any, batch: Any) -> Any:
    x = batch @ model["embed"] * model["scale"]
    for number, layer in enumerate(model["layers"]):
        x = x + (_of(layer, x) if number != 1 else jnp.sin(x @ layer["up"]) @ layer["down"])
    return (x @ model["head"]).mean()


_ADAM, _CLIPPED = optax.adamw(1e-3), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def _spec(
    loss: Any, number: int, period: int, optimizer: Any, repeated: Any, options: dict[str, Any]
) -> RunSpec:
    adapted, _ = adapt(_builder(number, period), loss, _BATCH, 0)
    return make_run_spec(adapted, loss, optimizer, _BATCH, Options(**options), repeated)


def _facts(spec: RunSpec) -> dict[str, Any]:
    program, cut = spec.first.program, spec.optimizer
    return {
        "stages": [(s.name, s.key, s.leaves, s.inputs, s.outputs) for s in program.stages],
        "values": [(x.shape, x.dtype) for x in program.values],
        "ids": (program.outputs, program.prologue_values, program.examples),
        "leaves": [(leaf.name, leaf.block, leaf.shape) for leaf in spec.leaves],
        "groups": spec.grouping,
        "updates": [[f.key for f in rows] for rows in (cut.reduce, cut.apply, cut.initial_state)],
        "state": [[(x.shape, x.dtype) for x in row] for row in cut.state],
        "messages": cut.messages,
        "workload": spec.first.workload,
        "schedule": spec.first.schedule,
    }


@pytest.mark.parametrize(
    ("loss", "number", "period", "optimizer", "options"),
    [
        (_chain, 6, 1, _ADAM, {"device_budget": "500KiB"}),
        (_chain, 10, 2, _CLIPPED, {"microbatches": 4}),
        (_two_values, 7, 1, _CLIPPED, {"device_budget": "minimum"}),
    ],
)
def test_a_cut_with_repeated_blocks_equals_that_of_the_whole_model(
    loss: Any, number: int, period: int, optimizer: Any, options: dict[str, Any]
):
    times = (number - 2 * period - 2) // period
    model = RepeatedModel(
        **dict.fromkeys(("few", "whole"), dict), container=("layers",), first=period,
        period=period, times=times,
    )  # fmt: skip
    few = _spec(loss, number - times * period, period, optimizer, model, options)
    whole = _facts(_spec(loss, number, period, optimizer, None, options))
    for what, found in _facts(few).items():
        assert found == whole[what], what


def test_a_plan_builds_no_more_blocks_than_it_needs():
    def never() -> Any:
        raise AssertionError("the whole model is built")

    blocks = {"container": ("layers",), "first": 1, "period": 1, "times": 2}
    model = RepeatedModel(few=_builder(4, 1), whole=never, **blocks)
    given = _chain, _ADAM, _BATCH
    assert mt.plan(model, *given, hardware="H100") == mt.plan(
        _builder(6, 1), *given, hardware="H100"
    )


@pytest.mark.parametrize("loss", [_all_at_the_end, _second_differs])
def test_blocks_that_differ_are_planned_one_by_one(loss: Any):
    blocks = {"container": ("layers",), "first": 1, "period": 1, "times": 2}
    model = RepeatedModel(few=_builder(4, 1), whole=dict, **blocks)
    with pytest.raises(NotAlikeError):
        _spec(loss, 4, 1, _ADAM, model, {})
    assert mt.plan(replace(model, whole=_builder(6, 1)), loss, _ADAM, _BATCH).num_stages == 8
