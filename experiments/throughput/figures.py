"""Figures of a result by the names that tables and links give them: `check_figures.py` reads them.

Each is a function of a result; where there is none by its name, the name is a path of keys such as
`save.gib_per_s` or `rows[3].temporary_gib`. Results from before the protocol (see `is_early`) are
read as they are: their `seconds_per_step` is a median, and no figure uses it.
"""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Figure = float | None

_KEY = re.compile(r"\.?([A-Za-z0-9_ ,-]+)|\[(\d+)\]")
# The whole memory of the GPUs of early results, in GiB, by JAX's name of the GPU.
_WHOLE_GIB = {"NVIDIA H200": 139.80072021484375}
_USUAL_PERCENT = 85
_CARDS = Path(__file__).parents[2] / "megatrain_jax" / "_src" / "engine" / "state" / "cards.json"
_GIB = 1 << 30


@cache
def read(path: Path) -> Result:
    """Returns a file's result."""
    return json.loads(path.read_text(encoding="utf-8"))


def part(result: Any, keys: str) -> Any:
    """Returns the part of a result that a path of keys leads to.

    Raises:
        KeyError: If it leads nowhere.
    """
    if re.sub(_KEY, "", keys):
        raise KeyError(f"{keys!r} is no path of keys")
    for match in _KEY.finditer(keys):
        try:
            result = result[match[1] if match[1] is not None else int(match[2])]
        except (KeyError, IndexError, TypeError) as error:
            raise KeyError(f"no {match[0]!r} of {keys!r}") from error
    return result


def is_early(result: Result) -> bool:
    """Whether a result is from before files recorded where they come from."""
    return "record" not in result


def seconds_per_step(result: Result) -> Figure:
    """Returns the mean seconds of a step."""
    if "mean_seconds_per_step" in result:
        return result["mean_seconds_per_step"]
    steps = _early_seconds(result)
    return statistics.mean(steps) if steps else None


def spread(result: Result) -> Figure:
    """The standard deviation of single steps; None of fewer than three."""
    if not is_early(result):
        return result.get("stdev_seconds_per_step")
    steps = _early_seconds(result)
    if "seconds_of_steps" in result and "peer" not in result:
        # The first holds nearly two steps and the last nearly none, as the next one was always
        # dispatched before one was waited for.
        steps = steps[1:-1]
    return statistics.stdev(steps) if len(steps) > 2 else None


def _early_seconds(result: Result) -> Sequence[float]:
    for key in ("seconds_of_steps", "seconds_of_calls"):
        if key in result:
            return result[key]
    # Of the fit from disk to disk: the first steps compile, the last wait for what is in flight.
    return [row["seconds"] for row in result.get("history", [])[3:-2]]


def num_measured_steps(result: Result) -> int:
    """The number of steps that the mean is of."""
    early = _early_seconds(result) if is_early(result) else ()
    return len(early) or result.get("num_measured_steps", 0)


def tokens_per_second(result: Result) -> Figure:
    """Returns the rate by the mean seconds of a step."""
    seconds = seconds_per_step(result)
    if "history" in result and is_early(result):
        tokens = round(result["tokens_per_second"] * result["seconds_per_step"])
    else:
        tokens = result.get("tokens_per_step")
    return tokens / seconds if tokens and seconds else None


def tflops(result: Result) -> Figure:
    """6 operations for each parameter and token, in 10^12 a second."""
    rate = tokens_per_second(result)
    return rate and 6 * result["num_parameters"] * rate / 1e12


def prediction_error(result: Result) -> Figure:
    """Returns how far the plan's estimate of a step was above the measured seconds, as a share."""
    predicted, seconds = result.get("predicted_seconds_per_step"), seconds_per_step(result)
    return predicted / seconds - 1 if predicted and seconds else None


def process_error(result: Result) -> Figure:
    """Returns how far the plan of the process's host memory was above its peak, as a share."""
    planned, peak = result.get("planned_process_gib"), result.get("peak_host_gib")
    return planned / peak - 1 if planned and peak else None


def dispatch_share(result: Result) -> Figure:
    """Returns the seconds in which Python dispatches a step with nothing in flight, as a share."""
    dispatch, seconds = result.get("dispatch_seconds_per_step"), seconds_per_step(result)
    return dispatch / seconds if dispatch and seconds else None


def drained_at_most(result: Result) -> Figure:
    """The most a step could take if the last update were inside, as it takes less than a step."""
    seconds, steps = seconds_per_step(result), num_measured_steps(result)
    return seconds and seconds * (steps + 1) / steps


