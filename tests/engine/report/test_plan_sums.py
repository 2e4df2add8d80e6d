"""The figures of a plan: bytes and operations, groups shown as one, and the bottleneck."""

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.program.flops import count_flops
from megatrain_jax._src.engine.report.make_plan import (
    check_device,
    make_plan,
    merge_equal_groups,
    microbatch_work,
    moved_bytes,
)
from megatrain_jax._src.engine.report.plan import MOVING, STATE, WAITING
from megatrain_jax._src.engine.report.plan_table import BOUNDS, fills
from megatrain_jax._src.engine.report.table import UNFIT
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.schedule.transient_host_bytes import in_flight_bytes
from megatrain_jax._src.engine.state import hardware
from messages import refuses, tells
from plans import BALANCED, GIB, SMALL, big_plan, layers_spec, small_plan
from quantities import has_row
from workloads import chain

SIZES = [{Kind.MASTERS: n, Kind.OPTIMIZER_STATE: 2 * n, Kind.GRADIENT: n} for n in (4, 4, 4, 4, 8)]


def test_sums_of_what_moves():
    instructions = [
        Instruction(op=Op.FETCH, key=Key(Kind.MASTERS, 0)),
        Instruction(op=Op.FORWARD, stage=0),
        Instruction(op=Op.FETCH, key=Key(Kind.OPTIMIZER_STATE, 4)),
        Instruction(op=Op.OFFLOAD, key=Key(Kind.MASTERS, 4)),
        Instruction(op=Op.OFFLOAD, key=Key(Kind.GRADIENT, 4)),
        Instruction(op=Op.OFFLOAD, key=Key(Kind.ACTIVATION, 7)),
        Instruction(op=Op.FETCH, key=Key(Kind.ACTIVATION, 7)),
    ]
    workload = chain(
        5, sizes=SIZES, activations={7: 5}, makes=((7,), *[()] * 4), reads=(*[()] * 4, (7,))
    )
    assert moved_bytes(instructions, workload) == (4 + 16 + 5, 8 + 8 + 5)


def test_a_plan_adds_up():
    spec = layers_spec(device_budget="least")
    plan = make_plan(spec)
    assert plan.num_parameters == sum(row.count * row.num_parameters for row in plan.groups) == 640
    assert plan.host_bytes == 4 * 640
    assert plan.host_peak_bytes > plan.host_bytes
    schedule = spec.first.schedule
    assert (plan.bytes_in, plan.bytes_out) == moved_bytes(schedule.steady, spec.first.workload)
    assert plan.device_state_bytes == schedule.peak_bytes == schedule.smallest_bytes
    assert (plan.update_mode, plan.num_stages, plan.microbatches) == ("immediate", 5, 1)
    assert plan.hardware is plan.seconds_per_step is plan.host_process_bytes is None
    planned = make_plan(layers_spec(device_budget="least", hardware="H200"))
    assert planned.hardware == mt.card("H200") and planned.seconds_per_step == schedule.seconds
    assert planned.host_process_bytes and planned.host_process_bytes > planned.host_peak_bytes


def test_parts_of_the_host_s_memory_add_up_whatever_the_schedule():
    rng, seen = random.Random(0), set()
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    options = {"device_budget": "least", "hardware": replace(BALANCED, host_bytes=2**30)}
    specs = [layers_spec(**options), layers_spec(clip, **options)]
    for number in range(20):
        spec = specs[number % 2]
        workload, least = spec.first.workload, spec.first.schedule.smallest_bytes
        processes = rng.choice((1, 2, 4))
        budget, room = round(least * rng.uniform(1, 2)), rng.choice((0, 2**30))
        schedule = find_schedule(workload, budget, spec.first.selective, room)
        first = replace(spec.first, schedule=schedule, num_devices=rng.choice((4, 8)))
        plan = make_plan(replace(spec, first=first), processes, rng.choice((1, processes)))
        parts, process = plan.host_parts, plan.host_process_bytes
        assert process is not None and len(parts) == 9 and min(parts.values()) >= 0
        assert sum(list(parts.values())[:6]) == plan.host_peak_bytes
        assert sum(parts.values()) == processes * process
        assert parts[STATE] == plan.host_bytes
        moving = in_flight_bytes(first.scheduled, schedule.steady)
        assert parts[MOVING] == first.num_devices * moving
        # Each host's bars show its share of them; bytes that don't divide are lost.
        share = plan.processes_per_host * process
        assert share - 7 < fills(plan)[0].needed <= share
        seen.add(tuple(name for name, size in parts.items() if size))
        for name, size in parts.items():
            assert (name in str(plan)) == (size > 0 and name != STATE)
    assert len(seen) > 1 and any(WAITING[0] in names for names in seen)


