"""The tutorials with a real chat model: their commands, from a wheel on PyPI to taught answers."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from megatrain_jax import models
from messages import tells
from places import ROOT

PAGE = ROOT / "docs" / "tutorials" / "smollm2.md"
OF_REWARDS = ROOT / "docs" / "tutorials" / "rewards.md"
FOLDER = ROOT / "experiments" / "smollm2"
# Enough for the style of the answers, which is learned before their content.
STEPS = 8
# Enough for short answers, which are rewarded at once.
STEPS_OF_REWARDS = 6


def commands(page: Path = PAGE) -> list[str]:
    """The commands of a page, without those that install."""
    text = page.read_text(encoding="utf-8")
    lines = [
        line
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
        for line in block.splitlines()
    ]
    return [line for line in lines if line.startswith(("python experiments", "megatrain-jax"))]


def shown(page: Path = PAGE) -> list[str]:
    """The blocks of text on a page: the chat before, the training, the chat after."""
    return re.findall(r"^```text\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


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


def answers(folder: Path, chat: str, page: Path = PAGE) -> list[str]:
    """The model's answers to the questions of a page."""
    asked = questions(shown(page)[0])
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
    assert json.loads(shown_chat) == json.loads(chats[0]) and tells(text, len(chats))
    before, _, after = shown()
    taught = {json.loads(line)["messages"][0]["content"] for line in chats}
    assert questions(before) == questions(after) and not taught & {*questions(after)}


def test_the_page_of_rewards_shows_its_files():
    text = OF_REWARDS.read_text(encoding="utf-8")
    assert (FOLDER / "grpo.yaml").read_text(encoding="utf-8") in text
    _, functions = (FOLDER / "rewards.py").read_text(encoding="utf-8").split("\n\n", 1)
    assert functions in text
    rows = (FOLDER / "capitals.jsonl").read_text(encoding="utf-8").splitlines()
    (row,) = re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    assert json.loads(row) in map(json.loads, rows) and tells(text, len(rows))
    before, _, after = shown(OF_REWARDS)
    assert questions(before) == questions(after)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the first command has made the real model's checkpoint."""
    for name in ("torch", "gguf"):
        pytest.importorskip(name, reason='needed by the tutorial: pip install -e ".[torch]"')
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "experiments").symlink_to(FOLDER.parent)
    status, printed = run(folder, commands()[0])
    if "No matching distribution found" in printed:
        pytest.skip("pip cannot download the wheel of the model here")
    assert not status, printed
    return folder


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_real_model_learns_to_answer_like_a_pirate(checkpoint: Path):
    _, chat_before, tune, chat_after = commands()
    before = answers(checkpoint, chat_before)
    assert not any(is_taught(answer) for answer in before), before
    status, printed = run(checkpoint, f"{tune} --steps {STEPS}")
    assert not status, printed
    report = json.loads((checkpoint / "runs" / "pirate" / "report.json").read_text())
    assert report["last_loss"] < report["first_loss"] / 2
    after = answers(checkpoint, chat_after)
    assert all(is_taught(answer) for answer in after), after


@pytest.mark.long
def test_texts_of_the_real_model_are_decoded_as_by_transformers(checkpoint: Path):
    folder = checkpoint / "checkpoints" / "smollm2"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with models.Generator(models.load_pretrained(folder), tokenizer=tokenizer) as generator:
        question = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
        # Beyond its end, the model writes the marks of further messages.
        for stop in (None, ()):
            (one,) = generator.generate([question], max_tokens=32, stop=stop)
            assert one.text == tokenizer.decode(one.ids, skip_special_tokens=True)
            assert "<|im_end|>" in tokenizer.decode(one.ids)
        (cut,) = generator.generate([question], max_tokens=32, stop=[".<|im_end|>"])
        assert cut.finish == "stop" and cut.text + "." == one.text.split("\n")[0]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_real_model_learns_by_rewards_to_be_brief(checkpoint: Path):
    chat_before, train, chat_after = commands(OF_REWARDS)
    before = answers(checkpoint, chat_before, OF_REWARDS)
    status, printed = run(checkpoint, f"{train} --steps {STEPS_OF_REWARDS}")
    assert not status, printed
    history = json.loads((checkpoint / "runs" / "brief" / "report.json").read_text())["history"]
    rewards = [record["reward"] for record in history]
    assert max(rewards[1:]) > rewards[0] + 0.3, rewards
    after = answers(checkpoint, chat_after, OF_REWARDS)
    assert after != before
