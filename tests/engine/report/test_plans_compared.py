"""Plans side by side, and a step's timeline: tables and figures against plans and schedules."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.common.remembering import remembered, remembering
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.report.make_plan import moved_bytes
from megatrain_jax._src.engine.report.plan_table import BOUNDS
from megatrain_jax._src.engine.report.table import UNFIT
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.schedule.timeline import LANES, memory, timeline
from megatrain_jax._src.engine.spec import cut_run
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from messages import refuses, tells
from shown import Shown
from workloads import random_workload

OPTIMIZERS = {"adamw": optax.adamw(1e-3), "clipped": optax.chain(optax.clip(1.0), optax.lion(1e-3))}


def build():
    return {"layers": {str(i): {"w": jnp.ones((64, 64))} for i in range(6)}}


def loss_fn(model: Any, batch: Any) -> Any:
    x = batch["x"]
    for layer in model["layers"].values():
        x = jnp.tanh(x @ layer["w"])
    return (x**2).mean()


def batch(rows: int) -> dict[str, Any]:
    return {"x": jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16)}


OVER = {
    "hardware": [mt.card("H200"), mt.card("RTX 4090")],
    "optimizer": OPTIMIZERS,
    "precision": {"fp32": mt.Precision(), "compact": mt.Precision.compact()},
    "sample_batch": {"8 rows": batch(8), "9 rows": batch(9)},
}


@pytest.mark.exhaustive
def test_every_combination_is_a_row_with_the_figures_of_its_plan():
    table = mt.compare_plans(build, loss_fn, over=OVER, microbatches=2)
    assert table.axes == tuple(OVER) and len(table) == 16
    names = [
        [mt.card("H200").name, mt.card("RTX 4090").name],
        *(list(OVER[axis]) for axis in list(OVER)[1:]),
    ]
    assert [row.names for row in table] == list(itertools.product(*names))
    cells = Shown(table._repr_html_()).rows[1:]
    *lines, remark = repr(table).splitlines()[1:]
    # Of the two machines one has rates that nobody measured.
    assert tells(remark, mt.card("RTX 4090").name, mt.card("RTX 4090").source)
    assert remark in table._repr_html_()
    for row, shown, line in zip(table, cells, lines, strict=True):
        assert " ".join(shown).split() == line.split()
        if row.names[-1] == "9 rows":
            assert row.plan is None and row.refused and "microbatches" in row.refused
            assert shown[4] == "refused" and shown[-1] == row.refused
            continue
        machine = mt.card("H200") if row.names[0] == mt.card("H200").name else mt.card("RTX 4090")
        precision = OVER["precision"][row.names[2]]
        optimizer = OPTIMIZERS[row.names[1]]
        options: Any = {"hardware": machine, "precision": precision, "microbatches": 2}
        assert row.plan == mt.plan(build, loss_fn, optimizer, batch(8), **options)
        assert shown[4] == "yes" and shown[6] == BOUNDS["dispatch"]


@pytest.mark.by_default("trainable")
@pytest.mark.parametrize(
    "over",
    [
        {"trainable": {"all": None, "late": r"layers/[45]/"}, "microbatches": {"1": 1, "2": 2}},
        {
            "on_nonfinite": {"raise": "raise", "skip": "skip"},
            "precision": {
                "fp32": mt.Precision(compute=jnp.float32),
                "compact": mt.Precision.compact(),
            },
        },
    ],
    ids=["trainable", "precision"],
)
def test_plans_that_share_a_trace_are_those_made_alone(over):
    """What a trace depends on, and what it doesn't, in one comparison."""
    parts: Any = {"optimizer": OPTIMIZERS["adamw"], "sample_batch": batch(8)}
    for row in mt.compare_plans(build, loss_fn, **parts, hardware="RTX 4090", over=over):
        own = {axis: over[axis][name] for axis, name in zip(over, row.names, strict=True)}
        assert row.plan == mt.plan(build, loss_fn, **parts, hardware="RTX 4090", **own)


