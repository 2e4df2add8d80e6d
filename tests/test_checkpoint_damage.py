"""What is read from a checkpoint is what was written, or it is refused and nothing comes of it."""

import gc
import json
import os
import random
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import xxhash
from orbax.checkpoint import v1

import megatrain_jax as mt
import small
from megatrain_jax._src.checkpoint import checksums, manifest, orbax
from megatrain_jax._src.checkpoint.checksums import Checksums, as_facts, checksum
from megatrain_jax._src.checkpoint.chunks import Grid
from megatrain_jax._src.checkpoint.contents import flat
from megatrain_jax._src.checkpoint.folder import (
    CheckpointError,
    OtherFormatError,
    UnreadError,
    in_all,
)
from megatrain_jax._src.checkpoint.orbax import ChunkReader
from megatrain_jax._src.train import series
from runs import check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")


@pytest.fixture(scope="module")
def trainer():
    trainer = small.trainer()
    for seed in range(2):
        trainer.read(trainer.step(small.batch(seed)))
    return trainer


@pytest.fixture
def saved(trainer, tmp_path):
    trainer.save(tmp_path / "2")
    return tmp_path / "2"


def plain(path: Path):
    context = v1.Context()
    with context:
        return v1.load(str(path))


# Orbax forgets about what else it was reading once one array can't be read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_changed_byte_is_noticed_or_harmless(trainer, saved):
    rng, expected = random.Random(0), small.state(trainer)
    outcomes = []
    for file in filter(os.path.getsize, small.files(saved)):
        for _ in range(2):
            at, bits = rng.randrange(file.stat().st_size), rng.randrange(1, 256)
            small.flip(file, at, bits)
            try:
                trainer.restore(saved)
                check_same_bits(small.state(trainer), expected)
                outcomes.append("harmless")
            except mt.CheckpointError:
                outcomes.append("noticed")
            small.flip(file, at, bits)
    assert len(outcomes) >= 20 and outcomes.count("noticed") >= 5
    gc.collect()
    trainer.restore(saved)
    check_same_bits(small.state(trainer), expected)


def test_checksums_are_those_of_what_plain_orbax_reads(saved):
    known = json.loads((saved / "megatrain.json").read_text())["arrays"]
    for path, array in flat(plain(saved)).items():
        facts = known.pop("/".join(path))
        boxes = Grid(shape=array.shape, chunk=tuple(facts["chunk"])).boxes()
        chunks = [np.ascontiguousarray(array[box]).tobytes() for _, box in boxes]
        assert [*map(xxhash.xxh3_64_hexdigest, chunks)] == facts["checksums"]
    assert not known


def stacked_loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def stacked(master=jnp.float32, state=jnp.float32) -> mt.Trainer:
    """A trainer of parameters that are stacked over three layers, and of a head."""
    rng = np.random.default_rng(0)
    layers, head = rng.normal(size=(3, 64, 64)), rng.normal(size=64)
    params = {"layers": np.float32(layers), "head": np.float32(head)}
    precision = mt.Precision(master=master, state=state, compute=jnp.float32)
    return mt.Trainer(
        params, stacked_loss, small.OPTIMIZER, small.batch(0), precision=precision, progress=False
    )


# The forms of masters and optimizer state that a checkpoint was written in, and is read into.
PLAIN, NARROW = (jnp.float32, jnp.float32), (jnp.bfloat16, jnp.int8)


