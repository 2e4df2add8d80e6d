"""Plans and runs of one model, loss and optimizer, in every order: neither leaves anything behind.

A plan traces all of it. What a trace makes has no values, so none of it may come to a later run.
"""

import functools
from itertools import pairwise, product
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.core import Tracer

import megatrain_jax as mt
from messages import refuses
from optimizers import OPTIMIZERS
from oracle import train_plain
from runs import check_close
from zoo import CASES
from zoo_case import Case

# Every one of the two after every one of the two.
ORDERS = ["plan plan fit fit plan", "fit fit plan plan fit"]
X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


def mean_square(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch) ** 2)


def build_nnx() -> nnx.Module:
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.1, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)]
    return nnx.Sequential(*layers)


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jnp.tanh(flax.linen.Dense(4)(x))
        return x


def build_tree() -> Any:
    return {"layers": [{"w": 0.1 * (i + 1) * jnp.eye(4)} for i in range(2)]}


def tree_loss(model: Any, batch: Any) -> jax.Array:
    for layer in model["layers"]:
        batch = jnp.tanh(batch @ layer["w"])
    return jnp.mean(batch**2)


KINDS = {
    "NNX": (build_nnx, mean_square),
    "an NNX builder": (lambda: build_nnx, mean_square),
    "Linen": (Linen, mean_square),
    "a pytree": (build_tree, tree_loss),
}


def test_the_orders_are_all_there_are():
    found = {pair for order in ORDERS for pair in pairwise(order.split())}
    assert found == set(product(["plan", "fit"], repeat=2))


@functools.cache
def expected(kind: str) -> Any:
    build, loss_fn = KINDS[kind]
    case = Case(name=kind, build=build, loss_fn=loss_fn, blocks=2, templates=1)
    return train_plain(case, OPTIMIZERS["adam"], [X]).params


@pytest.mark.by_default("a pytree-fit fit plan plan fit")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_and_runs_of_the_same_objects(kind, order):
    build, loss_fn = KINDS[kind]
    model, optimizer = build(), OPTIMIZERS["adam"](None)
    precision = mt.Precision(compute=jnp.float32)
    plans = set()
    for call in order.split():
        if call == "plan":
            # On a machine that is named: a plan for this one counts this process's memory.
            made = mt.plan(model, loss_fn, optimizer, X, precision=precision, hardware="H100")
            plans.add(str(made))
            continue
        result = mt.fit(model, loss_fn, [X], optimizer, precision=precision, progress=False)
        check_close(result.params, expected(kind), 1e-5, "parameters")
    assert len(plans) == 1


def test_a_model_that_a_plan_has_left_in_a_cache_is_named():
    cached = functools.cache(build_tree)
    plans = [mt.plan(cached, tree_loss, optax.sgd(0.1), X, hardware="H100") for _ in range(2)]
    assert str(plans[0]) == str(plans[1])  # shapes are all that a plan needs
    for model in (cached, cached()):
        with refuses(ValueError, "model", "float32[4,4]", "traced"):
            mt.fit(model, tree_loss, [X], optax.sgd(0.1), progress=False)


def test_a_loss_that_reads_an_array_of_an_earlier_trace_is_named():
    @functools.cache
    def table():
        return jnp.arange(4.0)

    def with_table(model, batch):
        return tree_loss(model, batch + table())

    mt.plan(build_tree(), with_table, optax.sgd(0.1), X)
    with refuses(ValueError, "loss_fn", "float32[4]"):
        mt.fit(build_tree(), with_table, [X], optax.sgd(0.1), progress=False)


def test_models_of_the_zoo_outlive_a_trace():
    build = CASES["mid_rest"].build
    jax.eval_shape(lambda: nnx.state(build()))
    assert not any(isinstance(x, Tracer) for x in jax.tree.leaves(nnx.state(build())))
