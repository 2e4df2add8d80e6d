"""Rates of copies measured at a run's start, and the schedule by them."""

import dataclasses
import math
import random
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import spec_of
from megatrain_jax._src.engine.runtime import transfers
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.workload import Link
from megatrain_jax._src.engine.spec import measured, rescheduled
from megatrain_jax._src.engine.spec.costs import host_link
from megatrain_jax._src.engine.state.placement import Placement, placed_on
from messages import tells
from optimizers import OPTIMIZERS
from plans import BALANCED, small_plan
from runs import SLOW, make_spec
from small_layers import WIDTH, layers, make_params
from workloads import computing
from zoo import CASES

# Runs here differ in budgets and rates, of which their traces and functions know nothing.
pytestmark = pytest.mark.usefixtures("traced_once", "started_once")

GIB, MIB = 2**30, 2**20
ADAM = optax.adam(1e-3)


def placement(num_devices: int = 1) -> Placement:
    return placed_on(Mesh(jax.devices()[:num_devices], "data"))


def with_peer(placement: Placement, slower: float) -> Placement:
    """A placement of two processes, of which the other one takes `slower` times as long."""

    def gather(where: str, value=None):
        if isinstance(value, float):  # the seconds so far
            return [value, value / slower]
        return [value, value and [slower * x for x in value]]

    processes = SimpleNamespace(gather=gather, count=1)
    return dataclasses.replace(placement, processes=processes)  # type: ignore


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    ("num_bytes", "array_bytes", "each", "number"),
    [
        (8 * MIB, 64 * MIB, 2 * MIB, 2),
        (8 * MIB, MIB, MIB, 4),
        (2**50, 2**50, 2**29, 2),
        (2**50, 100 * MIB, 100 * MIB, 2),
        (2**50, 50 * MIB, 50 * MIB, 5),
        (2**50, 10_000, 10_000, 64),
        (3, MIB, 1, 2),
    ],
)
def test_rates_are_means_of_the_slowest_process(
    num_devices, num_bytes, array_bytes, each, number, monkeypatch
):
    """Only the first round doesn't count, because it allocates memory."""
    rounds = iter([(99.0, 99.0), (2.0, 7.0), (10.0, 1.0), (2.0, 2.0), (3.0, 2.0), (3.0, 3.0)])
    now = [5.0]

    def seconds(streams, inward, outward):
        assert [x.size for x in (*inward, *outward)] == 2 * number * [num_devices * each]
        found = next(rounds)
        now[0] += max(found)
        return found

    # After five rounds, also in the process whose clock is slower.
    monkeypatch.setattr(transfers, "_LEAST_SECONDS", 0.5 * (7.0 + 10 + 2 + 3 + 3))
    monkeypatch.setattr(transfers, "_LEAST_ROUNDS", 1)
    monkeypatch.setattr(transfers, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(transfers, "_seconds", seconds)
    monkeypatch.setattr(transfers, "unfilled", lambda size, _: lambda: SimpleNamespace(size=size))
    monkeypatch.setattr(Placement, "move", lambda self, arrays, sharding: arrays)
    found = transfers.measured_rates(with_peer(placement(num_devices), 2.0), num_bytes, array_bytes)
    assert 2 * number * each <= max(num_bytes, 4), "one way's arrays, and the other way's copies"
    assert found == (number * each / 8.0, number * each / 6.0)
    assert next(rounds, None) is None


@pytest.mark.parametrize(
    ("seconds", "number"), [(0.0131, 230), (0.0251, 120), (0.51, 6), (0.7, 5), (2.0, 5)]
)
def test_rates_are_timed_for_three_seconds_and_in_five_rounds(seconds, number, monkeypatch):
    now, taken = [0.0], []

    def round_trip(*_):
        taken.append(seconds if taken else 9.0)
        now[0] += taken[-1]
        return 0.7 * taken[-1], taken[-1]

    monkeypatch.setattr(transfers, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(transfers, "_seconds", round_trip)
    transfers.measured_rates(placement(), 8, 1)
    assert len(taken) == 1 + number


@pytest.mark.parametrize("num_devices", [1, 2])
def test_copies_both_ways_are_under_way_at_once(num_devices, monkeypatch):
    """Each direction's time is until its own copies have arrived."""
    place, dispatched, waited = placement(num_devices), [], []
    clock = iter([10.0, 13.0, 17.0])
    real = transfers.Streams.dispatch

    def dispatch(streams):
        dispatched.append({way: len(rows) for way, rows in streams._gathered.items()})
        real(streams)

    def arrived(copies):
        waited.append({x.sharding.memory_kind for x in copies})
        return [x.block_until_ready() for x in copies]

    monkeypatch.setattr(transfers.Streams, "dispatch", dispatch)
    monkeypatch.setattr(transfers, "ThreadPoolExecutor", lambda _: OneThread())
    monkeypatch.setattr(transfers.jax, "block_until_ready", arrived)
    monkeypatch.setattr(transfers, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    slabs = [
        place.move([transfers.unfilled(num_devices * 8, place.slabs_on_device)()] * 2, sharding)
        for sharding in (place.slabs_at_rest, place.slabs_on_device)
    ]
    assert transfers._seconds(transfers.Streams(place), *slabs) == (3.0, 7.0)
    assert dispatched == [{True: 1, False: 1}]
    kinds = [sharding.memory_kind for sharding in (place.slabs_on_device, place.slabs_at_rest)]
    assert waited == [{kind} for kind in kinds]


class OneThread:
    """Stands for a pool of threads, and does its work in order."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def map(self, function, items):
        return [function(item) for item in items]


def test_rates_are_measured_on_real_devices(monkeypatch):
    monkeypatch.setattr(transfers, "_LEAST_SECONDS", 0.02)
    for rate in transfers.measured_rates(placement(2), 64 * MIB, MIB):
        assert 1e6 < rate < 1e12


@pytest.mark.parametrize(
    ("host", "shared"),
    [(float("inf"), 0.0), (160.0, 0.0), (159.0, 2 / 159.0), (80.0, 2 / 80.0)],
)
def test_a_link_has_a_rate_each_way(host, shared):
    """With two devices, the host's memory serves 2 · (30 + 50) bytes per second or limits them."""
    hardware = dataclasses.replace(
        SLOW, link_bytes_per_s=30.0, link_out_bytes_per_s=50.0, host_bytes_per_s=host
    )
    link = Link(inward=1 / 30, outward=1 / 50, shared=shared)
    assert host_link(hardware, 2) == link
    symmetric = dataclasses.replace(hardware, link_out_bytes_per_s=None)
    assert host_link(symmetric, 1).outward == 1 / 30


def test_a_plan_counts_each_direction_by_its_own_rate():
    hardware = dataclasses.replace(BALANCED, link_bytes_per_s=8.0, link_out_bytes_per_s=16.0)
    plan = small_plan(hardware=hardware)  # 20 bytes in and 16 out
    assert (plan.seconds_in, plan.seconds_out) == (2.5, 1.0)
    assert plan.busy["link"] == ("link", 2.5)
    assert dataclasses.replace(plan, bytes_in=0).busy["link"] == ("link", 1.0)


def test_disks_are_busy_for_each_way_and_for_both_ways_together():
    disks: Any = {"disk_read_bytes_per_s": 8.0, "disk_write_bytes_per_s": 2.0}
    for both, seconds in ((math.inf, 3.0), (5.0, 4.4)):
        hardware = dataclasses.replace(BALANCED, disk_bytes_per_s=both, **disks)
        plan = small_plan(hardware=hardware, disk_read_bytes=16, disk_written_bytes=6)
        assert plan.seconds_disk == (2.0, 3.0)
        assert plan.busy["disk"] == ("disk", seconds)


@pytest.mark.by_default("0-2", "1-1")
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_by_measured_rates_stays_within_the_pinned_memory(seed, waves, monkeypatch):
    rng, rooms = random.Random(seed), []
    real = rescheduled.reschedule

    def noted(workload, schedule, budget, host_room):
        rooms.append(max(host_room, schedule.transient.total))
        return real(workload, schedule, budget, host_room)

    monkeypatch.setattr(rescheduled, "reschedule", noted)
    least = make_spec(CASES["nnx_tied"], OPTIMIZERS["adam"]).first.schedule.smallest_bytes
    options = {"hardware": SLOW, "microbatches": 4, "waves": waves}
    budget = round(rng.uniform(1.0, 1.5) * least)
    spec = make_spec(CASES["nnx_tied"], OPTIMIZERS["adam"], device_budget=budget, **options)
    before = spec.first.schedule
    inward, outward = 10.0 ** rng.uniform(4, 9), 10.0 ** rng.uniform(4, 9)
    found = measured.by_measured_rates(spec, inward, outward, before.transient)
    after, machine = found.first.schedule, found.measured_machine
    assert machine and machine.link_rates == (inward, outward)
    link = found.first.workload.costs.link
    assert (1 / link.inward, 1 / link.outward) == pytest.approx((inward, outward))
    assert tells(machine.source, "measured", SLOW.source)
    assert not after.left_out and after.kept == before.kept
    assert computing(after.steady) == computing(before.steady) or before.left_out
    # What was pinned stays pinned, even if the new schedule would need less.
    assert after.transient == before.transient
    needed = measured.by_measured_link(spec.first, link, spec.budget_bytes).schedule.transient
    assert needed.total <= before.transient.total and set(rooms) == {before.transient.total}
    assert after.peak_bytes <= budget


def test_measured_rates_choose_nothing_that_changes_results():
    """A later batch shape saves what it would without them, so that a resumed run does the same."""
    case, adam = CASES["nnx_tied"], OPTIMIZERS["adam"]
    least = make_spec(case, adam).first.schedule.smallest_bytes
    spec = make_spec(case, adam, hardware=SLOW, device_budget=round(1.3 * least))
    found = measured.by_measured_rates(spec, 1e4, 1e9, spec.first.schedule.transient)
    assert found.first.schedule.steady != spec.first.schedule.steady
    later = {"tokens": case.batch(0)["tokens"][:4]}
    for train in (True, False):
        first, second = (run.bound_step(later, train=train) for run in (found, spec))
        assert first.schedule == second.schedule


def started(budget: int | str) -> mt.Trainer:
    """The trainer of a few small layers: how a run starts doesn't depend on its model."""
    fp32: Any = {"precision": "float32", "progress": False}
    made = make_params(num_layers=3), layers, ADAM, {"x": np.ones((64, WIDTH), np.float32)}
    return mt.Trainer(*made, device_budget=budget, **fp32)


def test_a_start_measures_the_link_of_a_step_that_copies(pretending_gpu, monkeypatch):
    """Plan and schedule follow what was measured; a step that copies nothing needs no rates."""
    asked = []

    def rates(placement, num_bytes, array_bytes):
        asked.append((num_bytes, array_bytes))
        return 2e4, 5e4

    monkeypatch.setattr("megatrain_jax._src.engine.start.measured_rates", rates)
    streamed = started("minimum")
    phases = ["tracing", "compiling", "timing", "pinning", "timing copies", "initialising"]
    assert list(streamed.startup) == phases
    spec = spec_of(streamed)
    assert any(row.op is Op.FETCH for row in spec.first.schedule.steady)
    room, largest = asked.pop()
    assert largest == spec.largest_slab_bytes and 0 < room < 2 * spec.first.schedule.peak_bytes
    assert spec.first.workload.costs.link.inward == 1 / 2e4
    plan = streamed.plan
    assert plan.seconds_in == pytest.approx(plan.bytes_in / 2e4)
    assert plan.seconds_out == pytest.approx(plan.bytes_out / 5e4)
    assert tells(str(plan), "2e-05 GB/s", "5e-05", "measured")
    whole = started(GIB)
    assert not asked and list(whole.startup) == [x for x in phases if x != "timing copies"]
    assert whole.plan.hardware and whole.plan.hardware.source == pretending_gpu.source


@pytest.mark.by_default("True")
@pytest.mark.usefixtures("pretending_gpu")
@pytest.mark.parametrize("larger", [False, True])
def test_a_schedule_by_measured_rates_keeps_to_the_pinned_memory(larger, monkeypatch):
    """The pools have room for one more array, but not for larger gaps."""
    monkeypatch.setattr("megatrain_jax._src.engine.start.measured_rates", lambda *_: (2e4, 5e4))
    pinned, sizes = 2**20, []

    def pooled(spec, *spread):
        sizes.append(pinned + (len(sizes) and spec.largest_slab_bytes + larger))
        return sizes[-1]

    monkeypatch.setattr("megatrain_jax._src.engine.start.pooled_bytes", pooled)
    spec = spec_of(started("minimum"))
    assert len(sizes) == 2 and sizes[0] == pinned
    assert (spec.first.workload.costs.link.inward == 1 / 2e4) == (not larger)


def test_a_run_on_a_cpu_measures_nothing(monkeypatch):
    monkeypatch.setattr("megatrain_jax._src.engine.start.measured_rates", None)
    trainer = started("minimum")
    assert "timing copies" not in trainer.startup
