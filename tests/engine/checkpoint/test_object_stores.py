"""Checkpoints in object stores keep the promises of those on disks; here the store is in memory."""

import contextlib
import errno
import itertools
import json
import re
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import megatrain_jax as mt
import small
from megatrain_jax import callbacks
from megatrain_jax._src.common.object_paths import ObjectPath, path_of
from megatrain_jax._src.engine.checkpoint import folder, manifest, object_workspace, orbax
from megatrain_jax._src.engine.checkpoint import workspace as workspaces
from megatrain_jax._src.engine.checkpoint.object_workspace import ObjectWorkspace
from megatrain_jax._src.engine.checkpoint.save import Writer
from messages import refuses, warns
from runs import check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")

_numbers = itertools.count()


@pytest.fixture
def place() -> Any:
    """A folder in a new bucket."""
    return path_of(f"memory://bucket-{next(_numbers)}/my/run")


@pytest.fixture(scope="module")
def trainer():
    return small.trained()


def names(place: ObjectPath) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_a_run_keeps_its_newest_checkpoints_and_goes_on_from_them(place):
    small.fit(str(place), 6, checkpoint_every=2, keep=2)
    assert names(place) == ["4", "6"]
    resumed = small.fit(str(place), 8, keep=1)
    assert small.losses(resumed) == small.expected(8)
    assert names(place) == ["8"], "no lock, mark or unfinished file is left, either"
    assert names(place.parent) == ["run"]
    again = small.fit(str(place), 8)
    check_same_bits(again.trainer.params, resumed.trainer.params)


def test_a_checkpoint_saved_by_hand_is_restored_read_and_started_from(trainer, place):
    url = str(place / "by hand")
    trainer.save(url)
    assert names(place) == ["by hand"]
    expected = small.state(trainer)
    with pytest.raises(FileExistsError):
        trainer.save(url)
    other = small.trainer()
    other.restore(url)
    check_same_bits(small.state(other), expected)
    check_same_bits(small.trainer(params=url).params, trainer.params)
    loaded = mt.load(url)
    check_same_bits([loaded["0"], loaded["1"]], trainer.params)
    with refuses(mt.CheckpointError, f"`params`={place}", "disks"):
        (place / "theirs").touch()
        small.trainer(params=str(place))
    with refuses(mt.CheckpointError, place / "none"):
        other.restore(str(place / "none"))


