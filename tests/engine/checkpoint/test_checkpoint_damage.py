"""Arrays read from a checkpoint equal the written ones, or the checkpoint is refused."""

import gc
import json
import os
import random
import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import xxhash

import megatrain_jax as mt
import small
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.checkpoint import contents, orbax, save
from megatrain_jax._src.engine.checkpoint.chunks import Grid
from megatrain_jax._src.engine.checkpoint.contents import (
    ArrayEntry,
    Checksums,
    StorePlace,
    as_facts,
    checksum,
    flat,
)
from megatrain_jax._src.engine.checkpoint.orbax import ChunkReader
from megatrain_jax._src.engine.checkpoint.save import Writer
from megatrain_jax._src.engine.runtime.engine import Engine
from messages import refuses
from runs import check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")


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
    for path, array in flat(small.plain(saved)).items():
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
PLAIN, NARROW = (jnp.float32, jnp.float32), (jnp.bfloat16, "int4")


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
    load, read, spoiled, names = ChunkReader.read_whole, ChunkReader.read, [], []

    def spoiling(reader, wanted):
        found = {path: np.array(array) for path, array in load(reader, wanted).items()}
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
        patch.setattr(ChunkReader, "read_whole", spoiling)
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
            with refuses(mt.CheckpointError, name, "differs"):
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
        with refuses(mt.CheckpointError, "w", "differs"):
            sums.verify(("w",), other)
        with refuses(mt.CheckpointError, "w", "differs"):
            sums.verify(("w",), other[box], number)
    # Orbax says how large an array is, and no checksum covers what it says.
    for other in (array[:4], np.concatenate([array, array])):
        with pytest.raises(mt.CheckpointError, match="the chunks of w"):
            sums.verify(("w",), other)


def test_a_missing_file_is_noticed_before_the_state_changes(trainer, saved):
    expected = small.state(trainer)
    max(small.files(saved), key=os.path.getsize).unlink()
    with pytest.raises(mt.CheckpointError, match=f"{saved} is damaged"):
        trainer.restore(saved)
    check_same_bits(small.state(trainer), expected)


def test_each_piece_of_an_array_has_to_be_finite(monkeypatch):
    monkeypatch.setattr(contents, "_PIECE", 7)
    # The last piece has one number, a few or seven.
    for dtype, size in ((np.float32, 1), (np.float32, 15), (jnp.bfloat16, 20), (np.float32, 21)):
        array = np.ones((1, size), dtype)
        contents.check_finite("w", array)
        for at in range(array.size):
            other = array.copy()
            other.reshape(-1)[at] = (np.nan, np.inf, -np.inf)[at % 3]
            with refuses(ValueError, "w", "finite"):
                contents.check_finite("w", other)


def test_frozen_parameters_and_other_state_need_not_be_finite(tmp_path):
    """A mask may be of infinities, and so may an optimizer's best loss so far."""
    entry: Any = SimpleNamespace(path=("params", "w"), groups=frozenset({1}), name="params/w")
    state: Any = SimpleNamespace(path=("opt_state", "w"), groups=entry.groups, name="opt_state/w")
    array = np.array([-np.inf, 0], np.float32)
    for of, frozen, finite in ((entry, {1}, True), (entry, {0}, False), (state, {0}, True)):
        writer = Writer(tmp_path, tmp_path / "c", 0, [of], {}, finite, frozenset(frozen))
        writer._inspect(of, 0, array)
    writer = Writer(tmp_path, tmp_path / "c", 0, [entry], {}, True, frozenset({0}))
    with pytest.raises(ValueError, match="params/w is not finite"):
        writer._inspect(entry, 0, array)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_noticed_before_it_is_read(change, trainer, saved):
    expected = small.state(trainer)
    file = next(f for f in small.files(saved) if f.name != "megatrain.json" and f.stat().st_size)
    os.truncate(file, file.stat().st_size + change)
    with refuses(mt.CheckpointError, "damaged", str(file.relative_to(saved))):
        trainer.restore(saved)
    check_same_bits(small.state(trainer), expected)


