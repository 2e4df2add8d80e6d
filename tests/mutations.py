"""Bugs put in by hand, one at a time: a test nearest to each has to fail, and only with it.

    python tests/mutations.py --sample 10 --seed "$(git rev-parse HEAD)"
    python tests/mutations.py learning softcap

The first command tries ten entries of mutations.txt, chosen by the seed: other ones for another
commit. The second one tries the entries whose first line contains one of the words; without words,
all are tried, which takes an hour on two cores.
"""

import argparse
import functools
import json
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGE = "megatrain_jax"
SOURCES = f"{PACKAGE}/_src"
SECONDS = 900  # for the tests of one entry, on a busy machine
# What tests import takes longer than most of them do, so it is imported once, in a process that
# the others are forked from.
_IMPORTED = ["flax.linen", "flax.nnx", "optax", "orbax.checkpoint", "pytest", "scipy", "tqdm"]
_IMPORTED += ["matplotlib.figure", "torch", "transformers.modeling_utils"]
_PASSED, _FAILED, _NONE = 0, 1, 5  # exit codes of pytest


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A bug: what goes wrong, the file, its text without and with the bug, and who notices it."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, package: Path) -> str:
        """Returns the file's source with the bug in."""
        text = (package / self.file).read_text()
        found = text.count(self.old)
        assert found == 1, (
            f"tests/mutations.txt, {self.what!r}: this text is in {self.file} {found} times, not "
            f"once:\n{self.old}\nBring it up to date with the source."
        )
        return text.replace(self.old, self.new)


def read_mutations() -> list[Mutation]:
    """Returns all entries of mutations.txt, in its order."""
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run of pytest.

    Attributes:
        status: Its exit code, None if it was stopped after `SECONDS`.
        failed: Ids of the tests that failed by themselves; an error in collecting, in a fixture or
            of time is no failure of a test.
        is_skipped: Whether tests were skipped and none ran.
        printed: The output.
    """

    status: int | None
    failed: tuple[str, ...]
    is_skipped: bool
    printed: str

    def complaint(self) -> str | None:
        """Returns why this doesn't show that tests notice a bug, None if it does."""
        if self.status is None:
            return f"its tests took more than {SECONDS} s:\n{self.printed}"
        if self.is_skipped:
            return f"its tests need a package:\n{self.printed}"
        if self.status == _NONE:
            return f"its tests do not exist, or are not run by default:\n{self.printed}"
        if self.status == _PASSED:
            return "nothing has noticed it"
        # A signal, hence a status below zero, may end a process whose test has failed: the bug has
        # left a thread behind.
        if self.status > _FAILED or not self.failed:
            return f"no test has failed by itself:\n{self.printed}"
        return None


