"""Prints places whose style is worth a look; it decides nothing and never fails.

    python tests/taste.py

Listed are long files and functions, names that two files or classes share, docstrings that begin
with a question word, prose with many pronouns in place of nouns, code wider than the site's column,
and the number of entries in the site's navigation.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("helpers")))

from pages import PAGES, code_lines
from places import ROOT

SOURCES = ROOT / "megatrain_jax"
PRONOUNS = frozenset({"what", "those", "other", "others", "whose", "which"})
QUESTIONS = ("What ", "How ", "Where ", "When ", "Which ", "Who ", "Of ", "By ", "For ")
_SHOWN_CODE = re.compile(r"^```.*?^```|<!--.*?-->|`[^`]*`|\]\([^)]*\)", re.M | re.S)


def prose(path: Path) -> str:
    """The text of a page without code and targets of links; docstrings and comments of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return _SHOWN_CODE.sub(" ", text)
    found = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(found + [t.string for t in tokens if t.type == tokenize.COMMENT])


def pronouns(path: Path) -> float:
    """Pronouns per 1,000 words of a file's prose."""
    words = re.findall(r"[a-z']+", prose(path).lower())
    return 1000 * sum(word in PRONOUNS for word in words) / max(len(words), 200)


def of_source(path: Path) -> Iterator[str]:
    """What is worth a look in one file of Python."""
    text = path.read_text(encoding="utf-8")
    if len(text.splitlines()) > 600:
        yield f"{len(text.splitlines())} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[bool(ast.get_docstring(node)) :] or node.body
            if (lines := (body[-1].end_lineno or 0) - body[0].lineno + 1) > 60:
                yield f"{node.name} has {lines} lines"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if (ast.get_docstring(node) or "").startswith(QUESTIONS):
                yield f"line {getattr(node, 'lineno', 1)}: the docstring begins with a question"


def main() -> None:
    files = sorted(SOURCES.rglob("*.py"))
    for path in files:
        for found in of_source(path):
            print(f"{path.relative_to(ROOT)}: {found}")
    classes = [
        node.name
        for path in files
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    names = Counter(classes + [path.name for path in files if path.name != "__init__.py"])
    print("shared names:", *sorted(name for name, count in names.items() if count > 1))
    rates = {path.relative_to(ROOT): pronouns(path) for path in [*files, *PAGES]}
    for path in sorted(rates, key=lambda path: -rates[path])[:12]:
        print(f"{path}: {rates[path]:.1f} pronouns per 1,000 words")
    for page in PAGES:
        for line in code_lines(page):
            if page.is_relative_to(ROOT / "docs") and len(line) > 80:
                print(f"{page.relative_to(ROOT)}: wider than 80 columns: {line}")
    entries = re.findall(r"^ +- .*\.(?:md|ipynb)", (ROOT / "mkdocs.yml").read_text(), re.M)
    print(len(entries), "pages in the navigation")


if __name__ == "__main__":
    main()
