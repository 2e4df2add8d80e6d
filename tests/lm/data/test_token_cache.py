"""Tokenised data on disk: equal to data in memory, made once, and made anew if it is damaged."""

import json
import os
import resource
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import killed_writers
from chats import conversations, openai, tokenizer
from megatrain_jax import data
from megatrain_jax._src.common.unfinished import UnfinishedFolder
from megatrain_jax._src.lm.data import corpus as corpus_module
from megatrain_jax._src.lm.data.batches import batch
from megatrain_jax._src.lm.data.corpus import CorpusBuilder, GrowingFiles
from megatrain_jax._src.lm.data.report import Report, RowOrigin
from messages import refuses, warns

OPTIONS: dict[str, Any] = {"length": 256, "batch_size": 2, "progress": False, "seed": 3}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(openai(chat)) + "\n" for chat in conversations(12)))
    return path


def batches_of(dataset: data.Dataset) -> list[dict[str, Any]]:
    return [{name: a.tolist() for name, a in batch.items()} for batch in dataset]


def both(dataset: data.Dataset) -> list[Any]:
    """Everything that training reads, also after a split."""
    train, held = dataset.split(0.3, seed=1)
    parts = (dataset, train, held)
    return [[part.fingerprint, part.num_tokens, batches_of(part)] for part in parts]


@pytest.mark.parametrize("spilled", [1, corpus_module._SPILLED])
@pytest.mark.parametrize("kind", ["chat", "text", "preferences", "unpaired", "distillation"])
def test_mapped_data_is_the_data_in_memory(kind, spilled, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_SPILLED", spilled)
    rows: dict[str, list[dict[str, Any]]] = {
        "chat": [openai(chat) for chat in conversations(12)],
        "text": [{"text": f"number {n} " * (n + 1) * 9} for n in range(9)],
        "preferences": [
            {"prompt": f"say {n}", "chosen": f"it is {n}", "rejected": "no"} for n in range(9)
        ],
        "unpaired": [
            {"prompt": f"say {n}", "completion": f"it is {n}", "label": n % 2 == 0}
            for n in range(9)
        ],
        "distillation": [
            {
                "input_ids": [5, 6, 7 + n],
                "topk_token_ids": [[1, 2], [3, 4], [n, 9]],
                "topk_logprobs": [[-0.5, -1.0], [-0.25, -2.0], [-1.5, -3.0]],
            }
            for n in range(9)
        ],
    }
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[kind]))
    options = OPTIONS | ({"topk": 2, "length": 8} if kind == "distillation" else {})
    read = getattr(data, kind)
    plain = read(path, tokenizer(), **options)
    made, found = (read(path, tokenizer(), cache=tmp_path / "c", **options) for _ in range(2))
    assert both(plain) == both(made) == both(found)
    assert made.chat_template == found.chat_template == plain.chat_template
    assert (made.summary.is_reused, found.summary.is_reused) == (False, True)
    assert all(str(tmp_path / "c") in str(one.summary) for one in (made, found))
    assert str(tmp_path / "c") not in str(plain.summary)
    # A saved position is the same place in all of them.
    iterator = iter(plain)
    next(iterator)
    state, expected = iterator.get_state(), next(iterator)
    for dataset in (made, found):
        other = iter(dataset)
        other.set_state(state)
        np.testing.assert_array_equal(next(other)["tokens"], expected["tokens"])


