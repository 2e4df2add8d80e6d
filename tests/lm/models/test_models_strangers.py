"""Folders of strangers: what is read of them, what is copied out of them, and what is refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from megatrain_jax._src.lm.models.pretrained import parameter_tensors
from megatrain_jax.models import Decoder, load_pretrained, save_pretrained
from messages import refuses

torch = pytest.importorskip("torch", reason='compared with PyTorch: pip install -e ".[torch]"')

from families import make_torch, save  # noqa: E402
from filled_models import at, filled  # noqa: E402

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A tiny llama in one file, with the files that a tokenizer has."""
    folder = save(make_torch("llama"), tmp_path_factory.mktemp("made") / "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"name": name}))
    (folder / "merges.txt").write_text("a b\n")
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy of it to be spoiled."""
    return Path(shutil.copytree(made, tmp_path / "llama"))


def sharded(folder: Path, factor: float = 2.0) -> Path:
    """Puts shards with other numbers than the one file's into a folder."""
    model = make_torch("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    other = save(model, folder.with_name("shards"), max_shard_size="20KB")
    for path in other.glob("model*"):
        path.replace(folder / path.name)
    return folder


def check_same_as_transformers(folder: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    pretrained = load_pretrained(folder)
    for entry in parameter_tensors(pretrained.config):
        ours = np.asarray(at(pretrained.params, entry.path))
        np.testing.assert_array_equal(ours, reference[entry.names[0]].numpy())


def change_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_one_file_goes_before_an_index(folder):
    sharded(folder)
    check_same_as_transformers(folder)
    (folder / "model.safetensors").unlink()
    check_same_as_transformers(folder)


def test_shards_may_lie_in_a_folder_below(folder):
    (sharded(folder) / "model.safetensors").unlink()
    (folder / "below").mkdir()
    for path in folder.glob("model-*"):
        path.replace(folder / "below" / path.name)
    change_index(folder, lambda m: m.update({name: f"below/{file}" for name, file in m.items()}))
    check_same_as_transformers(folder)


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "{}", "a/../../other.safetensors", "", ".", "..", "a\0b", "\n"]
)
def test_an_index_does_not_lead_out_of_its_folder(name, folder):
    (sharded(folder) / "model.safetensors").unlink()
    first = sorted(folder.glob("model-*"))[0]
    other = first.replace(folder.parent / "other.safetensors")
    (folder / "a").mkdir()
    name = name.format(other)
    change_index(folder, lambda m: m.update({k: name for k, v in m.items() if v == first.name}))
    with refuses(ValueError, "model.safetensors.index.json", repr(name)):
        load_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX, "model-00001-of"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to nothing"])
def test_only_regular_files_are_read(name, kind, folder):
    if name.startswith("model-") or name == INDEX:
        (sharded(folder) / "model.safetensors").unlink()
    (path,) = folder.glob(f"{name}*") if name != "model.safetensors" else [folder / name]
    replace(path, kind)
    error = FileNotFoundError if kind == "link to nothing" else ValueError
    with refuses(error, path.name):
        load_pretrained(folder)


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "link to nothing":
            path.symlink_to("nothing")


def into_cache(folder: Path, cache: Path, *, shared: bool) -> Path:
    """Lays a folder out as huggingface_hub's cache does; returns the snapshot."""
    model = cache / "models--org--tiny"
    snapshot = model / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    (cache / "blobs" / "ff").mkdir(parents=True)
    for path in folder.iterdir():
        blob = model / "blobs" / f"blob-of-{path.name}"
        if shared:
            path.replace(cache / "blobs" / "ff" / path.name)
            blob.symlink_to(Path("../../blobs/ff") / path.name)
        else:
            path.replace(blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.mark.parametrize("shared", [False, True])
def test_a_snapshot_of_the_cache_is_read_and_copied(shared, folder, made, tmp_path):
    snapshot = into_cache(folder, tmp_path / "hub", shared=shared)
    check_same_as_transformers(snapshot)
    saved = save_pretrained(filled(load_pretrained(snapshot)), tmp_path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "generation_config.json"):
        assert not (saved / name).is_symlink()
        assert (saved / name).read_bytes() == (made / name).read_bytes()


@pytest.mark.parametrize("within_cache", [False, True])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "merges.txt", "additional_chat_templates/a.jinja"]
)
def test_what_lies_elsewhere_is_not_copied(name, within_cache, folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    if within_cache:
        folder = into_cache(folder, tmp_path / "hub", shared=False)
        blob = tmp_path / "hub" / "models--org--tiny" / "blobs" / "mine"
        blob.symlink_to(secret)
        secret = blob
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    model = filled(load_pretrained(folder))
    with refuses(ValueError, Path(name).name, "link"):
        save_pretrained(model, tmp_path / "saved")
    assert not list(tmp_path.glob("saved*"))
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "config.json")
    saved = save_pretrained(model, tmp_path / "saved")
    assert (saved / name).read_bytes() == (folder / "config.json").read_bytes()


