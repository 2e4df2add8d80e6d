"""Ready-made callbacks on real runs: what they write is read back by the packages it is for."""

import csv
import itertools
import json
import logging
import math
from pathlib import Path
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
from megatrain_jax._src.callbacks.best import _Best

pytestmark = pytest.mark.usefixtures("started_once")
EVALUATED: Any = {"eval_data": [small.batch(9)], "eval_every": 2}


def sample(trainer: mt.Trainer, record: dict[str, Any]) -> None:
    """Puts samples into the records of evaluations, as `Samples` does."""
    if "eval_loss" in record:
        text = f"{record['step']} | <b>\nstep 9: samples"
        record["samples"] = [{"prompt": p, "temperature": 0.5, "text": text} for p in "ab"]


def numbers(history: mt.History) -> list[dict[str, float]]:
    return [{k: float(v) for k, v in record.items()} for record in history]


# The protocol


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


# Hyperparameters


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


# Logs


def test_a_csv_log_is_the_history(tmp_path: Path):
    path = tmp_path / "logs" / "run.csv"
    result = small.fit(None, 5, callbacks=[callbacks.CSVLog(path)], **EVALUATED)
    with path.open(newline="") as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    assert rows == numbers(result.history)


def test_a_jsonl_log_is_the_history(tmp_path: Path):
    path = tmp_path / "logs" / "run.jsonl"
    data = [small.batch(0), {"x": np.full_like(small.batch(1)["x"], np.nan)}, small.batch(2)]
    log = callbacks.JSONLog(path)
    result = small.fit(None, 3, data=data, callbacks=[log], on_nonfinite="skip")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert math.isnan(result.history[1]["loss"]) and found[1]["loss"] is None
    assert found[0] == result.history[0] and found[2] == result.history[2]


@pytest.mark.parametrize("kind", [callbacks.CSVLog, callbacks.JSONLog])
def test_a_log_of_a_killed_run_goes_on_where_the_run_does(kind: Any, tmp_path: Path):
    path, folder = tmp_path / "log", tmp_path / "run"
    small.fit(folder, 4, callbacks=[sample, kind(path)], **EVALUATED)
    # A kill came after steps that no checkpoint has, within a line.
    ahead = kind(path)
    ahead._open(4)
    for step in (5, 6):
        ahead._write(step, {"loss": -1.0})
        ahead._write_table(step, "samples", [{"text": "lost"}])
    path.write_text(path.read_text()[:-3])
    small.fit(folder, 6, callbacks=[sample, kind(path)], **EVALUATED)
    whole = tmp_path / "whole"
    small.fit(None, 6, callbacks=[sample, kind(whole)], **EVALUATED)
    assert [x["loss"] for x in read_log(path)] == [x["loss"] for x in read_log(whole)]
    assert [x["step"] for x in read_log(path)] == list(range(1, 7))
    texts = (tmp_path / "log.txt").read_text()
    assert texts == (tmp_path / "whole.txt").read_text()
    entry = "  prompt: {p}\n  temperature: 0.5\n  text: {n} | <b>\n    step 9: samples\n"
    expected = [f"step {n}: samples\n" + entry.format(p="a", n=n) for n in (2, 4, 6)]
    assert texts == "".join(
        x + entry.format(p="b", n=n) for x, n in zip(expected, (2, 4, 6), strict=True)
    )


@pytest.mark.parametrize("kind", [callbacks.CSVLog, callbacks.JSONLog])
def test_a_step_that_is_logged_again_is_there_once(kind: Any, tmp_path: Path):
    """A run that goes on may have been cut off before its last step's evaluation."""
    log = kind(tmp_path / "log")
    for step in (1, 2):
        log._write(step, {"loss": 2.0})
    log._write(2, {"loss": 2.0, "eval_loss": 1.0})
    again = kind(tmp_path / "log")
    again._open(2)
    again._write(2, {"loss": 2.0, "eval_loss": 3.0})
    assert read_log(tmp_path / "log") == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 2.0, "eval_loss": 3.0},
    ]


def read_log(path: Path) -> list[dict[str, float]]:
    text = path.read_text()
    if text.startswith("{"):
        return [json.loads(line) for line in text.splitlines()]
    return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(text.splitlines())]


