"""All runs in one JSON file and one picture: held-out losses over seeds, and their differences."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from settings import BYTES, SETTINGS, Sizes

Result = Mapping[str, Any]
Runs = dict[str, dict[int, Result]]
_COMMON = ("sizes", "num_parameters", "text", "hardware", "versions")
_SMOOTHED_OVER = 100
_RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(
    folders: Sequence[Path],
    summary: Path | None,
    picture: Path | None,
    earlier: Path | None = None,
) -> None:
    """Writes both files and prints the table.

    Args:
        folders: Folders of runs' JSON files.
        summary: The JSON file to write; None for the usual one of the runs' vocabulary.
        picture: The picture to write; None for the usual one.
        earlier: Summary of runs of other seeds, whose losses are added; it has no curves, so that
            no picture is drawn.
    """
    runs = read(folders)
    vocab = _sizes(runs).vocab
    name = "compact_quality" if vocab == BYTES else f"compact_quality_{vocab}_tokens"
    summary = summary or _RESULTS / "h200" / f"{name}.json"
    picture = picture or _RESULTS / "pictures" / f"{name}.png"
    found = summarise(runs, {} if earlier is None else json.loads(earlier.read_text()))
    summary.parent.mkdir(parents=True, exist_ok=True)
    summary.write_text(json.dumps(found, indent=2) + "\n")
    if earlier is None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(runs).savefig(picture, dpi=150)
    print("\n".join(_line(row) for row in found["rows"]), summary, sep="\n")


def read(folders: Sequence[Path]) -> Runs:
    """Returns runs by row and seed.

    Raises:
        SystemExit: If there is none, two are of one row and seed, or their text or sizes differ.
    """
    found: Runs = {}
    paths = [path for folder in folders for path in sorted(folder.glob("*.json"))]
    if not paths:
        sys.exit(f"no JSON file in {', '.join(map(str, folders))}")
    first = json.loads(paths[0].read_text())
    for path in paths:
        result = json.loads(path.read_text())
        if any(result[key] != first[key] for key in ("sizes", "text")):
            sys.exit(f"{path} is of other sizes or of another text than the files before")
        if result["seed"] in found.setdefault(result["name"], {}):
            sys.exit(f"{path}: there is another run of {result['name']!r} with this seed")
        found[result["name"]][result["seed"]] = result
    return {name: found[name] for name in SETTINGS if name in found}


def summarise(runs: Runs, earlier: Result = MappingProxyType({})) -> dict[str, Any]:
    """Returns each row's losses, and how far they are over its yardstick's, seed by seed.

    Args:
        runs: The runs.
        earlier: A summary of runs of other seeds, whose losses are added.

    Raises:
        SystemExit: If text or sizes differ, or both have a row with the same seed.
    """
    every = [run for seeds in runs.values() for run in seeds.values()]
    newest = max(every, key=lambda run: run["record"]["utc"])
    if any(earlier.get(key, newest[key]) != newest[key] for key in ("sizes", "text")):
        sys.exit("the earlier summary is of other sizes or of another text")
    known = {row["name"]: row for row in earlier.get("rows", ())}
    losses: dict[str, dict[str, float]] = {}
    for name in (name for name in SETTINGS if name in runs or name in known):
        new = {str(seed): run["held_out_loss"] for seed, run in runs.get(name, {}).items()}
        old = known[name]["held_out_loss"]["of_seeds"] if name in known else {}
        if twice := new.keys() & old.keys():
            sys.exit(f"{name!r} with seed {min(twice)} is in the earlier summary, too")
        losses[name] = dict(sorted((old | new).items()))
    rows = []
    for name, own in losses.items():
        yardstick = losses.get(SETTINGS[name].yardstick, {})
        over = {s: 100 * (loss / yardstick[s] - 1) for s, loss in own.items() if s in yardstick}
        records = dict(known.get(name, {}).get("records", {}))
        records |= {str(seed): run["record"] for seed, run in runs.get(name, {}).items()}
        of_row = known.get(name) or next(iter(runs[name].values()))
        rows.append(
            {
                "name": name,
                "held": dict(SETTINGS[name].held),
                "optimizer": SETTINGS[name].optimizer,
                "learning_rate": SETTINGS[name].rate * _sizes(runs).learning_rate,
                "host_bytes_per_parameter": of_row["host_bytes_per_parameter"],
                "held_out_loss": _spread(own),
                "yardstick": SETTINGS[name].yardstick,
                "percent_over_yardstick": _spread(over),
                "records": dict(sorted(records.items())),
            }
        )
    common = {key: newest[key] for key in _COMMON} | {"loss_unit": _sizes(runs).loss_unit}
    return {**common, "rows": rows, "record": newest["record"]}


def _sizes(runs: Runs) -> Sizes:
    """The sizes of all runs."""
    return Sizes(**next(run for seeds in runs.values() for run in seeds.values())["sizes"])


def _spread(values: Mapping[str, float]) -> dict[str, Any] | None:
    """The mean over seeds, the least, the largest, and all; None of no values."""
    if not values:
        return None
    numbers = values.values()
    mean = statistics.mean(numbers)
    return {"mean": mean, "min": min(numbers), "max": max(numbers), "of_seeds": dict(values)}


def _line(row: Mapping[str, Any]) -> str:
    loss, over = row["held_out_loss"], row["percent_over_yardstick"]
    text = f"{row['name']:40} {loss['mean']:.4f} ({loss['min']:.4f} to {loss['max']:.4f})"
    if over is None or row["name"] == row["yardstick"]:
        return text
    spread = f"({over['min']:+.2f}% to {over['max']:+.2f}%)"
    return f"{text}  {over['mean']:+.2f}% {spread} over {row['yardstick']}"


def draw(runs: Runs) -> Figure:
    """Draws training loss, held-out loss, and the latter's difference to the yardstick's.

    Lines are means over seeds, and bands reach from the least to the largest.
    """
    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    training, held_out, difference = figure.subplots(1, 3)
    for number, (name, seeds) in enumerate(runs.items()):
        colour = f"C{number}"
        _band(training, [_smoothed(run["training_curve"]) for run in seeds.values()], colour, name)
        curves = {seed: _arrays(run["curve"]) for seed, run in seeds.items()}
        _band(held_out, list(curves.values()), colour, name)
        yardstick = SETTINGS[name].yardstick
        if yardstick != name and SETTINGS[name].optimizer != SETTINGS[yardstick].optimizer:
            continue  # another optimizer's difference would leave no room for these
        others = {seed: _arrays(run["curve"]) for seed, run in runs.get(yardstick, {}).items()}
        over = [
            (steps, 100 * (losses / others[seed][1] - 1))
            for seed, (steps, losses) in curves.items()
            if seed in others and name != yardstick
        ]
        if over:
            _band(difference, over, colour, name)
    unit = _sizes(runs).loss_unit
    difference.axhline(0, color="#555555", linewidth=0.8)
    for axes, title in (
        (training, f"training loss, mean of {_SMOOTHED_OVER} steps, {unit}"),
        (held_out, f"held-out loss, {unit}"),
        (difference, "held-out loss over fp32's, same optimizer and seed, %"),
    ):
        axes.set_xlabel("step")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (training, held_out):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
    _zoom(difference)
    handles, labels = held_out.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _zoom(axes: Axes) -> None:
    """Sets limits of at least one percent in both directions, wider if the later steps need it."""
    shown = [0.0]
    for line in axes.lines[:-1]:
        values = np.asarray(line.get_ydata(), float)
        shown.extend(values[len(values) // 2 :])
    axes.set_ylim(min(-1, 1.1 * min(shown)), max(1, 1.1 * max(shown)))


def _band(
    axes: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]], colour: str, name: str
) -> None:
    steps, values = curves[0][0], np.stack([losses for _, losses in curves])
    axes.plot(steps, values.mean(0), color=colour, label=name, linewidth=1.2)
    axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


def _arrays(curve: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([int(step) for step in curve]), np.array(list(curve.values()))


def _smoothed(curve: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    steps, losses = _arrays(curve)
    width = max(1, min(_SMOOTHED_OVER // int(steps[0]), len(steps) // 4))
    return steps[width - 1 :], np.convolve(losses, np.ones(width) / width, "valid")
