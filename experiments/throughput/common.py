"""The tables' common part: rows as data, a process for each, a Markdown table."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from figures import COLUMNS, FIGURES, Result, part
from record import Origin, add_origin_options, find_origin, save
from shapes import SHAPES
from timing import MIN_STEPS

FOLDER = Path(__file__).parent
Column = tuple[str, Callable[[Result], str]]
Option = str | int | float

COMPACT: Mapping[str, Option] = {"master": "bfloat16", "state": "int8"}
"""Options of `measure.py` for `Precision.compact()`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: one configuration to measure.

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
    result.add_argument(
        "--steps", type=int, default=MIN_STEPS, help="steps that the mean of each row is of"
    )
    result.add_argument("--out", type=Path, default=Path("runs/throughput", table))
    result.add_argument(
        "--rows", nargs="+", metavar="TEXT", help="only the rows whose name contains one of these"
    )
    result.add_argument(
        "--only", nargs="+", metavar="NAME", help="only the rows of exactly these names"
    )
    result.add_argument(
        "--resume", action="store_true", help="keep the rows whose JSON file is there already"
    )
    add_origin_options(result)
    return result


def add_shape(parser: argparse.ArgumentParser, default: str = "qwen2.5-3b-untied") -> None:
    """Adds the option of the shape; a row's own sizes override the shape's."""
    parser.add_argument("--shape", choices=SHAPES, default=default)


def run_table(
    rows: Sequence[Row],
    args: argparse.Namespace,
    columns: Sequence[Column],
    ratio: str = "of resident",
) -> None:
    """Measures rows, each in a process of its own, and prints their table.

    Args:
        rows: The rows; one that fails is reported and does not stop the others.
        args: What `parser` read.
        columns: The table's, after the one of names.
        ratio: Title of the column that compares rows with their yardsticks.

    Raises:
        SystemExit: If no commit stands for the tree, or, after the table, if a row failed.
    """
    origin = find_origin(args)
    wanted = wanted_rows(rows, args)
    results: dict[str, Result | None] = {}
    for row in wanted:
        results[row.name] = run_row(row, args, origin)
    print(f"\n{table(wanted, results, columns, ratio)}", flush=True)
    failed = [name for name, result in results.items() if result is None]
    if failed:
        sys.exit(f"without a result: {', '.join(failed)}")


def wanted_rows(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """Returns the rows that the options ask for.

    Raises:
        SystemExit: If there is none, or none of a name that they give.
    """
    lost = set(args.only or ()) - {row.name for row in rows}
    found = [row for row in rows if not args.rows or any(text in row.name for text in args.rows)]
    found = [row for row in found if not args.only or row.name in args.only]
    if lost or not found:
        names = "; ".join(row.name for row in rows)
        sys.exit(f"no row {', '.join(sorted(lost or args.rows))}; there are: {names}")
    return found


def run_row(row: Row, args: argparse.Namespace, origin: Origin) -> Result | None:
    """Measures one row, or reads what an earlier run has left of it; None if that fails."""
    out = args.out / row.file_name
    if args.resume and out.exists():
        return json.loads(out.read_text())
    out.unlink(missing_ok=True)
    options = {"steps": args.steps, **row.options, **origin.options(), "out": out}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    print(f"=== {row.name}", flush=True)
    environment = {**os.environ, **row.environment}
    subprocess.run([*row.command, *words], env=environment, check=False)
    if not out.exists():
        return None
    result = {"name": row.name, "environment": dict(row.environment)}
    result |= json.loads(out.read_text())
    save(out, result)
    return result


def table(
    rows: Sequence[Row],
    results: Mapping[str, Result | None],
    columns: Sequence[Column],
    ratio: str = "",
) -> str:
    """Returns the rows as a Markdown table, with each one's share of its yardstick's rate.

    Rows that `--resume` has kept of another run than the first row's say so.
    """
    titles = ["", *(title for title, _ in columns)]
    if compares := any(row.yardstick for row in rows):
        titles.append(ratio)
    lines = [titles, ["---"] * len(titles)]
    runs = {name: result["record"]["run"] for name, result in results.items() if result}
    first = next(iter(runs.values()), None)
    for row in rows:
        result = results.get(row.name)
        other = runs.get(row.name) not in (None, first)
        cells = [f"{row.name} (another run)" if other else row.name]
        cells += ["failed" if result is None else show(result) for _, show in columns]
        if compares:
            cells.append(_ratio(result, results.get(row.yardstick or "")))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _ratio(result: Result | None, yardstick: Result | None) -> str:
    if result is None or yardstick is None:
        return ""
    return f"{result['tokens_per_second'] / yardstick['tokens_per_second']:.3f}"


def column(title: str) -> Column:
    """Returns a column of the tables in pages, as `figures.py` has it by its title."""
    chosen = COLUMNS[title]

    def show(result: Result) -> str:
        found = [FIGURES[n](result) if n in FIGURES else part(result, n) for n in chosen.names]
        return "" if None in found else chosen.form.format(*found)

    return title, show


def number(key: str, form: str = ".4g", unit: str = "") -> Callable[[Result], str]:
    """Returns a figure as text; empty where it could not be measured."""

    def show(result: Result) -> str:
        value = result.get(key)
        return "" if value is None else f"{value:{form}}{unit}"

    return show


SECONDS, SPREAD, TOKENS, TFLOPS = map(column, ("s/step", "±", "tokens/s", "TFLOP/s"))
PREDICTED = ("predicted", number("predicted_seconds_per_step", ".3f"))
TFLOPS_WITH_ATTENTION = (
    "TFLOP/s with attention",
    number("tflops_per_second_with_attention"),
)
PEAK_DEVICE = ("peak device memory", number("peak_device_gib", ".1f", " GiB"))
STATE = ("state on the device, planned", number("planned_state_gib", ".1f", " GiB"))
PEAK_HOST = column("peak host memory")
PLANNED_HOST = ("host memory, planned", number("planned_host_peak_gib", ".1f", " GiB"))
LINK_SHARE = ("of plain copies' rate", number("link_share", ".2f"))
KEPT, DISPATCH = map(column, ("stages not recomputed", "dispatch"))
STANDARD = (SECONDS, SPREAD, PREDICTED, TOKENS, TFLOPS, PEAK_DEVICE, STATE, KEPT, DISPATCH)
