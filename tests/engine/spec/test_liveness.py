"""What a plan for a machine that isn't here says of memory: all of it, near what is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import megatrain_jax as mt
from inside import on_one_device
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.liveness import temporary_bytes
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from zoo import CASES

GIB = 2**30


def traced(function, *shapes):
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def test_the_worked_example():
    def function(x, y):
        a = jnp.dot(x, y)
        c = jnp.sin(a) * a
        return jnp.dot(c, c)

    assert temporary_bytes(traced(function, (1, 1), (1, 1))) == 8
    assert temporary_bytes(traced(lambda x: x, ())) == 0
    assert temporary_bytes(traced(lambda x: (jnp.sin(x), jnp.cos(x)), (8,))) == 0


def test_an_elementwise_update_is_one_pass():
    def update(p, mu, nu, g):
        mu, nu = 0.9 * mu + g, 0.99 * nu + g * g
        return p - mu / (jnp.sqrt(nu) + 1e-8), jnp.where(nu > 0, mu, p), nu

    assert temporary_bytes(traced(update, *[(64,)] * 4)) == 0
    # What a product reads is an array of its own.
    assert temporary_bytes(traced(lambda *args: jnp.dot(*update(*args)[:2]), *[(64,)] * 4)) > 256


def test_loops_count_the_most_of_one_round():
    def function(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.sort(jnp.cos(x @ w)) @ w, None), x, ws)[0]

    assert 0 < temporary_bytes(traced(function, (8, 8), (100, 8, 8))) <= 3 * 8 * 8 * 4


def test_an_array_stays_where_parts_of_it_are_replaced():
    def function(rows):
        whole = jnp.pad(rows[0], (0, 24))
        for i in range(1, 4):
            whole = jax.lax.dynamic_update_slice(whole, rows[i], (8 * i,))
        return jnp.sort(whole)

    # Beside the whole, the row that is written.
    whole, row = 4 * 32, 4 * 8
    assert whole <= temporary_bytes(traced(function, (4, 8))) <= whole + row


@pytest.mark.by_default("batchnorm_nnx")
@pytest.mark.parametrize("name", ["nnx_tied", "moe", "unet", "shared_block", "batchnorm_nnx"])
def test_the_estimate_is_near_what_compiled_functions_need(name):
    case, precision = CASES[name], mt.Precision(compute=jnp.float32)
    options = Options(precision=precision)
    adapted, _ = adapt(case.build(), case.loss_fn, case.batch(0), 0)
    spec = make_run_spec(adapted, case.loss_fn, optax.adamw(1e-3), case.batch(0), options)
    what = spec.first, spec.layouts, spec.optimizer, on_one_device()
    estimated = KernelCache().estimate(step_kernels(*what))
    assert 1.0 <= estimated / KernelCache().compile(step_kernels(*what)) <= 2.0


@pytest.mark.exhaustive
def test_in_all_is_all():
    dim, layers = 1024, 12

    def build():
        rngs = nnx.Rngs(0)
        return nnx.List([nnx.Linear(dim, dim, rngs=rngs) for _ in range(layers)])

    def loss_fn(model, x):
        for layer in model:
            x = nnx.gelu(layer(x))
        return x.astype(jnp.float32).mean()

    def plan(num_bytes, **options):
        batch = jax.ShapeDtypeStruct((4096, dim), jnp.bfloat16)
        machine = dataclasses.replace(mt.card("RTX 4090"), device_bytes=num_bytes)
        return mt.plan(build, loss_fn, optax.adamw(1e-3), batch, hardware=machine, **options)

    least, automatic = plan(GIB, device_budget="least"), plan(GIB)
    assert least.device_temporary_bytes and least.device_temporary_estimated
    # What `fit` would choose there: all that is left, and no more than JAX takes.
    assert least.device_bytes < automatic.device_bytes <= int(0.85 * GIB)
    assert automatic.fits_device and automatic.bytes_in < least.bytes_in
    # State alone fits a card that has a little more than the least, but nothing else does.
    usable = int(1.1 * least.device_state_bytes)
    full = plan(int(usable / 0.85) + 2, device_budget=usable)
    assert full.device_state_bytes <= usable
    assert not full.fits_device
