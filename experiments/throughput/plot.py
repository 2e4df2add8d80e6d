"""Pictures of the tables' JSON files: rate against device memory, and bars of the peers."""

import argparse
import json
import sys
from pathlib import Path

from figures import Result, tokens_per_second
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

_COLOURS = {"immediate": "#4c72b0", "clipped": "#dd8452", "resident": "#555555"}
_OURS, _OTHERS = "#4c72b0", "#a9a9a9"


def read(folders: list[Path]) -> list[Result]:
    """Returns the results in folders, in the order of their names.

    Raises:
        SystemExit: If there are none.
    """
    paths = [path for folder in folders for path in sorted(folder.glob("*.json"))]
    if not paths:
        sys.exit(f"no JSON file in {', '.join(map(str, folders))}")
    return [json.loads(path.read_text()) for path in paths]


def axes_of(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure that needs no display, and its axes without a frame."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def draw_memory(results: list[Result]) -> Figure:
    """Draws tokens a second against peak device memory, with the resident rate as a line.

    Where JAX does not tell the peak, as on a CPU, the plan's figure stands for it.
    """
    figure, axes = axes_of(7, 4.2)
    streamed = [result for result in results if result["device_budget"] != "all"]
    for kind, clipped in (("immediate", False), ("clipped", True)):
        chosen = [result for result in streamed if (result["clip"] is not None) == clipped]
        points = sorted((memory_gib(r), rate(r), budget_name(r)) for r in chosen)
        if not points:
            continue
        label = f"{kind} update" if not clipped else "clipped by the global norm"
        memory, rates, names = zip(*points, strict=True)
        axes.plot(memory, rates, "o-", color=_COLOURS[kind], label=label)
        for x, y, name in points:
            # One curve's names below it, the other's beside it, and no line through either.
            axes.annotate(
                name,
                (x, y),
                xytext=(4, -20) if clipped else (8, -3),
                textcoords="offset points",
                fontsize=8,
                color="#444",
                path_effects=[withStroke(linewidth=3, foreground="white")],
                zorder=3,
            )
    for result in results:
        if result["device_budget"] == "all" and result["clip"] is None:
            label = f"all state resident, {memory_gib(result):.1f} GiB"
            colour = _COLOURS["resident"]
            axes.axhline(rate(result), linestyle="--", color=colour, label=label)
    axes.set_xlabel("peak device memory, GiB")
    axes.set_ylabel("tokens/s")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")
    return figure


def rate(result: Result) -> float:
    """Returns tokens a second, by the mean of the steps."""
    found = tokens_per_second(result)
    assert found is not None, "a result of training steps"
    return found


def memory_gib(result: Result) -> float:
    """Returns the measured peak of device memory, or the planned one."""
    peak = result["peak_device_gib"]
    return result["planned_device_gib"] if peak is None else peak


def budget_name(result: Result) -> str:
    """Returns the name of a device budget in the picture."""
    budget = result["device_budget"]
    return budget if budget in ("least", "auto") else f"{budget} GiB"


def draw_peers(results: list[Result]) -> Figure:
    """Draws tokens a second of each row that clips, as peers do, as a bar, the fastest on top."""
    ordered = sorted((result for result in results if result["clip"] is not None), key=rate)
    figure, axes = axes_of(8, 0.8 + 0.42 * len(ordered))
    names = [
        result["name"] if "peer" in result else f"megatrain_jax, {budget_name(result)}"
        for result in ordered
    ]
    rates = [rate(result) for result in ordered]
    colours = [_OTHERS if "peer" in result else _OURS for result in ordered]
    bars = axes.barh(names, rates, color=colours, height=0.65)
    notes = map(_memory_note, ordered)
    labels = [f"{value:,.0f}{note}" for value, note in zip(rates, notes, strict=True)]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.set_xlabel("tokens/s (peak device memory)")
    axes.set_xlim(right=1.3 * max(rates))
    axes.tick_params(axis="y", length=0)
    return figure


def _memory_note(result: Result) -> str:
    peak = result["peak_device_gib"]
    return "" if peak is None else f" ({peak:.1f} GiB)"


def main() -> None:
    """Draws one picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", choices=("memory", "peers"))
    parser.add_argument(
        "folders", type=Path, nargs="*", help="of the JSON files; else where the table saved them"
    )
    parser.add_argument("--out", type=Path, help="the picture; else beside the first folder")
    args = parser.parse_args()
    table, draw = {"memory": ("updates", draw_memory), "peers": ("peers", draw_peers)}[args.picture]
    folders = args.folders or [Path("runs/throughput", table)]
    out = args.out or folders[0].parent / f"{args.picture}.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(read(folders)).savefig(out, dpi=150)
    print(out)


if __name__ == "__main__":
    main()
