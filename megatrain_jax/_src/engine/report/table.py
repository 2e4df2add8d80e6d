"""Tables of runs as plain text and as HTML, their numbers, and curves of metrics over the steps."""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_jax._src.common.checks import is_number
from megatrain_jax._src.common.sizes import counted, sized
from megatrain_jax._src.engine.adapt.loss_function import EVAL_PREFIX
from megatrain_jax._src.engine.program import jaxpr as jx

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from megatrain_jax._src.engine.report.notebook_figure import NotebookFigure
    from megatrain_jax._src.engine.spec.run_spec import RunSpec


UNFIT = "DOES NOT FIT"
RED = "#c62828"


def seconds(value: float | None) -> str:
    """A time with three digits: `1.25 s`, `12.3 ms`, `45.6 µs`; empty if unknown."""
    if value is None:
        return ""
    if value == 0 or value >= 0.1:
        return f"{value:.3g} s"
    # The larger unit is used if three digits would round up to a thousand.
    return f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} µs"


def short(value: int, flops: bool = False) -> str:
    """A count with three digits; with `flops`, a count of operations."""
    steps = ("", "K", "M", "G" if flops else "B", "T", "P", "E")
    size = float(value)
    # From 999.5 on, three digits would round to a thousand.
    while size >= 999.5 and len(steps) > 1:
        size, steps = size / 1000, steps[1:]
    return f"{size:.3g} {steps[0]}FLOP" if flops else f"{size:.3g}{steps[0]}"


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """A table as text: the first column left-aligned, the last unpadded, the rest right-aligned."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        middle = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([first, *middle, row[-1]]).rstrip())
    return "\n".join(lines)


def html_row(cells: Sequence[str], tag: str = "td") -> str:
    """One row of a table in HTML; cells that say something does not fit are red."""
    return f"<tr>{''.join(f'<{tag}>{_html(cell)}</{tag}>' for cell in cells)}</tr>"


def html_table(cells: Sequence[Sequence[str]], *, header: bool = False) -> str:
    """A table in HTML; its first row may be a header."""
    rows = [html_row(cells[0], "th"), *map(html_row, cells[1:])] if header else map(html_row, cells)
    return f"<table>{''.join(rows)}</table>"


def html_line(text: str) -> str:
    """A line of text in HTML, escaped."""
    return f"<div>{html.escape(text)}</div>"


def html_box(*parts: str) -> str:
    """Parts in a column, never wider than the notebook cell."""
    return f'<div style="max-width:100%;overflow-x:auto">{"".join(parts)}</div>'


def html_beside(left: str, right: str) -> str:
    """Two parts side by side, or in a column if there is not enough space."""
    outer = "display:flex;flex-wrap:wrap;gap:16px 24px;align-items:flex-start;max-width:100%"
    inner = "min-width:0;max-width:100%;overflow-x:auto"
    return (
        f'<div style="{outer}"><div style="flex:3 1 30em;{inner}">{left}</div>'
        f'<div style="flex:1 1 16em;{inner}">{right}</div></div>'
    )


def html_figure(figure: "NotebookFigure") -> str:
    """A figure as an image within HTML."""
    source = base64.b64encode(figure._repr_png_()).decode()
    return f'<img style="max-width:100%" src="data:image/png;base64,{source}">'


def html_red(text: str) -> str:
    """A text in red, escaped."""
    return f'<span style="color:{RED}">{html.escape(text)}</span>'


def _html(cell: str) -> str:
    return html_red(cell) if UNFIT in cell else html.escape(cell)


# ---- runs and their curves

# Opacity of the raw curve behind its moving average.
_FAINT = 0.3


def draw_curves(
    records: Sequence[Mapping[str, Any]], metrics: Sequence[str], *, log: bool, smooth: int
) -> "NotebookFigure":
    """Draws each metric over the steps, with its evaluation metric, in one panel per metric.

    Args:
        records: The records, each with "step".
        metrics: Names of metrics.
        log: Whether the vertical axes are logarithmic.
        smooth: Number of records in the moving average; 1 for none.

    Returns:
        A figure that belongs to no window, so it works without a display; a notebook shows it.
    """
    from megatrain_jax._src.engine.report.notebook_figure import NotebookFigure

    height = 4 if len(metrics) == 1 else 2.5 * len(metrics)
    figure = NotebookFigure(figsize=(7, height))
    rows = figure.subplots(len(metrics), sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(rows, metrics, strict=True):
        _draw(axes, records, metric, smooth)
        axes.set_ylabel(metric)
        axes.grid(alpha=0.3)
        if log:
            axes.set_yscale("log")
        if axes.lines:
            axes.legend()
    rows[-1].set_xlabel("step")
    return figure


def _draw(axes: "Axes", records: Sequence[Mapping[str, Any]], metric: str, smooth: int) -> None:
    """Draws a metric and, if there is one, the evaluation metric of the same name."""
    for name, marker in ((metric, ""), (EVAL_PREFIX + metric, "o")):
        steps, values = points(records, name)
        if not len(steps):
            continue
        # A line through a single point would be invisible.
        marker = marker if len(steps) > 1 else "o"
        if smooth > 1 and name == metric:
            (faint,) = axes.plot(steps, values, alpha=_FAINT)
            label = f"{name}, mean of {smooth}"
            smoothed = running_mean(values, smooth)
            axes.plot(steps, smoothed, label=label, marker=marker, color=faint.get_color())
        else:
            axes.plot(steps, values, label=name, marker=marker)


def points(records: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps with a number under a name, and the numbers."""
    found = [(r["step"], r[name]) for r in records if is_number(r.get(name))]
    table = np.array(found, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The moving average over the last `width` values, fewer at the start.

    Values that are not finite are left out: with width 2, (1, 3, nan, 5) gives (1, 2, 3, 5).
    """
    finite = np.isfinite(values)
    sums, counts = np.cumsum(np.where(finite, values, 0.0)), np.cumsum(finite)
    for totals in (sums, counts):
        totals[width:] = totals[width:] - totals[:-width]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


# Number of records shown from the start of a history, and from its end.
_SHOWN = 5


def record_cells(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table of a history, with a header; if there are many records, the middle is left out."""
    # The row of dots takes as much space as one record, so at least two are hidden.
    hidden = len(records) - 2 * _SHOWN
    shown = [*records] if hidden <= 1 else [*records[:_SHOWN], *records[-_SHOWN:]]
    names = list(dict.fromkeys(name for record in shown for name in record))
    cells = [[_spelled(name, record.get(name)) for name in names] for record in shown]
    if hidden > 1:
        cells.insert(_SHOWN, ["…", *[""] * (len(names) - 1)])
    return [names, *cells]


def result_cells(
    num_steps: int, reason: str, records: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """The table of a result: steps, reason of the end, and losses."""
    cells = [["steps", f"{num_steps}", reason]]
    for name in ("loss", EVAL_PREFIX + "loss"):
        numbers, values = points(records, name)
        if len(values):
            # NaN comes last, because nothing compares less than it.
            best = min(range(len(values)), key=lambda i: (values[i] != values[i], values[i]))
            first = f"{values[0]:.6g} at step {numbers[0]:.0f}"
            least = f"lowest {values[best]:.6g} at step {numbers[best]:.0f}"
            cells.append([name, f"{values[-1]:.6g}", f"{first}, {least}"])
    return cells


def trainer_cells(
    spec: "RunSpec", num_steps: int, records: Sequence[Mapping[str, Any]], devices: Sequence[Any]
) -> list[list[str]]:
    """The table of a trainer: its model, its progress, and its device budget."""
    parameters = sum(map(jx.num_elements, spec.leaves))
    trained = sum(jx.num_elements(leaf) for leaf in spec.leaves if leaf.is_trainable)
    groups = counted(len(spec.layouts), "group")
    of = f"{short(trained)} of them trained, " if trained < parameters else ""
    budget, schedule = spec.budget_bytes, spec.first.schedule
    within = "the minimum" if budget is None else f"of a budget of {sized(budget)}"
    last = records[-1] if records else {}
    losses = (f"{n} {_spelled(n, last[n])}" for n in ("loss", EVAL_PREFIX + "loss") if n in last)
    names = ", ".join(str(device) for device in devices)
    return [
        ["parameters", short(parameters), f"{of}in {groups}"],
        ["loss function", getattr(spec.loss_fn, "__name__", type(spec.loss_fn).__name__), ""],
        ["step", f"{num_steps}", ", ".join(losses)],
        ["device memory, state and activations", sized(schedule.peak_bytes), within],
        ["devices", f"{len(devices)}", names],
    ]


def _spelled(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "seconds" and is_number(value):
        return seconds(value)
    if isinstance(value, list):  # such as samples, which would each take a line of the table
        return f"{len(value)} of them"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
