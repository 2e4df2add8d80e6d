"""Chunks of a checkpoint's arrays are runs of elements, and those of all slices are all of them."""

import itertools
import math
import random

import numpy as np
import pytest

from megatrain_jax._src.engine.checkpoint import chunks
from megatrain_jax._src.engine.checkpoint.chunks import Grid, chunk_of, grid_of
from megatrain_jax._src.engine.program.layers.sliced_values import (
    Index,
    Range,
    index_of,
    remaining,
    selector,
)


@pytest.mark.by_default("64-8-16", "1000000-50-50")
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


def test_chunks_end_where_ranges_do(monkeypatch):
    monkeypatch.setattr(chunks, "_LEAST_BYTES", 8)
    monkeypatch.setattr(chunks, "_ODD_BYTES", 32)
    rng = random.Random(0)
    for _ in range(60):
        count, length, width = (rng.randint(1, 6) for _ in range(3))
        shape, numbers = (count * length, width), []
        whole, share = np.arange(math.prod(shape)).reshape(shape), rng.randint(1, length * width)
        for at in range(0, count * length, length):
            index: Index = (Range(at, at + length),)
            grid, flat, end = grid_of(shape, index, share, 4), whole[selector(index)].ravel(), 0
            for cell in grid.cells(index):
                assert cell.start == end
                np.testing.assert_array_equal(whole[cell.box].ravel(), flat[end : cell.stop])
                numbers.append(cell.number)
                end = cell.stop
            assert end == flat.size
        # Each is written once.
        assert sorted(numbers) == list(range(grid.num_cells))


def test_a_range_within_a_chunk_reads_its_own_rows_of_it():
    """As groups of experts read the chunks of a run with all experts in one."""
    whole = np.arange(12 * 3).reshape(12, 3)
    for first, length in itertools.product((1, 3, 4, 12), (2, 3, 5)):
        grid = Grid(shape=(12, 3), chunk=(first, 3))
        for at in range(0, 13 - length):
            index: Index = (Range(at, at + length),)
            cells = list(grid.cells(index))
            joined = np.concatenate([whole[cell.box].ravel() for cell in cells])
            own = joined[-cells[0].start :][: length * 3]
            np.testing.assert_array_equal(own, whole[selector(index)].ravel())
            assert all(a.stop == b.start for a, b in itertools.pairwise(cells))


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
