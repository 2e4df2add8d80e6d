"""What ends one of several processes ends all of them, in time, with an error and a save.

Each test starts processes of `ending.py`. Where hosts can be made, in network namespaces, a cable
is cut, too.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cables import Hosts, can_make_hosts
from places import HELPERS, ROOT
from ports import free_port

pytestmark = pytest.mark.long

SCRIPT = HELPERS / "ending.py"
# A minute for all processes to end; the machine may be busy with other tests.
SECONDS = 60
TERMINATED = 143


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the processes of a run have ended: exit statuses, None of one that had to be killed."""

    statuses: list[int | None]
    printed: list[str]
    steps: list[int]


def ended(
    folder: Path,
    count: int,
    victim: int,
    event: str,
    act: str = "",
    hosts: Hosts | None = None,
    stall: int = 600,
) -> Ended:
    """Starts processes, waits until all have come to the event, and then until they have ended.

    Args:
        folder: An empty folder that all processes see.
        count: Number of processes.
        victim: Number of the process that the event happens to.
        event: See `ending.py`.
        act: "all" or a number sends SIGTERM to all processes or to one, "cut" cuts the victim's
            cable.
        hosts: The hosts of the processes; None for this one.
        stall: The option `stall_seconds`.
    """
    address = f"{hosts.address if hosts else 'localhost'}:{free_port()}"
    arguments = [str(count), address, str(victim), event, str(folder)]
    own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}", "JAX_PLATFORMS": "cpu"}
    running, files = [], [folder / f"printed-{i}" for i in range(count)]
    for i in range(count):
        command = [sys.executable, str(SCRIPT), str(i), *arguments]
        with files[i].open("w") as file:
            running.append(
                subprocess.Popen(
                    hosts.on(i, command) if hosts else command,
                    env={**os.environ, "XLA_FLAGS": "", "STALL": str(stall), **own},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        _wait(lambda: all((folder / f"reached-{i}").exists() for i in range(count)), 4 * SECONDS)
        time.sleep(1)  # until the others wait for the victim
        for i, process in enumerate(running):
            if act in ("all", str(i)):
                process.send_signal(signal.SIGTERM)
        if act == "cut":
            assert hosts is not None
            hosts.cut(victim)
        left = [p for i, p in enumerate(running) if i != victim or event not in ("stop", "busy")]
        _wait(lambda: all(process.poll() is not None for process in left), SECONDS)
        statuses = [process.poll() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    names = [path.name for path in (folder / "run").iterdir()]
    return Ended(
        statuses=statuses,
        printed=[file.read_text(errors="replace") for file in files],
        steps=sorted(int(name) for name in names if name.isdigit()),
    )


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)


def last_error(printed: str) -> str:
    """The last line with an error's name, which says why a process has ended."""
    return re.findall(r"^.*Error: .*$", printed, re.M)[-1]


CASES = [(2, 0), (2, 1), (4, 2)]


@pytest.mark.parametrize(("count", "victim"), CASES)
@pytest.mark.parametrize("to", ["all", "other", "victim"])
def test_sigterm_saves_the_last_step_though_a_process_waits_for_data(tmp_path, count, victim, to):
    act = {"all": "all", "other": str((victim + 1) % count), "victim": str(victim)}[to]
    found = ended(tmp_path, count, victim, "stuck", act)
    assert found.statuses == [TERMINATED] * count, found.printed
    assert found.steps[-1] == 5


@pytest.mark.parametrize(("count", "victim"), CASES)
@pytest.mark.parametrize("event", ["kill", "stop"])
def test_a_process_that_is_lost_ends_all_others(tmp_path, count, victim, event):
    found = ended(tmp_path, count, victim, event)
    for i, printed in enumerate(found.printed):
        if i != victim:
            assert found.statuses[i] == 1, printed
            assert f"process {victim}" in last_error(printed), printed
    assert found.steps


@pytest.mark.parametrize(("count", "victim"), CASES)
@pytest.mark.parametrize("event", ["stop", "busy"])
def test_sigterm_ends_all_but_a_process_that_can_not_be_interrupted(tmp_path, count, victim, event):
    found = ended(tmp_path, count, victim, event, "all")
    for i, printed in enumerate(found.printed):
        if i != victim:
            assert found.statuses[i] == TERMINATED, printed
            assert f"process {victim}" in last_error(printed), printed


@pytest.mark.parametrize(("count", "victim"), CASES)
def test_an_error_in_one_process_is_quoted_by_all_and_the_last_step_is_saved(
    tmp_path, count, victim
):
    found = ended(tmp_path, count, victim, "error")
    assert found.statuses == [1] * count, found.printed
    assert all("OSError: a disk of this process alone" in text for text in found.printed)
    assert found.steps[-1] == 5


@pytest.mark.parametrize(("count", "victim"), CASES)
def test_a_stall_ends_all_with_their_stacks_and_the_last_step_saved(tmp_path, count, victim):
    found = ended(tmp_path, count, victim, "stuck", stall=10)
    assert found.statuses == [1] * count, found.printed
    for printed in found.printed:
        assert "StalledError" in last_error(printed) and "ending.py" in printed, printed
    assert found.steps[-1] == 5


@pytest.mark.skipif(not can_make_hosts(), reason="needs root, iproute2 and unshare, to make hosts")
@pytest.mark.parametrize(("count", "victim"), CASES)
def test_a_cable_that_is_cut_ends_both_sides(tmp_path, count, victim):
    with Hosts(count) as hosts:
        found = ended(tmp_path, count, victim, "none", "cut", hosts)
    assert found.statuses == [1] * count, found.printed
    for i, printed in enumerate(found.printed):
        if i != victim:
            assert f"process {victim}" in last_error(printed), printed
    assert found.steps
