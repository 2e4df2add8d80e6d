"""The history of a training run: one record a step, saved as JSON and drawn as a curve.

It holds Python floats only, so that keeping it never keeps device memory alive.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain_jax._src.common import checks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class History(list[dict[str, Any]]):
    """A list of dicts, one a step.

    A record has ``"step"`` (counted over the trainer's life, starting at 1), ``"loss"``, the
    metrics of the loss function, ``"grad_norm"``, ``"seconds"`` (wall-clock time until the next
    step began or, after the last one before an evaluation, a checkpoint or the end, until it was
    over) and, where the step was evaluated, the evaluation's means as ``"eval_loss"`` and so on.
    In a notebook it shows its loss curve.

    Examples:
        >>> history = History([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}])
        >>> [record["loss"] for record in history]
        [2.0, 1.5]
        >>> history.plot().savefig("loss.png")
    """

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the records to `path` as a JSON array; values that are not finite become null."""
        path = checks.path("path", path)
        records = [
            {name: _json_value(value) for name, value in as_json(record).items()} for record in self
        ]
        Path(path).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")

    def plot(self) -> "Figure":
        """Draws the loss, and the evaluation loss where there is one, over the steps.

        Returns:
            A Matplotlib figure. It belongs to no window, so it works without a display, and
            ``figure.savefig(path)`` writes it.
        """
        from matplotlib.figure import Figure  # a quarter of the time that the library imports

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for name, marker in (("loss", ""), ("eval_loss", "o")):
            points = [(record["step"], record[name]) for record in self if name in record]
            if points:
                steps, values = zip(*points, strict=True)
                # A line through one point would be invisible.
                axes.plot(steps, values, label=name, marker=marker if len(points) > 1 else "o")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        return figure

    def _repr_png_(self) -> bytes | None:
        if not self:
            return None
        buffer = io.BytesIO()
        self.plot().savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def weighted_means(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, float]:
    """Means over batches of some metrics each, by their weights or else by their examples.

    Args:
        rows: The metrics of each batch.
        sizes: Number of examples of each; of no use where there is a metric called "weight".

    Returns:
        The means, and the sum of the weights if there are any.

    Raises:
        ValueError: If all weights are 0.
    """
    weights = np.array([row.get("weight", size) for row, size in zip(rows, sizes, strict=True)])
    weights = weights.astype(np.float64)
    total = float(weights.sum())
    if total == 0:
        raise ValueError('`batches` gave nothing that counts: "weight" is 0 in all of them')
    # Without a weight, a batch's loss is the mean of nothing: it may well be 0 / 0.
    counts = weights != 0
    means = {
        name: float(weights[counts] @ np.array([row[name] for row in rows])[counts] / total)
        for name in rows[0]
    }
    return means | ({"weight": total} if "weight" in rows[0] else {})


def as_json(value: Any) -> Any:
    """A value as JSON has it: a callback may have put anything into a record.

    Arrays become numbers or lists, what JSON has no form for becomes its `repr`.
    """

    def plain(x: Any) -> Any:
        return np.asarray(x).tolist() if hasattr(x, "__array__") else repr(x)

    return json.loads(json.dumps(value, default=plain, skipkeys=True))


def _json_value(value: Any) -> Any:
    # Python would write the bare word NaN, which is not JSON.
    return None if isinstance(value, float) and not math.isfinite(value) else value