def test_companions_are_known_regular_and_whole(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("modeling_mine.py", "tokenizer_mine.py", "tokenizer.txt", "README.md"):
        (folder / name).write_text("raise SystemExit")
    (folder / "tokenizer").symlink_to("/etc")
    model = filled(load_pretrained(folder))
    saved = save_pretrained(model, tmp_path / "saved")
    expected = {"config.json", "generation_config.json", "merges.txt", "model.safetensors"}
    assert {path.name for path in saved.iterdir()} == expected | {
        "megatrain_export.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "auto_map" not in json.loads((saved / "config.json").read_text())
    for kind in ("pipe", "device", "folder", "link to nothing"):
        replace(folder / "merges.txt", kind)
        with refuses((ValueError, FileNotFoundError), "merges.txt"):
            save_pretrained(model, tmp_path / "other")
        (folder / "merges.txt").rmdir() if kind == "folder" else (folder / "merges.txt").unlink()
    for text in ("{", "[]", "[" * 10_000 + "]" * 10_000, "\0"):
        (folder / "tokenizer.json").write_text(text)
        with refuses(ValueError, "tokenizer.json"):
            save_pretrained(model, tmp_path / "other")


@pytest.mark.parametrize("name", ["checkpoints/missing", "Qwen/Qwen3-0.6B", "~/missing"])
def test_a_folder_that_is_not_there_is_named(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="`folder` .*hf d"):
        load_pretrained(name)


class LoRA(nnx.Module):
    """What people write around a weight by hand."""

    def __init__(self, base: nnx.Module, rank: int = 2):
        self.base = base
        self.a = nnx.LoRAParam(jnp.ones((rank, 32)))
        self.b = nnx.LoRAParam(jnp.zeros((32, rank)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.base(x) + x @ self.a[...].T @ self.b[...].T


def _wrap(model: Any) -> list[str]:
    attention = model.layers[1].self_attn
    attention.q_proj = LoRA(attention.q_proj)
    path = "layers/1/self_attn/q_proj"
    return [f"{path}/base/weight", f"{path}/a", f"{path}/b", f"missing: {path}/weight"]


def _beside(model: Any) -> list[str]:
    model.layers[0].mlp.lora = nnx.Param(jnp.ones((2, 2)))
    return ["layers/0/mlp/lora"]


def _head(model: Any) -> list[str]:
    model.value = nnx.Linear(32, 1, rngs=nnx.Rngs(0))
    return ["value/kernel", "value/bias"]


def _statistics(model: Any) -> list[str]:
    model.seen = nnx.BatchStat(jnp.zeros(()))
    return ["seen"]


def _taken(model: Any) -> list[str]:
    del model.layers[0].self_attn.o_proj.weight
    return ["missing: layers/0/self_attn/o_proj/weight"]


def _larger(model: Any) -> list[str]:
    model.embed_tokens.weight = nnx.Param(jnp.zeros((97, 32)))
    return ["shape: embed_tokens/weight"]


def _integers(model: Any) -> list[str]:
    model.norm.weight = nnx.Param(jnp.zeros(32, jnp.int8))
    return ["numbers: norm/weight"]


def _tied(model: Any) -> list[str]:
    model.lm_head.weight = model.embed_tokens.weight
    return ["missing: lm_head/weight"]


@pytest.mark.parametrize(
    "change", [_wrap, _beside, _head, _statistics, _taken, _larger, _integers, _tied]
)
def test_what_a_family_has_no_place_for_is_named(change, made, tmp_path):
    model = filled(load_pretrained(made))
    names = change(model)
    with refuses(ValueError, "llama") as error:
        save_pretrained(model, tmp_path / "saved")
    assert all(name in str(error.value) for name in names), str(error.value)
    assert not list(tmp_path.iterdir())


def test_random_keys_and_subclasses_are_saved(made, tmp_path):
    class Mine(Decoder):
        pass

    pretrained = load_pretrained(made)
    model = filled(pretrained)
    model.__class__ = Mine
    setattr(model, "dropout", nnx.Dropout(0.1, rngs=nnx.Rngs(0)))  # noqa: B010
    saved = save_pretrained(model, tmp_path / "saved")
    assert (saved / "model.safetensors").stat().st_size > 0
    check_same_as_transformers(saved)
