"""Every figure of a plan's table, against numbers worked out by hand."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.program.flops import count_flops
from megatrain_jax._src.report.make_plan import make_plan, microbatch_work
from megatrain_jax._src.report.plan import TileRow
from megatrain_jax._src.schedule.instructions import Op
from megatrain_jax._src.spec.host import check_host, fit_to_host
from megatrain_jax._src.startup import allocator
from megatrain_jax._src.state import pool
from megatrain_jax._src.state.hardware import Hardware
from plans import GIB, SGD, big_plan, layers_spec

# Two devices on each of two hosts. A second carries 2 GiB over a link, and 3 through a host's
# memory, which leaves each link 1.5; devices exchange 3 / (2 * 2) GiB in a second.
ROUND = Hardware(
    name="Round",
    host_bytes=1000 * GIB,
    device_bytes=100 * GIB,
    link_bytes_per_s=2 * GIB,
    host_bytes_per_s=3 * GIB,
    peer_bytes_per_s=None,
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


def words_of(plan):
    return " ".join(str(plan).split())


@pytest.mark.parametrize(
    "row",
    [
        "10B parameters in 38 groups; 38 stages from 3 templates; deferred update; 4 devices",
        # All would take what 4 of the 10 billion take with their optimizer state.
        "parameters not trained 6B 12.00 GiB; at rest all trained takes 170.00 GiB",
        "host memory at rest 80.00 GiB 20.00 GiB of each device, 40.00 GiB of each host",
        "host memory at peak 88.00 GiB 44.00 GiB of each host",
        "host memory, the process 46.00 GiB one of 2, estimate, fits in 1000.00 GiB",
        "device memory, state and activations 12.00 GiB of a budget of 16.00 GiB",
        "device memory, other values 5.00 GiB estimate",
        "device memory, temporaries 3.00 GiB device memory, in all 20.00 GiB fits in",
        "to the device, a step 24.00 GiB 16 s",
        "to the host, a step 12.00 GiB 8 s",
        "from other devices, a step 6.00 GiB 8 s",
        # Each byte between two devices is written to the host's memory and read there.
        "host memory, all transfers, a step 96.00 GiB 32 s",
        # At half the rate, attention's 100 take as long as 200 others.
        "microbatches 4 arithmetic of all devices, a step 400 TFLOP 12.5 s",
        "attention, of that 100 TFLOP 5 s, 25% of it",
        "loops, beside it 7K kernels 4 s more",
        "costliest products kept in 5 of 38 stages",
        "forward computed again in 3 of 38 stages as the host can't hold all inputs",
        "in tiles, backward of layers/1 6 of 1,024 rows",
        "a step, estimate 60 s",
        "bound by the host's memory",
    ],
)
def test_each_row_of_the_table_has_its_figures(row):
    assert row in words_of(PLAN)


def test_what_bounds_a_step_is_that_of_one_host():
    # 24 s for its transfers and 8 for what its devices send each other; 25 for arithmetic at half
    # the rate, 4 for loops and 8 for what devices send each other.
    assert PLAN.bound == "host"
    slow = replace(PLAN, hardware=replace(ROUND, flops_per_s=5e12))
    assert slow.bound == "arithmetic"
    assert replace(slow, attention_flops_per_step=0).bound == "neither"
    assert replace(slow, seconds_loops=0.0).bound == "neither"
    assert "host's memory 32 s, Python 50 s" in words_of(replace(PLAN, seconds_dispatch=50.0))


def test_processes_divide_the_host_memory_of_a_run_without_a_pool():
    limit = pool.most_process_bytes(60 * GIB, 2, 1)
    assert 44 * GIB < limit < 60 * GIB
    machine = replace(ROUND, host_bytes=60 * GIB)
    plain = replace(PLAN, hardware=machine, host_process_bytes=None)
    assert plain.fits_host and not replace(plain, num_processes=1).fits_host
    full = words_of(replace(PLAN, hardware=machine, host_process_bytes=60 * GIB))
    assert "DOES NOT FIT in 60.00 GiB, of which a process can take " in full


def test_a_plan_counts_what_its_run_says():
    spec = layers_spec(CLIPPING, device_budget="least", hardware=mt.H200)
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
    given = plan.host_peak_bytes, spec.largest_slab_bytes, mt.H200.assumed_host_bytes, 1
    batches = 6 * 12 * 8 * 4  # six batches of [12, 8] in fp32
    assert plan.host_process_bytes == pool.process_bytes(*given) + batches
    assert plan.host_pool_bytes == pool.pool_bytes(*given)
    pooled, taken = plan.host_pool_bytes, plan.host_process_bytes
    assert pooled and taken and plan.host_peak_bytes <= pooled < taken


def test_lists_of_a_gpu_s_memory_count_where_jax_allocates_it(monkeypatch):
    """JAX's own allocator has 8 bytes in the host for each 256 bytes that it takes of a GPU."""
    machine = replace(mt.H100, device_share=0.85, host_bytes=64 * GIB)
    lists = (machine.usable_bytes or 0) // 32
    spec = layers_spec(device_budget="least", hardware=machine)

    def planned(of, num_processes=1):
        return make_plan(of, num_processes, num_processes).host_process_bytes or 0

    def refused(of):
        with pytest.raises(MemoryError, match="of host memory") as found:
            check_host(replace(of, options=replace(of.options, host_budget=2**30)), 1, 1)
        return re.findall(r"([\d.]+) GiB for the rest of the process", str(found.value))[0]

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
        assert fit_to_host(replace(spec, options=limited)) is None
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
