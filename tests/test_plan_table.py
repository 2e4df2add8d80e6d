"""What plans print: tables of text and HTML, units, and warnings."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.report.make_plan import make_plan
from megatrain_jax._src.report.table import seconds
from megatrain_jax._src.state import cards
from megatrain_jax._src.state.hardware import Hardware
from plans import BALANCED, GIB, big_plan, layers_spec, row, small_plan


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
        "device memory, in all 17.00 GiB fits in 130.57 GiB, 93% of the card",
        "to the device, a step 38.00 GiB 0.868 s",
        "to the host, a step 0 B 0 s",
        "microbatches 4 arithmetic, a step 588 TFLOP 0.835 s",
        "a step, estimate 1.25 s",
        "on NVIDIA H200 47 GB/s each way, 730 TFLOP/s, measured",
        "bound by neither: balanced",
        "warning: `while` holds 3 blocks",
        "warning: one large stage",
    ):
        assert words in " ".join(text.split())


@pytest.mark.parametrize(("share", "line"), [(0.04, False), (0.06, True), (0.8, True)])
def test_attention_has_a_line_where_it_is_much(share, line):
    machine = replace(cards.H200, flops_per_s=588e12, sustained=1.0, sustained_attention=0.5)
    plan = big_plan(attention_flops_per_step=int(share * 588e12), hardware=machine)
    words = " ".join(str(plan).split())
    # Attention runs at half the rate of all else.
    assert f"arithmetic, a step 588 TFLOP {1 + share:.3g} s" in words
    shown = f"attention, of that {share * 588:.3g} TFLOP {2 * share:.3g} s, {share:.0%} of it"
    assert (shown in words) == ("attention" in words) == line
    untimed = " ".join(str(replace(plan, hardware=None)).split())
    assert (f"TFLOP {share:.0%} of it" in untimed) == line


@pytest.mark.parametrize(
    ("link", "loops", "memory", "bound"),
    [
        (1.0, 0.0, 0.5, "arithmetic"),
        (1.0, 0.0, 3.0, "the device's memory traffic"),
        (1.0, 4.0, 3.0, "loops of short kernels and copies"),
        (4.0, 0.5, 0.5, "the link"),
        (3.2, 0.5, 0.5, "neither: balanced"),
    ],
)
def test_the_bottleneck_follows_from_printed_times(link, loops, memory, bound):
    machine = replace(
        cards.H200, flops_per_s=294e12, sustained=1.0, link_bytes_per_s=1e9, memory_bytes_per_s=1e9
    )
    plan = big_plan(hardware=machine, bytes_in=int(link * 1e9), seconds_loops=loops)
    lines = str(replace(plan, memory_bytes=memory * 1e9)).splitlines()
    arithmetic, last = _row(lines, "arithmetic, a step"), _row(lines, "bound by")
    assert last.startswith(bound)
    kernels = _row(lines, "other kernels")
    assert kernels.endswith(f"GiB of memory traffic, {memory:g} s more")
    assert arithmetic.endswith(" 2 s") and _row(lines, "to the device, a step").endswith(
        f"{link:g} s"
    )
    assert last.endswith(f"GPU {2 + loops + memory:g} s, link {link:g} s")


@pytest.mark.parametrize(("share", "line"), [(0.0, False), (0.04, False), (0.06, True)])
def test_the_arrival_of_a_batch_has_a_row_where_it_is_long(share, line):
    plan = make_plan(layers_spec(hardware=mt.H200))
    assert plan.workload is not None and plan.seconds_per_step is not None
    costs = replace(plan.workload.costs, batch=share * plan.seconds_per_step)
    changed = replace(plan, workload=replace(plan.workload, costs=costs))
    rows = [x for x in str(changed).splitlines() if x.startswith("the batch's arrival, a step")]
    assert len(rows) == line
    assert not line or rows[0].endswith("s  partly beside the previous step")
    assert "arrival" not in str(replace(changed, seconds_per_step=None, hardware=None))


def _row(lines: list[str], name: str) -> str:
    """The cells after a row's name, joined by single blanks."""
    return " ".join(next(x for x in lines if x.startswith(name)).removeprefix(name).split())


def test_a_trainer_without_a_gpu_says_what_it_planned(capfd):
    def loss_fn(params: Any, batch: Any) -> Any:
        return (batch @ params["w"]).mean()

    given = {"w": jnp.ones((4, 4))}, loss_fn, optax.sgd(0.1), jnp.ones((4, 4))
    found = mt.Trainer(*given, hardware=mt.H100).plan
    assert "`hardware`=NVIDIA H100 80GB sets the rates of schedule and plan; JAX sees no GPU" in (
        capfd.readouterr().err
    )
    planned = mt.plan(*given, hardware=mt.H100)
    assert found.device_budget is None and planned.device_budget
    assert found.fits_device is None and planned.fits_device
    words = " ".join(str(found).split())
    assert "B the minimum device memory, other" in words
    assert "temporaries not counted known where" in words and "B unknown: without" in words
    assert "of a budget of " in str(planned)


def test_what_is_missing_is_said():
    host = " ".join(str(big_plan(hardware=cards.H200)).split())
    assert "GiB estimate, fits in 256.00 GiB, a typical host" in host
    bare = Hardware(name="Bare", link_bytes_per_s=1e9, flops_per_s=1e12)
    words = " ".join(str(big_plan(hardware=bare)).split())
    assert "GiB estimate, unknown: the hardware has no `host_bytes`" in words
    assert "in all 17.00 GiB unknown: the hardware has no `device_bytes`" in words


def test_many_different_groups_are_shortened():
    names = ["embed", *(f"layers/{i}" for i in range(36)), "head"]
    counts = [1] * 38
    counts[6], counts[32], counts[5], counts[33] = 3, 5, 20, 40
    rows = zip(names, counts, strict=True)
    plan = big_plan(groups=tuple(row(name, i, count) for i, (name, count) in enumerate(rows)))
    text = str(plan)
    assert len(text.splitlines()) <= 34
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
    assert f"device memory, state and activations {text} the minimum device" in words


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
    planned = make_plan(layers_spec(device_budget="least", hardware=mt.H200))
    assert planned.bound == "dispatch" and planned.seconds_per_step
    assert planned.seconds_dispatch <= planned.seconds_per_step < 1.1 * planned.seconds_dispatch


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (7.64e-8, "0.0764 µs"), (9.994e-4, "999 µs"), (9.996e-4, "1 ms")]
    + [(0.0123, "12.3 ms"), (0.1, "0.1 s"), (1234.5, "1.23e+03 s"), (None, "")],
)
def test_small_times_have_small_units(value, text):
    assert seconds(value) == text
