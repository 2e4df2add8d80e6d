"""Rows that are looked up add their gradients to the same rows of a sum, not to all of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from inside import on_one_device, spec_of
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.rewrites import with_scattered_sums
from megatrain_jax._src.engine.spec.step_kernels import step_kernels

VOCAB, WIDTH = 64, 8
IDS = np.array([[3, 63, 3], [0, 7, 70]])  # one row twice, and one beyond the table
RNG = np.random.default_rng(0)
SUM = RNG.normal(size=VOCAB * WIDTH).astype(np.float32)
# Small integers and multiples of 1/8, so that sums are exact in any order.
ROWS = RNG.integers(-8, 8, (*IDS.shape, WIDTH)) / 8
TABLE = jnp.ones((VOCAB, WIDTH), jnp.bfloat16)


def gradient(ids, rows):
    """The gradient of a table's rows, in bfloat16."""
    return jax.vjp(lambda table: table.at[ids].get(mode="fill"), TABLE)[1](rows)[0]


def added(total, ids, rows):
    return total + gradient(ids, rows).reshape(-1).astype(jnp.float32)


def additions(function, *args):
    """The number of additions of whole sums."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return sum(e.primitive.name == "add" and e.outvars[0].aval.shape == SUM.shape for e in eqns)


def test_rows_are_added_where_the_sum_is():
    rows = jnp.asarray(ROWS, jnp.bfloat16)
    expected, found = (f(SUM, IDS, rows) for f in (added, with_scattered_sums(added)))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert additions(added, SUM, IDS, rows) == 1
    assert additions(with_scattered_sums(added), SUM, IDS, rows) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda total, ids, rows: (added(total, ids, rows), gradient(ids, rows)[0]),
        lambda total, ids, rows: 2 * total + gradient(ids, rows).reshape(-1),
        lambda total, ids, rows: total + (1 + gradient(ids, rows)).reshape(-1),
        lambda total, ids, rows: (
            total + jnp.ones((VOCAB, WIDTH)).at[ids].add(rows, mode="drop").reshape(-1)
        ),
    ],
    ids=["once more", "another sum", "other operations", "not onto zeros"],
)
def test_other_sums_stay_as_they_are(function):
    args = SUM, IDS, jnp.asarray(ROWS, jnp.bfloat16)
    found = with_scattered_sums(function)(*args)
    jax.tree.map(np.testing.assert_array_equal, found, function(*args))


def test_a_backward_does_not_write_a_gradient_of_a_whole_table():
    def loss_fn(params, ids):
        x = params["table"][ids]
        for w in params["layers"]:
            x = jnp.sin(x @ w)
        return jnp.mean(x**2)

    table = jnp.asarray(RNG.normal(size=(VOCAB, WIDTH)), jnp.float32)
    params = {"table": table, "layers": [jnp.eye(WIDTH) for _ in range(3)]}
    ids = RNG.integers(0, VOCAB, (4, 6))
    trainer = mt.Trainer(
        params, loss_fn, optax.sgd(0.1), ids, microbatches=2, progress=False,
        precision=mt.Precision(compute=jnp.float32),
    )  # fmt: skip
    spec = spec_of(trainer)
    scatters = []
    for kernel in step_kernels(spec.first, spec.layouts, spec.optimizer, on_one_device()):
        if kernel.name == "backward":
            jaxpr = KernelCache().get(kernel).trace(*(kernel.takes or ())).jaxpr.jaxpr
            producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
            for eqn in jaxpr.eqns:
                if eqn.primitive.name == "scatter-add":
                    scatters.append((producer[eqn.invars[0]], jaxpr.invars))
    ((reshape, inputs),) = scatters
    assert reshape.primitive.name == "reshape" and reshape.invars[0] in inputs
    # Oracle: the whole loss in plain JAX.
    for _ in range(2):
        value, grads = jax.value_and_grad(loss_fn)(params, ids)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        assert trainer.read(trainer.step(ids))["loss"] == pytest.approx(float(value), rel=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), trainer.params, params
    )
