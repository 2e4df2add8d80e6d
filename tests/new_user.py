"""What a new user does, from a wheel in a fresh virtual environment, outside of the repository.

    python tests/new_user.py [FOLDER]

It builds the wheel, installs it with what fine-tuning needs, plans, fine-tunes a tiny checkpoint,
presses Ctrl-C, and gives the same command again. The interpreter that runs this makes the
checkpoint and asks the exported model, as both need PyTorch. It takes minutes, most of them pip's.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.append(str(Path(__file__).with_name("helpers")))

from places import ROOT
from tiny_chats import conversation, make_checkpoint

EXTRAS = "finetune,tensorboard"
NUMBERS = range(20)
SETTINGS: dict[str, Any] = {
    "model": "checkpoints/tiny",
    "data": ["chats.jsonl"],
    "out": "runs/mine",
    "length": 32,
    "batch": 4,
    "epochs": 60,
    "learning_rate": 5e-3,
    "held_out": 0.2,
    "eval_every": 40,
    "checkpoint_every": 20,
    "logs": ["tensorboard"],
}
# What TensorBoard itself reads in a folder: the losses, by step.
READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
print(json.dumps({event.step: event.value for event in events.Scalars("loss")}))
"""


def run(folder: Path, *command: str | Path, status: int = 0) -> str:
    """Runs a command there, as a user would, and returns what it printed."""
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    printed = done.stdout + done.stderr
    assert done.returncode == status, f"{command} ended with {done.returncode}:\n{printed}"
    return printed


def environment() -> dict[str, str]:
    """The variables of a user who has this repository nowhere on a path."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XLA_FLAGS", "JAX_PLATFORMS")
    return {k: v for k, v in os.environ.items() if k not in ours} | {"PYTHONUNBUFFERED": "1"}


def install(folder: Path) -> Path:
    """Builds the wheel, installs it in a fresh environment and returns the folder of commands."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder / "dist"]
    run(folder, *pip, ROOT)
    (wheel,) = (folder / "dist").glob("megatrain_jax-*.whl")
    run(folder, sys.executable, "-m", "venv", "venv")
    bin = folder / "venv" / "bin"
    run(folder, bin / "pip", "install", "-q", f"{wheel}[{EXTRAS}]")
    where = run(folder, bin / "python", "-c", "import megatrain_jax; print(megatrain_jax.__file__)")
    assert Path(where.splitlines()[-1]).is_relative_to(folder / "venv"), where
    return bin


def interrupted(folder: Path, *command: str | Path) -> str:
    """Presses Ctrl-C once step 25 is printed, and returns what was printed."""
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lines = []
    with subprocess.Popen(command, cwd=folder, env=environment(), **options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 25/"):
                process.send_signal(signal.SIGINT)
    printed = "".join(lines)
    assert process.returncode == 130, f"ended with {process.returncode}:\n{printed}"
    return printed


def answers(exported: Path) -> dict[str, str]:
    """What the exported model answers in Transformers, by what it was asked."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(exported)
    found = {}
    for number in NUMBERS:
        question = conversation(number)["messages"][:1]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        asked = tokenizer.apply_chat_template(question, **options)
        end = tokenizer.eos_token_id
        ids = model.generate(**asked, do_sample=False, max_new_tokens=8, eos_token_id=end)
        answer = tokenizer.decode(ids[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        found[question[0]["content"]] = answer.strip()
    return found


def check_run(folder: Path, bin: Path) -> None:
    """Plans, fine-tunes with an interruption, and looks at what is there in the end."""
    command = bin / "megatrain-jax"
    options = "--gpu H100 --host 512GiB --tokens 32768 --length 4096".split()
    assert "parameters in " in run(folder, command, "plan", "Qwen3-8B", *options)
    tune = (command, "finetune", "tune.yaml")
    printed = interrupted(folder, *tune)
    assert "the same command goes on" in printed
    printed = run(folder, *tune)
    assert "went on after step 2" in printed and "finished after" in printed
    assert "is done: " in run(folder, *tune)
    report = json.loads((folder / "runs/mine/report.json").read_text())
    assert [record["step"] for record in report["history"]] == [*range(1, report["steps"] + 1)]
    assert report["last_loss"] < report["first_loss"] / 3, report
    read = run(folder, bin / "python", "-c", READ, folder / "runs/mine/tensorboard")
    logged = json.loads(read.splitlines()[-1])
    for record in report["history"]:
        assert math.isclose(logged[str(record["step"])], record["loss"], rel_tol=1e-6)
    assert len(logged) == report["steps"]


def main(folder: Path) -> None:
    """Does all of it in a folder."""
    make_checkpoint(folder / "checkpoints" / "tiny")
    rows = [json.dumps(conversation(number)) + "\n" for number in NUMBERS]
    (folder / "chats.jsonl").write_text("".join(rows))
    (folder / "tune.yaml").write_text(json.dumps(SETTINGS))  # JSON is YAML
    check_run(folder, install(folder))
    found = answers(folder / "runs/mine/model")
    print("\n".join(f"{question} → {answer}" for question, answer in found.items()))
    turns = [conversation(number)["messages"] for number in NUMBERS]
    expected = {asked["content"]: answer["content"] for asked, answer in turns}
    wrong = {question for question in found if found[question] != expected[question]}
    # Those held out may be wrong.
    assert len(wrong) <= SETTINGS["held_out"] * len(NUMBERS), wrong


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).absolute())
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
