"""Runs with state on disks train to the bits of runs in memory, and survive or report faults."""

import dataclasses
import errno
import gc
import os
import random
import tempfile
import time
import weakref
from collections import Counter, deque
from contextlib import nullcontext, suppress
from itertools import takewhile
from operator import eq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import megatrain_jax as mt
from disks import ALL, CASE, SKIPPING, counted_reads, shuffled_disks, state_on_disk
from inside import spec_of, store_of
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.common.remembering import gc_paused
from megatrain_jax._src.engine import run_state, start
from megatrain_jax._src.engine.checkpoint import save
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.runtime.disk import Disk, _all_but_next, _memory
from megatrain_jax._src.engine.runtime.engine import Engine
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.workload import SLOTS
from megatrain_jax._src.engine.state import drive, pool
from megatrain_jax._src.engine.state.drive import Drives
from messages import refuses, warns
from optimizers import OPTIMIZERS
from runs import check_each_continues_the_other, check_same_bits, make_trainer, train
from zoo import CASES
from zoo_case import Case

pytestmark = pytest.mark.usefixtures("traced_once", "started_once")


def pair(
    folder: Path,
    kinds: Any = ALL,
    *,
    case: Case = CASE,
    optimizer: str = "clip_adamw",
    span: int = 1,
    **options: Any,
):
    """A trainer with its state in memory, and one with it on a disk."""
    options = {"budget": "minimum", **options}
    memory = make_trainer(case, OPTIMIZERS[optimizer], **options)
    with state_on_disk(kinds, span=span):
        disk = make_trainer(case, OPTIMIZERS[optimizer], disk_dir=folder, **options)
    assert spec_of(disk).on_disk
    return memory, disk


def check_alike(
    memory: mt.Trainer, disk: mt.Trainer, steps: int = 3, batch: Any = CASE.batch
) -> None:
    """Trains both, with an evaluation between, and compares everything."""
    for first in (0, steps):
        batches = [batch(seed) for seed in range(first, first + steps)]
        ours, theirs = (
            train(disk, batches, gradients=False),
            train(memory, batches, gradients=False),
        )
        assert ours.losses == theirs.losses
        check_same_bits((ours.params, ours.opt_state), (theirs.params, theirs.opt_state))
        assert disk.evaluate([batch(99)]) == memory.evaluate([batch(99)])


def check_slots_come_back(trainer: mt.Trainer) -> None:
    """Checks that all slots become free."""
    disk: Any = store_of(trainer).disk
    with disk._changed:
        assert disk._changed.wait_for(lambda: {*map(len, disk._free.values())} == {SLOTS}, 5)


@pytest.mark.parametrize("kind", [*ALL, None])
def test_state_on_a_disk_trains_to_the_bits_of_memory(kind: Kind | None, tmp_path: Path):
    kinds = ALL if kind is None else [kind]
    memory, disk = pair(tmp_path, kinds)
    check_alike(memory, disk)
    assert not list(tmp_path.iterdir()), "files have no name"
    held: Any = store_of(disk).disk
    # State is written once when it is made.
    assert {key.kind for key, place in held._places.items() if place.version > 1} == {*kinds}


# Small updates at once and resident state are also those of other tests.
@pytest.mark.by_default("waves", "frozen", "float16", "compact", "float8", "again")
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw_schedule"},
        {"microbatches": 4, "waves": 2},
        {"frozen": "bfloat16", "trainable": "layers/[12]"},
        {"budget": "8MiB"},
        {"optimizer": "adamw_schedule", "compute": jnp.float16},
        {"precision": mt.Precision.compact(sums="bfloat16"), "microbatches": 4, "waves": 2},
        {"products": {"*": "float8"}, "optimizer": "lion"},
        {"span": 3},
    ],
    ids=["at once", "waves", "frozen", "resident", "float16", "compact", "float8", "again"],
)
def test_every_kind_of_step_works_from_a_disk(options: dict[str, Any], tmp_path: Path):
    check_alike(*pair(tmp_path, **options))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:in evaluations")
