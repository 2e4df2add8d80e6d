"""Plans and what they print."""

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.adapt.adapters import adapt
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.options.options import Options
from megatrain_jax._src.program.flops import count_flops
from megatrain_jax._src.report.check_device import check_device
from megatrain_jax._src.report.make_plan import fold, make_plan, microbatch_work, moved_bytes
from megatrain_jax._src.report.memory_fill import fills
from megatrain_jax._src.report.plan import GroupRow, Plan
from megatrain_jax._src.report.table import seconds
from megatrain_jax._src.schedule.instructions import Instruction, Op
from megatrain_jax._src.schedule.passing import in_flight_bytes
from megatrain_jax._src.schedule.search import find_schedule
from megatrain_jax._src.spec.run_spec import RunSpec, make_run_spec
from megatrain_jax._src.state import cards
from megatrain_jax._src.state.hardware import Hardware
from workloads import chain

GIB = 2**30
SGD = optax.sgd(0.1)
BALANCED = Hardware(
    name="Balanced",
    host_bytes=50,
    device_bytes=100,
    device_share=1.0,
    link_bytes_per_s=10.0,
    flops_per_s=100.0,
)
SIZES = [{Kind.MASTERS: n, Kind.OPTIMIZER_STATE: 2 * n, Kind.GRADIENT: n} for n in (4, 4, 4, 4, 8)]
SMALL = Plan(
    num_parameters=6,
    num_frozen=0,
    frozen_bytes=0,
    groups=(
        GroupRow(name="embed", count=1, num_parameters=1, host_bytes=12, template=0),
        GroupRow(name="layers/0 … layers/2", count=3, num_parameters=1, host_bytes=12, template=1),
        GroupRow(name="head", count=1, num_parameters=2, host_bytes=24, template=2),
    ),
    host_bytes=72,
    host_peak_bytes=80,
    host_process_bytes=None,
    device_state_bytes=60,
    device_other_bytes=30,
    device_temporary_bytes=0,
    device_temporary_estimated=False,
    bytes_in=20,
    bytes_out=16,
    flops_per_step=184,
    seconds_per_step=None,
    microbatches=1,
    update_mode="immediate",
    num_stages=5,
    num_kept=0,
    num_templates=3,
)


def small_plan(**changes: Any) -> Plan:
    return replace(SMALL, **changes)


def layers(x: Any, params: Any) -> Any:
    for layer in params:
        x = x @ layer["w"]
    return x


def spec_of(optimizer: Any = SGD, **options: Any) -> RunSpec:
    """The spec of a run with five layers of different widths."""
    widths = (8, 8, 16, 16, 8, 8)
    params = [{"w": jnp.ones(shape)} for shape in zip(widths, widths[1:], strict=False)]
    batch = {"x": jnp.ones((12, 8))}

    def loss_fn(params: Any, batch: Any) -> Any:
        return (layers(batch["x"], params) ** 2).mean()

    adapted, _ = adapt(params, loss_fn, batch, 0)
    precision = mt.Precision(compute=jnp.float32)
    return make_run_spec(
        adapted, loss_fn, optimizer, batch, Options(precision=precision, **options)
    )


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
    spec = spec_of(device_budget="least")
    plan = make_plan(spec)
    assert plan.num_parameters == sum(row.count * row.num_parameters for row in plan.groups) == 640
    assert plan.host_bytes == 4 * 640
    assert plan.host_peak_bytes > plan.host_bytes
    schedule = spec.first.schedule
    assert (plan.bytes_in, plan.bytes_out) == moved_bytes(schedule.steady, spec.first.workload)
    assert plan.device_state_bytes == schedule.peak_bytes == schedule.smallest_bytes
    assert (plan.update_mode, plan.num_stages, plan.microbatches) == ("immediate", 5, 1)
    assert plan.hardware is plan.seconds_per_step is plan.host_process_bytes is None
    planned = make_plan(spec_of(device_budget="least", hardware=mt.H200))
    assert planned.hardware == mt.H200 and planned.seconds_per_step == schedule.seconds
    assert planned.host_process_bytes and planned.host_process_bytes > planned.host_peak_bytes


