"""Checks every figure on a page against its result file.

    python experiments/throughput/check_figures.py

A figure in running text is a link to its result file. The link's anchor has the figure's name in
`figures.py`: `[26,938 tokens/s](results/h200/updates/clip-1-auto.json#tokens_per_second)`; several
numbers need as many names, with commas. A link to a section of a page repeats numbers of that
section. In a table, the first cell links to the row's file (an anchor leads to a part of it), and
titles name the figures. A measured figure without a source is a mistake, and so is a row that
doesn't say how it differs from the first one. Units, kinds of quantity, cards, peers and rows'
labels are compared with the files, too (`figure_words.py`): a row's label shares more words with
its file's path, name or settings than all further labels do. Numbers that are not measured are
listed in a comment: `<!-- given: 24 GiB; 10 GiB -->`. Text between `<!-- planned: ... -->` and
`<!-- end of planned -->` was printed by a script of plans; a test compares both.

With `--write` it makes the list of all files in `experiments/results/README.md` anew.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import figures
from figure_words import (
    wrong_card,
    wrong_form,
    wrong_kind,
    wrong_labels,
    wrong_owners,
    wrong_peer,
    wrong_place,
    wrong_unit,
    wrong_yardstick,
)
from figures import COLUMNS, RATIOS
from file_list import RESULTS, ROOT, check_list, write_list
from timing import MIN_STEPS

EARLY = "before the protocol"
# A step of this many seconds may be timed alone: the time of the clock and of Python is negligible.
_LONG_STEP = 20.0

_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)(?:#([^)\s]*))?\)")
_NUMBER = re.compile(
    r"(?<![\w.,−-])([−-]?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?!,?\d|\.\d)"
    r"(?:\s?(%|ms\b|B\b|million\b)|(?![A-Za-z]))"
)
_SCALES = {"%": 0.01, "ms": 1e-3, "B": 1e9, "million": 1e6, None: 1.0}
# Numbers with a unit of measurement, and numbers with more digits than a setting has.
_MEASURED = re.compile(
    r"(?<![\w.,-])(?:\d[\d,.]*\s?(?:%|ms\b|s\b|s/step|seconds?\b|minutes?\b|times\b|[GM]i?B\b|"
    r"(?:tokens|[GM]i?B|TFLOP)/s|tokens a second|of (?:a )?resident|of `dd`)|"
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+(?!\.?\d))"
)
_HIDDEN = re.compile(
    r"^```.*?^```|`[^`\n]+`|<!-- files -->.*?<!-- end of files -->|"
    r"<!-- planned: .*?<!-- end of planned -->|<!--.*?-->",
    re.M | re.S,
)
_GIVEN = re.compile(r"<!-- given: (.*?) -->", re.S)
_SAID = re.compile(r"^```text\n(.*?)^```", re.M | re.S)
_TABLE = re.compile(r"(?:^\|.*\|\n)+", re.M)
_HEADING = re.compile(r"^#+ .*$", re.M)
# The beginning of a paragraph, an item of a list or a row of a table.
_ITEM = re.compile(r"\n\s*\n|\n\s*- |\n\|")


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page's text, with problems as lines of `path:line what`.

    Attributes:
        path: The page's path, from which its links start.
        text: The page's text; of a notebook, its Markdown.
    """

    path: Path
    text: str

    def at(self, position: int, what: str) -> str:
        """Returns a problem as a line with its place."""
        line = self.text.count("\n", 0, position) + 1
        return f"{self.path.relative_to(ROOT)}:{line} {what}"

    def target(self, link: str) -> Path:
        """Returns the file that a link leads to."""
        return _target(self.path.parent, link)


@cache
def _target(folder: Path, link: str) -> Path:
    return (folder / link).resolve()


def pages() -> list[Page]:
    """Returns all pages that may show figures."""
    found = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    found += sorted((ROOT / "experiments").rglob("README.md"))
    notebooks = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    return [read_page(path) for path in [*found, *notebooks]]


