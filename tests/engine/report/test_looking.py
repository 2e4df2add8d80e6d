"""Plans, trainers, histories and results show themselves, at a prompt and in a notebook."""

import ast
import base64
import io
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.figure
import matplotlib.pyplot
import numpy as np
import optax
import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.core.pylabtools import select_figure_formats

import megatrain_jax as mt
import small
from inside import unread_of
from megatrain_jax._src.common import progress
from megatrain_jax._src.engine.report.plan import STATE
from megatrain_jax._src.engine.report.plan_table import fills
from megatrain_jax._src.engine.report.table import UNFIT, result_cells, running_mean
from messages import refuses, tells
from plans import GIB, big_plan, small_plan
from quantities import has_row, quantities, title_of
from runs import check_same_bits
from shown import Shown

pytestmark = pytest.mark.usefixtures("started_once")


def in_notebook(value: Any) -> Shown:
    """What a notebook shows of a value; at a plain prompt that is its `repr`."""
    data, _ = DisplayFormatter().format(value)
    assert data["text/plain"] == repr(value)
    return Shown(data["text/html"])


def pictures_in_notebook(value: Any, *, inline: bool) -> list[str]:
    """The kinds of pictures that a notebook shows of a value, with and without `inline`."""
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    if inline:  # what `%matplotlib inline` has figures shown by
        select_figure_formats(shell, {"png"})
    data, _ = shell.display_formatter.format(value)
    pictures = {kind: shown for kind, shown in data.items() if kind.startswith("image/")}
    for shown in pictures.values():
        # A kernel sends bytes in base64; the inline backend does so itself.
        file = base64.b64decode(shown) if isinstance(shown, str) else shown
        assert file.startswith(b"\x89PNG")
    return list(pictures)


def trained(steps: int = 2, **options: Any) -> mt.FitResult:
    return small.fit(None, steps, **options)


# Plans


def test_a_plan_is_its_table_at_a_prompt():
    plan = big_plan()
    assert repr(plan) == str(plan)
    assert has_row(title_of(plan), [10.2e9, 38, 38, 3])


def test_a_plan_in_a_notebook_has_its_table_and_bars():
    shown = in_notebook(big_plan())
    cells = [" ".join(row).split() for row in shown.rows]
    for line in str(big_plan()).splitlines()[5:]:
        if line and not any(warning in line for warning in big_plan().warnings):
            assert line.split() in cells
    assert [one.removeprefix("warning: ") for one in shown.red] == [*big_plan().warnings]
    told = [quantities(text) for text in shown.texts]
    assert pytest.approx([116.9 * GIB, 125 * GIB]) in told
    assert pytest.approx([17 * GIB, 130.57 * GIB]) in told
    widths = dict(shown.widths)
    assert widths[f"{STATE}: 114.00 GiB"] == pytest.approx(100 * 114 / 125, 1e-3)
    assert sum(widths.values()) == pytest.approx(200, abs=0.1)