def test_parts_of_the_host_s_memory_add_up_whatever_the_schedule():
    rng, seen = random.Random(0), set()
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    options = {"device_budget": "least", "hardware": replace(BALANCED, host_bytes=2**30)}
    specs = [spec_of(**options), spec_of(clip, **options)]
    for number in range(40):
        spec = specs[number % 2]
        workload, least = spec.first.workload, spec.first.schedule.smallest_bytes
        processes = rng.choice((1, 2, 4))
        budget, room = round(least * rng.uniform(1, 2)), rng.choice((0, 2**30))
        schedule = find_schedule(workload, budget, spec.first.lean, room)
        first = replace(spec.first, schedule=schedule, num_devices=rng.choice((4, 8)))
        plan = make_plan(replace(spec, first=first), processes, rng.choice((1, processes)))
        parts, process = plan.host_parts, plan.host_process_bytes
        assert process is not None and len(parts) == 7 and min(parts.values()) >= 0
        assert sum(list(parts.values())[:5]) == plan.host_peak_bytes
        assert sum(parts.values()) == processes * process
        assert parts["masters and optimizer state"] == plan.host_bytes
        moving = in_flight_bytes(first.scheduled, schedule.steady)
        assert parts["arrays on their way"] == first.num_devices * moving
        # Each host's bars show its share of them; bytes that don't divide are lost.
        share = plan.processes_per_host * process
        assert share - 7 < fills(plan)[0].needed <= share
        seen.add(tuple(name for name, size in parts.items() if size))
        for name, size in parts.items():
            assert (f"host memory, {name}" in str(plan)) == (size > 0 and name != list(parts)[0])
    assert len(seen) > 1 and any("gradients that wait" in names for names in seen)


def test_equal_groups_fold_only_where_they_follow_each_other():
    names = ["embed", "layers/0", "layers/1", "layers/2", "head"]
    count, size = [1, 1, 1, 1, 2], [12, 12, 12, 12, 24]
    assert fold(names, count, size, [0, 1, 1, 1, 2], ()) == SMALL.groups
    rows = fold(names, count, size, [1, 2, 1, 1, 1], ())
    assert [(row.name, row.count) for row in rows] == [
        ("embed", 1),
        ("layers/0", 1),
        ("layers/1 … layers/2", 2),
        ("head", 1),
    ]
    # Those that are not trained come last.
    assert [row.name for row in fold(names, count, size, [0, 1, 1, 1, 2], {0})] == [
        "layers/0 … layers/2",
        "head",
        "embed",
    ]
    with pytest.raises(ValueError):
        fold(names[1:], count, size, [0] * 5, ())


def test_blocks_in_parts_fold_part_by_part():
    parts = [f"layers.{layer}.part {part}" for layer in range(3) for part in (1, 2)]
    names, blocks = ["embed", *parts, "head"], [None, *"001122", None]
    count, size, templates = [9, *[1, 2] * 3, 9], [90, *[10, 20] * 3, 90], [0, *[1, 2] * 3, 3]
    rows = fold(names, count, size, templates, (), blocks)
    assert [(row.name, row.count, row.num_parameters, row.template) for row in rows] == [
        ("embed", 1, 9, 0),
        ("layers.0.part 1 … layers.2.part 1", 3, 1, 1),
        ("layers.0.part 2 … layers.2.part 2", 3, 2, 2),
        ("head", 1, 9, 3),
    ]
    # A block that is unlike its neighbours ends their rows.
    count[4] = 7
    rows = fold(names, count, size, templates, (), blocks)
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
    step = spec_of().first
    flops = [count_flops(bound.stage.jaxpr) for bound in step.stages]
    *first, last = flops
    assert len(set(flops)) > 2
    assert microbatch_work(step).flops == 4 * sum(first) + 3 * last
    apart = replace(step, workload=replace(step.workload, fused_last=False))
    assert microbatch_work(apart).flops == 4 * sum(flops)
    kept = replace(step, schedule=replace(step.schedule, kept=frozenset({1})))
    residuals = step.stages[1].residuals
    assert residuals is not None
    assert microbatch_work(step).flops - microbatch_work(kept).flops == residuals.saved_flops > 0


def test_flops_where_little_is_trained():
    step = spec_of(trainable=lambda path: path[0] in "24").first
    flops = [count_flops(bound.stage.jaxpr) for bound in step.stages]
    # Nothing goes back beyond the first that is trained; of the others, one has no gradient.
    assert step.workload.backward == (False, False, True, True, True)
    expected = flops[0] + flops[1] + 4 * flops[2] + 3 * flops[3] + 3 * flops[4]
    assert microbatch_work(step).flops == expected