def test_copies_between_a_store_and_a_disk_are_whole_checkpoints(trainer, place, tmp_path):
    trainer.save(str(place / "1"))
    for name, content in tree_of(place / "1").items():
        (tmp_path / "1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "1" / name).write_bytes(content)
    other = small.trainer()
    other.restore(tmp_path / "1")
    check_same_bits(small.state(other), small.state(trainer))
    check_same_bits(small.plain(tmp_path / "1")["params"]["1"], trainer.params[1])
    trainer.save(tmp_path / "2")
    for name, content in small.tree(tmp_path / "2").items():
        (place / "2" / name).write_bytes(content)
    other = small.trainer()
    other.restore(str(place / "2"))
    check_same_bits(small.state(other), small.state(trainer))


def test_the_best_checkpoint_is_kept(place):
    keep = callbacks.KeepBest(str(place / "best"), mode="max")
    evaluated: Any = {"eval_data": [small.batch(9)], "eval_every": 1, "callbacks": [keep]}
    result = small.fit(str(place), 3, **evaluated)
    losses = [record["eval_loss"] for record in result.history]
    best = int(np.argmax(losses)) + 1
    assert keep.path is not None and keep.path == place / "best" / str(best)
    assert names(place / "best") == [str(best)]
    small.trainer().restore(keep.path)
    mt.load(keep.path)
    small.trainer(params=keep.path)
    named = "callbacks[0]", "`folder`", "`checkpoint_dir`", place / "best" / "best"
    with refuses(ValueError, *named):
        small.fit(str(place / "best"), 4, **evaluated)


def spoil(file: ObjectPath, array: np.ndarray) -> None:
    content = bytearray(file.read_bytes())
    content[content.index(array.tobytes()) + 5] ^= 1
    file.write_bytes(bytes(content))


def data_of(place: ObjectPath, array: np.ndarray) -> ObjectPath:
    """The object that has an array."""
    return next(path for path in below(place) if array.tobytes() in path.read_bytes())


def test_damage_is_noticed_and_set_aside(place):
    result = small.fit(str(place), 6, checkpoint_every=2, keep=9)
    array = np.asarray(result.trainer.params[1]["w"])
    file = data_of(place / "6", array)
    spoil(file, array)
    with refuses(mt.CheckpointError, "params/1/w", "differs"):
        small.trainer().restore(str(place / "6"))
    spoiled = tree_of(place / "6")
    with warns(UserWarning, "step 4", "6.refused-1"):
        result = small.fit(str(place), 8)
    assert small.losses(result) == small.expected(8)
    assert tree_of(place / "6.refused-1") == spoiled
    assert names(place) == ["2", "4", "6.refused-1", "8"]


def test_a_missing_object_is_noticed_before_the_state_changes(trainer, place):
    url = str(place)
    trainer.save(url)
    expected = small.state(trainer)
    data_of(place, np.asarray(trainer.params[0]["w"])).unlink()
    with refuses(mt.CheckpointError, place, "damaged"):
        trainer.restore(url)
    check_same_bits(small.state(trainer), expected)


def test_what_others_made_is_left_alone(place):
    small.fit(str(place), 2)
    (place / "4" / "mine").write_bytes(b"mine")
    with refuses(mt.CheckpointError, place, "4"):
        small.fit(str(place), 6, checkpoint_every=2)
    (place / "4" / "mine").unlink()
    (place / "2" / "mine").write_bytes(b"mine")
    with warns(UserWarning, place / "2", "mine"):
        small.fit(str(place), 4, keep=1)
    assert names(place) == ["2", "4"] and (place / "2" / "mine").read_bytes() == b"mine"


def test_the_objects_below_a_path_are_nobody_else_s(place):
    for name in ("1/a", "1/b/c", "10/a", "1-/a", "1.refused-1/a"):
        (place / name).touch()
    assert (place / "1").files() == ["a", "b/c"] and folder.numbered(place) == [1, 10]
    assert [path.name for path in (place / "1").iterdir()] == ["a", "b"]
    assert not (place / "1").is_file() and (place / "1" / "a").is_file()
    assert not (place / "1" / "a").is_dir() and not (place / "2").exists()
    root = place.parent.parent
    assert root == path_of(str(place)[: -len("/my/run")])
    assert {"my/run/1/a", "my/run/10/a"} <= set(root.files())


def test_a_step_that_a_callback_saved_is_saved_again(place):
    def by_hand(trainer, record):
        trainer.save(str(place / str(record["step"])))

    result = small.fit(str(place), 2, checkpoint_every=1, keep=5, callbacks=[by_hand])
    assert names(place) == ["1", "2"]
    assert small.losses(small.fit(str(place), 3))[:2] == small.losses(result)


# ---- interrupts


class Killed(BaseException):
    """What happens to a process, and to all that it would have done after that."""


class Process:
    """A process that is killed before one of its writes: of an object, or of a database."""

    def __init__(self, patch: pytest.MonkeyPatch, place: ObjectPath, life: int | None):
        """Counts writes; life is their number before the end, None for no end."""
        self.num_writes, self._life = 0, life
        self._place, self._newest = place, newest(place)
        patch.setattr(ObjectWorkspace, "_keep", lambda workspace: None)
        patch.setattr(threading, "excepthook", lambda arguments: None)
        # A store deletes several objects in any order.
        delete = lambda path: [p.unlink() for p in reversed(below(path))]  # noqa: E731
        patch.setattr(ObjectPath, "delete_below", delete)
        for owner, name in ((ObjectPath, "_write"), (Writer, "_write"), (orbax, "join")):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, write: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            if self.num_writes == self._life:
                raise Killed
            self.num_writes += 1
            assert newest(self._place) >= self._newest, "a step that was saved is lost"
            self._newest = newest(self._place)
            return write(*args, **options)

        return counted


def below(place: ObjectPath) -> list[ObjectPath]:
    return [place / name for name in place.files()]


def newest(place: ObjectPath) -> int:
    return max(folder.steps(place), default=0)


def run_of(place: ObjectPath, life: int | None) -> int:
    """Runs in a process that may be killed, and returns the number of its writes."""
    first, seen = newest(place) + 1, []
    given: Any = {"checkpoint_every": 2, "keep": 1}
    given["callbacks"] = [lambda trainer, record: seen.append(record["step"])]
    with pytest.MonkeyPatch.context() as patch:
        process = Process(patch, place, life)
        try:
            small.fit(str(place), 4, **given)
            assert seen == [*range(first, 5)]
        except (Killed, mt.CheckpointError):
            assert life is not None
        workspaces._held.clear()  # a dead process holds nothing
    return process.num_writes


# The first checkpoint is written, complete and about to lose its mark, and half deleted.
@pytest.mark.by_default("5", "16", "45")
@pytest.mark.parametrize("life", range(58))
@pytest.mark.filterwarnings("ignore:.*is locked, and its holder may have died:UserWarning")
def test_a_process_that_is_killed_between_any_two_writes_loses_nothing(life, place, monkeypatch):
    monkeypatch.setattr(object_workspace, "_DEAD_SECONDS", 0)
    run_of(place, life)
    for step in folder.steps(place):
        manifest.facts_of(place / str(step))
        small.trainer().restore(str(place / str(step)))
    run_of(place, None)
    assert small.losses(small.fit(str(place), 5, keep=1)) == small.expected(5)
    assert names(place) == ["5"]


@pytest.mark.by_default("4", "9", "16")
@pytest.mark.parametrize("life", range(26))
@pytest.mark.filterwarnings("ignore:.*(may have died|differs from).*:UserWarning")
def test_a_process_that_is_killed_while_it_sets_damage_aside_loses_nothing(
    life, place, monkeypatch
):
    monkeypatch.setattr(object_workspace, "_DEAD_SECONDS", 0)
    result = small.fit(str(place), 4, checkpoint_every=2, keep=2)
    array = np.asarray(result.trainer.params[1]["w"])
    spoil(data_of(place / "4", array), array)
    damaged = tree_of(place / "4")
    with pytest.MonkeyPatch.context() as patch:
        Process(patch, place / "no run's", life)
        with contextlib.suppress(Killed, mt.CheckpointError):
            small.fit(str(place), 6, keep=1)
        workspaces._held.clear()
    assert 2 in folder.steps(place) or 6 in folder.steps(place)
    assert small.losses(small.fit(str(place), 6, keep=1)) == small.expected(6)
    # There may be a second copy.
    asides = {*names(place)} - {"2", "6"}
    assert asides and all(tree_of(place / aside) == damaged for aside in asides)


def tree_of(place: ObjectPath) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in place.files()}


