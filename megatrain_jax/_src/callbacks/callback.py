"""The protocol of callbacks: the calls that `fit` and `train` make; and tables of texts."""

import abc
import html
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any

from megatrain_jax import FitResult, Trainer
from megatrain_jax._src.common.checks import is_number
from megatrain_jax._src.common.outside import naming, needing
from megatrain_jax._src.common.unfinished import naming_file, replaced_file


class Callback:
    """A callback with methods for a run's beginning and end; a function has only `__call__`.

    The methods are called in the order of `callbacks`. They must not move the trainer, by a step or
    by restoring. A run that had nothing left to do calls none of them.

    A callback that decides by a metric may have its name as attribute `metric`: `fit` then refuses
    a run that never evaluates a metric of evaluations. If it also says which metrics it adds to
    records, as do all earlier ones, `fit` refuses a metric that the loss doesn't have.

    Attributes:
        adds_metrics: The names of the metrics that it adds to records; None if they aren't known.
        own_checkpoints: The folder whose checkpoints it writes and removes; None if there is none.
            `fit` refuses that of the run or of another callback.
        signals_wait: Whether Ctrl-C or SIGTERM waits until a call has ended; a second signal takes
            effect at once. Otherwise the record whose call it cuts off does not come again.
    """

    adds_metrics: Collection[str] | None = None
    own_checkpoints: str | PathLike[str] | None = None
    signals_wait = False

    def begin(self, trainer: Trainer) -> None:
        """Called before a run's first step, after a checkpoint has been restored.

        Args:
            trainer: The trainer; `num_steps` is 0, or the step from which the run continues.
        """

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Called with each complete record; it may add to the record.

        Records are read late: the trainer may already have dispatched the step after the record's,
        unless it was evaluated.

        Args:
            trainer: The trainer.
            record: The record, as stored in the history.

        Raises:
            StopTraining: To end the run, for a reason.
        """

    def end(self, result: FitResult) -> None:
        """Called when a run has ended in any way, and its last step is saved.

        Args:
            result: The result; `ended` and `reason` give the cause. If it is "failed", the error is
                raised afterwards.
        """


Rows = Sequence[Mapping[str, Any]]


class Log(Callback, abc.ABC):
    """A callback that logs records; if several processes share a run, only the first one logs."""

    adds_metrics = ()
    signals_wait = True
    # Not in other processes, nor if opening has failed.
    _is_open = False

    def begin(self, trainer: Trainer) -> None:
        """Opens the log."""
        self._is_open = False
        if trainer.processes.is_first:
            self._open(trainer.num_steps)
            self._is_open = True

    def __call__(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Writes the numbers of a record, and its tables of texts."""
        if self._is_open:
            self._write(record["step"], numbers(record))
            for name, rows in tables(record).items():
                self._write_table(record["step"], name, rows)

    def end(self, result: FitResult) -> None:
        """Closes the log, with the reason of the end if the log can store it."""
        if self._is_open:
            self._close(result)

    def _open(self, num_steps: int) -> None:
        """Opens the log of a run that continues after this many steps."""

    @abc.abstractmethod
    def _write(self, step: int, values: dict[str, float]) -> None:
        """Writes the numbers of a record."""

    @abc.abstractmethod
    def _write_table(self, step: int, name: str, rows: Rows) -> None:
        """Writes a table of texts and numbers, such as samples; all rows have the same columns."""

    def _close(self, result: FitResult) -> None:
        """Closes the log of a run that has ended."""


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, without its step; callbacks may have added values of any type."""
    pairs = record.items()
    return {name: float(value) for name, value in pairs if name != "step" and is_number(value)}


def tables(record: Mapping[str, Any]) -> dict[str, Rows]:
    """The tables of a record: lists of dicts with equal keys, as added by `Samples`."""
    return {name: value for name, value in record.items() if _is_table(value)}


def _is_table(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(row, Mapping) and row.keys() == value[0].keys() for row in value)


def finite_or_none(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replaces numbers that are not finite, which JSON can't express, by None."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def needing_extra(name: str) -> AbstractContextManager[None]:
    """Advises to install a package, by the extra of its name, if it can't be imported."""
    return needing(f'this callback needs {name}: pip install "megatrain-jax[{name}]"')


# ---- tables of texts

_HEADER = re.compile(r"step (\d+): ")


def as_text(step: int, name: str, rows: Rows) -> str:
    r"""A table as plain text, one value per line, under a header that no value can look like.

    Examples:
        >>> print(as_text(3, "samples", [{"prompt": "1 2", "text": "3\nstep 4: 5"}]))
        step 3: samples
          prompt: 1 2
          text: 3
            step 4: 5
        <BLANKLINE>
    """
    lines = [f"step {step}: {name}\n"]
    for row in rows:
        lines += [f"  {key}: {_indented(value)}\n" for key, value in row.items()]
    return "".join(lines)


def as_markdown(rows: Rows) -> str:
    r"""A table as Markdown, with its texts escaped.

    Examples:
        >>> print(as_markdown([{"prompt": "a|b", "text": "<c>\nd"}]))
        | prompt | text |
        |---|---|
        | a&#124;b | &lt;c&gt;<br>d |
    """
    header = [f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
    return "\n".join([*header, *(f"| {' | '.join(map(_cell, row.values()))} |" for row in rows)])


class TextFile:
    """The file beside a log for its tables, created with the first one."""

    def __init__(self, log: Path):
        """Names the file after its log: `run.csv.txt` beside `run.csv`."""
        self._path = log.with_name(log.name + ".txt")

    def remove_later(self, num_steps: int) -> None:
        """Removes the file's tables of later steps."""
        if not self._path.exists():
            return
        kept, step = [], 0
        with naming(self._path):
            for line in self._path.read_text(encoding="utf-8").split("\n"):
                header = _HEADER.match(line)
                step = int(header[1]) if header else step
                if line and step <= num_steps:
                    kept.append(line + "\n")
        replace_file(self._path, kept)

    def add(self, step: int, name: str, rows: Rows) -> None:
        """Adds a table."""
        with naming_file(self._path), self._path.open("a", encoding="utf-8", newline="") as file:
            file.write(as_text(step, name, rows))


def replace_file(path: Path, lines: Iterable[str]) -> None:
    """Replaces a file atomically: readers see either the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as new, new.open("w", encoding="utf-8", newline="") as file:
        file.writelines(lines)


def _indented(value: object) -> str:
    # `splitlines` knows every character that a reader may treat as a line end.
    first, *others = str(value).splitlines() or [""]
    return "\n".join([first, *(f"    {line}" for line in others)])


def _cell(value: object) -> str:
    return "<br>".join(html.escape(str(value)).replace("|", "&#124;").splitlines())
