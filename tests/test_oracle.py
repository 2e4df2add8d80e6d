"""The oracle and the zoo themselves: every model trains, every optimizer runs.

What is compared with them later is worth as much as these are right.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import DEFERRED, OPTIMIZERS, SIGN_LIKE, labels
from oracle import open_model, split_batch, train_plain
from zoo import CASES, NUM_EXAMPLES


def batches(case, num_steps, *, same=False):
    return [case.batch(0 if same else t) for t in range(num_steps)]


def leaves_with_names(tree):
    return [
        (jax.tree_util.keystr(path), np.asarray(x))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_model_learns(name):
    case = CASES[name]
    run = train_plain(case, OPTIMIZERS["adam"], batches(case, 4, same=True))
    assert np.isfinite(run.losses).all()
    assert run.losses[-1] < run.losses[0]
    sizes = [(path, np.abs(x).max()) for path, x in leaves_with_names(run.first_grads)]
    zeros = [path for path, size in sizes if size == 0]
    assert bool(zeros) == case.zero_gradients
    # A leaf whose gradient is only rounding can't be compared to any tolerance.
    largest = max(size for _, size in sizes)
    assert [path for path, size in sizes if 0 < size < 1e-4 * largest] == []


def test_batches_divide_and_repeat():
    for case in CASES.values():
        first, again, other = case.batch(0), case.batch(0), case.batch(1)
        for key in first:
            assert first[key].shape[0] == NUM_EXAMPLES
            np.testing.assert_array_equal(first[key], again[key])
            assert not np.array_equal(first[key], other[key])


def test_initialisation_repeats():
    for name in ("nnx_tied", "builder", "linen_numbered", "equinox"):
        case = CASES[name]
        trees = [open_model(case, case.batch(0)).params for _ in range(2)]
        assert jax.tree.all(jax.tree.map(np.array_equal, *trees))


@pytest.mark.parametrize("name", ["nnx_tied", "moe", "checkpoint_whole"])
def test_mean_over_microbatches_is_that_of_the_batch(name):
    case = CASES[name]
    whole, parts = (
        train_plain(case, OPTIMIZERS["sgd_momentum"], batches(case, 2), microbatches=m)
        for m in (1, 4)
    )
    np.testing.assert_allclose(whole.losses, parts.losses, rtol=1e-6)
    for (path, a), (_, b) in zip(
        leaves_with_names(whole.params), leaves_with_names(parts.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(a).max(), err_msg=path)


@pytest.mark.parametrize("name", ["dropout_nnx", "dropout_linen", "metrics"])
def test_random_numbers_change_with_the_step_and_nothing_else(name):
    case = CASES[name]
    frozen = optax.set_to_zero()
    first, second = (train_plain(case, frozen, batches(case, 2, same=True)) for _ in range(2))
    assert first.losses == second.losses
    assert first.losses[0] != first.losses[1]


@pytest.mark.parametrize("name", ["batchnorm_nnx", "batchnorm_linen", "dropout_nnx"])
def test_variables_are_carried_on(name):
    case = CASES[name]
    start = jax.tree.leaves(open_model(case, case.batch(0)).variables)
    end = jax.tree.leaves(train_plain(case, optax.set_to_zero(), batches(case, 2)).variables)
    changed = [
        not np.array_equal(jax.random.key_data(a), jax.random.key_data(b))
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        else not np.array_equal(a, b)
        for a, b in zip(start, end, strict=True)
    ]
    assert any(changed)


@pytest.mark.parametrize("name", ["metrics"])
def test_metrics_are_means_over_microbatches(name):
    case = CASES[name]
    run = train_plain(case, optax.set_to_zero(), batches(case, 1), microbatches=2)
    model = open_model(case, case.batch(0))
    step_key = jax.random.fold_in(jax.random.key(0), 0)
    values = [
        model.loss(model.params, model.variables, part, jax.random.fold_in(step_key, m))
        for m, part in enumerate(split_batch(case.batch(0), 2))
    ]
    for key in ("accuracy", "replaced"):
        mean = np.mean([metrics[key] for _, (metrics, _) in values])
        np.testing.assert_allclose(run.metrics[0][key], mean, rtol=1e-6)
    norm = np.sqrt(sum(np.sum(x**2) for _, x in leaves_with_names(run.first_grads)))
    np.testing.assert_allclose(run.metrics[0]["grad_norm"], norm, rtol=1e-5)


@pytest.mark.parametrize("name", ["nnx_tied", "linen_scan_remat", "array_constant"])
def test_bf16_compute_keeps_fp32_masters(name):
    case = CASES[name]
    model = open_model(case, case.batch(0))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    jaxpr = str(jax.make_jaxpr(model.loss)(half, model.variables, case.batch(0), jax.random.key(0)))
    assert " dot_general" in jaxpr
    run = train_plain(case, OPTIMIZERS["adam"], batches(case, 3, same=True), compute=jnp.bfloat16)
    full = train_plain(case, OPTIMIZERS["adam"], batches(case, 3, same=True))
    assert run.losses[-1] < run.losses[0]
    assert run.losses != full.losses
    np.testing.assert_allclose(run.losses, full.losses, rtol=3e-2)
    assert {x.dtype for x in jax.tree.leaves((run.params, run.first_grads))} == {jnp.float32}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_runs(name):
    case = CASES["jit_whole"]
    run = train_plain(case, OPTIMIZERS[name], batches(case, 3))
    start = leaves_with_names(open_model(case, case.batch(0)).params)
    end = leaves_with_names(run.params)
    assert all(np.isfinite(x).all() for _, x in end)
    still = {path for (path, a), (_, b) in zip(start, end, strict=True) if np.array_equal(a, b)}
    assert still == ({"['embed']"} if name == "multi_transform" else set())


def test_optimizers_take_every_kind_of_tree():
    for name in ("nnx_tied", "linen_numbered", "lax_scan_pytree", "equinox"):
        params = open_model(CASES[name], CASES[name].batch(0)).params
        kinds = set(jax.tree.leaves(labels(params)))
        assert kinds == {"frozen", "matrix", "vector"}
        for make in OPTIMIZERS.values():
            tx = optax.with_extra_args_support(make(params))
            state = jax.eval_shape(tx.init, params)
            updates, after = jax.eval_shape(tx.update, params, state, params, value=jnp.float32(1))
            assert jax.tree.structure(updates) == jax.tree.structure(params)
            assert jax.tree.structure(after) == jax.tree.structure(state)


def test_named_sets_of_optimizers_exist():
    assert DEFERRED | SIGN_LIKE <= set(OPTIMIZERS)
