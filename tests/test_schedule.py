"""The schedule, by hand and against a small machine that does what an engine does."""

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.schedule import search
from megatrain_jax._src.schedule.clock import Clock
from megatrain_jax._src.schedule.instructions import Op
from megatrain_jax._src.schedule.least_time import least_seconds
from megatrain_jax._src.schedule.passing import least_passing_bytes
from megatrain_jax._src.schedule.residency import Residency
from megatrain_jax._src.schedule.search import BudgetError, Schedule, find_schedule, whole_schedule
from megatrain_jax._src.schedule.tasks import build_task_lists
from megatrain_jax._src.schedule.workload import Costs, Link, Workload
from schedule_machine import run_everything
from workloads import (
    COPIES,
    MOVES,
    WAITS,
    all_resident_bytes,
    chain,
    computing,
    costs,
    decoder,
    host,
    random_workload,
    spell,
)

LISTS = ("cold", "steady", "flush", "evaluation")


@pytest.mark.parametrize(
    "seed",
    [seed if seed < 25 else pytest.param(seed, marks=pytest.mark.long) for seed in range(100)],
)
def test_every_budget_computes_the_same_on_current_data(seed):
    workload = random_workload(seed)
    smallest = find_schedule(workload, None)
    assert smallest.peak_bytes <= smallest.smallest_bytes
    run_everything(workload, smallest)
    most = max(smallest.smallest_bytes, all_resident_bytes(workload))
    with_residuals = most + 2 * sum(workload.residuals)
    between = random.Random(seed).choices(range(smallest.smallest_bytes, with_residuals + 1), k=2)
    middle = (smallest.smallest_bytes + most) // 2
    for budget in (smallest.smallest_bytes, *between, middle, most, with_residuals):
        schedule = find_schedule(workload, budget)
        assert max(max(ledger, default=0) for ledger in schedule.ledger.values()) <= budget
        assert schedule.peak_bytes <= budget
        run_everything(workload, schedule)
        for name in LISTS:
            assert computing(getattr(schedule, name)) == computing(getattr(smallest, name))


@pytest.mark.parametrize(
    "seed",
    [seed if seed < 20 else pytest.param(seed, marks=pytest.mark.long) for seed in range(100)],
)
def test_waves_compute_the_same_on_current_data(seed):
    """Also with more waves than a search for a schedule lays down."""
    waves = (2, 3, 5, 6)[seed % 4]
    workload = replace(random_workload(seed), accumulate=True, waves=waves)
    smallest, orders = find_schedule(workload, None), {}
    assert smallest.peak_bytes <= smallest.smallest_bytes
    run_everything(workload, whole_schedule(workload, smallest))
    most = max(smallest.smallest_bytes, all_resident_bytes(workload))
    with_residuals = most + 2 * sum(workload.residuals)
    between = random.Random(seed).choices(range(smallest.smallest_bytes, with_residuals + 1), k=2)
    for budget in (smallest.smallest_bytes, *between, most, with_residuals):
        schedule = find_schedule(workload, budget)
        assert schedule.peak_bytes <= budget
        assert schedule.left_out == max(0, waves - 3)
        schedule = whole_schedule(workload, schedule)
        assert schedule.peak_bytes <= budget
        run_everything(workload, schedule)
        every = orders.setdefault(LISTS, tuple(computing(getattr(schedule, n)) for n in LISTS))
        assert every == tuple(computing(getattr(schedule, n)) for n in LISTS)


def test_a_first_step_may_leave_a_changed_part_that_later_steps_leave_as_the_host_has_it():
    """By the clock, later steps have the time to offload it and to fetch it again."""
    workload = random_workload(211)
    smallest = find_schedule(workload, None).smallest_bytes
    for budget in (smallest, smallest + 5, smallest + 15, smallest + 30):
        run_everything(workload, find_schedule(workload, budget))


def test_instructions_that_serve_after_two_steps_count_what_either_has_left():
    rng = random.Random(0)
    workload = chain(4)
    keys = [Key(kind, group) for kind in LASTING for group in range(4)]

    def left(present: set[Key]) -> Residency:
        tasks = rng.sample(range(-4, 0), 2)
        return Residency(
            workload=workload,
            limit=100,
            resident=frozenset(),
            clock=Clock(costs=workload.costs),
            present=set(present),
            dirty={key for key in present if rng.random() < 0.5},
            used={task: rng.randint(1, 9) for task in tasks},
            leaving={(task, rng.choice(keys)): rng.randint(1, 9) for task in tasks},
        )

    for _ in range(50):
        present = set(rng.sample(keys, 4))
        one, other = left(present), left(present)
        both = one.joined(other)
        assert both.present == present and both.dirty == one.dirty | other.dirty
        assert both.clock is other.clock
        assert both.used == dict(Counter(one.used) | Counter(other.used))
        assert both.leaving == dict(Counter(one.leaving) | Counter(other.leaving))
        held = sum(map(workload.size, present))
        assert both.num_bytes == held + sum(both.used.values()) + sum(both.leaving.values())
        for key in both.dirty:
            assert not both.holds_no_more_than(replace(both, dirty=both.dirty - {key}))
        for step in (one, other):
            assert step.holds_no_more_than(both)
            assert both.holds_no_more_than(step) == (
                (both.dirty, both.used, both.leaving) == (step.dirty, step.used, step.leaving)
            )


