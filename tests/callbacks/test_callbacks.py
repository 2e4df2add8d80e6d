"""Callbacks on real runs: their protocol, hyperparameters in records, profiles and live curves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

import megatrain_jax as mt
import small
from megatrain_jax import callbacks
from messages import refuses

pytestmark = pytest.mark.usefixtures("started_once")
EVALUATED: Any = {"eval_data": [small.batch(9)], "eval_every": 2}


class Noting(callbacks.Callback):
    """Writes down what it is called with."""

    def __init__(self, fail: str = ""):
        self.seen: list[Any] = []
        self.fail = fail

    def begin(self, trainer: mt.Trainer) -> None:
        self.note("begin", trainer.num_steps)

    def __call__(self, trainer: mt.Trainer, record: dict[str, Any]) -> None:
        self.note("record", record["step"])

    def end(self, result: mt.FitResult) -> None:
        self.note("end", (result.ended, result.trainer.num_steps))

    def note(self, what: str, value: Any) -> None:
        self.seen.append((what, value))
        if what == self.fail:
            raise OSError(f"no {what}")


def test_callbacks_are_told_of_the_beginning_and_the_end(tmp_path: Path):
    noting = Noting()
    small.fit(tmp_path / "run", 2, callbacks=[noting])
    assert noting.seen == [("begin", 0), ("record", 1), ("record", 2), ("end", ("done", 2))]
    noting.seen.clear()
    small.fit(tmp_path / "run", 2, callbacks=[noting])
    assert not noting.seen, "there was nothing left to do"
    small.fit(tmp_path / "run", 3, callbacks=[noting])
    assert noting.seen == [("begin", 2), ("record", 3), ("end", ("done", 3))]


@pytest.mark.parametrize("where", ["begin", "record", "end"])
def test_an_error_of_one_callback_ends_the_run_for_all(where: str, tmp_path: Path):
    first, second, third = Noting(), Noting(fail=where), Noting()
    with pytest.raises(OSError, match=f"no {where}") as caught:
        small.fit(tmp_path / "run", 3, callbacks=[first, second, third])
    result = caught.value.result  # type: ignore[attr-defined]
    assert (result.ended, result.reason) == ("failed", f"OSError: no {where}")
    ended = "done" if where == "end" else "failed"
    steps = {"begin": 0, "record": 2, "end": 3}[where]
    assert first.seen[-1] == ("end", (ended, steps)) == second.seen[-1]
    told = [] if where == "begin" else [("end", (ended, steps))]
    assert [entry for entry in third.seen if entry[0] == "end"] == told
    # What was trained is saved all the same.
    assert result.trainer.num_steps == steps
    assert [r["step"] for r in result.history] == list(range(1, steps + 1))


def test_injected_hyperparameters_are_in_the_records():
    schedule: Any = optax.cosine_decay_schedule(0.1, 10)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(schedule, weight_decay=0.01),
    )
    trainer = mt.Trainer(small.params(), small.loss_fn, optimizer, small.batch(0), progress=False)
    result = mt.train(trainer, [small.batch(seed) for seed in range(5)], progress=False)
    rates = [record["learning_rate"] for record in result.history]
    np.testing.assert_allclose(rates, [float(schedule(step)) for step in range(5)], rtol=1e-6)
    assert {record["weight_decay"] for record in result.history} == {float(np.float32(0.01))}
    assert float(result.trainer.opt_state[1].hyperparams["learning_rate"]) == rates[-1]


def test_hyperparameters_of_one_name_are_told_apart():
    def loss_fn(params: Any, batch: Any) -> Any:
        return small.loss_fn(params, batch), {"b1": jax.numpy.float32(7)}

    adam = optax.inject_hyperparams(optax.adam)
    optimizer = optax.multi_transform(
        {"fast": adam(0.1), "slow": adam(0.01, b1=0.8)}, [{"w": "fast"}, {"w": "slow"}]
    )
    optimizer = optax.chain(optimizer, optax.inject_hyperparams(optax.trace)(decay=0.5))
    trainer = mt.Trainer(small.params(), loss_fn, optimizer, small.batch(0), progress=False)
    values = trainer.read(trainer.step(small.batch(0)))
    rates = {name: round(x, 3) for name, x in values.items() if name.endswith("learning_rate")}
    assert sorted(rates.values()) == [0.01, 0.1] and len(rates) == 2
    assert next(n for n, rate in rates.items() if rate == 0.1).split(".")[-3:-1] != []
    assert all(("fast" in name) == (rate == 0.1) for name, rate in rates.items())
    assert values["decay"] == 0.5 and values["b1"] == 7


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "named"),
    [
        (callbacks.EarlyStopping, {"metric": 3}, TypeError, "metric 3"),
        (callbacks.EarlyStopping, {"mode": "least"}, ValueError, "mode min least"),
        (callbacks.EarlyStopping, {"patience": 0}, ValueError, "patience 1 0"),
        (callbacks.EarlyStopping, {"min_delta": -1}, ValueError, "min_delta -1"),
        (callbacks.KeepBest, {"folder": "b", "metric": "loss"}, ValueError, "evaluation loss"),
        (callbacks.KeepBest, {"folder": 3}, TypeError, "folder path"),
        (callbacks.CSVLog, {"path": 3}, TypeError, "path 3"),
        (callbacks.JSONLog, {"path": ""}, ValueError, "path ''"),
        (callbacks.Profile, {"folder": "p", "first": 0}, ValueError, "first 1 0"),
        (callbacks.Profile, {"folder": "p", "last": 2}, ValueError, "last 3 2"),
        (callbacks.LiveCurve, {"every": 0}, ValueError, "every 1 0"),
        (callbacks.MLflow, {"experiment": None}, TypeError, "experiment None"),
        (callbacks.Trackio, {"project": 3}, TypeError, "project str 3"),
        (callbacks.Trackio, {"nam": "a"}, TypeError, "`nam` `name`"),
        (callbacks.MLflow, {"run_name": 3}, TypeError, "run_name 3"),
        (callbacks.LiveCurve, {"smooth": 0}, ValueError, "smooth 1 0"),
        (callbacks.MLflow, {"experiment": 3}, TypeError, "experiment str 3"),
    ],
)
def test_misuses_of_callbacks_are_named(kind: Any, arguments: Any, error: Any, named: str):
    with refuses(error, *named.split()):
        kind(**arguments)


@pytest.mark.parametrize("metric", ["los", "eval_los"])
def test_a_metric_that_no_record_has_is_named(metric: str):
    with pytest.raises(ValueError, match=f"'{metric}'.*loss"):
        small.fit(None, 3, callbacks=[callbacks.EarlyStopping(metric, mode="min")], **EVALUATED)


@pytest.mark.by_default("4-9", "3-None")
@pytest.mark.parametrize(("first", "last"), [(1, 2), (3, None), (4, 9)])
def test_the_steps_of_a_profile_are_in_its_trace(first: int, last: int | None, tmp_path: Path):
    names = []

    def mark(trainer: mt.Trainer, record: dict[str, Any]) -> None:
        with jax.profiler.TraceAnnotation(f"record {record['step']}"):
            names.append(record["step"])

    profile = callbacks.Profile(tmp_path / "trace", first, last)
    small.fit(None, 6, callbacks=[profile, mark])
    (file,) = tmp_path.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    found = [e.name for plane in data.planes for line in plane.lines for e in line.events]
    marks = sorted({int(name.split()[1]) for name in found if name.startswith("record ")})
    # Its own callback comes before the mark: a trace ends with the last step's record.
    last = last or first + 2
    wanted = [step for step in range(1, 7) if first - 2 <= step < last]
    assert marks == wanted
    assert [name for name in found if "apply" in name or "update" in name]


def test_a_live_curve_replaces_its_image(tmp_path: Path):
    shell = InteractiveShell.instance(ipython_dir=str(tmp_path))
    before = shell.display_pub
    shell.display_pub = CapturingDisplayPublisher()
    try:
        live = callbacks.LiveCurve(every=2, smooth=2)
        small.fit(None, 5, callbacks=[live])
        outputs = list(shell.display_pub.outputs)
        small.fit(None, 1, callbacks=[live])
        (other,) = shell.display_pub.outputs[3:]
    finally:
        shell.display_pub = before
        InteractiveShell.clear_instance()
    assert [bool(output.get("update")) for output in outputs] == [False, True, True]
    (place,) = {output["transient"]["display_id"] for output in outputs}
    # Another run has a curve of its own.
    assert not other.get("update") and other["transient"]["display_id"] != place
    images = [output["data"]["image/png"] for output in outputs]
    assert len(set(images)) == 3
    another: Any = SimpleNamespace(processes=SimpleNamespace(is_first=False))
    live(another, {"step": 2})  # another process, which has no notebook, draws nothing