def test_what_does_not_fit_is_red_and_shown_beside_its_limit():
    machine = big_plan().hardware
    assert machine is not None
    page = big_plan(hardware=replace(machine, host_bytes=58 * GIB), warnings=())._repr_html_()
    shown = Shown(page)
    assert [text for text in shown.red if UNFIT in text] == shown.red and len(shown.red) == 2
    assert dict(shown.widths)[f"{STATE}: 114.00 GiB"] == pytest.approx(97.5, 0.1)
    assert big_plan().fits is True and small_plan().fits is None
    for field in ("host_bytes", "device_bytes"):
        assert big_plan(hardware=replace(machine, **{field: 58})).fits is False
    assert big_plan(device_temporary_bytes=None).fits is None
    # The limit's line is where 58 of 116.9 GiB are, and no part stands for what is free.
    assert "left:49.6" in page
    assert 0.0 in dict(shown.widths).values()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_bars_of_several_devices_are_one_hosts(processes: int):
    plan = big_plan(num_devices=4, num_processes=processes, processes_per_host=1)
    host, device = fills(plan)
    assert host.needed == max(plan.host_process_bytes or 0, plan.host_peak_bytes // processes)
    assert dict(host.parts)[STATE] == plan.host_bytes // processes
    assert ("each" in host.name) == (processes > 1) and "each" in device.name
    assert device.needed == plan.device_bytes


def test_without_hardware_bars_are_as_long_as_what_is_needed():
    shown = Shown(small_plan()._repr_html_())
    assert [90.0] in [quantities(text) for text in shown.texts]
    assert sum(width for _, width in shown.widths) == pytest.approx(200, abs=0.1)
    assert not [title for title, _ in shown.widths if title.startswith("free")]


# Phases, where no terminal shows bars

PHASES = ("tracing", "initialising", "step 1", "evaluation")


def test_phases_have_a_line_each_where_output_is_no_terminal(capsys, monkeypatch):
    def printed(**options):
        given = small.params(), small.loss_fn, [small.batch(0)], optax.sgd(0.1)
        mt.fit(*given, eval_data=[small.batch(1)], **options)
        return capsys.readouterr()

    def told(text):
        # A bar may show beside them.
        lines = [line for line in text.splitlines() if line.endswith("...")]
        return [line for line in lines if any(map(line.__contains__, PHASES))]

    shown = printed()
    lines = told(shown.err)
    assert not shown.out and len(lines) == 4 and all(map(str.__contains__, lines, PHASES))
    silent = printed(progress=False)
    assert not silent.out and not silent.err
    with progress.phase_lines():  # as in the command
        own = printed(progress=False)
    assert own.out.splitlines() == told(shown.err) and not own.err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.phase_lines():
        assert not told("".join(printed()))


# Trainers, histories, results


def test_a_trainer_shows_model_step_and_budget():
    trainer = small.trainer(device_budget="least")
    trainer.step(small.batch(0))
    shown = in_notebook(trainer)
    least = trainer.schedule.smallest_bytes
    for row in ([8.19e3, 2], [1], [least]):
        assert has_row(repr(trainer), row)
    assert [" ".join(row).split() for row in shown.rows] == [
        line.split() for line in repr(trainer).splitlines()[1:]
    ]


def test_a_trainer_shows_how_many_parameters_are_trained():
    assert has_row(repr(small.trainer(trainable="^0/w")), [2 * 64**2, 64**2, 2])


def test_what_a_trainer_tells_is_read_only():
    trainer = small.trainer()
    names = ("history", "params", "opt_state", "model", "num_steps", "plan", "schedule", "step")
    for name in names:
        with refuses(AttributeError, f"`{name}`", "Trainer"):
            setattr(trainer, name, None)
    with refuses(AttributeError, "`params`", "`params=`", "new"):
        setattr(trainer, "params", None)  # noqa: B010 (a type checker would refuse it)
    result = trained()
    for record, name in ((result, "history"), (trainer.plan, "bytes_in")):
        with pytest.raises(AttributeError, match="cannot assign to field"):
            setattr(record, name, None)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("fit", r"megatrain_jax.train\(trainer, data\)"),
        ("forward", "`predict`.*`model`"),
        ("generate", r"megatrain_jax.models.generate\(trainer"),
        ("losses", r"history\[\"loss\"\]"),
        ("parms", "`params`"),
        ("save_model", r"models.save_pretrained\(trainer, folder\) .*`save`"),
        ("global_step", "`num_steps`"),
        ("add_callback", "`callbacks=`.*`train`"),
        ("zzz", "'zzz'[^`]*$"),
    ],
)
def test_a_missing_attribute_of_a_trainer_or_a_result_says_the_way(name: str, advice: str):
    for owner in (small.trainer(), trained()):
        with pytest.raises(AttributeError, match=advice):
            getattr(owner, name)
        assert not hasattr(owner, name) and getattr(owner, "_mine", 3) == 3
    with refuses(AttributeError, "evaluate", "`trainer`"):
        getattr(trained(), "evaluate")  # noqa: B009 (a type checker would refuse it)


def test_an_attribute_error_within_a_property_is_shown_as_it_is(monkeypatch):
    monkeypatch.setattr(mt.Trainer, "startup", property(lambda self: self.history.nothing))
    with pytest.raises(AttributeError, match="'History' object has no attribute 'nothing'"):
        small.trainer().startup  # noqa: B018


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("learning_rate", "optimizer"),
        ("lr", "optimizer"),
        ("loss_fn", "`loss_fn`.* new Trainer"),
        ("microbatches", "`microbatches`.* new Trainer"),
        ("checkpoint_every", "`checkpoint_every=`.*`train`"),
        ("num_step", "`num_steps`"),
        ("mine", "`mine`[^`]*$"),
    ],
)
def test_no_attribute_is_set_on_a_trainer_without_an_effect(name: str, advice: str):
    trainer = small.trainer()
    with pytest.raises(AttributeError, match=advice):
        setattr(trainer, name, 0.1)
    assert not hasattr(trainer, name)


