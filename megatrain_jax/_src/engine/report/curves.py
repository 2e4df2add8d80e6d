"""Draws the records of a run as curves of its metrics over the steps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_jax._src.common.checks import is_number
from megatrain_jax._src.engine.adapt.loss_function import EVAL_PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from megatrain_jax._src.engine.report.notebook_figure import NotebookFigure

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
