"""Copies beside computation in a schedule, over one link or two."""

import copy
import random
from dataclasses import replace

import pytest

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.schedule.clock import Clock
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.schedule.timeline import timeline
from megatrain_jax._src.engine.schedule.workload import Costs, DiskLink, Workload
from schedule_machine import run_everything
from workloads import MOVES, all_resident_bytes, bytes_moved, costs, decoder, host, random_workload


@pytest.mark.by_default(*map(str, range(30)))
@pytest.mark.parametrize("seed", range(60))
def test_computing_never_waits_for_room(seed):
    """The device always has a task to compute while the driver waits."""
    workload = random_workload(seed)
    smallest = find_schedule(workload, None).smallest_bytes
    for budget in (smallest, smallest + random.Random(seed).randint(1, 200)):
        schedule = find_schedule(workload, budget)
        computed = -1
        for instruction in schedule.steady:
            assert instruction.task is not None
            if instruction.op not in MOVES:
                computed = instruction.task
            elif instruction.op is Op.WAIT:
                assert instruction.task < computed
            elif instruction.op is Op.LAND:
                assert instruction.task < computed or not workload.costs.link.outward


def busy_seconds(workload: Workload) -> float:
    """Computing alone."""
    costs = workload.costs
    return sum(costs.forward) - costs.forward[-1] + sum(costs.backward) + sum(costs.update)


def test_streaming_hides_behind_computing():
    # A backward takes as long as its block needs in either direction, the large ends four times.
    workload = decoder(costs=costs(20, 20, forward=(6.0,) * 20, backward=(18.0,) * 20))
    smallest = find_schedule(workload, None)
    assert smallest.seconds < 1.15 * busy_seconds(workload)
    roomier = find_schedule(workload, 2 * smallest.smallest_bytes)
    assert roomier.seconds == pytest.approx(busy_seconds(workload), rel=1e-9)


def test_a_step_waits_for_its_batch_unless_it_arrives_behind_the_last_tasks():
    def seconds(batch: float) -> float:
        given = costs(20, 20, forward=(6.0,) * 20, backward=(18.0,) * 20, batch=batch)
        workload = decoder(costs=given)
        schedule = find_schedule(workload, all_resident_bytes(workload))
        end = max(s.end for s in timeline(workload, schedule) if s.lane == "compute")
        assert end == pytest.approx(schedule.seconds)
        return schedule.seconds

    # The driver begins a step while the last two tasks of the step before it compute: 36 seconds.
    assert seconds(17.0) == seconds(0.0)
    assert seconds(36.0 + 5.0) >= seconds(0.0) + 5.0
    assert seconds(100.0) == pytest.approx(seconds(200.0) - 100.0)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_bound_link_is_never_idle(deferred):
    workload = decoder(
        deferred=deferred, costs=costs(20, 20, forward=(0.1,) * 20, backward=(0.3,) * 20)
    )
    schedule = find_schedule(workload, None)
    busier = max(bytes_moved(workload, schedule, op) for op in (Op.FETCH, Op.OFFLOAD))
    assert busier <= schedule.seconds < 1.1 * busier


@pytest.mark.by_default("0", "8", "40")
@pytest.mark.parametrize("room", [0, 8, 40, 80])
def test_no_more_is_fetched_ahead_than_keeps_the_link_busy(room):
    sizes = {i: 1 for i in range(19)}
    makes = (*((i,) for i in sizes), ())
    workload = decoder(deferred=True, activations=sizes, makes=makes, reads=((), *makes[:-1]))
    schedule = find_schedule(workload, find_schedule(workload, None).smallest_bytes + room)
    fetched: list[int] = []
    between = []
    for instruction in schedule.steady:
        if instruction.op is Op.FETCH and instruction.key:
            fetched.append(workload.size(instruction.key))
        elif instruction.op is Op.BACKWARD:
            between.append(sum(fetched[:-1]))  # the last may be larger and is due later
            fetched = []
    # The head's state leaves and makes room for many blocks, but while a block's backward computes
    # the link brings 12 bytes. What the next one needs, 4 and 1, has to come in any case.
    assert max(between[1:]) <= 12 + 4 + 1


