"""The limit of JAX's pools, and the memory that a process takes with them, on made-up machines."""

import itertools
import json
import os
import random
import subprocess
import sys

import pytest

from megatrain_jax._src.engine.startup import allocator
from megatrain_jax._src.engine.startup.driver_memory import GpuMemory
from megatrain_jax._src.engine.state import pool, pool_limit
from places import ROOT

GIB = 2**30
RESULTS = ROOT / "experiments/results/h200"


@pytest.mark.parametrize(
    ("total_gib", "limit"), [(125, "114"), (252, "236"), (512, "485"), (3, "1")]
)
def test_limit_is_set_once(monkeypatch, total_gib, limit):
    monkeypatch.setattr(pool_limit, "total_bytes", lambda: total_gib * GIB + 5)
    monkeypatch.delenv(pool.LIMIT_VARIABLE, raising=False)
    pool_limit.set_limit()
    assert os.environ[pool.LIMIT_VARIABLE] == limit
    monkeypatch.setenv(pool.LIMIT_VARIABLE, "7")
    pool_limit.set_limit()
    assert os.environ[pool.LIMIT_VARIABLE] == "7"


@pytest.mark.exhaustive
def test_import_starts_no_backend():
    code = (
        "import jax\n"
        "jax.devices = lambda *args: exit('the backend was started')\n"
        "from megatrain_jax._src.engine.state import pool, pool_limit\n"
        "pool_limit.set_limit(); pool.total_bytes(); pool.available_bytes()\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("result", "pool_gib"),
    [
        ("updates/immediate-least", 58),
        ("updates/clip-1-least", 56),
        ("updates/clip-1-auto", 42),
        ("small_gpu/10-gib-auto-clip-1", 64),
        ("held/clip-1-60-gib-compact-14b", 96),
        ("long/1048576-2-compact", 8),
        ("long/131072", 115),
        ("long/262144", 180),
        ("long/524288", 219),
        ("waves/14b-compact-524288-tokens", 90),
        ("start/14b-fp32-page-threads-empty-cache", 208),
    ],
)
def test_a_process_takes_beside_its_pool_what_it_took(result, pool_gib):
    measured = json.loads((RESULTS / f"{result}.json").read_text())["peak_host_gib"]
    taken = pool_gib * GIB + pool_limit.beside_bytes(pool_gib * GIB)
    assert taken == pytest.approx(measured * GIB, rel=0.01)


@pytest.mark.parametrize("gpus", [1, 4, 8])
@pytest.mark.parametrize("total_gib", [4, 16, 64, 125, 252, 512, 2048])
def test_a_machine_holds_pools_lists_notes_and_the_system(total_gib, gpus):
    budget = pool_limit.process_budget(total_gib * GIB, gpus)
    pools = pool_limit.pools_within(budget)
    assert pools + pool_limit.beside_bytes(pools) == pytest.approx(budget, abs=GIB)
    left = total_gib * GIB - budget - pool_limit.driver_bytes(pools, gpus)
    assert left == pytest.approx(min(4, total_gib / 4) * GIB, abs=GIB / 16)


@pytest.mark.parametrize(("gpus", "share"), [(1, 0.0118), (2, 0.0157), (4, 0.0236)])
def test_the_driver_notes_each_pinned_page_for_each_gpu(gpus, share):
    """The shares were measured on four H200s; a tenth is for what else the kernel keeps."""
    assert share <= pool_limit.driver_bytes(240 * GIB, gpus) / (240 * GIB) < 1.1 * share


