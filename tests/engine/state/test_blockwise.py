"""Codes of 8 and 4 bits against an oracle in NumPy, and what they promise of special numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from code_kinds import BLOCK, KINDS, numbers
from megatrain_jax._src.engine.state.codec import Blockwise, draw_of
from megatrain_jax._src.engine.state.host_leaves import encoded, part_shape, read_leaf
from megatrain_jax._src.engine.state.layout import layout_of
from slabs import read_part


def nearest_levels(codec, x):
    """For each number the nearest level of its block, by trying all of them in float64."""
    rows = x.astype(np.float64).reshape(-1, BLOCK)
    scales = np.abs(rows).max(axis=1, keepdims=True)
    levels = codec.levels().astype(np.float64)
    distances = np.abs(rows[..., None] - scales[..., None] * levels)
    return distances.min(axis=-1).reshape(-1), np.repeat(scales, BLOCK)


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
def test_levels_are_those_of_the_code(code, bits, signed):
    """Half of the levels above a tenth, half of the rest above a hundredth; or equal distances."""
    count = 2 ** (bits - signed)
    if code == "linear":
        expected = np.arange(count) / (count - 1)
    else:
        expected, low, size = [0.0], 0.0, 1
        for decade in range(bits - signed):
            high = 10.0 ** (decade - (bits - signed - 1))
            expected += [low + (high - low) * (i + 1) / size for i in range(size)]
            low, size = high, 2 * size
    levels = Blockwise(code=code, bits=bits, signed=signed).levels()
    np.testing.assert_allclose(levels[-count:], expected, rtol=1e-6)
    if signed:
        np.testing.assert_array_equal(levels[1:count], -levels[:count:-1])
        assert len(levels) == 2 * count and levels[0] == -1


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
@pytest.mark.parametrize("drawn", [0, 0xFFFFFFFF])
def test_zeros_and_largest_numbers_stay_whatever_is_drawn(code, bits, signed, drawn, monkeypatch):
    """Others become one of the two levels beside them, and nothing overflows."""

    def drawing(draw, numbers):
        return np.full(numbers.shape, drawn, np.uint32)

    monkeypatch.setattr("megatrain_jax._src.engine.state.codec.random_bits", drawing)
    codec = Blockwise(code=code, bits=bits, signed=signed, stochastic=True)
    levels = codec.levels()[signed:]
    rows = np.resize(levels, (4, BLOCK)).astype(np.float32)
    rows[:, 0] = 1
    draw = draw_of(jax.random.key(0), jnp.int32(0), jnp.uint32(0))
    for scale in (1.0, 2.0**60, 3e38, 1e-30):
        x = (rows * np.float32(scale)).reshape(-1)
        with np.errstate(all="raise", under="ignore"):
            draws = draw, np.arange(x.size, dtype=np.uint32)
            found = codec.decode(codec.encode(x, draws), np.float32)
        assert np.isfinite(found).all() and (found[x == 0] == 0).all()
        np.testing.assert_array_equal(found[::BLOCK], x[::BLOCK])
        off = np.abs(found.astype(np.float64) - x) / scale
        assert off.max() <= 1.001 * np.diff(levels).max()


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
def test_unchanged_numbers_keep_their_codes(code, bits, signed, monkeypatch):
    """A parameter without an update does not shrink: even the smallest draw changes none."""

    def drawing(draw, numbers):
        return jnp.zeros(numbers.shape, jnp.uint32)

    monkeypatch.setattr("megatrain_jax._src.engine.state.codec.random_bits", drawing)
    codec = Blockwise(code=code, bits=bits, signed=signed, stochastic=True)
    rng = np.random.default_rng(6)
    rows = rng.choice(codec.levels()[signed:], size=(512, BLOCK))
    rows[:, 0] = 1
    x = (rows * 10.0 ** rng.uniform(-6, 2, size=(512, 1))).astype(np.float32).reshape(-1)
    codes, scales = codec.encode(x, None)
    x = codec.decode((codes, scales), np.float32)
    draw = draw_of(jax.random.key(0), jnp.int32(0), jnp.uint32(0))
    encode = jax.jit(lambda x: codec.encode(x, (draw, jnp.arange(x.size, dtype=jnp.uint32))))
    for again, before in zip(encode(x), (codes, scales), strict=True):
        np.testing.assert_array_equal(again, before)


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
def test_encoding_finds_the_nearest_level(code, bits, signed):
    codec = Blockwise(code=code, bits=bits, signed=signed)
    x = numbers(1, signed)
    arrays = jax.jit(lambda x: codec.encode(x, None))(x)
    assert [(a.dtype.name, a.size * part.per) for a, part in zip(
        arrays, codec.parts("float32"), strict=True)] == [
        (part.dtype, x.size) for part in codec.parts("float32")]  # fmt: skip
    found = np.asarray(jax.jit(lambda a: codec.decode(a, jnp.float32))(arrays))
    distances, scales = nearest_levels(codec, x)
    smallest = codec.levels()[codec.levels() > 0][0] * scales
    lifted = (code == "dynamic") & (np.abs(x) < smallest)
    off = np.abs(found.astype(np.float64) - x)
    assert (np.abs(off - distances) <= 1e-6 * scales)[~lifted].all()
    np.testing.assert_allclose(np.abs(found)[lifted], smallest[lifted], rtol=1e-6)
    # What is decoded has the same codes again, and NumPy's are XLA's.
    for again in (codec.encode(found, None), jax.jit(lambda x: codec.encode(x, None))(found)):
        for a, b in zip(again, arrays, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(codec.decode([np.asarray(a) for a in arrays], "float32"), found)


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
def test_levels_are_ascending_and_codes_monotone(code, bits, signed):
    codec = Blockwise(code=code, bits=bits, signed=signed)
    levels = codec.levels()
    assert len(levels) == 2**bits and levels[-1] == 1 and 0 in levels
    ascending = levels[1:] if signed else levels
    assert (np.diff(ascending) > 0).all() and (ascending[0] == -1) == signed
    x = np.sort(np.concatenate([numbers(2, signed, 1)[1:], [0]])).astype(np.float32)
    (values,) = [codec.decode(codec.encode(x, None), np.float32)]
    assert (np.diff(values) >= 0).all() and (values[x == 0] == 0).all()
    largest = np.abs(x).argmax()
    assert values[largest] == x[largest], "a block's largest number is exact"


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
@pytest.mark.parametrize("lib", [np, jnp])
def test_special_blocks(code, bits, signed, lib):
    codec = Blockwise(code=code, bits=bits, signed=signed)
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    rows = np.zeros((6, BLOCK), np.float32)
    rows[1, :2] = tiny / 4, tiny / 8  # no normal numbers: zeros to some processors
    rows[2, :2] = huge, huge / 100
    rows[3, :2] = tiny, 0
    rows[4, 5], rows[5, 7] = np.inf, np.nan
    with np.errstate(all="raise"):
        arrays = codec.encode(lib.asarray(rows.reshape(-1)), None)
        plain = codec.decode([a[: a.size * 4 // 6] for a in arrays], np.float32)
    plain = np.asarray(plain).reshape(4, BLOCK)
    assert np.isfinite(plain).all() and not plain[:2].any()
    assert plain[2, 0] == huge and not plain[2, 2:].any()
    if code == "dynamic":
        np.testing.assert_allclose(plain[2, 1], huge / 100, rtol=1e-6)
    assert plain[3, 0] == tiny and not plain[3, 1:].any()
    bad = np.asarray(codec.decode([a[a.size * 4 // 6 :] for a in map(jnp.asarray, arrays)], "f4"))
    assert np.isnan(bad).all(), "what is not finite is not hidden"


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
@pytest.mark.parametrize("blocks", [1, 64])
def test_one_nan_or_infinity_spoils_its_block_in_arrays_of_any_size(code, bits, signed, blocks):
    """XLA on the CPU drops NaN from the maximum of floats in large arrays."""
    codec = Blockwise(code=code, bits=bits, signed=signed)
    there_and_back = jax.jit(lambda x: codec.decode(codec.encode(x, None), jnp.float32))
    for bad in (np.nan, -np.nan, np.inf):
        x = numbers(5, signed, blocks)
        x[5] = bad
        found = np.asarray(there_and_back(x))
        assert np.isnan(found[:BLOCK]).all() and np.isfinite(found[BLOCK:]).all(), bad


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
def test_stochastic_codes_are_right_in_the_mean(code, bits, signed):
    codec = Blockwise(code=code, bits=bits, signed=signed, stochastic=True)
    x, repeats = numbers(3, signed, 2), 2048
    draw = draw_of(jax.random.key(3), jnp.int32(5), jnp.uint32(1))
    numbered = jnp.arange(x.size * repeats, dtype=jnp.uint32)
    arrays = jax.jit(lambda x: codec.encode(x, (draw, numbered)))(np.tile(x, repeats))
    values = np.asarray(codec.decode(arrays, jnp.float32)).astype(np.float64).reshape(repeats, -1)
    levels = codec.levels().astype(np.float64)
    scales = np.repeat(np.abs(x).reshape(-1, BLOCK).max(axis=1), BLOCK).astype(np.float64)
    place = np.clip(np.searchsorted(levels, x / scales, side="right"), 1, len(levels) - 1)
    below, above = levels[place - 1] * scales, levels[place] * scales
    near = (np.abs(values - below) < 1e-5 * scales) | (np.abs(values - above) < 1e-5 * scales)
    assert near.all(), "one of the two levels beside a number"
    smallest = levels[levels > 0][0] * scales
    fair = (code == "linear") | (np.abs(x) >= smallest)
    off = (values.mean(axis=0) - x) / (above - below)
    assert np.abs(off[fair]).max() < 5 * 0.5 / np.sqrt(repeats)
    assert abs(off[fair].mean()) < 5 * 0.5 / np.sqrt(repeats * fair.sum())


def test_padding_counts_in_no_scale():
    """Leaves that don't fill their blocks, over one device and three, have the same parts."""
    rng = np.random.default_rng(4)
    leaves = [rng.normal(size=shape).astype(np.float32) for shape in [(7, 50), (128, 3), (1000,)]]
    parts = []
    for num_shards in (1, 3):
        layout = layout_of(
            [x.shape for x in leaves], "float32", num_shards,
            [Blockwise(code="dynamic")] * 3, unit=BLOCK,
        )  # fmt: skip

        def encode(leaves, layout=layout):
            slab = layout.pack(leaves)
            padding = layout.pack([jnp.ones(x.shape) for x in leaves]) == 0
            return layout.encode(jnp.where(padding, 1e6, slab))

        arrays = [np.asarray(x) for x in jax.jit(encode)(leaves)]
        assert [(x.shape, x.dtype) for x in arrays] == [(x.shape, x.dtype) for x in layout.at_rest]
        rows = [[read_part(layout, arrays, i, p) for p in range(2)] for i in range(3)]
        for i, (leaf, row) in enumerate(zip(leaves, rows, strict=True)):
            assert [x.shape for x in row] == [part_shape(layout, i, p) for p in range(2)]
            for own, part in zip(encoded(layout, leaf, i), row, strict=True):
                np.testing.assert_array_equal(own, part)
            off = np.abs(read_leaf(layout, arrays, i) - leaf)
            assert off.max() < 0.01 * np.abs(leaf).max()
        parts.append(rows)
    jax.tree.map(np.testing.assert_array_equal, *parts)
