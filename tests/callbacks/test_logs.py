"""Logs of real runs, read back by the packages that read such files."""

import csv
import json
import logging
import math
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optax
import pytest

import megatrain_jax as mt
import small
from megatrain_jax import callbacks
from megatrain_jax._src.callbacks.callback import tables
from megatrain_jax._src.engine.state.processes import Processes
from messages import refuses

pytestmark = pytest.mark.usefixtures("started_once")
EVALUATED: Any = {"eval_data": [small.batch(9)], "eval_every": 2}


def sample(trainer: mt.Trainer, record: dict[str, Any]) -> None:
    """Puts samples into the records of evaluations, as `Samples` does."""
    if "eval_loss" in record:
        text = f"{record['step']} | <b>\nstep 9: samples"
        record["samples"] = [{"prompt": p, "temperature": 0.5, "text": text} for p in "ab"]


def numbers(history: mt.History) -> list[dict[str, float]]:
    return [{k: float(v) for k, v in record.items()} for record in history]


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


def test_files_of_a_run_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    logs = [callbacks.CSVLog("~/a.csv"), callbacks.JSONLog(Path("~/b.jsonl"))]
    small.fit(None, 1, callbacks=logs).history.save("~/c.json")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert {path.name for path in tmp_path.glob("home/*.*")} == {"a.csv", "b.jsonl", "c.json"}


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_waits_until_a_record_is_written_and_a_second_one_does_not(
    signals: int, tmp_path: Path
):
    class Interrupted(callbacks.JSONLog):
        def _write(self, step: int, values: dict[str, float]) -> None:
            for _ in range(signals if step == 2 else 0):
                signal.raise_signal(signal.SIGINT)
            super()._write(step, values)

    log = Interrupted(tmp_path / "run.jsonl")
    result = small.fit(None, 5, callbacks=[log])
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    trained = [record["step"] for record in result.history]
    assert result.interrupted and trained == [1, 2, 3]
    assert steps == [step for step in trained if step != 2 or signals == 1]