def test_steps_made_by_hand_have_the_records_that_fit_makes():
    trainer, steps = small.trainer(), 7
    for seed in range(steps):
        metrics = trainer.step(small.batch(seed))
        if seed in (2, 3):
            values = trainer.read(metrics)
            assert values == {k: v for k, v in trainer.history[-1].items() if k in values}
    expected = trained(steps).history
    assert [list(record) for record in trainer.history] == [list(record) for record in expected]
    same = [{k: v for k, v in r.items() if k != "seconds"} for r in trainer.history]
    assert same == [{k: v for k, v in r.items() if k != "seconds"} for r in expected]
    assert all(record["seconds"] > 0 for record in trainer.history)


def test_steps_by_hand_and_by_train_are_in_one_history(tmp_path: Any):
    trainer = small.trainer()
    trainer.step(small.batch(0))
    seen = []
    batches = [small.batch(seed) for seed in (1, 2)]

    def callback(trainer: mt.Trainer, record: dict[str, Any]) -> None:
        seen.append((record["step"], len(trainer.history)))

    mt.train(trainer, batches, callbacks=[callback], progress=False)
    assert seen == [(2, 2), (3, 3)], "a callback doesn't wait for the step that is under way"
    trainer.step(small.batch(3))
    trainer.save(tmp_path / "saved")
    trainer.step(small.batch(4))
    trainer.restore(tmp_path / "saved")
    metrics = trainer.step(small.batch(4))
    for seed in (5, 6):
        trainer.step(small.batch(seed))
    assert unread_of(trainer)[0] == 2, "no more steps hold memory"
    trainer.read(metrics)
    assert unread_of(trainer)[1] == 5, "reading a step waits for no later one"
    assert [record["loss"] for record in trainer.history] == small.expected(7)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_step_by_hand_that_is_not_finite_is_no_record_or_a_skipped_one(on_nonfinite: str):
    trainer = small.trainer(on_nonfinite=on_nonfinite)
    trainer.step(small.batch(0))
    broken = {"x": np.full_like(small.batch(1)["x"], np.nan)}
    metrics = trainer.step(broken)
    if on_nonfinite == "raise":
        assert [record["step"] for record in trainer.history] == [1]
        with pytest.raises(FloatingPointError, match="loss .*step 2"):
            trainer.read(metrics)
    trainer.step(small.batch(2))
    steps = [(r["step"], r.get("skipped")) for r in trainer.history]
    assert steps == (
        [(1, None), (2, None)] if on_nonfinite == "raise" else [(1, 0), (2, 1), (3, 0)]
    )
    assert all(np.isfinite(r["loss"]) != bool(r.get("skipped")) for r in trainer.history)


def test_a_history_is_a_table():
    history = mt.History([{"step": n, "loss": 1 / n, "seconds": 2e-5 * n} for n in range(1, 31)])
    history[-1]["eval_loss"] = 0.25
    shown = in_notebook(history)
    lines = repr(history).splitlines()
    assert lines[0].split() == ["step", "loss", "seconds", "eval_loss"]
    assert [line.split()[0] for line in lines[1:]] == [*"12345", "…", "26", "27", "28", "29", "30"]
    for number, shown_rows in ((11, 11), (12, 11)):  # dots take the place of two or more
        assert len(repr(mt.History(history[:number])).splitlines()) == 1 + shown_rows
    assert lines[1].split() == ["1", "1", "20", "µs"]
    assert lines[-1].split() == ["30", "0.0333333", "600", "µs", "0.25"]
    assert len({line.rindex("s") for line in lines[1:6]}) == 1, "numbers are lined up"
    assert [" ".join(row).split() for row in shown.rows] == [line.split() for line in lines]
    assert shown.images == 1
    assert history["loss"] == [1 / n for n in range(1, 31)] and history["step"][-2:] == [29, 30]
    assert history["eval_loss"] == [None] * 29 + [0.25]
    assert history[:2] == [history[0], history[1]] and mt.History()["loss"] == []
    with refuses(KeyError, "'los'", "step", "mean `loss`"):
        history["los"]
    records = [{"step": 0, "loss": 0.0, "skipped": False}, {"step": 1, "texts": []}]
    zeros = repr(mt.History(records)).splitlines()
    assert [line.split() for line in zeros[1:]] == [["0", "0", "False"], ["1", "0", "of", "them"]]
    assert repr(mt.History()) == "History([])"
    assert in_plain_text(mt.History()) == {"text/plain": "History([])"}


