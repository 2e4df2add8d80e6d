"""The tutorial with a real chat model: its commands, from a wheel on PyPI to a taught answer."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pages import ROOT

PAGE = ROOT / "docs" / "tutorials" / "smollm2.md"
FOLDER = ROOT / "experiments" / "smollm2"
# Enough for the style of the answers, which is learned before their content.
STEPS = 8


def commands() -> list[str]:
    """The commands of the page, without those that install."""
    text = PAGE.read_text(encoding="utf-8")
    lines = [
        line
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
        for line in block.splitlines()
    ]
    return [line for line in lines if line.startswith(("python experiments", "megatrain-jax"))]


def shown() -> list[str]:
    """The blocks of text on the page: the chat before, the training, the chat after."""
    return re.findall(r"^```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def questions(chat: str) -> list[str]:
    """What a reader types in a chat, as the page shows it."""
    return re.findall(r"^you: (.+)$", chat, re.M)


def run(folder: Path, command: str, typed: str = "") -> tuple[int, str]:
    """Runs a command of the page in a folder; returns its status and what it printed."""
    program, *arguments = shlex.split(command)
    module = ["-m", "megatrain_jax"] if program == "megatrain-jax" else []
    ours = ("XLA_FLAGS", "JAX_PLATFORMS")  # the settings of the tests
    done = subprocess.run(
        [sys.executable, *module, *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in ours},
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def answers(folder: Path, chat: str) -> list[str]:
    """The model's answers to the questions of the page."""
    asked = questions(shown()[0])
    status, printed = run(folder, chat, "".join(f"{line}\n" for line in [*asked, ""]))
    assert not status, printed
    found = re.findall(r"model: (.*)", printed)
    assert len(found) == len(asked), printed
    return found


def is_taught(answer: str) -> bool:
    """Whether an answer begins and ends as all of `chats.jsonl` do."""
    return answer.startswith("Arr, ") and answer.endswith(", matey!")


def test_the_page_shows_its_files():
    text = PAGE.read_text(encoding="utf-8")
    chats = (FOLDER / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    assert (FOLDER / "tune.yaml").read_text(encoding="utf-8") in text
    (shown_chat,) = re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    assert json.loads(shown_chat) == json.loads(chats[0]) and f"{len(chats)} questions" in text
    before, _, after = shown()
    taught = {json.loads(line)["messages"][0]["content"] for line in chats}
    assert questions(before) == questions(after) and not taught & {*questions(after)}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_real_model_learns_to_answer_like_a_pirate(tmp_path: Path):
    for name in ("torch", "gguf"):
        pytest.importorskip(name, reason='needed by the tutorial: pip install -e ".[torch]"')
    (tmp_path / "experiments").symlink_to(FOLDER.parent)
    get, chat_before, tune, chat_after = commands()
    status, printed = run(tmp_path, get)
    if "No matching distribution found" in printed:
        pytest.skip("pip cannot download the wheel of the model here")
    assert not status, printed
    before = answers(tmp_path, chat_before)
    assert not any(is_taught(answer) for answer in before), before
    status, printed = run(tmp_path, f"{tune} --steps {STEPS}")
    assert not status, printed
    report = json.loads((tmp_path / "runs" / "pirate" / "report.json").read_text())
    assert report["last_loss"] < report["first_loss"] / 2
    after = answers(tmp_path, chat_after)
    assert all(is_taught(answer) for answer in after), after
