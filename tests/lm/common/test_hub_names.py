"""Names on the Hugging Face Hub in the command and in `data`, served by a local endpoint."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hub_server import COMMIT, files_of, serve
from megatrain_jax import data
from megatrain_jax._src.lm.cli.main import main
from megatrain_jax._src.lm.common.hub import hub_rows, is_hub_model
from messages import refuses, tells

torch = pytest.importorskip("torch", reason='makes a checkpoint: pip install -e ".[torch]"')

from tiny_chats import conversation, make_checkpoint  # noqa: E402

CHATS = "someone/chats"
_ABOUT = """---
configs:
- config_name: default
  data_files:
  - {split: train_sft, path: data/sft*.jsonl}
- config_name: more
  data_files: more.jsonl
---
"""
PARTS = {"data/sft-0.jsonl": range(6), "data/sft-1.jsonl": range(6, 12), "more.jsonl": range(3)}


def lines(numbers: Any) -> bytes:
    return "".join(json.dumps(conversation(number)) + "\n" for number in numbers).encode()


def repository() -> dict[str, bytes]:
    """The files of a dataset with two configurations."""
    return {"README.md": _ABOUT.encode(), **{name: lines(part) for name, part in PARTS.items()}}


def tokens_of(source: Any, tokenizer: Path | str) -> list[Any]:
    options: dict[str, Any] = {"length": 64, "batch_size": 1, "progress": False}
    return [batch["tokens"].tolist() for batch in data.chat(source, tokenizer, **options)]


def test_datasets_are_read_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = make_checkpoint(tmp_path / "model")
    local = [tmp_path / Path(name).name for name in PARTS]
    for path, numbers in zip(local, PARTS.values(), strict=True):
        path.write_bytes(lines(numbers))
    wanted = tokens_of(local[:2], tokenizer)
    monkeypatch.chdir(tmp_path)
    with serve({f"datasets/{CHATS}": repository()}, tmp_path / "cache", monkeypatch) as hub:
        assert tokens_of(f"{CHATS}:train_sft", tokenizer) == wanted
        assert tokens_of(f"{CHATS}@{COMMIT}:train_sft", tokenizer) == wanted
        both = [f"{CHATS}:more:train", local[0]]
        assert tokens_of(both, tokenizer) == tokens_of([local[2], local[0]], tokenizer)
        assert hub.asked.count("data/sft-0.jsonl") == 1
        with refuses(FileNotFoundError, "`source`", "NAME:SPLIT", "--repo-type"):
            tokens_of(f"{CHATS}:test", tokenizer)
    # The server is gone: datasets come from the cache, or the user is told what to do.
    for place in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{place}.HF_HUB_OFFLINE", True)
    assert tokens_of(f"{CHATS}:default:train_sft", tokenizer) == wanted
    with refuses(FileNotFoundError, "configurations", "HF_HUB_OFFLINE"):
        tokens_of(f"{CHATS}:train_sft", tokenizer)
    with refuses(FileNotFoundError, "someone/missing", "HF_HUB_OFFLINE", "unset"):
        tokens_of("someone/missing:train", tokenizer)
    with refuses(FileNotFoundError, "`tokenizer`", "HF_HUB_OFFLINE", "unset"):
        tokens_of(local[0], "someone/missing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refuses(FileNotFoundError, "a/b:train", "pip install datasets"):
        tokens_of("a/b:train", tokenizer)


def test_files_and_folders_go_before_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert hub_rows(f"{CHATS}:train") and is_hub_model("someone/tiny@v1.0")
    for path in ("chats.jsonl", "a/b/c:train", "a/b", "~/a:train", "a/b:c:d:e", "/a/b:c", 3):
        assert hub_rows(path) is None, path
    (tmp_path / "someone").mkdir()
    assert hub_rows(f"{CHATS}:train") is None and not is_hub_model("someone/tiny@v1.0")


def test_the_command_reads_and_uploads_by_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model = files_of(make_checkpoint(tmp_path / "served"))
    served = {"models/someone/tiny": model, f"datasets/{CHATS}": repository()}
    monkeypatch.chdir(tmp_path)
    words = f"finetune --model someone/tiny --data {CHATS}:train_sft --length 64 --batch 2"
    command = [*words.split(), "--steps", "1", "--held-out", "0", "--out", "run"]
    with serve(served, tmp_path / "cache", monkeypatch) as hub:
        hub.accepts = False
        assert main([*command, "--push", "someone/mine"]) == 1
        told = capsys.readouterr().err
        export = files_of(tmp_path / "run" / "model")
        assert tells(told, "`push`", "someone/mine", "`hf upload someone/mine run/model`")
        assert hub.made == {"someone/mine": True}
        hub.accepts = True
        assert main([*command, "--push", "someone/mine"]) == 0
        out = capsys.readouterr().out
        assert tells(out, "done") and f"/someone/mine/commit/{COMMIT}" in out
        uploaded = hub.repositories["models/someone/mine"]
        export.pop("megatrain_export.json")
        assert uploaded.keys() == export.keys() and "model.safetensors" in export
        assert uploaded == export
        # A finished run is uploaded once to each repository.
        hub.accepts = False
        assert main([*command, "--push", "someone/mine"]) == 0
        assert main([*command, "--push", "someone/second"]) == 1
        assert main([*command, "--data", CHATS, "--out", "other"]) == 2
        assert f"{CHATS}:train" in capsys.readouterr().err
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
        assert main([*command, "--push", "someone/other", "--out", "other"]) == 2
        assert "`hf auth login`" in capsys.readouterr().err and not (tmp_path / "other").exists()