def test_a_checkpoint_that_could_not_be_written_leaves_nothing(trainer, place, monkeypatch):
    def full(*args):
        raise OSError(5, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(orbax, "join", full)
        with refuses(mt.CheckpointError, place / "1", "no answer"):
            trainer.save(str(place / "1"))
    assert not place.files()
    trainer.save(str(place / "1"))


# ---- one run at a time


def test_a_second_run_is_refused_while_the_first_one_lives(place, monkeypatch):
    monkeypatch.setattr(object_workspace, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(object_workspace, "_DEAD_SECONDS", 0.6)
    lock = place / "megatrain-unfinished" / "lock"
    lock.write_text(json.dumps({"pid": 17, "host": "elsewhere", "since": "2026"}))
    read, times = ObjectPath.read_version, itertools.count()

    def renewed(path):
        found = read(path)
        lock.write_text(json.dumps({"pid": 17, "host": "elsewhere", "since": str(next(times))}))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPath, "read_version", renewed)
        with (
            warns(UserWarning, place, "1 s"),
            refuses(mt.CheckpointError, place, "process 17 on elsewhere"),
        ):
            small.fit(str(place), 1)
    assert next(times) < 5, "it is not waited for longer than that takes to see"
    assert names(place) == ["megatrain-unfinished"]

    def again(trainer, record):
        with refuses(mt.CheckpointError, place, "this process"):
            small.fit(str(place), 1)

    monkeypatch.setattr(object_workspace, "_DEAD_SECONDS", 0)
    with warns(UserWarning, place, "died"):
        small.fit(str(place), 1, callbacks=[again])
    assert names(place) == ["1"]


def test_the_lock_of_a_process_of_this_machine_that_has_ended_is_taken_at_once(place):
    machine = object_workspace._machine()
    lock = place / "megatrain-unfinished" / "lock"
    lock.write_text(json.dumps({"pid": 2**22 + 1, "machine": machine}))
    for name in ("pieces-1.npz", "checksums-1.json"):
        (lock.parent / name).touch()
    small.fit(str(place), 1)
    assert names(place) == ["1"]


def test_the_lock_of_a_machine_that_is_not_known_is_waited_for(place, monkeypatch):
    monkeypatch.setattr(object_workspace, "_machine", lambda: "")
    monkeypatch.setattr(object_workspace, "_DEAD_SECONDS", 0)
    lock = place / "megatrain-unfinished" / "lock"
    lock.write_text(json.dumps({"pid": 2**22 + 1, "machine": ""}))
    with warns(UserWarning, place, "died"):
        small.fit(str(place), 1)


def test_a_lock_that_is_given_back_meanwhile_is_taken(place, monkeypatch):
    monkeypatch.setattr(object_workspace, "_LOOK_SECONDS", 0.0)
    lock = place / "megatrain-unfinished" / "lock"
    lock.write_text(json.dumps({"pid": 17, "host": "elsewhere", "since": "2026"}))
    read = ObjectPath.read_version

    def read_once(path):
        found = read(path)
        monkeypatch.setattr(ObjectPath, "read_version", read)
        lock.unlink()
        return found

    monkeypatch.setattr(ObjectPath, "read_version", read_once)
    with warns(UserWarning, place, "died"):
        small.fit(str(place), 1)
    assert names(place) == ["1"]


def test_a_run_whose_lock_was_taken_over_publishes_nothing_more(place):
    lock = place / "megatrain-unfinished" / "lock"

    def take(trainer, record):
        if record["step"] == 3:
            while folder.steps(place) != [2]:
                pass
            lock.write_text(json.dumps({"pid": 17, "host": "elsewhere", "since": "2026"}))

    with refuses(mt.CheckpointError, place, "process 17 on elsewhere"):
        small.fit(str(place), 5, checkpoint_every=2, callbacks=[take])
    assert folder.steps(place) == [2] and lock.is_file()


def test_a_lock_is_renewed_and_survives_errors_and_a_repeated_write(place, monkeypatch):
    monkeypatch.setattr(object_workspace, "_RENEWED_SECONDS", 0.001)
    workspace = ObjectWorkspace(place / "w", str(place))
    first, renewed = workspace._version, threading.Event()
    write, errors = ObjectPath.write_if, iter([OSError("no network")] * 2)

    def without_answer(path, value, version):
        if error := next(errors, None):
            raise error
        write(path, value, version)
        renewed.set()

    monkeypatch.setattr(ObjectPath, "write_if", without_answer)
    while not renewed.wait(0.01):
        assert workspace._thread.is_alive()
    monkeypatch.undo()
    workspace.check()
    assert workspace._version != first
    workspace.release(run=True)
    assert not place.files()


def test_a_store_without_conditions_is_told(place, monkeypatch):
    write = ObjectPath._write
    monkeypatch.setattr(ObjectPath, "_write", lambda path, value, **_: write(path, value))
    with warns(UserWarning, place, "locked"):
        small.fit(str(place), 2)
    assert names(place) == ["2"]


def test_a_finished_run_in_a_store_that_cannot_be_written_returns(place, monkeypatch):
    result = small.fit(str(place), 2)

    def read_only(*args, **options):
        raise PermissionError(errno.EACCES, "not yours", str(place))

    monkeypatch.setattr(ObjectPath, "_write", read_only)
    again = small.fit(str(place), 2)
    check_same_bits(again.trainer.params, result.trainer.params)
    with refuses(mt.CheckpointError, f"`checkpoint_dir`={place}", "not yours"):
        small.fit(str(place), 3)


# ---- errors


class Answers:
    """A store that answers each request with an error, as TensorStore tells it."""

    def __init__(self, error: str):
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any, **options: Any) -> Any:
            promise, future = ts.Promise.new()
            promise.set_exception(ValueError(self._error))
            return future

        return request


