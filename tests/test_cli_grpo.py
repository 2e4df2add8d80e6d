"""The command `megatrain-jax grpo`: trained, gone on with, done, exported; and its mistakes."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from megatrain_jax import models
from megatrain_jax._src.cli.main import main
from megatrain_jax._src.cli.reward_functions import load_rewards

pytest.importorskip("torch", reason='checkpoints made by Transformers: pip install -e ".[torch]"')

from pages import ROOT  # noqa: E402
from tiny_chats import make_checkpoint  # noqa: E402

PLAIN = ("--reward-weights", "null")
REWARDS = """
def numbers(completions, wanted):
    texts = [one[0]["content"] for one in completions]
    return [text.split().count(word) / 4 for text, word in zip(texts, wanted)]

def short(completion_ids, **columns):
    return [-len(ids) for ids in completion_ids]

def needy(completions, other):
    return other
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, prompts, reward functions, and a file of settings for them."""
    folder = tmp_path_factory.mktemp("given")
    make_checkpoint(folder / "tiny")
    rows = [
        {"prompt": [{"role": "user", "content": f"count from {n}"}], "wanted": str(n)}
        for n in range(12)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "empty.jsonl").write_text(json.dumps({"prompt": " ", "wanted": "1"}) + "\n")
    (folder / "rewards.py").write_text(REWARDS)
    settings = {
        "model": str(folder / "tiny"),
        "data": str(folder / "prompts.jsonl"),
        "rewards": [f"{folder}/rewards.py:numbers", f"{folder}/rewards.py:short"],
        "reward_weights": [1.0, 0.01],
        "num_generations": 4,
        "prompts_per_step": 2,
        "max_completion_length": 6,
        "microbatches": 2,
        "learning_rate": 1e-2,
        "log_completions": 2,
        "logs": "jsonl",
    }
    (folder / "grpo.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return folder


def call(given: Path, *options: Any) -> int:
    return main(["grpo", str(given / "grpo.yaml"), *map(str, options)])


# Random models write completions that these functions do not tell apart.
@pytest.mark.filterwarnings("ignore:the reward function")
def test_a_run_is_trained_exported_and_done(given: Path, capsys: Any):
    out = given / "run"
    options = "--out", out, "--steps", 3, "--beta", 0.1, "--checkpoint-every", 1, "--top-p", 0.9
    options = *options, "--num-iterations", 3
    assert call(given, *options) == 0
    printed = capsys.readouterr().out
    assert "step 3/3, loss" in printed and "reward" in printed and "exported to" in printed
    phases = ("tracing the model", "initialising", "the first completions", "step 1, which")
    told = [line for line in printed.splitlines() if line.startswith(phases)]
    assert [*map(str.startswith, told, phases)] == [True] * 4
    assert re.search(r"generation [\d,]+ tokens/s, training [\d,]+ tokens/s", printed)
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] == 3 and report["history"][2]["kl"] > 0
    # Three updates on the same completions.
    rate = report["history"][0]["weight"] / sum(report["seconds"].values())
    assert report["completion_tokens_per_second"] == pytest.approx(rate)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert lines[0]["rewards/numbers/mean"] * 1 + lines[0]["rewards/short/mean"] * 0.01 == (
        pytest.approx(lines[0]["reward"])
    )
    assert "count from" in (out / "log.jsonl.txt").read_text()
    # The whole model was trained, and its stored reference is no part of the export.
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (given / "tiny", out / "model")
    )
    assert before.keys() == after.keys()
    assert not any(np.array_equal(before[n], after[n]) for n in before if "proj" in n)
    models.load_pretrained(out / "model")
    assert call(given, *options) == 0 and "is done" in capsys.readouterr().out
    assert call(given, *options, "--temperature", 0.5) == 2
    assert "temperature was 1.0 and is 0.5" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:the reward function")
def test_the_example_with_a_real_model_runs_with_a_tiny_one(
    given: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    out = given / "brief"
    example = ["grpo", "experiments/smollm2/grpo.yaml", "--model", str(given / "tiny")]
    assert main([*example, "--out", str(out), "--steps", "2", "--lora-targets", "q_proj"]) == 0
    assert "step 2/2" in capsys.readouterr().out and (out / "model" / "config.json").exists()
    history = json.loads((out / "report.json").read_text())["history"]
    assert {"rewards/right/mean", "rewards/brief/mean"} <= history[1].keys()


def test_functions_are_found_beside_their_file_and_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    beside = tmp_path / "beside"
    beside.mkdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (beside / "grpo_words.py").write_text("NUMBERS = [1.0]\n")
    late = "def late():\n    import grpo_words\n    return grpo_words.NUMBERS\n"
    (beside / "early.py").write_text("from grpo_words import NUMBERS\n" + late)
    (tmp_path / "grpo_here.py").write_text(late)
    functions = load_rewards(["beside/early.py:late", "grpo_here:late"])
    assert [function() for function in functions] == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rewards", "numbers", *PLAIN), "must be a file and a function"),
        (("--rewards", "nothing.py:numbers", *PLAIN), "there is no file nothing.py"),
        (("--rewards", "json:short", *PLAIN), "json has no function short"),
        (("--rewards", "GIVEN/rewards.py:needy", *PLAIN), "function needy needs other, but"),
        (("--data", "GIVEN/empty.jsonl"), "`prompts` must be of one token at least"),
        (("--columns", "{prompt: task}"), "`columns` names task, which no row has"),
        (("--max-new-tokens", 3), "did you mean `--max-completion-length`"),
        (("--reward-funcs", "a:b"), "did you mean `--rewards`"),
        (("--microbatches", 3), "must divide the 8 completions"),
        (("--export-as", "adapter"), "needs adapters: set `lora_rank`"),
        (("--num-generations", 1), "`num_generations` must be at least 2"),
        (("--reward-weights", "[1.0]"), "1 weights for 2 reward functions"),
        (("--optimizer", "sgd", "--b1", 0.5), "`b1`=0.5 counts only with `optimizer`=adamw, lion"),
        (("--optimizer", "m:f", "--weight-decay", 0.1), "functions have `optimizer_options`"),
        (("--final-rate", 0.5), "a rate that falls, but `decay` is constant"),
        (("--wandb", "{project: mine}"), "`logs` has no wandb"),
        (("--warmup", 2), "`warmup` must be a share from 0 to 1"),
    ],
)
def test_mistakes_are_told(given: Path, capsys: Any, options: Any, words: str):
    options = [str(option).replace("GIVEN", str(given)) for option in options]
    assert call(given, "--out", given / "wrong", "--steps", 1, *options) == 2
    assert words in capsys.readouterr().err
    assert not (given / "wrong").exists()
