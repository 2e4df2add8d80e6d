"""Tables as plain text and as HTML, and numbers as they are written there."""

import html
from collections.abc import Sequence


def seconds(value: float | None) -> str:
    """A time; empty if unknown."""
    return "" if value is None else f"{value:.3g} s"


def short(value: int, flops: bool = False) -> str:
    """A count with three digits, of operations if they are `flops`."""
    steps = ("", "K", "M", "G" if flops else "B", "T", "P", "E")
    size = float(value)
    while size >= 999.5 and len(steps) > 1:
        size, steps = size / 1000, steps[1:]
    return f"{size:.3g} {steps[0]}FLOP" if flops else f"{size:.3g}{steps[0]}"


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """A table as text: the first column to the left, the last as it is, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        middle = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([first, *middle, row[-1]]).rstrip())
    return "\n".join(lines)


def html_row(cells: Sequence[str], tag: str = "td") -> str:
    """One row of a table in HTML."""
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
