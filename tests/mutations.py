"""Bugs put in by hand, one at a time: the tests nearest to each have to fail, and only with it.

    python tests/mutations.py --sample 10 --seed "$(git rev-parse HEAD)"
    python tests/mutations.py learning softcap

The first command tries ten entries of mutations.txt, chosen by the seed: other ones for another
commit. The second one tries the entries whose first line contains one of the words.
"""

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGE = "megatrain_jax"
SOURCES = f"{PACKAGE}/_src"
SECONDS = 900  # for the tests of one entry, on a busy machine
_PASSED, _FAILED = 0, 1  # the exit codes of pytest


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
        ran: Number of tests that were neither skipped nor stopped by an error around them.
        failed: Whether a test itself failed; an error in collecting, in a fixture or of time is
            no failure of a test.
        printed: The output.
    """

    status: int | None
    ran: int
    failed: bool
    printed: str


class Trial:
    """Tries mutations, several at once.

    Mutations with equal tests share the run without a bug, and all runs share compiled programs.
    """

    def __init__(self, scratch: Path):
        """Copies packages to folders in `scratch`."""
        self._scratch = scratch
        self._healthy: dict[tuple[str, ...], Outcome] = {}
        self._locks: defaultdict[tuple[str, ...], threading.Lock] = defaultdict(threading.Lock)

    def complaint(self, mutation: Mutation) -> str | None:
        """Returns why a mutation can't be said to be noticed, None if it is.

        Raises:
            ModuleNotFoundError: If all of its tests are skipped for want of a package.
        """
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        # With compiled files: to compile the package takes longer than many a test.
        shutil.copytree(ROOT / PACKAGE, folder / PACKAGE)
        with self._locks[mutation.tests]:
            healthy = self._healthy.get(mutation.tests)
            if healthy is None:
                healthy = self._healthy[mutation.tests] = self._run(folder, mutation.tests)
        if healthy.status == _PASSED and not healthy.ran:
            raise ModuleNotFoundError(f"its tests need a package:\n{healthy.printed}")
        if healthy.status != _PASSED:
            return f"its tests do not pass without the bug:\n{healthy.printed}"
        source = folder / SOURCES / mutation.file
        source.write_text(mutation.apply(folder / SOURCES))
        for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*"):
            compiled.unlink()
        with_bug = self._run(folder, mutation.tests)
        shutil.rmtree(folder)
        if with_bug.status == _PASSED:
            return "nothing has noticed it"
        # A signal, hence a status below zero, may end a process whose test has failed: the bug has
        # left a thread behind.
        if with_bug.status is None or with_bug.status > _FAILED or not with_bug.failed:
            return f"no test has failed by itself:\n{with_bug.printed}"
        return None

    def _run(self, folder: Path, tests: tuple[str, ...]) -> Outcome:
        """Runs tests on the package in a folder, up to the first failure."""
        arguments = [str(TESTS / name) if name.startswith("test_") else name for name in tests]
        report = folder / "report.xml"
        report.unlink(missing_ok=True)
        options = ["-x", "-n", "0", "-p", "no:cacheprovider", "--tb", "short"]
        options += ["--timeout", "300", "--junit-xml", str(report)]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", *options, *arguments],
            cwd=folder,  # first in the path of `python -m`
            env={
                **os.environ,
                "PYTHONPATH": str(folder),
                "JAX_COMPILATION_CACHE_DIR": str(self._scratch / "programs"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        status: int | None = None
        try:
            printed, _ = process.communicate(timeout=SECONDS)
            status = process.returncode
        except subprocess.TimeoutExpired:
            printed = f"stopped after {SECONDS} seconds"
        finally:
            if process.poll() is None:
                # Tests may have started processes, which hold the output open.
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        failures = [failure.get("message", "") for x in cases for failure in x.iter("failure")]
        return Outcome(
            status=status,
            ran=sum(x.find("skipped") is None and x.find("error") is None for x in cases),
            failed=any("from pytest-timeout" not in message for message in failures),
            printed=printed,
        )


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

    def judge(mutation: Mutation) -> bool:
        start = time.monotonic()
        try:
            complaint = tried.complaint(mutation)
        except ModuleNotFoundError as error:
            complaint = str(error)
        seconds = f"{time.monotonic() - start:.0f} s"
        print(f"{mutation.file}: {mutation.what} ({seconds}): {complaint or 'noticed'}", flush=True)
        return complaint is None

    with trial() as tried, ThreadPoolExecutor(options.at_once) as pool:
        noticed = list(pool.map(judge, chosen))
    print(f"{sum(noticed)} of {len(chosen)} bugs are noticed")
    sys.exit(not all(noticed))


if __name__ == "__main__":
    main()