def test_processes_on_a_cpu_share_what_a_run_stores():
    spec, base = layers_spec(), 2**20
    spec = replace(spec, base_bytes=base, first=replace(spec.first, num_devices=4))
    one, two = (make_plan(spec, number, number).host_process_bytes for number in (1, 2))
    assert one and two and one - base == pytest.approx(2 * (two - base), abs=2)


def test_equal_groups_fold_only_where_they_follow_each_other():
    names = ["embed", "layers/0", "layers/1", "layers/2", "head"]
    count, size = [1, 1, 1, 1, 2], [12, 12, 12, 12, 24]
    assert merge_equal_groups(names, count, size, [0, 1, 1, 1, 2], ()) == SMALL.groups
    rows = merge_equal_groups(names, count, size, [1, 2, 1, 1, 1], ())
    assert [(row.name, row.count) for row in rows] == [
        ("embed", 1),
        ("layers/0", 1),
        ("layers/1 … layers/2", 2),
        ("head", 1),
    ]
    # Those that are not trained come last.
    assert [row.name for row in merge_equal_groups(names, count, size, [0, 1, 1, 1, 2], {0})] == [
        "layers/0 … layers/2",
        "head",
        "embed",
    ]
    with pytest.raises(ValueError):
        merge_equal_groups(names[1:], count, size, [0] * 5, ())


def test_blocks_in_parts_fold_part_by_part():
    parts = [f"layers.{layer}.part {part}" for layer in range(3) for part in (1, 2)]
    names, blocks = ["embed", *parts, "head"], [None, *"001122", None]
    count, size, templates = [9, *[1, 2] * 3, 9], [90, *[10, 20] * 3, 90], [0, *[1, 2] * 3, 3]
    rows = merge_equal_groups(names, count, size, templates, (), blocks)
    assert [(row.name, row.count, row.num_parameters, row.template) for row in rows] == [
        ("embed", 1, 9, 0),
        ("layers.0.part 1 … layers.2.part 1", 3, 1, 1),
        ("layers.0.part 2 … layers.2.part 2", 3, 2, 2),
        ("head", 1, 9, 3),
    ]
    # A block that is unlike its neighbours ends their rows.
    count[4] = 7
    rows = merge_equal_groups(names, count, size, templates, (), blocks)
    assert [row.count for row in rows] == [1] * 8
    assert sum(row.count * row.num_parameters for row in rows) == sum(count)


def test_a_tied_group_shows_the_template_of_its_first_stage():
    def loss_fn(params: Any, batch: Any) -> Any:
        x = jnp.tanh(batch @ params["ends"])
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer)
        return (x @ params["ends"].T).mean()

    params = {"ends": jnp.ones((6, 8)), "layers": [jnp.ones((8, 8))] * 3}
    plan = mt.plan(params, loss_fn, optax.sgd(0.1), jnp.ones((4, 6)))
    templates = {row.name: row.template for row in plan.groups}
    # The last stage, which reads them again, is of a third template.
    assert (plan.num_stages, plan.num_templates) == (5, 3)
    assert templates["ends"] == 0 and set(templates.values()) == {0, 1}


def test_flops_of_a_step():
    step = layers_spec().first
    flops = [count_flops(bound.stage.jaxpr) for bound in step.stages]
    *first, last = flops
    assert len(set(flops)) > 2
    assert microbatch_work(step).flops == 4 * sum(first) + 3 * last
    apart = replace(step, workload=replace(step.workload, fused_last=False))
    assert microbatch_work(apart).flops == 4 * sum(flops)
    kept = replace(step, schedule=replace(step.schedule, kept=frozenset({1})))
    residuals = step.stages[1].residuals
    assert residuals is not None
    assert microbatch_work(step).flops - microbatch_work(kept).flops == residuals.saved.total > 0


def test_flops_where_little_is_trained():
    step = layers_spec(trainable=lambda path: path[0] in "24").first
    flops = [count_flops(bound.stage.jaxpr) for bound in step.stages]
    # Nothing goes back beyond the first that is trained; of the others, one has no gradient.
    assert step.workload.backward == (False, False, True, True, True)
    expected = flops[0] + flops[1] + 4 * flops[2] + 3 * flops[3] + 3 * flops[4]
    assert microbatch_work(step).flops == expected


def test_every_microbatch_and_the_update_count():
    once, thrice = layers_spec(), layers_spec(microbatches=3)
    update = make_plan(once).flops_per_step - microbatch_work(once.first).flops
    assert update > 0
    assert make_plan(thrice).flops_per_step == 3 * microbatch_work(thrice.first).flops + update


