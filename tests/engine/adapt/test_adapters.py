"""Every kind of model against what its own library gives: values, structure and loss.

The oracles are `nnx.split`, `module.init` and `eqx.filter`, compared bit for bit.
"""

import functools
import gc
import os
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.extend.core import Primitive

from megatrain_jax._src.engine.adapt.adapters import AdaptedModel, adapt
from messages import refuses

BATCH = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)}
RNG = jax.random.key(7)


class Block(nnx.Module):
    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(dim, dim, rngs=rngs)
        self.norm = nnx.BatchNorm(dim, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.norm(self.linear(x)))


class Net(nnx.Module):
    """Blocks with statistics and dropout, a tied weight, stacked layers and odd variables."""

    def __init__(self, rngs: nnx.Rngs, width: int = 3):
        self.first = nnx.Linear(3, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(2)])
        self.tied = self.first

        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,))
        def stacked(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(width, width, rngs=rngs)

        self.stack = stacked(rngs)
        self.table = jnp.arange(width)
        self.tables = nnx.List([jnp.ones(width), np.ones(2, np.float32)])
        self.calls = nnx.Variable(0)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls.set_value(self.calls.get_value() + 1)
        x = self.tied(self.first(x))
        for block in self.blocks:
            x = block(x)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return layer(x)

        return through(x, self.stack) + self.table * self.tables[0]


def build_net() -> Net:
    return Net(nnx.Rngs(0, dropout=1))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        kernel_init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
        x = linen.Dense(3, kernel_init=kernel_init)(x)
        return linen.Dropout(0.5, deterministic=False)(x), None


class LinenNet(linen.Module):
    """Scanned blocks with boxed kernels, dropout, statistics and a sown loss."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(3)(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        stack = linen.scan(
            LinenBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
            metadata_params={linen.PARTITION_NAME: None},
        )
        x, _ = stack()(x, None)
        self.sow("losses", "size", jnp.mean(x**2), init_fn=lambda: jnp.zeros(()), reduce_fn=jnp.add)
        self.sow("intermediates", "x", x)
        return x


class EquinoxNet(eqx.Module):
    layers: list[eqx.nn.Linear]
    activation: Any
    scale: float
    name: str = eqx.field(static=True)

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.layers = [eqx.nn.Linear(3, 3, key=key) for key in keys]
        self.activation = jax.nn.relu
        self.scale = 2.0
        self.name = "net"

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.activation(jax.vmap(layer)(x))
        return self.scale * x


def mean_square(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


def with_metrics(model: Any, batch: Any, rng: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    noise = jax.random.normal(rng, ())
    return jnp.mean(model(batch["x"]) ** 2) + noise, {"noise": noise, "two": 2}


def with_sown_loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2) + model.variables["losses"]["size"]


def assert_same(found: Any, expected: Any) -> None:
    """Asserts equal structures and equal bits, typed random keys included."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(jnp.result_type(b), jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


def initial_leaves(adapted: AdaptedModel, initial: Any) -> list[jax.Array]:
    return initial.leaves(range(len(adapted.paths)))


@functools.cache
def prepared(build: Any, loss_fn: Any) -> tuple[AdaptedModel, list[jax.Array], Any]:
    """Returns an adapted model with its initial leaves and variables, made once for all tests."""
    adapted, initial = adapt(build(), loss_fn, BATCH, 0)
    return adapted, initial_leaves(adapted, initial), initial.variables()


def as_leaves(tree: Any) -> list[Any]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]


# Initial values


@pytest.mark.parametrize("model", [build_net, build_net()], ids=["builder", "instance"])
def test_nnx_starts_from_the_values_of_an_eager_build(model: Any):
    adapted, initial = adapt(model, mean_square, BATCH, 0)
    _, params, variables = nnx.split(build_net(), nnx.Param, ...)
    assert_same(initial_leaves(adapted, initial), as_leaves(params))
    assert_same(list(initial.variables()), as_leaves(variables))
    assert_same(adapted.params_tree(initial_leaves(adapted, initial)), params)


