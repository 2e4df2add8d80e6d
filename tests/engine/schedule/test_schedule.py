"""Schedules of random workloads on a small machine that does what an engine does."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.engine.schedule.clock import Clock
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.memory_demand import least_of
from megatrain_jax._src.engine.schedule.residency import Residency
from megatrain_jax._src.engine.schedule.search import find_schedule, whole_schedule
from megatrain_jax._src.engine.schedule.tasks import build_task_lists
from megatrain_jax._src.engine.schedule.timed_steps import write_steps
from schedule_machine import run_everything
from workloads import (
    COPIES,
    LISTS,
    WAITS,
    all_resident_bytes,
    bytes_moved,
    chain,
    computing,
    costs,
    host,
    random_workload,
    spell,
)


@pytest.mark.by_default("1", "2", "4", "7", "8", "11")
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


@pytest.mark.by_default("1", "3", "4", "8", "10")
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
    workload, num_left = random_workload(211), 0
    smallest = find_schedule(workload, None).smallest_bytes
    for budget in (smallest, smallest + 5, smallest + 15, smallest + 30):
        schedule = find_schedule(workload, budget)
        run_everything(workload, schedule)
        lists = build_task_lists(replace(workload, kept=schedule.kept))
        steps = write_steps(lists, schedule.limit, schedule.resident)
        num_left += len(steps.cold.dirty - steps.steady.dirty)
    assert num_left


@pytest.mark.parametrize("way", ["inward", "shared"])
def test_state_may_arrive_late_where_its_stage_computes_for_long_enough(way):
    def early(seconds: float) -> set[Kind]:
        link = replace(host(0.01), **{way: seconds})
        task = build_task_lists(chain(3, costs=costs(3, 3, link=link))).steady[-1]
        return {use.key.kind for use in task.uses[: task.num_early]}

    # A backward takes 12 seconds, and the state of a block 8 bytes.
    assert early(1.4) == {Kind.MASTERS}
    assert early(1.6) == {Kind.MASTERS, Kind.OPTIMIZER_STATE}


def test_each_wave_has_its_part_of_bytes_and_seconds():
    sizes = {"activations": {0: 40}, "makes": ((0,), ()), "reads": ((), (0,))}
    whole = chain(2, **sizes, residuals=(80, 0), accumulate=True)
    wave = whole.in_waves(4)
    assert wave.activations == {0: 10} and wave.residuals == (20, 0)
    assert wave.costs.forward == (1.0, 1.0) and wave.costs.backward == (3.0, 3.0)
    assert wave.costs.update == whole.costs.update and wave.sizes == whole.sizes
    assert wave.in_waves(1) == whole


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
            assert not both.is_covered_by(replace(both, dirty=both.dirty - {key}))
        for step in (one, other):
            assert step.is_covered_by(both)
            assert both.is_covered_by(step) == (
                (both.dirty, both.used, both.leaving) == (step.dirty, step.used, step.leaving)
            )


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


def test_coming_to_rest_fetches_no_resident_that_is_due():
    whole = find_schedule(chain(30, deferred=True), 10**9)
    assert not any(word.startswith("FETCH") for word in spell(whole.flush))


@pytest.mark.by_default("0.3")
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


@pytest.mark.parametrize(("seed", "budget"), [(207, 425), (222, 232), (248, 365)])
def test_what_waits_on_the_device_while_it_comes_to_rest_fits_beside_what_that_needs(seed, budget):
    workload = random_workload(seed)
    schedule = find_schedule(workload, budget)
    lists = build_task_lists(replace(workload, kept=schedule.kept))
    steps = write_steps(lists, schedule.limit, schedule.resident)
    left = {i.key for i in steps.flush.instructions if i.task == -1}
    uses = [use.key for task in lists.flush for use in task.uses]
    soon = set(itertools.takewhile(steps.end.present.__contains__, uses))
    late = steps.end.present - left - soon
    assert late and left
    assert sum(map(lists.workload.size, late)) <= steps.limit - least_of(
        lists.workload, lists.flush
    )