def test_only_rows_of_equal_columns_are_a_table():
    table, uneven = [{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 1, "b": 2}]
    record = {"step": 3, "loss": 2.0, "one": table, "no": uneven, "none": [], "texts": ["a"]}
    assert tables(record) == {"one": table}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "step,loss\n" + "9" * 5000 + ",1\n"),
        ("a.csv", "step,loss\n1," + "x" * 200_000 + "\n"),
        ("a.csv.txt", "step " + "9" * 5000 + ": samples\n"),
        ("a.jsonl", "[" * 100_000 + "]" * 100_000 + "\n"),
        ("a.jsonl", '{"step": ' + "9" * 5000 + "}\n"),
        ("a.jsonl", '{"step": "x"}\n'),
        ("a.jsonl", '{"step": NaN}\n'),
        ("a.jsonl", '{"step": 3000000000}\n'),
    ],
    ids=["digits", "cell", "header", "deep", "endless", "text", "nan", "large"],
)
def test_a_log_of_something_else_is_named(name: str, text: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    kind = callbacks.JSONLog if name.endswith("jsonl") else callbacks.CSVLog
    with pytest.raises((TypeError, ValueError), match=str(tmp_path / name)):
        kind(tmp_path / name.removesuffix(".txt"))._open(5)


@pytest.mark.by_default("CSVLog")
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
    with refuses(ValueError, path):
        small.fit(None, 1, callbacks=[kind(path)])
    assert path.read_text() == text


@pytest.mark.parametrize("is_first", [True, False])
def test_all_processes_but_the_first_print_warn_and_write_nothing(
    is_first, tmp_path: Path, monkeypatch: Any, capfd: Any
):
    monkeypatch.setattr(Processes, "is_first", is_first)
    logs = callbacks.CSVLog(tmp_path / "a.csv"), callbacks.JSONLog(tmp_path / "b.jsonl")
    profile = callbacks.Profile(tmp_path / "profile", first=1, last=1)

    def interrupts(trainer: mt.Trainer, record: dict[str, Any]) -> None:
        if record["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = mt.fit(
            {"layers": small.params(), "unread": np.ones(3, np.float32)},
            lambda params, batch: small.loss_fn(params["layers"], batch),
            map(small.batch, range(3)),
            optax.sgd(0.1),
            seed=3,  # nothing draws from it
            eval_data=[small.batch(9)],
            eval_every=1,
            callbacks=[*logs, profile, callbacks.EarlyStopping("loss", patience=9), interrupts],
        )
    assert result.trainer.num_steps == 2
    for what in ("unread", "`seed`", "EarlyStopping"):
        assert any(what in str(w.message) for w in warned) == is_first, what
    assert is_first or not warned
    assert {path.name for path in tmp_path.iterdir()} == (
        {"a.csv", "b.jsonl", "profile"} if is_first else set()
    )
    out, err = capfd.readouterr()
    printed = ("tracing", "initialising", "first evaluation", "loss 0.", "SIGINT")
    assert not out and [what in err for what in printed] == [is_first] * len(printed)
    assert is_first or not err


def test_a_process_that_becomes_the_first_one_writes_no_log_of_its_own(tmp_path: Path):
    """As it does once the first one is lost; the file is not its own to go on with."""
    log, path = callbacks.JSONLog(tmp_path / "log.jsonl"), tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n')
    other, first = (
        SimpleNamespace(processes=SimpleNamespace(is_first=is_first), num_steps=0)
        for is_first in (False, True)
    )
    log.begin(other)  # type: ignore[arg-type]
    log(first, {"step": 1, "loss": 2.0})  # type: ignore[arg-type]
    log.end(SimpleNamespace(trainer=first))  # type: ignore[arg-type]
    assert path.read_text() == '{"step": 1}\n'


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
    assert ended.decode() == f"{result.ended}: {result.reason}"
    tables = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples")}
    assert list(tables) == [2, 4, 6]
    cells = "0.5 | 6 &#124; &lt;b&gt;<br>step 9: samples |"
    assert tables[6].splitlines()[-2:] == [f"| {prompt} | {cells}" for prompt in "ab"]


@pytest.mark.filterwarnings("default")
def test_trackio_reads_what_was_logged(tmp_path: Path, monkeypatch: Any):
    trackio = pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    for module in ("trackio.sqlite_storage", "trackio.utils"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    options: Any = {"name": "one", "resume": "allow", "auto_log_cpu": False}
    folder = tmp_path / "run"
    small.fit(folder, 4, callbacks=[sample, callbacks.Trackio("tests", **options)], **EVALUATED)
    again = callbacks.Trackio("tests", **options)
    result = small.fit(folder, 6, callbacks=[sample, again], **EVALUATED)
    (run,) = trackio.Api().runs("tests")
    assert run.name == "one"
    rows = storage.get_logs("tests", "one")
    for name in ("loss", "seconds", "eval_loss"):
        expected = [(r["step"], r[name]) for r in result.history if name in r]
        assert [(row["step"], row[name]) for row in rows if name in row] == expected
    shown = {row["step"]: row["samples"]["_value"] for row in rows if "samples" in row}
    assert list(shown) == [2, 4, 6]
    text = "6 | <b>\nstep 9: samples"
    assert shown[6] == [{"prompt": p, "temperature": 0.5, "text": text} for p in "ab"]
    texts = {(alert["title"], alert["level"]) for alert in run.alerts()}
    assert (f"{result.ended}: {result.reason}", "info") in texts
    log = callbacks.Trackio("tests", **options | {"name": "two"})
    with pytest.raises(ZeroDivisionError):
        small.fit(None, 1, callbacks=[log, lambda trainer, record: record["step"] / 0])
    (failed,) = (one for one in trackio.Api().runs("tests") if one.name == "two")
    assert [alert["level"] for alert in failed.alerts()] == ["error"]
    with refuses(ValueError, "resume") as caught:  # by Trackio, when the run begins
        small.fit(None, 1, callbacks=[callbacks.Trackio("tests", resume="no")])
    assert "AttributeError" not in "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
def test_weights_and_biases_reads_what_was_logged(tmp_path: Path, monkeypatch: Any):
    wandb = pytest.importorskip("wandb")
    messages: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")

    monkeypatch.setenv("WANDB_SILENT", "true")
    with refuses(TypeError, "`projct`", "`project`"):
        callbacks.WandB(projct="tests")
    for given in ({"mode": "ofline"}, {"tags": 3}, {"resume": "always"}, {"name": 1.5}):
        with refuses(ValueError, "`wandb.init`", f"`{next(iter(given))}`"):
            callbacks.WandB(**given)
    # Neither a key nor a file with one, and no terminal to ask at.
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with refuses(ValueError, "`wandb login`", "WANDB_API_KEY", "`mode="):
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
    assert json.loads(summary["ended"]) == f"{result.ended}: {result.reason}"


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
    assert run.data.tags["ended"] == f"{result.ended}: {result.reason}"
    for name in ("loss", "seconds", "eval_loss"):
        expected = [(r["step"], r[name]) for r in result.history if name in r]
        metrics = client.get_metric_history(run.info.run_id, name)
        assert sorted((m.step, m.value) for m in metrics) == expected
        assert all(
            run.info.start_time - 1000 <= m.timestamp < 1000 * (time.time() + 1) for m in metrics
        )
    # Not every store takes other numbers.
    again._write(7, {"loss": math.nan, "seconds": 1.0, "eval_loss": math.inf})
    last = {n: client.get_metric_history(run.info.run_id, n)[-1].step for n in ("loss", "seconds")}
    assert last == {"loss": 6, "seconds": 7}
    artifacts = client.list_artifacts(run.info.run_id, "samples")
    assert [a.path for a in artifacts] == [f"samples/step-{n}.txt" for n in (2, 4, 6)]
    text = Path(client.download_artifacts(run.info.run_id, "samples/step-6.txt")).read_text()
    assert text.startswith("step 6: samples\n  prompt: a\n  temperature: 0.5\n  text: 6 | <b>\n")