def tokens_per_second_at_least(result: Result) -> Figure:
    """Returns the rate of a step that takes the seconds of `drained_at_most`."""
    seconds, rate = seconds_per_step(result), tokens_per_second(result)
    most = drained_at_most(result)
    return seconds and rate and most and rate * seconds / most


def link_rate(result: Result) -> Figure:
    """The rate of a step's busier direction, in GiB/s."""
    seconds = seconds_per_step(result)
    return seconds and max(result["planned_gib_in_and_out"]) / seconds


def link_share(result: Result) -> Figure:
    """Returns `link_rate` as a share of a plain copy's rate in that direction."""
    moved, rates = result["planned_gib_in_and_out"], result.get("link_gib_per_s")
    rate = link_rate(result)
    return rate and rates and rate / rates["in" if moved[0] >= moved[1] else "out"]


def temporary_device_gib(result: Result) -> Figure:
    """Device memory that a compiled function needs for itself, as planned, in GiB."""
    return result["planned_device_gib"] - result["planned_state_gib"]


def decode_memory_share(result: Result) -> Figure:
    """A decode's rate of reading weights and used caches, as a share of the card's rate."""
    return result["decode"]["gib_per_s"] * _GIB / _memory_bytes_per_s(result)


def generation_memory_share(result: Result) -> Figure:
    """The share of a whole call that reading these bytes for each token takes at the card's rate.

    The call also reads prompts and waits between programs.
    """
    decode = result["decode"]
    bytes_of_token = decode["gib_per_s"] * _GIB * decode["seconds_per_token_of_all_texts"]
    least = result["tokens"] * bytes_of_token / _memory_bytes_per_s(result)
    return least / result["generation"]["seconds"]


def _memory_bytes_per_s(result: Result) -> float:
    """The rate of the GPU's memory by the library's table of cards, in bytes a second."""
    kind, cards = result["hardware"]["device"], read(_CARDS)
    card = next(card for card in cards.values() if kind in card.get("device_kinds", ()))
    return card["figures"]["memory_bytes_per_s"]["value"]


def dd_of_several(result: Result) -> Figure:
    """The rate at which several processes of `dd` wrote, in GiB/s."""
    return max(row["gib_per_s"] for writers, row in result["dd"].items() if int(writers) > 1)


def num_seeds(result: Result) -> int:
    """The number of seeds that a row's mean loss is of."""
    return len(result["held_out_loss"]["of_seeds"])


def over_yardstick(result: Result) -> Figure:
    """The loss over that of the yardstick, as a share; the mean of runs of the same seed."""
    return result["percent_over_yardstick"]["mean"] / 100


def percent_of_gpu(result: Result) -> int | None:
    """The share of the GPU that JAX was given, in percent; None where that is not known."""
    hardware = result.get("hardware", {})
    if fraction := hardware.get("device_fraction"):
        return round(100 * float(fraction))
    whole, limit = _WHOLE_GIB.get(hardware.get("device", "")), hardware.get("device_limit_gib")
    return round(100 * limit / whole) if whole and limit and "peer" not in result else None


def is_of_one_run(path: Path, first: Path) -> bool:
    """Whether two files are of one run of one machine; early ones by their folder and commits."""
    results = read(path), read(first)
    if not any(map(is_early, results)):
        # An id that was given twice doesn't make runs of two machines one.
        ours, other = ((r["record"]["run"], r["record"].get("host")) for r in results)
        return ours == other
    commits = {result.get("versions", {}).get("commit") for result in results} - {None}
    return all(map(is_early, results)) and path.parent == first.parent and len(commits) < 2


