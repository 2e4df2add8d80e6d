"""Plain prose: pronouns in place of nouns stay rare, package by package.

A sentence such as "What those have that others lack" makes a reader guess its nouns. This test
counts such words in docstrings, comments and pages. `MOST` may only fall: lower a number after
rewriting. If it fails, rewrite the sentence with its noun and its verb; swapping a word is no help.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "megatrain_jax" / "_src"
# The modules of the library that are in no package.
BESIDE = "*.py"
PRONOUNS = frozenset({"what", "those", "other", "others", "whose", "which"})
# Pronouns per 1,000 words that each place may have.
MOST = {
    "README.md": 5,
    "CONTRIBUTING.md": 4,
    "CHANGELOG.md": 4,
    "docs": 5,
    "experiments": 4,
    BESIDE: 6,
    "adapt": 5,
    "callbacks": 4,
    "checkpoint": 7,
    "cli": 6,
    "common": 6,
    "data": 5,
    "grpo": 4,
    "kernels": 5,
    "models": 4,
    "objectives": 2,
    "options": 5,
    "program": 5,
    "report": 6,
    "runtime": 5,
    "schedule": 4,
    "spec": 3,
    "startup": 5,
    "state": 3,
    "train": 4,
}
SHOWN_CODE = re.compile(r"^```.*?^```|<!--.*?-->|`[^`]*`|\]\([^)]*\)", re.M | re.S)


def prose(path: Path) -> str:
    """The text of a page without code and targets of links; docstrings and comments of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return SHOWN_CODE.sub(" ", text)
    found = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(found + [t.string for t in tokens if t.type == tokenize.COMMENT])


def rate(texts: list[str]) -> float:
    """Pronouns per 1,000 words."""
    words = [word for text in texts for word in re.findall(r"[a-z']+", text.lower())]
    return 1000 * sum(word in PRONOUNS for word in words) / len(words)


def files_of(place: str) -> list[Path]:
    """The files of a place: a page, a folder of pages, a package, or the modules in none."""
    if place.endswith(".md"):
        return [ROOT / place]
    if place in ("docs", "experiments"):
        return sorted((ROOT / place).rglob("*.md"))
    return sorted(SOURCES.glob(place) if place == BESIDE else (SOURCES / place).rglob("*.py"))


@pytest.mark.parametrize(("place", "most"), MOST.items())
def test_prose_stays_plain(place: str, most: float):
    rates = {str(p.relative_to(ROOT)): rate([prose(p)]) for p in files_of(place)}
    worst = sorted(rates, key=rates.__getitem__)[:-4:-1]
    assert rate([prose(p) for p in files_of(place)]) <= most, f"rewrite sentences, first in {worst}"


def test_every_package_has_its_limit():
    packages = {path.parent.name for path in SOURCES.glob("*/*.py")}
    assert packages <= MOST.keys()


def test_the_readme_comes_to_its_point():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 180 and "result = mt.fit(" in "\n".join(lines[:40])


def test_pronouns_are_counted_and_code_is_not(tmp_path: Path):
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("What is `which`?\n\n```\nwhat\n```\n[those](what.md) others\n")
    module.write_text('"""What others do."""\n\nwhat = "which"  # whose\n')
    assert rate([prose(page)]) == 1000 * 3 / 4
    assert rate([prose(module)]) == 1000 * 3 / 4