def test_a_builder_gives_leaves_in_any_order_and_one_at_a_time():
    adapted, initial = adapt(build_net, mean_square, BATCH, 0)
    expected = as_leaves(nnx.state(build_net(), nnx.Param))
    order = [3, 0, 3, len(expected) - 1]
    assert_same(initial.leaves(order), [expected[i] for i in order])
    for i, leaf in enumerate(expected):
        assert_same(initial.leaves([i]), [leaf])
        assert (adapted.shapes[i].shape, adapted.shapes[i].dtype) == (leaf.shape, leaf.dtype)


def test_a_builder_never_allocates_more_than_the_leaves_asked_for():
    def build() -> nnx.Module:  # 4 EiB of parameters beside one small layer
        big = nnx.Linear(2**30, 2**30, rngs=nnx.Rngs(0))
        return nnx.List([big, nnx.Linear(3, 3, rngs=nnx.Rngs(1))])  # type: ignore[return-value]

    adapted, initial = adapt(build, mean_square, BATCH, 0)
    small = [i for i, path in enumerate(adapted.paths) if path[0] == 1]
    expected = as_leaves(nnx.state(nnx.Linear(3, 3, rngs=nnx.Rngs(1)), nnx.Param))
    assert_same(initial.leaves(small), expected)


def test_scalars_that_every_leaf_follows_from_are_computed_once():
    """NNX counts keys, so that the last leaf would need as many additions as there are leaves."""
    calls = []
    following = Primitive("following")
    following.def_abstract_eval(lambda x: x)
    following.def_impl(lambda x: calls.append(x) or x + 1)

    def build() -> list[jax.Array]:
        counts = [jnp.uint32(0)]
        for _ in range(6):
            counts.append(following.bind(counts[-1]))
        return [jax.random.normal(jax.random.fold_in(jax.random.key(0), n), (3,)) for n in counts]

    expected = build()
    calls.clear()
    _, initial = adapt(build, lambda params, batch: jnp.sum(params[0]), BATCH, 0)
    for order in ([6], [2, 5], [0], [6]):
        assert_same(initial.leaves(order), [expected[i] for i in order])
    assert len(calls) == 6


@pytest.mark.exhaustive
def test_linen_starts_from_the_values_of_module_init():
    # In a process of its own, with the compiler as users have it: these tests switch optimisations
    # off, and then a scanned initialiser rounds differently as a part of a smaller program.
    code = "import test_adapters; test_adapters.check_linen_start()"
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def check_linen_start() -> None:
    expected = linen.meta.unbox(LinenNet().init(jax.random.key(5), BATCH["x"]))
    leaves, order = jax.tree.leaves(expected["params"]), [2, 0]
    for batch in (BATCH, jax.eval_shape(lambda: BATCH)):
        adapted, initial = adapt(LinenNet(), mean_square, batch, 5)
        assert_same(adapted.params_tree(initial_leaves(adapted, initial)), expected["params"])
        assert_same(list(initial.variables()), jax.tree.leaves(expected["batch_stats"]))
        assert_same(initial.leaves(order), [leaves[i] for i in order])