ERRORS = {
    "PERMISSION_DENIED: Unknown [http_response_code='403']": ("AWS_ACCESS_KEY_ID",),
    "NOT_FOUND: NoSuchBucket: [http_response_code='404']": ("bucket called 'mine'",),
    "ABORTED: All 6 retry attempts failed: Could not resolve host": ("resolve", "AWS_ENDPOINT_URL"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_names_the_argument_and_what_to_do(error, trainer, monkeypatch):
    monkeypatch.setattr(ObjectPath, "_store", Answers(error))
    named = ERRORS[error]
    for call in (
        lambda: small.fit("s3://mine/run", 1),
        lambda: small.fit("s3://mine/run", 1, microbatches="auto"),
    ):
        with refuses(mt.CheckpointError, "`checkpoint_dir`=s3://mine/run", *named):
            call()
    with pytest.raises((mt.CheckpointError, OSError), match=re.escape(named[0])):
        trainer.save("s3://mine/run")


@pytest.mark.parametrize("error", ["PERMISSION_DENIED: expired", "ABORTED: All 6 retry attempts"])
def test_a_checkpoint_that_no_answer_came_for_keeps_its_name(error, place, monkeypatch):
    small.fit(str(place), 4, checkpoint_every=2, keep=2)

    read = orbax.ChunkReader.read

    def fails(reader, wanted):
        if reader._folder == place / "4":
            raise ValueError(error)
        return read(reader, wanted)

    monkeypatch.setattr(orbax.ChunkReader, "read", fails)
    monkeypatch.setattr("megatrain_jax._src.engine.train.series._PAUSES", (0.0, 0.0))
    with refuses(mt.CheckpointError, place / "4", error):
        small.fit(str(place), 6)
    assert names(place) == ["2", "4"]


def test_the_address_of_a_store_comes_from_the_environment(monkeypatch):
    path: Any = path_of("s3://mine/a//b/")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert path.kvstore() == {"driver": "s3", "bucket": "mine", "path": "a/b/"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "auto")
    assert path.kvstore() == {
        "driver": "s3",
        "bucket": "mine",
        "path": "a/b/",
        "endpoint": "http://localhost:9",
        "aws_region": "auto",
    }
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://localhost:10")  # as of this service alone
    assert path.kvstore()["endpoint"] == "http://localhost:10"
    path = path_of("gs://mine")
    assert path.kvstore() == {"driver": "gcs", "bucket": "mine", "path": ""}


@pytest.mark.parametrize(
    ("said", "kind", "named"),
    [
        ("PERMISSION_DENIED: no", PermissionError, "gcloud"),
        ("UNAUTHENTICATED: who?", PermissionError, "gcloud"),
        ("NOT_FOUND: nothing", FileNotFoundError, "mine"),
        ("UNAVAILABLE: gone", OSError, "gone"),
    ],
)
def test_what_a_store_refuses_is_an_error_of_the_system(said, kind, named):
    future: Future[None] = Future()
    future.set_exception(ValueError(f"{said} [source_location='a.cc:1']"))
    path: Any = path_of("gs://mine/run")
    with pytest.raises(OSError, match=named) as raised:
        path._result(future)
    assert type(raised.value) is kind and "a.cc" not in str(raised.value)
