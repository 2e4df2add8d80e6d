"""The records of a run as a figure: curves of its metrics over the steps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_jax._src.adapt.loss_function import EVALUATED
from megatrain_jax._src.common.records import is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from megatrain_jax._src.report.notebook_figure import NotebookFigure

# Opacity of the curve as it is, behind the one that is smoothed.
_FAINT = 0.3


def draw_curves(
    records: Sequence[Mapping[str, Any]], metrics: Sequence[str], *, log: bool, smooth: int
) -> "NotebookFigure":
    """Draws each metric over the steps, its evaluation's beside it, one above the other.

    Args:
        records: The records, each with "step".
        metrics: Names of metrics.
        log: Whether the vertical axes are logarithmic.
        smooth: Number of records, the last ones up to each, whose mean is drawn; 1 draws them as
            they are.

    Returns:
        A figure that belongs to no window, so that it works without a display; a notebook shows it.
    """
    from megatrain_jax._src.report.notebook_figure import NotebookFigure

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
    """Draws a metric and, where there is one, the evaluation's of the same name."""
    for name, marker in ((metric, ""), (EVALUATED + metric, "o")):
        steps, values = points(records, name)
        if not len(steps):
            continue
        # A line through one point would be invisible.
        marker = marker if len(steps) > 1 else "o"
        if smooth > 1 and name == metric:
            (faint,) = axes.plot(steps, values, alpha=_FAINT)
            label = f"{name}, mean of {smooth}"
            smoothed = running_mean(values, smooth)
            axes.plot(steps, smoothed, label=label, marker=marker, color=faint.get_color())
        else:
            axes.plot(steps, values, label=name, marker=marker)


def points(records: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps that have a number under a name, and the numbers."""
    found = [(r["step"], r[name]) for r in records if is_number(r.get(name))]
    table = np.array(found, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of each value and those before it, `width` in all, fewer at the start.

    What is not finite is left out: of width 2, (1, 3, nan, 5) gives (1, 2, 3, 5).
    """
    finite = np.isfinite(values)
    sums, counts = np.cumsum(np.where(finite, values, 0.0)), np.cumsum(finite)
    for totals in (sums, counts):
        totals[width:] = totals[width:] - totals[:-width]
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
