"""Chunks of a checkpoint's arrays are runs of elements, and those of all slices are all of them."""

import itertools
import math
import random

import numpy as np
import pytest

from megatrain_jax._src.checkpoint import chunks
from megatrain_jax._src.checkpoint.chunks import Grid, chunk_of, grid_of
from megatrain_jax._src.program.layers.index import index_of, remaining, selector


@pytest.mark.parametrize(("most", "least", "odd"), [(64, 8, 16), (100, 0, 40), (10**6, 50, 50)])
def test_chunks_of_slices_are_runs_and_cover_the_array(most, least, odd, monkeypatch):
    monkeypatch.setattr(chunks, "MOST_BYTES", most)
    monkeypatch.setattr(chunks, "_LEAST_BYTES", least)
    monkeypatch.setattr(chunks, "_ODD_BYTES", odd)
    rng = random.Random(most)
    for _ in range(60):
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 4)))
        axes = sorted(rng.sample(range(len(shape)), rng.randint(0, min(2, len(shape)))))
        size = math.prod(remaining(shape, axes))
        share, whole = rng.randint(1, size + 3), np.arange(math.prod(shape)).reshape(shape)
        numbers, grid = [], None
        for position in itertools.product(*(range(shape[axis]) for axis in axes)):
            index = index_of(axes, position)
            grid = grid_of(shape, index, share, itemsize=4)
            assert grid.divides(index)
            flat, end = whole[selector(index)].reshape(-1), 0
            for cell in grid.cells(index):
                assert cell.start == end and (cell.stop - cell.start) * 4 <= most
                found = whole[cell.box]
                np.testing.assert_array_equal(found.reshape(-1), flat[cell.start : cell.stop])
                np.testing.assert_array_equal(
                    whole[grid.cell(cell.number).box].ravel(), found.ravel()
                )
                numbers.append(cell.number)
                end = cell.stop
            assert end == flat.size
        assert grid is not None
        assert sorted(numbers) == list(range(grid.num_cells)) == [n for n, _ in grid.boxes()]


def test_chunks_end_where_shares_of_devices_do():
    examples = {
        ((151936, 4096), 8): (18992, 4096),  # an embedding: rows
        ((3, 5120, 5120), 4): (1, 1280, 5120),  # fused projections: rows of each
        ((4096, 4099), 8): (512, 4099),
        ((4096,), 8): (4096,),  # small: whole
        ((10**9,), 1): (125_000_000,),  # large: up to half a GiB
        ((2**30, 1), 2): (2**27, 1),
        ((1001, 999, 7), 4): (37, 999, 7),  # no whole rows: about a MiB
    }
    for (shape, num_devices), chunk in examples.items():
        share = -(-math.prod(shape) // num_devices)
        assert chunk_of(shape, share, itemsize=4) == chunk, shape


def test_chunks_of_others_are_noticed():
    assert Grid(shape=(4, 6), chunk=(1, 6)).divides((2,))
    assert Grid(shape=(4, 6), chunk=(3, 6)).divides(())
    assert not Grid(shape=(4, 6), chunk=(2, 6)).divides((2,)), "a chunk is of several slices"
    assert not Grid(shape=(4, 6), chunk=(2, 3)).divides(()), "a chunk is no run"
