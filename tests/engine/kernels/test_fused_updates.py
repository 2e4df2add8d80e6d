"""Updates of codes in one pass, interpreted on a CPU, against decoding, the update and encoding."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import megatrain_jax as mt
from coded_groups import coded_group, in_segments, random_arguments
from inside import on_one_device
from megatrain_jax._src.engine import start
from megatrain_jax._src.engine.kernels import update_pieces as pieces
from megatrain_jax._src.engine.kernels import updates
from megatrain_jax._src.engine.kernels.fused_updates import _is_possible, update_in_one_pass
from megatrain_jax._src.engine.kernels.update_pieces import update_in_pieces
from megatrain_jax._src.engine.state.codec import (
    Blockwise,
    Plain,
    Rounded,
    derived_draw,
    draw_of,
    halves_of_bits,
)
from megatrain_jax._src.engine.state.layout import GroupLayout, MixedLayout, layout_of
from optimizers import OPTIMIZERS
from runs import make_spec
from zoo import CASES

BLOCK = Blockwise.block
DRAW = (jax.random.key(3), jnp.int32(7), jnp.uint32(2))
BF16 = Rounded(dtype="bfloat16", stochastic=True)
MU = Blockwise(code="dynamic", stochastic=True)
NU = Blockwise(code="dynamic", signed=False, stochastic=True)
COMPACT = dataclasses.replace(mt.Precision.compact(), compute=jnp.float32)
in_one_pass = functools.partial(update_in_one_pass, interpret=True)


def group_of(shapes, master, state, num_shards=1) -> GroupLayout:
    """A group with codecs for the masters and the state of every leaf but the first.

    Masters in blocks have theirs for the first leaf, too: their segment begins before the state's.
    """
    firsts = [master if master.block > 1 else Plain(), *[Plain()] * len(state)]
    slabs = [
        layout_of(shapes, "float32", num_shards, [first, *[codec] * (len(shapes) - 1)], None, BLOCK)
        for first, codec in zip(firsts, (master, *state), strict=True)
    ]
    places = [(s, i) for s in range(len(state)) for i in range(len(shapes))]
    return GroupLayout(
        master=slabs[0], state=MixedLayout(layouts=tuple(slabs[1:]), places=tuple(places))
    )


def decoded(layout: GroupLayout, arrays: list[Any]) -> list[jax.Array]:
    """The numbers of each slab, by one function: a function for each operation takes longer."""

    def decode(rows):
        return [slab.decode(own) for slab, own in zip(layout.slabs, rows, strict=True)]

    return jax.jit(decode)(arrays)


def is_padding(layout) -> np.ndarray:
    """Whether each element of a slab belongs to no leaf; (shards, columns)."""
    found = np.ones((layout.num_shards, layout.size // layout.num_shards), bool)
    for offset, share, shape in zip(layout.offsets, layout.shares, layout.shapes, strict=True):
        left = int(np.prod(shape))
        for row in found:
            row[offset : offset + min(share, left)] = False
            left = max(0, left - share)
    return found


def expected(compute, layout, args, monkeypatch) -> list[np.ndarray]:
    """The numbers of each slab after an update, (shards, columns), with the bits of a pass."""
    masters, state, gradient, messages = args
    arrays = [tuple(masters), *layout.state.by_slab(state)]
    shards, size = layout.master.num_shards, layout.master.size
    numbers = jnp.arange(size, dtype=jnp.uint32)
    columns = (numbers % (size // shards)).astype(jnp.int32)
    rows = decoded(layout, arrays)
    gradient = jax.jit(layout.master.joined)(gradient).astype(jnp.float32)
    rows = jax.jit(compute)([gradient, *rows], columns, messages)
    segments = [slab.segments[-1] for slab in layout.slabs]
    start = max(segment.start for segment in segments)
    count = sum(segment.codec.draws for segment in segments)
    draw = derived_draw(draw_of(*DRAW), 0)
    bits = iter(jax.jit(lambda numbers: halves_of_bits(draw, numbers, count))(numbers))

    def coded(x):
        return x.reshape(shards, -1)[:, start:].reshape(-1)

    padding, found = is_padding(layout.master), []
    with monkeypatch.context() as patched:
        patched.setattr("megatrain_jax._src.engine.state.codec.random_bits", lambda _, bits: bits)
        for segment, row in zip(segments, rows, strict=True):
            codec, x = segment.codec, coded(row)
            x = jnp.where(coded(padding) & (codec.block > 1), 0, x)
            draws = (None, coded(next(bits))) if codec.draws else None
            at_rest = jax.jit(lambda x, draws, codec=codec: codec.encode(x, draws))(x, draws)
            new = np.array(row).reshape(shards, -1)
            own = jax.jit(lambda x, codec=codec: codec.decode(x, np.float32))(at_rest)
            new[:, start:] = own.reshape(shards, -1)
            found.append(new)
    return found


def assert_equal_but_for_rounding(ours: Any, theirs: Any) -> None:
    """All but a few numbers are equal, and these are neighbouring levels.

    A CPU fuses multiplications and sums in one function otherwise than in another, and a draw may
    lie between two such results.
    """
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    largest = np.abs(theirs).max()
    same = np.isclose(ours, theirs, rtol=1e-6, atol=1e-7 * largest)
    assert (~same).sum() <= 1 + same.size / 5000
    assert np.abs(ours - theirs).max() < 0.15 * largest


def adamw_rows(transform):
    """An Optax chain with Adam's moments as the update of rows."""

    def compute(rows, columns, messages):
        gradient, master, mu, nu = rows
        step, factor = messages
        state = transform.init(master)
        state = jax.tree.map(lambda x: step if x.ndim == 0 else x, state)
        adam = state[0]._replace(mu=mu, nu=nu)
        new, state = transform.update(gradient * factor, (adam, *state[1:]), master)
        return [optax.apply_updates(master, new), state[0].mu, state[0].nu]

    return compute