@pytest.mark.filterwarnings("ignore:.* they were converted:UserWarning")
@pytest.mark.parametrize(
    ("there", "here"),
    [(PLAIN, PLAIN), (PLAIN, NARROW), (NARROW, PLAIN)],
    ids=["the same form", "numbers as codes", "codes as numbers"],
)
def test_every_array_is_verified(there, here, tmp_path, monkeypatch):
    trainer = stacked(*there)
    trainer.read(trainer.step(small.batch(0)))
    trainer.save(tmp_path / "1")
    if here != there:
        trainer = stacked(*here)
        trainer.restore(tmp_path / "1")
    load, read, spoiled, names = orbax.load_arrays, ChunkReader.read, [], []

    def spoiling(folder, wanted):
        found = {path: np.array(array) for path, array in load(folder, wanted).items()}
        names.extend((path, 0) for path in found)
        for path in found.keys() & {path for path, _ in spoiled}:
            found[path].reshape(-1).view(np.uint8)[-1] ^= 1
        return found

    def spoiling_chunks(reader, wanted):
        found = [np.array(chunk) for chunk in read(reader, wanted)]
        for (entry, cell), chunk in zip(wanted, found, strict=True):
            names.append((entry.path, cell.number))
            if names[-1] in spoiled:
                chunk.view(np.uint8)[-1] ^= 1
        return found

    expected = small.state(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(orbax, "load_arrays", spoiling)
        patch.setattr(ChunkReader, "read", spoiling_chunks)
        trainer.restore(tmp_path / "1")
        every = [*dict.fromkeys(names)]
        layers = [number for path, number in every if path == ("params", "layers")]
        assert layers == ([0, 1, 2] if here == there else [0])
        seen = {"/".join(path) for path, _ in every}
        assert {"params/head", "opt_state/0/count", "run/step"} <= seen
        assert ("opt_state/0/mu/layers/codes" in seen) == (there == NARROW)
        for row in every:
            spoiled[:] = [row]
            name = "/".join(row[0])
            with pytest.raises(mt.CheckpointError, match=f"{name} is not what was written"):
                trainer.restore(tmp_path / "1")
    trainer.restore(tmp_path / "1")
    check_same_bits(small.state(trainer), expected)


def test_each_chunk_of_an_array_that_is_compared_as_a_whole_counts(tmp_path):
    array = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    grid = Grid(shape=array.shape, chunk=(2, 4))
    sums = {number: checksum(array[box]) for number, box in grid.boxes()}
    sums = Checksums(tmp_path, {"w": as_facts(grid, sums)})
    sums.verify(("w",), array)
    for number, box in grid.boxes():
        other = array.copy()
        other[box][0, 0] += 1
        with pytest.raises(mt.CheckpointError, match="w is not what was written"):
            sums.verify(("w",), other)
        with pytest.raises(mt.CheckpointError, match="w is not what was written"):
            sums.verify(("w",), other[box], number)


def test_each_piece_of_an_array_has_to_be_finite(monkeypatch):
    monkeypatch.setattr(checksums, "_PIECE", 7)
    for dtype in (np.float32, jnp.bfloat16):
        array = np.ones((5, 4), dtype)
        checksums.check_finite("w", array)
        for at in range(array.size):
            other = array.copy()
            other.reshape(-1)[at] = (np.nan, np.inf, -np.inf)[at % 3]
            with pytest.raises(ValueError, match="w is not finite"):
                checksums.check_finite("w", other)


def test_parameters_to_start_from_are_verified(trainer, saved):
    check_same_bits(small.trainer(params=saved).params, trainer.params)
    small.damage(saved, trainer.params[1]["w"])
    with pytest.raises(mt.CheckpointError, match="params/1/w is not what was written"):
        small.trainer(params=saved)


def num_live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_restore_that_fails_half_way_leaves_a_trainer_that_can_be_restored(trainer, saved):
    expected = small.state(trainer)
    trainer.save(saved.with_name("bad"))
    small.damage(saved.with_name("bad"), trainer.params[1]["w"])
    live = num_live_bytes()
    with pytest.raises(mt.CheckpointError, match="lost") as caught:
        trainer.restore(saved.with_name("bad"))
    assert num_live_bytes() < live and caught, "the error holds no arrays"
    uses = (
        lambda: trainer.step(small.batch(2)),
        lambda: trainer.evaluate([small.batch(2)]),
        lambda: trainer.save(saved.with_name("3")),
        lambda: trainer.params,
        lambda: trainer.opt_state,
        lambda: trainer.model,
        trainer.flush,
    )
    for use in uses:
        with pytest.raises(RuntimeError, match="state is lost.*Restore a checkpoint"):
            use()
    assert not saved.with_name("3").exists()
    trainer.restore(saved)
    check_same_bits(small.state(trainer), expected)


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    first = small.fit(tmp_path, 4, checkpoint_every=2)
    small.damage(tmp_path / "4", first.trainer.opt_state[0].mu[0]["w"])
    with pytest.warns(UserWarning, match="Resumed from step 2 instead"):
        again = small.fit(tmp_path, 6, checkpoint_every=2)
    assert small.losses(again) == small.expected(6)
    check_same_bits(plain(tmp_path / "6")["params"]["0"], again.params[0])


def test_all_damaged_checkpoints_are_named(tmp_path):
    result = small.fit(tmp_path, 6, checkpoint_every=2)
    (tmp_path / "2" / "megatrain.json").write_text("{}")
    (tmp_path / "4" / "megatrain.json").write_text("")
    small.damage(tmp_path / "6", result.trainer.opt_state[0].mu[0]["w"])
    with pytest.raises(mt.CheckpointError) as error:
        small.fit(tmp_path, 8)
    newest, older = str(error.value).split("No older checkpoint there can be gone on from")
    assert str(tmp_path / "6") in newest and f"4: {tmp_path / '4'}" in older
    assert f"2: {tmp_path / '2'}" in older and len(older) < 600


def rewritten(**changes):
    return lambda facts: json.dumps({**facts, **changes})


MANIFESTS = {
    "list": lambda facts: "[]",
    "number": lambda facts: "5",
    "null": lambda facts: "null",
    "text": lambda facts: '"x"',
    "empty": lambda facts: "",
    "deep": lambda facts: "[" * 100_000,
    "not utf-8": lambda facts: b"\xff\xfe{}",
    "no step": lambda facts: json.dumps({k: v for k, v in facts.items() if k != "step"}),
    "no arrays": lambda facts: json.dumps({k: v for k, v in facts.items() if k != "arrays"}),
    "no settings": lambda facts: json.dumps({k: v for k, v in facts.items() if k != "made_of"}),
    "no codes": lambda facts: json.dumps({k: v for k, v in facts.items() if k != "coded"}),
    "settings empty": rewritten(made_of={}),
    "parts list": rewritten(parts=[1, 1]),
    "no format": lambda facts: json.dumps({k: v for k, v in facts.items() if k != "format"}),
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
    "another number": rewritten(skipped=7),
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
    with pytest.warns(UserWarning, match=r"\. Resumed from step 2 instead\. It is"):
        again = small.fit(tmp_path, 8)
    assert small.losses(again) == small.expected(8)


def test_a_newest_checkpoint_without_a_manifest_is_passed_over(tmp_path):
    small.fit(tmp_path, 6, checkpoint_every=2)
    (tmp_path / "6" / "megatrain.json").unlink()
    with pytest.raises(mt.CheckpointError, match="starts from step 0.*holds 2, 4, 6"):
        small.fit(tmp_path, 8, resume=False)
    with pytest.warns(UserWarning, match="megatrain.json can't be read.*Resumed from step 4"):
        again = small.fit(tmp_path, 8)
    assert small.losses(again) == small.expected(8)
    assert sorted(os.listdir(tmp_path)) == ["2", "4", "6.refused-1", "8"]


def test_an_orbax_checkpoint_of_others_is_not_set_aside(tmp_path):
    small.fit(tmp_path, 4)
    v1.save(tmp_path / "6", {"state": {"w": np.ones(3)}})
    before = small.tree(tmp_path)
    with pytest.raises(mt.CheckpointError, match="starts from step 4.*holds 6"):
        small.fit(tmp_path, 8)
    assert small.tree(tmp_path) == before


FAILURES = {
    "manifest": (manifest, "read", OSError(5, "Input/output error")),
    "sizes": (manifest, "_sizes", PermissionError(13, "Permission denied")),
    "descriptions": (orbax, "_kvstore", OSError(24, "Too many open files")),
    "chunks": (ChunkReader, "read", ValueError("Failed to read: EIO [os_error_code='5']")),
    "memory": (ChunkReader, "read", MemoryError("out of memory")),
    "threads": (orbax, "load_arrays", RuntimeError("can't start new thread")),
}


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
            patch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(error))
            return read(*args)

    monkeypatch.setattr(owner, name, fails)
    monkeypatch.setattr(series.time, "sleep", paused.append)
    if times == 1:
        assert small.losses(small.fit(tmp_path, 6)) == small.expected(6)
        assert sorted(os.listdir(tmp_path)) == ["2", "4", "6"] and len(paused) == 1
        return
    with pytest.raises(mt.CheckpointError, match=re.escape(str(error))) as caught:
        small.fit(tmp_path, 6)
    assert "it has kept its name" in "".join(caught.value.__notes__) and len(paused) == 2
    assert small.tree(tmp_path) == before


def test_a_save_needs_no_thread_to_compare_what_is_in_it(trainer, tmp_path, monkeypatch):
    join = orbax.join

    def without_threads(thread):
        raise RuntimeError("can't start new thread")

    def joins(*args):
        join(*args)
        monkeypatch.setattr(threading.Thread, "start", without_threads)

    monkeypatch.setattr(orbax, "join", joins)
    trainer.save(tmp_path / "2")
    monkeypatch.undo()
    expected = small.state(trainer)
    trainer.restore(tmp_path / "2")
    check_same_bits(small.state(trainer), expected)


def test_a_lack_of_threads_is_not_taken_for_a_folder_without_a_checkpoint(saved, monkeypatch):
    def without_threads(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(v1, "metadata", without_threads)
    with pytest.raises(mt.CheckpointError, match="could not be read .*can't start new thread"):
        small.trainer(params=saved)


def test_a_checkpoint_of_this_library_without_its_manifest_is_refused_as_params(saved):
    (saved / "megatrain.json").unlink()
    with pytest.raises(mt.CheckpointError, match=f"`params`={re.escape(str(saved))} is damaged"):
        small.trainer(params=saved)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_checkpoint_of_another_format_is_refused(number, trainer, saved):
    before, file = small.tree(saved), saved / "megatrain.json"
    facts = {k: v for k, v in json.loads(file.read_text()).items() if k != "checksum"}
    facts["format"] = number
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(facts).encode())
    file.write_text(json.dumps({**facts, "checksum": checksum}))
    expected = small.state(trainer)
    said = f"{re.escape(str(saved))} is a checkpoint of format {number}, .* reads format 3 only"
    for use in (trainer.restore, lambda path: small.trainer(params=path)):
        with pytest.raises(mt.CheckpointError, match=said):
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
    said = f"{re.escape(str(tmp_path / str(other)))} is .* format 99, .* reads format 3 only"
    with pytest.raises(mt.CheckpointError, match=said) as error:
        small.fit(tmp_path, 8)
    assert "No checkpoint was renamed" in "".join(error.value.__notes__)
    assert small.tree(tmp_path) == before


ANOTHER = {"missing": None, "float32": (2, 2), "int32": (64, 64)}


@pytest.mark.parametrize("dtype", ANOTHER)
def test_what_orbax_does_not_find_is_not_published(dtype, trainer, saved, monkeypatch):
    join, shape, before = orbax.join, ANOTHER[dtype], small.tree(saved)
    changed = ("params", "0", "w")

    def changing(folder, paths):
        if shape is None:
            return join(folder, [path for path in paths if path != changed])
        grid = Grid(shape=shape, chunk=shape)
        spec = orbax.write_spec(folder, 0, changed, grid, dtype)
        context = ts.Context({"cache_pool#ocdbt": {}})
        ts.open(ts.Spec(spec), create=True, delete_existing=True, context=context).result()
        join(folder, paths)

    monkeypatch.setattr(orbax, "join", changing)
    with pytest.raises(mt.CheckpointError, match=r"not what was to be written:\n  params/"):
        trainer.save(saved.with_name("3"))
    assert os.listdir(saved.parent) == ["2"] and small.tree(saved) == before


NAMES = ("run[1]", "a*", "a?", ".dot", "é: [%20#")


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_local_folder_can_be_used(name, trainer, tmp_path):
    (tmp_path / "ab" / "2").mkdir(parents=True)  # fits the patterns, too
    for path in (tmp_path / name / "2", tmp_path / "x" / name):
        trainer.save(path)
        check_same_bits(plain(path)["params"]["1"], trainer.params[1])
        expected = small.state(trainer)
        trainer.step(small.batch(3))
        trainer.restore(path)
        check_same_bits(small.state(trainer), expected)


def test_a_run_in_a_folder_with_brackets_goes_on(tmp_path):
    for steps in (2, 5):
        result = small.fit(tmp_path / "lr[0.1]*", steps, checkpoint_every=1, keep=1)
    assert small.losses(result) == small.expected(5)
    assert os.listdir(tmp_path / "lr[0.1]*") == ["5"]


REFUSED = ("gs://bucket/run", "s3://bucket/run", "file:///tmp/run", "x/gs:/y", "a\\b", "", "a\0b")


@pytest.mark.parametrize("path", [*REFUSED, "~nobody-of-this-name/run", 5])
def test_paths_that_are_not_of_a_local_disk_are_refused_by_name(
    path, trainer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    calls = {
        "`checkpoint_dir`": lambda: small.fit(path, 1, data=nothing()),
        "`path`": lambda: trainer.save(path),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError if path == 5 else ValueError, match=name):
            call()
    with pytest.raises(TypeError if path == 5 else ValueError, match="`path`"):
        trainer.restore(path)
    assert not os.listdir(tmp_path)


def nothing():
    raise AssertionError("a batch was drawn")
    yield


def test_the_home_folder_is_expanded(trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer.save("~/2")
    trainer.restore("~/2")
    small.trainer(params="~/2")
    small.fit("~/runs", 1)
    assert sorted(os.listdir(tmp_path)) == ["2", "runs"]
    assert manifest.facts_of(tmp_path / "runs" / "1")["step"] == 1


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
        assert in_all(processes, "here", action) == 7
        return
    with pytest.raises(CheckpointError, match=message) as raised:
        in_all(processes, "here", action)
    assert type(raised.value) is kind