def test_every_microbatch_and_the_update_count():
    once, thrice = spec_of(), spec_of(microbatches=3)
    update = make_plan(once).flops_per_step - microbatch_work(once.first).flops
    assert update > 0
    assert make_plan(thrice).flops_per_step == 3 * microbatch_work(thrice.first).flops + update


@pytest.mark.parametrize(
    ("link", "flops", "bound"),
    [(10.0, 110.0, "link"), (10.0, 50.0, "compute"), (10.0, 95.0, "neither")],
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
    [(1.12, "link"), (1.08, "neither"), (0.92, "neither"), (0.88, "compute")],
)
def test_bound_is_neither_within_a_tenth(ratio, bound):
    # 20 bytes at 10 a second: two seconds of transfers to `ratio` as many of arithmetic.
    hardware = replace(BALANCED, flops_per_s=184 * ratio / 2)
    assert small_plan(hardware=hardware).bound == bound


def test_both_directions_of_the_link_count():
    plan = small_plan(hardware=BALANCED, bytes_in=0, bytes_out=160)
    assert plan.bound == "link"
    assert replace(plan, bytes_out=0).bound == "compute"


def test_without_hardware_nothing_is_claimed():
    plan = small_plan()
    assert plan.bound == "neither"
    assert plan.seconds_in is plan.seconds_out is plan.seconds_compute is None
    assert plan.fits_host is plan.fits_device is None
    assert "fit" not in str(plan).lower()
    assert "bound by" not in str(plan)


def test_fits():
    plan = small_plan(hardware=BALANCED)
    assert plan.fits_host is False
    assert plan.fits_device is True
    assert "DOES NOT FIT in 50 B" in str(plan)
    assert "fits in 100 B" in str(plan)
    assert small_plan(hardware=replace(BALANCED, host_bytes=None)).fits_host is None


def row(name: str, template: int, count: int = 1) -> GroupRow:
    return GroupRow(
        name=name, count=count, num_parameters=GIB // 4, host_bytes=3 * GIB, template=template
    )


BIG = Plan(
    # Roughly a 3.4B decoder: the figures a reader would look for are round.
    num_parameters=38 * GIB // 4,
    num_frozen=0,
    frozen_bytes=0,
    groups=(row("embed", 0), row("layers/0 … layers/35", 1, count=36), row("head", 2)),
    host_bytes=114 * GIB,
    host_peak_bytes=114 * GIB,
    host_process_bytes=1169 * GIB // 10,
    device_state_bytes=12 * GIB,
    device_other_bytes=5 * GIB,
    device_temporary_bytes=0,
    device_temporary_estimated=False,
    bytes_in=38 * GIB,
    bytes_out=0,
    flops_per_step=588 * 10**12,
    seconds_per_step=1.25,
    microbatches=4,
    update_mode="deferred",
    num_stages=38,
    num_kept=0,
    num_templates=3,
    hardware=replace(cards.H200, host_bytes=125 * GIB),
    warnings=("`while` holds 3 blocks", "one large stage"),
)


def big_plan(**changes: Any) -> Plan:
    return replace(BIG, **changes)


def test_table_of_text():
    text = str(big_plan())
    lines = text.splitlines()
    assert 15 <= len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)
    assert "10.2B parameters in 38 groups; 38 stages from 3 templates; deferred update" in lines[0]
    layer = next(line for line in lines if line.startswith("layers/0 … layers/35"))
    assert layer.split()[3:] == ["36", "268M", "3.00", "GiB", "108.00", "GiB", "1"]
    # Columns line up: every cell of a right-aligned column ends where its heading does.
    heading = next(line for line in lines if line.startswith("group"))
    end = heading.index("count") + len("count")
    assert lines[lines.index(layer)][end - 2 : end] == "36"
    assert lines[lines.index(layer) + 1][end - 2 : end] == " 1"
    for words in (
        "host memory at rest 114.00 GiB",
        "host memory at peak 114.00 GiB",
        "host memory, the process 116.90 GiB estimate, fits in 125.00 GiB",
        "device memory, in all 17.00 GiB fits in 119.34 GiB, 85% of the card",
        "to the device, a step 38.00 GiB 0.868 s",
        "to the host, a step 0 B 0 s",
        "arithmetic, a step, 4 microbatches 588 TFLOP 0.805 s",
        "a step, estimate 1.25 s",
        "on NVIDIA H200 47 GB/s each way, 730 TFLOP/s, measured",
        "bound by neither: balanced",
        "warning: `while` holds 3 blocks",
        "warning: one large stage",
    ):
        assert words in " ".join(text.split())


