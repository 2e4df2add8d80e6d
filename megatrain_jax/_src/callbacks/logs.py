"""Logs in CSV and JSON files, and to MLflow, TensorBoard, Trackio and Weights & Biases.

TensorBoard's own event writer needs neither TensorFlow nor PyTorch.

tensorboardX, the alternative, imports PyTorch wherever it is installed.
"""

import csv
import inspect
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax

from megatrain_jax import FitResult
from megatrain_jax._src.callbacks import callback
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import as_value_errors, integer, naming, parsed_json
from megatrain_jax._src.common.suggestions import did_you_mean
from megatrain_jax._src.common.unfinished import naming_file


class CSVLog(callback.Log):
    """Writes the records to a CSV file: a header, and a row for each step.

    A run that continues from a checkpoint continues the file: rows of later steps, left by a killed
    process, are replaced. A metric that first appears later, such as an evaluation's, adds a
    column. Values that are not finite are written in Python's spelling. Samples go to a text file
    beside it, `run.csv.txt` for `run.csv`.

    Examples:
        >>> log = CSVLog("run.csv")
        >>> log._write(1, {"loss": 2.0})
        >>> log._write(2, {"loss": 1.5, "eval_loss": 1.75})
        >>> print(Path("run.csv").read_text())
        step,loss,eval_loss
        1,2.0,
        2,1.5,1.75
        <BLANKLINE>
    """

    def __init__(self, path: str | PathLike[str]):
        """Writes nothing yet.

        Args:
            path: The file; its folder is created.

        Raises:
            TypeError: If `path` is not a path.
        """
        self._path = Path(checks.path("path", path))
        self._texts = callback.TextFile(self._path)
        self._columns: list[str] = []
        self._last_step = 0

    def _open(self, num_steps: int) -> None:
        self._texts.remove_later(num_steps)
        rows = self._rows()
        self._columns = list(rows[0]) if rows else []
        if self._columns and self._columns[0] != "step":
            raise ValueError(f"{self._path} is no log of a run: its first column is not `step`")
        # A row that was cut off by a kill does not count.
        whole = [row for row in rows[1:] if len(row) == len(self._columns)]
        with naming(self._path):
            kept = [row for row in whole if row[0].isdecimal() and int(row[0]) <= num_steps]
        self._last_step = int(kept[-1][0]) if kept else 0
        if len(kept) < len(rows) - 1 or not kept:
            self._rewrite(kept)

    def _write(self, step: int, values: dict[str, float]) -> None:
        # After resuming, the last step comes again with the evaluation that was cut off.
        if step <= self._last_step:
            self._rewrite([row for row in self._rows()[1:] if int(row[0]) < step])
        self._last_step = step
        # The header lists the columns, so a new column means rewriting the file.
        if new := [name for name in ("step", *values) if name not in self._columns]:
            rows = self._rows()[1:]
            self._columns += new
            self._rewrite([[*row, *[""] * len(new)] for row in rows])
        # Appended, so a kill costs at most the last line.
        row = {"step": step, **values}
        line = _line([row.get(name, "") for name in self._columns])
        with naming_file(self._path), self._path.open("a", encoding="utf-8", newline="") as file:
            file.write(line)

    def _write_table(self, step: int, name: str, rows: callback.Rows) -> None:
        self._texts.add(step, name, rows)

    def _rows(self) -> list[list[str]]:
        if not self._path.exists():
            return []
        with naming(self._path), self._path.open(encoding="utf-8", newline="") as file:
            try:
                return list(csv.reader(file))
            except csv.Error as error:
                raise ValueError(str(error)) from error

    def _rewrite(self, rows: Iterable[Sequence[object]]) -> None:
        header = [self._columns] if self._columns else []
        callback.replace_file(self._path, map(_line, (*header, *rows)))