@pytest.mark.parametrize("starts", [(0, 15), (15, 0)])
def test_processes_write_their_parts_of_one_array(starts, tmp_path):
    """Each has half of it, of which one chunk is shared; none keeps the whole half for that."""
    array = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    place = StorePlace(holder=Key(Kind.MASTERS, 0), position=0)
    shape: Any = {"whole": array.shape, "shape": array.shape, "dtype": "float32"}
    entry = ArrayEntry(path=("params", "w"), array=("params", "w"), places=(place,), **shape)
    grid = Grid(shape=array.shape, chunk=(2, 5))
    folder, what = tmp_path / "c", ([entry], {entry.path: grid}, True, frozenset())
    writers = [Writer(tmp_path, folder, i, *what) for i in range(2)]
    for writer, start in zip(writers, starts, strict=True):
        half = array.reshape(-1)[start : start + 15]
        writer.write([(entry, (), lambda run=(start, half): [run])])
        assert not any(np.shares_memory(piece, half) for piece in writer._pieces.values())
        writer.finish()
    sums = {number: checksum(array[box]) for number, box in grid.boxes()}
    assert writers[0].join(2) == {"params/w": as_facts(grid, sums)}
    read = ChunkReader(folder).read_whole([entry.path])
    np.testing.assert_array_equal(read[entry.path], array)
    assert os.listdir(tmp_path) == ["c"]


def test_parts_of_an_array_are_in_its_order_whichever_group_is_used_first():
    places = [((at,), f"group {at}") for at in (2, 0, 1)]
    entry = contents._entry(("params", "w"), (3, 4), jnp.float32, places)
    assert entry.places == ("group 0", "group 1", "group 2")
    assert entry.cuts == entry.indices == ((0,), (1,), (2,))


class OnDrive:
    """A run of elements that is read when it is converted."""

    def __init__(self, array: np.ndarray):
        self._array, self.size = array, array.size

    def __getitem__(self, part: slice) -> "OnDrive":
        return OnDrive(self._array[part])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array


@pytest.mark.parametrize(("most", "together"), [(79, 1), (80, 2), (119, 2), (1000, 3)])
def test_what_rests_on_drives_is_written_as_far_as_memory_allows(
    most, together, tmp_path, monkeypatch
):
    array = np.arange(60, dtype=np.float32).reshape(6, 10)
    place = StorePlace(holder=Key(Kind.MASTERS, 0), position=0)
    shape: Any = {"whole": array.shape, "shape": array.shape, "dtype": "float32"}
    entry = ArrayEntry(path=("params", "w"), array=("params", "w"), places=(place,), **shape)
    grid = Grid(shape=array.shape, chunk=(1, 10))
    monkeypatch.setattr(save, "READ_BYTES", most)
    writer = Writer(tmp_path, tmp_path / "c", 0, [entry], {entry.path: grid}, True, frozenset())
    numbers, write = [], writer._write
    monkeypatch.setattr(writer, "_write", lambda rows: numbers.append(len(rows)) or write(rows))
    writer.write([(entry, (), lambda: [(0, OnDrive(array.reshape(-1)))])])  # type: ignore
    assert numbers == ([6] if together == 3 else [together] * (6 // together))


def test_parameters_to_start_from_are_verified(trainer, saved):
    check_same_bits(small.trainer(params=saved).params, trainer.params)
    small.damage(saved, trainer.params[1]["w"])
    with refuses(mt.CheckpointError, "params/1/w", "differs"):
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
        with refuses(RuntimeError, "lost", "Restore"):
            use()
    assert not saved.with_name("3").exists()
    trainer.restore(saved)
    check_same_bits(small.state(trainer), expected)


def test_a_restored_state_forgets_a_lost_step_that_was_not_finite(trainer, saved, monkeypatch):
    trainer.read(trainer.step(small.batch(2)))
    expected = small.state(trainer)
    trainer.step({"x": np.full_like(small.batch(0)["x"], np.nan)})

    def fails(*_):
        raise OSError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "obey", fails)
        with pytest.raises(OSError, match="cut off"):
            trainer.step(small.batch(2))
    trainer.restore(saved)
    trainer.read(trainer.step(small.batch(2)))
    check_same_bits(small.state(trainer), expected)


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
    with pytest.raises(mt.CheckpointError, match=r"written:\n  params/"):
        trainer.save(saved.with_name("3"))
    assert os.listdir(saved.parent) == ["2"] and small.tree(saved) == before
