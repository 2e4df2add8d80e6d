"""Documents of millions of characters are read, tokenised and packed part by part."""

import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from chats import assert_same_batches, tokenizer
from megatrain_jax import data
from megatrain_jax._src.lm.data import documents, reading
from megatrain_jax._src.lm.data.batches import batch, draw_epoch, pack
from megatrain_jax._src.lm.data.corpus import CorpusBuilder
from megatrain_jax._src.lm.data.report import Report, RowOrigin
from megatrain_jax._src.lm.data.tokenizer import FastTokenizer
from places import HELPERS

LINE = "the cat sat on a mat, while rain fell; naïve façade 🙂\n"
MEBIBYTE = 2**20


@contextmanager
def traced_peak() -> Iterator[Callable[[], float]]:
    """Gives the most MiB that Python held at a time since then."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] / MEBIBYTE
    finally:
        tracemalloc.stop()


def test_a_text_file_of_any_size_is_read_in_blocks(tmp_path: Path):
    line = LINE.strip() * 20 + "\n"
    count = 12 * MEBIBYTE // len(line)
    for name, opened in (("a.txt", open), ("a.txt.gz", gzip.open)):
        with opened(tmp_path / name, "wb") as stream:
            for _ in range(count):
                stream.write(line.encode())
        with traced_peak() as peak:
            blocks = reading.blocks(str(tmp_path / name), Report())
            assert sum(len(block) for block in blocks) == count * len(line)
            # A character takes up to four bytes, and some blocks are held at a time.
            assert peak() < 6


@pytest.mark.by_default("json", "parquet")
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet"])
def test_rows_with_long_documents_are_read_one_by_one(tmp_path: Path, kind: str):
    text, count = LINE.replace("🙂", "") * (MEBIBYTE // len(LINE)), 24
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        column = pyarrow.array([text] * count)
        table = pyarrow.table({"text": column})
        pyarrow.parquet.write_table(table, path, use_dictionary=False)
    else:
        with (gzip.open if kind.endswith("gz") else open)(path, "wb") as stream:
            lines = {"csv": "text\n" + f'"{text}"\n' * count}
            lines["json"] = "[" + ",".join([json.dumps({"text": text})] * count) + "]"
            made = lines.get(kind, (json.dumps({"text": text}) + "\n") * count)
            stream.write(made.encode())
    with traced_peak() as peak:
        found = [len(row["text"]) for _, row in reading.rows(str(path), Report())]
        assert found == [len(text)] * count
        # A row and the bytes it is read from, some times over; all rows are 24 and more.
        assert peak() < (20 if kind == "parquet" else 12)


def test_a_long_text_of_a_row_is_tokenised_in_blocks(monkeypatch: pytest.MonkeyPatch):
    text = LINE * 200
    rows = [{"text": text}, {"prompt": LINE * 30, "completion": text}, {"text": "a mat"}]
    options: dict[str, Any] = {"length": 64, "batch_size": 2, "progress": False}
    whole = list(data.text(rows, tokenizer(), **options))
    sizes: list[int] = []
    encode = FastTokenizer.encode

    def recorded(self: FastTokenizer, texts: list[str]) -> Any:
        sizes.append(sum(map(len, texts)))
        return encode(self, texts)

    monkeypatch.setattr(FastTokenizer, "encode", recorded)
    monkeypatch.setattr(documents, "_LONG", 1000)
    monkeypatch.setattr(documents, "_BLOCK", 250)
    monkeypatch.setattr(documents, "_CHARACTERS_AT_ONCE", 500)
    assert_same_batches(data.text(rows, tokenizer(), **options), whole)
    assert sum(sizes) == sum(sum(map(len, row.values())) for row in rows)
    assert len(sizes) > 20 and max(sizes) < 500 + 250 + len(LINE)


def test_rows_of_millions_of_tokens_are_packed_in_little_memory():
    length = 2**22
    lengths = np.random.default_rng(0).integers(1, 5000, 4000).astype(np.int32)
    lengths[:3] = length, length - 1, length // 2
    with traced_peak() as peak:
        packing = pack(lengths, length)
        rows = [*map(draw_epoch(packing, lengths, 0, 0).__getitem__, range(packing.num_rows))]
        assert peak() < 2
    sizes = [int(lengths[row].sum()) for row in rows]
    assert max(sizes) == length and sum(sizes) == lengths.sum()
    assert packing.num_rows == -(-int(lengths.sum()) // length)


def test_a_row_of_a_million_tokens_has_int32_positions_and_little_beside():
    size, length = 2**20 + 1000, 2**20
    report = Report()
    builder = CorpusBuilder(length, "split", report, lambda tokens: None)
    with traced_peak() as peak:
        for start in range(0, size, 2**16):
            tokens = np.arange(start, min(start + 2**16, size), dtype=np.int32)
            builder.extend(tokens, np.ones(len(tokens), np.bool_))
        builder.end(RowOrigin("a.txt"))
        corpus = builder.finish()
        # Five bytes a token, and a half more while the arrays grow.
        assert peak() * MEBIBYTE < 8 * size
    made = batch(corpus, [np.array([0]), np.array([1])], length)
    assert {made[name].dtype.name for name in ("tokens", "labels", "positions")} == {"int32"}
    np.testing.assert_array_equal(made["positions"][0], np.arange(length))
    np.testing.assert_array_equal(made["labels"][0], made["tokens"][0] + 1)
    np.testing.assert_array_equal(made["positions"][1, :1000], np.arange(1000))
    assert made["segments"].sum() == size


MEASURED = """
import json, sys
from chats import tokenizer, assert_same_batches
from megatrain_jax import data

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024

options = {"length": 2**20, "batch_size": 1, "progress": False}
data.text([{"text": "a mat"}], tokenizer(), **options)
before = status("VmRSS")
dataset = data.text(sys.argv[1], tokenizer(), **options)
held = dataset.summary.num_bytes / 2**20
print(json.dumps([dataset.num_tokens, held, status("VmHWM") - before]))
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_tokenising_a_long_document_takes_bounded_memory(tmp_path: Path, kind: str):
    text = LINE * (24 * MEBIBYTE // len(LINE))
    path = tmp_path / f"a.{kind}"
    path.write_text(text if kind == "txt" else json.dumps({"text": text}), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(path)],
        capture_output=True,
        text=True,
        cwd=HELPERS,
    )
    assert not ran.returncode, ran.stderr
    num_tokens, held, grown = json.loads(ran.stdout.splitlines()[-1])
    assert num_tokens > 8_000_000
    # All at once would take some 300 bytes a token: more than 2,400 MiB.
    row = 0 if kind == "txt" else 5 * len(text) / MEBIBYTE
    assert grown < held + row + 600