@pytest.mark.parametrize(
    ("kind", "text"), [(callbacks.CSVLog, "name,age\nAda,36\n"), (callbacks.JSONLog, '{"a": 1}\n')]
)
def test_a_file_that_is_no_log_is_left_alone(kind: Any, text: str, tmp_path: Path):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no log of a run"):
        small.fit(None, 1, callbacks=[kind(path)])
    assert path.read_text() == text


@pytest.mark.filterwarnings("default")
def test_tensorboard_reads_what_was_logged(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log, folder = callbacks.TensorBoard(tmp_path / "logs"), tmp_path / "run"
    small.fit(folder, 4, callbacks=[sample, log], **EVALUATED)
    ahead = callbacks.TensorBoard(tmp_path / "logs")
    ahead._open(4)
    ahead._write(5, {"loss": -1.0})
    ahead._writer.close()
    result = small.fit(folder, 6, callbacks=[sample, log], **EVALUATED)
    events = accumulator.EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    for name in ("loss", "grad_norm", "eval_loss"):
        expected = [(r["step"], r[name]) for r in result.history if name in r]
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, float(np.float32(value))) for step, value in expected]
    (*_, ended) = (event.tensor_proto.string_val[0] for event in events.Tensors("ended"))
    assert ended == b"done: all `steps`"
    tables = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples")}
    assert list(tables) == [2, 4, 6]
    cells = "0.5 | 6 &#124; &lt;b&gt;<br>step 9: samples |"
    assert tables[6].splitlines()[-2:] == [f"| {prompt} | {cells}" for prompt in "ab"]


@pytest.mark.filterwarnings("default")
def test_weights_and_biases_reads_what_was_logged(tmp_path: Path, monkeypatch: Any):
    wandb = pytest.importorskip("wandb")
    messages: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")

    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(TypeError, match="no argument `projct`; did you mean `project`"):
        callbacks.WandB(projct="tests")
    for given in ({"mode": "ofline"}, {"tags": 3}, {"resume": "always"}, {"name": 1.5}):
        with pytest.raises(ValueError, match=rf"`wandb.init` can't take `{next(iter(given))}`="):
            callbacks.WandB(**given)
    # Neither a key nor a file with one, and no terminal to ask at.
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ValueError, match="run `wandb login`, set WANDB_API_KEY, or pass `mode="):
        callbacks.WandB(project="tests")
    with monkeypatch.context() as patch:  # of several processes, most never write
        patch.setattr("jax.distributed.is_initialized", lambda: True)
        callbacks.WandB(project="tests")
    log = callbacks.WandB(project="tests", mode="offline", dir=str(tmp_path))
    result = small.fit(None, 4, callbacks=[sample, log], **EVALUATED)
    wandb.teardown()  # its own process writes the file
    (file,) = tmp_path.rglob("*.wandb")
    rows, summary = [], {}
    for data in records_of(file.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
        summary |= {(i.key or i.nested_key[0]): i.value_json for i in record.summary.update}
    shown = [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]
    tables = {n: row.pop("samples") for n, row in enumerate(shown, 1) if "samples" in row}
    assert shown == [
        {k: v for k, v in r.items() if k not in ("step", "samples")} for r in result.history
    ]
    assert list(tables) == [2, 4]
    for step in tables:
        (path,) = tmp_path.rglob(f"samples_{step}_*.table.json")
        table = json.loads(path.read_text())
        assert table["columns"] == ["prompt", "temperature", "text"]
        assert table["data"] == [[p, 0.5, f"{step} | <b>\nstep 9: samples"] for p in "ab"]
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    assert json.loads(summary["ended"]) == "done: all `steps`"


def records_of(content: bytes) -> list[bytes]:
    """The records of a file in LevelDB's format for logs, which W&B writes behind seven bytes."""
    found, at = [], 7
    while at < len(content):
        if -at % 2**15 < 7:
            at += -at % 2**15
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        part = content[at + 7 : at + 7 + length]
        if kind in (1, 2):  # whole, or the first of several
            found.append(part)
        else:
            found[-1] += part
        at += 7 + length
    return found


@pytest.mark.filterwarnings("default")
def test_mlflow_reads_what_was_logged(tmp_path: Path, monkeypatch: Any):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    where = (tmp_path / "runs").as_uri()
    for given, error in (
        ({"tracking_uri": "nosuch://place"}, ValueError),
        ({"tracking_uri": where, "run_id": "0" * 32}, ValueError),
        ({"run_name": 3}, TypeError),
    ):
        options: Any = given
        with pytest.raises(error, match=f"`{[*given][-1]}`"):
            callbacks.MLflow(**options)
    log = callbacks.MLflow("tests", tracking_uri=where, run_name="one")
    folder = tmp_path / "run"
    small.fit(folder, 4, callbacks=[sample, log], **EVALUATED)
    again = callbacks.MLflow("tests", tracking_uri=where, run_id=log.run_id)
    result = small.fit(folder, 6, callbacks=[sample, again], **EVALUATED)
    client = mlflow.MlflowClient(where)
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    assert run.data.tags["ended"] == "done: all `steps`"
    for name in ("loss", "seconds", "eval_loss"):
        expected = [(r["step"], r[name]) for r in result.history if name in r]
        found = sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))
        assert found == expected
    artifacts = client.list_artifacts(run.info.run_id, "samples")
    assert [a.path for a in artifacts] == [f"samples/step-{n}.txt" for n in (2, 4, 6)]
    text = Path(client.download_artifacts(run.info.run_id, "samples/step-6.txt")).read_text()
    assert text.startswith("step 6: samples\n  prompt: a\n  temperature: 0.5\n  text: 6 | <b>\n")


