"""The history of a training run: one record per step, saved as JSON and drawn as a curve.

It contains only Python floats, so keeping it never keeps device memory alive.
"""

import json
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np

from megatrain_jax._src.common import checks
from megatrain_jax._src.common.suggestions import did_you_mean
from megatrain_jax._src.engine.report.table import (
    aligned,
    draw_curves,
    html_beside,
    html_box,
    html_figure,
    html_table,
    record_cells,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class History(list[dict[str, Any]]):
    """A list of dicts, one per step.

    A record has ``"step"`` (counted over the trainer's life, starting at 1), ``"loss"``, the
    metrics of the loss function, ``"grad_norm"``, the hyperparameters of `optax.inject_hyperparams`
    (``"learning_rate"``), ``"seconds"`` (wall-clock time until the next step began; for the last
    step before an evaluation, a checkpoint or the end, until it was complete) and, if the step was
    evaluated, the evaluation's means as ``"eval_loss"`` and so on. In a run of several processes it
    has ``"slowest_process"``, the process that the others waited for, and ``"slowest_seconds"``,
    which that one took without waiting. ``history["loss"]`` is the list of a metric's values, one
    per record, with None where a record lacks the metric. It prints as a table of the first and the
    last records, in a notebook with the loss curve.

    Examples:
        >>> history = History([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}])
        >>> history["loss"]
        [2.0, 1.5]
        >>> history
        step  loss
        1        2
        2      1.5
        >>> history.plot().savefig("loss.png")

    Attributes:
        cut_off: Number of the step whose evaluation was started last, if it did not complete.
    """

    cut_off: int | None = None

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    @overload
    def __getitem__(self, index: str) -> list[Any]: ...

    def __getitem__(self, index: Any) -> Any:
        """Returns a record by its number, several by a slice, or a metric's values by its name.

        Raises:
            KeyError: If no record has the metric.
        """
        if not isinstance(index, str):
            return super().__getitem__(index)
        known = dict.fromkeys(name for record in self for name in record)
        if self and index not in known:
            near = did_you_mean(index, known)
            raise KeyError(f"no record has {index!r}; there are {', '.join(known)}{near}")
        return [record.get(index) for record in self]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the records to `path` as a JSON array; values that are not finite become null."""
        path = checks.path("path", path)
        records = [
            {name: _json_value(value) for name, value in as_json(record).items()} for record in self
        ]
        Path(path).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")

    def plot(
        self, metrics: str | Sequence[str] = "loss", *, log: bool = False, smooth: int = 1
    ) -> "Figure":
        """Draws metrics over the steps, each with its evaluation metric if there is one.

        Args:
            metrics: The name of a metric, or several, drawn in panels from top to bottom.
            log: Whether the vertical axes are logarithmic.
            smooth: Number of steps in the moving average, which is drawn over the metric in a faint
                line. Evaluations are not smoothed.

        Returns:
            A Matplotlib figure that a notebook shows as a picture. It belongs to no window, so it
            works without a display, and ``figure.savefig(path)`` writes it.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If no record has such a metric, or `smooth` is less than 1.

        Examples:
            >>> records = [{"step": s, "loss": 1 / s, "lr": 0.1} for s in range(1, 9)]
            >>> history = History(records)
            >>> figure = history.plot(["loss", "lr"], log=True, smooth=4)
        """
        names = [metrics] if isinstance(metrics, str) else _names(metrics)
        log, smooth = checks.boolean("log", log), checks.integer("smooth", smooth)
        # In order of first appearance; texts that a callback added are not metrics.
        known = list(dict.fromkeys(n for r in self for n, v in r.items() if checks.is_number(v)))
        for name in names:
            if self and name not in known:
                raise ValueError(f"no record has the metric {name!r}; there are {', '.join(known)}")
        return draw_curves(self, names, log=log, smooth=smooth)

    def __repr__(self) -> str:
        """Returns the first and the last records as a plain text table."""
        if not self:
            return "History([])"
        # The last column of a text table is left-aligned; an empty one aligns all numbers right.
        return aligned([[*row, ""] for row in record_cells(self)])

    def _repr_html_(self) -> str | None:
        if not self:
            return None
        table = html_table(record_cells(self), header=True)
        return html_box(html_beside(table, self.curve_html()))

    def curve_html(self) -> str:
        """The loss curve as an HTML image; empty if no record has a loss."""
        if not any("loss" in record for record in self):
            return ""
        return html_figure(draw_curves(self, ["loss"], log=False, smooth=1))


def _names(metrics: Any) -> list[str]:
    names = list(metrics) if isinstance(metrics, Sequence) else []
    if not names or not all(isinstance(name, str) for name in names):
        allowed = "the name of a metric or a sequence of some"
        raise TypeError(checks.refused("metrics", allowed, metrics))
    return names


def weighted_means(
    rows: Sequence[Mapping[str, Any]], sizes: Sequence[int | None]
) -> dict[str, float]:
    """Means of metrics over batches, weighted by "weight" or else by the number of examples.

    Args:
        rows: The metrics of each batch.
        sizes: Number of examples of each, None if unknown; unused if there is a metric called
            "weight".

    Returns:
        The means, and the sum of the weights if there are any.

    Raises:
        ValueError: If all weights are 0, or the weights of several batches are unknown.
    """
    if len(rows) > 1 and None in sizes and "weight" not in rows[0]:
        raise ValueError(
            "the arrays of `batches` have unequal leading axes, so the number of examples in each "
            'batch is unknown: let loss_fn return it as a metric called "weight"'
        )
    weights = np.array(
        [row.get("weight", size or 1) for row, size in zip(rows, sizes, strict=True)]
    )
    weights = weights.astype(np.float64)
    total = float(weights.sum())
    if total == 0:
        raise ValueError('`batches` gave nothing that counts: "weight" is 0 in all of them')
    # The loss of a batch with weight 0 may be 0 / 0.
    counts = weights != 0
    means = {
        name: float(weights[counts] @ np.array([row[name] for row in rows])[counts] / total)
        for name in rows[0]
    }
    return means | ({"weight": total} if "weight" in rows[0] else {})


def as_json(value: Any) -> Any:
    """Converts a value to JSON; a callback may have added anything to a record.

    Arrays become numbers or lists; values that JSON can't express become their `repr`.
    """

    def plain(x: Any) -> Any:
        return np.asarray(x).tolist() if hasattr(x, "__array__") else repr(x)

    return json.loads(json.dumps(value, default=plain, skipkeys=True))


def _json_value(value: Any) -> Any:
    # Python would write NaN, which is not valid JSON.
    return None if isinstance(value, float) and not math.isfinite(value) else value
