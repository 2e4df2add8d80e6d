"""The oracle and the zoo themselves: every model trains, every optimizer runs.

What is compared with them later is worth as much as these are right.
"""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optimizers import DEFERRED, OPTIMIZERS, SIGN_LIKE, labels
from oracle import open_model, plain_jit, split_batch, train_plain
from runs import check_first_gradients, leaves_with_names
from zoo import CASES, NUM_EXAMPLES, Case
from zoo_case import VOCAB


# Every eighth by default: the gradients of all are looked at by test_equivalence as they are here.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        name if number % 8 == 0 else pytest.param(name, marks=pytest.mark.long)
        for number, name in enumerate(CASES)
    ],
)
def test_every_model_learns(name):
    case = CASES[name]
    run = train_plain(case, optax.sgd(0.1), [case.batch(0)] * 3)
    assert np.isfinite(run.losses).all()
    assert run.losses[-1] < run.losses[0]
    check_first_gradients(case, run)


def equations(jaxpr):
    yield from jaxpr.eqns
    for inner in jax.extend.core.subjaxprs(jaxpr):
        yield from equations(inner)


@pytest.mark.by_default("unet", "dropout_nnx", "lax_scan_pytree")
@pytest.mark.parametrize("name", CASES)
def test_bf16_parameters_make_bf16_products(name):
    case = CASES[name]
    model = open_model(case, case.batch(0))
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), model.params)
    jaxpr = jax.make_jaxpr(model.loss)(half, model.variables, case.batch(0), jax.random.key(0))
    products = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(products) > case.passes
    assert {x.aval.dtype for eqn in products for x in eqn.invars} == {np.dtype(jnp.bfloat16)}


def test_batches_divide_and_repeat():
    for case in CASES.values():
        first, again, other = case.batch(0), case.batch(0), case.batch(1)
        for key in first:
            assert first[key].shape[0] == NUM_EXAMPLES
            np.testing.assert_array_equal(first[key], again[key])
            assert not np.array_equal(first[key], other[key])


@pytest.mark.exhaustive
def test_initialisation_repeats():
    for name in ("metrics", "builder", "batchnorm_linen", "equinox"):
        case = CASES[name]
        trees = [open_model(case, case.batch(0)).params for _ in range(2)]
        assert jax.tree.all(jax.tree.map(np.array_equal, *trees))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["moe"])
def test_mean_over_microbatches_is_that_of_the_batch(name):
    case = CASES[name]
    whole, parts = (
        train_plain(case, optax.sgd(0.1), [case.batch(0), case.batch(1)], microbatches=m)
        for m in (1, 4)
    )
    np.testing.assert_allclose(whole.losses, parts.losses, rtol=1e-6)
    for (path, a), (_, b) in zip(
        leaves_with_names(whole.params), leaves_with_names(parts.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(a).max(), err_msg=path)


def as_numbers(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


@pytest.mark.by_default("dropout_nnx")
@pytest.mark.parametrize("name", ["batchnorm_nnx", "batchnorm_linen", "dropout_nnx"])
def test_variables_are_carried_on(name):
    case = CASES[name]
    batches = [case.batch(0), case.batch(0)]
    start = jax.tree.leaves(open_model(case, case.batch(0)).variables)
    run = train_plain(case, optax.set_to_zero(), batches)
    end = jax.tree.leaves(run.variables)
    changed = [
        not np.array_equal(as_numbers(a), as_numbers(b)) for a, b in zip(start, end, strict=True)
    ]
    assert any(changed)
    # With frozen parameters only the variables can tell two steps on one batch apart.
    assert (run.losses[0] != run.losses[1]) == case.random


@pytest.mark.exhaustive
def test_keys_and_metrics_follow_step_and_microbatch():
    case = CASES["metrics"]
    batches = [case.batch(0), case.batch(0)]
    run = train_plain(case, optax.set_to_zero(), batches, microbatches=2, seed=3)
    model = open_model(case, case.batch(0))
    loss = plain_jit(model.loss)
    for t, (batch, metrics) in enumerate(zip(batches, run.metrics, strict=True)):
        step_key = jax.random.fold_in(jax.random.key(3), t)
        values = [
            loss(model.params, model.variables, part, jax.random.fold_in(step_key, m))
            for m, part in enumerate(split_batch(batch, 2))
        ]
        np.testing.assert_allclose(run.losses[t], np.mean([x for x, _ in values]), rtol=1e-6)
        for key in ("accuracy", "replaced"):
            mean = np.mean([aux[0][key] for _, aux in values])
            np.testing.assert_allclose(metrics[key], mean, rtol=1e-6)
    assert run.losses[0] != run.losses[1]


@pytest.mark.exhaustive
def test_linen_dropout_draws_from_the_step_key():
    case = CASES["dropout_linen"]
    run = train_plain(case, optax.set_to_zero(), [case.batch(0)] * 2)
    assert run.losses[0] != run.losses[1]


@pytest.mark.exhaustive
def test_bf16_compute_keeps_fp32_masters():
    case = CASES["array_constant"]
    half, full = (
        train_plain(case, optax.sgd(0.1), [case.batch(0)] * 3, compute=dtype)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert half.losses[-1] < half.losses[0]
    assert half.losses != full.losses
    np.testing.assert_allclose(half.losses, full.losses, rtol=3e-2)
    dtypes = {x.dtype for x in jax.tree.leaves((half.params, half.first_grads))}
    assert dtypes == {np.dtype(np.float32)}
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), half.params)
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, rounded, half.params)))


def toy_loss(params, batch):
    hidden = jnp.tanh(params["embed"][batch["tokens"][:, 0]] @ params["up"]) + params["bias"]
    return jnp.mean(jnp.square(hidden @ params["up"].T - 1))


def build_toy():
    rng = np.random.default_rng(0)
    shapes = {"embed": (VOCAB, 8), "up": (8, 16), "bias": (16,)}
    return {k: rng.normal(size=v).astype(np.float32) for k, v in shapes.items()}


@pytest.mark.by_default("masked_path", "masked_tree", "multi_transform", "normalize", "polyak_sgd")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_runs(name):
    toy = Case(name="toy", build=build_toy, loss_fn=toy_loss, blocks=0, templates=0)
    run = train_plain(toy, OPTIMIZERS[name], [toy.batch(0)] * 4)
    assert all(np.isfinite(x).all() for x in run.params.values())
    assert run.losses[-1] < run.losses[0]
    still = {k for k, v in build_toy().items() if np.array_equal(v, run.params[k])}
    assert still == ({"embed"} if name == "multi_transform" else set())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["metrics", "batchnorm_linen", "equinox"])
def test_optimizers_take_every_kind_of_tree(name):
    params = open_model(CASES[name], CASES[name].batch(0)).params
    assert set(jax.tree.leaves(labels(params))) == {"frozen", "matrix", "vector"}
    for make in OPTIMIZERS.values():
        tx = optax.with_extra_args_support(make(params))
        state = jax.eval_shape(tx.init, params)
        updates, after = jax.eval_shape(
            lambda s, tx=tx: tx.update(params, s, params, value=jnp.float32(1)), state
        )
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert jax.tree.structure(after) == jax.tree.structure(state)


def test_named_sets_of_optimizers_exist():
    assert set(OPTIMIZERS) >= DEFERRED | SIGN_LIKE
