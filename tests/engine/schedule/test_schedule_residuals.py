"""Residuals in a schedule: which stages save them, and where they wait."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.schedule import search
from megatrain_jax._src.engine.schedule.choices import Choice, Family
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.memory_demand import least_bytes_with_residuals
from megatrain_jax._src.engine.schedule.search import find_schedule, whole_schedule
from schedule_machine import run_everything
from workloads import COPIES, all_resident_bytes, chain, costs, host, random_workload


@pytest.mark.by_default("False")
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


def test_residuals_are_kept_before_state_where_computation_hides_copies():
    """They save 3% for certain; fewer copies save less, even if links are slower."""
    num, size = 12, 8
    workload = chain(
        num,
        residuals=(*((size,) * (num - 1)), 0),
        costs=costs(
            num, num, forward=(10.0,) * num, backward=(40.0,) * num, recompute=(1.5,) * num
        ),
    )
    least = find_schedule(workload, None)
    for room in range(0, 60, 12):
        schedule = find_schedule(workload, least.smallest_bytes + num * size + room)
        assert schedule.seconds <= 1.005 * (least.seconds - 1.5 * (num - 1))


@pytest.mark.exhaustive
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
        workload = replace(plain, costs=slow, may_offload_residuals=True)
        smallest = find_schedule(workload, None).smallest_bytes
        for budget in (smallest + 10, smallest * 5 // 4, smallest * 3 // 2):
            schedule = find_schedule(workload, budget, replace(workload, selective=True))
            run_everything(workload, schedule)
            moved = {i.key.kind for i in schedule.steady if i.op in COPIES and i.key}
            travelled += Kind.RESIDUALS in moved
            stays = find_schedule(replace(workload, may_offload_residuals=False), budget)
            assert schedule.seconds <= 1.03 * stays.seconds
    assert travelled > 5


def test_residuals_of_stages_that_are_no_neighbours_wait_in_the_host_where_few_can_stay():
    num, size = 33, 20
    # A stage's residuals arrive while the stage after it computes, and no sooner.
    workload = chain(
        num,
        residuals=(*((size,) * (num - 1)), 0),
        may_offload_residuals=True,
        costs=costs(
            num,
            num,
            forward=(4.0,) * num,
            backward=(12.0,) * num,
            recompute=(3.0,) * num,
            link=host(0.1),
        ),
    )
    budget = find_schedule(workload, None).smallest_bytes + size
    schedule = find_schedule(workload, budget)
    run_everything(workload, schedule)
    stays = find_schedule(replace(workload, may_offload_residuals=False), budget)
    assert len(stays.kept) <= 1 and len(schedule.kept) >= num // 4
    assert schedule.seconds <= stays.seconds - 2.0 * len(schedule.kept)
    # Neighbours' residuals would be on the device together.
    assert all(stage + 1 not in schedule.kept for stage in schedule.kept)
    left = {i.key for i in schedule.steady if i.op is Op.OFFLOAD and i.key}
    assert {key.owner for key in left if key.kind is Kind.RESIDUALS} == schedule.kept


@pytest.mark.by_default("1")
@pytest.mark.parametrize(
    "seeds",
    [(107,), (62, 74, 80, 120), pytest.param(range(400), marks=pytest.mark.long)],
    ids=["1", "4", "400"],
)
def test_waves_keep_no_more_residuals_on_the_device_than_fit(seeds):
    """Of two choices that were tried, the larger one may let its residuals wait in the host."""
    for seed in seeds:
        rng = random.Random(seed)
        num, size = rng.randint(6, 34), rng.choice([5, 10, 20, 40, 80])
        workload = chain(
            num,
            residuals=(*((size,) * (num - 1)), 0),
            may_offload_residuals=True,
            accumulate=True,
            waves=rng.choice([2, 3, 4]),
            costs=costs(num, num, recompute=(3.0,) * num, link=host(10 ** rng.uniform(-2.5, 0))),
        )
        smallest = find_schedule(workload, None).smallest_bytes
        budget = smallest + rng.choice([0, 1, 2, 3, 5]) * size + rng.randint(0, size)
        saved = tuple(n // 2 for n in workload.residuals)
        selective = rng.choice([None, replace(workload, residuals=saved, selective=True)])
        schedule = find_schedule(workload, budget, selective)
        assert schedule.peak_bytes <= budget
        workload = selective if selective and schedule.selective else workload
        run_everything(workload, whole_schedule(workload, schedule))


def test_no_more_residuals_wait_in_the_host_than_may_beside_those_that_the_device_holds():
    num, size = 10, 100
    every = chain(
        num,
        residuals=(*(10 * size,) * (num - 1), 0),
        may_offload_residuals=True,
        costs=costs(num, num, recompute=(8.0,) * num, link=host(1e-6)),
    )
    selective = replace(every, residuals=(*(size,) * (num - 1), 0), selective=True)
    smallest = find_schedule(every, None)
    for most in range(num - 3):
        room = smallest.transient_bytes + most * size
        schedule = find_schedule(every, smallest.smallest_bytes + 3 * size, selective, room)
        run_everything(selective, schedule)
        left = {i.key for i in schedule.steady if i.op is Op.OFFLOAD and i.key}
        waiting = {key.owner for key in left if key.kind is Kind.RESIDUALS}
        # The last stages' stay, as they are needed for the shortest time.
        kept = range(num - 1 - 3 - most, num - 1)
        assert schedule.kept == set(kept) and waiting == set(kept[:-3])


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize(("seconds_per_byte", "travels"), [(1e-4, True), (0.05, False)])
def test_residuals_that_save_little_travel_where_the_link_hardly_has_other_work(
    seconds_per_byte, travels, accumulate
):
    num, size = 10, 100
    every = chain(
        num,
        residuals=(*(10 * size,) * (num - 1), 0),
        may_offload_residuals=True,
        accumulate=accumulate,
        # Less in all than rates can tell where the link matters.
        costs=costs(num, num, recompute=(0.3,) * num, link=host(seconds_per_byte)),
    )
    selective = replace(every, residuals=(*(size,) * (num - 1), 0), selective=True)
    schedule = find_schedule(every, find_schedule(every, None).smallest_bytes + 3 * size, selective)
    left = {i.key for i in schedule.steady if i.op is Op.OFFLOAD and i.key}
    assert any(key.kind is Kind.RESIDUALS for key in left) == travels
    assert len(schedule.kept) == num - 1 or not travels
    run_everything(selective if schedule.selective else every, schedule)


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
    selective = replace(
        workload,
        residuals=(*((3,) * (num - 1)), 0),
        costs=costs(num, num, recompute=(3.0,) * num),
        selective=True,
    )
    most, found = all_resident_bytes(workload), []
    for room in range(0, 130, 8):
        schedule = find_schedule(workload, most + room, selective)
        every = find_schedule(workload, most + room)
        assert schedule.seconds <= 1.03 * every.seconds
        assert not schedule.selective or len(every.kept) < num - 1
        run_everything(selective if schedule.selective else workload, schedule)
        # Three quarters of the time in a tenth of the bytes: four such save as much as three full.
        expected = min(room // 3, num - 1) * 3.0, min(room // 30, num - 1) * 4.0
        saved = find_schedule(workload, most).seconds - schedule.seconds
        assert saved >= max(expected) - 0.03 * every.seconds
        found.append(schedule.selective)
    assert any(found) and not found[-1], "lean ones are for where not all have room"
    assert not find_schedule(workload, None, selective).kept


@pytest.mark.parametrize("best", [23, 24, 26, 28])
def test_as_many_stages_save_residuals_as_pay(best, monkeypatch):
    """Of 23, 29 and 35 stages, 23 are the best; their neighbours are tried as well."""
    step = chain(40, costs=costs(40, 40, recompute=(5.0,) * 40))

    def tried(found: search._Search, choice: Choice) -> tuple[float, float]:
        kept = len(choice.kept)
        seconds = choice.computing if kept <= best else 1000.0 + kept
        steps: Any = SimpleNamespace(
            cautious_seconds=seconds, fits_host=lambda room: True, kept=kept
        )
        return found.note(choice, steps)

    monkeypatch.setattr(search._Search, "try_choice", tried)
    found = search._Search(search._Room(device=0, host=math.inf))
    family = Family(
        of=lambda count: Choice(step=step, kept=frozenset(range(count))), counts=[35, 29, 23]
    )
    found.try_families([family])
    assert found.best.kept == best  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("seed", range(4))
def test_the_memory_for_residuals_is_known_without_the_tasks_that_save_them(seed):
    rng, num = random.Random(seed), 12
    waves = dict(accumulate=True, waves=2) if seed % 2 else {}
    sizes = (*(rng.randint(5, 60) for _ in range(num - 1)), 0)
    times = costs(num, num, recompute=(1.0,) * num)
    workload = chain(num, residuals=sizes, costs=times, **waves)
    lists = Choice(step=workload).lists
    for count in range(1, num):
        kept = sorted(rng.sample(range(num - 1), count), reverse=True)
        num_moving = rng.randint(0, count)
        choice = Choice(step=workload, kept=frozenset(kept), num_offloadable=num_moving)
        parts = kept[: count - num_moving], kept[count - num_moving :]
        staying, moving = ({stage: sizes[stage] for stage in part} for part in parts)
        found = least_bytes_with_residuals(lists, frozenset(), staying, moving)
        assert found == choice.least_bytes(0)