# The best step


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
    assert result.reason == "best `eval_loss` 1 at step 4, no better 3 times"
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


def test_a_value_that_is_hardly_better_is_no_better(tmp_path: Path):
    """After 3, of 2, 2.5, 1, 1.5, 1.2, 1.1, 0.5 and 0.1 only 1 is better by more than 1.5."""
    stop = callbacks.EarlyStopping(patience=4, min_delta=1.5)
    keep = callbacks.KeepBest(tmp_path / "best", min_delta=1.5)
    result = stopping(None, callbacks=[keep, stop])
    assert result.reason == "best `eval_loss` 1 at step 4, no better 4 times"
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
    with pytest.raises(FileExistsError, match="a new run begins, but"):
        small.fit(None, 2, callbacks=[keep], **EVALUATED)


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


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (callbacks.EarlyStopping, {"metric": 3}, TypeError, "`metric` must be the name"),
        (callbacks.EarlyStopping, {"mode": "least"}, ValueError, '`mode` must be "min" or'),
        (callbacks.EarlyStopping, {"patience": 0}, ValueError, "`patience` must be at least 1"),
        (callbacks.EarlyStopping, {"min_delta": -1}, ValueError, "`min_delta` must be"),
        (callbacks.KeepBest, {"folder": "b", "metric": "loss"}, ValueError, "of an evaluation"),
        (callbacks.KeepBest, {"folder": 3}, TypeError, "`folder` must be a path"),
        (callbacks.CSVLog, {"path": 3}, TypeError, "`path` must be a path"),
        (callbacks.JSONLog, {"path": ""}, ValueError, "`path` must be a path"),
        (callbacks.Profile, {"folder": "p", "first": 0}, ValueError, "`first` must be at least 1"),
        (callbacks.Profile, {"folder": "p", "last": 2}, ValueError, "`last` must be at least 3"),
        (callbacks.LiveCurve, {"every": 0}, ValueError, "`every` must be at least 1"),
        (callbacks.LiveCurve, {"smooth": 0}, ValueError, "`smooth` must be at least 1"),
        (callbacks.MLflow, {"experiment": 3}, TypeError, "`experiment` must be a str"),
    ],
)
def test_misuses_of_callbacks_are_named(kind: Any, arguments: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        kind(**arguments)


@pytest.mark.parametrize("metric", ["los", "eval_los"])
def test_a_metric_that_no_record_has_is_named(metric: str):
    with pytest.raises(ValueError, match=f"no metric is called '{metric}'; there are .*loss"):
        small.fit(None, 3, callbacks=[callbacks.EarlyStopping(metric)], **EVALUATED)


# Profiles and live curves


@pytest.mark.parametrize(("first", "last"), [(1, 2), (3, 3), (4, 9)])
def test_the_steps_of_a_profile_are_in_its_trace(first: int, last: int, tmp_path: Path):
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
        outputs = shell.display_pub.outputs
    finally:
        shell.display_pub = before
        InteractiveShell.clear_instance()
    assert [bool(output.get("update")) for output in outputs] == [False, True, True]
    assert len({output["transient"]["display_id"] for output in outputs}) == 1
    images = [output["data"]["image/png"] for output in outputs]
    assert len(set(images)) == 3
