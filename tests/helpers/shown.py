"""An object that shows itself as HTML, and what it shows."""

import re
from html.parser import HTMLParser
from typing import Any


class Shown(HTMLParser):
    """A page as a reader sees it: texts, tables as rows of cells, colours of texts, widths."""

    def __init__(self, page: str):
        super().__init__()
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.red: list[str] = []
        self.open: list[tuple[str, dict[str, Any]]] = []
        self.widths: list[tuple[str, float]] = []
        self.images = 0
        self.feed(page)
        assert not self.open, "every tag is closed"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        found = dict(attrs)
        if tag == "img":
            self.images += 1
            return
        self.open.append((tag, found))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        width = re.match(r"width:([\d.]+)%", found.get("style", ""))
        if width:
            self.widths.append((found["title"], float(width[1])))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if any(tag in ("td", "th") for tag, _ in self.open):
            self.rows[-1][-1] += data
        if any("color:#c62828" in found.get("style", "") for _, found in self.open):
            self.red.append(data)
