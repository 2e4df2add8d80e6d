"""Two processes with two simulated devices each share a run, and what ends one ends both."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1

import megatrain_jax as mt
import processes_state as state
from megatrain_jax._src.state.processes import Processes
from runs import check_same_bits
from test_several_devices import PAIRS
from zoo import CASES

SCRIPT = Path(__file__).with_name("processes.py")
SECONDS = 240
SAMPLE = random.Random(1).sample(PAIRS, 3)
REST = [pair for pair in PAIRS if pair not in SAMPLE]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def in_both(
    command: list[str],
    arguments: list[list[str]],
    cwd: Path | None = None,
    **variables: list[str],
) -> tuple[list[int], list[str]]:
    """Exit statuses of two processes, each called with its number, and what they printed."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=2")
    running = [
        subprocess.Popen(
            [sys.executable, *command, str(i), *own],
            env={**os.environ, "XLA_FLAGS": flags, **{k: v[i] for k, v in variables.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=cwd,
        )
        for i, own in enumerate(arguments)
    ]
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [process.returncode for process in running], printed


def started(folder: Path, scenario: str, *arguments: str) -> tuple[list[Any], list[int], list[str]]:
    """Two processes' results (None where there is none), exit statuses and what they printed."""
    files = [folder / f"result-{i}.json" for i in range(2)]
    rows = [["2", str(free_port()), scenario, *arguments]] * 2
    statuses, printed = in_both([str(SCRIPT)], rows, RESULT=[*map(str, files)])
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return results, statuses, printed


@pytest.mark.parametrize(
    "pairs", [SAMPLE, pytest.param(REST, marks=pytest.mark.long)], ids=["sample", "rest"]
)
def test_two_processes_agree_with_plain_jax(pairs, tmp_path):
    names = ",".join(":".join(pair) for pair in pairs)
    results, statuses, printed = started(tmp_path, "equivalence", names)
    assert (results, statuses) == ([{}, {}], [0, 0]), printed


ALONE = "a disk of this process alone"


def plain_losses(num_steps: int) -> list[float]:
    """The losses of the run that `processes.training` makes, on one device of this process."""
    case = CASES["two_towers"]
    result = mt.fit(
        case.build(),
        case.loss_fn,
        [case.batch(seed) for seed in range(num_steps)],
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        precision=mt.Precision(compute="float32"),
        progress=False,
    )
    return [record["loss"] for record in result.history]


def test_what_ends_a_run_in_one_process_ends_it_in_both(tmp_path):
    results, statuses, printed = started(tmp_path, "endings", str(tmp_path))
    assert statuses == [0, 0], printed
    first, second = results
    expected = plain_losses(8)
    np.testing.assert_allclose(first["whole"]["losses"], expected, rtol=1e-5)
    assert first["whole"]["evaluated"] == [3, 6, 8]
    assert first["again"]["losses"] == first["whole"]["losses"]
    for name in ("whole", "again", "data", "resumed"):
        assert first[name] == second[name]
    assert "process 1 has ended: OSError: a disk" in first["error"]["raised"]
    assert second["error"]["raised"].startswith("OSError: a disk")
    assert first["error"]["losses"] == second["error"]["losses"]
    assert len(first["data"]["losses"]) == 5
    assert "`data` has ended in 1 of 2 processes" in printed[0]
    np.testing.assert_allclose(first["resumed"]["losses"], expected, rtol=1e-5)
    for result in results:
        assert result["steps"]["raised"].startswith("ValueError: `steps` must be the same")
        assert result["optimizer"]["raised"].startswith(
            "ValueError: the optimizer must be the same"
        )
    assert "training on 4 CPUs" in printed[0]
    assert "training" not in printed[1]
    last_step = len(first["error"]["losses"])
    for name, step in (("whole", 8), ("error", last_step), ("data", 8)):
        assert (tmp_path / name / str(step) / "megatrain.json").is_file()
    assert_goes_on_alone(tmp_path / "whole", expected)


def assert_goes_on_alone(folder: Path, losses: list[float]) -> None:
    """Plain Orbax reads two processes' checkpoint, and one device goes on from it."""
    tree: Any = v1.load(str(folder / "8"))
    case = CASES["two_towers"]
    trainer = mt.Trainer(
        case.build(),
        case.loss_fn,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        case.batch(0),
        precision=mt.Precision(compute="float32"),
        progress=False,
    )
    trainer.restore(folder / "8")
    saved = jax.tree.leaves(tree["params"])
    restored = jax.tree.leaves(trainer.params)
    assert sorted(x.shape for x in saved) == sorted(x.shape for x in restored)
    total = sum(float(np.abs(np.float64(x)).sum()) for x in saved)
    np.testing.assert_allclose(
        total, sum(float(np.abs(np.float64(x)).sum()) for x in restored), rtol=1e-12
    )
    assert [record["loss"] for record in trainer.history] == pytest.approx(losses, rel=1e-5)


def test_an_error_in_one_process_before_any_step_leaves_no_other_waiting(tmp_path):
    results, statuses, printed = started(tmp_path, "completed", str(tmp_path / "run"))
    assert statuses == [0, 0], printed
    first, second = results
    assert first["raised"] == "PeerEndedError: process 1 has ended: OSError: " + ALONE
    assert second["raised"] == "OSError: " + ALONE
    assert first["unstarted"].startswith("PeerEndedError: process 1 has ended: ")
    assert ALONE in first["unstarted"] and ALONE in second["unstarted"]
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.isdigit()]
    assert first["plan"] == second["plan"] and first["plan"][:2] == [2, 2]  # of one host
    assert "of each device" in first["plan"][2] and "of each host" not in first["plan"][2]


@pytest.mark.parametrize("index", [0, 1])
def test_each_process_says_where_it_and_another_one_are(index, monkeypatch):
    points = ["step 3", "an evaluation"]
    processes = Processes()
    processes.count, processes.index = 2, index
    rows = [{"where": where, "value": None} for where in points]
    monkeypatch.setattr(processes, "_exchange", lambda message: rows)
    told = f"{index} at {points[index]}, {1 - index} at {points[1 - index]}. "
    with pytest.raises(RuntimeError, match=told):
        processes.agree(points[index], lambda: {"`steps`": 3})


def test_a_signal_to_one_process_ends_both_with_the_last_step_saved(tmp_path):
    results, statuses, printed = started(tmp_path, "signalled", str(tmp_path / "run"), "SIGTERM")
    assert (results, statuses) == ([None, None], [143, 143]), printed
    assert "Interrupted by SIGTERM after step" in printed[0]
    assert "Interrupted" not in printed[1]
    steps = sorted(int(path.name) for path in (tmp_path / "run").iterdir())
    assert steps[-1] in (3, 4) and (tmp_path / "run" / str(steps[-1]) / "megatrain.json").is_file()


def test_a_process_killed_while_it_writes_ends_the_other_which_says_so(tmp_path):
    results, statuses, printed = started(tmp_path, "signalled", str(tmp_path / "run"), "SIGKILL")
    assert statuses[1] == -signal.SIGKILL
    assert statuses[0] != 0 or results[0]["raised"] is not None
    told = f"{results[0]}{printed[0]}"
    assert "ended without a word" in told or "heartbeat" in told.lower(), told
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.isdigit()] == ["2"]
    assert (tmp_path / "run" / "2" / "megatrain.json").is_file()


