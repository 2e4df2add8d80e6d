"""Checkpoints that are named as on the Hugging Face Hub, served by a local endpoint."""

import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from flax import nnx

from chats import CHATML, LLAMA3, conversations, openai, tokenizer
from hub_server import files_of, serve
from megatrain_jax import data
from megatrain_jax._src.lm.common.hub import folder_or_download
from megatrain_jax.models import Decoder, DecoderConfig, load_pretrained, save_pretrained
from messages import refuses, tells

NAME = "someone/tiny"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 400,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def make_checkpoint(folder: Path) -> Path:
    """A decoder of one layer, with its tokenizer."""
    save_pretrained(Decoder(DecoderConfig.from_hf(CONFIG), rngs=nnx.Rngs(0)), folder)
    tokenizer(CHATML).save_pretrained(folder)
    return folder


def test_a_model_is_downloaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = files_of(make_checkpoint(tmp_path / "served"))
    files |= {"pytorch_model.bin": b"a pickle", "modeling_tiny.py": b"raise SystemExit('run')\n"}
    monkeypatch.chdir(tmp_path)
    with serve({f"models/{NAME}": files}, tmp_path / "cache", monkeypatch) as hub:
        folder = load_pretrained(NAME).folder
        assert folder.is_relative_to(tmp_path / "cache")
        rows = [openai(messages) for messages in conversations(3)]
        options: dict[str, Any] = {"length": 256, "batch_size": 1, "progress": False}
        for ours, theirs in zip(
            data.chat(rows, NAME, **options), data.chat(rows, tokenizer(), **options), strict=True
        ):
            assert ours["tokens"].tolist() == theirs["tokens"].tolist()
        with pytest.raises(FileNotFoundError) as caught:
            load_pretrained("someone/missing")
        error = str(caught.value)
    # Each once, and neither pickles nor code.
    asked = hub.asked
    assert len(asked) == len(set(asked))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(asked)
    assert not {"pytorch_model.bin", "modeling_tiny.py"} & set(asked)
    assert tells(error, "folder", "someone/missing")
    assert "RepositoryNotFoundError" in error
    assert "`hf download someone/missing --local-dir FOLDER`" in error
    # What was downloaded is a folder like any other.
    saved = save_pretrained(
        load_pretrained(folder).model(), tmp_path / "saved", chat_template=LLAMA3
    )
    assert (saved / "tokenizer.json").exists() and not (saved / "modeling_tiny.py").exists()


def test_a_revision_is_downloaded_where_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, **_: Any) -> Path:
        asked.append((name, revision))
        return tmp_path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for given in (NAME, f"{NAME}@v1.0"):
        assert folder_or_download("folder", given, "a model", ["*.json"]) == tmp_path
    assert asked == [(NAME, None), (NAME, "v1.0")]


def test_a_folder_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    make_checkpoint(tmp_path / NAME)
    assert load_pretrained(NAME).folder == Path(NAME)
    # A folder of that owner makes it a path.
    for path in ("someone/missing", "missing"):
        with refuses(FileNotFoundError, "`folder`", path):
            load_pretrained(path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refuses(FileNotFoundError, "a/b", "pip install huggingface_hub"):
        load_pretrained("a/b")


def test_a_template_given_by_hand_is_exported_with_the_tokenizer(tmp_path: Path):
    source = make_checkpoint(tmp_path / "source")
    rows = [openai(messages) for messages in conversations(4)]
    options: dict[str, Any] = {"length": 512, "batch_size": 1, "progress": False}
    chats = data.chat(rows, source, chat_template=LLAMA3, **options)
    model = load_pretrained(source).model()
    folder = save_pretrained(model, tmp_path / "saved", chat_template=chats.chat_template)
    exported = transformers.AutoTokenizer.from_pretrained(folder)
    assert exported.chat_template == LLAMA3
    for ours, theirs in zip(chats, data.chat(rows, folder, **options), strict=True):
        assert ours["tokens"].tolist() == theirs["tokens"].tolist()
    copied = save_pretrained(model, tmp_path / "copied")
    assert transformers.AutoTokenizer.from_pretrained(copied).chat_template == CHATML
    with refuses(ValueError, "`chat_template`", "Jinja", "/no/such.jinja"):
        save_pretrained(model, tmp_path / "other", chat_template="/no/such.jinja")
    with refuses(TypeError, "`chat_template`", 3):
        save_pretrained(model, tmp_path / "other", chat_template=3)  # type: ignore[arg-type]
