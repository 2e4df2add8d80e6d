"""The command, as a launcher starts it in several processes: they train one model."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cables import Hosts, can_make_hosts
from cli_runs import make_given, trained
from commands import BEGINS
from megatrain_jax import distributed
from megatrain_jax._src.lm.cli import main as command
from megatrain_jax._src.lm.cli.run_folder import RunFolder
from megatrain_jax._src.lm.cli.run_settings import PretrainSettings
from messages import tells
from places import HELPERS

SECONDS = 400
# The first test waits for the runs of all.
pytestmark = [pytest.mark.timeout(900), pytest.mark.together("runs")]


@dataclass(frozen=True)
class Ran:
    """What processes found: of each command, in each process, its exit status and its output."""

    statuses: list[list[int]]
    printed: list[list[str]]


def in_processes(
    folder: Path, count: int, devices: int, calls: list[Any], hosts: Hosts | None = None
) -> Ran:
    """Runs commands in processes that have what torchrun would tell them; each on its host."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", f"device_count={devices}")
    address = hosts.address if hosts else "localhost"
    shared = {"XLA_FLAGS": flags, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    command = [sys.executable, str(HELPERS / "commands.py"), json.dumps(calls)]
    files = [folder / f"statuses-{port}-{i}.json" for i in range(count)]
    running = [
        subprocess.Popen(
            hosts.on(i, command) if hosts else command,
            env={
                **os.environ,
                **shared,
                "WORLD_SIZE": str(count),
                "RANK": str(i),
                "RESULT": str(files[i]),
                "XDG_CACHE_HOME": str(folder),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for i in range(count)
    ]
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(file.exists() for file in files), printed
    found = [json.loads(file.read_text()) for file in files]
    told = [[part.partition("\n")[2] for part in text.split(BEGINS)[1:]] for text in printed]
    return Ran([*map(list, zip(*found, strict=True))], [*map(list, zip(*told, strict=True))])


PER_PROCESS = {"state_per_process": "true"}
EVALUATED = {"held_out": 0.2, "eval_every": 3}


def options(given: Path, out: Path, **more: Any) -> list[str]:
    named = {"model": given / "tiny", "data": given / "chats.jsonl", "out": out, "length": 32}
    named |= {"batch": 4, "steps": 6, "checkpoint-every": 2}
    named = {name.replace("_", "-"): value for name, value in (named | more).items()}
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def rewarded(given: Path, out: Path, **more: Any) -> list[str]:
    named = {
        "model": given / "tiny",
        "data": given / "prompts.jsonl",
        "rewards": f"{given}/rewards.py:different",
        "out": out,
        "steps": 3,
        "num-generations": 4,
        "prompts-per-step": 2,
        "max-completion-length": 6,
        "learning-rate": 1e-2,
        "log-completions": 1,
        "logs": "jsonl",
        # Completions are drawn by logits, whose rounding differs with the number of rows.
        "compute": "float32",
    }
    named |= {name.replace("_", "-"): value for name, value in more.items()}
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


# Another reward for each call and completion.
REWARDS = """
calls = []

def different(completion_ids, **columns):
    calls.append(0)
    return [len(ids) + 0.1 * (len(calls) + i) for i, ids in enumerate(completion_ids)]
"""


@dataclass(frozen=True)
class Runs:
    """The runs of these tests, in one folder; `first` two processes had, `last` two others."""

    folder: Path
    first: Ran
    last: Ran


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    given = make_given(folder)
    pairs = {"data": given / "pairs.jsonl", "objective": "dpo", "steps": 3}
    adapters = {"lora_rank": 2, "steps": 3, "export_as": "both"}
    prompts = [
        {"prompt": [{"role": "user", "content": f"count from {n}"}], "wanted": str(n)}
        for n in range(12)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "rewards.py").write_text(REWARDS)
    other = options(given, folder / "other", length=0)
    whole = options(given, folder / "whole", samples="count", **EVALUATED)
    again = options(given, folder / "resumed", **EVALUATED)
    first = in_processes(
        folder,
        2,
        2,
        [
            (["finetune", *again], 3),
            (["finetune", *whole], None),
            (["finetune", *whole], None),
            (["finetune", *options(given, folder / "pairs", **pairs)], None),
            (["finetune", *options(given, folder / "lora", **adapters)], None),
            (["merge", str(folder / "lora/adapter"), "--out", str(folder / "merged")], None),
            (["finetune", *other], None),
            (["grpo", *rewarded(folder, folder / "rewarded")], None),
            (["finetune", *options(given, folder / "own", **PER_PROCESS, **EVALUATED)], None),
            (["grpo", *rewarded(folder, folder / "rewarded own", **PER_PROCESS)], None),
        ],
    )
    alone = in_processes(folder, 1, 1, [(["finetune", *again], 4)])
    assert alone.statuses == [[130]], alone.printed
    last = in_processes(folder, 2, 1, [(["finetune", *again], None)])
    return Runs(folder, first, last)


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def check_near(a: Path, b: Path) -> None:
    mine, other = weights(a), weights(b)
    assert mine.keys() == other.keys()
    for name, x in mine.items():
        np.testing.assert_allclose(x, other[name], atol=2e-6, err_msg=name)


def history(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "report.json").read_text())["history"]


@pytest.mark.exhaustive
def test_two_processes_train_the_model_of_one(runs, tmp_path):
    assert runs.first.statuses[1] == [0, 0], runs.first.printed[1]
    first, other = runs.first.printed[1]
    assert tells(first, "2 processes", "4 devices", "6/6") and not other.strip()
    more = {"steps": 6, "model": str(runs.folder / "tiny"), **EVALUATED}
    data = str(runs.folder / "chats.jsonl")
    assert trained("finetune", runs.folder, tmp_path / "one", data=data, **more) == 0
    check_near(runs.folder / "whole/model", tmp_path / "one/model")
    losses = [record["loss"] for record in history(runs.folder / "whole")]
    np.testing.assert_allclose(losses, [r["loss"] for r in history(tmp_path / "one")], rtol=1e-6)


@pytest.mark.exhaustive
def test_four_processes_train_the_same_bits_as_two(runs, tmp_path):
    call = ["finetune", *options(runs.folder, tmp_path / "four", **EVALUATED)]
    ran = in_processes(tmp_path, 4, 1, [(call, None)])
    assert ran.statuses == [[0] * 4], ran.printed
    for name, x in weights(runs.folder / "whole/model").items():
        np.testing.assert_array_equal(x, weights(tmp_path / "four/model")[name], err_msg=name)


@pytest.mark.exhaustive
def test_a_run_continues_on_other_numbers_of_processes(runs):
    """From two processes to one to two."""
    assert runs.first.statuses[0] == [130, 130], runs.first.printed[0]
    assert runs.last.statuses == [[0, 0]], runs.last.printed
    assert [r["step"] for r in history(runs.folder / "resumed")] == [*range(1, 7)]
    check_near(runs.folder / "resumed/model", runs.folder / "whole/model")
    notes = json.loads((runs.folder / "resumed/notes.json").read_text())
    assert len(notes["began"].split()) == 3


@pytest.mark.exhaustive
def test_a_finished_run_is_finished_for_all(runs):
    assert runs.first.statuses[2] == [0, 0]
    first, other = runs.first.printed[2]
    assert tells(first, "done") and not other.strip()


@pytest.mark.exhaustive
def test_answers_of_the_reference_are_computed_by_all_and_known_to_all(runs, tmp_path):
    assert runs.first.statuses[3] == [0, 0], runs.first.printed[3]
    more = {"steps": 3, "objective": "dpo", "model": str(runs.folder / "tiny")}
    data = str(runs.folder / "pairs.jsonl")
    assert trained("finetune", runs.folder, tmp_path / "one", data=data, **more) == 0
    check_near(runs.folder / "pairs/model", tmp_path / "one/model")


@pytest.mark.exhaustive
def test_adapters_are_exported_once_and_merged_by_the_first(runs):
    assert runs.first.statuses[4:6] == [[0, 0], [0, 0]], runs.first.printed[4:6]
    check_near(runs.folder / "lora/model", runs.folder / "merged")
    left = [p.name for p in (runs.folder / "lora").iterdir() if "unfinished" in p.name]
    assert not left


@pytest.mark.exhaustive
def test_wrong_options_are_told_by_all(runs):
    assert runs.first.statuses[6] == [2, 2]
    assert all(tells(text, "length") for text in runs.first.printed[6])
    assert not (runs.folder / "other").exists()


@pytest.mark.exhaustive
def test_processes_that_each_hold_all_state_train_what_those_that_share_it_do(runs):
    assert runs.first.statuses[8] == [0, 0], runs.first.printed[8]
    check_near(runs.folder / "own/model", runs.folder / "whole/model")
    own, shared = (history(runs.folder / name) for name in ("own", "whole"))
    for name in ("loss", "eval_loss", "tokens"):
        found = [[record.get(name) for record in of] for of in (own, shared)]
        np.testing.assert_allclose(*np.array(found, float), rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "name"), [(7, "rewarded"), (9, "rewarded own")])
def test_processes_write_and_reward_what_one_process_does(number, name, runs, tmp_path):
    assert runs.first.statuses[number] == [0, 0], runs.first.printed[number]
    assert command.main(["grpo", *rewarded(runs.folder, tmp_path / "one")]) == 0
    mine, other = history(runs.folder / name), history(tmp_path / "one")
    for here, there in zip(mine, other, strict=True):
        assert here["reward"] == there["reward"] and here["tokens"] == there["tokens"]
        np.testing.assert_allclose(here["loss"], there["loss"], atol=2e-5)
    (texts, others) = (
        (folder / "log.jsonl.txt").read_text() for folder in (runs.folder / name, tmp_path / "one")
    )
    assert texts == others


@pytest.mark.skipif(not can_make_hosts(), reason="needs root, iproute2 and unshare, to make hosts")
@pytest.mark.parametrize(
    "count",
    [pytest.param(2, marks=pytest.mark.exhaustive), pytest.param(4, marks=pytest.mark.long)],
)
def test_hosts_train_reward_and_sample_what_processes_of_one_host_do(count, runs, tmp_path):
    whole = options(runs.folder, tmp_path / "whole", samples="count", **EVALUATED)
    calls = [whole, rewarded(runs.folder, tmp_path / "rewarded")]
    with Hosts(count) as hosts:
        rows = [
            ([name, *call], None) for name, call in zip(("finetune", "grpo"), calls, strict=True)
        ]
        ran = in_processes(tmp_path, count, 4 // count, rows, hosts)
    assert ran.statuses == [[0] * count] * 2, ran.printed
    (first, *others), _ = ran.printed
    assert tells(first, f"{count} processes", f"{count} hosts", "4 devices")
    assert "finished" not in "".join(others)
    here, there = (
        text[text.index("samples after step 6") :] for text in (first, runs.first.printed[1][0])
    )
    assert here.splitlines()[:2] == there.splitlines()[:2]
    for name in ("whole", "rewarded"):
        for tensor, x in weights(runs.folder / name / "model").items():
            np.testing.assert_array_equal(x, weights(tmp_path / name / "model")[tensor], tensor)
        for record in history(tmp_path / name):
            assert record["slowest_process"] in range(count) and record["slowest_seconds"] > 0
    texts = [(folder / "rewarded/log.jsonl.txt").read_text() for folder in (runs.folder, tmp_path)]
    assert texts[0] == texts[1]


@pytest.mark.exhaustive
def test_samples_are_written_by_all_and_shown_by_the_first(runs):
    first, other = runs.first.printed[1]
    assert "samples after step 6" in first and not other.strip()


def test_a_command_for_one_runs_in_the_first_process_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "node0:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    for index, status in (("0", 2), ("1", 0)):  # there is no such adapter
        monkeypatch.setenv("JAX_PROCESS_ID", index)
        assert command.main(["merge", str(tmp_path / "none"), "--out", str(tmp_path)]) == status
        assert bool(capsys.readouterr().err) == (status > 0)


def test_other_processes_are_told_of_an_error_and_tell_it_in_a_line(monkeypatch, capsys):
    raised: list[Exception] = []
    left: list[str] = []

    def run(settings: Any) -> int:
        raise raised[-1]

    monkeypatch.setattr(command, "_takes_part", lambda name: True)
    monkeypatch.setattr(distributed, "leave", left.append)
    plain = command._named
    monkeypatch.setattr(
        command, "_named", lambda name: run if name == "plan_command.run" else plain(name)
    )
    raised.append(command.errors.CommandError("no such file"))
    assert command.main(["plan", "Qwen3-8B"]) == 2 and left == ["no such file"]
    raised.append(distributed.PeerEndedError("process 1 has ended: no such file"))
    capsys.readouterr()
    assert command.main(["plan", "Qwen3-8B"]) == 1 and len(left) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert tells(line, "process 1", "no such file")


def test_only_the_first_process_prints_and_errors_name_the_process(monkeypatch, capsys):
    def run(settings: Any) -> int:
        print("a plan")
        raise command.errors.CommandError("no room")

    monkeypatch.setattr(command, "_takes_part", lambda name: True)
    plain = command._named
    monkeypatch.setattr(
        command, "_named", lambda name: run if name == "plan_command.run" else plain(name)
    )
    for number in (0, 3):
        monkeypatch.setattr(command, "_number", lambda: number)  # noqa: B023
        assert command.main(["plan", "Qwen3-8B"]) == 2
        printed = capsys.readouterr()
        assert bool(printed.out) == (number == 0)
        assert tells(printed.err, "no room") and ("process 3" in printed.err) == (number == 3)


def test_only_the_first_process_writes_what_a_run_notes(monkeypatch, tmp_path):
    folder = RunFolder(tmp_path / "run")
    settings = PretrainSettings(out=str(folder.path), model="m", tokenizer="t", data="d")
    folder.begin(settings)
    there = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    monkeypatch.setattr(distributed, "is_first", lambda: False)
    folder.take_note("identity", "another")
    folder.begin_at(3)
    folder.end({"ended": "steps"})
    folder.finish({"steps": 3})
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == there
