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
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.cli.user_functions import imported
from messages import tells

pytest.importorskip("torch", reason='checkpoints made by Transformers: pip install -e ".[torch]"')

from places import ROOT
from tiny_chats import make_checkpoint

PLAIN = ("--reward-weights", "null")
REWARDS = """
def numbers(completions, wanted):
    texts = [one[0]["content"] for one in completions]
    return [text.split().count(word) / 4 for text, word in zip(texts, wanted)]

def short(completion_ids, **columns):
    return [-len(ids) for ids in completion_ids]

def needy(completions, other):
    return other

def add(a: int):
    '''Adds one.

    Args:
        a: A number.
    '''
    return a + 1
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
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:the reward function")
def test_a_run_is_trained_exported_and_done(given: Path, capsys: Any):
    out = given / "run"
    options = "--out", out, "--steps", 3, "--beta", 0.1, "--checkpoint-every", 1, "--top-p", 0.9
    options = *options, "--num-iterations", 3
    assert call(given, *options) == 0
    printed = capsys.readouterr().out
    assert tells(printed, "3/3", "loss", "reward", "exported")
    phases = ("tracing", "initialising", "completions", "step 1,")
    told = [line for line in printed.splitlines() if any(map(line.__contains__, phases))]
    assert [*map(str.__contains__, told, phases)][:4] == [True] * 4
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
    assert call(given, *options) == 0 and tells(capsys.readouterr().out, "done")
    assert call(given, *options, "--temperature", 0.5) == 2
    assert tells(capsys.readouterr().err, "temperature", "1.0", 0.5)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:the reward function")
def test_the_example_with_a_real_model_runs_with_a_tiny_one(
    given: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    out = given / "brief"
    example = ["grpo", "experiments/smollm2/grpo.yaml", "--model", str(given / "tiny")]
    assert main([*example, "--out", str(out), "--steps", "2", "--lora-targets", "q_proj"]) == 0
    assert "2/2" in capsys.readouterr().out and (out / "model" / "config.json").exists()
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
    functions = [imported("rewards", name) for name in ("beside/early.py:late", "grpo_here:late")]
    assert [function() for function in functions] == [[1.0], [1.0]]
    # An installed module comes before a file of its name.
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text("def rgb_to_hsv(*_): pass\n")
    installed = imported("rewards", "colorsys:rgb_to_hsv")
    assert installed(0.5, 0.5, 0.5) == (0.0, 0.0, 0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rewards", "numbers", *PLAIN), "file function"),
        (("--rewards", "nothing.py:numbers", *PLAIN), "file nothing.py"),
        (("--rewards", "json:short", *PLAIN), "json function short"),
        (("--rewards", "GIVEN/rewards.py:needy", *PLAIN), "function needy other"),
        (("--data", "GIVEN/empty.jsonl"), "`prompts` token"),
        (("--tools", "GIVEN/rewards.py:adder"), "`tools` function adder"),
        (("--tools", "GIVEN/rewards.py:add"), "`tools` `tokenizer` template"),
        (("--columns", "{prompt: task}"), "`columns` task"),
        (("--max-new-tokens", 3), "`--max-completion-length`"),
        (("--reward-funcs", "a:b"), "`--rewards`"),
        (("--microbatches", 3), "microbatches 8 completions"),
        (("--export-as", "adapter"), "adapters `lora_rank`"),
        (("--lora-rank", 2, "--trainable", "norm"), "`trainable` `lora_rank`"),
        (("--num-generations", 1), "`num_generations` 2 1"),
        (("--reward-weights", "[1.0]"), "1 weights 2"),
        (("--optimizer", "sgd", "--b1", 0.5), "`b1`=0.5 `optimizer`=adamw, lion"),
        (("--optimizer", "m:f", "--weight-decay", 0.1), "functions `optimizer_options`"),
        (("--final-rate", 0.5), "rate `decay` constant"),
        (("--wandb", "{project: mine}"), "`logs` wandb"),
        (("--warmup", 2), "`warmup` 0 1 2.0"),
    ],
)
def test_mistakes_are_told(given: Path, capsys: Any, options: Any, words: str):
    options = [str(option).replace("GIVEN", str(given)) for option in options]
    assert call(given, "--out", given / "wrong", "--steps", 1, *options) == 2
    assert tells(capsys.readouterr().err, *words.split())
    assert not (given / "wrong").exists()
