"""Logs in CSV and JSON files, one line per record, without further packages."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path

from megatrain_jax._src.callbacks.callback import Log, Rows, finite_or_none
from megatrain_jax._src.callbacks.texts import TextFile, replace_file
from megatrain_jax._src.common import checks
from megatrain_jax._src.common.outside import integer, naming, parsed_json
from megatrain_jax._src.common.unfinished import naming_file


class CSVLog(Log):
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
        self._texts = TextFile(self._path)
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

    def _write_table(self, step: int, name: str, rows: Rows) -> None:
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
        replace_file(self._path, map(_line, (*header, *rows)))


class JSONLog(Log):
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
        self._texts = TextFile(self._path)
        self._last_step = 0

    def _open(self, num_steps: int) -> None:
        self._texts.remove_later(num_steps)
        self._keep(num_steps)

    def _keep(self, num_steps: int) -> None:
        """Removes the lines of later steps."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        kept = [line for line in lines if _step_of(line, self._path) <= num_steps]
        if len(kept) < len(lines) or not kept:
            replace_file(self._path, (line + "\n" for line in kept))
        self._last_step = _step_of(kept[-1], self._path) if kept else 0

    def _write(self, step: int, values: dict[str, float]) -> None:
        # After resuming, the last step comes again with the evaluation that was cut off.
        if step <= self._last_step:
            self._keep(step - 1)
        self._last_step = step
        with naming_file(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite_or_none(values)}) + "\n")

    def _write_table(self, step: int, name: str, rows: Rows) -> None:
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
