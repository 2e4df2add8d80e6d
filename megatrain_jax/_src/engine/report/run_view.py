"""Tables of a history, a result and a trainer, and curves of a run's metrics over the steps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_jax._src.common.checks import is_number
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.adapt.loss_function import EVAL_PREFIX
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.report.table import seconds as spelled
from megatrain_jax._src.engine.report.table import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from megatrain_jax._src.engine.report.notebook_figure import NotebookFigure
    from megatrain_jax._src.engine.spec.run_spec import RunSpec


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
    groups = len(spec.layouts)
    budget, schedule = spec.budget_bytes, spec.first.schedule
    within = "the minimum" if budget is None else f"of a budget of {sized(budget)}"
    last = records[-1] if records else {}
    losses = (f"{n} {_spelled(n, last[n])}" for n in ("loss", EVAL_PREFIX + "loss") if n in last)
    names = ", ".join(str(device) for device in devices)
    return [
        ["parameters", short(parameters), f"in {groups} group{'' if groups == 1 else 's'}"],
        ["loss function", getattr(spec.loss_fn, "__name__", type(spec.loss_fn).__name__), ""],
        ["step", f"{num_steps}", ", ".join(losses)],
        ["device memory, state and activations", sized(schedule.peak_bytes), within],
        ["devices", f"{len(devices)}", names],
    ]


def _spelled(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "seconds" and is_number(value):
        return spelled(value)
    if isinstance(value, list):  # such as samples, which would each take a line of the table
        return f"{len(value)} of them"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