@pytest.mark.parametrize("name", CASES)
def test_every_model_trains_from_a_disk(name: str, tmp_path: Path):
    case = CASES[name]
    waves: Any = {"microbatches": 2, "waves": 2} if case.microbatches and not case.random else {}
    check_alike(*pair(tmp_path, case=case, **waves), batch=case.batch)


@pytest.mark.by_default("16")
@pytest.mark.parametrize("rows", [4, 16])
def test_batches_of_another_shape_wait_in_memory(rows: int, tmp_path: Path):
    def batch(seed: int) -> Any:
        number = rows if seed % 2 else 8
        return jax.tree.map(lambda x: np.resize(x, (number, *x.shape[1:])), CASE.batch(seed))

    memory, disk = pair(tmp_path, [Kind.ACTIVATION], case=SKIPPING)
    check_alike(memory, disk, batch=batch)
    evaluation = spec_of(disk).bound_step(batch(99), train=False).schedule.evaluation
    waiting = [row.key for row in evaluation if row.op is Op.OFFLOAD]
    assert waiting, "an evaluation's values wait as well"


@pytest.mark.by_default("0", "1")
@pytest.mark.parametrize("seed", range(3))
def test_reads_and_writes_may_end_in_any_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if seed:
        monkeypatch.setattr(Disk, "is_ready", lambda self, key: False)  # as on a slow drive
    with shuffled_disks(seed):
        memory, disk = pair(tmp_path, budget=None if seed == 2 else "minimum")
        held: Any = store_of(disk).disk
        write, waiting = held.write, []

        def counted(key: Key, arrays: Any) -> None:
            write(key, arrays)
            waiting.append(len(held._outgoing[held.classes[key]]))

        held.write = counted
        check_alike(memory, disk)
    assert max(waiting) == SLOTS, "no more parts of a class wait in memory to be written"


def test_what_is_read_ahead_and_not_needed_is_given_up(tmp_path: Path, monkeypatch: Any):
    given_up: list[Key] = []
    monkeypatch.setattr(Disk, "is_ready", lambda self, key: False)  # as on a slow drive
    give_up = Disk.give_up
    monkeypatch.setattr(
        Disk, "give_up", lambda self, key: (given_up.append(key), give_up(self, key))
    )
    memory, disk = pair(tmp_path, frozen="bfloat16", trainable="layers/[12]")
    check_alike(memory, disk, 1)
    assert given_up, "frozen parts that the next step would have begun with"
    check_slots_come_back(disk)


def test_checkpoints_go_both_ways(tmp_path: Path):
    memory, disk = pair(tmp_path / "disk")
    check_each_continues_the_other(memory, disk, CASE.batch(0), tmp_path)


def test_a_checkpoint_has_the_state_of_its_step_while_training_goes_on(tmp_path: Path):
    memory, disk = pair(tmp_path / "disk")
    for trainer, name in ((memory, "memory"), (disk, "disk")):
        result = mt.train(
            trainer,
            [CASE.batch(seed) for seed in range(4)],
            steps=4,
            checkpoint_dir=tmp_path / name / "run",
            checkpoint_every=1,
            keep=4,
            progress=False,
        )
        assert trainer.num_steps == 4 and result.ended == "done"
    for step in (1, 2, 3):
        memory.restore(tmp_path / "memory/run" / str(step))
        disk.restore(tmp_path / "disk/run" / str(step))
        check_same_bits((disk.params, disk.opt_state), (memory.params, memory.opt_state))


