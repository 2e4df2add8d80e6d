"""Where rows come from: files, folders, patterns, lists and `datasets`; and mixtures of them."""

import bz2
import csv
import gzip
import json
import lzma
import random
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from chats import WORDS, assert_same_batches, conversations, openai, tokenizer, write
from megatrain_jax import data
from megatrain_jax._src.lm.data import documents, reading
from megatrain_jax._src.lm.data.batches import counts
from megatrain_jax._src.lm.data.report import Report
from megatrain_jax._src.lm.data.row_formats import to_conversation
from megatrain_jax._src.lm.data.sources import GivenRows, resolve
from messages import refuses, tells

MESSAGES = conversations(24)
ROWS = [openai(messages) for messages in MESSAGES]


def load(source: Any, **options: Any) -> data.Dataset:
    options = {"length": 256, "batch_size": 2, "progress": False, **options}
    return data.chat(source, tokenizer(), **options)


def compressed(path: Path) -> Path:
    target = path.with_name(path.name + ".gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return target


def table(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def questions(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)

    def say() -> str:
        text = "".join(rng.choices([*WORDS, '"', ",", "\t", "\r\n", "\n\n", " "], k=9))
        return f"x{text}"

    return [{"question": say(), "answer": say()} for _ in range(count)]


# Files


@pytest.mark.parametrize("kind", ["csv", "tsv", "csv.gz"])
def test_csv_is_read_as_pythons_module_reads_it(tmp_path: Path, kind: str):
    rows = questions(40)
    path = table(tmp_path / f"a.{kind.removesuffix('.gz')}", rows)
    # The places of rows, counted by hand: a cell may go over several lines.
    lines, line = [], 2
    for row in rows:
        lines.append(line)
        line += 1 + sum(text.count("\n") for text in row.values())
    path = compressed(path) if kind.endswith(".gz") else path
    read = list(reading.rows(str(path), Report()))
    assert [dict(row) for _, row in read] == rows
    assert [origin.number for origin, _ in read] == lines
    before = csv.field_size_limit()
    table(tmp_path / "long.csv", [{"text": "word " * 100_000}])
    long = list(reading.rows(str(tmp_path / "long.csv"), Report()))
    assert len(long[0][1]["text"]) == 500_000 and csv.field_size_limit() == before


def test_faulty_csv_is_named_with_its_line(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'question,answer\na,b\n"a\nb",c,d\na\n\nd,e \xff\nf,g\n')
    with pytest.raises(data.DataError) as caught:
        load(path)
    for named in (
        [3, 5],
        [f"{path}, line 3:", "cells", 2],
        [f"{path}, line 5:", "cells"],
        [f"{path}, line 7:", "UTF-8", "0xff"],
    ):
        assert tells(str(caught.value), *named)
    assert load(path, invalid="drop").num_documents == 2
    path.write_bytes(b'question,answer\n"a"b,c\n')
    with refuses(data.DataError, "line 2:", "CSV"):
        load(path)
    path.write_bytes(b"a,a\nb,c\n")
    with refuses(data.DataError, "line 1:", "columns", "name"):
        load(path)


@pytest.mark.parametrize("kind", ["json", "jsonl", "ndjson"])
def test_compressed_files_give_the_same_batches(tmp_path: Path, kind: str):
    reference = load(write(tmp_path / "plain.jsonl", ROWS))
    path = compressed(write(tmp_path / f"a.{kind}", ROWS))
    assert_same_batches(load(path), reference)
    path.write_bytes(path.read_bytes()[:-20])
    with refuses(data.DataError, f"a.{kind}.gz", "gzip"):
        load(path)
    path.write_bytes(b"no gzip")
    with refuses(data.DataError, f"a.{kind}.gz", "gzip"):
        load(path)


def test_compressed_text_gives_the_same_batches(tmp_path: Path):
    (tmp_path / "a.txt").write_text("the cat sat\non a mat\n" * 30)
    options: dict[str, Any] = {"length": 32, "batch_size": 2, "progress": False}
    reference = list(data.text(tmp_path / "a.txt", tokenizer(), **options))
    assert_same_batches(
        data.text(compressed(tmp_path / "a.txt"), tokenizer(), **options), reference
    )


def frames(rows: list[dict[str, Any]], path: Path, kind: str) -> Path:
    """Rows as lines, compressed in several frames, which such files may have."""
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    compress: Any = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": lambda text: pyarrow.compress(text, "zstd", asbytes=True),
    }[kind]
    path.write_bytes(
        b"".join(compress(b"".join(lines[i : i + 9])) for i in range(0, len(lines), 9))
    )
    return path


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_compressed_files_of_several_frames_are_read_whole(tmp_path: Path, kind: str):
    texts = [{"text": f"{n} naïve\n🙂" * 90} for n in range(40)]
    path = frames(texts, tmp_path / f"a.jsonl.{kind}", kind)
    assert [row for _, row in reading.rows(str(path), Report())] == texts
    (tmp_path / f"b.JSON.{kind}").write_bytes(path.read_bytes())
    assert [row for _, row in reading.rows(str(tmp_path / f"b.JSON.{kind}"), Report())] == texts
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) * 2 // 3], b"none of it", whole[:-3]):
        path.write_bytes(damaged)
        with refuses(data.DataError, f"a.jsonl.{kind}", "read"):
            list(reading.rows(str(path), Report()))
    frames(texts, tmp_path / f"a.parquet.{kind}", kind)
    with refuses(ValueError, f"a.parquet.{kind}", "`source`"):
        load(tmp_path / f"a.parquet.{kind}")