def in_plain_text(value: Any) -> dict[str, Any]:
    return DisplayFormatter().format(value)[0]


def test_a_history_draws_any_metrics():
    history = mt.History(
        [{"step": n, "loss": 1 / n, "rate": 0.1 * n, "note": "x"} for n in range(1, 9)]
    )
    history[3]["eval_loss"] = 0.5
    loss, rate = history.plot(["loss", "rate"], log=True).axes
    assert [line.get_label() for line in loss.lines] == ["loss", "eval_loss"]
    np.testing.assert_allclose(np.asarray(rate.lines[0].get_ydata()), 0.1 * np.arange(1, 9))
    assert {axes.get_yscale() for axes in (loss, rate)} == {"log"}
    assert (loss.get_ylabel(), rate.get_xlabel()) == ("loss", "step")
    (axes,) = history.plot(smooth=3).axes
    faint, smooth, _ = axes.lines
    assert faint.get_alpha() == 0.3 and tells(str(smooth.get_label()), "loss", 3)
    expected = [np.mean([1 / m for m in range(max(1, n - 2), n + 1)]) for n in range(1, 9)]
    np.testing.assert_allclose(np.asarray(smooth.get_ydata()), expected)
    for metrics in ("los", ["loss", "note"]):
        with pytest.raises(ValueError, match=r"'(los|note)'.* step, loss"):
            history.plot(metrics)
    for metrics in ([], 3, [3]):
        with refuses(TypeError, "`metrics`", metrics):
            history.plot(metrics)  # type: ignore[arg-type]
    with refuses(ValueError, "`smooth`", 1, 0):
        history.plot(smooth=0)


def test_running_means_leave_out_what_is_not_finite():
    rng = np.random.default_rng(0)
    values = rng.normal(size=50)
    values[rng.random(50) < 0.3] = np.nan
    for width in (1, 2, 7, 60):
        windows = [values[max(0, i + 1 - width) : i + 1] for i in range(50)]
        means = [w[np.isfinite(w)].mean() if np.isfinite(w).any() else np.nan for w in windows]
        np.testing.assert_allclose(running_mean(values, width), means)


def test_a_result_saves_what_its_trainer_does(tmp_path: Any):
    result = trained(2)
    result.save(tmp_path / "all")
    result.save(tmp_path / "params", params_only=True)
    other = trained(1).trainer
    other.restore(tmp_path / "all")
    assert other.num_steps == 2
    check_same_bits((other.params, other.opt_state), (result.params, result.trainer.opt_state))
    with pytest.raises(mt.CheckpointError, match="parameters"):
        other.restore(tmp_path / "params")


def test_a_result_shows_steps_losses_and_why_it_ended():
    result = trained(3, eval_data=[small.batch(9)])
    losses, (first, *_, last) = small.losses(result), result.history
    shown = in_notebook(result)
    assert shown.images == 1
    rows = {row[0]: row[1:] for row in shown.rows}
    assert rows["steps"] == ["3", f"done: {result.reason}"]
    assert rows["loss"][0] == f"{losses[-1]:.6g}"
    least = min(losses)
    assert re.search(rf"^{first['loss']:.6g} .*\b1\b.* {least:.6g}\b", rows["loss"][1])
    assert rows["eval_loss"][0] == f"{last['eval_loss']:.6g}"
    words = " ".join(repr(result).split())
    assert all(" ".join([name, *cells]) in words for name, cells in rows.items())
    # What is not a number is never the lowest, wherever it is.
    records = [{"step": n, "loss": x} for n, x in enumerate((np.nan, 3.0, 2.0, np.nan), 1)]
    assert re.search(r"^nan .*\b1\b.* 2 .*\b3$", result_cells(4, "done", records)[1][2])