def test_what_does_not_fit_is_said_in_a_comparison():
    tiny = [
        mt.Hardware(
            name=f"{host}-{device}",
            host_bytes=host,
            device_bytes=device,
            link_bytes_per_s=1e9,
            flops_per_s=1e12,
        )
        for host, device in ((10**12, 10**9), (10**3, 10**9), (10**3, 10**4))
    ]
    table = mt.compare_plans(
        build, loss_fn, OPTIMIZERS["adamw"], batch(8), over={"hardware": tiny, "seed": [0]}
    )
    said = [cells[2] for cells in Shown(table._repr_html_()).rows[1:]]
    assert [UNFIT in cell for cell in said] == [False, True, True]
    assert [tells(cell, "host", "device") for cell in said] == [False, False, True]
    assert len(Shown(table._repr_html_()).red) == 2
    assert [row.plan.fits_host for row in table if row.plan] == [True, False, False]
    assert table[-1].names == (tiny[-1].name, "0") and table[1:] == table.rows[1:]


def test_what_is_not_known_to_fit_is_unknown_in_a_comparison():
    table = mt.compare_plans(
        build, loss_fn, OPTIMIZERS["adamw"], batch(8), over={"microbatches": [1]}
    )
    ((_, said, *_),) = Shown(table._repr_html_()).rows[1:]
    assert said == "unknown" and not Shown(table._repr_html_()).red


def test_of_what_plans_share_the_last_few_parts_are_remembered():
    made: list[int] = []

    def get(number: int) -> int:
        return remembered("numbers", lambda: number, lambda: made.append(number) or number)

    with remembering():
        for number in (*range(8), 0, 8):
            assert get(number) == number
        # Of nine the first one was used again, so that the second one has gone.
        assert get(0) == 0 and get(1) == 1
    assert made == [*range(9), 1]


def test_plans_within_plans_share_what_they_remember():
    made: list[int] = []

    def get() -> int:
        return remembered("numbers", lambda: 1, lambda: made.append(1) or 1)

    with remembering():
        for _ in range(2):
            with remembering():
                assert get() == 1
        assert get() == 1
    assert made == [1]


@pytest.mark.parametrize(
    ("over", "given", "error", "message"),
    [
        ({}, {}, ValueError, "`over` .*empty"),
        ([1], {}, TypeError, "`over` .*mapping"),
        ({"speed": [1]}, {}, ValueError, "`over` .*'speed'.* model, loss_fn"),
        ({"seed": [1, 1]}, {}, ValueError, r"`over\['seed'\]` .*two.*'1'"),
        ({"seed": 3}, {}, TypeError, r"`over\['seed'\]` .*mapping"),
        ({"seed": []}, {}, ValueError, r"`over\['seed'\]` .*empty"),
        ({"precision": [mt.Precision()]}, {}, TypeError, r"`over\['precision'\]`"),
        ({"seed": [1]}, {"seed": 2}, ValueError, "`seed` .*`over`"),
        ({"seed": [1]}, {"optimizer": None}, TypeError, "`optimizer`"),
        ({"seed": [1]}, {"sped": 1}, TypeError, "'sped'"),
        ({"seed": [1]}, {"microbatches": "a"}, TypeError, "`microbatches` .*integer"),
    ],
)
def test_misuses_of_comparisons_are_named(over: Any, given: Any, error: Any, message: str):
    arguments = {"optimizer": OPTIMIZERS["adamw"], "sample_batch": batch(8), **given}
    with pytest.raises(error, match=message):
        mt.compare_plans(build, loss_fn, over=over, **arguments)


# Timelines


def overlapping(spans: Any, lane: str) -> list[Any]:
    rows = sorted((s for s in spans if s.lane == lane), key=lambda s: (s.start, s.end))
    pairs = zip(rows, rows[1:], strict=False)
    return [(a, b) for a, b in pairs if b.start < a.end - 1e-9 * max(1.0, abs(a.end))]


