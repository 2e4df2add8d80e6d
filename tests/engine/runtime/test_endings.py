"""What ends one of several processes ends all of them, in time, and the same command resumes.

Each test starts processes of `ending.py`, waits until all have ended, and starts them again: they
resume from the last step that was saved, and come to the parameters of an undisturbed run, bit for
bit. Where hosts can be made, in network namespaces, a cable is cut, too.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megatrain_jax as mt
from cables import Hosts, can_make_hosts
from forked import Forked
from megatrain_jax._src.common.object_paths import path_of
from megatrain_jax._src.engine.checkpoint import folder as folders
from object_server import BUCKET, s3_server
from places import HELPERS, ROOT
from ports import free_port

SCRIPT = HELPERS / "ending.py"
# A minute for all processes to end; the machine may be busy with other tests.
SECONDS = 60
TERMINATED = 143
# What the victim can't end by itself.
HELD = ("stop",)
COPIES = {"COPIES": "1"}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the processes of a run have ended: exit statuses, None of one that had to be killed."""

    statuses: list[int | None]
    printed: list[str]
    steps: list[int]


class Runs:
    """Runs of several processes that share checkpoints, one after the other."""

    def __init__(
        self,
        folder: Path,
        count: int,
        victim: int,
        *,
        hosts: Hosts | None = None,
        checkpoints: str | None = None,
        environment: dict[str, str] | None = None,
    ):
        """Starts nothing yet.

        Args:
            folder: An empty folder that all processes see.
            count: Number of processes.
            victim: Number of the process that events happen to.
            hosts: The hosts of the processes; None for this one.
            checkpoints: Where they are; None for a folder.
            environment: Further variables.
        """
        self._folder, self._count, self._victim = folder, count, victim
        self._hosts, self._environment = hosts, environment or {}
        self.checkpoints = checkpoints or str(folder / "run")

    def run(self, event: str, act: str = "", **variables: Any) -> Ended:
        """Starts processes, and waits until the event has happened, and until all have ended.

        Args:
            event: See `ending.py`.
            act: "all" or a number sends SIGTERM to all processes or to one, "cut" cuts the victim's
                cable.
            **variables: See `ending.py`.
        """
        (work := self._folder / event).mkdir()
        hosts, count, victim = self._hosts, self._count, self._victim
        address = f"{hosts.address if hosts else 'localhost'}:{free_port()}"
        arguments = [str(count), address, str(victim), event, str(work), self.checkpoints]
        own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}", "JAX_PLATFORMS": "cpu"}
        own |= {"XLA_FLAGS": "", **self._environment, **{k: str(v) for k, v in variables.items()}}
        running, files = [], [work / f"printed-{i}" for i in range(count)]
        for i in range(count):
            command, environment = [str(SCRIPT), str(i), *arguments], {**os.environ, **own}
            if not hosts:
                running.append(Forked(command, environment, files[i]))
                continue
            with files[i].open("w") as file:
                streams = {"stdout": file, "stderr": subprocess.STDOUT}
                command = hosts.on(i, [sys.executable, *command])
                running.append(subprocess.Popen(command, env=environment, **streams))
        try:
            # The others may not come to it, because they wait for the victim.
            reached = work / f"reached-{victim}"
            _wait(lambda: reached.exists() or _ended(running), 4 * SECONDS)
            if act:
                time.sleep(1)  # until the others wait for the victim
            for i, process in enumerate(running):
                if act in ("all", str(i)):
                    process.send_signal(signal.SIGTERM)
            if act == "cut":
                assert hosts is not None
                hosts.cut(victim)
            began = time.monotonic()
            held = running[victim : victim + 1] if event in HELD else []
            _wait(lambda: _ended([p for p in running if p not in held]), SECONDS)
            seconds = time.monotonic() - began
            statuses = [process.poll() for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        steps = folders.steps(path_of(self.checkpoints))
        printed = [file.read_text(errors="replace") for file in files]
        print(f"{event} {act} of {victim} in {count}: {seconds:.1f} s, {statuses}, steps {steps}")
        print(*map(last_error, printed), sep="\n")
        return Ended(statuses=statuses, printed=printed, steps=steps)

    def check_resumed(self) -> None:
        """Starts the processes again, and compares with an undisturbed run."""
        found = self.run("none")
        assert found.statuses == [0] * self._count, found.printed
        final = _arrays(self._folder / "none" / "final.npz")
        assert final == undisturbed(self._count, "COPIES" in self._environment)


def _ended(running: list[Any]) -> bool:
    return all(process.poll() is not None for process in running)


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)