def test_state_on_a_disk_is_saved_and_read_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory, disk = pair(tmp_path / "disk", ema_decay=0.9)
    for trainer in (memory, disk):
        train(trainer, [CASE.batch(0)], gradients=False)
    arrays = [*jax.tree.leaves(memory.params), *jax.tree.leaves(memory.opt_state)]
    largest, num_bytes = max(x.nbytes for x in arrays), sum(x.nbytes for x in arrays)
    monkeypatch.setattr(save, "READ_BYTES", 2 * largest)
    with counted_reads() as reads:
        disk.save(tmp_path / "saved")
    assert reads.total > num_bytes and reads.most <= 2 * largest
    memory.restore(tmp_path / "saved")
    check_same_bits((disk.params, disk.opt_state), (memory.params, memory.opt_state))
    both: Any = {"trained": memory.params, "ema": memory.ema_params}
    for which, expected in both.items():
        with counted_reads() as reads:
            unread = jax.tree.leaves(disk.unread_model(which))
            assert not reads.total
            for own, array in zip(unread, jax.tree.leaves(expected), strict=True):
                assert (own.shape, own.dtype) == (array.shape, array.dtype)
                check_same_bits(np.asarray(own), array)
        assert reads.total and reads.most <= largest


@pytest.mark.parametrize("name", ["params", "model", "opt_state"])
def test_what_is_larger_than_memory_is_not_read_as_a_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind = Kind.OPTIMIZER_STATE if name == "opt_state" else Kind.MASTERS
    _, disk = pair(tmp_path, [kind])
    largest = sum(x.nbytes for x in jax.tree.leaves(disk.params)) * (1 + (name == "opt_state"))
    monkeypatch.setattr(run_state, "available_bytes", lambda: largest - 1000)
    with refuses(MemoryError, "`disk_dir`", "save"):
        getattr(disk, name)
    monkeypatch.setattr(run_state, "available_bytes", lambda: 2 * largest)
    getattr(disk, name)


def test_parameters_are_copied_to_the_device_from_a_disk(tmp_path: Path):
    found = []
    memory, disk = pair(tmp_path)
    for trainer in (memory, disk):
        train(trainer, [CASE.batch(0)], gradients=False)
        copy = trainer.compute_copy()
        first, *others = [x for x in jax.tree.leaves(copy.model) if hasattr(x, "number")]
        found.append([copy.read([first])])
        if trainer is disk:
            check_slots_come_back(disk)
        found[-1] += [copy.read([parameter]) for parameter in others]
    check_same_bits(*found)
    check_alike(memory, disk, 1)


def test_averages_of_parameters_are_read_from_a_disk(tmp_path: Path):
    memory, disk = pair(tmp_path, ema_decay=0.9)
    check_alike(memory, disk)
    check_same_bits(disk.ema_params, memory.ema_params)
    batch = CASE.batch(9)
    found = [trainer.evaluate([batch], params="ema") for trainer in (disk, memory)]
    assert found[0] == found[1] != memory.evaluate([batch])
    check_alike(memory, disk, 1)


def test_two_devices_share_a_disk(tmp_path: Path):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    check_alike(*pair(tmp_path, mesh=mesh))


def test_what_was_fetched_before_comes_before_what_is_fetched_next(tmp_path: Path):
    _, trainer = pair(tmp_path)
    disk: Any = store_of(trainer).disk
    first, *others = sorted(key for key in disk.classes if key.kind is Kind.MASTERS)
    assert others
    fetches = [Instruction(op=Op.FETCH, key=key) for key in others]
    disk.follow((), [Instruction(op=Op.FETCH, key=first)])
    disk.follow([first], fetches)
    for key in (first, *others):
        expected = [np.asarray(row[0]) for row in disk.shards(key)]
        with disk._changed:
            number = disk.classes[key]
            assert disk._changed.wait_for(lambda number=number: disk._ahead[number], 5)
        slot = disk.take(key)
        check_same_bits([np.array(x) for x in slot], expected)
        disk.copied(key, slot)
    disk.abandon()


