"""Draws a profile as three lanes: copies to the device, computation, copies to the host.

Reads the `*.trace.json.gz` that `jax.profiler` writes (`measure.py --profile FOLDER`), prints how
long each lane is busy and the share of time without computation, and writes a picture.
"""

import argparse
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

Span = tuple[float, float]
# Per lane, spans of seconds for each kind of work.
Lanes = dict[str, dict[str, list[Span]]]

COPIES_IN, COMPUTE, COPIES_OUT = "copies in", "compute", "copies out"
# Beginnings of the names of jitted functions, and their names in the picture.
_KINDS = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("update", "update"),
    ("apply", "update"),
    ("reduce", "update"),
)
_FIRST_OF_STEP = "begin_step"
_COLOURS = {
    "in": "#4c72b0",
    "out": "#937860",
    "forward": "#55a868",
    "backward": "#dd8452",
    "update": "#c44e52",
    "other": "#8c8c8c",
}
# Copies of a few bytes only set the order of large ones, and would make drawing slower.
_SHORTEST_SECONDS = 2e-6
_PIXELS = 1500


def find_trace(path: Path) -> Path:
    """Returns the newest trace in a folder that the profiler wrote to, or the file itself.

    Raises:
        SystemExit: If there is none.
    """
    if path.is_file():
        return path
    found = sorted(path.rglob("*.trace.json.gz"), key=lambda file: file.stat().st_mtime)
    if not found:
        sys.exit(f"no *.trace.json.gz in {path}")
    return found[-1]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events of the first GPU's streams in the order of their starts, in µs.

    Raises:
        SystemExit: If the trace has no GPU.
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if event.get("ph") == "M" and "name" in event["args"]]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    gpus = [pid for pid, name in processes.items() if name.startswith("/device:GPU:")]
    if not gpus:
        sys.exit(f"no GPU in {path}, only {', '.join(processes.values())}")
    first = min(gpus, key=lambda pid: processes[pid])
    # The profiler derives the GPU's remaining threads: steps, modules, names of operations.
    streams = {
        event["tid"]
        for event in named
        if (event["pid"], event["name"]) == (first, "thread_name")
        and event["args"]["name"].startswith("Stream")
    }
    found = [e for e in events if e.get("ph") == "X" and e["pid"] == first and e["tid"] in streams]
    return sorted(found, key=lambda event: event["ts"])


def lanes_of(events: Iterable[dict[str, Any]]) -> Lanes:
    """Sorts events by lane and kind, as spans of seconds."""
    lanes: Lanes = {name: defaultdict(list) for name in (COPIES_IN, COMPUTE, COPIES_OUT)}
    for event in events:
        lane, kind = classify(event)
        start = event["ts"] / 1e6
        lanes[lane][kind].append((start, start + event.get("dur", 0.0) / 1e6))
    return lanes


def classify(event: dict[str, Any]) -> tuple[str, str]:
    """Returns an event's lane and the kind of its work."""
    if event["name"].startswith("MemcpyH2D"):
        return COPIES_IN, "in"
    if event["name"].startswith("MemcpyD2H"):
        return COPIES_OUT, "out"
    function = function_of(event)
    return COMPUTE, next((kind for name, kind in _KINDS if function.startswith(name)), "other")


def function_of(event: dict[str, Any]) -> str:
    """Returns the jitted function that an event belongs to, or nothing."""
    return event.get("args", {}).get("hlo_module", "").removeprefix("jit_")


def cut(lanes: Lanes, low: float, high: float) -> Lanes:
    """Returns the spans between two moments, in seconds after the first of them."""
    return {
        lane: {
            kind: [
                (max(a, low) - low, min(b, high) - low) for a, b in spans if a < high and b > low
            ]
            for kind, spans in kinds.items()
        }
        for lane, kinds in lanes.items()
    }


def step_moments(events: Iterable[dict[str, Any]]) -> list[float]:
    """Returns the seconds at which each step begins to compute, and at which the last one ends.

    The first step begins with its first stage here, because a profile may lack the events before.
    The last step ends with its last stage, although copies of its state may still run.
    """
    starts, stages, before = [], [], ""
    for event in events:
        function = function_of(event)
        if not function:
            continue
        if function == _FIRST_OF_STEP != before:
            starts.append(event["ts"] / 1e6)
        before = function
        if classify(event)[1] != "other":
            stages.append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    if not stages:
        sys.exit("the trace has no stage of a step")
    return [stages[0][0], *starts[1:], max(end for _, end in stages)]


def merged(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Returns the union of spans as disjoint ones, in order, without gaps up to `gap` seconds."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1] + gap:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def busy_seconds(kinds: dict[str, list[Span]]) -> float:
    """Returns the seconds in which a lane does anything; overlaps count once."""
    return sum(end - start for start, end in merged(s for spans in kinds.values() for s in spans))


def report(lanes: Lanes, seconds: float) -> str:
    """Returns the busy seconds of each lane and each kind of computation, and the idle share."""
    lines = [f"{seconds:.3f} s in view"]
    for lane, kinds in lanes.items():
        busy = busy_seconds(kinds)
        lines.append(f"{lane}: busy {busy:.3f} s, {busy / seconds:.1%}")
    for kind, spans in sorted(lanes[COMPUTE].items()):
        lines.append(f"  {kind}: {busy_seconds({kind: spans}):.3f} s")
    idle = 1 - busy_seconds(lanes[COMPUTE]) / seconds
    return "\n".join([*lines, f"compute idle: {idle:.1%}, {idle * seconds:.3f} s"])


def draw(lanes: Lanes, seconds: float, title: str, path: Path) -> None:
    """Writes the picture; kernels of one kind closer than a pixel are drawn as one bar."""
    pixel = seconds / _PIXELS
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.subplots()
    kinds_drawn: dict[str, None] = {}
    for height, (_, kinds) in enumerate(reversed(lanes.items())):
        for kind, spans in kinds.items():
            bars = [(a, b - a) for a, b in merged(spans, pixel) if b - a > _SHORTEST_SECONDS]
            axes.broken_barh(bars, (height - 0.4, 0.8), facecolors=_COLOURS[kind], linewidth=0)
            if bars and kind not in ("in", "out"):
                kinds_drawn[kind] = None
    axes.set_yticks(range(len(lanes)), list(reversed(lanes)))
    axes.set_xlim(0, seconds)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    order = [kind for kind in _COLOURS if kind in kinds_drawn]
    handles = [Patch(color=_COLOURS[kind], label=kind) for kind in order]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Reads the trace, prints the figures and writes the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="a *.trace.json.gz, or a folder with one")
    parser.add_argument("--step", type=int, help="draw only this step, from 1; else all of them")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, default=Path("runs/throughput/timeline.png"))
    args = parser.parse_args()
    events = read_events(find_trace(args.trace))
    moments = step_moments(events)
    num_steps = len(moments) - 1
    if args.step is not None and not 1 <= args.step <= num_steps:
        parser.error(f"--step is from 1 to {num_steps} in this trace, not {args.step}")
    first, last = (1, num_steps) if args.step is None else (args.step, args.step)
    low, high = moments[first - 1], moments[last]
    lanes = cut(lanes_of(events), low, high)
    print(f"{num_steps} steps in the trace; in view: {first} to {last}")
    print(report(lanes, high - low))
    draw(lanes, high - low, args.title, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
