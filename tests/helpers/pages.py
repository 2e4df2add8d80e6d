"""Reads documentation as a user does: code blocks, what they print, cells, links."""

import contextlib
import functools
import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from places import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))

_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.M | re.S)
_SHOWN = re.compile(r"^```(?:python|py|bash|yaml|json)\n(.*?)^```$", re.M | re.S)
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)
_LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]+)")
# What a rewording may change; units and the constants of Python aren't among it.
_WORD = re.compile(r"(?!(?:B|s|ms|True|False|None)$)(?:[A-Z]?[a-z]+|[A-Z]+)(?:['’-][a-z]+)*")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.(\d+))?(?:e[-+]?\d+)?([%KMBT]?)")
_ANY = "..."


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of Python in a page.

    Attributes:
        code: The code.
        printed: The block of text right behind it, which is what it prints; "..." stands for
            anything.
        line: Number of its line in the page, from 1.
    """

    code: str
    printed: str | None
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(code=m[1], printed=m[2], line=text.count("\n", 0, m.start()) + 1)
        for m in _BLOCK.finditer(text)
    ]


def code_lines(page: Path) -> list[str]:
    """The lines of code that a page shows, in any language, without what it prints."""
    shown: list[str] = _SHOWN.findall(page.read_text(encoding="utf-8"))
    return [line for code in shown for line in code.splitlines()]


def execute(page: Path, block: Block, namespace: dict[str, Any]) -> str:
    """Runs a block and returns what it printed."""
    # Behind empty lines, so that a traceback names the page's own line.
    code = compile("\n" * block.line + block.code, str(page), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, namespace)
    return out.getvalue()


def as_said(block: Block, printed: str) -> bool:
    """Whether a block printed the numbers and names that its page shows, if that shows any.

    Numbers may differ by one in their last decimal, or by half a percent. Words don't count.
    """
    return block.printed is None or agree(block.printed, printed)


def agree(shown: str, printed: str) -> bool:
    """Whether two texts have the same numbers, units and names of code, in the same order."""
    expected, found = telling(shown), telling(printed)

    @functools.cache
    def agree_from(i: int, j: int) -> bool:
        if i == len(expected):
            return j == len(found)
        if expected[i] == _ANY:
            return agree_from(i + 1, j) or (j < len(found) and agree_from(i, j + 1))
        return j < len(found) and _alike(expected[i], found[j]) and agree_from(i + 1, j + 1)

    return agree_from(0, 0)


def telling(text: str) -> list[str]:
    """The numbers, units and names of code in a text, and its "..."."""
    # "a/..." begins with a name, and what follows may be any number of them.
    text = re.sub(r"(\S)\.\.\.(?=\W*(?:\s|$))", r"\1... ... ", text)
    marks = "()[]{},;:"
    pieces = (piece.strip(marks if _ANY in piece else marks + ".") for piece in text.split())
    return [piece.strip("'\"`") for piece in pieces if piece and not _WORD.fullmatch(piece)]


def _alike(shown: str, printed: str) -> bool:
    number, other = _NUMBER.fullmatch(shown), _NUMBER.fullmatch(printed)
    if not number or not other:
        pattern = ".*".join(map(re.escape, shown.split(_ANY)))
        return re.fullmatch(pattern, printed) is not None
    one, two = (float(text.rstrip("%KMBT").replace(",", "")) for text in (shown, printed))
    step = 10.0 ** -len(number[1]) if number[1] else 0.0
    return number[2] == other[2] and math.isclose(one, two, rel_tol=5e-3, abs_tol=1.001 * step)


def cells(notebook: Path, kind: str) -> list[str]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == kind]


def links(page: Path) -> list[str]:
    """The targets of a page's or a notebook's links within the repository, without anchors."""
    is_notebook = page.suffix == ".ipynb"
    text = "\n".join(cells(page, "markdown")) if is_notebook else page.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in _LINK.findall(_CODE.sub("", text))]
    return [target for target in targets if target]
