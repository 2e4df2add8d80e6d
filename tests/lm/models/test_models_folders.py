"""An export replaces an earlier export and nothing else, whole or not at all."""

import ctypes
import errno
import fcntl
import functools
import os
import resource
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from flax import nnx

import killed_writers
import small
from megatrain_jax._src.common import unfinished
from megatrain_jax._src.lm.models import export
from megatrain_jax.models import (
    Decoder,
    DecoderConfig,
    load_pretrained,
    lora,
    save_lora,
    save_pretrained,
)
from messages import refuses


@functools.cache
def decoder(seed: int = 0) -> Decoder:
    config = DecoderConfig.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
        }
    )
    return Decoder(config, rngs=nnx.Rngs(seed))


def export_of(seed: int, folder: Path) -> dict[str, bytes]:
    return small.tree(save_pretrained(decoder(seed), folder))


@pytest.fixture(params=["exchanged", "renamed"])
def _file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """One that can exchange two names at once, and one that can't."""
    if request.param == "renamed":
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())


@pytest.mark.usefixtures("_file_system")
def test_an_export_replaces_the_one_before(tmp_path):
    fresh = export_of(1, tmp_path / "fresh")
    before = export_of(0, tmp_path / "mine")
    with refuses(FileExistsError, "`overwrite=True`"):
        save_pretrained(decoder(1), tmp_path / "mine")
    assert small.tree(tmp_path / "mine") == before != fresh
    for _ in range(2):
        save_pretrained(decoder(1), tmp_path / "mine", overwrite=True)
        assert small.tree(tmp_path / "mine") == fresh
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "mine"]


def test_arrays_of_an_export_say_which_files_to_read_ahead(tmp_path):
    folder = save_pretrained(decoder(), tmp_path)
    params = load_pretrained(folder).params
    files = {x.source_files for x in jax.tree.leaves(params)}
    assert files == {(folder / "model.safetensors",)}


def test_adapters_replace_the_ones_before(tmp_path):
    adapted = lora(lambda: decoder.__wrapped__(2), targets="q_proj", rank=2).model()
    fresh = small.tree(save_lora(adapted, tmp_path / "fresh"))
    for _ in range(2):
        save_lora(adapted, tmp_path / "mine", overwrite=True)
    assert small.tree(tmp_path / "mine") == fresh


def put_a_file(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("mine")


def forget_the_list(folder: Path) -> None:
    """As a checkpoint that was downloaded, which has the same names."""
    (folder / export.MARKER).unlink()


def change_a_file(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def edit_by_hand(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000.0", "50000.0"))


def train_on(folder: Path) -> None:
    """As with Transformers: other weights of the same names and shapes."""
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(export_of(2, folder.with_name("other"))[weights.name])
    assert weights.stat().st_size == size


def put_an_empty_folder(folder: Path) -> None:
    (folder / "notes").mkdir()


def put_a_link(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "model.safetensors")


def put_a_link_to_a_folder(folder: Path) -> None:
    folder.with_name("elsewhere").mkdir()
    (folder.with_name("elsewhere") / "mine.txt").write_text("mine")
    (folder / "notes").symlink_to(folder.with_name("elsewhere"))


def be_a_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put_a_file, "holds notes/mine.txt"),
        (put_an_empty_folder, "holds notes"),
        (forget_the_list, export.MARKER),
        (change_a_file, "config.json"),
        (edit_by_hand, "config.json"),
        (train_on, "model.safetensors"),
        (put_a_link, "config.json"),
        (put_a_link_to_a_folder, "holds notes"),
        (be_a_link, "own"),
    ],
)
def test_a_folder_with_anything_else_is_never_replaced(tmp_path, change, named):
    folder = tmp_path / "mine"
    export_of(0, folder)
    change(folder)
    before, paths = small.tree(tmp_path), sorted(tmp_path.rglob("*"))
    with refuses(FileExistsError, folder, named):
        save_pretrained(decoder(1), folder, overwrite=True)
    assert small.tree(tmp_path) == before and sorted(tmp_path.rglob("*")) == paths


def test_a_copy_of_an_export_is_one_too(tmp_path):
    export_of(0, tmp_path / "mine")
    shutil.copytree(tmp_path / "mine", tmp_path / "copy", copy_function=shutil.copyfile)
    save_pretrained(decoder(1), tmp_path / "copy", overwrite=True)
    assert small.tree(tmp_path / "copy") == export_of(1, tmp_path / "fresh")


@pytest.mark.usefixtures("_file_system")
@pytest.mark.parametrize("moment", ["writing", "syncing", "renaming"])
def test_an_export_that_is_cut_off_leaves_the_one_before(tmp_path, monkeypatch, moment):
    before = export_of(0, tmp_path / "mine")

    def cut_off(*_):
        raise KeyboardInterrupt

    where = {
        "writing": (export, "write_config"),
        "syncing": (export, "sync_tree"),
        "renaming": (export, "_exchange"),
    }
    monkeypatch.setattr(*where[moment], cut_off)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(decoder(1), tmp_path / "mine", overwrite=True)
    assert small.tree(tmp_path) == {f"mine/{name}": text for name, text in before.items()}


