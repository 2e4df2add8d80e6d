"""Checkpoints that can't be read: bad manifests, other formats, failures; what a run does then."""

import errno
import itertools
import json
import os
import re
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from orbax.checkpoint import v1

import megatrain_jax as mt
import small
from boards import FakeBoard, present, processes_of
from megatrain_jax._src.engine.checkpoint import manifest, orbax
from megatrain_jax._src.engine.checkpoint.folder import (
    CheckpointError,
    OtherFormatError,
    UnreadError,
    in_all_processes,
    read_error,
)
from megatrain_jax._src.engine.checkpoint.orbax import ChunkReader
from megatrain_jax._src.engine.checkpoint.save import Saving
from megatrain_jax._src.engine.checkpoint.workspace import FolderWorkspace
from megatrain_jax._src.engine.train import series
from messages import refuses, tells, warns
from runs import check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    first = small.fit(tmp_path, 4, checkpoint_every=2)
    small.damage(tmp_path / "4", first.trainer.opt_state[0].mu[0]["w"])
    with warns(UserWarning, "step 2"):
        again = small.fit(tmp_path, 6, checkpoint_every=2)
    assert small.losses(again) == small.expected(6)
    check_same_bits(small.plain(tmp_path / "6")["params"]["0"], again.params[0])


def test_all_damaged_checkpoints_are_named(tmp_path):
    result = small.fit(tmp_path, 6, checkpoint_every=2)
    (tmp_path / "2" / "megatrain.json").write_text("{}")
    (tmp_path / "4" / "megatrain.json").write_text("")
    small.damage(tmp_path / "6", result.trainer.opt_state[0].mu[0]["w"])
    with pytest.raises(mt.CheckpointError) as error:
        small.fit(tmp_path, 8)
    said = str(error.value)
    places = [said.index(str(tmp_path / name)) for name in ("6", "4", "2")]
    assert places == sorted(places) and len(said) - places[1] < 600


def rewritten(without: str | None = None, **changes: Any) -> Any:
    """Other facts with a right checksum, so that the checks of their forms have to notice them."""

    def text(facts: dict[str, Any]) -> str:
        facts = {k: v for k, v in facts.items() if k not in (without, "checksum")} | changes
        return json.dumps({**facts, "checksum": manifest._checksum(facts)})

    return text


MANIFESTS = {
    "list": lambda facts: "[]",
    "number": lambda facts: "5",
    "null": lambda facts: "null",
    "text": lambda facts: '"x"',
    "empty": lambda facts: "",
    "deep": lambda facts: "[" * 100_000,
    "not utf-8": lambda facts: b"\xff\xfe{}",
    "no step": rewritten("step"),
    "no arrays": rewritten("arrays"),
    "no settings": rewritten("made_of"),
    "no codes": rewritten("coded"),
    "settings empty": rewritten(made_of={}),
    "parts list": rewritten(parts=[1, 1]),
    "no format": rewritten("format"),
    "newer": rewritten(format=99),
    "format text": rewritten(format="2"),
    "format list": rewritten(format=[2]),
    "format true": rewritten(format=True),
    "format with a fraction": rewritten(format=3.0),
    "step text": rewritten(step="2"),
    "step true": rewritten(step=True),
    "step negative": rewritten(step=-1),
    "history text": rewritten(history="abc"),
    "history numbers": rewritten(history=[1, 2]),
    "files list": rewritten(files=["a"]),
    "size text": rewritten(files={"a": "1"}),
    "data number": rewritten(data=3),
    "data empty": rewritten(data={}),
    "position negative": rewritten(data={"batches": -1}),
    "parts without waves": rewritten(parts={"microbatches": 1}),
    "partial number": rewritten(partial=3),
    "parameters alone": rewritten(params_only=0),
    "chunk of nothing": rewritten(arrays={"params/0/w": {"chunk": [0, 64], "checksums": ["a"]}}),
    "no chunk": rewritten(arrays={"params/0/w": {"checksums": ["a"]}}),
    "scale whole": rewritten(loss_scale={"scale": 1, "good_steps": 0}),
    "codes without bits": rewritten(coded={"params/0/w": {"code": "nf4"}}),
    "no checksum": lambda facts: json.dumps({k: v for k, v in facts.items() if k != "checksum"}),
    "another number": lambda facts: json.dumps({**facts, "skipped": 7}),
}