def moment_rows(rows, columns, messages):
    """Lion, with a rate of its own for the first 200 columns."""
    gradient, master, mu = rows
    update = jnp.sign(0.9 * mu + 0.1 * gradient)
    rate = jnp.where(columns < 200, 0.0, messages[1])
    return [master - rate * update, 0.99 * mu + 0.01 * gradient]


ADAMW = adamw_rows(optax.adamw(optax.cosine_decay_schedule(3e-3, 100), eps=1e-6))
NADAM = adamw_rows(optax.nadam(1e-3))
SHAPES = [(150,), (40, 33), (7,), (), (1,), (BLOCK, 3), (200,)]


def test_columns_of_whole_blocks_alone_have_tiles():
    """The columns of a small leaf, and those behind it, begin or end within a block."""
    shapes = [(BLOCK,), (BLOCK // 2,), (BLOCK,), (BLOCK // 2,), (BLOCK,)]
    slab = layout_of(shapes, "float32", 1, [BF16] * len(shapes))
    columns = [pieces._columns(slab, leaf) for leaf in range(len(shapes))]
    assert [own.inside for own in columns] == [0, 128, 192, 320, 384]
    found = [_is_possible([own], [jnp.zeros(slab.size)]) for own in columns]
    assert found == [True, False, False, False, True]
    assert not _is_possible(columns, [jnp.zeros(slab.size)])


@pytest.mark.by_default(
    "compute-master4-state4-float32-1",
    "compute-master1-state1-bfloat16-2",
    "moment_rows-master3-state3-bfloat16-1",
)
@pytest.mark.parametrize(
    ("compute", "master", "state", "dtype", "num_shards"),
    [
        (ADAMW, BF16, (MU, NU), "float32", 1),
        (ADAMW, BF16, (MU, NU), "bfloat16", 2),
        (NADAM, Plain(), (Blockwise(code="dynamic", bits=4, stochastic=True), NU), "float32", 1),
        (
            moment_rows,
            Blockwise(code="linear", stochastic=True),
            (Blockwise(code="linear", bits=4, stochastic=True),),
            "bfloat16",
            1,
        ),
        (
            ADAMW,
            Rounded(dtype="bfloat16"),
            (Blockwise(code="dynamic"), Blockwise(code="dynamic", bits=4, signed=False)),
            "float32",
            1,
        ),
        pytest.param(moment_rows, BF16, (MU,), "float32", 4, marks=pytest.mark.long),
    ],
)
def test_a_pass_is_the_update_between_decoding_and_encoding(
    compute, master, state, dtype, num_shards, monkeypatch
):
    rng = np.random.default_rng(num_shards)
    layout = group_of(SHAPES, master, state, num_shards)
    whole = [
        jnp.asarray(rng.normal(size=slab.size) ** (1 + (k == 2)) * 10.0 ** -(k + 1), jnp.float32)
        for k, slab in enumerate(layout.slabs)
    ]
    # Also of padding, so that new moments there are large.
    gradient = jnp.asarray(rng.normal(size=layout.master.size), dtype)
    at_rest = jax.jit(lambda x: (layout.master.encode(x[0]), layout.state.encode(x[1:])))(whole)
    segments = jax.jit(functools.partial(in_segments, layout.master))(gradient)
    args = (*at_rest, segments, [jnp.int32(5), jnp.float32(0.5)])
    mesh = jax.make_mesh(
        (num_shards,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_shards]
    )
    divided, small = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("d",), ()))
    placed = (*jax.device_put(args[:3], divided), jax.device_put(args[3], small))
    one_pass = functools.partial(in_one_pass, sharding=divided)
    run = jax.jit(update_in_pieces(compute, layout, True, one_pass), out_shardings=divided)
    new, kept = (
        run(*placed, *jax.device_put((jnp.array(ok), DRAW), small)) for ok in (True, False)
    )
    jax.tree.map(np.testing.assert_array_equal, kept, at_rest)
    wanted = expected(compute, layout, args, monkeypatch)
    inside = ~is_padding(layout.master)
    both = max(slab.segments[-1].start for slab in layout.slabs)
    found = decoded(layout, [tuple(new[0]), *layout.state.by_slab(new[1])])
    for slab, own, want in zip(layout.slabs, found, wanted, strict=True):
        numbers = np.asarray(own).reshape(num_shards, -1)
        # `expected` does not encode the first leaf.
        compared = inside & (
            slab.segments[0].codec.block == 1 or np.arange(inside.shape[1]) >= both
        )
        assert_equal_but_for_rounding(numbers[compared], want[compared])


