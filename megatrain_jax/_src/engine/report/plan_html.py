"""A plan as HTML: its table, bars of host and device memory, and warnings in red."""

import html
from typing import TYPE_CHECKING

from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.report.memory_fill import Fill, fills
from megatrain_jax._src.engine.report.plan_table import group_cells, title, total_cells
from megatrain_jax._src.engine.report.table import (
    RED,
    UNFIT,
    html_beside,
    html_box,
    html_red,
    html_table,
)

if TYPE_CHECKING:
    from megatrain_jax._src.engine.report.plan import Plan

_COLOURS = ("#4c72b0", "#dd8452", "#937860", "#55a868", "#c44e52", "#8172b3", "#64b5cd")
_FREE = "#8884"  # visible on white and on black pages


def as_html(plan: "Plan") -> str:
    """The plan as a notebook shows it."""
    tables = html_table(group_cells(plan), header=True) + html_table(total_cells(plan))
    bars = "".join(map(_bar, fills(plan)))
    warnings = "".join(f"<p>{html_red(f'warning: {text}')}</p>" for text in plan.warnings)
    heading = f"<p>{html.escape(title(plan))}</p>"
    return html_box(heading, warnings, html_beside(tables, bars))


def _bar(fill: Fill) -> str:
    """A memory as a bar, scaled to its limit, or to the needed bytes if they are more."""
    # At least 1, to avoid a division by zero.
    scale = max(fill.needed, fill.limit or 0) or 1
    parts = [
        (name, size, colour) for (name, size), colour in zip(fill.parts, _COLOURS, strict=False)
    ]
    free = max(0, (fill.limit or 0) - fill.needed)
    if fill.limit is not None:
        parts.append(("free", free, _FREE))
    pieces = "".join(
        f'<div title="{name}: {sized(size)}" '
        f'style="width:{100 * size / scale:.2f}%;background:{colour}"></div>'
        for name, size, colour in parts
    )
    limit = ""
    if fill.limit is not None and not fill.fits:
        place = f"left:{100 * fill.limit / scale:.2f}%;top:0;bottom:0;border-left:2px solid {RED}"
        limit = f'<div title="{sized(fill.limit)}" style="position:absolute;{place}"></div>'
    bar = "display:flex;position:relative;height:1em;overflow:hidden;margin:4px 0"
    legend = "".join(
        f'<div><span style="color:{colour}">■</span> {name} {sized(size)}</div>'
        for name, size, colour in parts
    )
    return (
        f'<div style="margin-bottom:1em"><div>{_heading(fill)}</div>'
        f'<div style="{bar}">{pieces}{limit}</div>{legend}</div>'
    )


def _heading(fill: Fill) -> str:
    of = "" if fill.limit is None else f" of {sized(fill.limit)}"
    said = html.escape(f"{fill.name}: {sized(fill.needed)}{of}")
    return said if fill.fits else f"{said} {html_red(UNFIT)}"