class Recorder:
    """A plugin of pytest that writes down how tests end, when they do."""

    def __init__(self, report: Path):
        """Writes to the file `report`, a line for each test."""
        self._report = report

    def _write(self, *line: str) -> None:
        with self._report.open("a") as file:
            print(json.dumps(line), file=file)

    def pytest_collectreport(self, report) -> None:
        """A file was collected, or skipped as a whole."""
        if report.skipped:
            self._write("skipped", report.nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        """A phase of a test has ended."""
        if report.skipped:
            self._write("skipped", report.nodeid)
        elif report.when == "call":
            timed_out = "from pytest-timeout" in report.longreprtext
            self._write("failed" if report.failed and not timed_out else "ran", report.nodeid)


def run_pytest(folder: Path, programs: Path, options: list[str]) -> None:
    """Runs pytest in this process on the package in a folder, and ends the process."""
    os.setsid()
    printed = os.open(folder / "printed", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    settings = {
        "jax_compilation_cache_dir": str(programs),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    # Processes that tests start read the same from the environment.
    os.environ |= {name.upper(): str(value) for name, value in settings.items()}
    os.environ |= {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    import jax
    import pytest

    for name, value in settings.items():
        jax.config.update(name, value)
    sys.exit(pytest.main(options, plugins=[Recorder(folder / "report")]))


class Trial:
    """Tries bugs, several at once; all runs share compiled programs."""

    def __init__(self, scratch: Path):
        """Copies the package, without and with bugs, to folders in `scratch`."""
        self._scratch = scratch
        # With compiled files: to compile the package takes longer than many a test.
        shutil.copytree(ROOT / PACKAGE, scratch / "healthy" / PACKAGE)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(_IMPORTED)

    def with_bug(self, mutation: Mutation) -> Outcome:
        """Returns how a mutation's tests end with the bug, up to the first failure."""
        return self._run(mutation.tests, mutation)

    def without_bugs(self, tests: list[str]) -> Outcome:
        """Returns how tests, by their ids, end without a bug."""
        return self._run(tuple(str(ROOT / test) for test in tests), None)

    def _run(self, tests: tuple[str, ...], mutation: Mutation | None) -> Outcome:
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        healthy = self._scratch / "healthy" / PACKAGE
        shutil.copytree(healthy, folder / PACKAGE, copy_function=os.link)
        options = ["-c", str(ROOT / "pyproject.toml"), "-n", "0", "-p", "no:cacheprovider"]
        options += ["--tb", "short", "--timeout", "300"]
        # Some of what is imported belongs to plugins of pytest.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        if mutation:
            options += ["-x"]
            source = folder / SOURCES / mutation.file
            bug = mutation.apply(folder / SOURCES)
            source.unlink()  # the file is a link
            source.write_text(bug)
            for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*"):
                compiled.unlink()
        process = self._processes.Process(
            target=run_pytest,
            args=(folder, self._scratch / "programs", [*options, *map(located, tests)]),
        )
        process.start()
        process.join(SECONDS if mutation else None)
        assert process.pid, "a process that was started has a number"
        status = process.exitcode
        # Tests may have started processes.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        report = folder / "report"
        lines = [json.loads(x) for x in report.read_text().splitlines()] if report.exists() else []
        outcome = Outcome(
            status=status,
            failed=tuple(name for how, name in lines if how == "failed"),
            is_skipped={how for how, _ in lines} == {"skipped"},
            printed=(folder / "printed").read_text(errors="replace"),
        )
        shutil.rmtree(folder)
        return outcome


@functools.cache
def test_files() -> dict[str, Path]:
    """Returns the path of each test file by its name, which no other one has."""
    paths = list(TESTS.rglob("test_*.py"))
    found = {path.name: path for path in paths}
    assert len(found) == len(paths), "two test files have one name"
    return found


def located(argument: str) -> str:
    """Returns an argument of pytest with the path of the test file that it names, if it does."""
    if not argument.startswith("test_"):
        return argument
    name, *rest = argument.split("::")
    return "::".join([str(test_files()[name]), *rest])


@contextmanager
def trial() -> Iterator[Trial]:
    """Provides a `Trial` in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        yield Trial(Path(scratch))


def sample(mutations: list[Mutation], number: int, seed: str) -> list[Mutation]:
    """Returns some of the mutations, the same ones for the same seed."""
    return random.Random(seed).sample(mutations, min(number, len(mutations)))


def main() -> None:
    """Tries the mutations that the command line names, and says which are not noticed."""
    parser = argparse.ArgumentParser(description="Tries the bugs of mutations.txt.")
    parser.add_argument("words", nargs="*", help="of the entries' first lines; all without any")
    parser.add_argument("--sample", type=int, metavar="NUMBER", help="try some of them only")
    parser.add_argument("--seed", default="", help="what chooses them, such as a commit")
    parser.add_argument("--at-once", type=int, default=2, metavar="NUMBER")
    options = parser.parse_args()
    words = [word.lower() for word in options.words]
    chosen = [m for m in read_mutations() if not words or any(w in m.what.lower() for w in words)]
    if options.sample is not None:
        chosen = sample(chosen, options.sample, options.seed)
    if not chosen:
        parser.error(f"no entry of mutations.txt contains {' or '.join(options.words)}")

    def judge(mutation: Mutation) -> Outcome:
        start = time.monotonic()
        outcome = tried.with_bug(mutation)
        seconds = f"{time.monotonic() - start:.0f} s"
        said = outcome.complaint() or f"noticed by {outcome.failed[0]}"
        print(f"{mutation.file}: {mutation.what} ({seconds}): {said}", flush=True)
        return outcome

    with trial() as tried, ThreadPoolExecutor(options.at_once) as pool:
        outcomes = list(pool.map(judge, chosen))
        # One run for all: these tests have to pass without a bug.
        noticing = sorted({name for outcome in outcomes for name in outcome.failed})
        healthy = tried.without_bugs(noticing) if noticing else None
    noticed = [outcome.complaint() is None for outcome in outcomes]
    print(f"{sum(noticed)} of {len(chosen)} bugs are noticed")
    fails = healthy is not None and healthy.status != _PASSED
    if healthy and fails:
        print(f"the tests that noticed bugs do not all pass without them:\n{healthy.printed}")
    sys.exit(fails or not all(noticed))


if __name__ == "__main__":
    main()
