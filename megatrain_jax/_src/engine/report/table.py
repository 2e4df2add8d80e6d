"""Tables as plain text and as HTML, and the format of numbers in them."""

import base64
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain_jax._src.engine.report.notebook_figure import NotebookFigure

UNFIT = "DOES NOT FIT"
RED = "#c62828"


def seconds(value: float | None) -> str:
    """A time with three digits: `1.25 s`, `12.3 ms`, `45.6 µs`; empty if unknown."""
    if value is None:
        return ""
    if value == 0 or value >= 0.1:
        return f"{value:.3g} s"
    # The larger unit is used if three digits would round up to a thousand.
    return f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} µs"


def short(value: int, flops: bool = False) -> str:
    """A count with three digits; with `flops`, a count of operations."""
    steps = ("", "K", "M", "G" if flops else "B", "T", "P", "E")
    size = float(value)
    # From 999.5 on, three digits would round to a thousand.
    while size >= 999.5 and len(steps) > 1:
        size, steps = size / 1000, steps[1:]
    return f"{size:.3g} {steps[0]}FLOP" if flops else f"{size:.3g}{steps[0]}"


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """A table as text: the first column left-aligned, the last unpadded, the rest right-aligned."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        middle = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([first, *middle, row[-1]]).rstrip())
    return "\n".join(lines)


def html_row(cells: Sequence[str], tag: str = "td") -> str:
    """One row of a table in HTML; cells that say something does not fit are red."""
    return f"<tr>{''.join(f'<{tag}>{_html(cell)}</{tag}>' for cell in cells)}</tr>"


def html_table(cells: Sequence[Sequence[str]], *, header: bool = False) -> str:
    """A table in HTML; its first row may be a header."""
    rows = [html_row(cells[0], "th"), *map(html_row, cells[1:])] if header else map(html_row, cells)
    return f"<table>{''.join(rows)}</table>"


def html_line(text: str) -> str:
    """A line of text in HTML, escaped."""
    return f"<div>{html.escape(text)}</div>"


def html_box(*parts: str) -> str:
    """Parts in a column, never wider than the notebook cell."""
    return f'<div style="max-width:100%;overflow-x:auto">{"".join(parts)}</div>'


def html_beside(left: str, right: str) -> str:
    """Two parts side by side, or in a column if there is not enough space."""
    outer = "display:flex;flex-wrap:wrap;gap:16px 24px;align-items:flex-start;max-width:100%"
    inner = "min-width:0;max-width:100%;overflow-x:auto"
    return (
        f'<div style="{outer}"><div style="flex:3 1 30em;{inner}">{left}</div>'
        f'<div style="flex:1 1 16em;{inner}">{right}</div></div>'
    )


def html_figure(figure: "NotebookFigure") -> str:
    """A figure as an image within HTML."""
    source = base64.b64encode(figure._repr_png_()).decode()
    return f'<img style="max-width:100%" src="data:image/png;base64,{source}">'


def html_red(text: str) -> str:
    """A text in red, escaped."""
    return f'<span style="color:{RED}">{html.escape(text)}</span>'


def _html(cell: str) -> str:
    return html_red(cell) if UNFIT in cell else html.escape(cell)