@pytest.mark.parametrize("deferred", [False, True])
def test_residuals_are_kept_where_they_save_time_and_fit(deferred):
    num, size = 9, 10
    workload = chain(
        num,
        deferred=deferred,
        residuals=(*((size,) * (num - 1)), 0),
        costs=costs(num, num, recompute=(4.0,) * num, link=host(10.0)),
    )
    all_resident = all_resident_bytes(workload)
    assert not find_schedule(workload, None).kept
    seconds = []
    for count in range(num + 2):
        schedule = find_schedule(workload, all_resident + count * size)
        seconds.append(schedule.seconds)
        assert len(schedule.kept) == min(count, num - 1)
        # Of equal stages the last ones: theirs are needed for the shortest time.
        assert schedule.kept == frozenset(range(num - 1 - len(schedule.kept), num - 1))
        assert schedule.seconds == seconds[0] - 4.0 * len(schedule.kept)
        run_everything(workload, schedule)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    "seeds", [range(40, 60), pytest.param(range(60), marks=pytest.mark.long)], ids=["20", "60"]
)
def test_residuals_wait_in_the_host_where_that_saves_time(seeds):
    travelled = 0
    for seed in seeds:
        plain = random_workload(seed)
        # What is computed again takes long, and the link is fast.
        saved = tuple(0.9 * seconds + 1.0 for seconds in plain.costs.backward)
        slow = replace(plain.costs, recompute=saved, link=host(1e-4))
        workload = replace(plain, costs=slow, may_travel=True)
        smallest = find_schedule(workload, None).smallest_bytes
        for budget in (smallest + 10, smallest * 5 // 4, smallest * 3 // 2):
            schedule = find_schedule(workload, budget, replace(workload, lean=True))
            run_everything(workload, schedule)
            moved = {i.key.kind for i in schedule.steady if i.op in COPIES and i.key}
            travelled += Kind.RESIDUALS in moved
            stays = find_schedule(replace(workload, may_travel=False), budget)
            assert schedule.seconds <= 1.03 * stays.seconds
    assert travelled > 5


def test_no_more_residuals_wait_in_the_host_than_may_beside_those_that_the_device_holds():
    num, size = 10, 100
    every = chain(
        num,
        residuals=(*(10 * size,) * (num - 1), 0),
        may_travel=True,
        costs=costs(num, num, recompute=(8.0,) * num, link=host(1e-6)),
    )
    lean = replace(every, residuals=(*(size,) * (num - 1), 0), lean=True)
    smallest = find_schedule(every, None)
    for most in range(num - 3):
        room = smallest.passing_bytes + most * size
        schedule = find_schedule(every, smallest.smallest_bytes + 3 * size, lean, room)
        run_everything(lean, schedule)
        left = {i.key for i in schedule.steady if i.op is Op.OFFLOAD and i.key}
        waiting = {key.owner for key in left if key.kind is Kind.RESIDUALS}
        # The last stages' stay, as they are needed for the shortest time.
        kept = range(num - 1 - 3 - most, num - 1)
        assert schedule.kept == set(kept) and waiting == set(kept[:-3])


@pytest.mark.parametrize(("seconds_per_byte", "travels"), [(1e-4, True), (0.05, False)])
def test_residuals_that_save_little_travel_where_the_link_hardly_has_other_work(
    seconds_per_byte, travels
):
    num, size = 10, 100
    every = chain(
        num,
        residuals=(*(10 * size,) * (num - 1), 0),
        may_travel=True,
        # Less in all than rates can tell where the link matters.
        costs=costs(num, num, recompute=(0.3,) * num, link=host(seconds_per_byte)),
    )
    lean = replace(every, residuals=(*(size,) * (num - 1), 0), lean=True)
    schedule = find_schedule(every, find_schedule(every, None).smallest_bytes + 3 * size, lean)
    left = {i.key for i in schedule.steady if i.op is Op.OFFLOAD and i.key}
    assert any(key.kind is Kind.RESIDUALS for key in left) == travels
    assert len(schedule.kept) == num - 1 or not travels
    run_everything(lean if schedule.lean else every, schedule)


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 150), marks=pytest.mark.long)], ids=["30", "150"]
)
def test_the_fastest_steps_are_taken_for_which_the_host_has_room(seeds):
    slower = 0
    for seed in seeds:
        plain, rng = random_workload(seed), random.Random(seed)
        saved = tuple(0.9 * seconds + 1.0 for seconds in plain.costs.backward)
        workload = replace(plain, costs=replace(plain.costs, recompute=saved))
        lean = replace(workload, residuals=tuple(n // 2 for n in plain.residuals), lean=True)
        smallest = find_schedule(workload, None).smallest_bytes
        made = workload, round(smallest * rng.uniform(1, 2)), lean
        fastest, least = find_schedule(*made), find_schedule(*made, host_room=0)
        assert find_schedule(*made, host_room=fastest.passing_bytes) == fastest
        room = rng.randint(least.passing_bytes, max(least.passing_bytes, fastest.passing_bytes))
        found = find_schedule(*made, host_room=room)
        assert least.passing_bytes <= found.passing_bytes <= room
        # Of steps that are about as fast, the one that moves least is taken.
        assert found.seconds <= 1.03 * least.seconds and fastest.seconds <= 1.03 * found.seconds
        slower += found.seconds > 1.03 * fastest.seconds
        for schedule in (least, found):
            run_everything(lean if schedule.lean else workload, schedule)
    assert slower > 2


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 400), marks=pytest.mark.long)], ids=["60", "400"]
)
def test_no_schedule_takes_less_of_the_host_than_is_known_without_one(seeds):
    for seed in seeds:
        plain, rng = random_workload(seed), random.Random(seed)
        if (waves := (1, 2, 5)[seed % 3]) > 1:
            plain = replace(plain, accumulate=True, waves=waves)
        workload = replace(plain, may_travel=bool(seed % 2))
        lean = replace(workload, residuals=tuple(n // 2 for n in plain.residuals), lean=True)
        smallest = find_schedule(workload, None).smallest_bytes
        budget = round(smallest * rng.uniform(1, 2))
        least = least_passing_bytes(build_task_lists(workload), budget)
        for room in (0, math.inf):
            found = find_schedule(workload, budget, lean, room)
            assert 0 <= least <= found.passing_bytes


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 60), marks=pytest.mark.long)], ids=["12", "60"]
)
def test_no_step_takes_less_time_than_its_bound(seeds):
    """The bound for the memory that the step needs, whatever it stores there."""
    for seed in seeds:
        workload = random_workload(seed)
        if workload.accumulate:
            workload = replace(workload, waves=1 + seed % 5)
        every = all_resident_bytes(replace(workload, waves=1))
        for budget in (None, every // 2, every, 10**9):
            for lean in (None, replace(workload, lean=True)):
                try:
                    step = find_schedule(workload, budget, lean)
                except BudgetError:
                    continue
                bound = least_seconds(workload, lean, step.peak_bytes, step.passing_bytes)
                assert bound <= step.seconds * (1 + 1e-9)
                assert least_seconds(workload, lean) <= bound


@pytest.mark.parametrize("seed", range(6))
def test_a_search_that_remembers_finds_the_same(seed):
    """For several rooms of the host, as when a run is fitted to it."""
    workload = random_workload(seed)
    lean = replace(workload, lean=True)
    budget = find_schedule(workload, None).smallest_bytes * 5 // 4

    def found() -> list[Any]:
        rooms = (math.inf, 40, 0)
        return [vars(find_schedule(workload, budget, lean, room)) for room in rooms]

    with remembering():
        remembered = found()
    assert remembered == found()


@pytest.mark.parametrize("share", [1.0, 1.3, 2.0, 3.0])
def test_of_equal_blocks_it_is_known_without_a_schedule_how_many_bytes_are_in_flight(share):
    workload = chain(20)
    budget = round(find_schedule(workload, None).smallest_bytes * share)
    least = least_passing_bytes(build_task_lists(workload), budget)
    assert least == find_schedule(workload, budget, host_room=0).passing_bytes == 36


def test_choices_that_compute_for_too_long_are_not_laid_down_and_would_not_be_taken(monkeypatch):
    one, laid_down = search._with_residents, []

    def noted(choice, budget):
        laid_down.append(choice)
        return one(choice, budget)

    def found(seed):
        plain = random_workload(seed)
        # Of some it is so little that what moves less is taken.
        share = 0.9 if seed % 2 else 0.05
        saved = tuple(share * seconds for seconds in plain.costs.backward)
        workload = replace(plain, costs=replace(plain.costs, recompute=saved))
        budget = 2 * find_schedule(workload, None).smallest_bytes
        return find_schedule(workload, budget, replace(workload, lean=True))

    def all_of_them(choices, budget):
        return [noted(choice, budget) for choice in choices]

    monkeypatch.setattr(search, "_with_residents", noted)
    some, num_some = [found(seed) for seed in range(60)], len(laid_down)
    monkeypatch.setattr(search, "_worth_trying", all_of_them)
    assert [found(seed) for seed in range(60)] == some
    assert num_some < 0.9 * (len(laid_down) - num_some)


def test_what_saves_the_most_for_its_bytes_is_kept_first():
    workload = chain(
        4,
        residuals=(10, 10, 5, 0),
        costs=costs(4, 4, recompute=(4.0, 5.0, 1.0, 0.0)),
    )
    most = all_resident_bytes(workload)
    found = {find_schedule(workload, most + room).kept for room in range(0, 40)}
    assert found == {frozenset(), frozenset({1}), frozenset({0, 1}), frozenset({0, 1, 2})}


def test_the_costliest_residuals_are_kept_where_all_have_no_room():
    num = 5
    all_of = {"residuals": (*((30,) * (num - 1)), 0)}
    workload = chain(num, **all_of, costs=costs(num, num, recompute=(4.0,) * num))
    lean = replace(
        workload,
        residuals=(*((3,) * (num - 1)), 0),
        costs=costs(num, num, recompute=(3.0,) * num),
        lean=True,
    )
    most, found = all_resident_bytes(workload), []
    for room in range(0, 130, 8):
        schedule = find_schedule(workload, most + room, lean)
        every = find_schedule(workload, most + room)
        assert schedule.seconds <= 1.03 * every.seconds
        assert not schedule.lean or len(every.kept) < num - 1
        run_everything(lean if schedule.lean else workload, schedule)
        # Three quarters of the time in a tenth of the bytes: four such save as much as three full.
        expected = min(room // 3, num - 1) * 3.0, min(room // 30, num - 1) * 4.0
        saved = find_schedule(workload, most).seconds - schedule.seconds
        assert saved >= max(expected) - 0.03 * every.seconds
        found.append(schedule.lean)
    assert any(found) and not found[-1], "lean ones are for where not all have room"
    assert not find_schedule(workload, None, lean).kept


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


@pytest.mark.parametrize("seed", range(30))
def test_nothing_moves_once_everything_is_resident(seed):
    workload = random_workload(seed)
    without = find_schedule(replace(workload, residuals=()), 10**9)
    assert without.peak_bytes <= all_resident_bytes(workload)
    whole = find_schedule(workload, 10**9)
    assert not COPIES & {instruction.op for instruction in whole.steady}
    # It waits once for each task that consumes gradients or activations, and for no other.
    waits, consumers, last_read = [], set(), {}
    for instruction in whole.steady:
        assert instruction.task is not None
        if instruction.op in WAITS:
            waits.append(instruction.task % whole.num_tasks)
        elif instruction.op is Op.UPDATE and workload.size(
            Key(Kind.GRADIENT, instruction.group or 0)
        ):
            consumers.add(instruction.task)
        elif instruction.stage is not None:
            if instruction.op is Op.FORWARD and workload.makes:
                for i in workload.makes[instruction.stage]:
                    if i in last_read:  # made again, and dropped before
                        consumers.add(last_read[i])
                    last_read[i] = instruction.task
            last_read.update(dict.fromkeys(workload.reads[instruction.stage], instruction.task))
            if instruction.op is Op.BACKWARD and instruction.stage in whole.kept:
                consumers.add(instruction.task)
    assert sorted(waits) == sorted(consumers.union(last_read.values()))
    cold = [instruction for instruction in whole.cold if instruction.op is Op.FETCH]
    assert len(cold) == len({instruction.key for instruction in cold})


def test_immediate_step_by_hand():
    schedule = find_schedule(chain(4), None)
    assert schedule.num_tasks == 7 and schedule.smallest_bytes == 36
    forward = [
        *("WAIT -2", "FETCH M2", "FORWARD 0", "OFFLOAD M0"),
        *("WAIT -1", "LAND M1", "LAND O1", "FETCH M3", "FETCH O3", "FORWARD 1", "RELEASE M1"),
        *("FORWARD 2", "WAIT 1", "LAND O0", "FETCH O2"),
    ]
    backward = [
        *("BACKWARD 3", "COMBINE", "UPDATE 3", "OFFLOAD M3", "OFFLOAD O3"),
        *("LAND M0", "FETCH M1"),
        *("BACKWARD 2", "UPDATE 2", "OFFLOAD M2", "OFFLOAD O2"),
        *("WAIT 3", "LAND M3", "FETCH O1", "LAND O3", "FETCH M0"),
        *("BACKWARD 1", "UPDATE 1", "OFFLOAD M1", "OFFLOAD O1"),
        *("WAIT 4", "LAND M2", "FETCH O0", "LAND O2", "FETCH M1"),
        *("BACKWARD 0", "UPDATE 0", "OFFLOAD O0"),
    ]
    assert spell(schedule.steady) == [*forward, *backward]
    assert spell(schedule.flush) == [
        *("OFFLOAD M0", "RELEASE M1", "WAIT -2", "LAND M1", "LAND O1"),
        *("WAIT -1", "LAND O0", "LAND M0"),
    ]
    assert spell(schedule.evaluation) == [
        *("FETCH M0", "FETCH M1", "FORWARD 0", "RELEASE M0"),
        *("FETCH M2", "FETCH M3", "FORWARD 1", "RELEASE M1", "WAIT 0", "FORWARD 2", "RELEASE M2"),
        *("WAIT 1", "FORWARD 3", "RELEASE M3", "WAIT 2", "WAIT 3"),
    ]
    # From its start: M0, M1; G0 and G1 until they were used up; M1, O1 and O0 on their way out.
    assert schedule.ledger["steady"][:15] == (
        *(32, 36, 36, 36),
        *(32, 28, 20, 24, 32, 32, 32),
        *(32, 28, 20, 28),
    )
    assert schedule.ledger["flush"] == (36, 36, 32, 28, 20, 12, 4, 0)


def test_resident_step_by_hand():
    schedule = find_schedule(chain(2), 32)
    assert len(schedule.resident) == 4 and all_resident_bytes(chain(2)) == 32
    assert spell(schedule.steady) == [
        *("WAIT -2", "FORWARD 0", "WAIT -1", "BACKWARD 1", "COMBINE", "UPDATE 1"),
        *("BACKWARD 0", "UPDATE 0"),
    ]
    assert schedule.ledger["steady"] == (28, 28, 24, 28, 28, 28, 32, 32)


def test_deferred_step_by_hand():
    schedule = find_schedule(chain(4, deferred=True), None)
    assert spell(schedule.cold) == [
        *("FETCH M0", "FETCH M1", "FORWARD 0", "RELEASE M0", "FETCH M2", "FETCH M3", "FORWARD 1"),
        *("WAIT 0", "FETCH M0", "FORWARD 2", "FETCH O0", "FETCH O1"),
        *("BACKWARD 3", "RELEASE M3", "REDUCE 3", "OFFLOAD G3"),
        *("BACKWARD 2", "REDUCE 2", "OFFLOAD G2", "WAIT 3"),
        *("BACKWARD 1", "REDUCE 1", "BACKWARD 0", "REDUCE 0", "COMBINE"),
    ]
    steady = spell(schedule.steady)
    forward = steady[: steady.index("BACKWARD 3")]
    assert [word for word in forward if word.split()[0] in ("UPDATE", "FORWARD", "OFFLOAD")] == [
        *("UPDATE 0", "OFFLOAD O0", "FORWARD 0", "OFFLOAD M0"),
        *("UPDATE 1", "OFFLOAD O1", "FORWARD 1", "OFFLOAD M1"),
        *("UPDATE 2", "OFFLOAD O2", "FORWARD 2", "OFFLOAD M2"),
        *("UPDATE 3", "OFFLOAD O3"),
    ]
    # What the next forward updates first comes, or stays, while backward computes.
    backward = steady[steady.index("BACKWARD 3") :]
    assert {"FETCH O0", "FETCH O1"} <= set(backward) and "OFFLOAD G0" not in backward


def test_a_single_task_by_hand():
    workload = chain(1, deferred=True)
    schedule = find_schedule(workload, None)
    assert spell(schedule.cold) == ["FETCH M0", "FETCH O0", "BACKWARD 0", "REDUCE 0", "COMBINE"]
    assert spell(schedule.steady) == ["WAIT -2", "UPDATE 0", "BACKWARD 0", "REDUCE 0", "COMBINE"]
    assert spell(schedule.flush) == [
        *("WAIT -2", "UPDATE 0", "OFFLOAD M0", "OFFLOAD O0", "WAIT -1", "WAIT 0"),
        *("LAND M0", "LAND O0"),
    ]
    # At the end of a steady step: M, O, the new gradient and those of the last two updates.
    assert schedule.ledger["cold"] == (4, 12, 16, 16, 16)
    assert schedule.ledger["steady"] == (20, 20, 24, 24, 24)
    assert schedule.ledger["flush"] == (20, 20, 20, 20, 16, 12, 8, 0)
    for deferred in (False, True):
        single = replace(workload, deferred=deferred)
        run_everything(single, find_schedule(single, None))
        run_everything(single, find_schedule(single, 10**9))


def test_unused_groups_are_updated_with_zeros():
    workload = chain(2, stages=((0,),), backward=(True,))
    order = ["BACKWARD 0", "COMBINE", "UPDATE 0", "ZEROS 1", "UPDATE 1"]
    assert computing(find_schedule(workload, None).steady) == order
    deferred = find_schedule(replace(workload, deferred=True), None)
    order = ["BACKWARD 0", "REDUCE 0", "ZEROS 1", "REDUCE 1", "COMBINE"]
    assert computing(deferred.cold) == order
    assert computing(deferred.steady) == ["UPDATE 1", "UPDATE 0", *order]
    assert computing(deferred.flush) == ["UPDATE 1", "UPDATE 0"]


def test_microbatches_sum_into_zeros():
    tied = chain(2, stages=((0,), (1,), (0,)), backward=(True,) * 3, accumulate=True)
    assert computing(find_schedule(tied, None).steady) == [
        *("FORWARD 0", "FORWARD 1"),
        *("ZEROS 0", "BACKWARD 2", "ZEROS 1", "BACKWARD 1", "COMBINE", "UPDATE 1"),
        *("BACKWARD 0", "UPDATE 0"),
    ]


def test_waves_by_hand():
    workload = chain(2, accumulate=True, waves=2)
    first = ["FORWARD 0", "ZEROS 1", "BACKWARD 1", "ZEROS 0", "BACKWARD 0", "FORWARD 0"]
    last = ["BACKWARD 1", "COMBINE", "UPDATE 1", "BACKWARD 0", "UPDATE 0"]
    assert computing(find_schedule(workload, None).steady) == first + last
    deferred = find_schedule(replace(workload, deferred=True), None)
    assert computing(deferred.steady) == [
        *("UPDATE 0", "FORWARD 0", "UPDATE 1", "ZEROS 1", "BACKWARD 1", "ZEROS 0", "BACKWARD 0"),
        *("FORWARD 0", "BACKWARD 1", "REDUCE 1", "BACKWARD 0", "REDUCE 0", "COMBINE"),
    ]
    # Each wave fetches all masters; sums that leave between waves come again.
    words = spell(find_schedule(chain(6, accumulate=True, waves=2), None).cold)
    assert words.count("FETCH M3") > 2 and words.count("FETCH G3") == words.count("OFFLOAD G3") == 1


@pytest.mark.parametrize("deferred", [True, False])
def test_three_waves_tell_how_long_many_take(deferred):
    workload = decoder(accumulate=True, waves=12, deferred=deferred)
    least, most = find_schedule(workload, None).smallest_bytes, all_resident_bytes(workload)
    for budget in (least, (least + most) // 2, most):
        few = find_schedule(workload, budget)
        assert few.left_out == 9
        whole = whole_schedule(workload, few)
        assert not whole.left_out
        assert few.seconds == pytest.approx(whole.seconds, rel=0.02)
        assert few.passing_bytes == pytest.approx(whole.passing_bytes, rel=0.05)


def test_masters_stay_before_sums_and_these_before_optimizer_state():
    """A wave needs masters twice; optimizer state moves once a step."""
    workload = chain(8, accumulate=True, waves=4)
    least, most = find_schedule(workload, None).smallest_bytes, all_resident_bytes(workload)
    seen = set()
    for budget in range(least, most, 8):
        kinds = {key.kind for key in find_schedule(workload, budget).resident}
        assert Kind.OPTIMIZER_STATE not in kinds or Kind.GRADIENT in kinds
        assert Kind.GRADIENT not in kinds or Kind.MASTERS in kinds
        seen |= kinds
    assert len(seen) == 3


@pytest.mark.parametrize("deferred", [False, True])
def test_masters_stay_alone_where_a_step_waits_for_the_link(deferred):
    """Whole groups on the device would have the step fetch more."""
    quick = chain(8, deferred=deferred)
    none = (0.0,) * 8
    quick = replace(quick, costs=replace(quick.costs, forward=none, backward=none))
    least, most = find_schedule(quick, None).smallest_bytes, all_resident_bytes(quick)
    for budget in range(least + 16, most, 16):
        residents = find_schedule(quick, budget).resident
        masters = sum(key.kind is Kind.MASTERS for key in residents)
        assert masters == 8 or {key.kind for key in residents} <= {Kind.MASTERS}, budget


@pytest.mark.parametrize("deferred", [False, True])
def test_a_tied_gradient_travels_between_its_stages(deferred):
    tied = chain(8, stages=(*((group,) for group in range(8)), (0,)), deferred=deferred)
    words = spell(find_schedule(tied, None).cold)
    travel = ["BACKWARD 8", "OFFLOAD G0", "BACKWARD 7", "FETCH G0", "BACKWARD 1", "BACKWARD 0"]
    places = [words.index(word) for word in travel]
    assert places == sorted(places)
    assert words.index("UPDATE 0" if not deferred else "REDUCE 0") > places[-1]


@pytest.mark.parametrize("deferred", [False, True])
def test_activations_wait_in_the_host_for_their_backward(deferred):
    plain = {"activations": {i: 4 for i in range(7)}, "deferred": deferred}
    makes, reads = ((0,), (1,), (2,), (3,), (4,), (5,), (6,), ()), ((), *((i,) for i in range(7)))
    workload = chain(8, makes=makes, reads=reads, **plain)
    words = spell(find_schedule(workload, None).steady)
    travel = ["FORWARD 1", "OFFLOAD A0", "BACKWARD 7", "FETCH A0", "BACKWARD 1"]
    places = [words.index(word) for word in travel]
    assert places == sorted(places)
    # What backward needs first stays, and nothing is fetched for forward, which has just made it.
    assert "OFFLOAD A6" not in words
    # With updates in forward, too, room comes back too late for the one before it.
    assert deferred or "OFFLOAD A5" not in words
    assert all(words.count(f"FETCH A{i}") == words.count(f"OFFLOAD A{i}") <= 1 for i in range(7))
    evaluation = spell(find_schedule(workload, None).evaluation)
    assert not any(word.split()[-1].startswith("A") for word in evaluation)
    run_everything(workload, find_schedule(workload, None))


def test_parts_without_bytes_never_move():
    masters, gradient = {Kind.MASTERS: 4}, {Kind.GRADIENT: 4}
    none = {Kind.OPTIMIZER_STATE: 0}
    bare = chain(3, sizes=(masters | gradient, masters | none | gradient, masters))
    schedule = find_schedule(bare, None)
    moved = {r.key for name in LISTS for r in getattr(schedule, name) if r.key}
    assert moved == {Key(Kind.MASTERS, group) for group in range(3)}
    assert "UPDATE 2" in spell(schedule.steady)


def busy_seconds(workload: Workload) -> float:
    """Computing alone."""
    costs = workload.costs
    return sum(costs.forward) - costs.forward[-1] + sum(costs.backward) + sum(costs.update)


def bytes_moved(workload: Workload, schedule: Schedule, op: Op, when: str = "steady") -> int:
    return sum(workload.size(r.key) for r in getattr(schedule, when) if r.op is op and r.key)


def test_streaming_hides_behind_computing():
    # A backward takes as long as its block needs in either direction, the large ends four times.
    workload = decoder(costs=costs(20, 20, forward=(6.0,) * 20, backward=(18.0,) * 20))
    smallest = find_schedule(workload, None)
    assert smallest.seconds < 1.15 * busy_seconds(workload)
    roomier = find_schedule(workload, 2 * smallest.smallest_bytes)
    assert roomier.seconds == pytest.approx(busy_seconds(workload), rel=1e-9)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_bound_link_is_never_idle(deferred):
    workload = decoder(
        deferred=deferred, costs=costs(20, 20, forward=(0.1,) * 20, backward=(0.3,) * 20)
    )
    schedule = find_schedule(workload, None)
    busier = max(bytes_moved(workload, schedule, op) for op in (Op.FETCH, Op.OFFLOAD))
    assert busier <= schedule.seconds < 1.1 * busier


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


@pytest.mark.parametrize("deferred", [False, True])
def test_of_schedules_that_take_as_long_the_one_is_taken_that_moves_least(deferred):
    # Copies take no time worth mentioning, so that all schedules are as fast.
    workload = decoder(deferred=deferred, costs=costs(20, 20, link=host(1e-6)))
    smallest = find_schedule(workload, None)
    roomier = find_schedule(workload, all_resident_bytes(workload) - 1)
    assert roomier.seconds == pytest.approx(smallest.seconds, rel=1e-3)
    moved = [bytes_moved(workload, schedule, Op.FETCH) for schedule in (roomier, smallest)]
    assert moved[0] < moved[1] / 4


def test_coming_to_rest_fetches_no_resident_that_is_due():
    whole = find_schedule(chain(30, deferred=True), 10**9)
    assert not any(word.startswith("FETCH") for word in spell(whole.flush))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_coming_to_rest_takes_no_gradient_to_the_host_that_was_on_the_device(share):
    workload = chain(30, deferred=True)
    least = find_schedule(workload, None).smallest_bytes
    budget = int(least + share * (all_resident_bytes(workload) - least))
    schedule = find_schedule(workload, budget)
    left = [i.key for i in schedule.flush if i.op is Op.OFFLOAD and i.key]
    assert left and not any(key.kind is Kind.GRADIENT for key in left)
    # Nothing is fetched that the device had room to keep: what all updates use, less the budget,
    # and the room that two tasks and the start of the next one need.
    every = sum(sum(sizes.values()) for sizes in workload.sizes)
    assert bytes_moved(workload, schedule, Op.FETCH, "flush") <= every - (budget - least)


@pytest.mark.parametrize("room", [50, 120])
def test_coming_to_rest_keeps_gradients_rather_than_state(room):
    workload = random_workload(26)
    least = find_schedule(workload, None).smallest_bytes
    flush = find_schedule(workload, least + room).flush
    # A gradient that leaves takes host memory of its own; state has its place there.
    left = {i.key.kind for i in flush if i.op in (Op.OFFLOAD, Op.RELEASE) and i.key}
    assert left and Kind.GRADIENT not in left


class TwoTiers(Costs):
    """Optimizer state rests in another place than the rest, behind a link of its own."""

    def link_of(self, key: Key) -> Link:
        other = Link(name="other", inward=self.link.inward, outward=self.link.outward)
        return other if key.kind is Kind.OPTIMIZER_STATE else self.link


@pytest.mark.parametrize(("tiers", "seconds"), [(Costs, 20.0), (TwoTiers, 10.0)])
def test_the_lanes_of_two_links_work_side_by_side(tiers, seconds):
    keys = Key(Kind.MASTERS, 0), Key(Kind.OPTIMIZER_STATE, 0)
    clock = Clock(costs=tiers(forward=(), backward=(), update=(), link=host(1.0)))
    for key in keys:
        clock.fetch(key, 10)
    assert max(map(clock.inward_until, keys)) == seconds
    clock.compute(keys, 0.0, 0)
    for key in keys:
        clock.offload(key, 10, 0)
    for key in keys:
        clock.land(0, key)
    assert clock.driver == 2 * seconds


def test_a_second_link_relieves_the_first():
    busy = costs(20, 20, forward=(0.1,) * 20, backward=(0.3,) * 20)
    one = decoder(deferred=True, costs=busy)
    two = replace(one, costs=TwoTiers(**vars(busy)))
    schedules = [find_schedule(workload, None) for workload in (one, two)]
    assert schedules[1].seconds < 0.8 * schedules[0].seconds
    for workload, schedule in zip((one, two), schedules, strict=True):
        run_everything(workload, schedule)


def test_too_small_a_budget_names_the_smallest_that_works():
    workload = chain(4)
    smallest = find_schedule(workload, None).smallest_bytes
    said = rf'device_budget={smallest - 1} \(.*B\) .* is {smallest} .* Pass .*, "least", or None'
    with pytest.raises(ValueError, match=said):
        find_schedule(workload, smallest - 1)


def test_steps_that_compute_for_longer_are_not_taken_for_their_fewer_copies(monkeypatch):
    """Copies may be slower than estimated; then the steps with fewer of them are faster."""

    def steps(seconds: float, computing: float, moved: int) -> Any:
        return SimpleNamespace(
            seconds=seconds,
            lists=SimpleNamespace(computing=computing),
            workload=SimpleNamespace(kept=(), waves=2),
            moved=moved,
            fits_host=lambda room: True,
        )

    fewer, longer, slow = steps(102, 90, 40), steps(102.5, 99, 10), steps(104, 90, 20)
    made = [steps(100, 90, 50), fewer, longer, slow]
    monkeypatch.setattr(search, "copies", lambda steps: (steps.moved, steps.moved))
    room = search._Room(device=0, host=math.inf)
    assert search._best(made, room) is fewer
    # Saved copies of 40 seconds, estimated 5% too short, gain 2 seconds.
    worth_it = steps(101.9, 99, 10)
    assert search._best([*made, worth_it], room) is worth_it


@pytest.mark.parametrize("best", [23, 24, 26, 28])
def test_as_many_stages_save_residuals_as_pay(best, monkeypatch):
    """Of 23, 29 and 35 stages, 23 are the best; their neighbours are tried as well."""

    def steps(kept: int) -> Any:
        return SimpleNamespace(
            seconds=100.0 - kept if kept <= best else 200.0,
            lists=SimpleNamespace(computing=100.0 - kept),
            workload=SimpleNamespace(kept=range(kept), waves=2),
            fits_host=lambda room: True,
        )

    @dataclass(frozen=True)
    class Keeping:
        num_kept: int
        spares_host: bool = True

        @property
        def lists(self) -> Any:
            return SimpleNamespace(workload=SimpleNamespace(lean=False))

    monkeypatch.setattr(search, "copies", lambda steps: (0, 0.0))
    monkeypatch.setattr(search, "keeping_residuals", lambda workload, count: Keeping(count))
    monkeypatch.setattr(search, "_with_residents", lambda choice, room: steps(choice.num_kept))
    workload, room = SimpleNamespace(lean=False), search._Room(device=0, host=math.inf)
    tried = [Keeping(count) for count in (23, 29, 35)]
    found = search._with_more_kept(steps(23), workload, tried, room)  # type: ignore[arg-type]
    assert len(found.workload.kept) == best
