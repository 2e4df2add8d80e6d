"""The numbers of a text with their units, which stay when its words change."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

_SCALES = {
    **{unit: 2 ** (10 * n) for n, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))},
    **{"s": 1, "ms": 1e-3, "µs": 1e-6, "%": 1e-2, "GB/s": 1e9},
    **{f"{unit}FLOP{of}": 1e3**n for n, unit in enumerate(["", *"KMGTPE"]) for of in ("", "/s")},
}
_COUNTS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_UNITS = "|".join(sorted(map(re.escape, _SCALES), key=len, reverse=True))
# Not of a name, as in "layers/3" or "H200".
_NUMBER = r"(?<![\w./])(\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)"
_QUANTITY = re.compile(rf"{_NUMBER}(?: +({_UNITS})(?![\w/])|(%)|([KMBT]?)(?![\w/]))")


def quantities(text: str) -> list[float]:
    """The numbers in the order of the text, as bytes, seconds, operations, shares or counts."""
    return [value for value, _ in _read(text)]


def has_row(text: str, expected: Sequence[float | None]) -> bool:
    """Whether a line of a text has these numbers and no others, rounded to its digits."""

    def is_expected(line: str) -> bool:
        row = list(_read(line))
        return len(row) == len(expected) and all(
            wanted is not None and abs(value - wanted) <= 0.501 * step
            for (value, step), wanted in zip(row, expected, strict=True)
        )

    return any(map(is_expected, text.splitlines()))


def _read(text: str) -> Iterator[tuple[float, float]]:
    """Each number of a text, and how much one in its last digit is."""
    for printed, unit, share, count in _QUANTITY.findall(text):
        number = printed.rstrip(",").replace(",", "")
        scale = _SCALES.get(unit or share, _COUNTS.get(count, 1))
        digits, _, exponent = number.partition("e")
        decimals = len(digits.partition(".")[2])
        yield float(number) * scale, 10.0 ** (int(exponent or 0) - decimals) * scale


def title_of(plan: Any) -> str:
    """The line of a printed plan that counts parameters, groups and stages."""
    return next(line for line in str(plan).splitlines() if " parameters in " in line)
