"""Reads documentation as a user does: code blocks, what they print, cells, links."""

import contextlib
import doctest
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))

_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.M | re.S)
_SHOWN = re.compile(r"^```(?:python|py|bash|yaml|json)\n(.*?)^```$", re.M | re.S)
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)
_LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]+)")
_CHECKER = doctest.OutputChecker()
_LOOSELY = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of Python in a page.

    Attributes:
        code: The code.
        printed: The block of text right behind it, which is what it prints; "..." stands for
            anything, and line breaks don't count.
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
    """Whether a block printed what its page says, if that says anything."""
    return block.printed is None or _CHECKER.check_output(block.printed, printed, _LOOSELY)


def cells(notebook: Path, kind: str) -> list[str]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == kind]


def links(page: Path) -> list[str]:
    """The targets of a page's or a notebook's links within the repository, without anchors."""
    is_notebook = page.suffix == ".ipynb"
    text = "\n".join(cells(page, "markdown")) if is_notebook else page.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in _LINK.findall(_CODE.sub("", text))]
    return [target for target in targets if target]
