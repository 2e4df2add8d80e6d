"""The list of all result files in their page: where they come from, and how plans did.

`check_figures.py` compares it with the files, and writes it.
"""

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import figures

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGE = RESULTS / "README.md"

_GENERATED = re.compile(r"(?<=<!-- files -->\n).*?(?=<!-- end of files -->)", re.S)


def write_list() -> None:
    """Writes the list of all files anew."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_GENERATED.sub(lambda _: list_of_files(), text), encoding="utf-8")


def check_list(text: str | None = None) -> list[str]:
    """Returns the differences between the list in a page's text and the files."""
    match = _GENERATED.search(PAGE.read_text(encoding="utf-8") if text is None else text)
    if match is None or match[0] != list_of_files():
        return [f"{PAGE.relative_to(ROOT)}: the list of files is old: check_figures.py --write"]
    return []


def list_of_files() -> str:
    """Returns the Markdown of all result files: where they come from, and how plans did."""
    paths = sorted(RESULTS.rglob("*.json"))
    lines = ["| file | commit | clean | UTC | host | run | steps | GPU | process |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for path in paths:
        lines.append(f"| {' | '.join(_origin(path))} |")
    return "\n".join([*lines, "", *_ranges(paths), ""])


def _origin(path: Path) -> Iterator[str]:
    """The cells of a file's row."""
    result, name = figures.read(path), path.relative_to(RESULTS).as_posix()
    record = result.get("record", {})
    early = result.get("versions", {}).get("commit") or ""
    commit = record.get("commit") or early
    clean = record.get("clean", "-dirty" not in early if early else None)
    percent, error = figures.percent_of_gpu(result), figures.process_error(result)
    yield f"[{name.removesuffix('.json')}]({name})"
    yield f"`{commit.removesuffix('-dirty')[:12]}`" if commit else "not recorded"
    yield {True: "yes", False: "no", None: "not recorded"}[clean]
    for key in ("utc", "host", "run"):
        yield record.get(key) or "not recorded"
    yield str(figures.num_measured_steps(result) or "")
    yield "" if percent is None else f"{percent}%"
    yield "" if error is None else _signed(error)


def _ranges(paths: list[Path]) -> Iterator[str]:
    """Errors of plans against measurements, over all files that have both."""
    for what, error in (
        ("a step's time", figures.prediction_error),
        ("the process's host memory", figures.process_error),
    ):
        found = {path: error(figures.read(path)) for path in paths}
        errors = sorted(value for value in found.values() if value is not None)
        within = sum(abs(value) <= 0.02 for value in errors)
        yield (
            f"Of {what}, plans foresaw from {-errors[0]:.1%} too little to {errors[-1]:.1%} too "
            f"much, over {len(errors)} files; in {within} of them they were within 2%, and the "
            f"median miss was {statistics.median(map(abs, errors)):.1%}."
        )
    # Plans count too little of experts' loops: of these files alone the ranges would say nothing.
    mixtures = [path for path in paths if "active_parameters" in figures.read(path)]
    others = [figures.prediction_error(figures.read(p)) for p in paths if p not in mixtures]
    least = min(error for error in others if error is not None)
    yield (
        f"Without the {len(mixtures)} files of mixtures of experts, a step's time was foreseen at "
        f"most {-least:.1%} too little."
    )


def _signed(share: float) -> str:
    return f"{share:+.1%}".replace("-", "−").replace("+", "")