@pytest.mark.parametrize("rows_at_once", [7, 256])
@pytest.mark.parametrize("kind", ["stream", "file", "feather"])
def test_arrow_is_read_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rows_at_once: int
):
    monkeypatch.setattr(reading, "_MOST_ROWS", rows_at_once)
    rows = [{"text": str(i), "more": [{"a": i}] * (i % 3)} for i in range(50)]
    made = pyarrow.Table.from_pylist(rows)
    path = tmp_path / f"a.{'feather' if kind == 'feather' else 'arrow'}"
    if kind == "feather":
        pyarrow.feather.write_feather(made, path)
    else:
        new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
        with new(path, made.schema) as writer:
            writer.write_table(made, max_chunksize=20)
    read = list(reading.rows(str(path), Report()))
    assert [row for _, row in read] == rows
    assert [place.number for place, _ in read] == list(range(1, 51))
    for damaged in (path.read_bytes()[:500], b"", b"no arrow"):
        path.write_bytes(damaged)
        with refuses(data.DataError, path, "Arrow"):
            list(reading.rows(str(path), Report()))


def test_datasets_that_were_saved_are_read_as_they_are(tmp_path: Path):
    reference = load(ROWS)
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "saved", num_shards=3)
    # Files that a folder may also have: of an earlier, larger dataset, and of `map`.
    for name in ("data-00003-of-00004.arrow", "cache-0123456789abcdef.arrow"):
        (tmp_path / "saved" / name).write_bytes(
            (tmp_path / "saved/data-00000-of-00003.arrow").read_bytes()
        )
    assert_same_batches(load(tmp_path / "saved"), reference)
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "one")
    assert_same_batches(load(tmp_path / "one"), reference)
    assert_same_batches(load(str(tmp_path / "one/**/*.*")), reference)
    parts: Any = {"train": made, "test": made.select(range(3))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "two")
    with refuses(ValueError, tmp_path / "two", "`source`", "training"):
        load(tmp_path / "two")
    assert_same_batches(load(tmp_path / "two" / "train"), reference)
    (tmp_path / "saved" / "state.json").write_text("[]")
    with pytest.raises(data.DataError, match="state.json"):
        load(tmp_path / "saved")


