"""Real limits of a process's memory: a run keeps to them or is refused in words, never killed."""

import contextlib
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from messages import tells
from places import HELPERS

PROGRAM = HELPERS / "limited.py"
GROUPS = Path("/sys/fs/cgroup")


def end_of(what, kind, mib, group=None):
    """How the program ended within a limit, in its own words."""
    command = [sys.executable, str(PROGRAM), what, kind, str(0 if group else mib)]
    if group is not None:  # in the group from its first byte on
        entered = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        command = ["sh", "-c", entered, "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


@contextlib.contextmanager
def group_of(mib: int) -> Iterator[Path | None]:
    """A control group with so much memory, of either version; None where none can be made."""
    name = f"megatrain-{uuid.uuid4().hex}"
    for root, limit in ((GROUPS / "memory", "limit_in_bytes"), (GROUPS, "max")):
        folder = root / name
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                if os.access(folder / f"memory.{limit}", os.W_OK):
                    (folder / f"memory.{limit}").write_text(str(mib * 2**20))
                    yield folder
                    return
            finally:
                folder.rmdir()
    yield None


def check_refused(said):
    assert re.search(r"refused: .*[\d.]+ [GM]iB .*host.*[\d.]+ [GM]iB .*`host_budget`", said), said


@pytest.mark.exhaustive
def test_a_run_that_would_not_survive_a_limit_is_refused_in_words():
    check_refused(end_of("train", "data", 650))


@pytest.mark.exhaustive
def test_a_process_on_a_cpu_takes_no_more_than_its_plan_says():
    planned, taken = map(int, end_of("measure", "data", 0).split()[:2])
    assert taken <= planned < 1.6 * taken


@pytest.mark.exhaustive
def test_a_limit_that_strikes_while_memory_is_pinned_ends_in_words():
    said = end_of("pin", "data", 400)
    assert tells(said, "0 B", "1.00 GiB", "host_budget")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["addresses", "data", "group"])
def test_runs_survive_any_limit_or_are_refused(kind):
    """Of limits from far too little to plenty, none kills a run or has an allocation fail."""
    ends = []
    for mib in (300, 500, 700, 900, 1200, 1600, 2000, 2500):
        with group_of(mib) if kind == "group" else contextlib.nullcontext() as group:
            said = end_of("train", "data" if kind == "group" else kind, mib, group)
        if said != "survived\n":
            check_refused(said)
        ends.append(said == "survived\n")
    assert ends == sorted(ends) and not ends[0] and ends[-1]
