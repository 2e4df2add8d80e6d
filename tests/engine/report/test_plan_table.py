"""What plans print: tables of text and HTML, units, and warnings."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.report.plan_table import BOUNDS
from megatrain_jax._src.engine.report.table import seconds
from megatrain_jax._src.engine.state import hardware
from megatrain_jax._src.engine.state.hardware import Hardware
from messages import tells
from plans import BALANCED, GIB, big_plan, layers_spec, row, small_plan
from quantities import has_row, title_of


def test_what_all_parameters_would_take_if_trained_counts_what_rests_on_disks():
    memory = big_plan(num_frozen=6 * 10**9, frozen_bytes=24 * GIB)
    disk = replace(memory, host_bytes=memory.host_bytes - 80 * GIB, disk_bytes=80 * GIB)
    rows = [next(x for x in str(p).splitlines() if "not trained" in x) for p in (memory, disk)]
    assert rows[0] == rows[1]


def test_table_of_text():
    text = str(big_plan())
    lines = text.splitlines()
    assert 15 <= len(lines) <= 34
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)
    assert has_row(title_of(text), [10.2e9, 38, 38, 3])
    layer = next(line for line in lines if line.startswith("layers/0 … layers/35"))
    assert layer.split()[3:] == ["36", "268M", "3.00", "GiB", "108.00", "GiB", "1"]
    # Columns line up: every cell of a right-aligned column ends where its heading does.
    heading = next(line for line in lines if line.startswith("group"))
    end = heading.index("count") + len("count")
    assert lines[lines.index(layer)][end - 2 : end] == "36"
    assert lines[lines.index(layer) + 1][end - 2 : end] == " 1"
    for figures in (
        [114 * GIB],
        [116.9 * GIB, 125 * GIB],
        [17 * GIB, 130.57 * GIB, 0.93],
        [38 * GIB, 0.868],
        [0, 0],
        [4],
        [588e12, 0.835],
        [1.25],
        [47e9, 730e12],
    ):
        assert has_row(text, figures)
    assert BOUNDS["neither"] in text and all(warning in text for warning in big_plan().warnings)


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({}, ("17.00 GiB", "116.90 GiB"), ("alike",)),
        (
            {"device_state_bytes": 900 * GIB},
            ("not", "GPU", "905.00 GiB"),
            ("microbatches", "device_budget"),
        ),
        (
            {"host_process_bytes": 900 * GIB},
            ("not", "host", "900.00 GiB"),
            ("compact", "trainable"),
        ),
        ({"bytes_in": 380 * GIB}, ("17.00 GiB",), ("link", "batches")),
        ({"flops_per_step": 588 * 10**13}, ("17.00 GiB",), ("arithmetic", "GPU", "float8")),
        ({"seconds_dispatch": 9.0}, ("17.00 GiB",), ("Python", "batches")),
    ],
)
def test_a_plan_begins_with_its_answers(changes: Any, first: Any, last: Any):
    plan = big_plan(batch_size=32768, batch_unit="tokens", **changes)
    says_it_fits, rate, bound = str(plan).splitlines()[:3]
    assert tells(says_it_fits, *first) and tells(bound, *last)
    assert says_it_fits.startswith("Fits") == (plan.fits is True)
    assert tells(rate, "1.25", "26,214 tokens")  # 32768 / 1.25
    assert all(text in plan._repr_html_() for text in ("26,214 tokens", first[0]))


def test_a_plan_without_a_machine_says_what_it_lacks():
    needs, lacks = str(big_plan(hardware=None, seconds_per_step=None)).splitlines()[:2]
    assert tells(needs, "17.00 GiB", "116.90 GiB") and tells(lacks, "`hardware`")


@pytest.mark.parametrize(("share", "line"), [(0.04, False), (0.06, True), (0.8, True)])
def test_attention_has_a_line_where_it_is_much(share, line):
    machine = replace(
        hardware.card("H200"), flops_per_s=588e12, sustained=1.0, sustained_attention=0.5
    )
    plan = big_plan(attention_flops_per_step=int(share * 588e12), hardware=machine)
    text = str(plan)
    # Attention runs at half the rate of all else.
    assert has_row(text, [588e12, 1 + share])
    assert has_row(text, [share * 588e12, 2 * share, share]) == ("attention" in text) == line
    assert has_row(str(replace(plan, hardware=None)), [share * 588e12, share]) == line


@pytest.mark.parametrize(
    ("link", "loops", "memory", "bound"),
    [
        (1.0, 0.0, 0.5, "arithmetic"),
        (1.0, 0.0, 3.0, "memory"),
        (1.0, 4.0, 3.0, "loops"),
        (4.0, 0.5, 0.5, "link"),
        (3.2, 0.5, 0.5, "neither"),
    ],
)
def test_the_bottleneck_follows_from_printed_times(link, loops, memory, bound):
    machine = replace(
        hardware.card("H200"),
        flops_per_s=294e12,
        sustained=1.0,
        link_bytes_per_s=1e9,
        memory_bytes_per_s=1e9,
    )
    plan = big_plan(hardware=machine, bytes_in=int(link * 1e9), seconds_loops=loops)
    text = str(replace(plan, memory_bytes=memory * 1e9))
    assert BOUNDS[bound] in text
    for figures in ([memory * 1e9, memory], [588e12, 2], [link * 1e9, link]):
        assert has_row(text, figures)
    assert has_row(text, [2 + loops + memory, link])


@pytest.mark.parametrize(("share", "line"), [(0.0, False), (0.04, False), (0.06, True)])
def test_the_arrival_of_a_batch_has_a_row_where_it_is_long(share, line):
    plan = make_plan(layers_spec(hardware="H200"))
    assert plan.workload is not None and plan.seconds_per_step is not None
    costs = replace(plan.workload.costs, batch=share * plan.seconds_per_step)
    changed = replace(plan, workload=replace(plan.workload, costs=costs))
    none = replace(plan.workload.costs, batch=0.0)
    without = replace(plan, workload=replace(plan.workload, costs=none))
    assert len(str(changed).splitlines()) - len(str(without).splitlines()) == line
    assert has_row(str(changed), [costs.batch]) == line or not share
    untimed = replace(changed, seconds_per_step=None, hardware=None)
    assert untimed.link_share is None
    assert not share or not has_row(str(untimed), [costs.batch])


@pytest.mark.parametrize("together", [10e9, math.inf])
def test_a_disk_has_rows_of_its_bytes_seconds_and_wear(together):
    big = big_plan()
    assert big.hardware is not None
    rates = {"disk_read_bytes_per_s": 8e9, "disk_write_bytes_per_s": 4e9}
    machine = replace(big.hardware, disk_bytes_per_s=together, **rates)
    moved = {"disk_read_bytes": 32 * GIB, "disk_written_bytes": 16 * GIB}
    text = str(big_plan(hardware=machine, disk_bytes=64 * GIB, **moved))
    assert has_row(text, [64 * GIB]) and has_row(text, [32 * GIB, 32 * GIB / 8e9])
    # Its terabytes in a thousand steps, and those that a drive endures.
    assert has_row(text, [16 * GIB, 16 * GIB / 4e9, 17.2, 1000, 2, 1200])
    printed = [47e9, 8, 4] + [together / 1e9] * (together < math.inf)
    assert has_row(text, [*printed, 730e12])
    assert "disk" not in str(big) and not has_row(text, [2 * GIB])
    key = Key(Kind.ACTIVATION, 0)
    costs, sizes = SimpleNamespace(batch=0.0), {key: 2 * GIB}
    workload: Any = SimpleNamespace(on_disk={key: 0}, size=sizes.__getitem__, costs=costs)
    shown = {"hardware": machine, "disk_bytes": 64 * GIB, "workload": workload}
    assert has_row(str(big_plan(**shown)), [2 * GIB])


def test_a_trainer_without_a_gpu_says_what_it_planned(capfd):
    def loss_fn(params: Any, batch: Any) -> Any:
        return (batch @ params["w"]).mean()

    given = {"w": jnp.ones((4, 4))}, loss_fn, optax.sgd(0.1), jnp.ones((4, 4))
    found = mt.Trainer(*given, hardware="H100").plan
    assert tells(capfd.readouterr().err, "`hardware`", "NVIDIA H100 80GB", "GPU")
    planned = mt.plan(*given, hardware="H100")
    assert found.device_budget is None and planned.device_budget
    assert found.fits_device is None and planned.fits_device
    least, budget = found.device_state_bytes, planned.device_budget
    assert has_row(str(found), [least]) and has_row(
        str(planned), [planned.device_state_bytes, budget]
    )
    assert has_row(str(found), [found.device_bytes])


def test_what_is_missing_is_said():
    host = str(big_plan(hardware=hardware.card("H200")))
    assert has_row(host, [116.9 * GIB, 256 * GIB])
    bare = Hardware(name="Bare", link_bytes_per_s=1e9, flops_per_s=1e12)
    lines = str(big_plan(hardware=bare)).splitlines()
    for name, figure in (("`host_bytes`", 116.9 * GIB), ("`device_bytes`", 17 * GIB)):
        (line,) = (line for line in lines if name in line)
        assert has_row(line, [figure])


def test_many_different_groups_are_shortened():
    names = ["embed", *(f"layers/{i}" for i in range(36)), "head"]
    counts = [1] * 38
    counts[6], counts[32], counts[5], counts[33] = 3, 5, 20, 40
    rows = zip(names, counts, strict=True)
    plan = big_plan(groups=tuple(row(name, i, count) for i, (name, count) in enumerate(rows)))
    text = str(plan)
    assert len(text.splitlines()) <= 38
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
    assert "&lt;script&gt;" in text and "<script>" not in text
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
    assert f" {text} " in str(small_plan(device_state_bytes=num_bytes))


def test_a_table_has_one_unit_where_that_shows_its_numbers():
    plan = small_plan(host_peak_bytes=44 * 2**20, host_bytes=6 * 2**20, bytes_in=60 * 2**10)
    words = " ".join(str(replace(plan, bytes_out=100, device_budget=2**20)).split())
    for part in ("44.00 MiB", "6.00 MiB", "0.06 MiB", "100 B", "60 B", "1.00 MiB"):
        assert tells(words, part)
    # The unit is that of the largest number, whichever that is.
    for larger in ({"host_process_bytes": 2 * GIB}, {"bytes_in": 3 * GIB}):
        assert tells(str(replace(plan, **larger)), "0.04 GiB")
    assert tells(str(big_plan(host_bytes=GIB // 2)), "0.50 GiB")


def test_a_toy_model_is_bound_by_python_not_by_the_link():
    plan = small_plan(hardware=BALANCED, bytes_in=0, bytes_out=160, seconds_per_step=17.0)
    for needed, bound in ((14, "link"), (15, "neither"), (17, "neither"), (18, "dispatch")):
        changed = replace(plan, seconds_dispatch=needed)
        assert changed.bound == bound and BOUNDS[bound] in str(changed)  # type: ignore
    planned = make_plan(layers_spec(device_budget="least", hardware="H200"))
    assert planned.bound == "dispatch" and planned.seconds_per_step
    assert planned.seconds_dispatch <= planned.seconds_per_step < 1.1 * planned.seconds_dispatch


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (7.64e-8, "0.0764 µs"), (9.994e-4, "999 µs"), (9.996e-4, "1 ms")]
    + [(0.0123, "12.3 ms"), (0.1, "0.1 s"), (1234.5, "1.23e+03 s"), (None, "")],
)
def test_small_times_have_small_units(value, text):
    assert seconds(value) == text
