"""Reductions of large leaves in pieces against the same equations on whole leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import on_one_device, spec_of
from megatrain_jax._src.engine.kernels import updates
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.optimizer.elementwise import find_reductions
from megatrain_jax._src.engine.state.layout import GroupLayout, layout_of, mixed_layout_of
from optimizers import DEFERRED, OPTIMIZERS
from oracle import train_plain
from runs import check_close, make_spec, make_trainer, train
from slabs import all_unpacked
from zoo import CASES

PIECE = 60  # elements; of the model's leaves some have fewer, and most no multiple of it


def scaled(number):
    """A transformation that divides updates by a number of all gradients and parameters."""

    def update(updates, state, params=None):
        rows = zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
        total = sum(number(g, p) for g, p in rows)
        return jax.tree.map(lambda g: g / (1 + total), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


IN_PIECES = {
    **{name: OPTIMIZERS[name] for name in DEFERRED - {"add_noise"}},  # whose key is no number
    "of masters": lambda _: scaled(lambda g, p: jnp.max(jnp.abs(g * p))),
    "of state": lambda _: optax.chain(optax.trace(0.9), optax.clip_by_global_norm(1.0)),
    # The inner sum is taken in pieces, the outer one, which reads it, isn't.
    "twice": lambda _: scaled(lambda g, p: jnp.sum(g * g / (1 + jnp.sum(g * g)))),
    "of numbers": lambda _: scaled(lambda g, p: jnp.min(g) + jnp.sum(jnp.where(g > 0, p, 2.0))),
}
WHOLE = {
    "along an axis": lambda _: scaled(lambda g, p: jnp.max(jnp.sum(g, axis=0))),
    "of places": lambda _: scaled(lambda g, p: jnp.sum(g * np.arange(g.size).reshape(g.shape))),
    "of positions": lambda _: scaled(lambda g, p: jnp.argmax(g).astype(jnp.float32)),
}


def parts_of(optimizer, num_shards):
    """The reductions of groups that differ, each with a layout over so many shards."""
    spec = make_spec(CASES["nnx_tied"], optimizer)
    different = {
        f.key: (f, own) for f, own in zip(spec.optimizer.reduce, spec.layouts, strict=True)
    }
    for fragment, own in different.values():
        slabs = [own.state.layouts[s] for s, _ in own.state.places]
        avals = [
            jax.ShapeDtypeStruct(slab.shapes[i], jnp.dtype(slab.dtype))
            for slab, (_, i) in zip(slabs, own.state.places, strict=True)
        ]
        shapes = own.master.shapes
        yield (
            fragment,
            GroupLayout(
                master=layout_of(shapes, own.master.dtype, num_shards),
                state=mixed_layout_of(avals, shapes, num_shards),
            ),
        )


def arguments(fragment, layout):
    """Random leaves of a group as slabs, and as what its fragment takes."""
    rng = np.random.default_rng(0)
    avals = [v.aval for v in fragment.jaxpr.invars[len(fragment.consts) :]]
    leaves = [jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in avals]
    n = len(layout.master.shapes)
    state = leaves[2 * n : 2 * n + len(layout.state.places)]
    slabs = [layout.master.pack_segments(leaves[i : i + n]) for i in (0, n)]
    state_slabs = [(slab,) for slab in layout.state.pack(state)]
    return leaves, (*slabs, state_slabs, leaves[2 * n + len(state) :])


def has_loop(function, *args):
    return any(e.primitive.name == "scan" for e in jax.make_jaxpr(function)(*args).eqns)


@pytest.mark.by_default("along an axis-1", "clip_adamw-3")
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", sorted(IN_PIECES | WHOLE))
def test_pieces_give_what_whole_leaves_give(name, num_shards, monkeypatch):
    monkeypatch.setattr(updates, "_PIECE", PIECE)
    looped = False
    for fragment, layout in parts_of((IN_PIECES | WHOLE)[name], num_shards):
        leaves, slabs = arguments(fragment, layout)
        whole = jax.jit(lambda *args, f=fragment: jx.evaluate(f.jaxpr, [*f.consts, *args]))(*leaves)
        reduce = updates.reduction(fragment, layout)
        looped |= has_loop(reduce, *slabs)
        for ours, plain in zip(jax.jit(reduce)(*slabs), whole, strict=True):
            assert ours.dtype == plain.dtype and ours.shape == plain.shape
            np.testing.assert_allclose(ours, plain, rtol=2e-6, atol=1e-7)
    assert looped == (name in IN_PIECES)


def test_small_leaves_are_reduced_as_ever():
    for fragment, layout in parts_of(OPTIMIZERS["clip_adamw"], 1):

        def whole(gradient, masters, state, others, fragment=fragment, layout=layout):
            leaves = range(len(layout.master.shapes))
            slabs = gradient, masters
            rows = (layout.master.unpack_from(slab, i) for slab in slabs for i in leaves)
            state = all_unpacked(layout.state, [slab for (slab,) in state])
            args = [*fragment.consts, *rows, *state, *others]
            return jx.evaluate(fragment.jaxpr, args)

        _, slabs = arguments(fragment, layout)
        reduce = updates.reduction(fragment, layout)
        assert not has_loop(reduce, *slabs)
        for ours, plain in zip(jax.jit(reduce)(*slabs), jax.jit(whole)(*slabs), strict=True):
            np.testing.assert_array_equal(ours, plain)


def test_a_reduction_is_told_apart_from_the_rest():
    def two(a, b, scale):
        return jnp.sum(jnp.square(a) * scale), jnp.max(b), jnp.max(a * b)

    shapes = [jax.ShapeDtypeStruct((4, 3), jnp.float32)] * 2
    jaxpr = jx.trace(two, *shapes, jax.ShapeDtypeStruct((), jnp.float32)).jaxpr
    found = find_reductions(jaxpr, {0: "here", 1: "there"})
    # The product of arrays that lie otherwise stays, and with it its operands.
    assert [r.arrays for r in found.found] == [(0,), (1,)]
    assert found.inputs == (0, 1, 3, 4)
    assert len(find_reductions(jaxpr, {0: "here", 1: "here"}).found) == 3
    assert len(find_reductions(jaxpr, {0: "here"}).found) == 1
    assert find_reductions(jaxpr, {}).inputs == (0, 1, 2)


@pytest.mark.by_default("3-float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_elements_decide_whether_a_gradient_is_finite(num_shards, dtype, monkeypatch):
    monkeypatch.setattr(updates, "_PIECE", PIECE)
    size = num_shards * (2 * PIECE + 7)
    ordinary = np.random.default_rng(0).normal(size=size)

    def ok_of(gradient, ok=True, guarded=True):
        return updates.squared_norm_and_ok([gradient], jnp.array(ok), guarded, num_shards)[1]

    for value in (1.0, -1e25, 3e38, np.nan, np.inf, -np.inf):
        # One gradient for each place of the value.
        gradients = jnp.asarray(np.where(np.eye(size, dtype=bool), value, ordinary), dtype)
        found = jax.jit(jax.vmap(ok_of))(gradients)
        np.testing.assert_array_equal(found, np.isfinite(np.asarray(gradients, np.float64)).all(1))
        assert not ok_of(gradients[0], ok=False) and ok_of(gradients[0], guarded=False)


@pytest.mark.parametrize("beyond", [0, 1])
def test_every_piece_of_a_gradient_counts(beyond, monkeypatch):
    monkeypatch.setattr(updates, "_PIECE", PIECE)
    gradient = jnp.ones(3 * PIECE + beyond)
    squared, _ = updates.squared_norm_and_ok([gradient], jnp.array(True), True, 1)
    assert squared == gradient.size


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_devices", [1, 4])
def test_training_in_pieces_agrees_with_plain_jax(num_devices, monkeypatch):
    monkeypatch.setattr(updates, "_PIECE", 16)
    case, batches = CASES["nnx_tied"], [CASES["nnx_tied"].batch(seed) for seed in range(3)]
    plain = train_plain(case, OPTIMIZERS["clip_adamw"], batches)
    mesh = Mesh(jax.devices()[:num_devices], "data")
    trainer = make_trainer(case, OPTIMIZERS["clip_adamw"], mesh=mesh)
    run = train(trainer, batches, gradients=False)
    check_close(run.params, plain.params, 2e-6, "parameter")
    for ours, theirs in zip(run.metrics, plain.metrics, strict=True):
        np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=2e-6)


@pytest.mark.by_default("bfloat16")
@pytest.mark.parametrize("gradient", ["float32", "bfloat16", "float16"])
def test_no_large_gradient_is_there_twice(gradient, monkeypatch):
    """A CPU's compiler makes an array of each piece and of its squares; a GPU's makes none."""
    monkeypatch.setattr(updates, "_PIECE", 1 << 16)
    layer = {"experts": np.zeros((160, 128, 64), np.float32), "bias": np.zeros(64, np.float32)}

    def loss_fn(params, x):
        for layer in params["layers"]:
            x = jnp.tile(x[:, :64] @ layer["experts"].sum(0).T + layer["bias"].sum(), (1, 2))
        return jnp.mean(x**2)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    batch = np.ones((4, 128), np.float32)
    # Gradients in float16 are divided by a scale.
    precision = mt.Precision(compute="float16" if gradient == "float16" else "bfloat16")
    model = {"layers": [layer, layer]}
    spec = spec_of(mt.Trainer(model, loss_fn, optimizer, batch, precision=precision))
    assert spec.optimizer.deferred and spec.optimizer.is_scaled == (gradient == "float16")
    kernel = updates.reduce(spec.optimizer, spec.layouts[0], 0, gradient, on_one_device())
    whole = 4 * spec.layouts[0].master.size
    assert (
        KernelCache().estimate([kernel]) < whole / 4 and KernelCache().compile([kernel]) < whole / 4
    )
    monkeypatch.setattr(updates, "_PIECE", 1 << 24)
    assert KernelCache().compile([kernel]) > whole / 4  # by how much depends on the version of XLA


def test_the_longest_slabs_are_addressed():
    """Elements beyond 2**31 are found: their numbers have 32 bits and no sign."""
    size = (1 << 32) - (1 << 20)
    gradient = jax.ShapeDtypeStruct((size,), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda x: updates.squared_norm_and_ok([x], jnp.array(True), True, 1))(
        gradient
    )
    (starts,) = [c for c in jaxpr.consts if getattr(c, "size", 0) > 1]
    assert starts.dtype == np.uint32
    np.testing.assert_array_equal(np.diff(starts), 1 << 24)
    assert size - (1 << 25) < int(starts[-1]) <= size - (1 << 24)