@pytest.mark.parametrize("name", ["dataset_infos.json", "dataset_dict.json", "croissant.json"])
def test_files_about_a_dataset_are_no_rows(tmp_path: Path, name: str):
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "train-00000-of-00001.parquet", ROWS)
    (tmp_path / "d" / name).write_text(json.dumps({"default": {"splits": ["train"]}}))
    reference = load(ROWS)
    assert_same_batches(load(tmp_path / "d"), reference)
    assert_same_batches(load(str(tmp_path / "d" / "*")), reference)
    # Named alone, it is data.
    with pytest.raises(data.DataError, match=f"{name}, line 1"):
        load(tmp_path / "d" / name)


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"),
        ("data/train.jsonl.gz", "data/Validation.jsonl"),
        ("train/0000.jsonl", "dev/0000.jsonl"),
        ("data/train_sft-00000-of-00001-ab12.jsonl", "data/test_sft-00000-of-00001-cd34.jsonl"),
        ("train_prefs.jsonl", "test_prefs.jsonl"),
        ("gsm_train.jsonl", "gsm_test.jsonl"),
        ("alpaca-train.jsonl", "alpaca-eval.jsonl"),
        ("train.jsonl", "eval_set.jsonl"),
        ("my_train_data.jsonl", "my_val_data.jsonl"),
        ("training_set.jsonl", "held_out.jsonl"),
        ("train1.jsonl", "validation1.jsonl"),
        ("train.en.jsonl", "test.en.jsonl"),
        ("TRAINSET.jsonl", "testset.jsonl"),
        ("qaTrain.jsonl", "qaDevSet.jsonl"),
        ("my train/0.jsonl", "my holdout/0.jsonl"),
    ],
)
def test_data_for_evaluation_is_not_learned_by_naming_a_folder(tmp_path: Path, names: Any):
    for name in names:
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        compressed(write(path.with_suffix(""), ROWS)) if path.suffix == ".gz" else write(path, ROWS)
    with refuses(ValueError, tmp_path / "d", "`source`", names[1]):
        load(tmp_path / "d")
    assert load(str(tmp_path / "d/**/*.*")).num_documents == 2 * len(ROWS)
    assert load([tmp_path / "d" / name for name in names]).num_documents == 2 * len(ROWS)
    (tmp_path / "d" / names[1]).unlink()
    assert load(tmp_path / "d").num_documents == len(ROWS)


def test_words_within_words_name_no_data_for_evaluation(tmp_path: Path):
    names = ("train", "trainer", "contest", "testimony", "values", "devices", "medieval", "latest")
    for name in names:
        write(tmp_path / f"{name}-00000-of-00001.jsonl", ROWS[:1])
    assert load(tmp_path).num_documents == len(names)
    # There is nothing beside a file that is alone.
    (tmp_path / "alone").mkdir()
    write(tmp_path / "alone" / "train_and_test.jsonl", ROWS)
    assert load(tmp_path / "alone").num_documents == len(ROWS)


@pytest.mark.parametrize("name", ["config.json", "metadata.json", "tokenizer.json", "package.json"])
def test_settings_beside_data_of_another_kind_are_named(tmp_path: Path, name: str):
    path = tmp_path / "d" / "data"
    path.mkdir(parents=True)
    datasets.Dataset.from_list(ROWS).to_parquet(path / "0.parquet")
    for content in ({}, {"license": "mit", "files": [1]}):
        (tmp_path / "d" / name).write_text(json.dumps(content, indent=1))
        for invalid in ("error", "drop"):
            with refuses(ValueError, tmp_path / "d" / name, "`source`"):
                load(tmp_path / "d", invalid=invalid)
    # Rows may be in files of several kinds.
    for rows in (ROWS[0], ROWS):
        (tmp_path / "d" / name).write_text(json.dumps(rows))
        count = len(ROWS) if rows is ROWS else 1
        assert load(tmp_path / "d").num_documents == len(ROWS) + count


def test_folders_and_patterns_are_read_in_the_order_of_names(tmp_path: Path):
    (tmp_path / "d" / "inner").mkdir(parents=True)
    (tmp_path / "d" / ".hidden").mkdir()
    write(tmp_path / "d" / "b.jsonl", ROWS[8:16])
    write(tmp_path / "d" / "a.json", ROWS[:8])
    compressed(write(tmp_path / "d" / "inner" / "c.jsonl", ROWS[16:]))
    (tmp_path / "d" / ".hidden" / "x.jsonl").write_text("{")
    (tmp_path / "d" / "README.md").write_text("what it is")
    (tmp_path / "d" / "LICENSE.txt").write_text("yours")
    reference = load(write(tmp_path / "all.jsonl", ROWS))
    assert_same_batches(load(tmp_path / "d"), reference)
    assert_same_batches(load(str(tmp_path / "d" / "**" / "*.js*")), reference)
    parts = [tmp_path / "d" / "a.json", str(tmp_path / "d" / "b*"), ROWS[16:]]
    assert_same_batches(load(parts), reference)
    twice = (path for path in (tmp_path / "d", tmp_path / "d" / "a.json"))
    assert_same_batches(load(twice), load([*ROWS, *ROWS[:8]]))


