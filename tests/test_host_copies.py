"""The pinned memory that a run's arrays take with the gaps between them."""

import dataclasses
import random
from itertools import repeat

import jax
import jax.numpy as jnp
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src import planning
from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.report.make_plan import make_plan
from megatrain_jax._src.schedule.host_copies import (
    _EndlessPool,
    bytes_with_gaps,
    host_changes,
)
from megatrain_jax._src.schedule.search import find_schedule
from megatrain_jax._src.schedule.tasks import build_task_lists
from megatrain_jax._src.spec.host import host_process, peak_bytes
from megatrain_jax._src.spec.pooled import pooled_bytes
from megatrain_jax._src.state import pool
from workloads import chain, random_workload

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


def listed(workload, budget=None):
    """The lists of a workload's cold and steady steps."""
    lists, schedule = build_task_lists(workload), find_schedule(workload, budget)
    return (lists.cold, schedule.cold), (lists.steady, schedule.steady)


@pytest.mark.parametrize("seed", range(40))
def test_arrays_of_one_size_leave_no_gaps(seed):
    """All parts in arrays of 1 GiB: the pool is as large as the most of them at once."""
    workload = random_workload(seed)
    cold, steady = listed(workload)

    def arrays(key: Key) -> list[int]:
        return [GIB] * workload.size(key)

    held, leaving = {k: workload.size(k) for k in all_state(workload)}, []
    most = sum(held.values())
    for key, task, is_new in host_changes((cold, *repeat(steady, 16))):
        if key is None:
            leaving = [row for row in leaving if row[0] > task]
            continue
        leaving.append((task, held.pop(key, 0)))
        if is_new:
            held[key] = workload.size(key)
        most = max(most, sum(held.values()) + sum(size for _, size in leaving))
    assert bytes_with_gaps(workload, cold, steady, arrays) == most * GIB


def all_state(workload):
    return [Key(kind, g) for g in range(len(workload.sizes)) for kind in LASTING]


def test_old_arrays_stay_until_their_task_has_been_computed():
    """One group at a time: the new masters are written while the old ones are still read."""
    sizes = ({Kind.MASTERS: 1, Kind.GRADIENT: 1},) * 8
    workload = chain(8, sizes=sizes)
    at_rest = 8 * GIB
    cold, steady = listed(workload)
    needed = bytes_with_gaps(workload, cold, steady, lambda key: [GIB] * workload.size(key))
    # The driver waits for a task before it dispatches the task two later.
    assert needed == at_rest + 2 * GIB


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_plan_counts_gaps_where_the_host_has_room(num_devices, monkeypatch):
    """Layers of 75.5M parameters, with more activations than state."""
    made = []
    monkeypatch.setattr(planning, "make_plan", lambda spec: made.append(spec) or make_plan(spec))

    def build():
        return {"layers": [{"w": jnp.ones((2**10, 72 * 2**10))} for _ in range(24)]}

    def loss_fn(params, batch):
        x = batch
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"] @ layer["w"].T)
        return (x**2).mean()

    batch = jax.ShapeDtypeStruct((num_devices * 3 * 2**15, 2**10), jnp.float32)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    options = {"device_budget": "minimum", "num_gpus": num_devices, "host_gib": 500}
    plan = mt.plan(build, loss_fn, optimizer, batch, hardware="H200", **options)
    (spec,) = made
    process, pooled, peak = host_process(spec, 1, 1), pooled_bytes(spec, 1, 1), plan.host_peak_bytes
    assert peak_bytes(spec.first) == peak < pooled < 1.3 * peak
    assert plan.host_process_bytes == process.needed(pooled) > process.needed(peak)
    what = pooled, spec.largest_slab_bytes, 500 * GIB, num_devices
    assert plan.host_pool_bytes == pool.pool_bytes(*what)
    limits = process.needed(pooled), process.needed(pooled) - 1, process.needed(peak)
    for limit, expected in zip(limits, (pooled, peak, peak), strict=True):
        given = dataclasses.replace(spec.options, host_budget=limit)
        assert pooled_bytes(dataclasses.replace(spec, options=given), 1, 1) == expected
