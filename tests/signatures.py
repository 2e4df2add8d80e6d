"""Writes the options that records declare into the public calls that take them.

    python tests/signatures.py

An option is declared once, in `engine/options/options.py`: its type and default as a field, its
text in the record's docstring, its check in `__post_init__`. This script gives `fit`, `train`,
`Trainer`, `plan` and `compare_plans` the keyword, so that type checkers, `help()`, notebooks and
the site show it. One call per record has the whole text, the others its first sentence; what a
docstring adds after "see `...`." stays as it is. Hints about calls that lack an option get its
name. A test fails while any of these is out of date.
"""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SOURCES = Path(__file__).parents[1] / "megatrain_jax/_src"
_DECLARED = _SOURCES / "engine/options/options.py"
_HINTS = _SOURCES / "common/other_libraries.py"
# The hints' lists, their records, and the names in them that no record has.
_LISTS = {"RUN_OPTIONS": ("Options", ["params"]), "LOOP_OPTIONS": ("LoopOptions", [])}
# The calls, their records of options, and the call that has a record's whole text, if another one.
CALLS: list[tuple[str, str, dict[str, str | None]]] = [
    ("engine/trainer.py", "Trainer.__init__", {"Options": None}),
    ("engine/fit.py", "fit", {"LoopOptions": None, "Options": "Trainer"}),
    ("engine/fit.py", "train", {"LoopOptions": "fit"}),
    ("engine/planning.py", "plan", {"Options": "Trainer", "MachineOptions": None}),
    ("engine/planning.py", "compare_plans", {"Options": "plan", "MachineOptions": "plan"}),
]
_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Declared:
    """An option: source of its type and default, and its text."""

    annotation: str
    default: str
    text: str


def declared(source: str) -> dict[str, dict[str, Declared]]:
    """The options of each record, by name, from the source of their module."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            texts = _entries(ast.get_docstring(node) or "", "Attributes")
            found[node.name] = {
                field.target.id: Declared(
                    annotation=ast.unparse(field.annotation),
                    default=ast.unparse(field.value).replace("'", '"'),
                    text=texts[field.target.id],
                )
                for field in node.body
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and field.value is not None
            }
    return found


def written(source: str, name: str, records: dict[str, str | None], options: Any) -> str:
    """A module's source with the keywords and texts of one call brought up to date."""
    for edit in (_docstring, _signature):
        edits = edit(source, _function(source, name), records, options)
        for (start, end), text in sorted(edits, reverse=True):
            source = source[:start] + text + source[end:]
    return source


def _function(source: str, name: str) -> ast.FunctionDef:
    found: Any = ast.parse(source)
    for part in name.split("."):
        found = next(node for node in found.body if getattr(node, "name", None) == part)
    return found


def _signature(source: str, node: ast.FunctionDef, records: Any, options: Any) -> Iterator[Any]:
    """Replaces the keywords after those that only this call has."""
    known = {name for record in records for name in options[record]}
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    own = [(arg, default) for arg, default in pairs if arg.arg not in known]
    lines = [f"{ast.unparse(a)}{f' = {ast.unparse(d)}' if d else ''}" for a, d in own]
    for record in records:
        for name, option in options[record].items():
            lines.append(f"{name}: {option.annotation} = {option.default}")
    first, last = node.args.kwonlyargs[0], node.args.kw_defaults[-1]
    assert last is not None
    span = _offset(source, first), _offset(source, last, end=True)
    yield span, ", ".join(lines)


def _docstring(source: str, node: ast.FunctionDef, records: Any, options: Any) -> Iterator[Any]:
    """Replaces the entries of the options among the arguments."""
    literal: Any = node.body[0]
    text = ast.get_docstring(node) or ""
    before = _entries(text, "Args")
    after = {n: t for n, t in before.items() if all(n not in options[r] for r in records)}
    for record, see in records.items():
        for name, option in options[record].items():
            after[name] = _entry(option.text, see, before.get(name, ""))
    indent = " " * (node.col_offset + 8)
    entries = [
        textwrap.fill(
            f"{name}: {' '.join(entry.split())}",
            width=_WIDTH,
            initial_indent=indent,
            subsequent_indent=indent + "    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        for name, entry in after.items()
    ]
    start, end = _offset(source, literal), _offset(source, literal, end=True)
    quoted = source[start:end]
    head, rest = quoted.split("Args:\n", 1)
    others = rest[re.search(r"\n\n|\n *\"\"\"", rest).start() :]  # type: ignore[union-attr]
    yield (start, end), f"{head}Args:\n" + "\n".join(entries) + others


def _lists(source: str, options: Any) -> str:
    """The hints' source with the names of the options in its lists."""
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in _LISTS:
            record, others = _LISTS[name]
            start, end = _offset(source, node.value), _offset(source, node.value, end=True)
            lines = textwrap.wrap(" ".join((*others, *options[record])), _WIDTH - 10)
            names = "\n".join(f'    "{line} "' for line in lines).removesuffix(' "') + '"'
            source = f"{source[:start]}(\n{names}\n).split(){source[end:]}"
    return source


def _entry(text: str, see: str | None, before: str) -> str:
    if see is None:
        return text
    own = before.partition(f"see `{see}`.")[2].strip()
    first, *more = re.split(r"(?<=\.)\s+(?=[A-Z\"`])", text, maxsplit=1)
    return f"{first[:-1]}; see `{see}`. {own}" if more or own else first


def _entries(text: str, section: str) -> dict[str, str]:
    """The entries of a section of a docstring in Google style."""
    body = re.search(rf"{section}:\n(.*?)(?:\n\n|\Z)", text, re.S)
    found = re.split(r"^    (\w+): ", body[1] if body else "", flags=re.M)[1:]
    return {n: " ".join(t.split()) for n, t in zip(found[::2], found[1::2], strict=True)}


def _offset(source: str, node: ast.expr | ast.arg | ast.stmt, *, end: bool = False) -> int:
    """Position of a node's beginning or end in the source, which is ASCII in these places."""
    line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
    lines = source.splitlines(keepends=True)
    assert line is not None and column is not None
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def up_to_date() -> dict[Path, str]:
    """Every module that options are written into, as it should be."""
    options = declared(_DECLARED.read_text())
    sources = {_HINTS: _lists(_HINTS.read_text(), options)}
    for file, name, records in CALLS:
        path = _SOURCES / file
        sources[path] = written(sources.get(path) or path.read_text(), name, records, options)
    ruff = [sys.executable, "-m", "ruff", "format", "--quiet", "--stdin-filename"]
    return {
        path: subprocess.run(
            [*ruff, str(path), "-"], input=text, capture_output=True, check=True, text=True
        ).stdout
        for path, text in sources.items()
    }


if __name__ == "__main__":
    for path, text in up_to_date().items():
        path.write_text(text)
