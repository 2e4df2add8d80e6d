"""The gallery's examples run as they are, with a few steps, and draw their pictures."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quickstart import rising_and_falling

from messages import tells
from places import ROOT

EXAMPLES = sorted((ROOT / "experiments" / "examples").glob("*.py"))
PAGE = ROOT / "docs" / "gallery.md"
# Modules that an example needs beyond the library's own.
NEEDS = {"mamba": "mamba2_jax"}


def example(name: str) -> Path:
    return ROOT / "experiments" / "examples" / f"{name}.py"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [p.stem for p in EXAMPLES if p.stem != "two_processes"])
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example(name)), "4"])
    names = runpy.run_path(str(example(name)))
    try:
        assert names["result"].ended == "done" and names["result"].trainer.num_steps == 4
        printed = capsys.readouterr().out
        assert str(names["result"].trainer.plan) in printed
        assert tells(printed, "samples", "step 4")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    finally:
        # JAX never forgets a class of modules, nor its methods' globals, a trainer among them.
        names.clear()


@pytest.mark.exhaustive
def test_two_processes_have_the_losses_of_one(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1")
    options: Any = {"cwd": tmp_path, "env": {**os.environ, "XLA_FLAGS": flags}}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, str(example("two_processes"))]
    running = [subprocess.Popen([*command, str(i), str(port), "4"], **options) for i in (0, 1)]
    try:
        printed = [process.communicate(timeout=200)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], printed
    assert tells(printed[0], "samples", "step 4") and "samples" not in printed[1]
    (gap,) = re.findall(r"^largest difference: (.*)$", printed[0], re.M)
    assert float(gap) < 1e-5
    assert (tmp_path / "two_processes.png").exists()


def test_the_gallery_shows_every_example():
    page = PAGE.read_text(encoding="utf-8")
    for path in EXAMPLES:
        assert f"../experiments/examples/{path.name}" in page
        assert f"pictures/{path.stem}.png" in page
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60, path


@pytest.mark.parametrize("steps", [6, 20, 2000])
def test_every_step_of_the_quickstart_learns(steps):
    rates = [np.asarray(rising_and_falling(3e-3, steps)(step)).item() for step in range(steps)]
    assert min(rates) > 0 and rates.index(max(rates)) == steps // 20
