"""Draws the timeline of a step: copies in, computation, copies out, and the memory below."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.report.table import seconds
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.timeline import DISK_LANES, LANES, Lane, Span

if TYPE_CHECKING:
    from megatrain_jax._src.engine.report.notebook_figure import NotebookFigure

# The name and the colour of each kind of span.
_SHOWN = {
    Op.FORWARD: ("forward", "#55a868"),
    Op.BACKWARD: ("backward", "#dd8452"),
    Kind.MASTERS: ("masters", "#4c72b0"),
    Kind.OPTIMIZER_STATE: ("optimizer state", "#937860"),
    Kind.GRADIENT: ("gradients", "#8172b3"),
    Kind.ACTIVATION: ("activations", "#64b5cd"),
    Kind.RESIDUALS: ("residuals", "#ccb974"),
    "exchange": ("between devices", "#8c8c8c"),
}
_UPDATE = "update", "#c44e52"  # includes zeroing and summing an update's gradients
_GIB, _MIB = 2**30, 2**20


def draw_timeline(
    spans: Iterable[Span], memory: Sequence[tuple[float, int]], title: str
) -> "NotebookFigure":
    """Draws the spans of a step, and the device memory used for state and activations.

    Args:
        spans: The spans.
        memory: Seconds from the beginning of the step, and bytes from then on.
        title: Title of the figure.

    Returns:
        A figure that belongs to no window, so it works without a display; a notebook shows it.
    """
    from megatrain_jax._src.engine.report.notebook_figure import NotebookFigure

    spans = list(spans)
    used = {span.lane for span in spans}
    lanes = [*LANES, *(lane for lane in DISK_LANES if lane in used)]
    bars: dict[tuple[Lane, tuple[str, str]], list[tuple[float, float]]] = {}
    for span in spans:
        row = bars.setdefault((span.lane, _SHOWN.get(span.what, _UPDATE)), [])
        row.append((span.start, span.end - span.start))
    last = max((start + length for rows in bars.values() for start, length in rows), default=0.0)
    scale, unit = (1.0, "s") if last >= 0.1 else (1e3, "ms") if last >= 1e-3 else (1e6, "µs")
    figure = NotebookFigure(figsize=(10, 4))
    axes, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    # One legend entry per name, even if it is in two lanes.
    labelled = set()
    for (lane, (name, colour)), rows in bars.items():
        axes.broken_barh(
            [(scale * start, scale * length) for start, length in rows],
            (lanes.index(lane) - 0.4, 0.8),
            facecolors=colour,
            linewidth=0,
            label=None if name in labelled else name,
        )
        labelled.add(name)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    largest = max((size for _, size in memory), default=0)
    part, name = (_GIB, "GiB") if largest >= _GIB else (_MIB, "MiB")
    below.step(
        [scale * at for at, _ in memory],
        [size / part for _, size in memory],
        where="post",
        color="#4c72b0",
    )
    below.set_ylim(bottom=0)
    below.set_ylabel(f"{name} on the device")
    below.set_xlabel(unit)
    axes.set_title(title, fontsize=10)
    if labelled:
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def title_of(step_seconds: float, machine: str) -> str:
    """The title of a timeline: the time of a step, and the machine."""
    return f"a step of {seconds(step_seconds)}, as scheduled for {machine}"
