"""The files of the page about launchers: parsed, and run where that needs nothing but processes."""

import json
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from cli_runs import make_given
from megatrain_jax._src.engine.startup.launchers import find_launch
from megatrain_jax._src.lm.cli.finetune_settings import FinetuneSettings
from megatrain_jax._src.lm.cli.parsing import parsed
from places import ROOT

FOLDER = ROOT / "experiments" / "launch"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
SECONDS = 300
# Those of a job that gets a signal after ten have to last until it arrives.
STEPS, STEPS_OF_JOB = 12, 100
PODS = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def test_all_files_are_on_the_page():
    page = (ROOT / "docs" / "launch.md").read_text()
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == {
        name for name in re.findall(r"\(\.\./experiments/launch/([\w.]+)\)", page)
    }


@pytest.mark.parametrize("name", ["slurm.sh", "by_hand.sh", "torchrun.sh", "skypilot.yaml"])
def test_commands_have_settings_that_there_are(name: str, monkeypatch):
    monkeypatch.chdir(FOLDER)
    text = (FOLDER / name).read_text().replace("\\\n", " ")
    (line,) = re.findall(r"(?:megatrain-jax|-m megatrain_jax) (.*--config.*)", text)
    command, *arguments = shlex.split(line)
    assert command == "finetune"
    settings = parsed(command, FinetuneSettings, arguments, "config")
    assert settings.batch % 16 == 0, "16 GPUs"


def test_the_pods_of_a_jobset_know_their_places():
    jobs = read("jobset.yaml")
    (replicated,) = jobs["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    given = {row["name"]: row["value"] for row in container["env"]}
    launch = find_launch(PODS | given)
    assert launch is not None and launch.process_id == 1
    assert launch.num_processes == job["parallelism"] == job["completions"]
    # A pod's name is that of its set, its job, the job's number and its own, in the set's domain.
    name = jobs["metadata"]["name"]
    assert str(launch.address).startswith(f"{name}-{replicated['name']}-0-0.{name}:")
    assert job["completionMode"] == "Indexed"
    assert {mount["name"] for mount in container["volumeMounts"]} <= {
        volume["name"] for volume in job["template"]["spec"]["volumes"]
    }
    assert read("kubeflow.yaml")["spec"]["trainer"]["command"] == container["command"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_shell(path: Path):
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert path.stat().st_mode & stat.S_IXUSR


# Starts tasks with what srun tells them. Those of a job's first start get SIGTERM once there is a
# checkpoint; a restarted job has only one task.
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit
export SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost SLURM_NODEID=0
export SLURM_STEP_NUM_TASKS=$((SLURM_RESTART_COUNT ? 1 : 2))
export SLURM_STEP_TASKS_PER_NODE=$SLURM_STEP_NUM_TASKS
for ((i = 0; i < SLURM_STEP_NUM_TASKS; i++)); do
  SLURM_PROCID=$i SLURM_LOCALID=$i "$@" &
  tasks="$tasks $!"
done
if ((!SLURM_RESTART_COUNT)); then
  until [ -d run/checkpoints/10 ]; do read -t 0.1 <> <(:); done
  kill -TERM $tasks
fi
for task in $tasks; do wait $task; status=$((status > $? ? status : $?)); done
exit $status
"""


@pytest.fixture
def given(tmp_path: Path) -> dict[str, str]:
    """A folder for a script with its settings and tiny files; the environment that it runs in."""
    make_given(tmp_path)
    settings = read("run.yaml") | {
        "model": "tiny",
        "data": "chats.jsonl",
        "out": "run",
        "length": 32,
        "batch": 4,
        "epochs": None,
        "steps": STEPS,
        "checkpoint_every": 10,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    python = f'#!/bin/bash\nexec {sys.executable} -m megatrain_jax "$@"\n'
    called = '#!/bin/bash\necho "$@" >> scontrol.txt\n'
    torchrun = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    programs = {"megatrain-jax": python, "srun": SRUN, "scontrol": called, "torchrun": torchrun}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=1"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def script(name: str, folder: Path, given: dict[str, str], *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(FOLDER / name), *arguments],
        cwd=folder,
        env=given,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "report.json").read_text())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.mark.exhaustive
def test_a_job_of_slurm_is_requeued_and_continues_on_fewer_hosts(tmp_path, given):
    given |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_RESTART_COUNT": "0"}
    settings = yaml.safe_load((tmp_path / "run.yaml").read_text()) | {"steps": STEPS_OF_JOB}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    first = script("slurm.sh", tmp_path, given)
    printed = first.communicate(timeout=SECONDS)[0]
    assert first.returncode == 143, printed
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {os.getpid()}\n"
    (saved,) = (int(path.name) for path in (tmp_path / "run/checkpoints").iterdir())
    again = script("slurm.sh", tmp_path, given | {"SLURM_RESTART_COUNT": "1"})
    printed = again.communicate(timeout=SECONDS)[0]
    assert again.returncode == 0, printed
    notes = json.loads((tmp_path / "run/notes.json").read_text())
    assert notes["began"] == f"1 {saved + 1}"
    assert [r["step"] for r in report(tmp_path)["history"]] == [*range(1, STEPS_OF_JOB + 1)]


@pytest.mark.exhaustive
def test_hosts_are_started_by_hand(tmp_path, given):
    given |= {"COORDINATOR": f"localhost:{free_port()}"}
    hosts = [script("by_hand.sh", tmp_path, given, str(i)) for i in range(2)]
    printed = [host.communicate(timeout=SECONDS)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], printed
    assert "2 processes" in printed[0] and report(tmp_path)["steps"] == STEPS


@pytest.mark.exhaustive
def test_torchrun_starts_a_process_for_each_gpu(tmp_path, given):
    pytest.importorskip("torch", reason='torchrun: pip install -e ".[torch]"')
    given |= {"HOSTS": "1", "GPUS": "2", "HEAD": "localhost"}
    host = script("torchrun.sh", tmp_path, given)
    printed = host.communicate(timeout=SECONDS)[0]
    assert host.returncode == 0, printed
    assert "2 processes" in printed and report(tmp_path)["steps"] == STEPS


@pytest.mark.exhaustive
def test_the_function_for_ray_trains(tmp_path, monkeypatch):
    made = make_given(tmp_path)
    context = SimpleNamespace(get_world_size=lambda: 1)
    train: Any = ModuleType("ray.train")
    train.get_context = lambda: context
    ray: Any = ModuleType("ray")
    ray.train = train
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    space: dict[str, Any] = {"__name__": "ray_train"}
    exec((FOLDER / "ray_train.py").read_text(), space)
    sizes = {"length": 32, "batch": 4, "steps": 3, "out": str(tmp_path / "run")}
    space["train"]({"model": str(made / "tiny"), "data": str(made / "chats.jsonl"), **sizes})
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    context.get_world_size = lambda: 2
    with pytest.raises(RuntimeError, match="alone"):
        space["train"]({})