def read_page(path: Path) -> Page:
    """Reads a page or a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return Page(path=path, text=text)


def problems(page: Page) -> list[str]:
    """Returns the problems of a page's figures."""
    visible = _blank(_HIDDEN, page.text)
    lost = [m for m in _LINK.finditer(visible) if _is_lost(page.target(m[2]))]
    if lost:
        return [page.at(match.start(), f"{match[2]} is not there") for match in lost]
    found, prose = [], visible
    for table in _TABLE.finditer(visible):
        wrong = _table(page, table)
        if wrong is not None:
            found += wrong
            prose = prose[: table.start()] + _blank(_TABLE, table[0]) + prose[table.end() :]
    for match in _LINK.finditer(prose):
        found += _link(page, match)
    owners = [page.at(m.start(), f"{m[0]!r} is DeepSpeed's") for m in wrong_owners(prose)]
    return found + owners + _without_source(page, prose) + _not_marked(page, visible)


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """Replaces matches by spaces, so that positions in the text stay the same."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _link(page: Page, match: re.Match[str]) -> list[str]:
    """Checks the numbers in the text of a link in running text."""
    shown, target, anchor = match[1], page.target(match[2]), match[3]
    printed = list(_NUMBER.finditer(shown))
    if target.suffix == ".md" and anchor and printed and target.exists():
        section = [number[0] for number in _NUMBER.finditer(_section(target, anchor))]
        lost = [number[0] for number in printed if number[0] not in section]
        return [page.at(match.start(), f"{n} is not in that section") for n in lost]
    if not _is_result(target):
        return []
    if not anchor:
        return [page.at(match.start(), f"{match[0]} names no figure")] if printed else []
    names = [unquote(name) for name in anchor.split(",")]
    found = _compare(printed, target, names, "", None, match[0])
    before, after = page.text[: match.start()], page.text[match.end() :]
    if len(names) == len(printed) == 1:
        ahead, behind = before + shown[: printed[0].start()], shown[printed[0].end() :] + after
        if kind := wrong_kind(ahead, re.split(r"[\[.]", behind, maxsplit=1)[0], names[0]):
            found.append(f"{match[0]} is {names[0]}, not {kind}")
    paragraph = before.rpartition("\n\n")[2] + match[1] + after.partition("\n\n")[0]
    line = before.rpartition("\n")[2] + match[1] + after.partition("\n")[0]
    row = [line] if line.startswith("|") else []
    if card := wrong_card([*row, paragraph, _heading(page, match.start())], target):
        found.append(f"{match[0]} is not of the {card}")
    if row and (form := wrong_form(line, target)):
        found.append(f"{match[0]} is not {form}")
    if peer := wrong_yardstick(re.split(r"[\[.]", after, maxsplit=1)[0], names[-1]):
        found.append(f"{match[0]} is not beside {peer}")
    item = _ITEM.split(before)[-1] + match[1] + _ITEM.split(after)[0]
    if peer := wrong_peer(_LINK.sub(lambda link: link[1], item), target):
        found.append(f"{match[0]} is not of {peer}")
    return [page.at(match.start(), wrong) for wrong in found]


def _is_result(path: Path) -> bool:
    return path.suffix == ".json" and path.is_relative_to(RESULTS)


def _is_lost(path: Path) -> bool:
    return _is_result(path) and not path.exists()


def _compare(
    printed: list[re.Match[str]],
    target: Path,
    names: list[str],
    base: str,
    yardstick: Path | None,
    shown: str,
) -> list[str]:
    """Compares printed numbers with figures of a file; each by its own digits."""
    try:
        values = [figures.figure(target, name, base, yardstick) for name in names]
    except KeyError as error:
        return [f"{shown}: {error}"]
    values = [value for value in values if value is not None]
    if len(values) != len(printed):
        return [f"{shown} shows {len(printed)} numbers of {len(values)} that {names} are"]
    pairs = list(zip(printed, values, strict=True))
    found = [f"{shown}: {n[0]!r} is {value}" for n, value in pairs if not _is(n, value)]
    # If a figure has no value, it is unknown to which name a number belongs.
    ends = [*(number.start() for number in printed[1:]), None]
    for number, name, end in (
        zip(printed, names, ends, strict=True) if len(printed) == len(names) else ()
    ):
        if unit := wrong_unit(number.string, number.end(3 if number[3] else 2), name):
            found.append(f"{shown}: {number[0]!r} is {name}, not in {unit}")
        if place := wrong_place(number.string[number.end() : end], name):
            found.append(f"{shown}: {number[0]!r} is {name}, not of the {place}")
    return found


def _is(number: re.Match[str], value: float) -> bool:
    """Whether a number as it is printed stands for a value, to the last of its digits."""
    sign, whole, decimals, unit = number.groups()
    said = float(whole.replace(",", "") + (decimals or "")) * (-1 if sign else 1)
    last_digit = 10.0 ** (1 - len(decimals or "."))
    return abs(value / _SCALES[unit] - said) <= 0.5 * last_digit * (1 + 1e-9)


def _table(page: Page, table: re.Match[str]) -> list[str] | None:
    """Checks a table of figures, where a row links to a result or a title names one; else None."""
    lines = page.text[table.start() : table.end()].splitlines()
    starts = [table.start() + sum(len(line) + 1 for line in lines[:n]) for n in range(len(lines))]
    titles, _, *body = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    sources = [_source(page, cells[0]) for cells in body]
    if not any(sources) and not COLUMNS.keys() & set(titles):
        return None
    first = next((source[0] for source in sources if source), None)
    needed = [set(figures.marks(source[0], first)) for source in sources if source and first]
    # A fact that holds for all rows may be said above the table instead.
    above = " ".join(page.text[: table.start()].rstrip().rpartition("\n\n")[2].split())
    shared = {mark for mark in set.intersection(*needed) if mark in above} if needed else set()
    labelled = [
        (_unmarked(row[0], figures.marks(source[0], first)), *source)
        for row, source in zip(body, sources, strict=True)
        if source and first
    ]
    found = [page.at(table.start(), wrong) for wrong in wrong_labels(labelled)]
    for at, cells, source in zip(starts[2:], body, sources, strict=True):
        if source is None or first is None:
            if any(_NUMBER.search(cell) for cell in cells[1:]):
                found.append(page.at(at, f"the row {cells[0]!r} has no source"))
            continue
        path, base = source
        if card := wrong_card([_label(cells[0]), above, _heading(page, table.start())], path):
            found.append(page.at(at, f"the row {cells[0]!r} is not of the {card}"))
        marks = [mark for mark in figures.marks(path, first) if mark not in shared]
        missing = [mark for mark in marks if mark not in cells[0]]
        found += [page.at(at, f"the row {cells[0]!r} doesn't say: {m}") for m in missing]
        found += [page.at(at, wrong) for wrong in _too_few_steps(path)]
        for title, cell in zip(titles[1:], cells[1:], strict=True):
            printed = list(_NUMBER.finditer(cell))
            if title not in COLUMNS:
                if printed:
                    found.append(page.at(at, f"{cell!r}: the title {title!r} names no figure"))
                continue
            names, shown = list(COLUMNS[title].names), f"{cells[0]} {title} {cell}"
            yardstick = first if set(names) & RATIOS.keys() else None
            if printed or cell not in ("", "–"):
                found += [
                    page.at(at, wrong)
                    for wrong in _compare(printed, path, names, base, yardstick, shown)
                ]
    return found


def _heading(page: Page, position: int) -> str:
    """The last heading before a position of a page; empty if there is none."""
    return next((m[0] for m in reversed([*_HEADING.finditer(page.text, 0, position)])), "")


def _label(cell: str) -> str:
    """A row's label, without its links' addresses."""
    return _LINK.sub(lambda match: match[1], cell)


def _unmarked(cell: str, marks: Sequence[str]) -> str:
    """A row's label without the parenthesis that says how the row differs from the first one."""
    label = _label(cell)
    start = label.rfind("(")
    return label[:start].rstrip() if any(mark in label[start:] for mark in marks) else label


