"""The pool against made-up machines: a GPU's pool is a small class.

Only the figures a real GPU gives are made up; what `reserve` decides with them is real.
"""

import dataclasses
import itertools
import re
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from inside import on_one_device
from megatrain_jax._src.engine.state import pool, pool_limit
from megatrain_jax._src.engine.state.placement import placed_on
from megatrain_jax._src.engine.state.pool import num_threads
from messages import refuses, tells

GIB = 2**30


def test_shardings_name_their_memory():
    placement = on_one_device()
    at_rest = placement.slabs_at_rest, placement.small_at_rest
    on_device = placement.slabs_on_device, placement.small_on_device
    for here, there in itertools.product(at_rest, on_device):
        host = jax.device_put(np.arange(4.0), here)
        assert host.sharding.memory_kind == "pinned_host"
        back = jax.device_put(host, there)
        assert back.sharding.memory_kind == "device"
        np.testing.assert_array_equal(np.asarray(back), np.arange(4.0))


def test_a_cpu_takes_nothing(monkeypatch):
    monkeypatch.setattr(pool, "available_bytes", lambda: 0)
    before = len(jax.live_arrays())
    pool.reserve(on_one_device(), 10 * GIB)
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("missing", [None, "limit", "0", "all"])
def test_free_device_memory_is_that_of_the_fullest_device(missing):
    figures = (9, 2), (8, 3), (9, 1)
    rows: list[Any] = [{"bytes_limit": limit, "bytes_in_use": used} for limit, used in figures]
    if missing is not None:
        left = {"limit": {"bytes_in_use": 3}, "0": rows[1] | {"bytes_limit": 0}, "all": None}
        rows[1] = left[missing]
    devices = [SimpleNamespace(memory_stats=lambda row=row: row) for row in rows]
    placement: Any = SimpleNamespace(local_devices=devices)
    assert pool.free_device_bytes(placement) == (5 if missing is None else None)


class FakeGpu:
    """A GPU's pool as XLA keeps it: regions that double in size, up to a limit."""

    def __init__(self, limit, available):
        self.limit, self.available, self.regions, self.live = limit, available, [], 0
        self.next_region = 2 * 2**20

    def reserve(self, *num_bytes, **options):
        placement = dataclasses.replace(on_one_device(), platform="gpu")
        pool.reserve(placement, *num_bytes, **options)
        (known,) = pool._pools.values()
        assert 0.99 * sum(self.regions) <= known.likely_bytes <= sum(self.regions)

    def take(self, num_bytes):
        # A piece fits behind the arrays that live in the pool, in one region of it.
        if self.regions and num_bytes <= max(self.regions) - self.live:
            return
        left = self.limit - sum(self.regions)
        if num_bytes > left:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")
        grown = num_bytes > self.next_region
        while num_bytes > self.next_region:
            self.next_region *= 2
        self.regions.append(min(self.next_region, left))
        self.next_region *= 1 if grown else 2
        self.available -= self.regions[-1]
        assert self.available >= 0, "the process would be killed"


