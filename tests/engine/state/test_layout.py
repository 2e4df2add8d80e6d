"""Where leaves lie in slabs: whatever their dtypes and order, each comes out as it went in."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax._src.engine.state import layout
from megatrain_jax._src.engine.state.codec import Blockwise, Plain, Rounded, draw_of
from megatrain_jax._src.engine.state.host_leaves import (
    cut,
    joined_run,
    read_leaves,
    runs_of,
)
from megatrain_jax._src.engine.state.layout import (
    ALIGNMENT,
    GroupLayout,
    group_leaves,
    layout_of,
    mixed_layout_of,
)
from slabs import all_unpacked, read_part

DTYPES = ("float32", "bfloat16", "int32")


def random_shape(rng):
    return tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3)))


def filled(shape, dtype, rng):
    values = [rng.randint(-99, 99) for _ in range(int(np.prod(shape)))]
    return np.array(values, jnp.dtype(dtype)).reshape(shape)


@pytest.mark.parametrize("seed", range(8))
def test_leaves_of_interleaved_dtypes_come_out_as_they_went_in(seed):
    rng = random.Random(seed)
    mirrored = [random_shape(rng) for _ in range(rng.randint(1, 3))]
    shapes = []
    for _ in range(rng.randint(1, 6)):
        shapes += [(s, rng.choice(DTYPES)) for s in [random_shape(rng)] * rng.randint(0, 2)]
        if rng.random() < 0.5:
            shapes += [(shape, dtype) for dtype in [rng.choice(DTYPES)] for shape in mirrored]
    # Moments of several dtypes are no row.
    shapes += [(shape, dtype) for shape, dtype in zip(mirrored, DTYPES, strict=False)]
    shapes.append(((3,), "int32"))
    leaves = [filled(shape, dtype, rng) for shape, dtype in shapes]
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    order = rng.sample(range(len(mirrored)), len(mirrored))
    layout = mixed_layout_of(avals, mirrored, order=order)
    slabs = jax.jit(layout.pack)(leaves)
    assert [slab.size for slab in slabs] == [kind.size for kind in layout.layouts]
    arrays = jax.jit(layout.encode)(slabs)
    assert [(x.shape, x.dtype) for x in arrays] == [(x.shape, x.dtype) for x in layout.at_rest]
    assert sum(x.nbytes for x in arrays) == layout.num_bytes
    views = read_leaves(layout, arrays)
    unpacked = jax.jit(lambda arrays: all_unpacked(layout, layout.decode(arrays)))(arrays)
    for leaf, view, array in zip(leaves, views, unpacked, strict=True):
        for found in (view, np.asarray(array)):
            assert found.dtype == leaf.dtype and found.shape == leaf.shape
            np.testing.assert_array_equal(found, leaf)
    # Moments lie as their parameters do, so that an update can leave slabs whole.
    at = layout_of(mirrored, "float32", order=order).offsets
    whole = [kind for kind in layout.layouts if kind.shapes == tuple(mirrored)]
    assert all(kind.offsets == at for kind in whole)


def test_no_two_numbers_of_a_slab_are_rounded_by_the_same_bits():
    """Neither those of two devices, nor those of two codecs."""
    codecs = [Rounded(dtype="bfloat16", stochastic=True), Blockwise(code="linear", stochastic=True)]
    layout = layout_of([(512,), (512,)], "float32", 2, codecs)
    # Numbers halfway between two: the first bit drawn decides. A code's scale is its block's 1.
    scales = jnp.arange(512) % 128 == 0
    leaves = [jnp.full(512, 1 + 2.0**-8), jnp.where(scales, 1.0, 63.5 / 127)]
    draw = draw_of(jax.random.key(0), jnp.int32(1), jnp.uint32(2))

    @jax.jit
    def are_rounded_up(leaves):
        slab = layout.pack(leaves)
        return layout.decode(layout.encode(slab, draw)) > slab

    went_up = np.asarray(are_rounded_up(leaves)).reshape(2, 2, 256)  # shards, segments, columns
    patterns = went_up[..., ~np.asarray(scales[:256])].reshape(4, -1)
    for one, other in itertools.combinations(patterns, 2):
        assert 0.35 < (one == other).mean() < 0.65


def test_no_two_slabs_groups_or_steps_have_a_draw_in_common():
    avals = [jax.ShapeDtypeStruct((3,), dtype) for dtype in DTYPES]
    group = GroupLayout(master=layout_of([(3,)], "float32"), state=mixed_layout_of(avals, [(3,)]))
    draws = [
        tuple(map(int, draw))
        for source in itertools.product((0, 1), repeat=3)
        for draw in group.slab_draws((jax.random.key(source[0]), *map(jnp.uint32, source[1:])))
        if draw is not None
    ]
    assert len(draws) == len(set(draws)) == 8 * (1 + len(DTYPES))


def test_runs_are_cut_and_joined_like_the_whole():
    """Of a part of which other processes have some runs."""
    rng = random.Random(0)
    for _ in range(200):
        whole = np.arange(rng.randint(1, 12))
        borders = sorted({0, len(whole), *rng.choices(range(len(whole)), k=3)})
        pairs = [pair for pair in itertools.pairwise(borders) if rng.random() < 0.8]
        runs = [(at, whole[at:end]) for at, end in pairs]
        start, stop = sorted(rng.sample(range(len(whole) + 1), 2))
        there = {i for at, end in pairs for i in range(max(at, start), min(end, stop))}
        found = cut(runs, start, stop)
        assert [i for at, run in found for i in range(at, at + len(run))] == sorted(there)
        assert all(run.size and list(run) == list(range(at, at + len(run))) for at, run in found)
        joined = joined_run(runs, start, stop)
        assert (joined is None) == (len(there) < stop - start)
        assert joined is None or list(joined) == list(range(start, stop))


def test_groups_are_of_blocks_or_of_equal_readers_in_the_order_of_their_first_use():
    rng = random.Random(0)
    for _ in range(50):
        numbers, num_stages = range(rng.randint(1, 8)), rng.randint(1, 5)
        blocks = [rng.choice([None, None, ("layers", 0), ("layers", 1)]) for _ in numbers]
        trained = [rng.random() < 0.7 for _ in numbers]
        reads = [sorted(rng.sample(range(num_stages), rng.randint(0, num_stages))) for _ in numbers]
        leaves: Any = [
            SimpleNamespace(block=block, is_trainable=is_trained, modules=("leaf", i))
            for i, block, is_trained in zip(numbers, blocks, trained, strict=True)
        ]
        found = group_leaves(
            leaves, [[i for i in numbers if s in reads[i]] for s in range(num_stages)]
        )
        together: dict[Any, list[int]] = {}
        for i in numbers:
            together.setdefault((trained[i], blocks[i] or tuple(reads[i])), []).append(i)

        def first(rows, reads=reads, last=num_stages):
            return min((stage for i in rows for stage in reads[i]), default=last), rows[0]

        expected = sorted(together.values(), key=first)
        assert found.leaves == tuple(map(tuple, expected))
        frozen = {g for g, rows in enumerate(expected) if not trained[rows[0]]}
        assert found.frozen == frozen and len({*found.leaves}) == len(found.names)
        assert [found.leaves[found.group_of[i]].count(i) for i in numbers] == [1] * len(numbers)


@pytest.mark.parametrize("seed", range(3))
def test_leaves_are_aligned_views_and_what_is_missing_is_zero(seed):
    rng = random.Random(seed)
    shapes = [random_shape(rng) for _ in range(rng.randint(1, 8))]
    layout = layout_of(shapes, "float32")
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    leaves = [None if rng.random() < 0.3 else filled(s, "float32", rng) for s in shapes]
    arrays = jax.jit(lambda leaves: layout.encode(layout.pack(leaves)))(leaves)
    slab: Any = np.asarray(arrays[0])
    assert sum(x.nbytes for x in arrays) == layout.num_bytes
    expected = [
        np.zeros(s, np.float32) if x is None else x for x, s in zip(leaves, shapes, strict=True)
    ]
    for view, leaf in zip(read_leaves(layout, arrays), expected, strict=True):
        assert np.shares_memory(view, slab), "a slab at rest is read in place"
        np.testing.assert_array_equal(view, leaf)
    assert np.abs(slab).sum() == sum(np.abs(x).sum() for x in expected), "padding is zero"
    (sums,) = jax.jit(lambda leaves: layout.add([slab], leaves))(leaves)
    np.testing.assert_array_equal(sums, 2 * slab)


@pytest.mark.parametrize(
    ("shape", "share"), [((8, 3, 64), 384), ((3, 3, 64), 144), ((31, 64), 512), ((5,), 2)]
)
def test_a_share_is_in_whole_rows_unless_they_pad_too_much(shape, share):
    """31 rows on four devices are padded to 32, but 3 are not padded to 4."""
    assert layout_of([shape], "float32", 4).shares == (share,)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_large_leaf_has_its_own_array_and_is_rounded_by_the_same_bits(num_shards, monkeypatch):
    shapes = [(8, 64), (5,), (64, 8), (3,)]
    codecs = [Rounded(dtype="bfloat16", stochastic=True)] * 4
    monkeypatch.setattr(layout, "LEAST_APART", 512)
    assert layout.large_leaves(shapes) == {0, 2}
    for number, found in ((32, range(32)), (33, ())):
        assert layout.large_leaves([(8, 64)] * number) == set(found), "a small part of many"
    order = [1, 3, 0, 2]
    whole, apart = (
        layout.layout_of(shapes, "float32", num_shards, codecs, order, apart=large)
        for large in ((), layout.large_leaves(shapes))
    )
    assert [x.size for x in apart.at_rest] == [128 * num_shards, 512, 512]
    assert apart.offsets == whole.offsets and apart.num_bytes == whole.num_bytes
    leaves = [np.random.default_rng(i).normal(size=shape) for i, shape in enumerate(shapes)]
    draw = draw_of(jax.random.key(0), jnp.int32(1), jnp.uint32(2))
    # Functions of single operations take longer to compile.
    ((expected,), found) = (
        jax.jit(lambda x, own=own: own.encode(own.pack(x), draw))(leaves) for own in (whole, apart)
    )
    shards = [x.reshape(num_shards, -1) for x in (expected, *found)]
    np.testing.assert_array_equal(np.concatenate(shards[1:], axis=1), shards[0])
    rows = jax.jit(lambda x: apart.unpack_whole(x, range(4), "float32", lambda x: x))(found)
    for ours, theirs in zip(rows, read_leaves(whole, [np.asarray(expected)]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    sums = jax.jit(lambda x: apart.joined(apart.add(apart.pack_segments(x), x)))(leaves)
    np.testing.assert_array_equal(sums, 2 * jax.jit(whole.pack)(leaves))
    for own in ([None, leaves[1], None, leaves[3]], [None] * 4):  # arrays of nothing but zeros
        parts = apart.pack_segments(own)
        assert [x.size for x in parts] == [128 * num_shards, 512, 512]
        np.testing.assert_array_equal(apart.joined(parts), whole.pack(own))


@pytest.mark.by_default("1", "5")
@pytest.mark.parametrize("seed", range(6))
def test_processes_together_have_the_runs_of_each_whole_leaf(seed):
    """Whatever devices each has, also where a leaf ends before the last device's share."""
    rng = random.Random(seed)
    shapes = [random_shape(rng) for _ in range(5)] + [(rng.randint(1, 300),)]
    codecs = [rng.choice([Plain(), Blockwise(code="dynamic")]) for _ in shapes]
    count, unit = rng.choice([2, 3, 4, 8]), max(codec.block for codec in codecs)
    layout = layout_of(shapes, "float32", count, codecs, None, unit)
    leaves = [filled(shape, "float32", rng) for shape in shapes]
    arrays = list(map(np.asarray, jax.jit(lambda x: layout.encode(layout.pack(x)))(leaves)))
    shards = [dict(enumerate(np.split(x, count))) for x in arrays]
    owner = {n: rng.randrange(3) for n in range(count)}
    for i in range(len(shapes)):
        for p in range(len(layout.parts(i))):
            whole, found = read_part(layout, arrays, i, p).reshape(-1), {}
            for process in range(3):
                own = [{n: x for n, x in own.items() if owner[n] == process} for own in shards]
                for start, piece in runs_of(layout, own, i, p):
                    found |= {start + at: number for at, number in enumerate(piece.tolist())}
                    assert piece.size
            assert [found[at] for at in sorted(found)] == whole.tolist()
            assert sorted(found) == [*range(whole.size)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("last", [Plain(), Blockwise(code="dynamic")], ids=["plain", "coded"])
def test_leaves_that_are_gathered_have_the_dtype_that_was_asked_for(count, last):
    rng = random.Random(count)
    shapes, order = [(7,), (2, 3), (40,)], rng.sample(range(3), 3)
    leaves = [filled(shape, "float32", rng) / 8 for shape in shapes]
    layout = layout_of(shapes, "float32", count, [Plain(), Plain(), last], None, last.block)

    @jax.jit
    def run(leaves):
        arrays = layout.encode(layout.pack(leaves))
        return layout.unpack_whole(arrays, order, "bfloat16", lambda x: x)

    for i, leaf in zip(order, run(leaves), strict=True):
        assert (leaf.shape, leaf.dtype) == (shapes[i], "bfloat16")
        np.testing.assert_allclose(np.float32(leaf), leaves[i], rtol=0.05, atol=0.1)
