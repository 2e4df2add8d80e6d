"""Updates of coded slabs piece by piece, against the same update of whole slabs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from megatrain_jax._src.kernels import update_pieces as pieces
from megatrain_jax._src.kernels import updates
from megatrain_jax._src.state.blockwise import Blockwise
from megatrain_jax._src.state.codec import Plain, Rounded
from megatrain_jax._src.state.groups import GroupLayout, layout_group
from optimizers import OPTIMIZERS
from runs import make_spec
from zoo import CASES

MASTER = Rounded(dtype="bfloat16", stochastic=True)
MU = Blockwise(code="dynamic", stochastic=True)
NU = Blockwise(code="dynamic", signed=False, bits=4, stochastic=True)


def coded_group(optimizer, num_shards, *, least_axes=2, master: Plain = MASTER):
    """A block's update, its layout with codes for matrices alone, and its number of messages."""
    spec = make_spec(CASES["nnx_tied"], optimizer)
    group = max(range(len(spec.layouts)), key=lambda g: len(spec.layouts[g].master.shapes))
    leaves, rows = spec.leaves, spec.grouping.leaves[group]
    state = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in spec.optimizer.state[group]]

    def codec(coded, shape):
        return coded if len(shape) >= least_axes else Plain()

    masters = [codec(master, leaves[i].shape) for i in rows]
    half = len(state) / 2
    codecs = [codec(MU if at < half else NU, aval.shape) for at, aval in enumerate(state)]
    layout = layout_group(leaves, rows, state, "float32", num_shards, masters, codecs)
    return spec.optimizer.apply[group], layout, len(spec.optimizer.messages[group])


def random_arguments(layout, part, num_messages):
    rng = np.random.default_rng(0)
    whole = [jnp.asarray(rng.gamma(0.5, size=slab.size), slab.dtype) for slab in layout.slabs]
    gradient = jnp.asarray(rng.normal(size=layout.master.size), jnp.bfloat16)
    avals = [v.aval for v in part.jaxpr.invars[len(part.jaxpr.invars) - num_messages :]]
    messages = [jnp.asarray(rng.integers(1, 3, a.shape), a.dtype) for a in avals]
    at_rest = layout.master.encode(whole[0]), layout.state.encode(whole[1:])
    return (*at_rest, layout.master.in_segments(gradient), messages)


DRAW = (jax.random.key(3), jnp.int32(7), jnp.uint32(2))


@pytest.mark.parametrize(
    ("name", "num_shards", "piece"),
    [
        ("adamw_schedule", 1, 256),
        ("masked_tree", 1, 384),  # its leaves take different functions
        ("clip_adamw", 2, 128),
        ("lion", 4, 128),
    ],
)
def test_pieces_get_the_bits_of_whole_slabs(name, num_shards, piece, monkeypatch):
    part, layout, num_messages = coded_group(OPTIMIZERS[name], num_shards)
    assert layout.num_coded and layout.master.size > 4 * piece * num_shards
    args = random_arguments(layout, part, num_messages)
    mesh = jax.make_mesh(
        (num_shards,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_shards]
    )
    small = NamedSharding(mesh, PartitionSpec())
    slabs = NamedSharding(mesh, PartitionSpec("d"))
    args = (*jax.device_put(args[:3], slabs), *jax.device_put((args[3], jnp.array(True)), small))
    draw = jax.device_put(DRAW, small)
    monkeypatch.setattr(pieces, "PIECE", piece)
    run = jax.jit(updates._update(part, layout, True), out_shardings=slabs)
    monkeypatch.setattr(GroupLayout, "num_coded", 0)
    whole = jax.jit(updates._update(part, layout, True), out_shardings=slabs)
    text = run.lower(*args, draw).compile().as_text() or ""
    assert "while" in text
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text
    check_updates(run, whole, args, draw, small)


def check_updates(run, expected, args, draw, small):
    """Two kernels write the same bits; one changes its arrays, unless gradients aren't finite."""
    found = run(*args, draw)
    jax.tree.map(np.testing.assert_array_equal, found, expected(*args, draw))
    assert any(
        (np.asarray(new) != np.asarray(old)).any()
        for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(args[:2]), strict=True)
    )
    dropped = run(*args[:-1], jax.device_put(jnp.array(False), small), draw)
    jax.tree.map(np.testing.assert_array_equal, dropped, tuple(args[:2]))


def test_no_decoded_slab_lies_beside_a_coded_one(monkeypatch):
    """Arrays at rest are updated in place, and there is room for a few pieces beside them."""
    # With fp32 masters, as a CPU computes on fp32 in place of bfloat16, and writes it.
    part, layout, num_messages = coded_group(
        OPTIMIZERS["adamw_schedule"], 1, least_axes=1, master=Plain()
    )
    args = [*random_arguments(layout, part, num_messages), jnp.array(True), DRAW]
    args[2] = tuple(x.astype(jnp.float32) for x in args[2])
    monkeypatch.setattr(pieces, "PIECE", 128)
    assert layout.master.size > 16 * pieces.PIECE
    run = jax.jit(updates._update(part, layout, True), donate_argnums=(0, 1))
    memory = run.lower(*args).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == layout.master.num_bytes + layout.state.num_bytes
    assert memory.temp_size_in_bytes < 8 * pieces.PIECE * 4
