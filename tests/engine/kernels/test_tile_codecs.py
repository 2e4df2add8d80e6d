"""Codecs on tiles of a kernel, against the codecs of whole slabs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from code_kinds import KINDS, numbers
from megatrain_jax._src.engine.kernels.fused_updates import (
    BLOCK,
    by_block,
    encode_tile,
    has_tiles,
    levels_of,
    read_tile,
    write_tile,
)
from megatrain_jax._src.engine.state.codec import Blockwise, Nf4, Plain, Rounded

CODECS = [
    Plain(),
    Rounded(dtype="bfloat16", stochastic=True),
    *(Blockwise(code=c, bits=b, signed=s, stochastic=True) for c, b, s in KINDS),
]


def through_tiles(codec: Plain, x: np.ndarray, bits: Any) -> tuple[list[Any], Any]:
    """The arrays at rest that a kernel writes, and the numbers that it reads from them."""
    shape, parts = (x.size // BLOCK, BLOCK), codec.parts("float32")
    table = levels_of(codec)
    whole = [np.zeros(x.size // part.per, part.dtype) for part in parts]
    arrays = [by_block(jnp.asarray(a), part.per) for a, part in zip(whole, parts, strict=True)]

    def write(x: Any, bits: Any, *refs: Any) -> None:
        write_tile(codec, refs, jnp.int32(0), encode_tile(codec, x[...], bits[...]))

    def read(*refs: Any) -> None:
        own = (*refs[: len(parts)], refs[len(parts)] if table is not None else None)
        refs[-1][...] = read_tile(codec, own, jnp.int32(0), shape, jnp.float32)

    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    rows = [jnp.asarray(a).reshape(shape) for a in (x, bits)]
    found = jax.jit(pl.pallas_call(write, out_shape=avals, interpret=True))(*rows)
    given = found if table is None else [*found, jnp.asarray(table)]
    aval = jax.ShapeDtypeStruct(shape, jnp.float32)
    again = jax.jit(pl.pallas_call(read, out_shape=aval, interpret=True))(*given)
    return [np.asarray(a).reshape(-1) for a in found], np.asarray(again).reshape(-1)


def _places(codec: Blockwise, codes: np.ndarray) -> np.ndarray:
    """Codes as integers, not packed."""
    levels = codec.decode((codes, np.ones(codes.size * 8 // codec.bits // BLOCK)), np.float32)
    # There are two codes for -1, of which encoding finds the second one.
    found = np.searchsorted(codec.levels(), levels, side="right") - 1
    return found - 2 ** (codec.bits - 1) * codec.signed


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_tiles_have_the_arrays_of_slabs(codec, monkeypatch):
    signed = getattr(codec, "signed", True)
    x = numbers(3, signed, blocks=32)
    bits = np.random.default_rng(1).integers(0, 2**32, x.size, np.uint32)
    patched = "megatrain_jax._src.engine.state.codec.random_bits"
    monkeypatch.setattr(patched, lambda draw, bits: bits)
    expected = codec.encode(jnp.asarray(x), (None, jnp.asarray(bits)))
    found, again = through_tiles(codec, x, bits)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        # Places differ by some 2^-17, so that few draws lie between them.
        assert (a != np.asarray(b)).sum() <= 1
    np.testing.assert_array_equal(again, codec.decode([jnp.asarray(a) for a in found], "float32"))


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
def test_unchanged_numbers_keep_their_codes(code, bits, signed):
    """Even the smallest draw changes none."""
    codec = Blockwise(code=code, bits=bits, signed=signed, stochastic=True)
    rng = np.random.default_rng(6)
    rows = rng.choice(codec.levels()[signed:], size=(1 << 12, BLOCK))
    rows[:, 0] = 1
    x = (rows * 10.0 ** rng.uniform(-6, 2, size=(1 << 12, 1))).astype(np.float32)
    codes, scales = codec.encode(x.reshape(-1), None)
    x = codec.decode((codes, scales), np.float32).reshape(rows.shape)
    encode = jax.jit(lambda x: encode_tile(codec, x, jnp.zeros(x.shape, jnp.uint32)))
    found, again = encode(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(found).reshape(-1), _places(codec, codes))
    np.testing.assert_array_equal(again, scales)


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
def test_special_blocks(code, bits, signed):
    codec = Blockwise(code=code, bits=bits, signed=signed)
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    rows = np.zeros((6, BLOCK), np.float32)
    rows[1, :2] = tiny / 4, tiny / 8  # subnormal
    rows[2, :2] = huge, huge / 100
    rows[3, :2] = tiny, 0
    rows[4, 5], rows[5, 7] = np.inf, np.nan
    found, again = through_tiles(codec, rows.reshape(-1), np.zeros(rows.size, np.uint32))
    expected = codec.encode(jnp.asarray(rows.reshape(-1)), None)
    np.testing.assert_array_equal(found[1][:4], expected[1][:4])
    size = 4 * BLOCK
    np.testing.assert_array_equal(again[:size], codec.decode(expected, "float32")[:size])
    assert np.isnan(again[size:]).all()


def test_codecs_without_tiles():
    assert all(has_tiles(codec) for codec in CODECS) and not has_tiles(Nf4())


@pytest.mark.parametrize(("code", "bits", "signed"), KINDS)
def test_nearest_levels_are_found(code, bits, signed):
    codec = Blockwise(code=code, bits=bits, signed=signed)
    x = numbers(4, signed, blocks=32)
    codes, scales = jax.jit(lambda x: encode_tile(codec, x, None))(x.reshape(-1, BLOCK))
    expected = codec.encode(jnp.asarray(x), None)
    np.testing.assert_array_equal(scales, expected[1])
    places = _places(codec, np.asarray(expected[0]))
    assert (np.asarray(codes).reshape(-1) != places).sum() <= 1
