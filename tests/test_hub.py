"""Checkpoints that are named as on the Hugging Face Hub, served by a local endpoint."""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import transformers
from flax import nnx

from chats import CHATML, LLAMA3, conversations, openai, tokenizer
from megatrain_jax import data
from megatrain_jax.models import Decoder, DecoderConfig, load_pretrained, save_pretrained

NAME, COMMIT = "someone/tiny", "0123456789abcdef0123456789abcdef01234567"
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


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hub does about one model."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        if path.startswith(f"/api/models/{NAME}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": _hash(content)}
                for name, content in files.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in files]
            info = {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings}
            self.answer(json.dumps({**info, "private": False, "tags": []}).encode())
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/") and Path(path).name in files:
            if self.command == "GET":
                self.asked.append(Path(path).name)
            self.answer(files[Path(path).name])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_hash(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    folder = make_checkpoint(tmp_path / "served")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_tiny.py").write_text("raise SystemExit('it was run')\n")
    handler = type("Served", (Hub,), {"folder": folder, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_model_is_downloaded_by_its_name(
    tmp_path: Path, hub: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
):
    endpoint, asked = hub
    # As HF_ENDPOINT and HF_HOME are read when the package is imported.
    settings = {"ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / "cache")}
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {**settings, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.chdir(tmp_path)
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
    assert len(asked) == len(set(asked))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(asked)
    assert not {"pytorch_model.bin", "modeling_tiny.py"} & set(asked)
    assert "there is no folder someone/missing, and it can't be downloaded" in error
    assert "RepositoryNotFoundError" in error
    assert "`hf download someone/missing --local-dir FOLDER`" in error
    # What was downloaded is a folder like any other.
    saved = save_pretrained(
        load_pretrained(folder).model(), tmp_path / "saved", chat_template=LLAMA3
    )
    assert (saved / "tokenizer.json").exists() and not (saved / "modeling_tiny.py").exists()


def test_a_folder_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    make_checkpoint(tmp_path / NAME)
    assert load_pretrained(NAME).folder == Path(NAME)
    # A folder of that owner makes it a path.
    for path in ("someone/missing", "missing"):
        with pytest.raises(FileNotFoundError, match=f"`folder` must be .* no folder {path}"):
            load_pretrained(path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="no folder a/b.*pip install huggingface_hub"):
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
    with pytest.raises(TypeError, match="`chat_template` must be a Jinja template"):
        save_pretrained(model, tmp_path / "other", chat_template=3)  # type: ignore[arg-type]