def test_no_memory_is_reused_while_it_is_copied_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, trainer = pair(tmp_path)
    disk: Any = store_of(trainer).disk
    consume, consumed = Engine._pop_part, Counter()

    def checked(engine: Engine, key: Key) -> Any:
        part = consume(engine, key)
        assert key not in disk._copying
        consumed[key.kind] += key in disk
        return part

    monkeypatch.setattr(Engine, "_pop_part", checked)
    for seed in range(2):
        trainer.read(trainer.step(CASE.batch(seed)))
    groups = len({key.owner for key in disk.classes if key.kind is Kind.MASTERS})
    assert consumed[Kind.MASTERS] == consumed[Kind.OPTIMIZER_STATE] == groups
    assert consumed[Kind.GRADIENT] == groups + 2, "the embedding's is added to by a backward"


def test_few_parts_wait_in_memory_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with shuffled_disks(0):
        _, trainer = pair(tmp_path, optimizer="adamw_schedule", budget="8MiB")
    waiting, most, write = Counter(), Counter(), Disk.write

    def counted(disk: Disk, key: Key, arrays: Any) -> None:
        number = disk.classes[key]
        waiting[number] += 1
        most[number] = max(most[number], waiting[number])
        weakref.finalize(arrays[0], waiting.subtract, [number])
        write(disk, key, arrays)

    monkeypatch.setattr(Disk, "write", counted)
    trainer.read(trainer.step(CASE.batch(0)))
    trainer.params  # noqa: B018  # all state leaves the device at once
    # The thread has one more, until its next job.
    assert 0 < max(most.values()) <= SLOTS + 1 and sum(waiting.values()) <= 1


def test_what_was_read_ahead_as_ordered_is_kept():
    rng = random.Random(0)
    for _ in range(200):
        rows = [[(rng.choice("abc"), rng.randint(1, 2)) for _ in range(4)] for _ in range(2)]
        ahead, order = (row[: rng.randint(0, 4)] for row in (rows[0], rows[rng.randint(0, 1)]))
        same = sum(takewhile(bool, map(eq, ahead, order)))
        reads: Any = deque(SimpleNamespace(key=key, version=version) for key, version in ahead)
        left: Any = deque(order)
        whole = list(reads)
        assert _all_but_next(reads, left) == whole[same:]
        assert list(reads) == whole[:same] and list(left) == order[same:]


def test_what_was_read_before_a_part_is_written_again_is_not_taken(tmp_path: Path):
    _, trainer = pair(tmp_path)
    store: Any = store_of(trainer)
    disk, key = store.disk, Key(Kind.MASTERS, 0)
    fetch, offload = (Instruction(op=op, key=key) for op in (Op.FETCH, Op.OFFLOAD))
    to = store.placement.slabs_at_rest
    new = tuple(jax.device_put(np.asarray(row[0]) + 1, to) for row in disk.shards(key))
    disk.follow((), [fetch])
    disk.follow((), [offload, fetch])
    disk.write(key, new)
    slot = disk.take(key)
    check_same_bits([np.array(x) for x in slot], [np.asarray(x) for x in new])
    disk.copied(key, slot)
    disk.abandon()