def test_each_of_two_processes_writes_and_reads_its_own_part_of_a_checkpoint(tmp_path):
    """Of odd leaves and of codes; what two wrote one reads, plain Orbax too, and the reverse."""
    alone, expected = {}, {}
    for name in state.SETTINGS:
        alone[name] = state.trainer(name)
        expected[name] = state.losses(alone[name], range(2))
        alone[name].save(tmp_path / f"{name}-alone")
    first_rows = {name: state.digest(trainer) for name, trainer in alone.items()}
    results, statuses, printed = started(tmp_path, "states", str(tmp_path))
    assert statuses == [0, 0], printed
    for name, trainer in alone.items():
        pair = [result[name] for result in results]
        assert {k: v for k, v in pair[0].items() if k != "bytes"} == {
            k: v for k, v in pair[1].items() if k != "bytes"
        }
        row = pair[0]
        assert not row["early"], "published before all had written"
        # A last bit of a gradient decides how a master in bfloat16 is rounded at random.
        num = 2 if name == "full" else 1
        np.testing.assert_allclose(row["losses"][:num], expected[name][:num], rtol=1e-5)
        assert row["again"] == row["after"]
        saved, restored, from_one = row["digests"]
        assert saved == restored and from_one == first_rows[name]
        trainer.restore(tmp_path / name)
        assert state.digest(trainer) == saved
        if name == "full":
            check_same_bits(v1.load(str(tmp_path / name))["params"], trainer.params)
        for kind in ("written", "read"):
            both = [result["bytes"][kind] for result in pair]
            assert max(both) < 0.6 * sum(both), "each has half of it, and a little"
    for result, begin in zip(results, ("process 1: ", ""), strict=True):
        told = f"({begin}CheckpointError: {tmp_path}/damaged is damaged: params/layer/w is not"
        assert told in result["refused"], result["refused"]
    for result, told in zip(results, ("process 1: OSError", "OSError"), strict=True):
        (said,) = result["full disk"]
        assert f"could not be written: CheckpointError: {told}" in said or f": {told}" in said
        assert result["own"]
    logged = [result["logged"] for result in results]
    assert logged[0] == logged[1] and len(logged[0]["records"]) == 6
    rows = (tmp_path / "0" / "log.csv").read_text().splitlines()
    assert len(rows) == 5 and "eval_loss" in rows[0]
    assert len((tmp_path / "0" / "log.jsonl").read_text().splitlines()) == 4
    assert not (tmp_path / "1").exists(), "only the first process writes"
    assert [path.name for path in (tmp_path / "best").iterdir()] == [logged[0]["best"]]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"4", "5", "6"}


def test_the_page_s_script_runs_in_two_processes(tmp_path):
    page = Path(__file__).parents[1] / "docs" / "several_gpus.md"
    section = page.read_text().split("### Two processes of one host")[1]
    script = section.split("```py\n")[1].split("```")[0]
    text = script.replace("localhost:12345", f"localhost:{free_port()}")
    assert text != script
    (tmp_path / "train.py").write_text(text)
    statuses, printed = in_both(["train.py"], [[], []], cwd=tmp_path)
    assert statuses == [0, 0], printed
    assert {path.name for path in (tmp_path / "runs" / "two").iterdir()} == {"10", "20"}
    records = json.loads((tmp_path / "runs" / "two.json").read_text())
    assert [record["step"] for record in records] == list(range(1, 21))