def test_linen_values_that_depend_on_the_batch_need_a_batch_of_arrays():
    class Centred(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return x - self.param("mean", lambda key: jnp.mean(x, axis=0))

    _, initial = adapt(Centred(), mean_square, BATCH, 0)
    assert_same(initial.leaves([0]), [jnp.mean(jnp.asarray(BATCH["x"]), axis=0)])
    _, initial = adapt(Centred(), mean_square, jax.eval_shape(lambda: BATCH), 0)
    with refuses(ValueError, "`sample_batch`", "arrays"):
        initial.leaves([0])


@pytest.mark.parametrize("model", [EquinoxNet, EquinoxNet()], ids=["builder", "instance"])
def test_equinox_parameters_are_those_of_eqx_filter(model: Any):
    build = (lambda: EquinoxNet()) if isinstance(model, type) else model
    adapted, initial = adapt(build, mean_square, BATCH, 0)
    expected = eqx.filter(EquinoxNet(), eqx.is_inexact_array)
    assert_same(adapted.params_tree(initial_leaves(adapted, initial)), expected)
    assert initial.variables() == ()
    assert adapted.paths[0] == ("layers", 0, "weight")


def test_attributes_of_a_pytree_may_have_any_name_and_any_kind_of_numbers():
    class Masked(eqx.Module):
        value: jax.Array
        inner: list[jax.Array]
        mask: jax.Array

    def loss_fn(model: Masked, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        there = jnp.where(model.mask, model.value, 0)
        return (there * batch["x"]).mean(), {"any": model.mask.any()}

    mask = np.array([True, False, True])
    model = Masked(jnp.ones(3), [jnp.ones(1)], jnp.asarray(mask))
    adapted, initial = adapt(model, loss_fn, BATCH, 0)
    assert adapted.paths == (("value",), ("inner", 0))
    assert adapted.variable_paths == (("mask",),)
    given = initial_leaves(adapted, initial), initial.variables()
    value, metrics, _ = adapted.loss(loss_fn, *given, BATCH, RNG, True)
    np.testing.assert_allclose(value, (mask * BATCH["x"]).mean(), rtol=1e-6)
    assert metrics["any"]


def test_adapted_models_hold_no_arrays_and_instances_are_left_alone():
    def count() -> int:
        gc.collect()
        return sum(array.shape == (97, 97) for array in jax.live_arrays())

    model = Block(97, rngs=nnx.Rngs(0))
    adapted, initial = adapt(model, mean_square, BATCH, 0)
    assert count() == 1
    for variable in initial.variables():
        variable.delete()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(model)))
    del model, initial
    assert count() == 0
    assert adapted.paths[0] == ("linear", "bias")


# Structure


def test_nnx_paths_name_tied_weights_once_and_variables_apart():
    adapted, *_ = prepared(build_net, mean_square)
    params = nnx.state(build_net(), nnx.Param)
    assert adapted.paths == tuple(path for path, _ in nnx.to_flat_state(params))
    assert ("first", "kernel") in adapted.paths and ("blocks", 1, "norm", "scale") in adapted.paths
    assert not any(path[0] == "tied" for path in adapted.paths)
    assert {("table",), ("tables", 0), ("calls",), ("blocks", 0, "norm", "mean")} <= set(
        adapted.variable_paths
    )


def test_optax_masks_by_path_and_by_fixed_tree_fit_the_params_tree():
    adapted, leaves, _ = prepared(build_net, mean_square)
    params = adapted.params_tree(leaves)
    own = nnx.state(build_net(), nnx.Param)
    fixed = jax.tree.map(lambda leaf: leaf.ndim > 1, own)
    optimizer = optax.adamw(1e-3, mask=fixed)
    assert_same(optimizer.init(params), optimizer.init(own))
    for leaves in (adapted.shapes, [np.zeros(s.shape, s.dtype) for s in adapted.shapes]):
        tree = adapted.params_tree(leaves)
        assert jax.tree.structure(tree) == jax.tree.structure(own)
        assert all(a is b for a, b in zip(jax.tree.leaves(tree), leaves, strict=True))


def test_a_collection_of_nnx_modules_is_a_model():
    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(model["b"](model["a"](batch["x"])) ** 2)

    model = {"a": Block(3, rngs=nnx.Rngs(0)), "b": nnx.Dropout(0.5, rngs=nnx.Rngs(1))}
    adapted, initial = adapt(model, loss_fn, BATCH, 0)
    assert ("a", "linear", "kernel") in adapted.paths
    for module in model.values():
        module.eval()
    leaves, variables = initial_leaves(adapted, initial), initial.variables()
    value, _, _ = adapted.loss(loss_fn, leaves, variables, BATCH, RNG, False)
    np.testing.assert_array_equal(value, loss_fn(model, BATCH))


# Loss