def _open_files(folder: Path) -> int:
    """The number of files in a folder, with or without a name, that this process has open."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith(str(folder)) for link in links)


def test_too_little_space_is_refused_before_memory_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folders = [tmp_path / "first", tmp_path / "second" / "inside"]
    with state_on_disk(ALL):
        trainer = make_trainer(CASE, OPTIMIZERS["lion"], budget="minimum", disk_dir=folders)
    spec = spec_of(trainer)
    each = sum(map(spec.first.workload.size, spec.on_disk)) // len(folders)
    assert each > trainer.plan.disk_bytes // len(folders), "activations take space, too"
    own = drive._free_bytes

    class PinningError(Exception):
        pass

    def pin(*_: Any) -> None:
        raise PinningError

    monkeypatch.setattr(pool, "reserve", pin)
    for short, free in {
        "inside": {"first": 10 * each, "inside": each - 1},
        "first": {"first": each - 1, "inside": 10 * each},
        None: {"first": each, "inside": each},
    }.items():
        monkeypatch.setattr(drive, "_free_bytes", lambda x, free=free: free.get(x.name, own(x)))
        refusal = refuses(OSError, "`disk_dir`", short) if short else pytest.raises(PinningError)
        with state_on_disk(ALL), refusal:
            make_trainer(CASE, OPTIMIZERS["lion"], budget="minimum", disk_dir=folders)


def test_the_space_of_a_dropped_trainer_is_free_again(tmp_path: Path):
    trainer = pair(tmp_path)[1]
    with gc_paused():
        for seed in range(2):
            trainer.read(trainer.step(CASE.batch(seed)))
        trainer.evaluate([CASE.batch(9)])
        assert _open_files(tmp_path) == 1
        held: Any = store_of(trainer).disk
        held.follow((), [Instruction(op=Op.FETCH, key=next(iter(held.classes)))])
        held.follow((), ())  # a read of no use
        threads = held._copies, held._drives._readers, held._drives._writers
        del trainer, held
        for pool in threads:  # whose last jobs may just be ending
            pool.shutdown()
        assert not _open_files(tmp_path)


# ---- faults


def _sized(drives: drive.Storage, rng: random.Random) -> list[Any]:
    sizes = [0, 1, 4095, 4096, 4097, 2**23 - 1, 2**23, 2**23 + 1, rng.randrange(2**25)]
    return [drives.place(size) for size in sizes]


@pytest.mark.parametrize(
    ("number", "most"), [(0, 2**30), (1, 2**30), (3, 2**21)], ids=["memory", "1", "3"]
)
def test_what_is_written_is_read_again(
    number: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rng, write, read = random.Random(number), os.pwrite, os.preadv
    # A system may transfer less than it is asked to.
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:most], at))
    monkeypatch.setattr(os, "preadv", lambda file, data, at: read(file, [data[0][:most]], at))
    folders = [tmp_path / str(i) for i in range(number)]
    drives = drive.drives_of(folders or [drive.ORDINARY_MEMORY])
    ranges = _sized(drives, rng)
    drives.reserve()
    data = [
        np.random.default_rng(i).integers(0, 256, r.num_bytes, np.uint8)
        for i, r in enumerate(ranges)
    ]
    for _ in range(2):
        data = [x[::-1].copy() for x in data]
        jobs = drives.write((r, lambda x=x: x) for r, x in zip(ranges, data, strict=True))
        assert [job.result() for job in jobs] == [None] * len(jobs)
        for where, expected in zip(ranges, data, strict=True):
            found = np.empty_like(expected)
            for job in drives.read([(where, found)]):
                job.result()
            np.testing.assert_array_equal(found, expected)
            start, stop = sorted(rng.randrange(where.num_bytes + 1) for _ in range(2))
            part = drives.read_part(where, start, stop)
            np.testing.assert_array_equal(part, expected[start:stop])
    lengths = drives._lengths
    assert max(lengths) - min(lengths) <= 2**23, "drives are filled evenly"
    drives.close()


def test_memory_that_a_thread_reads_into_is_kept():
    """Reads may be under way when a trainer is dropped."""
    numbers = np.arange(1000)
    array = jnp.array(numbers)
    view, kept = _memory(array), weakref.ref(array)
    del array
    gc.collect()
    assert kept() is not None
    np.testing.assert_array_equal(view.view(np.int32), numbers)
    del view
    assert kept() is None
    assert not _memory(jnp.zeros(0)).size


def test_a_flipped_bit_on_the_disk_is_noticed(tmp_path: Path):
    _, disk = pair(tmp_path)
    rng = random.Random(0)
    held: Any = store_of(disk).disk
    (file,) = held._drives._files
    at = rng.randrange(os.fstat(file).st_size // 4096) * 4096
    flags = "/proc/self/fd/" + str(file)
    with open(flags, "r+b", buffering=0) as plain:
        found = os.pread(plain.fileno(), 4096, at)
        os.pwrite(plain.fileno(), bytes([found[0] ^ 1]) + found[1:], at)
    with refuses(OSError, "`disk_dir`", "checkpoint"):
        for seed in range(3):
            disk.read(disk.step(CASE.batch(seed)))
            disk.params  # noqa: B018
            disk.opt_state  # noqa: B018


@pytest.mark.parametrize("call", ["preadv", "pwrite"])
def test_a_failing_drive_ends_training_with_its_name_and_keeps_the_checkpoint(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    memory, disk = pair(tmp_path / "disk")
    for trainer in (memory, disk):
        train(trainer, [CASE.batch(0)], gradients=False)
    disk.save(tmp_path / "saved")

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with refuses(OSError, "`disk_dir`"):
            for seed in range(3):
                disk.read(disk.step(CASE.batch(seed)))
        if call == "pwrite":
            with refuses(mt.CheckpointError, "`disk_dir`"):
                disk.restore(tmp_path / "saved")
    disk.restore(tmp_path / "saved")
    check_alike(memory, disk, 1)


@pytest.mark.parametrize("fails", [True, False])
def test_a_step_that_is_cut_off_gives_its_slots_back(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = pair(tmp_path)[1]
    disk: Any = store_of(trainer).disk
    key = min(key for key in disk.classes if key.kind is Kind.MASTERS)
    with monkeypatch.context() as patch, refuses(OSError, "`disk_dir`") if fails else nullcontext():
        if fails:
            patch.setattr(os, "preadv", lambda *_: 0)
        disk.follow((), [Instruction(op=Op.FETCH, key=key)])
        disk.take(key)
    disk.abandon()  # before the copy to the device
    check_slots_come_back(trainer)  # reads that are of no use end by themselves


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs /dev/shm")
def test_a_folder_in_memory_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with state_on_disk(), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(start, "in_memory", drive.in_memory)
        with warns(UserWarning, "`disk_dir`", folder):
            make_trainer(CASE, OPTIMIZERS["clip_adamw"], disk_dir=[tmp_path, f"{folder}/new/disk"])
    mounts = tmp_path / "mounts"
    device = os.stat(tmp_path).st_dev
    own = f"5 1 {os.major(device)}:{os.minor(device)} / / rw shared:1"
    # The last one is listed with another number, as a subvolume is.
    cases = (f"{own} - ext4", False), (f"{own} - tmpfs", True), ("5 1 0:78 / / rw - btrfs", False)
    for row, expected in cases:
        mounts.write_text(f"4 1 0:77 / /proc rw - proc proc rw\n{row} /dev/sda rw\n")
        monkeypatch.setattr(drive, "_MOUNTS", mounts)
        assert drive.in_memory(tmp_path / "later") is expected


def test_state_that_can_t_be_pinned_rests_in_ordinary_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    memory = make_trainer(CASE, OPTIMIZERS["clip_adamw"], budget="minimum")
    asked: list[int] = []

    def refusing(placement: Any, num_bytes: int, *_: Any) -> None:
        asked.append(num_bytes)
        if len(asked) == 1:
            raise pool.PinningRefusedError("the system refused more", num_bytes // 2)

    def fit(spec: Any, *_: Any) -> Any:
        return fitted(spec) if spec.options.disk_folders else spec

    def within(*arguments: Any) -> Any:
        found = limited(*arguments)
        # This process may be larger than one that only trains.
        return dataclasses.replace(
            found, options=dataclasses.replace(found.options, host_budget=None)
        )

    with state_on_disk(), monkeypatch.context() as patch:
        fitted, limited = start.fit_to_host, start.within_pinned
        patch.setattr(start, "fit_to_host", fit)
        patch.setattr(start, "within_pinned", within)
        patch.setattr(pool, "reserve", refusing)
        patch.setattr(start, "in_memory", lambda folder: True)  # as /dev is in a container
        with warns(UserWarning, "pinned", "`disk_dir`", "ordinary memory") as warned:
            little = make_trainer(CASE, OPTIMIZERS["clip_adamw"], budget="minimum")
    assert len(asked) == 2 and spec_of(little).on_disk and len(warned) == 1
    assert not list(tmp_path.iterdir())  # no drive is used
    check_alike(memory, little)


def test_a_full_disk_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Status:
        f_bavail, f_frsize = 1, 512

    monkeypatch.setattr(os, "statvfs", lambda _: Status)
    with state_on_disk(), refuses(OSError, "`disk_dir`", "512 B"):
        make_trainer(CASE, OPTIMIZERS["clip_adamw"], disk_dir=tmp_path)
    assert not list(tmp_path.iterdir()) and not _open_files(tmp_path)


def test_each_folder_needs_room_for_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    drives = Drives(folders)
    drives.place(2**16 + 1)
    drives.place(2**12)
    assert len(set(drives._lengths)) == 2 and min(drives._lengths) > 0
    for lacking in (0, 1, None):
        parts = zip(folders, drives._lengths, strict=True)
        free = {folder: size - (number == lacking) for number, (folder, size) in enumerate(parts)}
        monkeypatch.setattr(drive, "_free_bytes", free.__getitem__)
        with nullcontext() if lacking is None else refuses(OSError, folders[lacking]):
            drives.reserve()
    # Before ranges have places, each folder gets an equal part.
    for lacking in (0, 1, None):
        free = {folder: 2**20 - (number == lacking) for number, folder in enumerate(folders)}
        monkeypatch.setattr(drive, "_free_bytes", free.__getitem__)
        with nullcontext() if lacking is None else refuses(OSError, folders[lacking]):
            drive.check_space(folders, 2**21)
    drives.close()


def test_space_is_taken_by_writing_where_a_file_system_can_t_reserve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "posix_fallocate", fails)
    drives = Drives([tmp_path])
    drives.place(2**23 + 5000)
    drives.reserve()
    status = os.fstat(drives._files[0])
    assert status.st_size == drives.num_bytes <= status.st_blocks * 512
    drives.close()


def test_a_folder_that_can_t_be_used_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with state_on_disk(), refuses(NotADirectoryError, "`disk_dir`", "file"):
        make_trainer(CASE, OPTIMIZERS["clip_adamw"], disk_dir=tmp_path / "file")


@pytest.mark.parametrize(
    "given", ["gs://bucket/run", ["/tmp", "file:///tmp"]], ids=["one", "listed"]
)
def test_a_url_is_no_folder_of_a_drive(given: Any):
    with refuses(ValueError, "`disk_dir`", "URL"):
        Options(disk_dir=given)


def test_a_drive_is_timed(tmp_path: Path):
    for folder in tmp_path, drive.ORDINARY_MEMORY:
        assert all(rate > 0 for rate in drive.measured_rates([folder]))
    assert not list(tmp_path.iterdir())


def test_each_way_of_a_drive_and_both_together_have_their_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A drive that reads 2 MiB in a second, writes 1, and moves 1.6 both ways at once."""
    now, reading, written = [0.0], [False], set()

    def read(*_: Any) -> list[Any]:
        reading[0] = True
        return [SimpleNamespace(result=lambda: ended(0.5))]

    def write(self: Drives, rows: Any) -> list[Any]:
        ((where, _),) = rows
        seconds = 10.0 if where not in written else 0.75 if reading[0] else 1.0
        written.add(where)
        return [SimpleNamespace(result=lambda: ended(seconds))]

    def ended(seconds: float) -> None:
        reading[0] = False
        now[0] += seconds

    monkeypatch.setattr(Drives, "read", read)
    monkeypatch.setattr(Drives, "write", write)
    monkeypatch.setattr(drive, "_PIECE_BYTES", 2**20)
    monkeypatch.setattr(drive, "_MEASURED_SECONDS", 1.0)
    times = SimpleNamespace(perf_counter=lambda: now[0], monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr(drive, "time", times)
    rates = drive.measured_rates([tmp_path])
    assert [rate / 2**20 for rate in rates] == pytest.approx([2.0, 1.0, 1.6])
