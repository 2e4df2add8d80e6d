"""Bugs put in by hand, one at a time: each has to be noticed by the tests nearest to it."""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGE = "megatrain_jax"
SOURCES = f"{PACKAGE}/_src"
ROOMS = (
    "build checkpoint cli data kernels models program report runtime schedule state train".split()
)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A bug: what goes wrong, where, the text without and with it, and who should notice."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, package: Path) -> str:
        """The file's source with the bug in."""
        text = (package / self.file).read_text()
        found = text.count(self.old)
        assert found == 1, (
            f"tests/mutations.txt, {self.what!r}: this text is in {self.file} {found} times, not "
            f"once:\n{self.old}\nBring it up to date with the source."
        )
        return text.replace(self.old, self.new)


def read_mutations() -> list[Mutation]:
    entries = (TESTS / "mutations.txt").read_text().split("\n# ")[1:]
    found = []
    for entry in entries:
        what, file, *lines = filter(None, entry.splitlines())
        marked = {mark: [s[2:] for s in lines if s[:2] == mark] for mark in ("- ", "+ ", "! ")}
        assert sum(map(len, marked.values())) == len(lines), f"{what}: {lines}"
        old, new, tests = marked.values()
        arguments = tuple(word for line in tests for word in shlex.split(line))
        found.append(
            Mutation(what=what, file=file, old="\n".join(old), new="\n".join(new), tests=arguments)
        )
    return found


MUTATIONS = read_mutations()


def test_each_mutation_applies_once_and_compiles():
    for mutation in MUTATIONS:
        assert mutation.old != mutation.new and mutation.tests, mutation.what
        compile(mutation.apply(ROOT / SOURCES), mutation.file, "exec")
        for name in mutation.tests:
            assert not name.startswith("test_") or (TESTS / name.split("::")[0]).exists(), name
    assert len({mutation.what for mutation in MUTATIONS}) == len(MUTATIONS)


def test_mutations_are_in_all_rooms():
    assert len(MUTATIONS) >= 60
    files = {mutation.file for mutation in MUTATIONS}
    assert {file.split("/")[0] for file in files if "/" in file} == set(ROOMS)
    assert {"losses.py", "train/source.py", "train/loop.py", "runtime/interrupt.py"} <= files


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what.rstrip("."))
def test_a_bug_is_noticed(mutation, tmp_path):
    package = tmp_path / PACKAGE
    shutil.copytree(ROOT / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    sources = tmp_path / SOURCES
    (sources / mutation.file).write_text(mutation.apply(sources))
    tests = [str(TESTS / name) if name.startswith("test_") else name for name in mutation.tests]
    options = ["-x", "-n", "0", "-p", "no:cacheprovider", "--timeout", "300", "--tb", "no"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", *options, *tests],
        cwd=tmp_path,  # which is first in the path of `python -m`
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    summary = done.stdout.strip().splitlines()[-1]
    if done.returncode == 0 and "passed" not in summary:
        pytest.skip(f"its tests need what is not installed: {summary}")
    assert done.returncode != 0, f"nothing has noticed: {mutation.what} ({mutation.tests})"
    # A signal that a bug lets through may end pytest itself.
    failed = done.returncode == 1 or "KeyboardInterrupt" in done.stdout
    assert failed, f"its tests could not be run:\n{done.stdout}"
