"""The script that every change has to pass leaves nothing behind."""

import os
import re
import select
import subprocess
from pathlib import Path

import pytest

from places import ROOT

SCRIPT = ROOT / ".ci" / "run"


def ends(process: int) -> bool:
    """Whether a process has ended, or ends within ten seconds."""
    try:
        opened = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([opened], [], [], 10)[0])
    finally:
        os.close(opened)


@pytest.mark.exhaustive
def test_a_failed_step_ends_what_runs_beside_it(tmp_path: Path):
    # The script up to its first step, and steps of a trial in place of its own.
    start, found, _ = SCRIPT.read_text().partition("\nsay() {")
    assert found
    command = re.search(r"beside within all (timeout .*?) \d+ python", SCRIPT.read_text())
    assert command, "the script's step with a time limit"
    child = f"sleep 100 & echo $! >{tmp_path}/child; wait"
    steps = f"beside {command[1]} 100 bash -c '{child}'\nuntil [ -s {tmp_path}/child ]; do :; done"
    trial = tmp_path / ".ci" / "run"
    trial.parent.mkdir()
    trial.write_text(f"{start}\n{steps}\necho $scratch >scratch; false\n")
    assert subprocess.run(["bash", str(trial)], timeout=60).returncode == 1
    assert ends(int((tmp_path / "child").read_text()))
    assert not Path((tmp_path / "scratch").read_text().strip()).exists()