@pytest.mark.by_default("clip_adamw")
@pytest.mark.parametrize("name", ["adamw_schedule", "clip_adamw", "masked_tree"])
def test_groups_of_a_model_are_updated_in_one_pass(name, monkeypatch):
    """The update of a user's optimizer, with masks, messages and uncoded leaves beside codes."""
    part, layout, num_messages = coded_group(OPTIMIZERS[name], 1)
    args = random_arguments(layout, part, num_messages)

    def same_bits(draw, numbers, count):
        return [jnp.full(numbers.shape, jnp.uint32(0x9E3779B9))] * count

    monkeypatch.setattr("megatrain_jax._src.engine.kernels.fused_updates.halves_of_bits", same_bits)
    patched = "megatrain_jax._src.engine.state.codec.random_bits"
    monkeypatch.setattr(patched, lambda draw, numbers: same_bits(draw, numbers, 1)[0])
    runs = []
    for one_pass in (in_one_pass, None):
        function = updates._update(part, layout, True, one_pass)
        text = str(jax.make_jaxpr(function)(*args, jnp.array(True), DRAW))
        assert ("pallas_call" in text) == (one_pass is not None)
        runs.append(jax.jit(function)(*args, jnp.array(True), DRAW))
    for slab, ours, theirs in zip(layout.slabs, *(
        [run[0], *layout.state.by_slab(run[1])] for run in runs
    ), strict=True):  # fmt: skip
        assert_equal_but_for_rounding(slab.decode(ours), slab.decode(theirs))


@pytest.mark.parametrize("decay", [None, 0.9])
def test_runs_on_gpus_with_triton_update_in_one_pass(decay, monkeypatch):
    options = {"precision": COMPACT, "ema_decay": decay}
    spec = make_spec(CASES["nnx_tied"], OPTIMIZERS["adamw_schedule"], **options)
    placement = dataclasses.replace(on_one_device(), platform="gpu")
    group = max(range(len(spec.layouts)), key=lambda g: spec.layouts[g].num_coded)
    kernel = updates.update(spec.optimizer, spec.layouts[group], group, "float32", placement)
    for has_triton in (True, False):
        monkeypatch.setattr(start, "has_triton", lambda devices, there=has_triton: there)
        function = start.empty_kernel_cache(spec, placement).get(kernel)
        assert ("pallas_call" in str(function.trace(*kernel.takes or ()).jaxpr)) == has_triton


def test_other_updates_stay_as_they_are():
    """Operations that a kernel lacks, and results that depend on other elements."""
    layout = group_of([(1,), (4, BLOCK)], BF16, (MU,))
    columns = [pieces.Columns(slab, 1, BLOCK, 4 * BLOCK) for slab in layout.slabs]
    arrays = [slab.encode(jnp.ones(slab.size)) for slab in layout.slabs]
    gradient = in_segments(layout.master, jnp.ones(5 * BLOCK))

    def runs(function) -> bool:
        def compute(rows, columns, messages):
            return [function(rows[1]), rows[2]]

        found = in_one_pass(compute, columns, arrays, gradient, [], None, [None, None])
        return found is not None

    assert runs(jnp.cos)
    assert not runs(jax.lax.digamma) and not runs(jnp.cumsum) and not runs(lambda x: x - x.mean())


def test_bits_of_arrays_steps_and_neighbours_are_uncorrelated():
    """Each pair of 16 bits is one of 64 cells, equally often."""
    numbers = jnp.arange(1 << 16, dtype=jnp.uint32)
    rows = []
    for step in range(3):
        draw = derived_draw(draw_of(jax.random.key(0), jnp.int32(step), jnp.uint32(1)), 0)
        rows += [np.asarray(x >> 29) for x in halves_of_bits(draw, numbers, 4)]
        rows += [np.asarray(x >> 16) & 7 for x in halves_of_bits(draw, numbers, 2)]
    assert len(rows) == 18
    for n, a in enumerate(rows):
        others = [*rows[n + 1 :], *(np.roll(a, k) for k in (1, 2, BLOCK))]
        for b in others:
            counts = np.bincount(a * 8 + b, minlength=64)
            # Chi-squared with 63 degrees of freedom exceeds 140 in one of 10^7 cases.
            assert ((counts - 1024) ** 2 / 1024).sum() < 140
