"""Lookups of few rows by many indices: gradients by products against those that JAX scatters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import spec_of
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program import rewriting
from megatrain_jax._src.engine.program.loss.gradients import traced_pullback


def scatters(jaxpr: Any) -> int:
    """The number of scatters in a jaxpr and in the calls in it."""
    inner = sum(scatters(body) for eqn in jaxpr.eqns for body in jx.inner_jaxprs(eqn))
    return inner + sum(eqn.primitive.name == "scatter-add" for eqn in jaxpr.eqns)


# Indices in a table of 3 rows; some lie out of bounds.
INDICES = np.random.default_rng(0).integers(-4, 5, (20, 30))
WEIGHTS = np.random.default_rng(1).standard_normal((20, 30, 2, 4)).astype(np.float32)


@pytest.mark.parametrize("in_call", [False, True])
@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_the_gradient_of_a_crowded_lookup_is_that_of_a_scatter(mode, in_call):
    indices = INDICES % 3 if mode == "promise_in_bounds" else INDICES

    def lookup(table):
        return table.at[indices].get(mode=mode, fill_value=0)

    def total(table):
        rows = jax.jit(lookup)(table) if in_call else lookup(table)
        return jnp.sum(WEIGHTS * jnp.sin(rows))

    table = jax.random.normal(jax.random.key(0), (3, 2, 4))
    traced = jx.trace(total, table)

    def by_products(table):
        args = [*traced.consts, table]
        return rewriting.evaluate_for_derivatives(traced.jaxpr, args, traced.jaxpr.invars)[0]

    np.testing.assert_allclose(
        jax.grad(by_products)(table), jax.grad(total)(table), rtol=1e-5, atol=1e-5
    )
    assert scatters(jax.make_jaxpr(jax.grad(total))(table).jaxpr)
    assert not scatters(jax.make_jaxpr(jax.grad(by_products))(table).jaxpr)


def loss_fn(params: Any, batch: Any) -> Any:
    """Layers with a bias by the distance of two tokens, as a T5 has it; few tokens have types."""
    length = batch.shape[1]
    bias = params["bias"][np.clip(np.subtract.outer(*[np.arange(length)] * 2), 0, 1)]
    x = params["tokens"][batch]
    for layer in params["layers"]:
        mixed = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, x) + bias.sum(-1))
        x = x + jnp.einsum("bqk,bkd->bqd", mixed, x @ layer["w"])
    return (x**2).mean()


@pytest.mark.by_default("2-1")
@pytest.mark.parametrize(("microbatches", "num_devices"), [(1, 1), (2, 1), (1, 2)])
def test_a_run_with_crowded_lookups_trains_as_plain_jax_does(microbatches, num_devices):
    rng = np.random.default_rng(0)

    def numbers(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    layers = [{"w": 0.1 * numbers(8, 8)} for _ in range(3)]
    params = {"bias": numbers(2, 4), "tokens": numbers(40, 8), "layers": layers}
    batches = [rng.integers(0, 40, (2, 16)) for _ in range(2)]
    optimizer = optax.sgd(0.1)
    trainer = mt.Trainer(
        params,
        loss_fn,
        optimizer,
        batches[0],
        microbatches=microbatches,
        mesh=Mesh(jax.devices()[:num_devices], "data"),
        precision=mt.Precision(compute=jnp.float32),
    )
    # Only the table of all tokens, with less than one index per row, is added to by a scatter.
    pullbacks = [
        traced_pullback(bound.stage, bound.mode.arriving, bound.mode.give_outputs)
        for bound in spec_of(trainer).first.stages
        if bound.mode is not None
    ]
    assert sum(scatters(pullback.jaxpr) for pullback in pullbacks) == 1

    @jax.jit
    def plain_step(params, batch):
        value, gradients = jax.value_and_grad(loss_fn)(params, batch)
        return value, jax.tree.map(lambda x, gradient: x - 0.1 * gradient, params, gradients)

    for batch in batches:
        value, params = plain_step(params, batch)
        found = trainer.read(trainer.step(batch))["loss"]
        np.testing.assert_allclose(found, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(trainer.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