@functools.cache
def trained(adapted: AdaptedModel, loss_fn: Any) -> Any:
    def loss(leaves: Any, variables: Any, rng: jax.Array = RNG) -> Any:
        value, metrics, new = adapted.loss(loss_fn, leaves, variables, BATCH, rng, True)
        return value, (metrics, new)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_nnx_loss_gradients_and_changed_variables_match_nnx_value_and_grad():
    adapted, leaves, variables = prepared(build_net, mean_square)
    (value, (_, new)), grads = trained(adapted, mean_square)(leaves, variables)
    model = build_net()
    expected, expected_grads = nnx.jit(nnx.value_and_grad(mean_square))(model, BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for a, b in zip(grads, jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    after = as_leaves(nnx.state(model, nnx.Not(nnx.Param)))
    changed = set()
    for path, old, a, b in zip(adapted.variable_paths, variables, new, after, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b, old = map(jax.random.key_data, (a, b, old))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        changed |= {path[-1]} if (np.asarray(old) != np.asarray(a)).any() else set()
    assert {"mean", "var", "count", "calls"} <= changed


def test_dropout_repeats_with_the_same_variables_and_moves_on_with_new_ones():
    adapted, leaves, variables = prepared(build_net, mean_square)
    step = trained(adapted, mean_square)
    (first, (_, new)), _ = step(leaves, variables)
    assert step(leaves, variables)[0][0] == first
    assert step(leaves, new)[0][0] != first


def test_evaluation_switches_nnx_modules_to_eval_mode():
    adapted, leaves, variables = prepared(build_net, mean_square)
    value, _, _ = adapted.loss(mean_square, leaves, variables, BATCH, RNG, False)
    model = build_net()
    model.eval()
    np.testing.assert_array_equal(value, mean_square(model, BATCH))
    assert adapted.loss(mean_square, leaves, variables, BATCH, RNG, True)[0] != value


def test_linen_dropout_follows_the_key_and_sown_values_do_not_pile_up():
    adapted, leaves, variables = prepared(LinenNet, with_sown_loss)
    assert all(path[0] == "batch_stats" for path in adapted.variable_paths)
    step = trained(adapted, with_sown_loss)
    (value, (_, new)), _ = step(leaves, variables)
    apply = linen.apply(with_sown_loss, LinenNet(), mutable=["batch_stats", "losses"])
    given = {
        "params": adapted.params_tree(leaves),
        "batch_stats": {"BatchNorm_0": dict(zip(("mean", "var"), variables, strict=True))},
    }
    expected, changed = jax.jit(apply)(given, BATCH, rngs={"dropout": RNG, "params": RNG})
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for a, b in zip(new, jax.tree.leaves(changed["batch_stats"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(variables, new, strict=True))
    # Batch statistics aren't read in training mode, so only the key can change the loss.
    assert step(leaves, new)[0][0] == value
    assert step(leaves, variables, jax.random.key(8))[0][0] != value


@pytest.mark.by_default("LinenNet", "EquinoxNet")
@pytest.mark.parametrize("build", [build_net, LinenNet, EquinoxNet])
def test_loss_functions_with_a_key_and_metrics(build: Any):
    adapted, leaves, variables = prepared(build, with_metrics)
    (_, (metrics, new)), grads = trained(adapted, with_metrics)(leaves, variables)
    np.testing.assert_array_equal(metrics["noise"], jax.random.normal(RNG, ()))
    assert metrics["two"] == 2 and set(metrics) == {"noise", "two"}
    assert len(grads) == len(adapted.paths) and len(new) == len(adapted.variable_paths)


@pytest.mark.parametrize("build", [build_net, LinenNet, EquinoxNet])
def test_leaves_of_another_dtype_leave_the_variables_as_declared(build: Any):
    adapted, leaves, variables = prepared(build, mean_square)
    leaves = [leaf.astype(jnp.bfloat16) for leaf in leaves]
    # Traced only: dtypes show without compiling.
    (_, (_, new)), grads = jax.eval_shape(trained(adapted, mean_square), leaves, variables)
    assert {grad.dtype for grad in grads} == {jnp.dtype(jnp.bfloat16)}
    declared = [(shape.shape, shape.dtype) for shape in adapted.variable_shapes]
    assert [(leaf.shape, leaf.dtype) for leaf in new] == declared


def test_variables_keep_their_dtype_whatever_the_loss_gives_them():
    class Counting(nnx.Module):
        def __init__(self):
            self.weight, self.seen = nnx.Param(jnp.ones(3)), nnx.BatchStat(jnp.zeros(()))

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        model.seen.set_value(model.seen[...].astype(jnp.bfloat16) + 1)
        return model.weight[...].sum() * batch["x"].mean()

    adapted, initial = adapt(Counting(), loss_fn, BATCH, 0)
    given = initial_leaves(adapted, initial), initial.variables()
    *_, (seen,) = adapted.loss(loss_fn, *given, BATCH, RNG, True)
    assert seen.dtype == jnp.float32 and seen == 1


@pytest.mark.parametrize("build", [build_net, LinenNet, EquinoxNet])
def test_rebuilt_models_hold_the_arrays_given(build: Any):
    adapted, leaves, variables = prepared(build, mean_square)
    host = [np.asarray(leaf) + 1 for leaf in leaves]
    model = adapted.rebuild(host, variables)
    if isinstance(model, nnx.Module):
        assert isinstance(model, Net) and model.tied is model.first
        held, type_ = nnx.state(model, nnx.Param), Net
    elif isinstance(model, linen.Module):
        held, type_ = model.variables["params"], LinenNet
    else:
        held, type_ = eqx.filter(model, eqx.is_inexact_array), EquinoxNet
    assert type(model) is type_
    assert all(a is b for a, b in zip(jax.tree.leaves(held), host, strict=True))


def test_a_rebuilt_linen_module_draws_and_changes_its_own_state():
    # The loss can be called with it as in training, with dropout and batch statistics.
    adapted, leaves, variables = prepared(LinenNet, mean_square)
    model, again = (adapted.rebuild(leaves, variables) for _ in range(2))
    first, second = mean_square(model, BATCH), mean_square(model, BATCH)
    assert first != second  # another mask
    assert mean_square(again, BATCH) == first
    before = [np.asarray(x) for x in variables]
    mean_square(model, BATCH)
    assert all((a == np.asarray(b)).all() for a, b in zip(before, variables, strict=True))
    moved = model.variables["batch_stats"]["BatchNorm_0"]["mean"]
    assert (np.asarray(moved) != np.asarray(variables[0])).any()


def test_an_optional_third_argument_gets_the_key_only_if_it_is_named_so():
    def wants(model: Any, batch: Any, rng: Any = None) -> jax.Array:
        return with_metrics(model, batch, rng)[0]

    def named_key(model: Any, batch: Any, key: Any = None) -> jax.Array:
        return with_metrics(model, batch, key)[0]

    def smooths(model: Any, batch: Any, smoothing: float = 0.5) -> jax.Array:
        return mean_square(model, batch) * smoothing

    adapted, initial = adapt(EquinoxNet(), wants, BATCH, 0)
    leaves = initial_leaves(adapted, initial)
    half = functools.partial(smooths, smoothing=0.5)

    def loss(loss_fn: Any) -> Any:
        return adapted.loss(loss_fn, leaves, (), BATCH, RNG, True)[0]

    assert loss(wants) == loss(named_key) == loss(with_metrics)
    assert loss(smooths) == loss(half) == mean_square(EquinoxNet(), BATCH) / 2


def test_sown_nnx_intermediates_are_dropped():
    class Sowing(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.hidden = nnx.Intermediate(x)
            return self.linear(x)

    model = Sowing()
    model(jnp.ones((1, 3)))
    adapted, initial = adapt(model, mean_square, BATCH, 0)
    assert adapted.variable_paths == () and hasattr(model, "hidden")
    value, _, new = adapted.loss(
        mean_square, initial_leaves(adapted, initial), (), BATCH, RNG, True
    )
    assert new == ()
    np.testing.assert_array_equal(value, mean_square(model, BATCH))