def test_a_limit_of_the_users_bounds_what_plans_count_with(monkeypatch):
    monkeypatch.setenv(pool.LIMIT_VARIABLE, "60")
    total = pool_limit.machine_bytes(125 * GIB, 1)
    assert total is not None and 60 <= pool_limit.limit_bytes(total) / GIB <= 61
    assert pool_limit.machine_bytes(32 * GIB, 1) == 32 * GIB
    for number, gib in itertools.product((1, 2), (1, 4, 16, 24, 60)):
        monkeypatch.setenv(pool.LIMIT_VARIABLE, str(gib))
        found = pool_limit.machine_bytes(250 * GIB, number)
        assert pool_limit.limit_bytes(found, number) == number * gib * GIB
    monkeypatch.setenv(pool.LIMIT_VARIABLE, "60")
    several = pool_limit.machine_bytes(512 * GIB, 4)
    assert several is not None and pool_limit.limit_bytes(several, 4) == pytest.approx(
        240 * GIB, abs=GIB
    )
    monkeypatch.setenv(pool.LIMIT_VARIABLE, str(pool_limit.limit_bytes(125 * GIB) // GIB))
    assert pool_limit.machine_bytes(125 * GIB, 1) == 125 * GIB
    assert pool_limit.machine_bytes(None, 1) is None


@pytest.mark.parametrize(("total_gib", "limit_gib"), [(251.77, 232), (251.77, None), (125.9, 100)])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_a_run_may_fill_its_pools_beside_jaxs_lists_of_gpus(
    total_gib, limit_gib, gpus, monkeypatch
):
    total, memory = int(total_gib * GIB), GpuMemory(80 * GIB, 79 * GIB)
    monkeypatch.setattr(pool_limit, "total_bytes", lambda: total)
    monkeypatch.setattr(allocator, "gpu_memories", lambda: gpus * [memory])
    monkeypatch.setenv(allocator.VARIABLE, "default")
    monkeypatch.setenv(allocator.PREALLOCATE, "true")
    monkeypatch.setenv(allocator.FRACTION, "0.93")
    monkeypatch.setenv(pool.LIMIT_VARIABLE, str(limit_gib))
    if limit_gib is None:
        monkeypatch.delenv(pool.LIMIT_VARIABLE)
    pool_limit.set_limit()
    lists = allocator.bytes_taken_at_once() // pool_limit.POOL_BYTES_PER_LIST_BYTE
    assert lists == pytest.approx(gpus * 0.93 * 80 * GIB / 32, abs=1)
    machine = pool_limit.machine_bytes(total, gpus, lists)
    assert machine is not None and machine <= total
    # Each device has a pool of its own; together they can't be larger than the machine.
    filled = min(pool_limit.limit_in_force(), pool_limit.limit_bytes(machine, gpus, lists) // gpus)
    batches = GIB // 64
    needed = pool.process_bytes(gpus * filled, 0, machine, gpus, lists) + batches
    most = pool.usable_bytes(None, machine, gpus, 1, lists, batches)
    assert most is not None and gpus * filled < needed <= most
    # All that a process can take, the driver's records and the system fit in the machine.
    assert most + pool_limit.driver_bytes(gpus * filled, gpus) <= total - 4 * GIB + GIB // 16


def test_the_system_s_own_memory_is_left_to_it_once(monkeypatch):
    """On a machine of 251.8 GiB, 249 are available, and a process took 243.2 beside the driver."""
    total, pools = int(251.77 * GIB), 232 * GIB
    taken = pools + pool_limit.beside_bytes(pools, 73 * GIB // pool_limit.POOL_BYTES_PER_LIST_BYTE)
    monkeypatch.setattr(pool, "total_bytes", lambda: total)
    monkeypatch.setattr(pool, "resident_bytes", lambda: 5 * GIB)

    def most(available_gib, *number):
        monkeypatch.setattr(pool, "available_bytes", lambda: int(available_gib * GIB))
        found = pool.available_process_bytes(*number)
        assert found is not None
        return found

    assert taken < most(244)
    assert most(260) == most(246.77) == pool_limit.process_budget(total)
    for other_gib in (0, 2, 30):
        here = most(244 - other_gib)
        left = 249 * GIB - other_gib * GIB - here - pool_limit.driver_bytes(here)
        assert 2 * GIB < left < 3 * GIB, "keeps the system alive"
    assert most(244 - 5, 2) == most(244) // 2, "two processes have taken 5 GiB each"
    monkeypatch.setattr(pool, "resident_bytes", lambda: 0)
    for available_gib in (0, 0.1, 1, 3, 10):
        assert most(available_gib) <= available_gib * GIB * 4 / 5, "no more than there is"


def test_processes_of_a_machine_take_equal_parts_of_it():
    for total in (64 * GIB, 500 * GIB):
        most = pool.most_process_bytes(total, num_processes=2)
        assert most == pool_limit.process_budget(total) // 2


def test_what_a_process_takes_holds_what_it_reserves():
    rng = random.Random(0)
    for _ in range(50):
        num_bytes, array = rng.randrange(1 << 36), rng.randrange(1 << 31)
        for total in (None, 1 << 37):
            assert pool.process_bytes(num_bytes, array, total) > num_bytes
