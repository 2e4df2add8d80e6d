"""Optimizers that treat each layer of a stacked parameter as a matrix, against whole-tree Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.inline import Inliner
from megatrain_jax._src.engine.program.layers.sliced_values import SlicedValue, Value, sliced, stack
from megatrain_jax._src.engine.program.layers.slicewise import moved
from messages import refuses
from optim_trees import (
    blocks_along_axis_1,
    groups_of_blocks,
    make_tree,
    run_both,
    stacked_blocks,
    worst_difference,
)
from optimizers import EPS
from oracle import train_plain
from runs import check_close, make_trainer, train
from zoo import CASES

TOLERANCE = 2e-6


def stacked_experts():
    """Layers that hold three matrices each."""
    layers = {"w1": (3, 3, 4, 6), "b": (3, 4)}
    return make_tree({"embed": {"w": (5, 4)}, "layers": layers}, stacked="layers")


def matrices(reduction, output):
    """Dimension numbers: of stacked matrices by axes given, of others as they are."""

    def numbers(params):
        def one(path, x):
            if "layers" not in jax.tree_util.keystr(path):
                return contrib.MuonDimensionNumbers() if x.ndim == 2 else None
            fits = x.ndim > max(reduction, output)
            return contrib.MuonDimensionNumbers(reduction, output) if fits else None

        return jax.tree_util.tree_map_with_path(one, params)

    return numbers


def muon(reduction=1, output=2, **options):
    numbers = matrices(reduction, output)
    return contrib.muon(1e-3, eps=EPS, muon_weight_dimension_numbers=numbers, **options)


def labelled(join):
    """Muon for stacked matrices, as one of several transformations."""
    numbers = contrib.MuonDimensionNumbers(1, 2)
    scale = contrib.scale_by_muon(
        eps=EPS, weight_dimension_numbers=lambda p: jax.tree.map(lambda _: numbers, p)
    )
    transforms = {"stacked": optax.chain(scale, optax.scale(-1e-3)), "other": optax.sgd(0.1)}
    return join(
        transforms, lambda p: jax.tree.map(lambda x: "stacked" if x.ndim == 3 else "other", p)
    )


def orthogonal(matrix):
    x = matrix / (jnp.linalg.norm(matrix) + EPS)
    for _ in range(2):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return x


def orthogonal_in_a_loop(matrix):
    """A loop whose number of trips is not known, so that it is a `while`."""

    def trip(state):
        k, x = state
        return k + 1, 1.5 * x - 0.5 * (x @ x.T) @ x

    start = jnp.zeros((), jnp.int32), matrix / (jnp.linalg.norm(matrix) + EPS)
    return jax.lax.while_loop(lambda state: state[0] < 3, trip, start)[1]


def whitened(matrix):
    values, vectors = jnp.linalg.eigh(matrix @ matrix.T + jnp.eye(len(matrix)))
    return (vectors / jnp.sqrt(values)) @ vectors.T @ matrix


def for_each_layer(function):
    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: jax.vmap(function)(u) if u.ndim == 3 else u, updates), state

    return optax.chain(
        optax.trace(0.9), optax.GradientTransformation(optax.init_empty_state, update),
        optax.scale(-0.1),
    )  # fmt: skip


@pytest.mark.by_default("while", "eigh")
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (stacked_blocks, muon()),
        (stacked_blocks, muon(ns_coeffs="dion")),  # a scan
        (stacked_blocks, muon(ns_coeffs="dion", preconditioning="aol")),  # a cond in it
        (stacked_blocks, muon(preconditioning="spectral")),  # a singular value decomposition
        (blocks_along_axis_1, muon(0, 2)),
        (groups_of_blocks, muon(2, 3, ns_coeffs="dion")),
        (stacked_blocks, labelled(optax.multi_transform)),
        (stacked_blocks, labelled(optax.partition)),
        (stacked_blocks, for_each_layer(orthogonal)),
        (stacked_blocks, for_each_layer(orthogonal_in_a_loop)),
        (stacked_blocks, for_each_layer(whitened)),
        (stacked_experts, muon(2, 3)),
        (stacked_experts, muon(2, 3, ns_coeffs="dion", preconditioning="aol")),
    ],
    ids=["muon", "scan", "aol", "spectral", "axis 1", "groups", "multi_transform", "partition",
         "vmap", "while", "eigh", "experts", "scan of experts"],
)  # fmt: skip
def test_matrices_of_stacked_layers_are_updated_layer_by_layer(make, optimizer):
    tree = make()
    cut, mine, theirs = run_both(tree, lambda _: optimizer, steps=3)
    assert worst_difference(mine, theirs) <= TOLERANCE
    assert not cut.deferred
    assert len({cut.apply[g].key for g in tree.blocks}) == 1


@pytest.mark.by_default("dadapt")
@pytest.mark.parametrize(
    "optimizer",
    [muon(adaptive=True), contrib.prodigy(0.1, eps=1e-2), contrib.dadapt_adamw(),
     contrib.momo_adam(0.01)],
    ids=["adaptive muon", "prodigy", "dadapt", "momo_adam"],
)  # fmt: skip
def test_products_of_all_parameters_are_summed_over_layers(optimizer):
    cut, mine, theirs = run_both(stacked_blocks(), lambda _: optimizer, steps=3)
    assert cut.deferred and worst_difference(mine, theirs) <= TOLERANCE


def test_a_matrix_along_the_axis_of_the_layers_is_refused():
    # The norm of a matrix is a sum over layers.
    with refuses(ValueError, "(add)", "layers/w1[0]", "muon_weight_dimension_numbers"):
        stacked_blocks().cut(muon(0, 2))


def parameter_numbers(params):
    """Dimension numbers of a decoder of stacked layers: heads belong to one axis of a matrix."""

    def one(path, x):
        name = jax.tree_util.keystr(path)
        if "blocks" not in name or x.ndim < 3:
            return None
        axes = tuple(range(1, x.ndim))
        split = len(axes) - 1 if "['out']" in name else 1
        return contrib.MuonDimensionNumbers(axes[:split], axes[split:])

    return jax.tree_util.tree_map_with_path(one, params)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["linen_scan_remat", "nnx_scan"])
def test_training_with_muon_on_scanned_layers_agrees_with_plain_jax(name):
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(2)]
    optimizer = contrib.muon(1e-3, eps=EPS, muon_weight_dimension_numbers=parameter_numbers)
    plain = train_plain(case, optimizer, batches)
    trainer = make_trainer(case, lambda _: optimizer)
    assert sum(bound.stage.is_block for bound in trainer.stages) == case.blocks
    run = train(trainer, batches, gradients=False)
    check_close(run.params, plain.params, TOLERANCE, "parameter")
    check_close(run.opt_state, plain.opt_state, 2 * TOLERANCE, "optimizer state")


X = np.random.default_rng(0).uniform(0.1, 0.9, (3, 4, 6)).astype(np.float32)
SQUARE = np.random.default_rng(1).uniform(size=(3, 4, 4)).astype(np.float32) + 4 * np.eye(
    4, dtype="f"
)
# An operation of each kind without a rule in `slicewise.py`, on slices of its first operand along
# an axis that it keeps apart.
APART = {
    "merged": (lambda x: jnp.sin(x.reshape(12, 6)), X, 0),
    "merged and apart": (lambda x: 2 * x.reshape(12, 3, 2).sum(2).reshape(3, 4, 3), X, 0),
    "regrouped": (lambda x: jnp.cos(x.reshape(6, 12)).reshape(3, 24) + X.reshape(3, 24), X, 0),
    "merged products": (
        lambda x: jnp.einsum("bij,bkj->bik", y := x.reshape(6, 2, 6), y).reshape(3, 2, 2, 2), X, 0),
    "merged and broadcast": (lambda x: x.reshape(12, 6)[:, None] + X[0, 0], X, 0),
    "merged and reduced": (lambda x: x.reshape(12, 6).max(1) - X.reshape(12, 6)[:, 0], X, 0),
    "batch": (lambda x: jax.lax.dot_general(x, x, (((2,), (2,)), ((0,), (0,)))), X, 0),
    "batch and plain": (lambda x: jnp.einsum("lij,lkj->lik", x, X), X, 0),
    "rows": (lambda x: jnp.einsum("lij,jk->lki", x, X[0].T), X, 0),
    "columns": (lambda x: jnp.einsum("ki,lij->klj", X[0].T, x), X, 0),
    "inner axis": (lambda x: jnp.einsum("ilj,klj->lik", x, x), X, 1),
    "concatenate": (lambda x: jnp.concatenate([x, jnp.ones((3, 2, 6)), 2 * x], 1), X, 0),
    "stack": (lambda x: jnp.stack([x, X, 2 * x], 1), X, 0),
    "stack before it": (lambda x: jnp.stack([x, 2 * x]), X, 0),
    "pad": (lambda x: jnp.pad(x, [(0, 0), (1, 2), (0, 0)]), X, 0),
    "sort": (lambda x: jax.lax.sort((x, 2 * x), dimension=1, num_keys=1), X, 0),
    "update": (lambda x: jax.lax.dynamic_update_slice(x, 2 * x[:, :2], (0, 1, 0)), X, 0),
    "convolution": (lambda x: jax.lax.conv(x, jnp.ones((2, 4, 3)), (1,), "SAME"), X, 0),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.mT), SQUARE, 0),
    "qr": (jnp.linalg.qr, SQUARE, 0),
    "solve": (lambda x: jax.lax.linalg.triangular_solve(x, X, left_side=True), SQUARE, 0),
}  # fmt: skip


def in_slices(function, x, axis):
    """The results of a function on the slices of an array along an axis, and what depends on each.

    Returns:
        The values of the results.
    """
    traced = jx.trace(function, x)
    found = []

    def flat(*cells):
        args = [sliced(x.shape, (axis,), list(map(Value, cells)))]
        values = Inliner(primal=True).run(traced.jaxpr, (), [*map(Value, traced.consts), *args])
        found[:] = [isinstance(v, SlicedValue) for v in values]
        return [stack(v).array for v in values]

    cells = [np.take(x, i, axis) for i in range(x.shape[axis])]
    return jax.jit(flat)(*cells), found


@pytest.mark.parametrize("name", APART)
def test_operations_that_keep_slices_apart_are_computed_slice_by_slice(name):
    function, x, axis = APART[name]
    mine, found = in_slices(function, x, axis)
    assert all(found)
    check_close(mine, jax.tree.leaves(function(x)), TOLERANCE, "result")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.einsum("lij,lij->ij", x, x),
        lambda x: jnp.einsum("lij,kij->lki", x, x),
        lambda x: jnp.concatenate([x, x], 0),
        lambda x: jax.lax.sort(x, dimension=0),
    ],
    ids=["contracted", "each with each", "one after another", "sorted"],
)
def test_operations_that_mix_slices_take_whole_arrays(function):
    mine, found = in_slices(function, X, 0)
    assert not any(found)
    check_close(mine, [function(X)], TOLERANCE, "result")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.reshape(x, (3, 24)),
        lambda x: jax.lax.broadcast_in_dim(x, (3, 5, 4, 6), (0, 2, 3)),
    ],
    ids=["reshape", "broadcast"],
)
def test_results_whose_sharding_is_given_are_taken_whole(function):
    """A sharding names the axes of the whole array."""
    (eqn,) = jax.make_jaxpr(function)(X).eqns
    given = jax.sharding.PartitionSpec(None, None)
    for sharding, is_moved in ((None, True), (given, False)):
        own = eqn.replace(params=eqn.params | {"sharding": sharding})
        found = moved(own, np.arange(3, dtype=object), (0,), [None])
        assert (found is not None) == is_moved


def scanned(x):
    """A scan whose carry begins as zeros, and which takes and gives the rows of each slice."""

    def trip(carry, row):
        total, count = carry
        total = total + row * count
        return (total, count + 1), (2 * total, count)

    start = jnp.zeros_like(x[:, 0]), jnp.zeros(())
    (total, count), (totals, counts) = jax.lax.scan(trip, start, x.transpose(1, 0, 2))
    return total, totals, count, counts


def test_a_loop_on_slices_is_one_loop_for_each():
    mine, found = in_slices(scanned, X, 0)
    assert found == [True, True, False, False]
    check_close(mine, list(scanned(X)), TOLERANCE, "result")


def exchanged(x):
    return jax.lax.fori_loop(0, 3, lambda i, x: 0.5 * x + x[::-1], x)


def stopped(x):
    """A loop that goes on while any slice wants it to."""
    return jax.lax.while_loop(lambda x: x.max() < 9, lambda x: 2 * x, x)


def neighbours(x):
    return jax.lax.fori_loop(0, 3, lambda i, x: x.at[1:].set(x[:-1]), x)


@pytest.mark.parametrize("function", [exchanged, stopped, neighbours])
def test_a_loop_in_which_slices_meet_stays_whole(function):
    mine, found = in_slices(function, X, 0)
    assert found == [False]
    check_close(mine, [function(X)], TOLERANCE, "result")