def test_a_manifest_that_is_not_well_formed_is_refused(trainer, saved):
    facts = json.loads((saved / "megatrain.json").read_text())
    before = small.state(trainer)
    for name, change in MANIFESTS.items():
        text = change(facts)
        (saved / "megatrain.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(mt.CheckpointError, match="99" if name == "newer" else str(saved)):
            trainer.restore(saved)
            pytest.fail(f"accepted: {name}")
    check_same_bits(small.state(trainer), before)


def test_a_broken_manifest_is_passed_over(tmp_path):
    small.fit(tmp_path, 6, checkpoint_every=2)
    (tmp_path / "6" / "megatrain.json").write_text("[]")
    (tmp_path / "4" / "megatrain.json").write_text('{"format": "3"}')
    with warns(UserWarning, "step 2"):
        again = small.fit(tmp_path, 8)
    assert small.losses(again) == small.expected(8)


def test_a_newest_checkpoint_without_a_manifest_is_passed_over(tmp_path):
    small.fit(tmp_path, 6, checkpoint_every=2)
    (tmp_path / "6" / "megatrain.json").unlink()
    with refuses(mt.CheckpointError, "step 0", "2, 4, 6"):
        small.fit(tmp_path, 8, resume=False)
    with warns(UserWarning, tmp_path / "6", "megatrain.json", "step 4"):
        again = small.fit(tmp_path, 8)
    assert small.losses(again) == small.expected(8)
    assert sorted(os.listdir(tmp_path)) == ["2", "4", "6.refused-1", "8"]


def test_a_path_without_a_checkpoint_is_refused_in_words(trainer, saved, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    said = {
        "nothing": ["exist", "`checkpoint_dir`"],
        "file": ["is a file"],
        "empty": ["whole", "megatrain.json"],
        str(saved.parent): ["checkpoints", saved],
    }
    for name, named in said.items():
        with refuses(mt.CheckpointError, tmp_path / name, *named) as caught:
            trainer.restore(tmp_path / name)
        assert "Errno" not in str(caught.value)


def test_a_run_says_that_it_found_no_checkpoint(tmp_path, capsys):
    given = {"data": [small.batch(0)], "progress": True, "checkpoint_dir": tmp_path / "new"}
    new = tmp_path / "new"

    def said() -> str:
        return capsys.readouterr().out

    trainer = mt.fit(small.params(), small.loss_fn, optimizer=small.OPTIMIZER, **given).trainer
    assert tells(said(), new, "step 0")
    mt.fit(small.params(), small.loss_fn, optimizer=small.OPTIMIZER, **given)
    assert said().count(str(new)) == 1, "it names the folder that it resumed from, and no more"
    given["checkpoint_dir"] = tmp_path / "other"
    mt.train(trainer, **given)
    assert str(tmp_path / "other") not in said()
    mt.train(trainer, **given | {"checkpoint_dir": tmp_path / "third"}, resume=True)
    assert tells(said(), tmp_path / "third", "step 2")


def test_an_orbax_checkpoint_of_others_is_not_set_aside(tmp_path):
    small.fit(tmp_path, 4)
    v1.save(tmp_path / "6", {"state": {"w": np.ones(3)}})
    before = small.tree(tmp_path)
    with refuses(mt.CheckpointError, "step 4", 6):
        small.fit(tmp_path, 8)
    assert small.tree(tmp_path) == before


FAILURES = {
    "manifest": (manifest, "read", OSError(5, "Input/output error")),
    "sizes": (manifest, "_sizes", PermissionError(13, "Permission denied")),
    "descriptions": (orbax, "_kvstore", OSError(24, "Too many open files")),
    "chunks": (ChunkReader, "read", ValueError("Failed to read: EIO [os_error_code='5']")),
    "memory": (ChunkReader, "read", MemoryError("out of memory")),
    "threads": (ChunkReader, "read_whole", RuntimeError("can't start new thread")),
}


@pytest.mark.by_default("99-manifest", "99-sizes", "99-descriptions", "99-chunks", "99-memory")
@pytest.mark.parametrize("place", FAILURES)
@pytest.mark.parametrize("times", [1, 99])
def test_a_checkpoint_that_could_not_be_read_is_tried_again_and_keeps_its_name(
    place, times, tmp_path, monkeypatch
):
    small.fit(tmp_path, 4, checkpoint_every=2)
    before = small.tree(tmp_path)
    owner, name, error = FAILURES[place]
    read, left, paused = getattr(owner, name), iter(range(times)), []

    def fails(*args):
        if next(left, None) is None:
            return read(*args)
        if name != "read" or owner is not manifest:
            raise error
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda *_, **__: (_ for _ in ()).throw(error))
            return read(*args)

    monkeypatch.setattr(owner, name, fails)
    monkeypatch.setattr(series.time, "sleep", paused.append)
    if times == 1:
        assert small.losses(small.fit(tmp_path, 6)) == small.expected(6)
        assert sorted(os.listdir(tmp_path)) == ["2", "4", "6"] and len(paused) == 1
        return
    with pytest.raises(mt.CheckpointError, match=re.escape(str(error))) as caught:
        small.fit(tmp_path, 6)
    assert tells("".join(caught.value.__notes__), "kept", "name") and len(paused) == 2
    assert small.tree(tmp_path) == before


def test_a_lack_of_threads_is_not_taken_for_a_folder_without_a_checkpoint(saved, monkeypatch):
    def without_threads(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(orbax, "_kvstore", without_threads)
    with refuses(mt.CheckpointError, saved, "can't start new thread"):
        small.trainer(params=saved)


def test_a_checkpoint_of_this_library_without_its_manifest_is_refused_as_params(saved):
    (saved / "megatrain.json").unlink()
    with refuses(mt.CheckpointError, f"`params`={saved}", "damaged"):
        small.trainer(params=saved)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_checkpoint_of_another_format_is_refused(number, trainer, saved):
    before, file = small.tree(saved), saved / "megatrain.json"
    facts = {k: v for k, v in json.loads(file.read_text()).items() if k != "checksum"}
    facts["format"] = number
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(facts).encode())
    file.write_text(json.dumps({**facts, "checksum": checksum}))
    expected = small.state(trainer)
    for use in (trainer.restore, lambda path: small.trainer(params=path)):
        with refuses(mt.CheckpointError, saved, f"format {number}", "format 3"):
            use(saved)
    check_same_bits(small.state(trainer), expected)
    assert small.tree(saved).keys() == before.keys()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_of_another_format_ends_the_run_and_nothing_is_renamed(damaged, tmp_path):
    small.fit(tmp_path, 6, checkpoint_every=2)
    other = 4 if damaged else 6
    (tmp_path / str(other) / "megatrain.json").write_text('{"format": 99}')
    if damaged:
        (tmp_path / "6" / "megatrain.json").write_text("[]")
    before = small.tree(tmp_path)
    with refuses(mt.CheckpointError, tmp_path / str(other), "format 99", "format 3") as error:
        small.fit(tmp_path, 8)
    assert tells("".join(error.value.__notes__), "renamed")
    assert small.tree(tmp_path) == before


def test_a_checkpoint_is_joined_once_all_processes_have_written_their_parts(tmp_path):
    answers = (False, None), (True, None), (True, "OSError: full")
    for rows in itertools.product(answers, repeat=3):
        done, asked = [row[0] for row in rows], []

        def gather(where, row, rows=rows, asked=asked):
            asked.append(row)
            return rows

        saving: Any = object.__new__(Saving)
        saving._is_written, saving._is_agreed = threading.Event(), threading.Event()
        saving._processes = SimpleNamespace(count=3, gather=gather)
        saving._num_parts = 1  # each process holds all state, and one of them writes it
        saving.settle()
        assert not asked
        saving._num_parts = 3
        saving.path, saving._error = tmp_path, OSError("full") if rows[0][1] else None
        if done[0]:
            saving._is_written.set()
        saving.settle()
        assert asked == [rows[0]] and saving._is_agreed.is_set() == all(done)
        fails = [number for number, (_, words) in enumerate(rows) if words is not None]
        assert (saving._error is not None) == bool(rows[0][1] or (all(done) and fails))
        if saving._error and fails[0]:
            assert tells(str(saving._error), f"process {fails[0]}", "full")
        saving.settle()  # what is agreed is not asked again
        assert len(asked) == 2 - all(done)


@pytest.mark.parametrize("written", [(4, 4), (4, 5), (4, 3), (3, 4)])
def test_a_checkpoint_is_complete_though_a_process_is_lost_that_has_written_its_part(written):
    saving: Any = object.__new__(Saving)
    board = FakeBoard()
    saving._processes = processes = processes_of(board)
    saving._number, saving._num_parts, saving._replaces, saving._error = 4, 2, True, None
    saving._parts, saving._left, saving._changed = [], Counter(), threading.Condition()
    saving._is_written, saving._is_agreed = threading.Event(), threading.Event()
    saving._writer = SimpleNamespace(finish=lambda: None)
    saving._workspace, finished = FolderWorkspace.__new__(FolderWorkspace), []
    saving._workspace.release = lambda run: None
    saving._finish = lambda workspace, facts: finished.append(facts)
    board.show(1, written=written[1])
    processes.give_up("it is lost")
    wait = saving._is_agreed.wait

    def look(seconds: float | None = None) -> bool:
        if written[0] == 3:
            present(processes).written = 3  # as before this one's last write
        present(processes).exchange()
        return wait(0)

    saving._is_agreed.wait = look  # type: ignore[method-assign]
    saving._write({"step": 2})
    is_whole = min(written) >= 4
    assert finished == [{"step": 2}] * is_whole and (saving._error is None) == is_whole


@pytest.mark.parametrize("own", [None, OSError("cut off")])
@pytest.mark.parametrize("count", [1, 2])
def test_the_end_of_a_checkpoint_is_asked_for_and_told_once(count, own, tmp_path):
    asked, saving = [], object.__new__(Saving)
    gather = lambda where, words: asked.append(words) or [words, "OSError: full"]  # noqa: E731
    made: Any = saving
    made._is_written, made._is_agreed, made._is_known = threading.Event(), threading.Event(), False
    made._is_written.set()
    made._is_agreed.set()
    made._processes = SimpleNamespace(count=count, gather=gather, unreachable=None)
    made._num_parts = count
    made._thread = SimpleNamespace(is_alive=lambda: False)
    made.path, made._error = tmp_path, own
    for _ in range(2):
        saving.join()
    assert asked == [own and "OSError: cut off"] * (count - 1)
    if own is not None or count == 1:
        assert saving._error is own
    else:
        assert tells(str(saving._error), "process 1", "full")


@pytest.mark.parametrize(
    ("own", "other", "kind", "message"),
    [
        (None, None, None, ""),
        (UnreadError("busy"), None, UnreadError, "^busy"),
        (CheckpointError("bad"), ["busy", "UnreadError"], CheckpointError, "^bad"),
        (UnreadError("busy"), ["bad", "CheckpointError"], CheckpointError, "^process 1: bad"),
        (None, ["busy", "UnreadError"], UnreadError, "^process 1: busy"),
        (CheckpointError("bad"), ["new", "OtherFormatError"], OtherFormatError, "^process 1: new"),
    ],
)
def test_reading_is_tried_again_only_if_no_process_found_damage(own, other, kind, message):
    processes: Any = SimpleNamespace(gather=lambda where, row: [row, other])

    def action():
        if own is not None:
            raise own
        return 7

    if kind is None:
        assert in_all_processes(processes, "here", action) == 7
        return
    with pytest.raises(CheckpointError, match=message) as raised:
        in_all_processes(processes, "here", action)
    assert type(raised.value) is kind


def chained(*errors: BaseException, raised_from: bool) -> BaseException:
    """The last of some errors, of which each was raised because of the one before."""
    for before, error in itertools.pairwise(errors):
        error.__cause__, error.__context__ = before if raised_from else None, before
    return errors[-1]


@pytest.mark.parametrize("raised_from", [False, True])
def test_what_may_be_the_machines_fault_is_read_again(raised_from):
    of_machine = [OSError(errno.EIO, "broken"), MemoryError(), UnreadError("busy")]
    of_machine += [RuntimeError(text) for text in ("UNAVAILABLE: gone", "x UNAUTHENTICATED: y")]
    of_machine += [RuntimeError("[os_error_code='5']"), RuntimeError("can't start new thread")]
    lasting = [ValueError("damaged"), FileNotFoundError("gone"), NotADirectoryError("a file")]
    lasting += [RuntimeError("[os_error_code='2']")]
    for found, wanted in ((of_machine, UnreadError), (lasting, CheckpointError)):
        for error in found:
            for chain in ([error], [error, ValueError("x")], [error, KeyError("y"), TypeError()]):
                last = chained(*chain, raised_from=raised_from)
                assert type(read_error("no", last)) is wanted, error


def test_of_a_folder_of_checkpoints_the_newest_is_named(tmp_path):
    for step in (2, 4, 10):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / manifest.MANIFEST).write_text("{}")
    assert tells(manifest._missing(tmp_path), f"{tmp_path / '10'}")