@pytest.mark.parametrize(
    ("make_error", "ended", "reason"),
    # Made when they are raised: an error that has been has a traceback, and with it the trainer.
    [
        (lambda: mt.StopTraining("good enough"), "stopped", "good enough"),
        (mt.StopTraining, "stopped", "callback"),
        (KeyboardInterrupt, "interrupted", "KeyboardInterrupt"),
        (lambda: OSError("disk gone"), "failed", "OSError: disk gone"),
        (None, "done", "`data`"),
    ],
)
def test_a_result_tells_why_a_run_ended(make_error: Any, ended: str, reason: str, capfd: Any):
    def callback(trainer: mt.Trainer, record: dict[str, Any]) -> None:
        if make_error is not None and record["step"] == 2:
            raise make_error()

    trainer = small.trainer()
    batches = [small.batch(seed) for seed in range(3)]
    if ended == "failed":
        with pytest.raises(OSError, match="disk gone") as caught:
            mt.train(trainer, batches, callbacks=[callback])
        result = caught.value.result  # type: ignore[attr-defined]
    else:
        result = mt.train(trainer, batches, callbacks=[callback])
    assert result.ended == ended and tells(result.reason, reason)
    assert result.interrupted == (ended == "interrupted")
    said = capfd.readouterr().err
    assert tells(said, "step 3", result.reason) == (ended == "stopped")
    again = mt.train(result.trainer, batches, steps=1, progress=False)
    assert (again.ended, again.trainer.num_steps) == ("done", 4) and "`steps`" in again.reason


def test_a_run_that_stopped_goes_on_from_its_folder(tmp_path: Any):
    def stop(trainer: mt.Trainer, record: dict[str, Any]) -> None:
        if record["step"] == 2:
            raise mt.StopTraining("here")

    first = small.fit(tmp_path / "run", 6, callbacks=[stop])
    assert (first.ended, first.trainer.num_steps) == ("stopped", 3)
    again = small.fit(tmp_path / "run", 6)
    assert again.ended == "done" and small.losses(again) == small.expected(6)


def test_only_drawing_imports_matplotlib():
    """It takes a quarter of the time that the library does; and few runs need callbacks."""
    for path in Path(mt.__file__).parent.rglob("*.py"):
        found = ast.parse(path.read_text(encoding="utf-8")).body
        imports = " ".join(
            ast.unparse(n) for n in found if isinstance(n, ast.Import | ast.ImportFrom)
        )
        # Its class derives from a figure, so it is imported by whoever draws one.
        draws = path.name == "notebook_figure.py"
        assert draws or not re.search("matplotlib|notebook_figure", imports), path
        inside = "callbacks" in path.relative_to(Path(mt.__file__).parent).as_posix()
        assert inside or "megatrain_jax.callbacks" not in imports, path


# Figures, and data of a schedule


@pytest.mark.by_default("False")
@pytest.mark.parametrize("inline", [False, True])
def test_a_figure_is_one_picture_in_a_notebook_whatever_its_backend(inline: bool):
    result = trained()
    for figure in (result.trainer.plan.timeline(), result.history.plot()):
        assert pictures_in_notebook(figure, inline=inline) == ["image/png"]
        # What pyplot knows, the inline backend shows once more at the end of the cell.
        assert not matplotlib.pyplot.get_fignums()
        assert isinstance(figure, matplotlib.figure.Figure)
        figure.axes[0].set_title("mine")
        figure.savefig(buffer := io.BytesIO(), format="svg")
        assert b"<svg" in buffer.getvalue()
        assert pickle.loads(pickle.dumps(figure)).axes[0].get_title() == "mine"


def test_what_a_deep_step_is_made_of_is_a_line_each():
    trainer = small.trainer()
    deep = mt.plan(20 * small.params(), small.loss_fn, small.OPTIMIZER, small.batch(0))
    for schedule in (trainer.schedule, deep.schedule):
        assert schedule is not None
        text = repr(schedule)
        assert {len(schedule.steady), len(schedule.cold)} <= set(quantities(text))
        assert len(text) < 200 and "\n" not in text
    assert quantities(repr(deep.workload))[:3] == pytest.approx([40, 40, 1.88 * 2**20])
    assert [repr(stage) for stage in trainer.stages] == [
        f"BoundStage({stage.stage.name!r}, groups={stage.groups}, "
        f"{len(stage.stage.jaxpr.eqns)} equations)"
        for stage in trainer.stages
    ]
