"""Schedules of small workloads, instruction by instruction."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.schedule.choices import Choice
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.schedule.tasks import _seconds
from megatrain_jax._src.engine.schedule.transient_host_bytes import in_flight_bytes
from megatrain_jax._src.engine.schedule.workload import Workload
from schedule_machine import run_everything
from workloads import LISTS, all_resident_bytes, chain, computing, spell


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


def test_the_ends_of_a_model_stay_on_the_device_first():
    units = Choice(step=chain(5)).units
    order = dict.fromkeys(key.owner for unit in units for key in unit if key.kind is Kind.MASTERS)
    assert list(order) == [0, 4, 1, 2, 3]


@pytest.mark.parametrize(("waves", "expected"), [(1, 8 * (4 + 3 + 2)), (2, 10 * (4 + 3) + 30)])
def test_the_three_largest_groups_are_in_flight_and_between_waves_sums_too(waves, expected):
    """The state of group 5 rests on a disk, but not its gradient."""
    each = {Kind.MASTERS: 3, Kind.OPTIMIZER_STATE: 5, Kind.GRADIENT: 10}
    keys = [Key(kind, group) for kind in each for group in range(1, 6)]
    on_disk = {key for key in keys if key.owner == 5 and key.kind is not Kind.GRADIENT}
    sizes = {key: each[key.kind] * (3 if key.owner == 5 else key.owner) for key in keys}
    workload: Any = SimpleNamespace(waves=waves, on_disk=on_disk, size=sizes.__getitem__)
    steady = [Instruction(op=Op.OFFLOAD, key=key, task=0) for key in keys]
    steady.append(Instruction(op=Op.FETCH, key=keys[0], task=0))
    assert in_flight_bytes(workload, steady) == expected


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_seconds_of_each_instruction(deferred, kept):
    """The first function that reads a gradient waits for its sum over machines."""
    costs = SimpleNamespace(
        forward=(1,), backward=(2,), update=(4,), reduce=(8,), summing=(16,), rounding=(32,),
        recompute=(64,),
    )  # fmt: skip
    workload: Any = SimpleNamespace(costs=costs, kept={0} if kept else set(), deferred=deferred)
    of_stage = {Op.FORWARD: 1, Op.BACKWARD: 2 + 32 - 64 * kept}
    of_group = {Op.UPDATE: 4 + 16 * (not deferred), Op.REDUCE: 8 + 16 * deferred, Op.ZEROS: 0}
    for op, seconds in of_stage.items():
        assert _seconds(workload, Instruction(op=op, stage=0)) == seconds
    for op, seconds in of_group.items():
        assert _seconds(workload, Instruction(op=op, group=0)) == seconds
    assert _seconds(workload, Instruction(op=Op.COMBINE)) == 0


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


@pytest.mark.parametrize(
    ("frozen", "backward", "expected"),
    [({}, (True, True), True), ({0}, (True, True), False), ({}, (True, False), False)],
)
def test_a_sum_is_shared_by_stages_with_gradients_of_one_group(frozen, backward, expected):
    for stages in (((0, 0), (1, 0)), ((0, 0), (1,))):
        workload: Any = SimpleNamespace(stages=stages, backward=backward, frozen=frozen)
        shared = Workload.has_shared_sums.fget(workload)  # type: ignore[attr-defined]
        assert shared == (expected and stages[1] == (1, 0))


def test_parts_without_bytes_never_move():
    masters, gradient = {Kind.MASTERS: 4}, {Kind.GRADIENT: 4}
    none = {Kind.OPTIMIZER_STATE: 0}
    bare = chain(3, sizes=(masters | gradient, masters | none | gradient, masters))
    schedule = find_schedule(bare, None)
    moved = {r.key for name in LISTS for r in getattr(schedule, name) if r.key}
    assert moved == {Key(Kind.MASTERS, group) for group in range(3)}
    assert "UPDATE 2" in spell(schedule.steady)
