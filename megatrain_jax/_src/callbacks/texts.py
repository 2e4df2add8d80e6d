"""Tables of texts, such as samples: as plain text, as Markdown, and in a file beside a log."""

import html
import os
import re
from collections.abc import Iterable
from pathlib import Path

from megatrain_jax._src.callbacks.callback import Rows
from megatrain_jax._src.common.outside import naming
from megatrain_jax._src.common.unfinished import naming_file

_HEADER = re.compile(r"step (\d+): ")


def as_text(step: int, name: str, rows: Rows) -> str:
    r"""A table as plain text, one value per line, under a header that no value can look like.

    Examples:
        >>> print(as_text(3, "samples", [{"prompt": "1 2", "text": "3\nstep 4: 5"}]))
        step 3: samples
          prompt: 1 2
          text: 3
            step 4: 5
        <BLANKLINE>
    """
    lines = [f"step {step}: {name}\n"]
    for row in rows:
        lines += [f"  {key}: {_indented(value)}\n" for key, value in row.items()]
    return "".join(lines)


def as_markdown(rows: Rows) -> str:
    r"""A table as Markdown, with its texts escaped.

    Examples:
        >>> print(as_markdown([{"prompt": "a|b", "text": "<c>\nd"}]))
        | prompt | text |
        |---|---|
        | a&#124;b | &lt;c&gt;<br>d |
    """
    header = [f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
    return "\n".join([*header, *(f"| {' | '.join(map(_cell, row.values()))} |" for row in rows)])


class TextFile:
    """The file beside a log for its tables, created with the first one."""

    def __init__(self, log: Path):
        """Names the file after its log: `run.csv.txt` beside `run.csv`."""
        self._path = log.with_name(log.name + ".txt")

    def remove_later(self, num_steps: int) -> None:
        """Removes the file's tables of later steps."""
        if not self._path.exists():
            return
        kept, step = [], 0
        with naming(self._path):
            for line in self._path.read_text(encoding="utf-8").split("\n"):
                header = _HEADER.match(line)
                step = int(header[1]) if header else step
                if line and step <= num_steps:
                    kept.append(line + "\n")
        replace_file(self._path, kept)

    def add(self, step: int, name: str, rows: Rows) -> None:
        """Adds a table."""
        with naming_file(self._path), self._path.open("a", encoding="utf-8", newline="") as file:
            file.write(as_text(step, name, rows))


def replace_file(path: Path, lines: Iterable[str]) -> None:
    """Replaces a file atomically: readers see either the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    with naming_file(new), new.open("w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
    os.replace(new, path)


def _indented(value: object) -> str:
    # `splitlines` knows every character that a reader may treat as a line end.
    first, *others = str(value).splitlines() or [""]
    return "\n".join([first, *(f"    {line}" for line in others)])


def _cell(value: object) -> str:
    return "<br>".join(html.escape(str(value)).replace("|", "&#124;").splitlines())
