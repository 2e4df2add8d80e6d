"""Codecs against what they promise: neighbours, the right mean, and special numbers kept."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inside import on_one_device
from megatrain_jax._src.engine.runtime.engine import Engine
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.state.codec import (
    Rounded,
    derived_draw,
    draw_of,
    random_bits,
    round_stochastically,
)

SPECIAL = np.array(
    [0, -0.0, 1, -1, np.inf, -np.inf, 1e-45, -1e-45, 1e-40, 3e38, 1 / 3, -1e-3], np.float32
)


def draw(step=0, group=0):
    return draw_of(jax.random.key(7), jnp.int32(step), jnp.uint32(group))


def test_bits_are_uniform_and_differ_by_step_group_and_slab():
    size = 1 << 16
    draws = [draw(), draw(step=1), draw(group=1), derived_draw(draw(), 0), derived_draw(draw(), 1)]
    numbers = jnp.arange(size, dtype=jnp.uint32)
    rows = np.stack([np.asarray(random_bits(d, numbers)) for d in draws])
    ones = [((rows >> k) & 1).mean(axis=1) for k in range(32)]
    assert np.abs(np.array(ones) - 0.5).max() < 5 * 0.5 / np.sqrt(size)
    centred = rows / 2**32 - 0.5
    correlations = np.corrcoef(np.concatenate([centred, np.roll(centred, 1, axis=1)]))
    assert np.abs(correlations - np.eye(10)).max() < 6 / np.sqrt(size)
    np.testing.assert_array_equal(rows[0], np.asarray(jax.jit(random_bits)(draw(), numbers)))


def test_stochastic_rounding_is_unbiased_and_gives_neighbours():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=500).astype(np.float32), SPECIAL[:9]])
    finite = x[np.isfinite(x)]
    many = np.repeat(finite[:, None], 4096, axis=1).reshape(-1)
    numbers = jnp.arange(many.size, dtype=jnp.uint32)
    rounded = round_stochastically(jnp.asarray(many), random_bits(draw(), numbers))
    rounded = np.asarray(rounded).astype(np.float64).reshape(finite.size, -1)
    bits = finite.view(np.uint32)
    down = (bits & 0xFFFF0000).view(np.float32)
    up = ((bits & 0xFFFF0000) + 0x10000).view(np.float32)
    assert ((rounded == down[:, None]) | (rounded == up[:, None])).all()
    gap = np.abs(up.astype(np.float64) - down)
    off = (rounded.mean(axis=1) - finite) / gap
    assert np.abs(off).max() < 5 * 0.5 / 64  # of 4096 draws
    assert abs(off.mean()) < 5 * 0.5 / np.sqrt(many.size)


def test_finite_numbers_stay_finite_at_the_end_of_the_range():
    """An infinity in a moment or a master would never leave it again."""
    largest, narrow = np.finfo(np.float32).max, float(jnp.finfo(jnp.bfloat16).max)
    x = np.array([largest, -largest, narrow, -narrow, np.inf, -np.inf], np.float32)
    for bits in (0, 0xFFFFFFFF):
        found = round_stochastically(jnp.asarray(x), jnp.full(x.size, bits, jnp.uint32))
        found = np.asarray(found).astype(np.float32)
        np.testing.assert_array_equal(found, [narrow, -narrow, narrow, -narrow, np.inf, -np.inf])


def test_every_nan_stays_one():
    patterns = [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000]
    x = jax.lax.bitcast_convert_type(jnp.array(patterns, jnp.uint32), jnp.float32)
    for bits in (0, 0xFFFFFFFF):
        rounded = jax.jit(round_stochastically)(x, jnp.full(x.size, bits, jnp.uint32))
        assert np.isnan(np.asarray(rounded).astype(np.float32)).all()


def test_special_numbers_stay():
    x = jnp.asarray(np.append(SPECIAL, np.nan).astype(np.float32))
    for bits in (jnp.zeros(x.size, jnp.uint32), jnp.full(x.size, 0xFFFFFFFF, jnp.uint32)):
        rounded = np.asarray(jax.jit(round_stochastically)(x, bits)).astype(np.float32)
        for given, kept in zip(np.asarray(x), rounded, strict=True):
            exact = given in (0, 1, -1) or not np.isfinite(given)
            assert not exact or np.array_equal(given, kept, equal_nan=True)
        assert np.isfinite(rounded[np.isfinite(np.asarray(x))]).all()


@pytest.mark.parametrize("stochastic", [True, False])
def test_without_a_draw_rounding_is_to_nearest(stochastic):
    x = np.random.default_rng(1).normal(size=256).astype(np.float32)
    (rounded,) = Rounded(dtype="bfloat16", stochastic=stochastic).encode(x, None)
    np.testing.assert_array_equal(rounded, x.astype(jnp.bfloat16))


def test_each_group_draws_bits_of_its_own():
    layouts: Any = [SimpleNamespace(draws=draws) for draws in (True, True, False, True)]
    store = Store(layouts, on_one_device(), jax.random.key(3))
    nothing: Any = None
    engine = Engine(store, nothing, nothing)
    found = [engine._draw(group, store.step) for group in (0, 1, 2, 3, 1)]
    assert [x if x is None else int(x[2]) for x in found] == [0, 1, None, 3, 1]
    assert all(x[0] is store.key and x[1] is store.step for x in found if x is not None)
