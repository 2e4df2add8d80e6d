"""What the scripts of the tables share: rows as data, a process for each, a Markdown table."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapes import SHAPES

FOLDER = Path(__file__).parent
# The median of single steps; where updates run behind steps, only their mean tells the truth.
SECONDS_KEY, MEAN_SECONDS_KEY = "seconds_per_step", "mean_seconds_per_step"
Result = dict[str, Any]
Column = tuple[str, Callable[[Result], str]]
Option = str | int | float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration.

    Attributes:
        name: What the table calls it.
        options: Options of the script that measures it, without the dashes.
        yardstick: Name of the row whose tokens a second the ratio of this one refers to.
        environment: Variables that its process gets besides those of this one.
        command: The script that measures it, with what runs it.
    """

    name: str
    options: Mapping[str, Option] = field(default_factory=dict)
    yardstick: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = (sys.executable, str(FOLDER / "measure.py"))

    @property
    def file_name(self) -> str:
        """Name of the row's JSON file."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-") + ".json"


def parser(description: str | None, table: str) -> argparse.ArgumentParser:
    """Returns a parser of the options that all tables have."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--steps", type=int, default=8, help="measured steps of each row")
    result.add_argument("--out", type=Path, default=Path("runs/throughput", table))
    result.add_argument(
        "--rows", nargs="+", metavar="TEXT", help="only the rows whose name contains one of these"
    )
    result.add_argument(
        "--resume", action="store_true", help="keep the rows whose JSON file is there already"
    )
    return result


def add_shape(parser: argparse.ArgumentParser, default: str = "qwen2.5-3b-untied") -> None:
    """Adds the option of the shape; a row's own sizes override the shape's."""
    parser.add_argument("--shape", choices=SHAPES, default=default)


def run_table(
    rows: Sequence[Row],
    args: argparse.Namespace,
    columns: Sequence[Column],
    ratio: str = "of resident",
    seconds: str = SECONDS_KEY,
) -> None:
    """Measures rows, each in a process of its own, and prints their table.

    Args:
        rows: What to measure; a row that fails is reported and does not stop the others.
        args: What `parser` read.
        columns: The table's, after the one of names.
        ratio: Title of the column that compares rows with their yardsticks.
        seconds: Which figure of a step's time it compares.

    Raises:
        SystemExit: If a row failed, after the table.
    """
    wanted = [row for row in rows if not args.rows or any(text in row.name for text in args.rows)]
    results: dict[str, Result | None] = {}
    for row in wanted:
        results[row.name] = run_row(row, args)
    print(f"\n{table(wanted, results, columns, ratio, seconds)}", flush=True)
    failed = [name for name, result in results.items() if result is None]
    if failed:
        sys.exit(f"without a result: {', '.join(failed)}")


def run_row(row: Row, args: argparse.Namespace) -> Result | None:
    """Measures one row, or reads what an earlier run has left of it; None if that fails."""
    out = args.out / row.file_name
    if args.resume and out.exists():
        return json.loads(out.read_text())
    out.unlink(missing_ok=True)
    options = {"steps": args.steps, **row.options, "out": out}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    print(f"=== {row.name}", flush=True)
    environment = {**os.environ, **row.environment}
    subprocess.run([*row.command, *words], env=environment, check=False)
    if not out.exists():
        return None
    result = {"name": row.name, "environment": dict(row.environment)}
    result |= json.loads(out.read_text())
    out.write_text(json.dumps(result, indent=2) + "\n")
    return result


def table(
    rows: Sequence[Row],
    results: Mapping[str, Result | None],
    columns: Sequence[Column],
    ratio: str = "",
    seconds: str = SECONDS_KEY,
) -> str:
    """Returns the rows as a Markdown table, with each one's share of its yardstick's rate."""
    titles = ["", *(title for title, _ in columns)]
    if compares := any(row.yardstick for row in rows):
        titles.append(ratio)
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        result = results.get(row.name)
        cells = [row.name]
        cells += ["failed" if result is None else show(result) for _, show in columns]
        if compares:
            cells.append(_ratio(result, results.get(row.yardstick or ""), seconds))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _ratio(result: Result | None, yardstick: Result | None, seconds: str) -> str:
    if result is None or yardstick is None:
        return ""
    return f"{rate(result, seconds) / rate(yardstick, seconds):.3f}"


def rate(result: Result, seconds: str = SECONDS_KEY) -> float:
    """Returns tokens a second by one of the figures of a step's time."""
    return result["tokens_per_step"] / result[seconds]


def number(key: str, form: str = ".4g", unit: str = "") -> Callable[[Result], str]:
    """Returns what shows a figure; nothing where it could not be measured."""

    def show(result: Result) -> str:
        value = result.get(key)
        return "" if value is None else f"{value:{form}}{unit}"

    return show


SECONDS = ("s/step", number("seconds_per_step"))
PREDICTED = ("predicted", number("predicted_seconds_per_step"))
TOKENS = ("tokens/s", number("tokens_per_second", ",.0f"))
TFLOPS = ("TFLOP/s", number("tflops_per_second"))
TFLOPS_WITH_ATTENTION = (
    "TFLOP/s with attention",
    number("tflops_per_second_with_attention"),
)
PEAK_DEVICE = ("peak device memory", number("peak_device_gib", ".1f", " GiB"))
STATE = ("state on the device, planned", number("planned_state_gib", ".1f", " GiB"))
KEPT = ("stages not recomputed", number("stages_that_keep_residuals", "d"))
PEAK_HOST = ("peak host memory", number("peak_host_gib", ".1f", " GiB"))
PLANNED_HOST = ("host memory, planned", number("planned_host_peak_gib", ".1f", " GiB"))
LINK_SHARE = ("of plain copies' rate", number("link_share", ".2f"))
STANDARD = (SECONDS, PREDICTED, TOKENS, TFLOPS, PEAK_DEVICE, STATE, KEPT)