class JSONLog(callback.Log):
    """Writes the records to a file of lines, each a JSON object (JSONL).

    A run that continues from a checkpoint continues the file: lines of later steps, left by a
    killed process, are replaced. Values that are not finite become null. Samples go to a text file
    beside it, `run.jsonl.txt` for `run.jsonl`.
    """

    def __init__(self, path: str | PathLike[str]):
        """Writes nothing yet.

        Args:
            path: The file; its folder is created.

        Raises:
            TypeError: If `path` is not a path.
        """
        self._path = Path(checks.path("path", path))
        self._texts = callback.TextFile(self._path)
        self._last_step = 0

    def _open(self, num_steps: int) -> None:
        self._texts.remove_later(num_steps)
        self._keep(num_steps)

    def _keep(self, num_steps: int) -> None:
        """Removes the lines of later steps."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        kept = [line for line in lines if _step_of(line, self._path) <= num_steps]
        if len(kept) < len(lines) or not kept:
            callback.replace_file(self._path, (line + "\n" for line in kept))
        self._last_step = _step_of(kept[-1], self._path) if kept else 0

    def _write(self, step: int, values: dict[str, float]) -> None:
        # After resuming, the last step comes again with the evaluation that was cut off.
        if step <= self._last_step:
            self._keep(step - 1)
        self._last_step = step
        with naming_file(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **callback.finite_or_none(values)}) + "\n")

    def _write_table(self, step: int, name: str, rows: callback.Rows) -> None:
        self._texts.add(step, name, rows)


def _step_of(line: str, path: Path) -> float:
    """The step of a line; infinite if the line was cut off by a kill."""
    try:
        record = parsed_json(line)
    except json.JSONDecodeError:
        return float("inf")
    except ValueError as error:
        raise ValueError(f"{path} is no log of a run: {error}") from error
    if not isinstance(record, dict) or "step" not in record:
        raise ValueError(f"{path} is no log of a run: it has a line without `step`")
    return integer(path, "step", record["step"])


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


# ---- MLflow and TensorBoard

_STATUS = {"done": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(callback.Log):
    """Logs the records to an MLflow run, and the run's end as status and tag.

    Samples are artifacts, one text per evaluation. Needs `pip install "megatrain-jax[mlflow]"`.
    Values that are not finite are left out, because not every store accepts them.

    Attributes:
        run_id: The run's identifier; None before it has begun. Pass it to continue the run.
    """

    def __init__(
        self,
        experiment: str = "megatrain_jax",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
    ):
        """Starts no run yet.

        Args:
            experiment: Name of the experiment; created if it does not exist.
            tracking_uri: The server or the database, such as ``sqlite:///runs.db``; None for
                MLflow's own configuration.
            run_name: Name of the run; None lets MLflow choose one.
            run_id: Identifier of a run to continue; None starts a new one.

        Raises:
            ImportError: If MLflow is not installed.
            TypeError: If an argument is not a string.
            ValueError: If MLflow can't use `tracking_uri`, or has no run `run_id` there.
        """
        given = {"tracking_uri": tracking_uri, "run_name": run_name, "run_id": run_id}
        checks.instance("experiment", experiment, str, "a str")
        for name, value in given.items():
            checks.instance(name, value, str | None, "a str")
        with callback.needing_extra("mlflow"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        with as_value_errors(f"MLflow can't use `tracking_uri`={tracking_uri}"):
            self._metric, self._client = Metric, MlflowClient(tracking_uri)
        if run_id is not None:
            with as_value_errors(f"MLflow can't go on with `run_id`={run_id}"):
                self._client.get_run(run_id)
        self._experiment, self._run_name, self.run_id = experiment, run_name, run_id

    def _open(self, num_steps: int) -> None:
        if self.run_id is not None:
            # The previous process ended it.
            self._client.update_run(self.run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        number: Any = found and found.experiment_id
        if number is None:
            number = self._client.create_experiment(self._experiment)
        self.run_id = self._client.create_run(number, run_name=self._run_name).info.run_id

    def _write(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        metrics = [self._metric(name, value, now, step) for name, value in finite.items()]
        self._client.log_batch(self._known, metrics=metrics)

    def _write_table(self, step: int, name: str, rows: callback.Rows) -> None:
        self._client.log_text(
            self._known, callback.as_text(step, name, rows), f"{name}/step-{step}.txt"
        )

    def _close(self, result: FitResult) -> None:
        self._client.set_tag(self._known, "ended", f"{result.ended}: {result.reason}")
        self._client.set_terminated(self._known, status=_STATUS[result.ended])

    @property
    def _known(self) -> str:
        assert self.run_id is not None
        return self.run_id


class TensorBoard(callback.Log):
    """Writes the records for TensorBoard: a scalar for each metric, a text for samples.

    A run that continues from a checkpoint continues in the same folder; events of later steps there
    are no longer shown. Needs `pip install "megatrain-jax[tensorboard]"`; then ``tensorboard
    --logdir FOLDER`` shows it.
    """

    def __init__(self, folder: str | PathLike[str]):
        """Writes nothing yet.

        Args:
            folder: The run's folder.

        Raises:
            ImportError: If TensorBoard is not installed.
            TypeError: If `folder` is not a path.
        """
        with callback.needing_extra("tensorboard"):
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._make: Any = EventFileWriter
        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._tensor: Any = tensor_pb2
        self._folder = checks.path("folder", folder)
        self._writer: Any = None

    def _open(self, num_steps: int) -> None:
        self._writer = self._make(self._folder)
        if num_steps:
            # Marks a restart: TensorBoard then ignores later events in earlier files.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(num_steps + 1, session_log=start)

    def _write(self, step: int, values: dict[str, float]) -> None:
        rows = [self._summary.Summary.Value(tag=n, simple_value=x) for n, x in values.items()]
        self._add(step, summary=self._summary.Summary(value=rows))

    def _write_table(self, step: int, name: str, rows: callback.Rows) -> None:
        self._add_text(step, name, callback.as_markdown(rows))

    def _close(self, result: FitResult) -> None:
        self._add_text(result.trainer.num_steps, "ended", f"{result.ended}: {result.reason}")
        self._writer.close()

    def _add_text(self, step: int, name: str, text: str) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        row = self._summary.Summary.Value(
            tag=name,
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor.TensorProto(dtype="DT_STRING", string_val=[text.encode()]),
        )
        self._add(step, summary=self._summary.Summary(value=[row]))

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **what))


# ---- Weights & Biases, Trackio


class _RunOfInit(callback.Log):
    """Logs to a run that a package's `init` starts; samples are tables."""

    def __init__(self, start: Callable[..., Any], table: Callable[..., Any], init: dict[str, Any]):
        self._start, self._table, self._init = start, table, init
        self._run: Any = None

    def _open(self, num_steps: int) -> None:
        self._run = self._start(**self._init)

    def _write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def _write_table(self, step: int, name: str, rows: callback.Rows) -> None:
        data = [list(row.values()) for row in rows]
        self._run.log({name: self._table(columns=list(rows[0]), data=data)}, step=step)