@pytest.mark.parametrize(("share", "line"), [(0.04, False), (0.06, True), (0.8, True)])
def test_attention_has_a_line_where_it_is_much(share, line):
    machine = replace(cards.H200, flops_per_s=588e12, sustained_attention=0.5)
    plan = big_plan(attention_flops_per_step=int(share * 588e12), hardware=machine)
    words = " ".join(str(plan).split())
    # Attention runs at half the rate of all else.
    assert f"microbatches 588 TFLOP {1 + share:.3g} s" in words
    shown = f"attention, of that {share * 588:.3g} TFLOP {2 * share:.3g} s, {share:.0%} of it"
    assert (shown in words) == ("attention" in words) == line
    untimed = " ".join(str(replace(plan, hardware=None)).split())
    assert (f"TFLOP {share:.0%} of it" in untimed) == line


def test_attention_counts_in_what_bounds_a_step():
    # Two seconds over the link; the same operations take 1.84 s, or twice as long in attention.
    machine = replace(BALANCED, sustained_attention=0.5)
    assert small_plan(hardware=replace(machine, flops_per_s=110.0)).bound == "link"
    plan = small_plan(hardware=machine, attention_flops_per_step=184)
    assert (plan.bound, plan.seconds_compute) == ("compute", 3.68)


def test_temporaries_count_once_they_are_known():
    uncounted = big_plan(device_temporary_bytes=None)
    words = " ".join(str(uncounted).split())
    assert "device memory, temporaries not counted known where functions are compiled" in words
    assert "device memory, in all 17.00 GiB unknown: without temporaries to" in words
    assert uncounted.fits_device is None
    assert replace(uncounted, device_other_bytes=200 * GIB).fits_device is False
    words = " ".join(str(big_plan(device_temporary_bytes=103 * GIB)).split())
    assert "device memory, temporaries 103.00 GiB device" in words
    assert "device memory, in all 120.00 GiB DOES NOT FIT in 119.34 GiB, 85% of the card" in words
    guess = big_plan(device_temporary_bytes=GIB, device_temporary_estimated=True)
    assert "device memory, temporaries 1.00 GiB estimate" in " ".join(str(guess).split())


def test_a_trainer_without_a_gpu_says_what_it_planned():
    def loss_fn(params: Any, batch: Any) -> Any:
        return (batch @ params["w"]).mean()

    given = {"w": jnp.ones((4, 4))}, loss_fn, optax.sgd(0.1), jnp.ones((4, 4))
    found = mt.Trainer(*given, hardware=mt.H100, progress=False).plan
    planned = mt.plan(*given, hardware=mt.H100)
    assert found.device_budget is None and planned.device_budget
    assert found.fits_device is None and planned.fits_device
    words = " ".join(str(found).split())
    assert "B the least device memory, other" in words
    assert "temporaries not counted known where" in words and "B unknown: without" in words
    assert "of a budget of " in str(planned)


def test_what_is_missing_is_said():
    host = " ".join(str(big_plan(hardware=cards.H200)).split())
    assert "GiB estimate, fits in 256.00 GiB, a typical host" in host
    bare = Hardware(name="Bare", link_bytes_per_s=1e9, flops_per_s=1e12)
    words = " ".join(str(big_plan(hardware=bare)).split())
    assert "GiB estimate, unknown: the hardware has no `host_bytes`" in words
    assert "in all 17.00 GiB unknown: the hardware has no `device_bytes`" in words


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_share_that_jax_takes_is_counted(name, monkeypatch):
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    assert cards.RTX_4090.usable_bytes == int(0.85 * 24 * GIB)
    monkeypatch.setenv(name, "0.5")
    assert cards.RTX_4090.usable_bytes == 12 * GIB
    assert replace(cards.RTX_4090, device_share=1.0).usable_bytes == 24 * GIB


