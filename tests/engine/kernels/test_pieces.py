"""Updates of coded slabs piece by piece, against the same update of whole slabs."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from coded_groups import check_updates, coded_group, in_segments, random_arguments
from megatrain_jax._src.engine.kernels import update_pieces as pieces
from megatrain_jax._src.engine.kernels import updates
from megatrain_jax._src.engine.state.codec import Blockwise, Plain
from megatrain_jax._src.engine.state.host_leaves import read_leaves
from megatrain_jax._src.engine.state.layout import layout_group
from optimizers import OPTIMIZERS

DRAW = (jax.random.key(3), jnp.int32(7), jnp.uint32(2))


@pytest.mark.by_default("adamw_schedule-1-256")
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
    elements = updates._update_of_elements(part, layout)
    assert elements is not None
    whole = jax.jit(updates._update_at_once(elements, layout, True), out_shardings=slabs)
    text = run.lower(*args, draw).compile().as_text() or ""
    assert "while" in text
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text
    check_updates(run, whole, args, draw, small)


@pytest.mark.exhaustive
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


@pytest.mark.by_default("256")
@pytest.mark.parametrize("piece", [128, 256, 384])
def test_each_column_is_updated_once_whatever_the_pieces(piece, monkeypatch):
    """Of matrices of one to seven pieces, and a vector without codes beside them."""
    shapes = [(7, 128), (2, 100), (5,)]
    leaves: list[Any] = [SimpleNamespace(shape=shape) for shape in shapes]
    codecs = [Blockwise(code="dynamic"), Blockwise(code="dynamic"), Plain()]
    state = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    layout = layout_group(leaves, range(3), state, "float32", 1, [Plain()] * 3, codecs)
    rng = np.random.default_rng(piece)
    master, moment, gradient = rng.normal(size=(3, layout.master.size)).astype(np.float32)

    def compute(rows, columns, messages):
        gradient, master, moment = rows
        return [master - gradient * columns, moment + gradient + messages[0]]

    encode = jax.jit(lambda x, y: (layout.master.encode(x), layout.state.encode([y])))
    at_rest = encode(master, moment)
    given = *at_rest, in_segments(layout.master, gradient), [jnp.float32(2)], None
    monkeypatch.setattr(pieces, "PIECE", piece)
    found = jax.jit(pieces.update_in_pieces(compute, layout, False))(*given)
    (decoded,) = layout.state.decode(at_rest[1])
    rows = [gradient, master, np.asarray(decoded)]
    new = compute(rows, np.arange(master.size, dtype=np.float32), [2])
    expected = encode(*new)
    for i in range(3):
        for own, arrays, others in zip((layout.master, layout.state), found, expected, strict=True):
            one, other = (read_leaves(own, list(map(np.asarray, x)))[i] for x in (arrays, others))
            np.testing.assert_allclose(one, other, rtol=1e-5)