def marks(path: Path, first: Path) -> list[str]:
    """Returns the reasons why a row can't be compared as it is with the first one of its table."""
    result = read(path)
    found = []
    if not is_of_one_run(path, first):
        found.append("another run")
    percent = percent_of_gpu(result)
    if percent not in (None, percent_of_gpu(read(first)) or _USUAL_PERCENT):
        found.append(f"{percent}% of the GPU")
    if is_early(result):
        if result.get("update_mode") == "deferred":
            found.append("owes an update")
        if not is_early(read(first)):
            found.append("before the protocol")
    elif result["record"]["clean"] is False:
        found.append("no commit's tree")
    return found


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table of figures.

    Attributes:
        names: Names of the figures in a cell.
        form: Format of a cell.
    """

    names: tuple[str, ...]
    form: str


def _column(form: str, *names: str) -> Column:
    return Column(names=names, form=form)


FIGURES: dict[str, Callable[[Result], Figure]] = {
    function.__name__: function
    for function in (
        seconds_per_step,
        spread,
        num_measured_steps,
        tokens_per_second,
        tflops,
        prediction_error,
        process_error,
        dispatch_share,
        drained_at_most,
        tokens_per_second_at_least,
        link_rate,
        link_share,
        temporary_device_gib,
        decode_memory_share,
        generation_memory_share,
        dd_of_several,
        num_seeds,
        over_yardstick,
    )
}
# Rates beside that of another file, by its path from a file's folder, with the file's own words in
# it; in a table, beside that of its first row.
RATIOS = {
    "of_resident": "all-state-resident.json",
    "of_ours": "megatrain-jax.json",
    "of_plain": "{model}-jax.jit-and-optax.json",
    "of_one_gpu": "1-gpu-{update}.json",
    "of_whole_card": "70b-{sizes[num_layers]}-layers-compact.json",
    "of_zero_3": "../peers/deepspeed-zero-3-offload.json",
    "of_twin_flow": "../peers/deepspeed-zero-3-twin-flow.json",
    "of_zero_3_beside": "deepspeed-zero-3-offload.json",
    "of_zero_3_whole": "{sizes[seq_len]}-zero-3.json",
    "of_zero_3_tiled": "{sizes[seq_len]}-zero-3-alst.json",
}
COLUMNS = {
    "s/step": _column("{:.3f}", "seconds_per_step"),
    "s": _column("{:.3f}", "seconds_per_step"),
    "±": _column("{:.3f}", "spread"),
    "steps": _column("{}", "num_measured_steps"),
    "predicted": _column("{:.3f}", "predicted_seconds_per_step"),
    "tokens/s": _column("{:,.0f}", "tokens_per_second"),
    "TFLOP/s": _column("{:.0f}", "tflops"),
    "of resident": _column("{:.3f}", "of_resident"),
    "of the first": _column("{:.2f}", "of_ours"),
    "of plain": _column("{:.2f}", "of_plain"),
    "of one GPU": _column("{:.2f}", "of_one_gpu"),
    "parameters": _column("{:,d}", "num_parameters"),
    "tokens": _column("{:,d}", "tokens"),
    "tokens a step": _column("{:,d}", "tokens_per_step"),
    "layers": _column("{:d}", "sizes.num_layers"),
    "temporaries": _column("{:.1f} GiB", "temporary_gib"),
    "peak device memory": _column("{:.1f} GiB", "peak_device_gib"),
    "reserved": _column("{:.1f} GiB", "peak_device_gib_reserved"),
    "host at rest": _column("{:.1f} GiB", "planned_host_gib"),
    "peak host memory": _column("{:.1f} GiB", "peak_host_gib"),
    "the plan's": _column("{:.1f} GiB", "planned_process_gib"),
    "stages not recomputed": _column("{} of {}", "stages_that_keep_residuals", "num_stages"),
    "dispatch": _column("{:.3f}", "dispatch_share"),
    "at most": _column("{:.3f}", "drained_at_most"),
    "seeds": _column("{}", "num_seeds"),
    "host bytes a parameter": _column("{:.2f}", "host_bytes_per_parameter"),
    "held-out loss": _column("{:.4f}", "held_out_loss.mean"),
    "over fp32": _column("{:+.2%}", "over_yardstick"),
    "save": _column("{:.2f} GiB/s", "save.gib_per_s"),
    "restore": _column("{:.2f} GiB/s", "restore.gib_per_s"),
    "state": _column("{:.1f} GiB", "state_gib"),
    "`dd`, one process": _column("{:.2f} GiB/s", "dd.1.gib_per_s"),
    "`dd`, several": _column("{:.2f} GiB/s", "dd_of_several"),
    "save, of `dd`": _column("{:.2f}", "save_share_of_dd"),
    "extra host memory, save": _column("{:.1f} GiB", "save.extra_host_gib"),
    "extra host memory, restore": _column("{:.1f} GiB", "restore.extra_host_gib"),
}


def figure(path: Path, name: str, base: str = "", yardstick: Path | None = None) -> Figure:
    """Returns a figure of a file.

    Args:
        path: The file.
        name: The figure's name here, or a path of keys.
        base: A path of keys to the part of the file that it is of.
        yardstick: The file that a ratio refers to, if not one beside this one.

    Raises:
        KeyError: If there is none of that name.
    """
    result = part(read(path), base)
    if name in RATIOS:
        file = RATIOS[name].format(**result, update=_update(result))
        beside = read(yardstick or (path.parent / file).resolve())
        ours, other = tokens_per_second(result), tokens_per_second(beside)
        return ours and other and ours / other
    return FIGURES[name](result) if name in FIGURES else part(result, name)


def _update(result: Result) -> str:
    """The update and the budget as in files' names, such as "clip-1-least"."""
    clip = result.get("clip")
    update = "immediate" if clip is None else f"clip-{clip:g}"
    return f"{update}-{result.get('device_budget')}"
