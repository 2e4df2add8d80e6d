"""Files of every form and kind, and what is wrong with them, with its file and line."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from chats import alpaca, assert_same_batches, conversations, openai, sharegpt, tokenizer, write
from megatrain_jax import data
from megatrain_jax._src.lm.data import reading, row_formats
from megatrain_jax._src.lm.data.report import InvalidRow, Report, RowOrigin
from megatrain_jax._src.lm.data.row_formats import to_conversation
from messages import refuses, tells

GOOD = openai(conversations(1)[0])
FORMS = {"openai": openai, "sharegpt": sharegpt, "alpaca": alpaca}
Q, A = {"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}


def load(path: Any, **options: Any) -> data.Dataset:
    options = {"length": 512, "batch_size": 2, "progress": False, **options}
    return data.chat(path, tokenizer(), **options)


def assert_same(ours: data.Dataset, theirs: data.Dataset) -> None:
    assert ours.num_documents == theirs.num_documents
    assert_same_batches(ours, theirs)


def lines(path: Path, *rows: bytes | str | dict[str, Any]) -> Path:
    made = [json.dumps(row) if isinstance(row, dict) else row for row in rows]
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in made) + b"\n")
    return path


def error_of(path: Any, **options: Any) -> str:
    with pytest.raises(data.DataError) as caught:
        load(path, **options)
    return str(caught.value)


# Forms and kinds of files


@pytest.mark.parametrize("kind", ["json", "jsonl", "ndjson", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_and_kinds_give_the_same_batches(tmp_path: Path, form: str, kind: str):
    messages = conversations(40)
    reference = load(write(tmp_path / "reference.jsonl", [openai(m) for m in messages]))
    rows = [FORMS[form](one) for one in messages]
    assert_same(load(write(tmp_path / f"a.{kind}", rows)), reference)


def test_several_files_and_mixed_forms_are_read_in_order(tmp_path: Path):
    messages = conversations(30)
    rows = [list(FORMS.values())[i % 3](one) for i, one in enumerate(messages)]
    reference = load(write(tmp_path / "reference.jsonl", [openai(m) for m in messages]))
    paths = [write(tmp_path / "a.json", rows[:10]), write(tmp_path / "b.jsonl", rows[10:])]
    assert_same(load(paths), reference)
    assert_same(load([str(path) for path in paths]), reference)


def test_a_json_file_may_hold_lines_or_objects_one_after_the_other(tmp_path: Path):
    rows = [openai(messages) for messages in conversations(10)]
    reference = load(write(tmp_path / "reference.jsonl", rows))
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "lines.json").write_text("\ufeff" + text, encoding="utf-8")
    assert_same(load(tmp_path / "lines.json"), reference)
    text = "\n".join(json.dumps(row, indent=2) for row in rows)
    (tmp_path / "objects.json").write_text(text)
    assert_same(load(tmp_path / "objects.json"), reference)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_json_is_read_in_chunks_with_the_lines_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    monkeypatch.setattr(reading, "_CHUNK", chunk)
    rows = [{"text": f"{i} ü\n" * i, "n": [i, {"x": None}]} for i in range(12)]
    text = json.dumps(rows, indent=3, ensure_ascii=False)
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    read = list(reading.rows(str(path), Report()))
    assert [row for _, row in read] == rows
    starts = [number for number, line in enumerate(text.split("\n"), 1) if line == "   {"]
    assert [place.number for place, _ in read] == starts
    # Between the rows, values that are none, as long as several chunks or a part of one.
    rng = random.Random(chunk)
    values = [rng.choice([10 ** rng.randrange(99), -1.5e-7, "1, 2", None, [34]]) for _ in rows]
    mixed = [x for pair in zip(rows, values, strict=True) for x in pair]
    path.write_text(json.dumps(mixed, indent=rng.choice([None, 1])), encoding="utf-8")
    report = Report()
    assert [row for _, row in reading.rows(str(path), report)] == rows
    assert sum(report.left_out.values()) == len(values)


def test_parquet_is_read_across_row_groups(tmp_path: Path):
    rows = [{"text": str(i)} for i in range(600)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=70)
    read = list(reading.rows(str(path), Report()))
    assert [row for _, row in read] == rows
    assert [place.number for place, _ in read] == list(range(1, 601))
    assert str(read[4][0]) == f"{path}, row 5"


def test_forms_in_detail():
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "text": "all of it"}
    messages, learned, tools, ignored, _ = to_conversation(row)
    assert [m["content"] for m in messages] == ["Add.\n\n1 2", "3"]
    assert (learned, tools, ignored) == ([False, True], None, {"text"})
    row = {
        "id": 7,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}], "x": 1},
            {"role": "assistant", "content": "c", "weight": 1, "name": None},
        ],
    }
    messages, learned, _, ignored, _ = to_conversation(row)
    assert messages == [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert ignored == {"id", "messages[].x"}


# Rows that can't be used

FAULTS: dict[str, tuple[Any, str]] = {
    "unknown fields": ({"prompt": "a", "answer": "b"}, "unknown .*prompt, answer.*`columns="),
    "no fields": ({}, "unknown .*none"),
    "plain text": ({"text": "a"}, "unknown .*`data.text`"),
    "a pair": ({"chosen": "a", "rejected": "b"}, "unknown .*`data.preferences`"),
    "a pair with its prompt": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "unknown .*`data.preferences`",
    ),
    "no output": ({"instruction": "a"}, "instruction .*`output`"),
    "an array": ("[1, 2]", "object.*list"),
    "not json": ('{"messages": [', "JSON.*column"),
    "deep": ("[" * 100_000, "JSON"),
    "not utf-8": (b'{"instruction": "caf\xe9", "output": "b"}', "UTF-8.*0xe9"),
    "half a pair": ('{"instruction": "\\ud83d", "output": "b"}', "Unicode"),
    "ends with user": (openai([Q, A, Q]), "last turn.*message 3.*user"),
    "only system": (openai([{"role": "system", "content": "a"}]), "last turn"),
    "two questions": (openai([Q, Q, A]), "order.*message 2.*user"),
    "answer first": (openai([A, Q, A]), "order.*message 1.*start"),
    "late system": (openai([Q, A, {"role": "system", "content": "x"}]), "order"),
    "unknown role": (openai([{"role": "narrator", "content": "x"}, A]), "role.*'narrator'"),
    "no role": (openai([{"content": "x"}, A]), "role.*None.*turn 1"),
    "no turns": (openai([]), "turns"),
    "turns as text": ({"messages": "x"}, "turns"),
    "a turn as text": ({"messages": ["x"]}, "turn 1 .*object"),
    "empty answer": (openai([Q, {"role": "assistant", "content": " "}]), "empty.*turn 2"),
    "empty output": ({"instruction": "a", "output": ""}, "empty.*output.*assistant"),
    "an image": (openai([{"role": "user", "content": [{"image": "x"}]}, A]), "content .*text"),
    "a number": (openai([{"role": "user", "content": 3}, A]), "content .*text.*turn 1"),
    "weights": (openai([Q, {**A, "weight": 0}]), "learn"),
    "tools": ({**openai([Q, A]), "tools": "{"}, "tools .*JSON"),
    "deep tools": ({**openai([Q, A]), "tools": "[" * 100_000}, "tools .*JSON"),
    "calls as a number": (openai([Q, {**A, "tool_calls": 5}]), "`tool_calls` .*list .*turn 2"),
    "a call without a name": (
        openai([Q, {**A, "tool_calls": [{"function": {"name": None}}]}]),
        "name.*None .*turn 2",
    ),
    "deep arguments": (
        openai([Q, {**A, "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]),
        "arguments .*JSON.*turn 2",
    ),
    "half a pair as a name": (
        openai([Q, {**A, "tool_calls": [{"function": {"name": "f", "arguments": {"\ud800": 1}}}]}]),
        "Unicode",
    ),
    "thoughts as a number": (openai([Q, {**A, "thinking": 5}]), "text.*thinking .*turn 2"),
    "history as a number": (
        {"instruction": "a", "output": "b", "history": 5},
        "`history` .*list",
    ),
    "5,000 digits": ('{"messages": ' + "5" * 5000 + "}", "JSON.*5000"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_row_is_named_with_file_and_line(tmp_path: Path, fault: str):
    row, message = FAULTS[fault]
    path = lines(tmp_path / "a.jsonl", GOOD, "", row, GOOD)
    with pytest.raises(data.DataError, match=rf"(?s)\b1 of 3\b.*line 3: .*{message}") as caught:
        load(path)
    assert str(path) in str(caught.value) and '`invalid="drop"`' in str(caught.value)
    dropped = load(path, invalid="drop").summary
    assert (dropped.num_rows, dropped.num_documents, sum(dropped.left_out.values())) == (3, 2, 1)
    assert "line 3" in str(dropped)


def test_counts_add_up_and_are_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    chosen = list(FAULTS)
    rows = [r for name in chosen for r in (FAULTS[name][0], GOOD)] + [FAULTS["not utf-8"][0]] * 9
    path = lines(tmp_path / "a.jsonl", *rows, {**GOOD, "id": 3})
    message = error_of(path)
    assert tells(message, len(chosen) + 9, 2 * len(chosen) + 10) and re.search(
        r"\b5 .*UTF-8", message
    )
    capfd.readouterr()
    dataset = load(path, invalid="drop", progress=True)
    summary = dataset.summary
    assert summary.num_documents == len(chosen) + 1
    assert summary.num_rows == summary.num_documents + sum(summary.left_out.values())
    assert [n for why, n in summary.left_out.items() if "UTF-8" in why] == [10]
    assert summary.ignored == {"id": 1}
    shown = capfd.readouterr().err
    assert str(summary) in shown and re.search(r"\b10 .*UTF-8", shown)
    assert re.search(r"\bid .*\b1\b", shown) and "bytes" in shown
    load(path, invalid="drop")
    assert capfd.readouterr() == ("", "")


def test_faults_of_an_array_are_named_with_their_lines(tmp_path: Path):
    path = tmp_path / "a.json"
    text = json.dumps([GOOD, openai([Q]), GOOD], indent=1).encode()
    number = text[: text.index(b"a question")].count(b"\n") + 1
    path.write_bytes(text.replace(b"a question", b"a \xff question"))
    message = error_of(path)
    assert tells(message, f"{path}, line {number - 4}:", "UTF-8", "0xff")
    path.write_bytes(text[:-20])
    # A broken array can't be read around, and so is an error whatever is asked for.
    for option in ("error", "drop"):
        message = error_of(path, invalid=option)
        assert tells(message, path, "line", "JSON")
    path.write_bytes(text + b"\n[]")
    assert tells(error_of(path), "array", "end")
    path.write_bytes(text.replace(b"\n },\n", b"\n }\n", 1))
    assert "','" in error_of(path)


@pytest.mark.by_default(
    "digits-1",
    "digits-40",
    "digits-262144",
    "only digits-1",
    "only digits-40",
    "only digits-262144",
)
@pytest.mark.parametrize("chunk", [1, 40, 1 << 18])
@pytest.mark.parametrize(
    "bad",
    [
        '{"a": "}\\"]", "b": [{}, ' + "5" * 5000 + ', "\\\\"]}',
        "5" * 9000,
        '{"a": ' + "[" * 20_000 + "]" * 20_000 + "}",
    ],
    ids=["digits", "only digits", "deep"],
)
def test_an_array_is_read_around_values_that_python_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, chunk: int
):
    monkeypatch.setattr(reading, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    for text in (
        f'[{{"text": "a"}},\n {bad}\n,{{"text": "b"}}, {bad}]',
        f'{{"text": "a"}}\n{bad}\n{{"text": "b"}} \n{bad}',
        f'{{"text":\n"a"}} {bad} {{"text": "b"}} {bad}',
    ):
        path.write_text(text)
        report = Report()
        read = [row for _, row in reading.rows(str(path), report)]
        assert read == [{"text": "a"}, {"text": "b"}]
        assert report.num_rows == 4 and [*report.left_out.values()] == [2]
        assert tells(report.examples()[0], f"{path}, line 2:", "JSON")
    path.write_text(f"[{bad[:-1] if bad[0] == '{' else bad}")
    with refuses(data.DataError, f"{path}, line 1:", "JSON"):
        list(reading.rows(str(path), Report()))


@pytest.mark.parametrize("number", [19, 20, 21])
def test_the_first_twenty_reasons_are_told_and_others_are_counted(number: int):
    report = Report()
    for reason in range(number):
        for row in range(4):
            report.leave_out(RowOrigin("a.json", row + 1), InvalidRow(f"reason {reason}"))
    lines = report.examples()
    shown = [line for line in lines if "a.json" in line]
    assert len({line.split(":")[-1] for line in shown}) == min(number, 20)
    counts = [line for line in lines if line not in shown]
    told = sum(int(line.split()[2]) for line in counts if "reason " in line)
    assert len(shown) + told == 4 * min(number, 20)
    assert len([line for line in counts if "reason " not in line]) == (number > 20)


def test_rows_that_fail_in_code_that_expects_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(row: Any) -> Any:
        raise KeyError(row["question"])

    rows = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]
    path = write(tmp_path / "a.jsonl", rows)
    for name in ("to_conversation", "to_text"):
        monkeypatch.setattr(row_formats, name, lambda row, *_: fail(row))
    for read in (data.chat, data.text):
        with pytest.raises(data.DataError, match=f"{path}, line 2: .*KeyError: 'c'"):
            read(path, tokenizer(), length=64, batch_size=1, progress=False)


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_text_that_the_tokenizer_refuses_is_left_out_alone(tmp_path: Path, kind: str):
    # Without a token for unknown words, the call for all texts fails.
    words = Tokenizer(WordLevel({"a": 0, "<|im_end|>": 1}))
    words.add_special_tokens(["<|im_end|>"])
    tokens = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>")
    tokens.chat_template = (
        "{% if not add_generation_prompt %}{{ messages[1].content }}<|im_end|>{% endif %}"
    )
    texts = ["a", "dog", "a"]
    rows: list[Any] = [{"question": "a", "answer": text, "text": text} for text in texts]
    options: dict[str, Any] = {"length": 8, "batch_size": 1, "progress": False}
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(data.DataError, match=f"{path}, line 2: "):
        getattr(data, kind)(path, tokens, **options)
    dataset = getattr(data, kind)(path, tokens, invalid="drop", **options)
    (batch,) = dataset
    assert batch["tokens"].tolist() == [[0, 1, 0, 1, 0, 0, 0, 0]]
    assert dataset.num_documents == 2 and sum(dataset.summary.left_out.values()) == 1


def test_a_file_that_fails_later_is_named_with_its_last_row(tmp_path: Path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [str(i) * 9 for i in range(600)]})
    options: dict[str, Any] = {"compression": "NONE", "use_dictionary": False}
    pyarrow.parquet.write_table(table, path, row_group_size=256, **options)
    content = path.read_bytes()
    at = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    path.write_bytes(content[:at] + b"\xff" * 60 + content[at + 60 :])
    for invalid in ("error", "drop"):
        with refuses(data.DataError, path, "Parquet", "row 256"):
            data.text(path, tokenizer(), length=64, batch_size=1, invalid=invalid, progress=False)

    def given() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise OSError("gone")

    with refuses(data.DataError, "`source`", "row 1", "OSError: gone"):
        data.text(given(), tokenizer(), length=64, batch_size=1, progress=False)


def test_a_time_that_python_can_not_represent_is_one_row(tmp_path: Path):
    times = pyarrow.array([0, 2**55, 1], pyarrow.timestamp("ms"))
    rows = pyarrow.table({"text": ["a", "b", "c"], "at": times})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(rows, path)
    report = Report()
    read = list(reading.rows(str(path), report))
    assert [row["text"] for _, row in read] == ["a", "c"] and report.left_out.total() == 1
    assert f"{path}, row 2: " in report.examples()[0]


def test_prompts_that_no_template_could_show_are_named(tmp_path: Path):
    bad = [[5, Q], [{"role": "user", "content": 5}], [-1], "\ud800"]
    good = [{"prompt": "a"}, {"prompt": [Q]}, {"prompt": [1, 0, 2]}]
    path = write(tmp_path / "a.jsonl", good)
    path.write_text(path.read_text() + "".join(json.dumps({"prompt": one}) + "\n" for one in bad))
    with pytest.raises(data.DataError, match=f"{path}, line 4: "):
        data.prompts(path)
    assert data.prompts(path, invalid="drop") == good


def test_invalid_utf8_of_parquet_is_named_with_its_row(tmp_path: Path):
    texts = pyarrow.array([b"good", b"bad \xe9", b"fine"], pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(3, *texts.buffers()[1:])
    table = pyarrow.table({"instruction": texts, "output": ["a", "b", "c"]})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    assert tells(error_of(path), f"{path}, row 2:", "UTF-8", "0xe9")
    assert [*load(path, invalid="drop").summary.left_out.values()] == [1]
    path.write_bytes(b"no parquet")
    assert tells(error_of(path), path, "Parquet")


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_an_empty_file_is_named(tmp_path: Path, kind: str):
    full = write(tmp_path / "full.jsonl", [GOOD])
    empty = tmp_path / f"empty.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), empty)
    else:
        empty.write_text("\n")
    assert tells(error_of([full, empty]), f"{empty}:", "empty")
    dataset = load([full, empty], invalid="drop")
    assert [*dataset.summary.file_faults.values()] == [1]
    assert dataset.summary.num_rows == dataset.num_documents == 1
    message = error_of(empty, invalid="drop")
    assert tells(message, "nothing", empty)


def test_paths_and_options_that_make_no_sense_are_named(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [GOOD])
    with refuses(FileNotFoundError, tmp_path / "b.jsonl"):
        load(tmp_path / "b.jsonl")
    (tmp_path / "empty").mkdir()
    with refuses(ValueError, tmp_path / "empty", "`source`"):
        load(tmp_path / "empty")
    with refuses(FileNotFoundError, "pattern", tmp_path / "*.csv"):
        load(tmp_path / "*.csv")
    with refuses(FileNotFoundError, "someone/chats:train"):
        load("someone/chats")
    for empty in ([], (), iter([])):
        with refuses(ValueError, "`source`", "empty"):
            load(empty)
    with refuses(TypeError, "`source`", "'train'", "'test'"):
        load({"train": [GOOD], "test": [GOOD]})
    with refuses(TypeError, "`source`", "path", "rows"):
        load(3)
    with refuses(TypeError, "`source[1]`", "path", "rows"):
        load([path, [3]])
    (tmp_path / "a.xml").write_text("a")
    with refuses(ValueError, "a.xml", "`source`", ".csv"):
        load(tmp_path / "a.xml")
    (tmp_path / "a.txt").write_text("a")
    with refuses(ValueError, "`data.text`"):
        load(tmp_path / "a.txt")
    for options in ({"too_long": "x"}, {"invalid": "x"}, {"train_on": "x"}, {"batch_size": 0}):
        with refuses(ValueError, f"`{next(iter(options))}`", next(iter(options.values()))):
            load(path, **options)
    with refuses(TypeError, "`tokenizer`", "folder"):
        data.chat(path, 3, length=8, batch_size=1)


def test_a_tokenizer_is_loaded_from_its_folder(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [openai(messages) for messages in conversations(5)])
    tokenizer().save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"length": 512, "batch_size": 2, "progress": False}
    assert_same(data.chat(path, tmp_path / "model", **options), load(path))


# Plain text


def texts_of(dataset: data.Dataset) -> Counter[str]:
    found: Counter[str] = Counter()
    for batch in dataset:
        for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
            for number in range(1, segments.max() + 1):
                found[str(tokenizer().decode(tokens[segments == number].tolist()))] += 1
    return found


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "txt"])
def test_texts_end_with_the_end_of_text_and_are_learned_whole(tmp_path: Path, kind: str):
    texts = ["the cat sat\n\non a mat", "naïve 🙂\n", "日本"]
    if kind == "txt":
        paths = [tmp_path / f"{i}.txt" for i in range(3)]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8")
    else:
        paths = [write(tmp_path / f"a.{kind}", [{"text": text} for text in texts])]
    dataset = data.text(paths, tokenizer(), length=64, batch_size=1, progress=False)
    assert texts_of(dataset) == Counter(f"{text}<|endoftext|>" for text in texts)
    assert dataset.summary.num_learned == dataset.summary.num_tokens - 3


def test_texts_begin_as_the_tokenizer_begins_them():
    beginning = tokenizer()
    sides = {"single": "<s> $A", "pair": "<s> $A $B", "special_tokens": [("<s>", 1)]}
    beginning.backend_tokenizer.post_processor = TemplateProcessing(**sides)
    assert beginning("a").input_ids[0] == beginning.bos_token_id == 1
    options: dict[str, Any] = {"length": 64, "batch_size": 1, "progress": False}
    dataset = data.text([{"text": "the cat"}], beginning, **options)
    assert texts_of(dataset) == Counter(["<s>the cat<|endoftext|>"])


def test_a_long_text_is_read_in_parts_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = "the cat\n\n sat on\na mat \n naïve 🙂 日本\n" * 40
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    options: dict[str, Any] = {"length": 50, "batch_size": 1, "shuffle": False, "progress": False}
    whole = data.text(path, tokenizer(), **options)
    expected = tokenizer(None)(text, add_special_tokens=False)["input_ids"]
    tokens = np.concatenate([b["tokens"][b["segments"] > 0] for b in whole])
    assert tokens.tolist() == [*expected, tokenizer().eos_token_id]
    labels = np.concatenate([b["labels"][b["mask"]] for b in whole])
    np.testing.assert_array_equal(labels, tokens[1:])
    monkeypatch.setattr(reading, "_CHUNK", 30)
    assert_same(data.text(path, tokenizer(), **options), whole)
    assert len(list(reading.blocks(str(path), Report()))) > 20


def test_faulty_texts_are_named(tmp_path: Path):
    bad, empty = tmp_path / "bad.txt", tmp_path / "empty.txt"
    bad.write_bytes(b"fine\nnot \xff fine\n")
    empty.write_text("\n")
    rows = lines(tmp_path / "a.jsonl", {"text": "good"}, {"content": "a"}, {"text": " "})
    with pytest.raises(data.DataError) as caught:
        data.text([bad, empty, rows], tokenizer(), length=64, batch_size=1, progress=False)
    for named in (
        [f"{bad}, line 2:", "UTF-8", "0xff"],
        [f"{empty}:", "empty"],
        [f"{rows}, line 2:", "unknown", "content"],
        [f"{rows}, line 3:", "empty"],
        [3, 4, 1],
    ):
        assert tells(str(caught.value), *named)
    made = tokenizer()
    made.eos_token = None
    with refuses(data.DataError, "`eos_token`"):
        data.text(rows, made, length=64, batch_size=1, invalid="drop", progress=False)


# Imports


def test_the_library_does_not_import_what_only_data_needs():
    code = (
        "import sys, megatrain_jax\n"
        "assert not {'transformers', 'pyarrow'} & set(sys.modules), 'imported'\n"
        "sys.modules['grain'] = None\n"
        "from megatrain_jax import data\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "megatrain-jax[finetune]"' in ran.stderr
    assert "grain" in ran.stderr


def test_a_faulty_row_says_what_is_wrong():
    fault = InvalidRow("a reason", "a detail")
    assert str(fault) == "a reason: a detail" and str(InvalidRow("a reason")) == "a reason"
