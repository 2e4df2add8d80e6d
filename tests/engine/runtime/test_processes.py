"""Two processes with two simulated devices each share a run, and what ends one ends both."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1

import megatrain_jax as mt
import processes_state as state
import small
from cables import Hosts, can_make_hosts
from device_pairs import PAIRS
from inside import spec_of
from megatrain_jax._src.engine import start
from megatrain_jax._src.engine.state.processes import Processes
from messages import tells
from places import HELPERS, ROOT
from ports import free_port
from processes import BEGINS
from runs import check_same_bits
from zoo import CASES

pytestmark = pytest.mark.together("both")
SCRIPT = HELPERS / "processes.py"
SECONDS = 240
# Statistics of as many features as could be rows of the batch are one of them.
STATISTICS = next(pair for pair in PAIRS if pair[0] == "batchnorm_nnx")
SAMPLE = [STATISTICS, random.Random(1).choice([pair for pair in PAIRS if pair != STATISTICS])]
# State of its own in each process, from which numbers are drawn.
DRAWN = next(pair for pair in PAIRS if pair[0] == "dropout_nnx")
# In one process, too, four microbatches change the gradients of these by up to 6e-6.
NOISY = ("array_constant", "while_two")
DIVISIBLE = [
    pair for pair in PAIRS if CASES[pair[0]].microbatches and pair[0] not in NOISY and pair != DRAWN
]
COPIED = [DRAWN, random.Random(2).choice(DIVISIBLE)]
# Plain fp32 is up to 3e-6 from float64 after three steps of this model, and 1e-6 after one.
AMPLIFYING = next(pair for pair in PAIRS if pair[0] == "nnx_scan")
REST = [pair for pair in PAIRS if pair not in (*SAMPLE, AMPLIFYING)]


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


@dataclass(frozen=True, kw_only=True)
class Both:
    """What two processes of several scenarios have done.

    Attributes:
        folder: The folder that the scenarios were given.
        results: By scenario, what each process found; empty where a process ended early.
        statuses: Exit statuses.
        printed: Of each process what it printed.
    """

    folder: Path
    results: dict[str, list[Any]]
    statuses: list[int]
    printed: list[str]

    def told(self, scenario: str) -> list[str]:
        """What each process printed in a scenario."""
        begin = f"{BEGINS}{scenario}\n"
        return [text.split(begin)[1].split(BEGINS)[0] for text in self.printed]


def started(folder: Path, *scenarios: list[Any]) -> Both:
    """Two processes that take part in scenarios, each a name and arguments, one after the other."""
    files = [folder / f"result-{i}.json" for i in range(2)]
    rows = [["2", str(free_port()), json.dumps(scenarios)]] * 2
    statuses, printed = in_both([str(SCRIPT)], rows, RESULT=[*map(str, files)])
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    names = [name for name, *_ in scenarios]
    results = {name: [row.get(name) for row in found] for name in names}
    return Both(folder=folder, results=results, statuses=statuses, printed=printed)


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[Any, Any]]:
    """By setting, a trainer of this process after two steps, and their losses."""
    trainers = {name: state.trainer(name) for name in state.SETTINGS}
    return {name: (trainer, state.losses(trainer, range(2))) for name, trainer in trainers.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, alone: dict[str, tuple[Any, Any]]) -> Both:
    """The scenarios that no process dies of, in the same two processes."""
    folder = tmp_path_factory.mktemp("both")
    for name, (trainer, _) in alone.items():
        trainer.save(folder / f"{name}-alone")
    both = started(
        folder,
        ["equivalence", _named(SAMPLE)],
        ["per_process", _named(COPIED)],
        ["copies", str(folder / "copies")],
        ["states", str(folder)],
        ["predictions"],
        ["completed", str(folder / "completed")],
        ["endings", str(folder / "endings")],
    )
    assert both.statuses == [0, 0], both.printed
    return both


def _named(pairs: list[tuple[str, str]]) -> str:
    return ",".join(":".join(pair) for pair in pairs)


@pytest.mark.exhaustive
def test_two_processes_agree_with_plain_jax(both):
    assert both.results["equivalence"] == [{}, {}]


@pytest.mark.exhaustive
def test_processes_that_each_hold_all_state_agree_with_plain_jax(both):
    assert both.results["per_process"] == [{}, {}]


@pytest.mark.exhaustive
def test_state_goes_between_runs_that_share_it_and_runs_that_copy_it(both):
    first, second = both.results["copies"]
    expected = plain_losses(8)
    for name in ("few", "shared", "few shared", "own"):
        row = first[name]
        assert row == second[name], "both have the same losses, evaluations and bits"
        np.testing.assert_allclose(row["losses"], expected[: len(row["losses"])], rtol=1e-5)
    assert first["own"]["evaluated"] == first["shared"]["evaluated"] == [3, 4, 6, 8]
    assert tells(first["error"]["raised"], "process 1", "OSError: a disk")
    assert first["written"] and not second["written"], "of copies the first process writes one"


@pytest.mark.exhaustive
def test_what_crosses_the_network_is_as_planned(tmp_path):
    """Gradients once per step with copies of the state; else weights for each microbatch, too."""
    if not can_make_hosts():
        pytest.skip("makes hosts: needs root and network namespaces")
    files = [tmp_path / str(i) for i in range(2)]
    with Hosts(2) as hosts:
        address = f"{hosts.address}:{free_port()}"
        script = [sys.executable, str(HELPERS / "network_bytes.py")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
        running = [
            subprocess.Popen(hosts.on(i, [*script, str(i), address, str(file)]), env=environment)
            for i, file in enumerate(files)
        ]
        assert [process.wait(SECONDS) for process in running] == [0, 0]
    for copied, shared in (json.loads(file.read_text()) for file in files):
        assert shared[0] > 10 * copied[0]  # eight microbatches
        # Plans are of NCCL. Gloo sums for one process as for all: gradients arrive twice.
        shared[0] += 8 * copied[0] // 2
        for planned, received in (copied, shared):
            assert planned <= received < 1.05 * planned, (copied, shared)


@pytest.mark.exhaustive
def test_each_process_gets_the_rows_of_its_own_batches(both):
    own = [[2 * n + 20 * i] for i in range(2) for size in (4, 3, 1) for n in range(size)]
    assert both.results["predictions"] == [own[:8], own[8:]]


@pytest.mark.long
def test_two_processes_agree_with_plain_jax_on_all_pairs(tmp_path):
    copied = [pair for pair in DIVISIBLE if pair not in COPIED]
    calls = {"equivalence": REST, "first_step": [AMPLIFYING], "per_process": copied}
    rest = started(tmp_path, *([name, _named(pairs)] for name, pairs in calls.items()))
    assert rest.results == {name: [{}, {}] for name in calls}, rest.printed
    assert rest.statuses == [0, 0]


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


@pytest.mark.exhaustive
def test_what_ends_a_run_in_one_process_ends_it_in_both(both):
    results, printed, folder = (
        both.results["endings"],
        both.told("endings"),
        both.folder / "endings",
    )
    first, second = results
    expected = plain_losses(8)
    np.testing.assert_allclose(first["whole"]["losses"], expected, rtol=1e-5)
    assert first["whole"]["evaluated"] == [3, 6, 8]
    assert first["again"]["losses"] == first["whole"]["losses"]
    assert set(first["whole"]["slowest"]) <= {0.0, 1.0}
    for name in ("whole", "again", "data", "resumed"):
        assert first[name] == second[name]
    assert tells(first["error"]["raised"], "process 1", "OSError: a disk")
    assert second["error"]["raised"].startswith("OSError: a disk")
    assert first["error"]["losses"] == second["error"]["losses"]
    assert len(first["data"]["losses"]) == 5
    assert tells(printed[0], "`data`", "1 of 2")
    np.testing.assert_allclose(first["resumed"]["losses"], expected, rtol=1e-5)
    for result in results:
        for name, argument in (("steps", "`steps`"), ("optimizer", "optimizer")):
            assert tells(result[name]["raised"], "ValueError:", argument, "same")
        for name, argument in (("folder", "checkpoint_dir"), ("resume", "resume")):
            assert tells(result[name]["raised"], "ValueError:", f"`{argument}`", "same")
    assert tells(printed[0], "training", "4 CPUs")
    assert "training" not in printed[1]
    last_step = len(first["error"]["losses"])
    for name, step in (("whole", 8), ("error", last_step), ("data", 8)):
        assert (folder / name / str(step) / "megatrain.json").is_file()
    assert_goes_on_alone(folder / "whole", expected)


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


@pytest.mark.exhaustive
def test_an_error_in_one_process_before_any_step_leaves_no_other_waiting(both):
    first, second = both.results["completed"]
    assert tells(first["raised"], "PeerEndedError:", "process 1", "OSError: " + ALONE)
    assert second["raised"] == "OSError: " + ALONE
    assert tells(first["unstarted"], "PeerEndedError:", "process 1")
    assert ALONE in first["unstarted"] and ALONE in second["unstarted"]
    assert not [path for path in (both.folder / "completed").iterdir() if path.name.isdigit()]
    assert first["plan"] == second["plan"] and first["plan"][:2] == [2, 2]  # of one host
    alone, apart = first["plan"][2].count("each device"), first["plan"][2].count("each host")
    assert alone and not apart


def test_processes_on_cpus_plan_by_the_largest_of_them(monkeypatch):
    own, gather = 2**30, Processes.gather

    def beside_a_larger_one(self: Processes, where: str, value: Any) -> list[Any]:
        return [*gather(self, where, value), *([own + 1] if value == own else [])]

    monkeypatch.setattr(start, "process_base_bytes", lambda: own)
    monkeypatch.setattr(Processes, "gather", beside_a_larger_one)
    assert spec_of(small.trainer()).base_bytes == own + 1


@pytest.mark.parametrize("index", [0, 1])
def test_each_process_says_where_it_and_another_one_are(index, monkeypatch):
    points = ["step 3", "an evaluation"]
    processes = Processes()
    processes.count, processes.index = 2, index
    rows = [{"where": where, "value": None} for where in points]
    monkeypatch.setattr(processes, "_exchange", lambda message: rows)
    with pytest.raises(RuntimeError, match=rf"\b{index} .*{points[index]}, .*{points[1 - index]}"):
        processes.agree(points[index], lambda: {"`steps`": 3})


@pytest.mark.exhaustive
def test_a_signal_to_one_process_ends_both_with_the_last_step_saved(tmp_path):
    both = started(tmp_path, ["signalled", str(tmp_path / "run"), "SIGTERM"])
    results, statuses, printed = both.results["signalled"], both.statuses, both.printed
    assert (results, statuses) == ([None, None], [143, 143]), printed
    assert tells(printed[0], "SIGTERM", "step")
    assert "SIGTERM" not in printed[1]
    steps = sorted(int(path.name) for path in (tmp_path / "run").iterdir())
    assert steps[-1] in (3, 4) and (tmp_path / "run" / str(steps[-1]) / "megatrain.json").is_file()


@pytest.mark.exhaustive
def test_a_process_killed_while_it_writes_ends_the_other_which_says_so(tmp_path):
    both = started(tmp_path, ["signalled", str(tmp_path / "run"), "SIGKILL"])
    results, statuses, printed = both.results["signalled"], both.statuses, both.printed
    assert statuses[1] == -signal.SIGKILL
    assert statuses[0] != 0 or results[0]["raised"] is not None
    told = f"{results[0]}{printed[0]}"
    assert "PeerEndedError" in told and "process 1" in told, told
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.isdigit()] == ["2"]
    assert (tmp_path / "run" / "2" / "megatrain.json").is_file()


@pytest.mark.exhaustive
def test_the_first_process_killed_while_it_writes_ends_the_other_which_says_so(tmp_path):
    both = started(tmp_path, ["signalled", str(tmp_path / "run"), "SIGKILL", 0])
    assert both.statuses[0] == -signal.SIGKILL
    # JAX's own service, which was the first process's, ends with it, and aborts the second one.
    told = f"{both.results['signalled'][1]}{both.printed[1]}"
    assert "PeerEndedError" in told and "process 0" in told, told
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.isdigit()] == ["2"]


@pytest.mark.exhaustive
def test_each_of_two_processes_writes_and_reads_its_own_part_of_a_checkpoint(both, alone):
    """Of odd leaves and of codes; what two wrote one reads, plain Orbax too, and the reverse."""
    digests = {name: state.digest(trainer) for name, (trainer, _) in alone.items()}
    results, folder = both.results["states"], both.folder
    for name, (trainer, expected) in alone.items():
        pair = [result[name] for result in results]
        assert {k: v for k, v in pair[0].items() if k != "bytes"} == {
            k: v for k, v in pair[1].items() if k != "bytes"
        }
        row = pair[0]
        assert not row["early"], "published before all had written"
        # A last bit of a gradient decides how a master in bfloat16 is rounded at random.
        num = 2 if name == "full" else 1
        np.testing.assert_allclose(row["losses"][:num], expected[:num], rtol=1e-5)
        assert row["again"] == row["after"]
        saved, restored, from_one = row["digests"]
        assert saved == restored and from_one == digests[name]
        trainer.restore(folder / name)
        assert state.digest(trainer) == saved
        if name == "full":
            check_same_bits(v1.load(str(folder / name))["params"], trainer.params)
        for kind in ("written", "read"):
            halves = [result["bytes"][kind] for result in pair]
            assert max(halves) < 0.6 * sum(halves), "each has half of it, and a little"
    for result, begin in zip(results, ("process 1: ", ""), strict=True):
        assert tells(
            result["refused"], "CheckpointError:", folder / "damaged", "params/layer/w", "differs"
        )
        assert result["refused"].startswith(begin or str(folder))
    for result, told in zip(results, ("process 1: OSError", "OSError"), strict=True):
        (said,) = result["full disk"]
        assert told in said
        assert result["own"]
        assert result["on disks"]["disks"] == result["on disks"]["memory"]
        _, whole, one_by_one = result["on disks"]["disks"]
        assert one_by_one == whole[: len(one_by_one)] != []
        assert "ACTIVATION" in result["on disks"]["kinds"]
    logged = [result["logged"] for result in results]
    assert logged[0] == logged[1] and len(logged[0]["records"]) == 6
    rows = (folder / "0" / "log.csv").read_text().splitlines()
    assert len(rows) == 5 and "eval_loss" in rows[0]
    assert len((folder / "0" / "log.jsonl").read_text().splitlines()) == 4
    assert not (folder / "1").exists(), "only the first process writes"
    assert [path.name for path in (folder / "best").iterdir()] == [logged[0]["best"]]
    assert {path.name for path in (folder / "run").iterdir()} == {"4", "5", "6"}


@pytest.mark.exhaustive
def test_parameters_that_one_process_reads_alone_are_an_error(tmp_path):
    both = started(tmp_path, ["alone"])
    first, second = both.results["alone"]
    assert tells(first, "PeerEndedError:", "process 1", "parameters") and second is None
    assert both.statuses == [1, 1], both.printed


@pytest.mark.exhaustive
def test_the_page_s_script_runs_in_two_processes(tmp_path):
    page = ROOT / "docs" / "several_gpus.md"
    blocks = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.M | re.S)
    (script,) = (block for block in blocks if "localhost:" in block)
    text = script.replace("localhost:12345", f"localhost:{free_port()}")
    assert text != script
    (tmp_path / "train.py").write_text(text)
    statuses, printed = in_both(["train.py"], [[], []], cwd=tmp_path)
    assert statuses == [0, 0], printed
    assert {path.name for path in (tmp_path / "runs" / "two").iterdir()} == {"10", "20"}
    records = json.loads((tmp_path / "runs" / "two.json").read_text())
    assert [record["step"] for record in records] == list(range(1, 21))