def test_what_exceeds_the_device_is_refused_with_figures():
    plan = big_plan(device_temporary_bytes=3 * GIB)
    check_device(plan, None)
    check_device(plan, plan.device_bytes)
    with pytest.raises(MemoryError, match=r"needs 20\.00 GiB of .* 19\.00 GiB .*microbatches"):
        check_device(plan, 19 * GIB)
    values = [jax.ShapeDtypeStruct((2, length, 64), "bfloat16") for length in (64, 8191)]
    hint = r"a length of 8,191, which none of 2, 3, 5, 7 divides: .* 128, such as 8,192\.$"
    with pytest.raises(MemoryError, match=hint):
        check_device(plan, 19 * GIB, values)
    with pytest.raises(MemoryError, match=r"with less state\)\.$"):
        check_device(plan, 19 * GIB, [jax.ShapeDtypeStruct((7, 8190, 11), "float32"), values[0]])


def test_many_different_groups_are_shortened():
    names = ["embed", *(f"layers/{i}" for i in range(36)), "head"]
    counts = [1] * 38
    counts[6], counts[32], counts[5], counts[33] = 3, 5, 20, 40
    rows = zip(names, counts, strict=True)
    plan = big_plan(groups=tuple(row(name, i, count) for i, (name, count) in enumerate(rows)))
    text = str(plan)
    assert len(text.splitlines()) <= 33
    # Six rows are shown before it and five after it, so the ellipsis stands for 27, of which one
    # is of three groups and one of five.
    hidden = next(line for line in text.splitlines() if line.startswith("…"))
    assert hidden.split() == ["…", "33"]
    assert "layers/4 " in text and "layers/5 " not in text
    assert "layers/32 " in text and "layers/31 " not in text
    assert "<td>33</td>" in plan._repr_html_()


def test_html_escapes_what_users_name():
    plan = small_plan(
        groups=(row("<b>embed</b>", 0), row("a&b … a&d", 1)),
        warnings=("<script>",),
        hardware=replace(BALANCED, name="<GPU>"),
    )
    text = plan._repr_html_()
    assert "&lt;b&gt;embed&lt;/b&gt;" in text and "<b>" not in text
    assert "a&amp;b … a&amp;d" in text
    assert "warning: &lt;script&gt;" in text and "<script>" not in text
    assert "&lt;GPU&gt;" in text and "<GPU>" not in text
    for tag in ("table", "tr", "td", "th", "p"):
        assert text.count(f"<{tag}>") == text.count(f"</{tag}>") > 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (512 * 2**20, "512.00 MiB"),
        (3 * GIB, "3.00 GiB"),
    ],
)
def test_memory_units(num_bytes, text):
    words = " ".join(str(small_plan(device_state_bytes=num_bytes)).split())
    assert f"device memory, state and activations {text} the least device" in words


def test_a_table_has_one_unit_where_that_shows_its_numbers():
    plan = small_plan(host_peak_bytes=44 * 2**20, host_bytes=6 * 2**20, bytes_in=60 * 2**10)
    words = " ".join(str(replace(plan, bytes_out=100, device_budget=2**20)).split())
    for part in ("peak 44.00 MiB", "at rest 6.00 MiB", "device, a step 0.06 MiB", "step 100 B"):
        assert part in words
    assert "state and activations 60 B of a budget of 1.00 MiB" in words
    # The unit is that of the largest number, whichever that is.
    for larger in ({"host_process_bytes": 2 * GIB}, {"bytes_in": 3 * GIB}):
        assert "peak 0.04 GiB" in " ".join(str(replace(plan, **larger)).split())
    assert "at rest 0.50 GiB" in " ".join(str(big_plan(host_bytes=GIB // 2)).split())


def test_a_toy_model_is_bound_by_python_not_by_the_link():
    plan = small_plan(hardware=BALANCED, bytes_in=0, bytes_out=160, seconds_per_step=17.0)
    for needed, bound in ((14, "the link"), (15, "neither"), (17, "neither"), (18, "Python")):
        words = " ".join(str(replace(plan, seconds_dispatch=needed)).split())
        assert f"bound by {bound}" in words
    planned = make_plan(spec_of(device_budget="least", hardware=mt.H200))
    assert planned.bound == "dispatch" and planned.seconds_per_step
    assert planned.seconds_dispatch <= planned.seconds_per_step < 1.1 * planned.seconds_dispatch


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (7.64e-8, "0.0764 µs"), (9.994e-4, "999 µs"), (9.996e-4, "1 ms")]
    + [(0.0123, "12.3 ms"), (0.1, "0.1 s"), (1234.5, "1.23e+03 s"), (None, "")],
)
def test_small_times_have_small_units(value, text):
    assert seconds(value) == text