@pytest.mark.by_default("False")
@pytest.mark.parametrize("deferred", [False, True])
def test_a_larger_budget_is_faster(deferred):
    workload = decoder(deferred=deferred)
    smallest = find_schedule(workload, None)
    room = all_resident_bytes(workload) - smallest.smallest_bytes
    budgets = [smallest.smallest_bytes + room * share // 4 for share in range(5)]
    schedules = [find_schedule(workload, budget) for budget in budgets]
    seconds = [schedule.seconds for schedule in schedules]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    moved = [bytes_moved(workload, schedule, Op.FETCH) for schedule in schedules]
    assert moved == sorted(moved, reverse=True) and not moved[-1]
    for schedule in schedules:
        run_everything(workload, schedule)


def _clock_with_disk(read: float, written: float, shared: float = 0.0) -> Clock:
    disk = DiskLink(read=read, written=written, shared=shared)
    rates = Costs(forward=(), backward=(), update=(), link=host(1.0), disk=disk)
    return Clock(costs=rates, on_disk={Key(Kind.MASTERS, g): 0 for g in range(4)})


def test_parts_on_a_disk_are_read_before_they_are_copied():
    """The worked example of the clock."""
    clock = _clock_with_disk(2.0, 1.0)
    for group in range(3):
        clock.fetch(Key(Kind.MASTERS, group), 4)
    clock.fetch(Key(Kind.MASTERS, 4), 4)  # in memory; it passes those that are being read
    arrived = [clock.arrived[Key(Kind.MASTERS, group)] for group in (0, 1, 2, 4)]
    assert arrived == [12, 20, 28, 16]


def test_a_read_waits_for_a_slot_and_for_the_write_before_it():
    clock = _clock_with_disk(0.5, 3.0)
    keys = [Key(Kind.MASTERS, group) for group in range(3)]
    for key in keys:  # read until 2, 4 and, as the third one's slot is free at 6, 8
        clock.fetch(key, 4)
    assert [clock.arrived[key] for key in keys] == [6, 10, 14]
    assert clock.read == 8
    clock.compute(tuple(keys), 6.0, 0)  # until 20
    for key in keys:  # landed at 24 and 28, written at 36 and 48; the third waits until 36
        clock.offload(key, 4, 0)
    assert (clock.driver, clock.landed[0, keys[2]]) == (36, 40)
    clock.fetch(keys[0], 4)  # its newest version is on the disk from 36 on
    assert clock.arrived[keys[0]] == 42


def test_a_step_that_follows_changes_no_time_of_the_one_before():
    """A search goes on from one clock in several ways."""
    clock = _clock_with_disk(0.5, 3.0)
    first, *others = [Key(Kind.MASTERS, group) for group in range(4)]

    def go_on(clock: Clock, key: Key) -> None:
        clock.fetch(key, 4)
        clock.compute((), 6.0, 0)
        clock.offload(key, 4, 0)

    go_on(clock, first)
    before = copy.deepcopy(clock)
    after = clock.next_step(1)
    for key in others:
        go_on(after, key)
    after.wait(0)
    after.land(0, first)
    assert clock == before != after


def test_a_disk_moves_both_ways_together_at_a_rate_of_its_own():
    clock = _clock_with_disk(1.0, 1.0, shared=0.75)
    keys = [Key(Kind.MASTERS, group) for group in range(4)]
    clock.fetch(keys[0], 4)  # read from 0 to 4, alone
    clock.compute((keys[0],), 0.0, 0)  # until 8, when it is on the device
    clock.offload(keys[0], 4, 0)  # in memory at 12, written until 16, while nothing is read
    clock.fetch(keys[1], 4)  # runs ahead of that: from 4 to 9, by 12 bytes both ways
    assert (clock.written, clock.read) == (16, 9)
    clock = replace(_clock_with_disk(1.0, 1.0, shared=0.75), read=100.0, written=100.0)
    clock.offload(keys[0], 4, 0)
    clock.fetch(keys[1], 4)  # what was not done until 100 helps nobody
    assert (clock.written, clock.read) == (104, 106)


def test_a_slow_disk_bounds_a_step_and_a_fast_one_costs_nothing():
    busy = costs(20, 20, forward=(0.1,) * 20, backward=(0.3,) * 20)
    memory = decoder(deferred=True, costs=busy)
    state = {Key(Kind.OPTIMIZER_STATE, group): 0 for group in range(1, 19)}

    def seconds(read: float, written: float, shared: float = 0.0) -> float:
        disk = DiskLink(read=read, written=written, shared=shared)
        workload = replace(memory, on_disk=state, costs=replace(busy, disk=disk))
        schedule = find_schedule(workload, None)
        run_everything(workload, schedule)
        return schedule.seconds

    in_memory = find_schedule(memory, None).seconds
    num_bytes = sum(map(memory.size, state))
    assert seconds(1e-3, 1e-3) == pytest.approx(in_memory, rel=0.02)
    for rates in ((10.0, 1e-3), (1e-3, 10.0), (1e-3, 1e-3, 5.0)):
        assert 10 * num_bytes <= seconds(*rates) < 1.1 * (10 * num_bytes) + in_memory
