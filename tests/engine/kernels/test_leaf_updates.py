"""Updates leaf by leaf, against the same update of all leaves at once."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax import contrib

import megatrain_jax as mt
from coded_groups import check_updates, in_segments
from inside import on_one_device
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels import update_pieces, updates
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.state.host_leaves import read_leaves
from megatrain_jax._src.engine.state.layout import layout_group
from optimizers import OPTIMIZERS
from runs import make_spec
from slabs import all_unpacked, unpacked
from zoo_case import Case

FP32 = mt.Precision(compute=jnp.float32)
BF16 = mt.Precision(master=jnp.bfloat16, state=jnp.bfloat16, compute=jnp.float32)
INT8 = mt.Precision.compact(compute=jnp.float32)
DRAW = (jax.random.key(3), jnp.int32(7), jnp.uint32(2))


SIZES = [(16,), (16, 32), (32,), (32, 16), (16,)]


def of_blocks(params, batch):
    """A loss of blocks of matrices and vectors, as a decoder has them."""
    x = batch["x"]
    for norm, up, bias, down, last in params["blocks"]:
        x = x + jnp.tanh(x * norm @ up + bias) @ down + last
    return (x**2).mean()


BLOCKS = Case(
    name="blocks",
    build=lambda: {"blocks": [list(map(np.ones, SIZES))] * 3},
    loss_fn=of_blocks,
    blocks=3,
    templates=1,
    batch=lambda seed: {"x": np.ones((4, 16), np.float32)},
)


def at_once(part, layout):
    """The guarded update that decodes and unpacks all leaves before it evaluates any equation."""
    count = len(layout.master.shapes)

    def update(masters, state, gradient, messages, ok, draw):
        rows = layout.master.joined(gradient), layout.master.decode(masters)
        leaves = [unpacked(layout.master, slab, i) for slab in rows for i in range(count)]
        args = [
            *part.consts,
            *leaves,
            *all_unpacked(layout.state, layout.state.decode(state)),
            *messages,
        ]
        out = jx.evaluate(part.jaxpr, args)
        own, *others = layout.slab_draws(draw)
        new = layout.master.encode(layout.master.pack(out[:count]), own)
        new = new, layout.state.encode(layout.state.pack(out[count:]), others)
        return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, (masters, state))

    return update


def random_arguments(layout, part, num_messages):
    rng = np.random.default_rng(0)

    def slab(layout):
        values = jnp.asarray(rng.gamma(0.5, size=layout.size), layout.dtype)
        return layout.pack([unpacked(layout, values, i) for i in range(len(layout.shapes))])

    avals = [v.aval for v in part.jaxpr.invars[len(part.jaxpr.invars) - num_messages :]]
    messages = [jnp.asarray(rng.integers(1, 3, a.shape), a.dtype) for a in avals]
    state = layout.state.encode([slab(s) for s in layout.state.layouts])
    gradient = in_segments(layout.master, slab(layout.master))
    return layout.master.encode(slab(layout.master)), state, gradient, messages


@pytest.mark.by_default("adafactor-precision0-1")
@pytest.mark.parametrize(
    ("name", "precision", "num_devices"),
    [
        ("adafactor", BF16, 1),
        ("muon", INT8, 1),
        ("lamb", FP32, 2),
        pytest.param("adafactor", FP32, 2, marks=pytest.mark.long),
        pytest.param("muon", FP32, 1, marks=pytest.mark.long),
        pytest.param("lamb", INT8, 1, marks=pytest.mark.long),
        pytest.param("adaptive_grad_clip", BF16, 1, marks=pytest.mark.long),
    ],
)
def test_leaves_in_turns_get_the_bits_of_all_at_once(name, precision, num_devices, monkeypatch):
    mesh = jax.make_mesh(
        (num_devices,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices]
    )
    spec = make_spec(BLOCKS, OPTIMIZERS[name], precision=precision, mesh=mesh)
    group = max(range(len(spec.layouts)), key=lambda g: len(spec.layouts[g].master.shapes))
    part, layout = spec.optimizer.apply[group], spec.layouts[group]
    args = random_arguments(layout, part, len(spec.optimizer.messages[group]))
    small, slabs = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("d",)))
    args = (*jax.device_put(args[:3], slabs), *jax.device_put((args[3], jnp.array(True)), small))
    draw = jax.device_put(DRAW, small) if layout.draws else None
    monkeypatch.setattr(update_pieces, "_TOGETHER", 64)
    assert len(update_pieces._turns(part, layout)) >= 3  # both matrices, and the vectors
    run = jax.jit(updates._update(part, layout, True), out_shardings=slabs)
    expected = jax.jit(at_once(part, layout), out_shardings=slabs)
    check_updates(run, expected, args, draw, small)


def test_masters_in_two_dtypes_beside_state_in_one_get_the_bits_of_all_at_once():
    mixed = mt.Precision(master={"*/1": "bfloat16", "*/3": "bfloat16", "*": "float32"})
    spec = make_spec(BLOCKS, OPTIMIZERS["adamw_schedule"], precision=mixed)
    group = max(range(len(spec.layouts)), key=lambda g: len(spec.layouts[g].master.shapes))
    part, layout = spec.optimizer.apply[group], spec.layouts[group]
    assert [len(slab.segments) for slab in layout.slabs] == [2, 1, 1]
    args = random_arguments(layout, part, len(spec.optimizer.messages[group]))
    run = jax.jit(updates._update(part, layout, True))
    expected, small = jax.jit(at_once(part, layout)), on_one_device().small_on_device
    check_updates(run, expected, (*args, jnp.array(True)), DRAW, small)


def update_of_matrices(optimizer, count=16):
    """A kernel that updates a block of matrices, and the bytes of a matrix and of the block."""
    layer = {name: np.zeros((64, 64), np.float32) for name in "abcdefghijklmnop"[:count]}

    def loss_fn(params, x):
        for layer in params["layers"]:
            for w in layer.values():
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    batch = np.ones((4, 64), np.float32)
    spec = make_run_spec(
        adapt({"layers": [layer] * 2}, loss_fn, batch, 0)[0], loss_fn, optimizer, batch, Options()
    )
    group = max(range(len(spec.layouts)), key=lambda g: len(spec.layouts[g].master.shapes))

    def kernel():
        return updates.update(
            spec.optimizer, spec.layouts[group], group, "float32", on_one_device()
        )

    return kernel, 4 * 64 * 64, spec.layouts[group].master.num_bytes


@pytest.mark.by_default("muon")
@pytest.mark.parametrize(
    ("optimizer", "matrices"),
    # Muon's iteration has a matrix, its products with itself and a sum of these.
    [(optax.adafactor(1e-3, min_dim_size_to_factor=8), 3), (contrib.muon(1e-3), 6)],
    ids=["adafactor", "muon"],
)
def test_an_update_needs_room_for_one_matrix(optimizer, matrices, monkeypatch):
    """Beside its state, a block of 16 matrices needs a few times one of them; see `_TOGETHER`."""
    kernel, matrix, slab = update_of_matrices(optimizer)
    cache = KernelCache()
    assert (needed := cache.estimate([kernel()])) > slab
    # Equal kernels of different steps run beside different bytes.
    assert cache.estimate([replace(kernel(), beside_bytes=64)]) == needed + 64
    monkeypatch.setattr(update_pieces, "_TOGETHER", 1 << 10)
    monkeypatch.setattr(updates, "_PIECE", 1 << 10)
    assert KernelCache().estimate([kernel()]) < matrices * matrix


def test_matrices_are_updated_one_after_another(monkeypatch):
    kernel, matrix, slab = update_of_matrices(optax.adafactor(1e-3, min_dim_size_to_factor=8), 6)
    monkeypatch.setattr(update_pieces, "_TOGETHER", 1 << 10)
    monkeypatch.setattr(updates, "_PIECE", 1 << 10)
    # A turn reads gradients behind a barrier, once the turn before it has written: else a compiler
    # may compute all turns at once.
    takes = kernel().takes
    assert takes is not None
    jaxpr = jax.make_jaxpr(kernel().build())(*takes).jaxpr
    gradient = jaxpr.invars[len(jax.tree.leaves(takes[:2]))]
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    readers = [at for at, eqn in enumerate(jaxpr.eqns) if gradient in jx.variables(eqn.invars)]
    written = names.index("dynamic_update_slice")
    assert max(readers) < names.index("optimization_barrier", written) + 1
    # A CPU's compiler makes a second slab where it writes a part of one; a GPU's doesn't.
    assert KernelCache().compile([kernel()]) < slab + 4 * matrix


def test_a_turn_reads_what_was_there_before_the_update(monkeypatch):
    """State that begins anew is written in the first turn, and its old numbers read in the last."""
    shapes = [(16, 8), (8, 16), (4, 32)]
    state = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    leaves: list[Any] = [SimpleNamespace(shape=shape) for shape in shapes]
    layout = layout_group(leaves, range(3), state, "float32")

    def update(*given):
        gradients, masters, states = given[:3], given[3:6], given[6:]
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients[:2]))
        rows = zip(gradients, masters, states, strict=True)
        new = [m - s * g / (norm + jnp.linalg.norm(g)) for g, m, s in rows]
        return *new, states[0] * 0.5, states[1] + gradients[1], jnp.full((4, 32), 1.5)

    part: Any = SimpleNamespace(jaxpr=jax.make_jaxpr(update)(*state * 3).jaxpr, consts=())
    rng = np.random.default_rng(0)
    gradients, masters, states = (
        [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes] for _ in range(3)
    )
    monkeypatch.setattr(update_pieces, "_TOGETHER", 64)
    assert len(update_pieces._turns(part, layout)) == 3
    run = update_pieces.update_by_leaf(part, layout, False)
    segments = in_segments(layout.master, layout.master.pack(gradients))
    at_rest = (
        layout.master.encode(layout.master.pack(masters)),
        layout.state.encode(layout.state.pack(states)),
    )
    new_masters, new_state = run(*at_rest, segments, (), None)
    found = *read_leaves(layout.master, new_masters), *read_leaves(layout.state, new_state)
    for one, other in zip(found, update(*gradients, *masters, *states), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