class Trackio(_RunOfInit):
    """Logs the records to a Trackio run, and the run's end as an alert; samples are tables.

    Needs `pip install "megatrain-jax[trackio]"`. For a run that continues from a checkpoint, pass
    its ``name`` and ``resume="allow"``, as to `trackio.init`; Trackio keeps what was logged after
    the checkpoint.
    """

    def __init__(self, project: str = "megatrain_jax", **init: Any):
        """Starts no run yet.

        Args:
            project: Name of the project.
            **init: Further arguments of `trackio.init`: `name`, `space_id`, `config` and so on.

        Raises:
            ImportError: If Trackio is not installed.
            TypeError: If `trackio.init` has no such argument, or the project is not a string.
        """
        checks.instance("project", project, str, "a str")
        with callback.needing_extra("trackio"):
            import trackio
        _check_names("trackio.init", trackio.init, init)
        # Otherwise, it starts a server of its board in notebooks.
        super().__init__(trackio.init, trackio.Table, {"project": project, "embed": False} | init)
        self._levels: Any = trackio.AlertLevel

    def _close(self, result: FitResult) -> None:
        failed = result.ended == "failed"
        level = self._levels.ERROR if failed else self._levels.INFO
        self._run.alert(f"{result.ended}: {result.reason}", level=level)
        self._run.finish()


class WandB(_RunOfInit):
    """Logs the records to a Weights & Biases run; samples are tables.

    Needs `pip install "megatrain-jax[wandb]"`. For a run that continues from a checkpoint, pass
    ``id=...`` and ``resume="allow"``, as to `wandb.init`.
    """

    def __init__(self, **init: Any):
        """Starts no run yet.

        Args:
            **init: Arguments of `wandb.init`: `project`, `name`, `config`, `mode="offline"` and so
                on.

        Raises:
            ImportError: If wandb is not installed.
            TypeError: If `wandb.init` has no such argument.
            ValueError: If a value is not valid, or if the log is online and nobody is logged in. At
                a terminal and in a notebook, wandb asks for the key instead; if several processes
                share a run, the first one asks when the run begins.
        """
        with callback.needing_extra("wandb"):
            import wandb
        _check_wandb(wandb, init)
        _log_in_wandb(wandb, init.get("mode") or os.environ.get("WANDB_MODE", "online"))
        super().__init__(wandb.init, wandb.Table, init)

    def _close(self, result: FitResult) -> None:
        self._run.summary["ended"] = f"{result.ended}: {result.reason}"
        self._run.finish(exit_code=int(result.ended == "failed"))


def _check_names(label: str, function: Callable[..., Any], given: Iterable[str]) -> None:
    """Checks early that a function has arguments of these names."""
    known = inspect.signature(function).parameters
    if any(row.kind is inspect.Parameter.VAR_KEYWORD for row in known.values()):
        return
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
            raise TypeError(f"`{label}` has no argument `{name}`{hint}")


def _log_in_wandb(wandb: Any, mode: str) -> None:
    """Asks for credentials now; wandb would ask when the run begins."""
    # Only the first process logs, and JAX reveals the first one only after its devices have
    # started.
    if mode not in ("online", "shared") or jax.distributed.is_initialized():
        return
    try:
        known = wandb.login(verify=False)
    except wandb.errors.UsageError:
        known = False
    if not known:
        raise ValueError(
            "nobody is logged in at Weights & Biases: run `wandb login`, set WANDB_API_KEY, or "
            'pass `mode="offline"`'
        )


def _check_wandb(wandb: Any, init: Mapping[str, Any]) -> None:
    """Checks arguments of `wandb.init` early; wandb would check them when the run begins."""
    _check_names("wandb.init", wandb.init, init)
    for name, value in init.items():
        # wandb's Settings validates values, and has different names for some arguments.
        settings = wandb.Settings.model_fields
        field = next((field for field in (name, f"run_{name}") if field in settings), None)
        if field is None:
            continue
        try:
            wandb.Settings(**{field: value})
        except (TypeError, ValueError) as error:
            # A pydantic error lists each fault; its own text is about settings.
            listed: Any = getattr(error, "errors", list)()
            why = listed[0]["msg"] if listed else error
            raise ValueError(f"`wandb.init` can't take `{name}`={value!r}: {why}") from error