def test_only_equal_requests_share_data(chats, tmp_path):
    cache = tmp_path / "cache"

    def read(**changes: Any) -> bool:
        given = {"source": chats, "tokenizer": tokenizer(), **OPTIONS, "cache": cache, **changes}
        return data.chat(given.pop("source"), given.pop("tokenizer"), **given).summary.is_reused

    assert not read() and read()
    # The order of batches doesn't affect the tokens.
    assert read(batch_size=1, seed=9, epochs=None)
    assert not read(length=512) and not read(train_on="all") and not read(leading="drop")
    assert not read(columns={"messages": "messages"}) and read(columns={"messages": "messages"})
    template = str(tokenizer().chat_template).replace("Be kind.", "Be good.")
    assert not read(chat_template=template) and read(chat_template=template)
    larger = tokenizer()
    larger.add_special_tokens({"additional_special_tokens": ["<new>"]})
    assert not read(tokenizer=larger)
    # A model with other ids beside the tokenizer may refuse other rows.
    larger.save_pretrained(tmp_path / "model")
    for size in (len(larger), len(larger) + 1):
        (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": size}))
        assert not read(tokenizer=tmp_path / "model") and read(tokenizer=tmp_path / "model")
    status = chats.stat()
    os.utime(chats, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not read() and read()
    # Rows in memory have no name on disk.
    count = len(list(cache.iterdir()))
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    assert not read(source=rows) and not read(source=rows) and len(list(cache.iterdir())) == count


def changed_fields(content: bytes) -> list[bytes]:
    """A `corpus.json` with each of its values changed, with its own checksum as it was."""
    written = json.loads(content)
    found = []
    for name, value in written["content"].items():
        for other in (None if value else "", 2 if name == "pieces_per_unit" else [value]):
            about = {**written["content"], name: other}
            found.append(json.dumps({**written, "content": about}).encode())
    return found


@pytest.mark.by_default("tokens.npy", "corpus.json")
@pytest.mark.parametrize("name", ["tokens.npy", "learned.npy", "starts.npy", "corpus.json"])
def test_damaged_data_is_made_anew(name, chats, tmp_path):
    def read() -> data.Dataset:
        return data.chat(chats, tokenizer(), cache=tmp_path / "cache", **OPTIONS)

    wanted = both(read())
    (folder,) = (tmp_path / "cache").iterdir()
    content = (folder / name).read_bytes()
    changed = [content[:-1] + bytes([content[-1] ^ 1]), content[: len(content) // 2], b"", None]
    if name == "corpus.json":
        changed += [
            json.dumps(other).encode() for other in ([], {}, {"content": [], "checksum": ""})
        ]
        changed += [b"[" * 100_000, b"5" * 5000, b"\xff", *changed_fields(content)]
    else:
        # In the header, which says how the numbers are read.
        changed.append(content.replace(b"<i", b"<u", 1).replace(b"|b", b"|u", 1))
        for at in (0, 8, content.index(b"}")):
            changed.append(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    for damaged in changed:
        (folder / name).unlink()
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        with warns(UserWarning, "damaged"):
            made = read()
        assert not made.summary.is_reused and both(made) == wanted and read().summary.is_reused


@pytest.mark.parametrize("name", ["corpus.json", "tokens.npy"])
def test_what_is_no_regular_file_is_not_opened(name, chats, tmp_path):
    def read() -> data.Dataset:
        return data.chat(chats, tokenizer(), cache=tmp_path / "cache", **OPTIONS)

    wanted = both(read())
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    os.link(folder / name, tmp_path / "pipe")
    opened: list[int] = []

    def write() -> None:
        with (tmp_path / "pipe").open("wb"):  # waits for one that reads
            opened.append(1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write)
        with warns(UserWarning, "damaged"):
            made = read()
        before = len(opened)
        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.close(reader)
    assert before == 0 and both(made) == wanted


def test_whatever_has_the_name_of_a_folder_is_replaced(chats, tmp_path):
    def read() -> data.Dataset:
        return data.chat(chats, tokenizer(), cache=tmp_path / "cache", **OPTIONS)

    read()
    (folder,) = (tmp_path / "cache").iterdir()
    for make in (folder.touch, lambda: folder.symlink_to("nowhere"), folder.mkdir):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
        make()
        with warns(UserWarning, "damaged"):
            assert not read().summary.is_reused
        assert read().summary.is_reused


def test_files_are_on_disk_before_their_name(chats, tmp_path, monkeypatch):
    events: list[Any] = []
    fsync, rename = os.fsync, Path.rename

    def synced(opened: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{opened}")))
        fsync(opened)

    def renamed(path: Path, to: Path) -> Path:
        events.append(sorted(path.iterdir()))
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    data.chat(chats, tokenizer(), cache=tmp_path / "cache", **OPTIONS)
    at = next(i for i, event in enumerate(events) if isinstance(event, list))
    files = events[at]
    assert files and {path.name for path in [*files, files[0].parent]} == set(events[:at])
    assert events[at + 1 :] == ["cache"]


@pytest.mark.parametrize("folder", ["chats.jsonl", "chats.jsonl/tokens"])
def test_a_folder_that_can_not_be_made_is_named(folder, chats):
    with pytest.raises(OSError, match=rf"`cache` = \S+{folder}: .*another"):
        data.chat(chats, tokenizer(), cache=chats.parent / folder, **OPTIONS)


@pytest.mark.parametrize("spilled", [1, corpus_module._SPILLED])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_full_disk_is_that_of_the_cache(spilled, share, chats, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_SPILLED", spilled)
    cache = tmp_path / "cache"
    data.chat(chats, tokenizer(), cache=cache, **OPTIONS)
    largest = max(path.stat().st_size for path in cache.glob("*/*"))
    shutil.rmtree(cache)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(200, int(share * largest)), before[1]))
    try:
        with refuses(OSError, f"`cache` = {cache}"):
            data.chat(chats, tokenizer(), cache=cache, **OPTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(cache.iterdir())


def test_what_a_killed_start_leaves_is_removed_by_the_next(chats, tmp_path):
    cache = tmp_path / "cache"
    with killed_writers.left_by(cache / "3f0c") as left:
        data.chat(chats, tokenizer(), cache=cache, **OPTIONS)
        assert left.exists()  # its writer lives
    longer: Any = OPTIONS | {"length": 512}
    data.chat(chats, tokenizer(), cache=cache, **longer)
    assert all((path / "corpus.json").exists() for path in cache.iterdir())


def test_starts_at_the_same_time_make_the_same_data(chats, tmp_path):
    def read(_: int) -> data.Dataset:
        return data.chat(chats, tokenizer(), cache=tmp_path / "cache", **OPTIONS)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, range(4)))
    wanted = both(data.chat(chats, tokenizer(), **OPTIONS))
    assert all(both(dataset) == wanted for dataset in found)
    # Nothing else is left behind, also not by data with faults.
    assert len(list((tmp_path / "cache").iterdir())) == 1
    with pytest.raises(data.DataError):
        data.chat(chats, tokenizer(), cache=tmp_path / "cache", length=8, batch_size=1)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_memory_holds_a_part_of_the_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_SPILLED", 10_000)
    document, peaks = np.arange(1000, dtype=np.int32), {}
    entries = {"topk_logprobs": np.ones((1000, 2), np.float32)}
    total = 0
    for name in ("memory", "files"):
        new = UnfinishedFolder(tmp_path / "new")
        files = GrowingFiles(new) if name == "files" else None
        tracemalloc.start()
        try:
            builder = CorpusBuilder(1000, "error", Report(), lambda _: None, files=files)
            for _ in range(500):
                builder.extend(document, document > 0, entries)
                builder.end(RowOrigin("a"))
            corpus = builder.finish()
            # Rows are read by index.
            pieces = batch(corpus, [np.array([3]), np.array([499])], 1000)
            assert pieces["tokens"].tolist() == [document.tolist()] * 2
            peaks[name] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        total = corpus.num_bytes
    assert total > 6_000_000 and peaks["memory"] > total > 10 * peaks["files"]
