"""A folder of checkpoints belongs to one run at a time, which deletes nothing but its own."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optax
import pytest

import megatrain_jax as mt
import small
from inside import count_steps
from megatrain_jax._src.common.errors import call_all
from megatrain_jax._src.common.object_paths import UNFINISHED as NAME
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.checkpoint import folder, manifest, orbax, save
from megatrain_jax._src.engine.checkpoint import workspace as workspaces
from megatrain_jax._src.engine.checkpoint.save import Saving
from megatrain_jax._src.engine.checkpoint.workspace import Workspace
from megatrain_jax._src.engine.state.processes import Processes
from megatrain_jax._src.engine.train.series import RunCheckpoints
from messages import refuses, tells, warns
from places import ROOT
from runs import check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")


@pytest.fixture(scope="module")
def trainer():
    return small.trainer()


def strange_folder(path: Path) -> dict[str, bytes]:
    """Somebody else's folder, and what is in it."""
    (path / "deep").mkdir(parents=True)
    (path / "mine.txt").write_text("mine")
    (path / "deep" / "er").write_text("mine, too")
    return small.tree(path)


def test_good_checkpoints_are_kept_and_broken_ones_set_aside(tmp_path):
    small.fit(tmp_path, 6, checkpoint_every=2, keep=9)
    shutil.copytree(tmp_path / "6", tmp_path / "50")  # says that it is of step 6
    shutil.rmtree(tmp_path / "2")
    (tmp_path / "6" / "megatrain.json").write_text("{}")
    (tmp_path / "6.refused-1").mkdir()
    (tmp_path / "6.refused-2").symlink_to("nowhere")
    with warns(UserWarning, "step 4") as warned:
        result = small.fit(tmp_path, 8, checkpoint_every=2, keep=1)
    assert len(warned) == 2
    aside = [f"6.refused-{n}" for n in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == ["50.refused-1", *aside, "8"]
    expected = small.state(result.trainer)
    result.trainer.restore(tmp_path / "8")
    check_same_bits(small.state(result.trainer), expected)
    assert small.losses(small.fit(tmp_path, 8)) == small.expected(8)


def test_a_new_run_is_not_begun_among_later_steps(trainer, tmp_path):
    small.fit(tmp_path, 3)
    before = small.tree(tmp_path)
    with refuses(mt.CheckpointError, "step 0", 3, "resume=True"):
        small.fit(tmp_path, 2, resume=False)
    with refuses(mt.CheckpointError, "step 0", 3):
        mt.train(small.trainer(), [small.batch(0)], checkpoint_dir=tmp_path, progress=False)
    assert small.tree(tmp_path) == before
    small.fit(tmp_path / "other", 2, resume=False)


def test_what_others_made_is_left_alone(tmp_path):
    names = ["4.saving_mine", "4.deleting.keepme", "2.saving", "notes", "007", "٣", "1"]
    strange = {name: strange_folder(tmp_path / name) for name in names}
    shutil.move(tmp_path / "1", tmp_path / "x")  # in nobody's way
    small.fit(tmp_path, 2)
    shutil.move(tmp_path / "x", tmp_path / "1")
    with warns(UserWarning, tmp_path / "1", "megatrain.json"):
        small.fit(tmp_path, 4, checkpoint_every=1, keep=1)
    for name in names:
        assert small.tree(tmp_path / name) == strange[name]
    assert sorted({*os.listdir(tmp_path)} - {*names}) == ["4"]


@pytest.mark.parametrize("kind", ["folder", "empty", "file", "link"])
def test_nothing_is_written_over_a_strangers_step(kind, tmp_path):
    path = tmp_path / "runs" / "4"
    path.parent.mkdir()
    elsewhere = strange_folder(tmp_path / "elsewhere")
    if kind == "folder":
        strange_folder(path)
    elif kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with refuses(mt.CheckpointError, path.parent, 4):
        small.fit(path.parent, 8, checkpoint_every=2)
    with pytest.raises(FileExistsError):
        small.trainer().save(path)
    assert os.listdir(path.parent) == ["4"] and path.is_symlink() == (kind == "link")
    assert small.tree(tmp_path / "elsewhere") == elsewhere
    if kind == "folder":
        assert small.tree(path) == elsewhere


def saved_at(series: RunCheckpoints, trainer: mt.Trainer, *steps: int) -> None:
    for step in steps:
        count_steps(trainer, step)
        series.save(trainer, {"batches": step})
    series.finish()


def test_a_folder_without_a_manifest_is_not_the_step_that_a_run_starts_from(trainer, tmp_path):
    count_steps(trainer, 1)
    with RunCheckpoints(tmp_path, None, 1, Processes()) as series:
        saved_at(series, trainer, 1)
        series.begin(trainer)
        assert series.saved == 1
        (tmp_path / "2").mkdir()
        count_steps(trainer, 2)
        with warns(UserWarning, tmp_path / "2"):
            series.begin(trainer)
        assert series.saved is None


def test_a_run_begins_before_all_checkpoints_of_its_folder(trainer, tmp_path):
    with RunCheckpoints(tmp_path, None, 3, Processes()) as series:
        saved_at(series, trainer, 4)
        for step in (3, 2, 4):
            count_steps(trainer, step)
            with nullcontext() if step == 4 else refuses(mt.CheckpointError, f"step {step}", "4"):
                series.begin(trainer)


def test_a_checkpoint_is_complete_and_an_older_one_removed_before_the_next_is_begun(
    trainer, tmp_path
):
    with RunCheckpoints(tmp_path, None, 1, Processes()) as series:
        for step in (1, 2, 3):
            count_steps(trainer, step)
            series.save(trainer, None)
            there = [number for number in range(1, step) if (tmp_path / str(number)).exists()]
            assert there == [step - 1] * (step > 1)
        series.finish()


@pytest.mark.parametrize("free", [None, 0, 2**20, 2**30])
def test_a_full_disk_is_told_with_what_it_lacks(free, tmp_path, monkeypatch):
    entries = [SimpleNamespace(shape=(256, 1024), dtype=dtype) for dtype in ("float32", "int8")]
    saving: Any = SimpleNamespace(_entries=entries, path=tmp_path / "4")
    monkeypatch.setattr(save.places, "num_free_bytes", lambda folder: free)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = Saving._lack(saving, full)
    assert not Saving._lack(saving, OSError(errno.EIO, "broken"))
    if free is None:
        assert said == ""
        return
    assert tells(said, tmp_path, "1.25 MiB", sized(free))
    assert free > 2**20 or tells(said, sized(1.25 * 2**20 - free))


def test_what_cannot_be_removed_is_warned_of_once(trainer, tmp_path, monkeypatch):
    with RunCheckpoints(tmp_path, None, 1, Processes()) as series:
        saved_at(series, trainer, 1)
    shutil.move(tmp_path / "1", tmp_path / "elsewhere")
    (tmp_path / "1").symlink_to(tmp_path / "elsewhere")
    kept = small.tree(tmp_path / "elsewhere")
    count_steps(trainer, 1)
    remove = shutil.rmtree

    def immutable(path, *args, **options):
        if "3.deleting" in str(path):
            raise PermissionError(1, "Operation not permitted")
        remove(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", immutable)
    with RunCheckpoints(tmp_path, None, 1, Processes()) as series:
        series.begin(trainer)
        with warns(UserWarning, tmp_path / "1"):
            saved_at(series, trainer, 2)
        (tmp_path / "2" / "notes.txt").write_text("mine")
        with warns(UserWarning, tmp_path / "2", "notes.txt"):
            saved_at(series, trainer, 3)
        with warns(UserWarning, tmp_path / "3", "permitted"):
            saved_at(series, trainer, 4)
        saved_at(series, trainer, 5, 6)  # says nothing any more
    assert small.tree(tmp_path / "elsewhere") == kept
    assert {"1", "2", "6"} <= {*os.listdir(tmp_path)}
    with warns(UserWarning, "3.deleting-0", "deleted"):
        RunCheckpoints(tmp_path, None, 1, Processes()).__exit__(None, None, None)
    monkeypatch.undo()
    RunCheckpoints(tmp_path, None, 1, Processes()).__exit__(None, None, None)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "6", "elsewhere"]


def never():
    raise AssertionError("a batch was drawn")
    yield


def test_a_folder_that_cannot_be_written_is_noticed_first(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with refuses(mt.CheckpointError, tmp_path / "file" / "run", "NotADirectoryError"):
        small.fit(tmp_path / "file" / "run", 1, data=never())

    def read_only(*args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with refuses(mt.CheckpointError, tmp_path / "run", "OSError", "Read-only"):
        small.fit(tmp_path / "run", 1, data=never())


def test_a_folder_is_the_same_by_another_path(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    held = workspaces.FolderWorkspace(tmp_path / "real" / NAME, "it")
    with refuses(mt.CheckpointError, "it", "this process"):
        workspaces.FolderWorkspace(tmp_path / "link" / NAME, "it")
    held.release(run=True)


HOLDER = """
import os, sys, time
from pathlib import Path
from megatrain_jax._src.common.object_paths import UNFINISHED
from megatrain_jax._src.engine.checkpoint.workspace import FolderWorkspace

path = Path(sys.argv[1])
workspace = FolderWorkspace(path / UNFINISHED, "it")
(workspace.path / "checkpoint").mkdir()
if os.fork() == 0:  # as a worker that reads data, which outlives its parent
    os.close(1)
    time.sleep(600)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.exhaustive
def test_a_folder_is_one_process_s_until_it_dies(trainer, tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        pid = int(holder.stdout.readline())
        with pytest.raises(mt.CheckpointError, match=rf"process {pid} on .*\b2\d\d\d-"):
            small.fit(tmp_path, 1, data=never())
        with refuses(mt.CheckpointError, pid):
            mt.train(trainer, [small.batch(0)], checkpoint_dir=tmp_path, progress=False)
        trainer.save(tmp_path / "by hand")
        assert (tmp_path / NAME / "checkpoint").exists()
        holder.kill()
        holder.wait()
        small.fit(tmp_path, 1)
        assert sorted(os.listdir(tmp_path)) == ["1", "by hand"]
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.stdin.close()
        holder.stdout.close()


def test_a_second_run_of_one_process_is_refused(trainer, tmp_path):
    def fit_again(trainer, record):
        with refuses(mt.CheckpointError, tmp_path, "this process"):
            small.fit(tmp_path, 1, data=never())

    small.fit(tmp_path, 1, callbacks=[fit_again])
    small.fit(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_the_next_run_waits_for_what_the_last_one_still_writes(tmp_path, monkeypatch):
    join, begun, gate = orbax.join, threading.Event(), threading.Event()

    def held_up(path, arrays):
        begun.set()
        assert gate.wait(60)
        join(path, arrays)

    def cut_off(saving):
        begun.wait(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(orbax, "join", held_up)
        patch.setattr(Saving, "wait", cut_off)
        with pytest.raises(KeyboardInterrupt):
            small.fit(tmp_path, 2)
    names, take = [], Workspace.__init__

    def watched(workspace, *args):
        names.extend(os.listdir(tmp_path / NAME))
        threading.Timer(0.2, gate.set).start()
        take(workspace, *args)

    monkeypatch.setattr(Workspace, "__init__", watched)
    with warns(UserWarning, "Waiting"):
        result = small.fit(tmp_path, 3)
    assert "checkpoint" in names
    assert [record["step"] for record in result.history] == [1, 2, 3]
    assert small.losses(result) == small.expected(3)
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]


def test_a_folder_of_the_same_name_that_others_made_is_not_emptied(trainer, tmp_path):
    mine = strange_folder(tmp_path / NAME)
    shutil.copytree(tmp_path / NAME / "deep", tmp_path / "run" / NAME)  # with a single file
    for place in (tmp_path, tmp_path / "run"):
        with refuses(mt.CheckpointError, place / NAME, "megatrain_jax"):
            small.fit(place, 1, data=never())
    assert os.listdir(tmp_path / "run" / NAME) == ["er"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"1.{NAME}").symlink_to(tmp_path / "elsewhere")
    with refuses(mt.CheckpointError, tmp_path / "1", "written"):
        trainer.save(tmp_path / "1")
    assert small.tree(tmp_path / NAME) == mine


def test_a_checkpoint_saved_by_hand_is_gone_on_from(tmp_path):
    first = small.fit(None, 2)
    first.trainer.save(tmp_path / "2")
    with warns(UserWarning, tmp_path / "2", "position", "`data`"):
        result = small.fit(tmp_path, 4)
    assert small.losses(result) == small.expected(4)


def test_a_folder_of_checkpoints_is_no_checkpoint_and_names_one(tmp_path):
    result = small.fit(tmp_path, 2)
    with refuses(mt.CheckpointError, tmp_path, tmp_path / "2"):
        result.trainer.restore(tmp_path)
    result.trainer.restore(tmp_path / "2")


def test_a_finished_run_in_a_folder_that_cannot_be_written_returns(tmp_path, monkeypatch):
    result = small.fit(tmp_path, 2)

    def read_only(path, what):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(workspaces, "_take", read_only)
    again = small.fit(tmp_path, 2)
    assert small.losses(again) == small.losses(result) and again.trainer.num_steps == 2
    for steps in (3, None):
        with refuses(mt.CheckpointError, tmp_path, "Read-only file system"):
            small.fit(tmp_path, steps)


def test_a_step_that_a_callback_saved_is_saved_again(tmp_path):
    def by_hand(trainer, record):
        trainer.save(tmp_path / str(record["step"]))

    result = small.fit(tmp_path, 2, checkpoint_every=1, keep=5, callbacks=[by_hand])
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
    assert small.losses(small.fit(tmp_path, 3))[:2] == small.losses(result)


def test_the_error_of_a_save_is_raised_once(trainer, tmp_path, monkeypatch):
    def full(path, arrays):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(orbax, "join", full)
        with pytest.raises(mt.CheckpointError, match="No space left") as caught:
            trainer.save(tmp_path / "1")
        # First where, and how much; the system's own words are behind that, and chained.
        assert re.match(rf"{tmp_path} .*room .*[\d.]+ .* free", str(caught.value))
        assert isinstance(caught.value.__cause__, OSError)
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
        with pytest.raises(mt.CheckpointError, match=rf"^{tmp_path} .*[\d.]+ .* of the [\d.]+"):
            trainer.save(tmp_path / "1")
        saving = trainer.start_saving(tmp_path / "2")
        saving.join()
    trainer.save(tmp_path / "3")  # has nothing to do with the other two
    trainer.restore(tmp_path / "3")
    with refuses(mt.CheckpointError, tmp_path / "2", "written"):
        saving.wait()
    saving.wait()
    assert os.listdir(tmp_path) == ["3"]


def test_an_error_of_any_thread_that_writes_is_that_of_the_save(trainer, tmp_path, monkeypatch):
    checksum, calls, failing_calls = save.checksum, [], []

    def failing(array):
        calls.append(array)
        if len(calls) in failing_calls:
            raise OSError(5, "Input/output error")
        return checksum(array)

    monkeypatch.setattr(save, "checksum", failing)
    trainer.save(tmp_path / "0")
    for number in (1, len(calls)):
        calls.clear()
        failing_calls[:] = [number]
        with refuses(mt.CheckpointError, tmp_path / "1", "Input/output"):
            trainer.save(tmp_path / "1")
    assert os.listdir(tmp_path) == ["0"]


@pytest.mark.parametrize("second", [None, OSError("second")])
def test_all_writes_are_over_when_the_first_error_is_raised(second):
    futures: list[Future] = [Future() for _ in range(4)]
    for future, error in zip(futures[:3], (None, OSError("first"), second), strict=True):
        future.set_exception(error) if error else future.set_result(None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call_all, [future.result for future in futures])
        futures[3].set_result(None)
        with pytest.raises(OSError, match="first"):
            waiting.result()
    call_all([futures[0].result])


def test_a_checkpoint_is_on_the_disk_when_it_gets_its_name(trainer, tmp_path, monkeypatch):
    synced, rename = [], Path.rename

    def watched_sync(opened):
        synced.append(os.fstat(opened).st_ino)

    def watched_rename(path, target):
        if target == tmp_path / "1":
            missing = [p for p in (path, *path.rglob("*")) if p.stat().st_ino not in synced]
            assert len(small.files(path)) > 5 and not missing
            synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    trainer.save(tmp_path / "1")
    assert synced == [tmp_path.stat().st_ino]


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ENOTSUP])
def test_what_could_not_be_synced_is_no_checkpoint(number, tmp_path, monkeypatch):
    def fails(opened):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    trainer = small.trainer()
    if number == errno.EIO:
        with pytest.raises(mt.CheckpointError, match=os.strerror(number)):
            trainer.save(tmp_path / "1")
        assert not os.listdir(tmp_path)
    else:  # a file system that can't sync folders
        trainer.save(tmp_path / "1")
        small.trainer().restore(tmp_path / "1")


def test_no_step_waits_for_groups_of_a_save_that_failed(tmp_path, monkeypatch):
    def full(writer, rows):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(save.Writer, "write", full)
    saving = small.trainer().start_saving(tmp_path / "1")
    assert saving._is_written.wait(60) and saving._left and not any(saving._left.values())
    with pytest.raises(mt.CheckpointError, match="No space left"):
        saving.wait()


def test_links_in_a_checkpoint_are_not_its_own(tmp_path):
    small.trainer().save(tmp_path / "1")
    assert manifest.unknown_names(tmp_path / "1") == []
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes").touch()
    (tmp_path / "1" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "1" / "mine").symlink_to(tmp_path / "elsewhere" / "notes")
    assert sorted(manifest.unknown_names(tmp_path / "1")) == ["folder", "mine"]


def test_a_save_that_failed_is_tried_again_at_the_end(tmp_path, monkeypatch):
    join, calls = orbax.join, []

    def full_once(path, arrays):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        join(path, arrays)

    monkeypatch.setattr(orbax, "join", full_once)
    with RunCheckpoints(tmp_path, None, 1, Processes()) as series:
        trainer = small.trainer()
        series.save(trainer, {"batches": 0})
        with pytest.raises(mt.CheckpointError, match="No space left"):
            series.finish()
        assert series.saved is None
        saved_at(series, trainer, 0)
        assert series.saved == 0
    assert os.listdir(tmp_path) == ["0"]


def test_paths_that_are_one_on_the_disk_are_refused_before_a_step(tmp_path):
    model = {"a": {"b": np.eye(4, dtype=np.float32)}, "a.b": np.ones((4, 4), np.float32)}
    batches = [{"x": np.ones((2, 4), np.float32)}] * 2

    def loss_fn(model, batch):
        return ((batch["x"] @ model["a"]["b"] @ model["a.b"]) ** 2).mean()

    started = []
    options = {"progress": False, "callbacks": [lambda *_: started.append(1)]}
    with refuses(mt.CheckpointError, "params/a/b", "params/a.b"):
        mt.fit(model, loss_fn, batches, optax.sgd(0.1), checkpoint_dir=tmp_path, **options)
    assert not started
    result = mt.fit(model, loss_fn, batches, optax.sgd(0.1), **options)
    with refuses(mt.CheckpointError, "params/a/b", "params/a.b"):
        result.trainer.save(tmp_path / "alone")
    assert len(started) == 2 and not (tmp_path / "alone").exists()


def test_steps_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("10", "9", "100", "007", "x"):
        (tmp_path / name).mkdir()
    assert folder.numbered(tmp_path) == [9, 10, 100]


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("kind", ["parameters", "step", "another program's"])
def test_a_checkpoint_is_no_folder_of_checkpoints(kind: str, resume: bool, trainer, tmp_path):
    path = tmp_path / "3"
    trainer.save(path, params_only=kind == "parameters")
    if kind == "another program's":
        (path / folder.MANIFEST).unlink()
    before = small.tree(tmp_path)
    named = ["`checkpoint_dir`", path, "`params=`"]
    with refuses(mt.CheckpointError, *named) as caught:
        small.fit(path, 4, resume=resume)
    assert (f"pass {tmp_path}." in str(caught.value)) == (kind != "another program's")
    assert small.tree(tmp_path) == before