def _source(page: Page, cell: str) -> tuple[Path, str] | None:
    """The file that a row is of, and the path of keys to its part of it."""
    for match in _LINK.finditer(cell):
        if _is_result(page.target(match[2])):
            return page.target(match[2]), unquote(match[3] or "")
    return None


def _too_few_steps(path: Path) -> list[str]:
    result = figures.read(path)
    steps = figures.num_measured_steps(result)
    is_long = (figures.seconds_per_step(result) or 0) >= _LONG_STEP
    if figures.is_early(result) or not steps or steps >= MIN_STEPS or is_long:
        return []
    return [f"{path.name} is the mean of {steps} steps, fewer than {MIN_STEPS}"]


def _without_source(page: Page, prose: str) -> list[str]:
    """Lists numbers that look measured and have no link to a result."""
    prose, found = _blank(_LINK, prose), []
    given = [text.strip() for match in _GIVEN.finditer(page.text) for text in match[1].split(";")]
    said = " ".join(_SAID.findall(page.text))
    for text in given:
        spaced = r"\s+".join(map(re.escape, text.split()))
        words = re.compile(rf"(?<![\w.,]){spaced}(?!\w|[.,]\d)")
        if not words.search(prose):
            found.append(page.at(0, f"{text!r} is given, but nowhere said"))
        prose = _blank(words, prose)
    return found + [
        page.at(match.start(), f"{match[0]!r} has no source")
        for match in _MEASURED.finditer(prose)
        if match[0] not in said
    ]


def _not_marked(page: Page, visible: str) -> list[str]:
    """Lists sections that show results from before the protocol without saying so."""
    starts = [0, *(match.start() for match in _HEADING.finditer(visible))]
    found = []
    for start, end in zip(starts, [*starts[1:], len(visible)], strict=True):
        section = visible[start:end]
        targets = [page.target(match[2]) for match in _LINK.finditer(section)]
        early = [t for t in targets if _is_result(t) and figures.is_early(figures.read(t))]
        if early and EARLY not in " ".join(section.lower().split()):
            found.append(page.at(start, f"{early[0].name} and others are from {EARLY!r}: say so"))
    return found


@cache
def _section(path: Path, anchor: str) -> str:
    """The text below a heading, down to the next one."""
    text = path.read_text(encoding="utf-8")
    headings = list(_HEADING.finditer(text))
    for heading, end in zip(headings, [*(h.start() for h in headings[1:]), len(text)], strict=True):
        words = re.sub(r"[^\w\s-]", "", heading[0]).strip().lower()
        if re.sub(r"[\s]+", "-", words) == anchor:
            return text[heading.end() : end]
    return ""


def main() -> None:
    """Prints the problems of all pages, or writes the list of files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="make the list of files anew")
    args = parser.parse_args()
    if args.write:
        write_list()
    found = check_list()
    found += [problem for page in pages() for problem in problems(page)]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
