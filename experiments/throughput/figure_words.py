"""Words beside figures: units, names of rows and cards, compared with the files of the figures.

A unit belongs to a figure's name, a row's label to the name of its file, and a card to the hardware
that the file records. `check_figures.py` asks here after it has compared the numbers.
"""

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from figures import Result, part, read

_UNIT = re.compile(
    r"(?<![A-Za-z])(tokens/s|tokens a second|[GM]iB/s|[GMK]iB|TFLOP/s|ms|s/step|s|minutes?)"
    r"(?![A-Za-z/])"
)
_CARD = re.compile(r"\b(?:[ABH]\d{3}|L40S?|RTX \d{4})\b")
_UNITS = {
    "gib_per_s": ("GiB/s",),
    "link_rate": ("GiB/s",),
    "dd_of_several": ("GiB/s",),
    "gib": ("GiB",),
    "tokens_per_second": ("tokens/s", "tokens a second"),
    "tflops": ("TFLOP/s",),
    "seconds": ("s", "ms", "s/step"),
    "pinning": ("s", "ms"),
    "spread": ("s", "ms", "s/step"),
}


def wrong_unit(text: str, end: int, name: str) -> str | None:
    """A unit in a text that a figure doesn't have; None if it fits or there is none.

    Args:
        text: The text of a link or a cell.
        end: Where the number ends in it. The next unit counts: `9.5 and 4.1 GiB` has one for both.
        name: The figure's name.
    """
    units = next((units for word, units in _UNITS.items() if word in name), None)
    found = _UNIT.search(text, end)
    if units is None or found is None or found[1] in units:
        return None
    return found[1]


def swapped_labels(rows: Sequence[tuple[str, Path, str]]) -> list[str]:
    """Pairs of rows whose labels have more words of each other's files than of their own.

    Args:
        rows: The label, the file and the path of keys to its part, of each row. Words of a file
            are those of its path and of the name that it gives the part.
    """

    def name(path: Path, base: str) -> str:
        return f"{path.parent.name} {path.stem} {part(read(path), base).get('name', '')}"

    words = [(_words(label), _words(name(path, base))) for label, path, base in rows]
    return [
        f"the rows {rows[i][0]!r} and {rows[j][0]!r} have each other's label"
        for i, j in combinations(range(len(rows)), 2)
        if _shared(words[i][0], words[j][1]) + _shared(words[j][0], words[i][1])
        > _shared(words[i][0], words[i][1]) + _shared(words[j][0], words[j][1])
    ]


def wrong_card(text: str, path: Path) -> str | None:
    """The cards that a text names, if the file is of another one."""
    named, own = set(_CARD.findall(text)), cards(read(path))
    return " and ".join(sorted(named)) if named and own and not named & own else None


def cards(result: Result) -> set[str]:
    """The cards that a result is of, such as H200."""
    return set(_CARD.findall(str(result.get("hardware", {}).get("device", ""))))


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+|\d+", text.lower().replace(",", "")))


def _shared(x: set[str], y: set[str]) -> int:
    return len(x & y)