def test_the_earlier_export_comes_back_where_the_new_one_gets_no_name(tmp_path, monkeypatch):
    before = export_of(0, tmp_path / "mine")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    replace = Path.replace

    def refuse(path, target):
        if ".unfinished-" in path.name:
            raise OSError("no more names")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no more names"):
        save_pretrained(decoder(1), tmp_path / "mine", overwrite=True)
    assert small.tree(tmp_path) == {f"mine/{name}": text for name, text in before.items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_export_leaves_is_removed_by_the_next(tmp_path):
    with killed_writers.left_by(tmp_path / "mine") as left:
        export_of(0, tmp_path / "mine")
        export_of(1, tmp_path / "other")
        # Its writer lives.
        assert names(tmp_path) == ["mine", left.name, f"{left.name}.lock", "other"]
        assert (left / "part").exists()
    export_of(2, tmp_path / "third")
    assert names(tmp_path) == ["mine", "other", "third"]


def test_a_lock_is_trusted_by_boot_and_mount(tmp_path):
    assert unfinished._place(tmp_path) == unfinished._place(tmp_path)
    own, other = unfinished._place(tmp_path), unfinished._place(Path("/proc"))
    assert own[0] == other[0] and own[1] != other[1]


@pytest.mark.parametrize("other", ["machine", "mount"])
def test_a_lock_of_another_machine_or_mount_is_not_trusted(other, tmp_path, monkeypatch):
    with killed_writers.left_by(tmp_path / "mine") as left:
        pass
    own = unfinished._place(tmp_path)
    place = ["another", own[1]] if other == "machine" else [own[0], "99"]
    monkeypatch.setattr(unfinished, "_place", lambda _: place)
    unfinished.remove_leftovers(tmp_path)
    assert names(tmp_path) == [left.name, f"{left.name}.lock"]
    # As long as anything in it changes, somebody may be writing.
    long_ago = time.time() - 8 * 24 * 3600
    for path in (left, left.with_name(f"{left.name}.lock")):
        os.utime(path, (long_ago, long_ago))
    unfinished.remove_leftovers(tmp_path)
    assert (left / "part").exists()
    os.utime(left / "part", (long_ago, long_ago))
    unfinished.remove_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_nothing_is_removed_that_is_not_of_a_killed_writer(tmp_path):
    with killed_writers.left_by(tmp_path / "mine") as left:
        pass
    lock = left.with_name(f"{left.name}.lock")
    for number, text in enumerate(["", "mine", "megatrain_jax", "megatrain_jax a b"]):
        (tmp_path / f"theirs.unfinished-{number}.lock").write_text(text)
        (tmp_path / f"theirs.unfinished-{number}").mkdir()
    (tmp_path / "linked.unfinished-1.lock").symlink_to(lock)
    (tmp_path / "linked.unfinished-1").mkdir()
    (tmp_path / "old.unfinished-1").mkdir()
    os.mkfifo(tmp_path / "pipe.unfinished-1.lock")
    for path in tmp_path.glob("theirs.unfinished-[01]*"):
        os.utime(path, (0, 0))
    expected = set(names(tmp_path)) - {lock.name, left.name}
    unfinished.remove_leftovers(tmp_path)
    assert set(names(tmp_path)) == expected


def test_a_lock_without_a_word_or_folder_goes_after_a_week(tmp_path):
    """Its writer was killed before it made the folder."""
    lock = tmp_path / "mine.unfinished-1.lock"
    lock.touch()
    unfinished.remove_leftovers(tmp_path)
    assert lock.exists()
    os.utime(lock, (0, 0))
    unfinished.remove_leftovers(tmp_path)
    assert not lock.exists()


def test_what_can_not_be_deleted_is_tried_again(tmp_path, monkeypatch):
    new = unfinished.UnfinishedFolder(tmp_path / "mine")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        new.discard()
    assert names(tmp_path) == [new.path.name, f"{new.path.name}.lock"]
    unfinished.remove_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_without_locks_a_folder_is_written_and_nothing_is_removed(tmp_path, monkeypatch):
    with killed_writers.left_by(tmp_path / "mine") as left:
        pass

    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    export_of(0, tmp_path / "mine")
    assert names(tmp_path) == ["mine", left.name, f"{left.name}.lock"]


def test_a_new_name_that_is_taken_for_a_leftover_is_not_used(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def late(opened, how):
        calls.append(opened)
        if len(calls) == 1:
            raise BlockingIOError  # a cleaner has locked the new file
        if len(calls) == 2:
            for path in tmp_path.glob("*.lock"):  # a cleaner has deleted it
                path.unlink()
        flock(opened, how)

    monkeypatch.setattr(fcntl, "flock", late)
    new = unfinished.UnfinishedFolder(tmp_path / "mine")
    assert len(calls) == 3 and names(tmp_path) == [new.path.name, f"{new.path.name}.lock"]
    new.discard()
    assert names(tmp_path) == []


def test_a_full_disk_names_the_export(tmp_path):
    export_of(0, tmp_path / "first")  # nothing is left to be compiled, whose cache has files, too
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=f"{tmp_path}/mine"):
            save_pretrained(decoder(0), tmp_path / "mine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["first"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_export_that_another_writer_finished_meanwhile(overwrite, tmp_path):
    """Only a writer that was told to replaces it."""
    folder = tmp_path / "mine"

    def write() -> None:
        with export.atomic_folder(folder, overwrite=overwrite) as at:
            (at / "own").write_text("late")
            with export.atomic_folder(folder) as other:
                (other / "own").write_text("early")

    if overwrite:
        write()
    else:
        with pytest.raises(FileExistsError, match=str(folder)):
            write()
    assert (folder / "own").read_text() == ("late" if overwrite else "early")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
