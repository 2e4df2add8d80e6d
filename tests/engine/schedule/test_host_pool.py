"""The pinned memory that a run's arrays take with the gaps between them."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

import megatrain_jax as mt
from megatrain_jax._src.common.keys import LASTING, PASSING, Key, Kind
from megatrain_jax._src.engine import planning
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.schedule import host_pool
from megatrain_jax._src.engine.schedule.host_copies import host_changes
from megatrain_jax._src.engine.schedule.host_pool import _EndlessPool, bytes_with_gaps
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.schedule.tasks import build_task_lists
from megatrain_jax._src.engine.schedule.transient_host_bytes import in_flight_bytes
from megatrain_jax._src.engine.spec import host
from megatrain_jax._src.engine.spec.host import host_process, peak_bytes, pooled_bytes
from megatrain_jax._src.engine.state import pool
from optimizers import OPTIMIZERS
from runs import make_spec
from workloads import chain, random_workload
from zoo import CASES

MIB, GIB = 2**20, 2**30


class PlainPool:
    """The same allocator as a list of pieces in order: start, size, whether it is taken."""

    def __init__(self):
        self.pieces = [(0, 2**60, False)]

    def allocate(self, num_bytes: int) -> int:
        needed = (num_bytes + 255) // 256 * 256
        size, start = min((s, at) for at, s, taken in self.pieces if not taken and s >= needed)
        i = self.pieces.index((start, size, False))
        whole = size < 2 * needed and size - needed < 128 * MIB
        taken = size if whole else needed
        rest = [] if whole else [(start + taken, size - taken, False)]
        self.pieces[i : i + 1] = [(start, taken, True), *rest]
        return start

    def free(self, start: int) -> None:
        joined: list[tuple[int, int, bool]] = []
        for at, size, taken in self.pieces:
            taken = taken and at != start
            if joined and not taken and not joined[-1][2]:
                joined[-1] = joined[-1][0], joined[-1][1] + size, False
            else:
                joined.append((at, size, taken))
        self.pieces = joined


@pytest.mark.parametrize("seed", range(20))
def test_arrays_are_placed_as_by_a_plain_allocator(seed):
    rng, made, plain = random.Random(seed), _EndlessPool(), PlainPool()
    sizes = [rng.randint(1, 300 * MIB) for _ in range(4)] + [rng.randint(1, 999), 70 * MIB]
    held, highest = [], 0
    for _ in range(400):
        if held and rng.random() < 0.48:
            start = held.pop(rng.randrange(len(held)))
            made.free(start)
            plain.free(start)
            continue
        size = rng.choice(sizes)
        held.append(made.allocate(size))
        assert held[-1] == plain.allocate(size)
        highest = max(highest, *(at + taken for at, taken, is_held in plain.pieces if is_held))
        assert made.highest == highest
    for start in held:
        made.free(start)
    assert made.allocate(2**50) == 0, "free pieces join"


def test_a_gap_that_is_not_split_is_lost():
    made = _EndlessPool()
    masters = [made.allocate(70 * MIB) for _ in range(3)]
    for start in masters[:2]:
        made.free(start)
    assert made.allocate(130 * MIB) == 0
    assert made.allocate(10 * MIB) == 210 * MIB, "the rest of the gap has no place for it"
    made.free(0)
    assert [made.allocate(n * MIB) for n in (70, 10)] == [0, 70 * MIB]


CYCLE = ("cold", "steady", "steady", "steady", "steady", "flush", "evaluation")


def scheduled(workload):
    """The task lists of a workload and their schedule, with the stages that it keeps."""
    schedule = find_schedule(workload, None)
    return build_task_lists(dataclasses.replace(workload, kept=schedule.kept)), schedule


def all_state(workload):
    return [Key(kind, g) for g in range(len(workload.sizes)) for kind in LASTING]


@pytest.mark.by_default(*map(str, range(20)))
@pytest.mark.parametrize("seed", range(40))
def test_arrays_of_one_size_leave_no_gaps(seed):
    """All parts in arrays of 1 GiB: the pool is as large as the most of them at once."""
    workload = random_workload(seed)
    lists, schedule = scheduled(workload)
    held, leaving = {key: workload.size(key) for key in all_state(workload)}, []
    most = sum(held.values())
    for name in 8 * CYCLE:
        tasks = getattr(lists, name)
        for key, task, is_new in host_changes(tasks, getattr(schedule, name)):
            if key is None:
                leaving = [row for row in leaving if row[0] > task]
                continue
            leaving.append((task, held.pop(key, 0)))
            if is_new:
                held[key] = workload.size(key)
            most = max(most, sum(held.values()) + sum(size for _, size in leaving))
        assert not any(key.kind in PASSING for key in held), "these end with their step"
        at_rest = name in ("flush", "evaluation")
        leaving = [] if at_rest else [(task - len(tasks), size) for task, size in leaving]
        if at_rest:
            kept = {key: size for key, size in held.items() if size}
            assert kept == {k: workload.size(k) for k in all_state(workload) if workload.size(k)}
    arrays = lambda key: [GIB] * workload.size(key)  # noqa: E731
    assert bytes_with_gaps(lists, schedule, arrays) == most * GIB


def test_old_arrays_stay_until_their_task_has_been_computed():
    """One group at a time: the new masters are written while the old ones are still read."""
    sizes = ({Kind.MASTERS: 1, Kind.GRADIENT: 1},) * 8
    workload = chain(8, sizes=sizes)
    needed = bytes_with_gaps(*scheduled(workload), lambda key: [GIB] * workload.size(key))
    # The driver waits for a task before it dispatches the task two later.
    assert needed == (8 + 2) * GIB


def test_many_waves_are_simulated_for_fewer_steps(monkeypatch):
    lists, schedule = scheduled(chain(8))
    ran = []
    monkeypatch.setattr(host_pool, "host_changes", lambda tasks, rows: ran.append(rows) or ())
    for limit, cycles in ((2**15, 8), (len(schedule.steady), 1)):
        ran.clear()
        monkeypatch.setattr(host_pool, "_INSTRUCTIONS", limit)
        bytes_with_gaps(lists, schedule, lambda key: [])
        steady = 4 if cycles > 1 else 1
        once = [schedule.cold, *[schedule.steady] * steady, schedule.flush, schedule.evaluation]
        assert ran == cycles * once


def planned(monkeypatch, num_devices=1, rows=3 * 2**15, **options):
    """The plan and the spec of layers of 75.5M parameters, with more activations than state."""
    made = []

    def noted(spec, *spread):
        made.append(spec)
        return make_plan(spec, *spread)

    monkeypatch.setattr(planning, "make_plan", noted)

    def build():
        return {"layers": [{"w": jnp.ones((2**10, 72 * 2**10))} for _ in range(24)]}

    def loss_fn(params, batch):
        x = batch
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"] @ layer["w"].T)
        return (x**2).mean()

    batch = jax.ShapeDtypeStruct((num_devices * rows, 2**10), jnp.float32)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    machine = {"hardware": "H200", "num_gpus": num_devices, "host_gib": 500}
    plan = mt.plan(build, loss_fn, optimizer, batch, **machine, **options)
    return plan, made[0]


@pytest.mark.by_default("1")
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_plan_counts_gaps_where_the_host_has_room(num_devices, monkeypatch):
    plan, spec = planned(monkeypatch, num_devices, device_budget="minimum")
    process, pooled, peak = host_process(spec, 1, 1), pooled_bytes(spec, 1, 1), plan.host_peak_bytes
    assert peak_bytes(spec.first) == peak < pooled < 1.3 * peak
    assert plan.host_process_bytes == process.needed(pooled) > process.needed(peak)
    what = pooled, spec.largest_slab_bytes, 500 * GIB, num_devices
    assert plan.host_pool_bytes == pool.pool_bytes(*what)
    between = (pooled + peak) // 2
    limits = process.needed(pooled), process.needed(between), process.needed(peak), 2**30
    for limit in limits:
        given = dataclasses.replace(spec.options, host_budget=limit)
        found = pooled_bytes(dataclasses.replace(spec, options=given), 1, 1)
        assert peak <= found <= pooled
        assert process.needed(found) <= max(limit, process.needed(peak))
        # As much of the gaps as fits, to a MiB.
        assert found in (peak, pooled) or process.needed(found + 2 * MIB) > limit


def test_each_process_has_the_pool_of_its_own_devices():
    mesh = AbstractMesh((2,), ("data",))
    spec = make_spec(CASES["nnx_tied"], OPTIMIZERS["clip_adamw"], mesh=mesh)
    assert pooled_bytes(spec, 1, 1) == 2 * pooled_bytes(spec, 2, 2)


@pytest.mark.by_default("devices", "residuals", "waves")
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 4, "device_budget": "minimum"},
        {"precision": mt.Precision.compact(), "device_budget": "minimum"},
        {"num_devices": 2, "device_budget": "minimum"},
        {"rows": 2**18, "device_budget": 24 * GIB},  # residuals wait in the host
        {"rows": 2**19, "device_budget": 24 * GIB, "microbatches": 4, "waves": 2},
    ],
    ids=["microbatches", "compact", "devices", "residuals", "waves"],
)
def test_the_arrays_of_parts_are_those_of_the_schedule(options, monkeypatch):
    """Their bytes add up to the part's in the workload for which the schedule was made."""
    seen = set()
    real = host.bytes_with_gaps

    def simulated(lists, schedule, arrays):
        workload = lists.workload
        rows = [schedule.cold, schedule.steady, schedule.flush, schedule.evaluation]
        keys = {row.key for instructions in rows for row in instructions if row.op is Op.OFFLOAD}
        for key in keys | set(all_state(workload)):
            assert sum(arrays(key)) == workload.size(key)
            seen.add((key.kind, len(arrays(key))))
        ended = {key for task in lists.steady for c in task.computations for key in c.kills}
        assert {key for key in keys if key.kind in PASSING} <= ended
        return real(lists, schedule, arrays)

    monkeypatch.setattr(host, "bytes_with_gaps", simulated)
    plan, spec = planned(monkeypatch, **options)
    kinds = {kind for kind, _ in seen}
    assert {Kind.MASTERS, Kind.OPTIMIZER_STATE} <= kinds
    assert (Kind.RESIDUALS in kinds) == bool(plan.host_residual_bytes)
    if "rows" in options:
        assert Kind.RESIDUALS in kinds
    elif spec.first.wave_microbatches > 1:
        assert (Kind.ACTIVATION, spec.first.wave_microbatches) in seen


def test_the_largest_groups_are_taken_to_be_in_flight():
    def size(key):
        return 2**key.owner if key.kind is Kind.MASTERS else 0

    workload: Any = SimpleNamespace(size=size, waves=1, on_disk=())
    moves = [Instruction(op=Op.OFFLOAD, key=Key(Kind.MASTERS, group)) for group in range(5)]
    assert in_flight_bytes(workload, moves) == 16 + 8 + 4
