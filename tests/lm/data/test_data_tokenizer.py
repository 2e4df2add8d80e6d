"""The tokenizer of a folder that may be anybody's: as Transformers loads it, or refused by name."""

import builtins
import json
import os
from pathlib import Path
from typing import Any

import pytest
import transformers

from chats import conversations, openai, tokenizer, write
from megatrain_jax import data
from megatrain_jax._src.lm.data.tokenizer import load_tokenizer
from messages import refuses, tells

TEXT = "the cat sat; naïve façade <|im_end|> 日本\n42"


@pytest.fixture
def folder(tmp_path) -> Path:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def change(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))


def chat(given: Any, folder: Path) -> data.Dataset:
    rows = write(folder.parent / "chats.jsonl", [openai(m) for m in conversations(4)])
    return data.chat(rows, given, length=512, batch_size=1, progress=False)


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": "qwen3"}])
@pytest.mark.parametrize("declared", [None, "PreTrainedTokenizerFast", "Qwen2TokenizerFast"])
def test_a_folder_gives_what_transformers_gives(config, declared, folder):
    if config:
        change(folder / "config.json", **config, num_hidden_layers=2)
    if declared is not None:
        change(folder / "tokenizer_config.json", tokenizer_class=declared)
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_the_size_of_a_model_does_not_matter_to_its_tokenizer(folder):
    before = [batch["tokens"].tolist() for batch in chat(str(folder), folder)]
    change(folder / "config.json", model_type="qwen3", num_hidden_layers=10**9, vocab_size="x")
    assert [batch["tokens"].tolist() for batch in chat(folder, folder)] == before


def test_code_of_a_folder_is_neither_run_nor_asked_for(folder, monkeypatch):
    def asked(*_: Any) -> str:
        raise AssertionError("the terminal was asked")

    monkeypatch.setattr(builtins, "input", asked)
    marker = folder / "ran"
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w')\nclass Mine: pass\n")
    change(folder / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Mine"})
    chat(folder, folder)
    auto_map = {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}
    change(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Mine")
    with refuses(ValueError, "`tokenizer`", "code", "`auto_map`"):
        chat(folder, folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["checkpoints/missing", "Qwen/Qwen3-0.6B", "gpt2"])
def test_a_folder_that_is_not_there_is_named(name, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    with refuses(FileNotFoundError, "`tokenizer`", name):
        chat(name, folder)


NESTED = "[" * 10_000 + "]" * 10_000


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_damaged_files_are_named(name, folder):
    digits, half = '{"a": ' + "9" * 5000 + "}", '{"a": [{"b": "\\ud83d"}]}'
    for text in ("", "{", "[]", "5", "null", NESTED, '{"a": ' + NESTED + "}", "\0", digits, half):
        (folder / name).write_text(text)
        with refuses(ValueError, name):
            chat(folder, folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with refuses(ValueError, name, "pipe"):
        chat(folder, folder)


@pytest.mark.parametrize("number", [2**31, 2**32 - 1, 2**32, 10**30])
def test_ids_of_tokens_that_no_array_holds_are_refused(number, folder):
    values = json.loads((folder / "tokenizer.json").read_text())
    last = values["added_tokens"][-1]
    last["id"] = values["model"]["vocab"][last["content"]] = number
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=str(folder)):
        chat(folder, folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_fields_of_another_type_are_refused_under_the_name_of_the_folder(name, folder):
    whole = (folder / name).read_text()
    for field in json.loads(whole):
        for value in (None, 5, "x", [], [5], {}, {"a": 5}, {"type": "x"}, True):
            (folder / name).write_text(whole)
            change(folder / name, **{field: value})
            try:
                loaded = load_tokenizer(folder)
            except ValueError as error:
                assert tells(str(error), "`tokenizer`", folder)
            else:
                assert loaded(TEXT).input_ids is not None