@pytest.mark.parametrize("seed", range(20))
def test_a_timeline_is_the_step_that_the_schedule_foretells(seed: int):
    workload = random_workload(seed)
    schedule = find_schedule(workload, None)
    spans = timeline(workload, schedule)
    assert not [found for lane in LANES for found in overlapping(spans, lane)]
    end = max(span.end for span in spans if span.lane == "compute")
    np.testing.assert_allclose(end, schedule.seconds, rtol=1e-6)
    # Every copy and every computation of the step is there, no longer and no shorter.
    copies = [r for r in schedule.steady if r.op in (Op.FETCH, Op.OFFLOAD)]
    assert sum(span.lane != "compute" and span.what != "exchange" for span in spans) == len(copies)
    stages = [r.stage for r in schedule.steady if r.op is Op.FORWARD and r.stage is not None]
    assert [s.of for s in spans if s.what is Op.FORWARD] == stages
    forward = sum(s.end - s.start for s in spans if s.what is Op.FORWARD)
    expected = sum(workload.costs.forward[stage] for stage in stages)
    np.testing.assert_allclose(forward, expected, rtol=1e-6)


def test_a_plan_draws_its_timeline():
    plan = mt.plan(
        build, loss_fn, OPTIMIZERS["adamw"], batch(8), device_budget="minimum", hardware="H200"
    )
    assert plan.workload is not None and plan.schedule is not None
    spans = timeline(plan.workload, plan.schedule)
    figure = plan.timeline()
    axes, below = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == list(LANES)
    assert tells(axes.get_title(), f"{plan.schedule.seconds * 1e3:.3g} ms", "NVIDIA H200")
    drawn = {bars.get_label(): bars for bars in axes.collections}
    masters = [s for s in spans if s.what is Kind.MASTERS and s.lane == "copies in"]
    boxes = [path.get_extents() for path in drawn["masters"].get_paths()]
    assert len(boxes) == len(masters) > 0
    for box, span in zip(boxes, masters, strict=True):
        np.testing.assert_allclose([box.x0, box.x1], [1e3 * span.start, 1e3 * span.end])
        assert round((box.y0 + box.y1) / 2) == LANES.index("copies in")
    assert {"forward", "backward", "update", "optimizer state"} <= set(drawn)
    (line,) = below.lines
    held = memory(plan.workload, plan.schedule)
    np.testing.assert_allclose(np.asarray(line.get_xdata()), [1e3 * at for at, _ in held])
    np.testing.assert_allclose(np.asarray(line.get_ydata()), [size / 2**20 for _, size in held])
    assert [size for _, size in held] == list(plan.schedule.ledger["steady"])
    moved = moved_bytes(plan.schedule.steady, plan.workload)
    assert moved == (plan.bytes_in, plan.bytes_out)
    with refuses(ValueError, "hand"):
        mt.Plan(**{**vars(plan), "schedule": None}).timeline()


def test_cuts_are_shared_by_options_that_do_not_change_them_alone(monkeypatch):
    sample, cuts = batch(8), []
    cut_program = cut_run.cut_program
    monkeypatch.setattr(
        cut_run, "cut_program", lambda *given: cuts.append(given) or cut_program(*given)
    )
    adapted, _ = adapt(build, loss_fn, sample, 0)
    fp32, bf16 = (mt.Precision(compute=dtype) for dtype in (jnp.float32, jnp.bfloat16))
    changes: list[dict[str, Any]] = [
        {},
        {"on_nonfinite": "skip"},
        {"microbatches": 2},
        {"precision": bf16},
        {"trainable": "layers/0/"},
        {"ema_decay": 0.5},
        {"ema_decay": 0.25},
        {"optimizer": OPTIMIZERS["adamw"]},
    ]

    def facts(change: dict[str, Any]) -> Any:
        given: dict[str, Any] = {"precision": fp32} | change
        optimizer = given.pop("optimizer", OPTIMIZERS["clipped"])
        options = Options(**given)
        spec = make_run_spec(adapted, loss_fn, optimizer, sample, options)
        stages = [(s.leaf_dtypes, s.is_trainable, str(s.jaxpr)) for s in spec.first.program.stages]
        return spec.optimizer.skips, stages, str(spec.optimizer.apply[0].jaxpr)

    with remembering():
        found = [facts(change) for change in changes]
    # Microbatches, dtypes and frozen parameters change the loss; the rest only the optimizer.
    assert len(cuts) == 4
    assert found == [facts(change) for change in changes]
    assert all(one != other for one, other in itertools.combinations(found, 2))