def _arrays(file: Path) -> dict[str, bytes]:
    with np.load(file) as arrays:
        return {name: arrays[name].tobytes() for name in arrays.files}


@functools.cache
def undisturbed(count: int, copies: bool = False) -> dict[str, bytes]:
    """The final parameters of processes that nothing has ended."""
    with tempfile.TemporaryDirectory() as folder:
        found = Runs(Path(folder), count, 0, environment=COPIES if copies else None).run("none")
        assert found.statuses == [0] * count, found.printed
        return _arrays(Path(folder) / "none" / "final.npz")


def last_error(printed: str) -> str:
    """The last line with an error's name, which says why a process has ended."""
    return ["", *re.findall(r"^.*Error: .*$", printed, re.M)][-1]


def each_case(names: str, *kinds: tuple[Any, ...]) -> Any:
    """Parametrises a test: what happens, the number of processes, and the one that it happens to.

    The first process runs JAX's service. Four processes are long, and so are two where something
    else happens to the same process, and the same to the other one.

    Args:
        names: Names of what happens.
        *kinds: Each begins with the processes of two that it happens to.
    """
    cases = []
    for victims, *values in kinds:
        for count, victim in ((2, 0), (2, 1), (4, 0), (4, 2)):
            tier = "exhaustive" if count == 2 and victim in victims else "long"
            cases.append(pytest.param(*values, count, victim, marks=getattr(pytest.mark, tier)))
    return pytest.mark.parametrize([*names.split(), "count", "victim"], cases)


@each_case(
    "to event",
    ((0,), "all", "stuck"),
    ((1,), "all", "busy"),
    ((1,), "other", "stuck"),
    ((0,), "other", "busy"),
    ((0,), "victim", "stuck"),
    ((1,), "victim", "busy"),
)
def test_sigterm_saves_the_last_step_though_a_process_waits_for_data(
    tmp_path, count, victim, to, event
):
    runs = Runs(tmp_path, count, victim)
    act = {"all": "all", "other": str((victim + 1) % count), "victim": str(victim)}[to]
    found = runs.run(event, act)
    assert found.statuses == [TERMINATED] * count, found.printed
    assert found.steps[-1] == 5
    runs.check_resumed()


@each_case("event disk", ((0, 1), "kill", False), ((1,), "kill", True), ((0, 1), "stop", False))
def test_a_process_that_is_lost_ends_all_others(tmp_path, count, victim, event, disk):
    runs = Runs(tmp_path, count, victim)
    found = runs.run(event, **({"DISK": tmp_path / "disk"} if disk else {}))
    assert not disk or not list((tmp_path / "disk").iterdir())
    for i, printed in enumerate(found.printed):
        if i != victim:
            assert found.statuses[i] == 1, printed
            assert f"process {victim}" in last_error(printed), printed
    assert found.steps[-1] >= (4 if victim else 2), "all have written step 4"
    runs.check_resumed()


@each_case("", ((0, 1),))
def test_a_process_that_is_killed_while_others_wait_for_it_in_jax_ends_them(
    tmp_path, count, victim
):
    """Those that JAX has told of a lost connection may be named, instead of the lost process."""
    runs = Runs(tmp_path, count, victim)
    found = runs.run("midstep")
    for i, printed in enumerate(found.printed):
        if i != victim:
            assert found.statuses[i] == 1, printed
            assert re.search(r"process \d", last_error(printed)), printed
    assert found.steps[-1] >= 2
    runs.check_resumed()