@pytest.fixture
def gpu(monkeypatch):
    def build(*, limit_gib, available_gib, total_gib=125):
        fake = FakeGpu(limit_gib * GIB, available_gib * GIB)

        def make(num_bytes):
            fake.take(num_bytes)
            return SimpleNamespace(block_until_ready=lambda: None, delete=lambda: None)

        monkeypatch.setattr(pool, "_maker", lambda num_bytes, _: partial(make, num_bytes))
        monkeypatch.setenv(pool.LIMIT_VARIABLE, str(pool_limit.limit_bytes(total_gib * GIB) // GIB))
        monkeypatch.setattr(pool, "available_bytes", lambda: fake.available)
        monkeypatch.setattr(pool, "_pools", {})
        monkeypatch.setattr(pool, "_pinned_bytes_in_use", lambda ds: dict.fromkeys(ds, fake.live))
        return fake

    return build


def test_gpu_takes_little_more_than_is_needed_and_uses_it_again(gpu):
    fake = gpu(limit_gib=115, available_gib=123)
    fake.reserve(85 * GIB)
    assert fake.regions == [1 * GIB, 4 * GIB, 16 * GIB, 64 * GIB]
    fake.reserve(85 * GIB)
    assert fake.regions == [1 * GIB, 4 * GIB, 16 * GIB, 64 * GIB]
    # A piece of 8 GiB has 1 GiB more than was needed, and it takes no memory to use it.
    fake = gpu(limit_gib=115, available_gib=10)
    fake.reserve(7 * GIB, 1 * GIB)
    fake.reserve(8 * GIB)
    assert fake.regions == [8 * GIB]


def test_what_is_pinned_is_shown_while_pieces_are_taken(gpu, monkeypatch):
    fake = gpu(limit_gib=115, available_gib=123)
    resident, seen, enough = itertools.count(7 * GIB, 10 * GIB), [], threading.Event()
    monkeypatch.setattr(pool, "resident_bytes", lambda: next(resident))
    monkeypatch.setattr(pool, "_SECONDS_AT_A_TIME", 0.001)
    take = fake.take

    def take_when_seen(num_bytes):
        assert enough.wait(60)
        take(num_bytes)

    def shown(taken, of):
        assert seen or not fake.regions, "the first word comes before the wait"
        seen.append((taken, of))
        if len(seen) == 13:
            enough.set()

    fake.take = take_when_seen
    fake.reserve(85 * GIB, 0, shown)
    assert [taken for taken, _ in seen[:13]] == [min(10 * i, 85) * GIB for i in range(13)]
    assert {of for _, of in seen} == {85 * GIB} and seen[-1][0] == 85 * GIB
    fake.reserve(85 * GIB, 0, lambda *_: pytest.fail("nothing is taken again"))


def test_threads_find_pages_while_pieces_are_taken_and_not_longer(gpu):
    fake, take, seen = gpu(limit_gib=115, available_gib=123), FakeGpu.take, []

    def finders():
        return sum(thread.name == "pages found" for thread in threading.enumerate())

    fake.take = lambda num_bytes: seen.append(finders()) or take(fake, num_bytes)
    fake.reserve(5 * GIB)
    assert seen == [num_threads() + 1] * 2, "and the one that looks for mappings"
    assert not finders()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_threads_end_when_pinning_is_cut_off(gpu, monkeypatch, error):
    fake, cut = gpu(limit_gib=115, available_gib=123), threading.Event()
    monkeypatch.setattr(pool, "_SECONDS_AT_A_TIME", 0.001)

    def take(num_bytes):
        assert cut.wait(60)
        if error is MemoryError:
            raise error("no piece")

    def shown(taken, of):
        if cut.is_set():
            return
        if threading.active_count() > before:  # pieces are being taken
            cut.set()
            if error is KeyboardInterrupt:
                raise error

    fake.take, before = take, threading.active_count()
    with pytest.raises(error):
        fake.reserve(5 * GIB, 0, shown)
    assert threading.active_count() == before


def test_pieces_are_not_filled():
    target: Any = on_one_device().slabs_at_rest
    piece = pool._maker(2**20, target)()
    assert piece.nbytes == 2**20 and piece.sharding == target
    traced = pool.unfilled(2**36, target).trace()
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "AllocateBuffer" in text and not re.search("constant|broadcast", text)


@pytest.mark.parametrize("gib", [9, 38, 63, 64, 85, 100])
@pytest.mark.parametrize("array_gib", [0, 0.25, 1.2, 2])
def test_pieces_hold_arrays_of_their_size(gpu, gib, array_gib):
    fake = gpu(limit_gib=115, available_gib=123)
    fake.reserve(int(gib * GIB), int(array_gib * GIB))
    assert gib <= sum(fake.regions) / GIB <= 1.03 * (gib + 4 * array_gib)
    if array_gib:
        fitting = sum(region // int(array_gib * GIB) for region in fake.regions)
        assert fitting >= int(gib / array_gib)


def test_gpu_takes_smaller_pieces_where_larger_ones_exceed_the_limit(gpu):
    fake = gpu(limit_gib=115, available_gib=123)
    fake.reserve(108 * GIB, 2 * GIB)
    assert fake.regions == [2 * GIB, 4 * GIB, 8 * GIB, 32 * GIB, 64 * GIB]


def test_gpu_takes_one_region_up_to_the_limit_where_pieces_would_exceed_it(gpu):
    fake = gpu(limit_gib=115, available_gib=123)
    fake.reserve(112 * GIB, 2 * GIB)
    assert fake.regions == [115 * GIB]


def test_gpu_grows_when_what_is_left_is_too_small(gpu):
    fake = gpu(limit_gib=115, available_gib=123)
    fake.reserve(8 * GIB)
    assert fake.regions == [8 * GIB]
    fake.live = 5 * GIB
    fake.reserve(3 * GIB)
    assert fake.regions == [8 * GIB]
    fake.reserve(4 * GIB)
    assert fake.regions == [8 * GIB, 8 * GIB]
    fake.live = 9 * GIB
    fake.reserve(60 * GIB)
    assert fake.regions == [8 * GIB, 8 * GIB, 64 * GIB]


def test_gpu_refuses_before_it_takes_anything(gpu):
    fake = gpu(limit_gib=115, available_gib=93)
    # 90 GiB, 2.81 of lists of what is free in them, 1.12 of notes on pinned pages.
    named = "90.00 GiB", "3.94 GiB", "93.00 GiB"
    with refuses(MemoryError, *named):
        fake.reserve(90 * GIB)
    # 85 GiB fit, but not the pieces that hold as much in arrays of 30 GiB: 124 do, or one region.
    with refuses(MemoryError, "114.00 GiB", f"{pool.LIMIT_VARIABLE}=85"):
        fake.reserve(85 * GIB, 30 * GIB)
    assert fake.regions == []
    fake.reserve(64 * GIB)
    assert fake.regions == [64 * GIB]


def test_gpu_whose_limit_was_set_too_low_explains_itself(gpu):
    fake = gpu(limit_gib=64, available_gib=123)
    with refuses(MemoryError, "import megatrain_jax", "first") as caught:
        fake.reserve(85 * GIB)
    assert tells(str(caught.value), pool.LIMIT_VARIABLE, 85)
    assert "RESOURCE_EXHAUSTED" in str(caught.value.__cause__)


def test_gaps_are_left_out_where_memory_is_too_little_for_them(gpu):
    """12 GiB for gaps, beside 60: the machine has room for them, or it hasn't."""
    for available, regions in ((80, [8, 64]), (70, [4, 8, 16, 32])):
        fake = gpu(limit_gib=115, available_gib=available)
        fake.reserve(72 * GIB, least_bytes=60 * GIB)
        assert fake.regions == [gib * GIB for gib in regions]
    with refuses(MemoryError, "72.00 GiB"):
        gpu(limit_gib=115, available_gib=70).reserve(72 * GIB)


def test_gaps_do_not_make_the_pool_of_an_earlier_run_grow(gpu):
    fake = gpu(limit_gib=115, available_gib=123)
    fake.reserve(30 * GIB)
    before = list(fake.regions)
    fake.reserve(36 * GIB, least_bytes=28 * GIB)
    assert fake.regions == before
    fake.reserve(44 * GIB, least_bytes=40 * GIB)
    assert len(fake.regions) == len(before) + 1, "the state alone needs more"


def test_gaps_are_left_out_in_all_processes_if_in_one(gpu):
    fake = gpu(limit_gib=115, available_gib=123)
    plain = dataclasses.replace(on_one_device(), platform="gpu")
    asked = []

    def gather(what, value=None):
        asked.append(what)
        return [value, value and what != asked[0]]

    processes = SimpleNamespace(gather=gather, num_here=1)
    placement: Any = SimpleNamespace(
        platform="gpu", local_devices=plain.local_devices, processes=processes
    )
    pool.reserve(placement, 72 * GIB, least_bytes=60 * GIB)
    assert fake.regions == [4 * GIB, 8 * GIB, 16 * GIB, 32 * GIB]
    assert len(asked) == len(set(asked)) == 3


def test_a_system_that_pins_less_than_it_has_is_named_with_what_it_pinned(gpu):
    fake = gpu(limit_gib=115, available_gib=123)
    take, error = fake.take, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")

    def take_up_to_a_limit(num_bytes):
        if sum(fake.regions) + num_bytes > 10 * GIB:
            raise error
        take(num_bytes)

    fake.take = take_up_to_a_limit
    with refuses(MemoryError, "5.00 GiB", "16.00 GiB", "21.00 GiB", "host_budget") as caught:
        fake.reserve(21 * GIB)
    assert caught.value.__cause__ is error


def test_gpu_passes_other_errors_on(gpu):
    fake = gpu(limit_gib=64, available_gib=123)

    def broken(num_bytes):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device fell off the bus")

    fake.take = broken
    with pytest.raises(jax.errors.JaxRuntimeError, match="fell off"):
        fake.reserve(GIB)


def test_each_device_s_pool_takes_its_share(gpu, monkeypatch):
    gpu(limit_gib=115, available_gib=90)
    taken, live = [], {}

    def make(num_bytes, target):
        taken.append((*target.device_set, num_bytes // GIB))
        return SimpleNamespace(block_until_ready=lambda: None, delete=lambda: None)

    monkeypatch.setattr(pool, "_maker", lambda *what: partial(make, *what))
    monkeypatch.setattr(
        pool, "_pinned_bytes_in_use", lambda devices: {d: live.get(d, 0) for d in devices}
    )
    _, second = devices = jax.devices()[:2]
    placement = dataclasses.replace(placed_on(Mesh(devices, "data")), platform="gpu")
    pool.reserve(placement, 72 * GIB, 2 * GIB)
    expected = [(d, gib) for d in devices for gib in (2, 4, 32)]
    assert sorted(taken, key=str) == sorted(expected, key=str)
    pools = sum(gib for _, gib in taken) * GIB
    assert pools + pool_limit.beside_bytes(pools) == pool.process_bytes(
        72 * GIB, 2 * GIB, 125 * GIB, num_devices=2
    )
    taken.clear()
    pool.reserve(placement, 72 * GIB, 2 * GIB)
    assert not taken
    live[second] = 36 * GIB  # another run's arrays, in one pool alone
    pool.reserve(placement, 48 * GIB)
    assert taken == [(second, 24)]


def test_several_devices_pools_are_refused_before_any_is_taken(gpu):
    gpu(limit_gib=115, available_gib=78)
    placement = dataclasses.replace(placed_on(Mesh(jax.devices()[:2], "data")), platform="gpu")
    with refuses(MemoryError, "76.00 GiB", f"{pool.LIMIT_VARIABLE}=36"):
        pool.reserve(placement, 72 * GIB, 2 * GIB)


@pytest.mark.gpu
def test_reserved_room_can_be_filled_and_replaced():
    placement = on_one_device()
    pool.reserve(placement, 3 * GIB)
    arrays = [
        jax.device_put(np.full(GIB // 4, index, np.uint8), placement.slabs_at_rest)
        for index in range(11)
    ]
    for index in range(11):
        arrays[index] = jax.device_put(
            np.full(GIB // 4, 100 + index, np.uint8), placement.slabs_at_rest
        )
        jax.block_until_ready(arrays[index])
    assert [int(np.asarray(array)[-1]) for array in arrays] == list(range(100, 111))
    with pytest.raises(MemoryError, match="available"):
        pool.reserve(placement, pool.available_bytes() + GIB)


def test_memory_that_went_meanwhile_ends_a_start_with_words(gpu):
    fake = gpu(limit_gib=115, available_gib=70)
    take = fake.take

    def take_beside_another_program(num_bytes):
        take(num_bytes)
        fake.available -= 11 * GIB // 2

    fake.take = take_beside_another_program
    with refuses(MemoryError, "available", "64.00 GiB", "host_budget"):
        fake.reserve(64 * GIB)


def test_a_piece_takes_the_next_power_of_two_from_the_system():
    found = [pool._region_bytes(2**29 + more, 0, 2**40) for more in (-1, 0, 1)]
    assert found == [2**29, 2**29, 2**30]
