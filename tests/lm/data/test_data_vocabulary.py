"""A tokenizer with ids that the model beside it has no rows for."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from chats import conversations, openai, tokenizer, write
from megatrain_jax import data
from messages import refuses, tells, warns

WORDS = [f"word{number}" for number in range(5)]


def save(folder: Path, config: Any) -> Path:
    """A tokenizer with added words at the end, which are no special ones."""
    made = tokenizer()
    made.add_tokens(WORDS)
    made.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rows_with(words: list[list[str]]) -> list[Any]:
    rows = []
    for messages, some in zip(conversations(len(words), turns=1), words, strict=True):
        messages[-1]["content"] = " ".join(["so", *some])
        rows.append(openai(messages))
    return rows


def load(path: Path, folder: Any, **options: Any) -> data.Dataset:
    options = {"length": 256, "batch_size": 2, "progress": False, **options}
    return data.chat(path, folder, **options)


FIRST = len(tokenizer())  # the id of the first added word
ROWS = [[], [WORDS[1]], [], [WORDS[3], WORDS[4], WORDS[3]], [WORDS[4]]]


@pytest.mark.parametrize("known", range(6))
def test_rows_with_ids_beyond_the_vocabulary_are_errors_with_places(tmp_path: Path, known: int):
    folder = save(tmp_path / "model", {"vocab_size": FIRST + known})
    path = write(tmp_path / "a.jsonl", rows_with(ROWS))
    bad = [
        number
        for number, some in enumerate(ROWS, 1)
        if any(WORDS.index(word) >= known for word in some)
    ]
    if known == len(WORDS):
        load(path, folder)
        return
    with warns(UserWarning, 5 - known, f"'word{known}'") as caught:
        if not bad:
            load(path, folder)
        else:
            with pytest.raises(data.DataError) as error:
                load(path, folder)
            said = str(error.value)
            assert tells(said, len(bad), 5, "tokenizer")
            for number in range(1, 6):
                assert (f"line {number}:" in said and str(FIRST + known) in said) == (number in bad)
    assert caught[0].filename == __file__


def test_the_tokens_are_counted_and_the_first_is_named(tmp_path: Path):
    folder = save(tmp_path / "model", {"vocab_size": FIRST + 3})
    path = write(tmp_path / "a.jsonl", rows_with(ROWS))
    with pytest.warns(UserWarning, match="beyond"), pytest.raises(data.DataError) as error:
        load(path, folder)
    ids = tokenizer().apply_chat_template(rows_with(ROWS)[3]["messages"], return_dict=False)
    assert tells(str(error.value), "'word3'", FIRST + 3, "line 4:", "beyond", 3)
    assert len(ids) > 3


def test_such_rows_can_be_left_out(tmp_path: Path):
    folder = save(tmp_path / "model", {"vocab_size": FIRST})
    path = write(tmp_path / "a.jsonl", rows_with(ROWS))
    with pytest.warns(UserWarning, match="beyond"):
        dataset = load(path, folder, invalid="drop")
    assert dataset.num_documents == 2 and sum(dataset.summary.left_out.values()) == 3
    for batch in dataset:
        assert batch["tokens"].max() < FIRST


@pytest.mark.by_default(".txt")
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_plain_text_is_checked_too(tmp_path: Path, suffix: str):
    folder = save(tmp_path / "model", {"vocab_size": FIRST + 2})
    path = tmp_path / f"a{suffix}"
    content = "so it is\n" * 40_000 + "word4 ends it"  # read in several blocks
    if suffix == ".txt":
        path.write_text(content)
    else:
        write(path, [{"text": content}, {"text": "fine"}])
    options: Any = {"length": 64, "batch_size": 2, "progress": False}
    with pytest.warns(UserWarning, match="beyond"):
        with refuses(data.DataError, "line 1:", "beyond", "'word4'"):
            data.text(path, folder, **options)
        if suffix == ".jsonl":
            kept = data.text(path, folder, invalid="drop", **options)
            assert kept.num_documents == 1


@pytest.mark.parametrize(
    "config",
    [
        "",
        "no JSON",
        "[]",
        "{}",
        '{"vocab_size": "400"}',
        '{"text_config": null}',
        json.dumps({"vocab_size": FIRST + 5}),
        json.dumps({"text_config": {"vocab_size": 10**6}}),
    ],
)
def test_a_folder_that_says_nothing_or_enough_is_taken(tmp_path: Path, config: str):
    made = AutoTokenizer.from_pretrained(save(tmp_path / "model", {}))
    (tmp_path / "model" / "config.json").write_text(config)
    path = write(tmp_path / "a.jsonl", rows_with(ROWS))
    assert load(path, made).num_documents == len(ROWS)


def test_the_vocabulary_of_the_language_in_a_model_of_images_counts(tmp_path: Path):
    folder = save(tmp_path / "model", {"text_config": {"vocab_size": FIRST}})
    path = write(tmp_path / "a.jsonl", rows_with(ROWS))
    with pytest.warns(UserWarning, match="beyond"), pytest.raises(data.DataError, match="beyond"):
        load(path, folder)


def test_a_tokenizer_without_a_folder_has_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(save(tmp_path / "model", {"vocab_size": 3}))
    path = write(tmp_path / "a.jsonl", rows_with([[]]))
    assert load(path, tokenizer()).num_documents == 1


def test_an_id_that_is_no_token_is_named_by_its_number(tmp_path: Path):
    folder = save(tmp_path / "model", {"vocab_size": FIRST})
    row = {"input_ids": [1, 2], "topk_token_ids": [[1], [9999]], "topk_logprobs": [[-1.0]] * 2}
    options: Any = {"length": 8, "batch_size": 1, "topk": 1, "progress": False}
    with pytest.warns(UserWarning, match="beyond"):
        with refuses(data.DataError, "1 of 2", 9999):
            data.distillation([row], folder, **options)
