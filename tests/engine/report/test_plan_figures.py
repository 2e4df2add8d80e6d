"""Every figure of a plan's table, against numbers worked out by hand."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.engine.program.flops import count_flops
from megatrain_jax._src.engine.report.make_plan import make_plan, microbatch_work
from megatrain_jax._src.engine.report.plan import REST, TileRow
from megatrain_jax._src.engine.report.table import UNFIT
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.spec.host import check_host, fit_to_host
from megatrain_jax._src.engine.startup import allocator
from megatrain_jax._src.engine.state import pool
from megatrain_jax._src.engine.state.hardware import Hardware
from messages import refuses, tells
from plans import GIB, SGD, big_plan, layers_spec
from quantities import has_row

# Two devices on each of two hosts. A second carries 2 GiB over a link, and 3 through a host's
# memory, which leaves each link 1.5; devices exchange 3 / (2 * 2) GiB in a second.
ROUND = Hardware(
    name="Round",
    host_bytes=1000 * GIB,
    device_bytes=100 * GIB,
    link_bytes_per_s=2 * GIB,
    host_bytes_per_s=3 * GIB,
    peer_bytes_per_s=None,
    hosts=2,
    network_bytes_per_s=0.75 * GIB,
    flops_per_s=10e12,
    sustained=1.0,
    sustained_attention=0.5,
)
PLAN = big_plan(
    num_parameters=10 * 10**9,
    num_frozen=6 * 10**9,
    frozen_bytes=12 * GIB,
    host_bytes=80 * GIB,
    host_peak_bytes=88 * GIB,
    host_process_bytes=46 * GIB,
    device_budget=16 * GIB,
    device_temporary_bytes=3 * GIB,
    bytes_in=24 * GIB,
    bytes_out=12 * GIB,
    collective_bytes=6 * GIB,
    flops_per_step=400 * 10**12,
    attention_flops_per_step=100 * 10**12,
    loop_kernels_per_step=7000,
    seconds_loops=4.0,
    seconds_per_step=60.0,
    num_kept=5,
    keeps_costliest=True,
    num_again=3,
    tiles=(TileRow(name="layers/1", count=2, what="backward", num_tiles=6, num_rows=1024),),
    num_devices=4,
    num_processes=2,
    hardware=ROUND,
)


CLIPPING = optax.chain(optax.clip_by_global_norm(1.0), SGD)


@pytest.mark.parametrize(
    "figures",
    [
        pytest.param([10e9, 38, 38, 3, 4, 2], id="title"),
        # All would take what 4 of the 10 billion take with their optimizer state.
        pytest.param([6e9, 12 * GIB, (80 - 12) * 10 / 4 * GIB], id="not-trained"),
        pytest.param([80 * GIB, 80 / 4 * GIB, 80 / 2 * GIB], id="at-rest"),
        pytest.param([88 * GIB, 88 / 2 * GIB], id="at-peak"),
        pytest.param([46 * GIB, 2, 1000 * GIB], id="process"),
        pytest.param([12 * GIB, 16 * GIB], id="state"),
        pytest.param([5 * GIB], id="other"),
        pytest.param([3 * GIB], id="temporaries"),
        pytest.param([(12 + 5 + 3) * GIB, 0.93 * 100 * GIB, 0.93], id="in-all"),
        # A device has 1.5 of its link's 2 GiB a second.
        pytest.param([24 * GIB, 24 / 1.5], id="to-the-device"),
        pytest.param([12 * GIB, 12 / 1.5], id="to-the-host"),
        pytest.param([6 * GIB, 6 / (3 / 4)], id="other-devices"),
        pytest.param([6 * GIB, 6 / 0.75], id="network"),
        # Each byte between two devices is written to the host's memory and read there.
        pytest.param([2 * (24 + 12 + 2 * 6) * GIB, 2 * (24 + 12 + 2 * 6) / 3], id="transfers"),
        # At half the rate, attention's 100 take as long as 200 others.
        pytest.param([400e12, (300 + 2 * 100) / (4 * 10)], id="arithmetic"),
        pytest.param([100e12, 2 * 100 / (4 * 10), 100 / 400], id="attention"),
        pytest.param([7000, 4], id="loops"),
        pytest.param([5, 38], id="kept"),
        pytest.param([3, 38], id="again"),
        pytest.param([6, 1024], id="tiles"),
        pytest.param([60], id="step"),
        pytest.param([12.5 + 4 + 8, (24 + 6) / 2, 32], id="bound"),
    ],
)
def test_each_row_of_the_table_has_its_figures(figures):
    assert has_row(str(PLAN), figures)


def test_what_bounds_a_step_is_that_of_one_host():
    # 24 s for its transfers and 8 for what its devices send each other; 25 for arithmetic at half
    # the rate, 4 for loops and 8 for what devices send each other.
    assert PLAN.bound == "host"
    slow = replace(PLAN, hardware=replace(ROUND, flops_per_s=5e12))
    assert slow.bound == "arithmetic"
    assert replace(slow, attention_flops_per_step=0).bound == "neither"
    assert replace(slow, seconds_loops=0.0).bound == "neither"
    assert has_row(str(replace(PLAN, seconds_dispatch=50.0)), [24.5, 15, 32, 50])


def test_processes_divide_the_host_memory_of_a_run_without_a_pool():
    limit = pool.most_process_bytes(60 * GIB, 2, 1)
    assert 44 * GIB < limit < 60 * GIB
    machine = replace(ROUND, host_bytes=60 * GIB)
    plain = replace(PLAN, hardware=machine, host_process_bytes=None)
    assert plain.fits_host and not replace(plain, num_processes=1).fits_host
    full = str(replace(PLAN, hardware=machine, host_process_bytes=60 * GIB))
    assert UNFIT in full and has_row(full, [60 * GIB, 2, 60 * GIB, limit])


def test_a_plan_counts_what_its_run_says():
    spec = layers_spec(CLIPPING, device_budget="least", hardware="H200")
    plan, schedule = make_plan(spec), spec.first.schedule
    idle = (Op.WAIT, Op.LAND, Op.RELEASE)
    assert any(row.op is Op.RELEASE for row in schedule.steady)
    dispatched = sum(row.op not in idle for row in schedule.steady)
    assert dispatched not in (
        len(schedule.steady),
        sum(row.op not in idle for row in schedule.cold),
    )
    assert plan.seconds_dispatch == dispatched * spec.first.workload.costs.dispatch
    assert plan.host_peak_bytes == plan.host_bytes + schedule.transient_bytes > plan.host_bytes
    given = plan.host_peak_bytes, spec.largest_slab_bytes, mt.card("H200").assumed_host_bytes, 1
    batches = 6 * 12 * 8 * 4  # six batches of [12, 8] in fp32
    assert plan.host_process_bytes == pool.process_bytes(*given) + batches
    assert plan.host_pool_bytes == pool.pool_bytes(*given)
    pooled, taken = plan.host_pool_bytes, plan.host_process_bytes
    assert pooled and taken and plan.host_peak_bytes <= pooled < taken


def test_lists_of_a_gpu_s_memory_count_where_jax_allocates_it(monkeypatch):
    """JAX's own allocator has 8 bytes in the host for each 256 bytes that it takes of a GPU."""
    machine = replace(mt.card("H100"), device_share=0.85, host_bytes=64 * GIB)
    lists = (machine.usable_bytes or 0) // 32
    spec = layers_spec(device_budget="least", hardware=machine)

    def planned(of, num_processes=1):
        return make_plan(of, num_processes, num_processes).host_process_bytes or 0

    def refused(of):
        with refuses(MemoryError, "host", "1.00 GiB") as found:
            check_host(replace(of, options=replace(of.options, host_budget=2**30)), 1, 1)
        return re.findall(rf"([\d.]+) GiB for {REST}", str(found.value))[0]

    several = replace(spec, first=replace(spec.first, num_devices=4))
    monkeypatch.setenv(allocator.PREALLOCATE, "true")
    monkeypatch.setenv(allocator.VARIABLE, "cuda_async")
    before, of_several, said = planned(spec), planned(several, 2), refused(spec)
    for name in ("default", "BFC"):
        monkeypatch.setenv(allocator.VARIABLE, name)
        assert planned(spec) - before == lists
        assert planned(several, 2) - of_several == 2 * lists, "two devices a process"
        assert float(refused(spec)) == pytest.approx(float(said) + lists / GIB, abs=0.01)
        # A host with just enough room for the run has too little beside the lists.
        limited = replace(spec.options, host_budget=before)
        assert fit_to_host(replace(spec, options=limited)).lacking_host
    monkeypatch.setenv(allocator.VARIABLE, "platform")
    assert planned(spec) == before


def test_flops_of_stages_computed_again_and_of_reductions():
    step = layers_spec().first
    again = replace(step, workload=replace(step.workload, again=frozenset({1})))
    more = microbatch_work(again).flops - microbatch_work(step).flops
    assert more == count_flops(step.stages[1].stage.jaxpr) > 0


def test_flops_of_an_update_are_those_of_plain_optax():
    params = [jnp.ones(size) for size in (64, 128, 256, 128, 64)]

    def planned(optimizer):
        return make_plan(layers_spec(optimizer)).flops_per_step

    def plain(optimizer):
        return count_flops(jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params))

    # But for the few operations on numbers of all groups.
    more = plain(CLIPPING) - plain(SGD)
    assert planned(CLIPPING) - planned(SGD) == pytest.approx(more, abs=20) and more > 2 * 640


def test_a_network_without_a_rate_has_no_seconds():
    free = replace(PLAN, hardware=replace(ROUND, network_bytes_per_s=math.inf))
    told = [re.search(r"network to each host.*", str(plan)) for plan in (PLAN, free)]
    assert told[0] and told[1]
    assert re.search(r"\d s\b", told[0][0])
    assert tells(told[1][0], "`network`") and not re.search(r"\d s\b", told[1][0])
