"""Early stopping, and the best step of a run."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import megatrain_jax as mt
import small
from megatrain_jax import callbacks
from megatrain_jax._src.callbacks.best import _Best
from messages import refuses, tells

pytestmark = pytest.mark.usefixtures("started_once")
EVALUATED: Any = {"eval_data": [small.batch(9)], "eval_every": 2}
NOT_DRAWN: Any = map(lambda _: pytest.fail("a batch is drawn"), [0])


@pytest.mark.parametrize("seed", range(20))
def test_the_best_value_is_the_one_that_a_search_finds(seed: int):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 6, size=30).astype(float)
    values[rng.random(30) < 0.1] = np.nan
    sign, delta = rng.choice([1, -1]), float(rng.choice([0.0, 1.0, 2.0]))
    best = _Best("m", "min" if sign == 1 else "max", delta)
    expected: list[float] = []
    for step, value in enumerate(values, 1):
        better = best.is_better({"step": step, "m": value})
        wanted = np.isfinite(value) and (not expected or sign * value < sign * expected[-1] - delta)
        assert better == wanted
        if wanted:
            expected.append(value)
            assert best.step == step
        assert best.since == step - best.step
        assert best.value == (expected[-1] if expected else None)


def curve(losses: list[float]) -> Any:
    """Batches whose losses before training are these: their model does not change."""
    return [
        {"x": np.full((4, 64), 1.0, np.float32), "loss": np.full(4, x, np.float32)} for x in losses
    ]


def given_loss(params: Any, batch: Any) -> Any:
    return batch["loss"].mean() + 0.0 * small.loss_fn(params, batch)


LOSSES = [3.0, 2.0, 2.5, 1.0, 1.5, 1.2, 1.1, 0.5, 0.1]


def stopping(folder: Path | None, **options: Any) -> mt.FitResult:
    """A run whose evaluations give `LOSSES`, one after each step."""
    at = itertools.count(options.pop("start", 0))
    return mt.fit(
        small.params(),
        given_loss,
        curve(LOSSES),
        small.OPTIMIZER,
        eval_data=lambda: [curve(LOSSES)[next(at)]],
        eval_every=1,
        checkpoint_dir=folder,
        progress=False,
        **options,
    )


def test_a_run_stops_when_there_is_nothing_better(tmp_path: Path):
    stop = callbacks.EarlyStopping(patience=3)
    result = stopping(tmp_path / "run", callbacks=[stop])
    assert (result.ended, result.interrupted) == ("stopped", False)
    assert tells(result.reason, "`eval_loss`", "step 4", "1", "3")
    assert [r["step"] for r in result.history if "eval_loss" in r] == list(range(1, 8))
    # It goes on where it stopped, in a new process as well, with what was seen before.
    patient = callbacks.EarlyStopping(patience=4)
    again = stopping(tmp_path / "run", callbacks=[patient], start=7)
    assert again.ended == "done" and again.trainer.num_steps == len(LOSSES)
    evaluated = [r["eval_loss"] for r in again.history if "eval_loss" in r]
    assert again.history[-1]["eval_loss"] == pytest.approx(0.1)
    assert evaluated == pytest.approx([*LOSSES[:7], *LOSSES[-len(evaluated) + 7 :]])


def test_a_run_that_goes_on_remembers_what_was_best(tmp_path: Path):
    stopping(tmp_path / "run", steps=6)
    result = stopping(tmp_path / "run", callbacks=[callbacks.EarlyStopping(patience=3)], start=6)
    assert result.ended == "stopped" and result.trainer.num_steps == 7
    # Of each value once, also if the callback has seen it before.
    patient = callbacks.EarlyStopping(patience=4)
    for steps in (6, None):
        start = 0 if steps else 6
        result = stopping(tmp_path / "other", steps=steps, callbacks=[patient], start=start)
    assert result.ended == "done"


def test_a_value_that_is_hardly_better_is_no_better(tmp_path: Path):
    """After 3, of 2, 2.5, 1, 1.5, 1.2, 1.1, 0.5 and 0.1 only 1 is better by more than 1.5."""
    stop = callbacks.EarlyStopping(patience=4, min_delta=1.5)
    keep = callbacks.KeepBest(tmp_path / "best", min_delta=1.5)
    result = stopping(None, callbacks=[keep, stop])
    assert tells(result.reason, "`eval_loss`", "step 4", "1")
    assert keep.path == tmp_path / "best" / "4"


def test_the_best_step_is_kept(tmp_path: Path):
    keep = callbacks.KeepBest(tmp_path / "best")
    assert keep.path is None
    result = small.fit(None, 6, callbacks=[keep], **EVALUATED)
    evaluated = {r["step"]: r["eval_loss"] for r in result.history if "eval_loss" in r}
    best = min(evaluated, key=evaluated.__getitem__)
    assert keep.path == tmp_path / "best" / str(best)
    assert [path.name for path in (tmp_path / "best").iterdir()] == [str(best)]
    alone = small.fit(None, best)
    trainer = small.trainer()
    assert keep.path is not None
    trainer.restore(keep.path)
    for ours, theirs in zip(trainer.params, alone.params, strict=True):
        np.testing.assert_array_equal(ours["w"], theirs["w"])
    with refuses(FileExistsError, "new", tmp_path):
        small.fit(None, 2, callbacks=[keep], **EVALUATED)


@pytest.mark.parametrize(
    ("run", "best"),
    [
        ("r", "r"),
        ("r", "other/../r"),
        ("r", "link"),
        ("link", "r"),
        ("r", "r/7"),
        ("r/7", "link"),
        ("there", "there/."),
    ],
)
def test_the_best_step_is_not_kept_among_those_of_the_run(
    run: str, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("r")
    before = sorted(tmp_path.rglob("*"))
    keep = callbacks.KeepBest(best)
    with refuses(ValueError, "callbacks[1]", "KeepBest", "`folder`", "`checkpoint_dir`", "best"):
        small.fit(tmp_path / run, 2, callbacks=[print, keep], data=NOT_DRAWN, **EVALUATED)
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoints_of_another_run_are_not_removed(tmp_path: Path):
    small.fit(tmp_path / "other", 3, checkpoint_every=1)
    before = sorted(tmp_path.rglob("*"))
    keep: Any = {"callbacks": [callbacks.KeepBest(tmp_path / "other")]}
    for steps in (2, 8):
        trainer = small.fit(None, steps).trainer
        data: Any = [small.batch(0)]
        with refuses(FileExistsError, "`folder`", tmp_path / "other", "step 3", "best"):
            mt.train(trainer, data, progress=False, **EVALUATED | {"eval_every": 1}, **keep)
    assert sorted(tmp_path.rglob("*")) == before


def test_two_callbacks_do_not_keep_their_best_steps_in_one_folder(tmp_path: Path):
    both = [callbacks.KeepBest(tmp_path / "b", metric) for metric in ("eval_loss", "eval_accuracy")]
    with refuses(ValueError, "callbacks[0]", "callbacks[1]", "KeepBest", "`folder`"):
        small.fit(None, 2, callbacks=both, data=NOT_DRAWN, **EVALUATED)
    inside = [callbacks.KeepBest(tmp_path / "r" / name) for name in ("best", "b")]
    small.fit(tmp_path / "r", 2, callbacks=inside, keep=1, checkpoint_every=1, **EVALUATED)
    assert [keep.path and keep.path.name for keep in inside] == ["2", "2"]
    assert small.fit(tmp_path / "r", 3, **EVALUATED).trainer.num_steps == 3


@pytest.mark.by_default("min")
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_later_best_step_of_a_killed_run_is_removed(mode: Any, tmp_path: Path):
    keep, folder = callbacks.KeepBest(tmp_path / "best", mode=mode), tmp_path / "run"
    small.fit(folder, 2, callbacks=[keep], **EVALUATED)
    small.fit(None, 4).trainer.save(tmp_path / "best" / "4")  # the kill came after it
    result = small.fit(folder, 4, callbacks=[keep], **EVALUATED)
    evaluated = {r["step"]: r["eval_loss"] for r in result.history if "eval_loss" in r}
    best = min(evaluated) if (evaluated[2] < evaluated[4]) == (mode == "min") else 4
    assert [path.name for path in (tmp_path / "best").iterdir()] == [str(best)]
    assert keep.path is not None
    restored = small.trainer().restore(keep.path)["history"]
    assert [r["eval_loss"] for r in restored if "eval_loss" in r][-1] == evaluated[best]


def test_steps_before_there_was_a_metric_do_not_count():
    records = [{"step": 1, "loss": 2.0}, {"step": 2, "accuracy": 0.5}, {"step": 3, "accuracy": 0.4}]
    trainer: Any = SimpleNamespace(history=records)
    stopping = callbacks.EarlyStopping("accuracy", patience=2)
    stopping.begin(trainer)
    assert (stopping._best.value, stopping._best.since) == (0.5, 1)


def test_the_best_checkpoint_of_the_step_that_a_run_goes_on_from_is_kept(tmp_path: Path):
    for step in (2, 4, 6):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "megatrain.json").write_text("{}")
    trainer: Any = SimpleNamespace(
        history=[], num_steps=4, processes=SimpleNamespace(is_first=True)
    )
    keep = callbacks.KeepBest(tmp_path)
    keep.begin(trainer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]
    assert keep.path == tmp_path / "4"
