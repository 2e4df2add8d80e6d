"""Updates of coded slabs piece by piece, against the same update of whole slabs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from coded_groups import check_updates, coded_group, random_arguments
from megatrain_jax._src.engine.kernels import update_pieces as pieces
from megatrain_jax._src.engine.kernels import updates
from megatrain_jax._src.engine.state.codec import Plain
from megatrain_jax._src.engine.state.layout import GroupLayout
from optimizers import OPTIMIZERS

DRAW = (jax.random.key(3), jnp.int32(7), jnp.uint32(2))


@pytest.mark.exhaustive
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