# Damage


@pytest.mark.parametrize("kind", ["bz2", "gz", "xz", "zst"])
def test_damage_after_the_first_stream_of_a_compressed_file_is_an_error(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    path, plain = tmp_path / f"a.jsonl.{kind}", write(tmp_path / "a.jsonl", ROWS)
    compress: Any = {
        "bz2": bz2.compress,
        "gz": gzip.compress,
        "xz": lzma.compress,
        "zst": lambda text: pyarrow.compress(text, "zstd", asbytes=True),
    }[kind]
    one, reference = compress(plain.read_bytes()), load([plain, plain])
    whole = [one + one] + [one + bytes(8) + one, one + one + bytes(4)] * (kind == "xz")
    for content in whole:
        path.write_bytes(content)
        assert_same_batches(load(path), reference)
    flipped = bytes([one[0] ^ 0x20]) + one[1:]
    for damaged in (one + flipped, one + b"garbage, garbage", one + one[: len(one) // 2]):
        path.write_bytes(damaged)
        for invalid in ("error", "drop"):
            with pytest.raises(data.DataError, match=str(path)):
                load(path, invalid=invalid)
    if kind == "xz":
        path.write_bytes(one + bytes(3))
        with pytest.raises(data.DataError, match=str(path)):
            load(path)
        monkeypatch.setattr(reading, "_CHUNK", len(one))  # a stream ends where a chunk does
        path.write_bytes(one + one)
        assert_same_batches(load(path), reference)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_whose_values_point_elsewhere_is_an_error(tmp_path: Path, kind: str):
    texts = pyarrow.array([b"good", b"bad \xe9", b"fine"], pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(3, *texts.buffers()[1:])
    offsets = pyarrow.py_buffer(np.array([0, 20, 5, 9], np.int32))
    astray = pyarrow.StringArray.from_buffers(3, offsets, pyarrow.py_buffer(b"x" * 9))
    lists = pyarrow.ListArray.from_arrays([0, 1, 2, 3], pyarrow.array([{"a": "b"}] * 3))
    path = tmp_path / "a.arrow"

    def read(**columns: pyarrow.Array) -> list[Any]:
        made = pyarrow.table(columns)
        new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as file, new(file, made.schema) as writer:
            writer.write_table(made)
        return [row for _, row in reading.rows(str(path), Report())]

    # A text that is not UTF-8 is the fault of its row alone.
    assert [row["text"] for row in read(text=texts, more=lists)] == ["good", "fine"]
    inner = pyarrow.StructArray.from_arrays([astray], ["content"])
    nested = pyarrow.ListArray.from_arrays([0, 1, 2, 3], inner)
    for columns in ({"text": astray}, {"text": texts, "messages": nested}):
        with refuses(data.DataError, path, "Arrow"):
            read(**columns)


def test_a_page_of_parquet_with_another_checksum_is_an_error(tmp_path: Path):
    path = tmp_path / "a.parquet"
    made = pyarrow.table({"text": [f"answer {i}" for i in range(9)]})
    plain: Any = {"compression": "NONE", "use_dictionary": False}
    pyarrow.parquet.write_table(made, path, write_page_checksum=True, **plain)
    path.write_bytes(path.read_bytes().replace(b"answer 5", b"answer 9"))
    with refuses(data.DataError, path, "Parquet"):
        list(reading.rows(str(path), Report()))


# Columns


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def called(name: str, schema: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": f"call {name}"},
        {"role": "assistant", "tool_calls": [call(name, **arguments)]},
        {"role": "tool", "content": "1", "name": name},
        {"role": "assistant", "content": "it is 1"},
    ]
    return {"messages": messages, "tools": [tool(name, **schema)]}


# No two of them have the same fields, at any depth.
CALLS = [
    called("weather", {"city": {"type": "string"}}, city="Paris"),
    called("add", {"a": {"type": "integer", "minimum": 0}}, a=1, more={"b": [{"c": 2}, {"d": 3}]}),
    called("pick", {"of": {"enum": ["x", None]}}, more={}, of=["x", None]),
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
]
CALLING = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def in_columns(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows in the ways in which columns hold them."""
    made = datasets.Dataset.from_list(rows)
    write(folder / "a.jsonl", rows)
    with_json = datasets.Dataset.from_json(
        str(folder / "a.jsonl"), cache_dir=str(folder), keep_in_memory=True
    )
    assert isinstance(with_json, datasets.Dataset)
    with_json.to_parquet(folder / "json.parquet")
    return {
        "Parquet": write(folder / "plain.parquet", rows),
        "Parquet with JSON": folder / "json.parquet",
        "a dataset": made,
        "a dataset with JSON": with_json,
        "an iterable dataset": made.to_iterable_dataset(),
        "one of unknown columns": made.to_iterable_dataset().map(lambda row: row),
    }


def test_columns_add_nothing_to_rows_with_other_fields(tmp_path: Path):
    expected = [to_conversation(row) for row in CALLS]
    first, tools = expected[0].messages, expected[0].tools
    assert "null" not in str(tokenizer(CALLING).apply_chat_template(first, tools, tokenize=False))
    options: dict[str, Any] = {"length": 512, "batch_size": 1, "progress": False}
    reference = list(data.chat(CALLS, tokenizer(CALLING), **options))
    for name, source in in_columns(tmp_path, CALLS).items():
        found = data.chat(source, tokenizer(CALLING), **options)
        assert found.summary.ignored == {}, name
        assert_same_batches(found, reference)


def test_nulls_stay_where_no_column_added_them(tmp_path: Path):
    row = called("f", {"x": {"default": None}}, x=None, y=[None])
    kept = to_conversation(row)
    assert kept.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": None, "y": [None]}
    ((_, read),) = reading.rows(str(write(tmp_path / "a.jsonl", [row])), Report())
    assert read == row
    # Two rows, so that `datasets` takes what differs for JSON.
    with_json = in_columns(tmp_path, [row, *CALLS])
    for name in ("Parquet with JSON", "a dataset with JSON"):
        (part,) = resolve([with_json[name]], texts=False)
        if isinstance(part, GivenRows):
            first = next(iter(part.rows))
        else:
            _, first = next(iter(reading.rows(part, Report())))
        assert to_conversation(first)[:3] == kept[:3], name
    # The values of a map are no fields: none of them is added.
    pairs = pyarrow.map_(pyarrow.string(), pyarrow.string())
    table = pyarrow.table({"a": pyarrow.array([[("x", None), ("y", "z")], [], None], pairs)})
    pyarrow.parquet.write_table(table, tmp_path / "map.parquet")
    read = [row for _, row in reading.rows(str(tmp_path / "map.parquet"), Report())]
    assert read == [{"a": {"x": None, "y": "z"}}, {"a": {}}, {}]
    broken = pyarrow.array(["{", '{"x": null}', None], pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table({"a": broken}), tmp_path / "json.parquet")
    report = Report()
    read = [row for _, row in reading.rows(str(tmp_path / "json.parquet"), report)]
    assert read == [{"a": {"x": None}}, {}]
    ((why, number),) = report.left_out.items()
    assert "JSON" in why and number == 1


# Rows that are given


def test_rows_that_are_given_resume_as_those_of_a_file(tmp_path: Path):
    file = load(write(tmp_path / "a.jsonl", ROWS), epochs=2)
    made = datasets.Dataset.from_list(ROWS)
    given = {
        "a list": ROWS,
        "a tuple": tuple(ROWS),
        "an iterator": iter(ROWS),
        "a dataset": made,
        "an iterable dataset": made.to_iterable_dataset(num_shards=3),
        "a generated dataset": datasets.IterableDataset.from_generator(lambda: iter(ROWS)),
        "several": [made.select(range(10)), ROWS[10:]],
    }
    whole = list(file)
    for name, source in given.items():
        dataset = load(source, epochs=2)
        assert_same_batches(dataset, whole)
        # A state of the file's batches goes on in these.
        count = len(name) % len(whole)
        iterator = iter(file)
        list(islice(iterator, count))
        resumed = iter(dataset)
        resumed.set_state(json.loads(json.dumps(iterator.get_state())))
        assert_same_batches(resumed, whole[count:])


def test_tables_in_memory_are_read_as_their_rows(tmp_path: Path):
    expected = [to_conversation(row) for row in CALLS]
    frame = pandas.DataFrame(CALLS)
    assert frame.isna().to_numpy().any()  # a NaN where a row has no such field
    table = pyarrow.Table.from_pylist([{"tools": None, **row} for row in CALLS])
    given = {
        "pandas": frame,
        "a part of one": pandas.concat([frame, frame]).iloc[::-1].iloc[4:].iloc[::-1],
        # Its lists are arrays of NumPy.
        "pandas of Parquet": pandas.read_parquet(write(tmp_path / "a.parquet", CALLS)),
        "Arrow": table,
        "Arrow, read once": table.to_reader(),
    }
    for name, source in given.items():
        (part,) = resolve(source, texts=False)
        assert isinstance(part, GivenRows)
        assert [to_conversation(row) for row in part.rows] == expected, name
    options: dict[str, Any] = {"length": 512, "batch_size": 1, "progress": False}
    both = data.chat([frame, CALLS], tokenizer(CALLING), **options)
    assert both.num_documents == 8 and both.summary.ignored == {}
    with refuses(data.DataError, "`source`:", "row"):
        load(frame.iloc[:0])
    with pytest.raises(data.DataError, match="`source`, row 2: .*`output`"):
        load(pandas.DataFrame({"instruction": ["a", "b"], "output": ["c", pandas.NA]}))
    with refuses(ValueError, "`source`", "columns", "name"):
        load(pandas.DataFrame([["a", "b"]], columns=["text", "text"]))


def test_given_rows_are_named_by_argument_and_number_and_stay_as_they_are(tmp_path: Path):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    question = {"role": "user", "content": "sum"}
    row = openai([question, {"role": "assistant", "content": "a", "tool_calls": [call]}])
    before = json.dumps(row)
    assert to_conversation(row).messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert json.dumps(row) == before
    bad = datasets.Dataset.from_list([openai([question])])
    with refuses(data.DataError, "`source`, row 1:", "assistant"):
        load(bad)
    with refuses(data.DataError, "`source[1]`, row 2:", "unknown"):
        load([write(tmp_path / "a.jsonl", ROWS), [ROWS[0], {"x": 1}]])
    with refuses(data.DataError, "`source`, row 2:", "object"):
        load([ROWS[0], 3])
    with refuses(TypeError, "`source`", "'train'"):
        load(datasets.DatasetDict({"train": bad}))


# Mixtures


@pytest.mark.parametrize("seed", range(20))
def test_turns_are_dealt_out_in_exact_proportions(seed: int):
    rng = random.Random(seed)
    proportions = [rng.randint(1, 40) for _ in range(rng.randint(2, 6))]
    total, before = sum(proportions), [0] * len(proportions)
    for number in range(1, 3 * total + 1):
        after = counts(number, proportions)
        assert sum(after) == number and sum(b - a for a, b in zip(before, after, strict=True)) == 1
        assert min(b - a for a, b in zip(before, after, strict=True)) == 0
        for count, proportion in zip(after, proportions, strict=True):
            assert abs(count - Fraction(number * proportion, total)) < len(proportions)
        before = after
    assert before == [3 * proportion for proportion in proportions]


def three(**options: Any) -> list[data.Dataset]:
    return [
        load([openai(m) for m in conversations(30 + 9 * i, seed=i)], seed=i, length=100, **options)
        for i in range(3)
    ]


def lines(dataset: Iterable[Any]) -> list[tuple[int, ...]]:
    """The tokens of each row, in order."""
    return [tuple(row) for batch in dataset for row in batch["tokens"].tolist()]


def test_a_mixture_deals_out_the_rows_of_each_dataset_in_its_order():
    parts = three(epochs=None, too_long="cut", batch_size=4)
    mixture = data.mix(parts, [0.5, 0.3, 0.2])
    assert mixture.proportions == data.mix(parts, [50, 30, 20]).proportions == (5, 3, 2)
    assert data.mix(parts, [4, 2, 3]).proportions == (4, 2, 3)
    for ask in (lambda: len(mixture), mixture.rows_used):
        with refuses(TypeError, "end"):
            ask()
    mixed = lines(islice(mixture, 50))
    own = [lines(islice(part, 50)) for part in parts]
    for start in range(0, 200, 10):
        whose = [next(i for i in range(3) if row in own[i]) for row in mixed[start : start + 10]]
        assert Counter(whose) == {0: 5, 1: 3, 2: 2}
    for index, rows in enumerate(own):
        assert [row for row in mixed if row in set(rows)] == rows[: 20 * [5, 3, 2][index]]
    assert mixture.rows_used(50) == [100, 60, 40]
    for batch in islice(mixture, 5):
        assert batch["learned_per_row"].sum() == pytest.approx(batch["mask"].sum())


@pytest.mark.by_default("0")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_resumes_at_every_batch(workers: int):
    mixture = data.mix(three(epochs=2, too_long="cut", workers=workers), [1, 2, 3])
    whole = list(mixture)
    assert len(whole) == len(mixture)
    iterator = iter(mixture)
    for count in range(len(whole) + 1):
        state = json.loads(json.dumps(iterator.get_state()))
        if count % 30 and count != len(whole):
            next(iterator)
            continue
        again = data.mix(three(epochs=2, too_long="cut", workers=workers), [0.1, 0.2, 0.3])
        resumed = iter(again if count < 2 else mixture)
        resumed.set_state(state)
        assert_same_batches(resumed, whole[count:])
        next(iterator, None)
    with refuses(ValueError, "state", "different"):
        iter(data.mix(three(epochs=2, too_long="cut"), [3, 2, 1])).set_state(state)


def test_without_weights_all_datasets_end_together_and_are_whole():
    parts = three(too_long="cut")
    mixture = data.mix(parts)
    found, expected = Counter(), Counter()
    for dataset, counter in ((mixture, found), *((part, expected) for part in parts)):
        for batch in dataset:
            counter.update(batch["tokens"][batch["segments"] > 0].tolist())
    assert found == expected
    assert len(mixture) == -(-sum(part.num_rows for part in parts) // 2)
    # With others, it ends where one has no row left.
    few = data.mix(parts, [1, 1, 10])
    assert len(lines(few)) <= 12 * (parts[2].num_rows // 10 + 1) + 1
    # The rows of the last batch may be spread over more of them.
    used, total = few.rows_used(), len(few) * 2
    assert sum(used) in (total, total - 1) and used[2] == parts[2].num_rows
    assert few.rows_used(6) == [1, 1, 10] and few.rows_used(10**6) == used


def test_datasets_that_cant_be_mixed_are_named():
    one, other = load(ROWS), load(ROWS, length=512)
    with refuses(ValueError, "`length`", [256, 512]):
        data.mix([one, other])
    with refuses(ValueError, "`batch_size`"):
        data.mix([one, load(ROWS, batch_size=3)])
    with refuses(ValueError, "two"):
        data.mix([one])
    for wrong in (one, [one, ROWS]):
        with refuses(TypeError, "`datasets`", "list"):
            data.mix(wrong)  # type: ignore[arg-type]
    with refuses(ValueError, "`weights`", 2):
        data.mix([one, one], [1])
    for weight in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=r"`weights\[1\]`"):
            data.mix([one, one], [1, weight])
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    preferred = data.preferences(pairs, tokenizer(), length=256, batch_size=2, progress=False)
    with refuses(ValueError, "preferences"):
        data.mix([one, preferred])


def test_columns_are_missed_only_where_there_are_rows():
    class Parts(list[Any]):
        columns = {"text": "body"}

    nothing: Any = Parts()
    rows: Any = Parts([GivenRows("rows", [{"other": "x"}])])
    assert not list(documents.read_rows(nothing, dict, Report()))
    with refuses(data.DataError, "`columns`", "body"):
        list(documents.read_rows(rows, dict, Report()))