@each_case("", ((0, 1),))
def test_sigterm_ends_all_but_a_process_that_is_stopped(tmp_path, count, victim):
    runs = Runs(tmp_path, count, victim)
    found = runs.run("stop", "all")
    for i, printed in enumerate(found.printed):
        if i != victim:
            assert found.statuses[i] == TERMINATED, printed
            assert f"process {victim}" in last_error(printed), printed
    assert found.steps[-1] >= (4 if victim else 2), "all have written step 4"
    runs.check_resumed()


@each_case("event", ((1,), "kill"), ((0,), "stop"))
def test_a_process_with_all_state_saves_the_last_step_without_a_lost_one(
    tmp_path, count, victim, event
):
    """The folder is the first process's for as long as that one is there."""
    runs = Runs(tmp_path, count, victim, environment=COPIES)
    found = runs.run(event, "all" if event == "stop" else "")
    for i, printed in enumerate(found.printed):
        if i != victim:
            assert found.statuses[i] == (TERMINATED if event == "stop" else 1), printed
            assert f"process {victim}" in last_error(printed), printed
    assert found.steps[-1] >= (2 if (event, victim) == ("stop", 0) else 5)
    runs.check_resumed()


@each_case("event last", ((0,), "error", 5), ((1,), "callback", 4))
def test_an_error_in_one_process_is_quoted_by_all_and_the_last_step_is_saved(
    tmp_path, count, victim, event, last
):
    runs = Runs(tmp_path, count, victim)
    found = runs.run(event)
    assert found.statuses == [1] * count, found.printed
    said = "a disk of this process alone" if event == "error" else "a callback of this process"
    for i, printed in enumerate(found.printed):
        assert f"OSError: {said}" in printed, printed
        assert i == victim or f"process {victim}" in printed, printed
    assert found.steps[-1] >= last
    runs.check_resumed()


@each_case("event", ((1,), "stuck"), ((0,), "busy"))
def test_a_stall_ends_all_with_their_stacks_and_the_last_step_saved(tmp_path, count, victim, event):
    runs = Runs(tmp_path, count, victim)
    found = runs.run(event, STALL=5)
    assert found.statuses == [1] * count, found.printed
    for printed in found.printed:
        assert "StalledError" in last_error(printed) and "ending.py" in printed, printed
        assert f"process {victim}" in printed, printed
    assert found.steps[-1] == 5
    runs.check_resumed()


@each_case("", ((0, 1),))
def test_a_process_that_comes_too_late_ends_all(tmp_path, count, victim):
    runs = Runs(tmp_path, count, victim)
    found = runs.run("late", PATIENCE=2)
    for i, printed in enumerate(found.printed):
        assert found.statuses[i] == 1, printed
        if i == victim:
            assert "PeerEndedError" in last_error(printed), printed
        else:
            assert f"process {victim}" in last_error(printed), printed
    runs.check_resumed()


@pytest.mark.skipif(not can_make_hosts(), reason="needs root, iproute2 and unshare, to make hosts")
@each_case("", ((0, 1),))
def test_a_cable_that_is_cut_ends_both_sides(tmp_path, count, victim):
    with Hosts(count) as hosts:
        runs = Runs(tmp_path, count, victim, hosts=hosts)
        found = runs.run("slow", "cut")
        assert found.statuses == [1] * count, found.printed
        for i, printed in enumerate(found.printed):
            if i != victim:
                assert f"process {victim}" in last_error(printed), printed
        assert found.steps[-1] >= 2
        hosts.mend(victim)
        runs.check_resumed()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("event", "act"), [("kill", ""), ("slow", "1")])
def test_checkpoints_in_s3_are_resumed_from_without_a_folder_that_is_shared(tmp_path, event, act):
    pytest.importorskip("moto.server", reason="needs pip install 'moto[server]'")
    with s3_server() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        runs = Runs(tmp_path, 2, 1, checkpoints=f"s3://{BUCKET}/{event}")
        found = runs.run(event, act)
        assert found.statuses == ([TERMINATED] * 2 if act else [1, -signal.SIGKILL])
        assert found.steps[-1] >= (5 if act else 2)
        runs.check_resumed()
        layers = mt.load(runs.checkpoints)["layers"]  # in one process
        assert {i: layer["w"].tobytes() for i, layer in layers.items()} == undisturbed(2)