@pytest.mark.parametrize(
    ("link", "flops", "bound"),
    [(10.0, 110.0, "link"), (10.0, 50.0, "arithmetic"), (10.0, 95.0, "neither")],
)
def test_bound(link, flops, bound):
    # 20 bytes in against 184 operations: two seconds of transfers.
    hardware = replace(BALANCED, link_bytes_per_s=link, flops_per_s=flops)
    plan = small_plan(hardware=hardware)
    assert plan.bound == bound
    assert plan.seconds_in == pytest.approx(2.0)
    assert plan.seconds_out == pytest.approx(1.6)
    assert plan.seconds_compute == pytest.approx(184 / flops)


@pytest.mark.parametrize(
    ("ratio", "bound"),
    [(1.12, "link"), (1.08, "neither"), (0.92, "neither"), (0.88, "arithmetic")],
)
def test_bound_is_neither_within_a_tenth(ratio, bound):
    # 20 bytes at 10 a second: two seconds of transfers to `ratio` as many of arithmetic.
    hardware = replace(BALANCED, flops_per_s=184 * ratio / 2)
    assert small_plan(hardware=hardware).bound == bound


def test_both_directions_of_the_link_count():
    plan = small_plan(hardware=BALANCED, bytes_in=0, bytes_out=160)
    assert plan.bound == "link"
    assert replace(plan, bytes_out=0).bound == "arithmetic"


def test_without_hardware_nothing_is_claimed():
    plan = small_plan()
    assert plan.bound == "neither"
    assert plan.seconds_in is plan.seconds_out is plan.seconds_compute is None
    assert plan.fits_host is plan.fits_device is None
    assert "fit" not in str(plan).lower()
    assert BOUNDS["neither"] not in str(plan)


def test_fits():
    plan = small_plan(hardware=BALANCED)
    assert plan.fits_host is False
    assert plan.fits_device is True
    assert tells(str(plan), UNFIT, "50 B")
    assert has_row(str(plan), [90, 100])
    assert small_plan(hardware=replace(BALANCED, host_bytes=None)).fits_host is None


def test_attention_counts_in_what_bounds_a_step():
    # Two seconds over the link; the same operations take 1.84 s, or twice as long in attention.
    machine = replace(BALANCED, sustained_attention=0.5)
    assert small_plan(hardware=replace(machine, flops_per_s=110.0)).bound == "link"
    plan = small_plan(hardware=machine, attention_flops_per_step=184)
    assert (plan.bound, plan.seconds_compute) == ("arithmetic", 3.68)


def test_temporaries_count_once_they_are_known():
    uncounted = big_plan(device_temporary_bytes=None)
    assert has_row(str(uncounted), [17 * GIB])
    assert uncounted.fits_device is None
    assert replace(uncounted, device_other_bytes=200 * GIB).fits_device is False
    assert not has_row(str(uncounted), [0])
    full = str(big_plan(device_temporary_bytes=115 * GIB))
    assert has_row(full, [115 * GIB]) and has_row(full, [132 * GIB, 130.57 * GIB, 0.93])
    assert UNFIT in full
    counted = big_plan(device_temporary_bytes=GIB)
    guess = replace(counted, device_temporary_estimated=True)
    assert has_row(str(guess), [GIB]) and str(guess) != str(counted)


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_share_that_jax_takes_is_counted(name, monkeypatch):
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    assert hardware.card("RTX 4090").usable_bytes == int(0.85 * 24 * GIB)
    monkeypatch.setenv(name, "0.5")
    assert hardware.card("RTX 4090").usable_bytes == 12 * GIB
    assert replace(hardware.card("RTX 4090"), device_share=1.0).usable_bytes == 24 * GIB


def test_what_exceeds_the_device_is_refused_with_figures():
    plan = big_plan(device_temporary_bytes=3 * GIB)
    check_device(plan, None)
    check_device(plan, plan.device_bytes)
    with refuses(MemoryError, "20.00 GiB", "19.00 GiB", "microbatches"):
        check_device(plan, 19 * GIB)
    values = [jax.ShapeDtypeStruct((2, length, 64), "bfloat16") for length in (64, 8191)]
    with refuses(MemoryError, "8,191", "2, 3, 5, 7", 128, "8,192"):
        check_device(plan, 19 * GIB, values)
    with refuses(MemoryError, "20.00 GiB") as caught:
        check_device(plan, 19 * GIB, [jax.ShapeDtypeStruct((7, 8190, 11), "float32"), values[0]])
    assert "8,19" not in str(caught.value)
