"""A run's start: host memory is pinned in threads while functions are compiled, never afterwards.

The system is made up: it takes memory when a test lets it, as a GPU's driver does in its own time.
"""

import dataclasses
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

from inside import on_one_device
from megatrain_jax._src import start as starts
from megatrain_jax._src.adapt.adapters import adapt
from megatrain_jax._src.build.host import peak_bytes
from megatrain_jax._src.checkpoint.given_parameters import starting_from
from megatrain_jax._src.kernels.cache import KernelCache
from megatrain_jax._src.models.tensors import LazyArray, open_folder
from megatrain_jax._src.runtime.read_ahead import ReadAhead
from megatrain_jax._src.state import pool, taking
from megatrain_jax._src.state.cards import H200
from megatrain_jax._src.state.placement import placed_on
from optimizers import OPTIMIZERS
from runs import check_same_bits, make_spec, make_trainer
from zoo import CASES

GIB = 2**30
SPARE = pool._SPARE_BYTES


class System:
    """The memory that a driver pins: pieces that are held, by device, and those that came to be."""

    def __init__(self):
        self.asked, self.held, self.dropped = [], [], []
        self.go, self.limit = threading.Event(), 1 << 62
        self.go.set()
        self.reached = threading.Event()

    def device_put(self, zeros, sharding):
        (device,) = sharding.device_set
        piece = (device.id, zeros.nbytes)
        self.asked.append(piece)
        self.reached.set()
        assert self.go.wait(60)
        if sum(size for _, size in self.held) + zeros.nbytes > self.limit:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")
        self.held.append(piece)

        def delete():
            self.held.remove(piece)
            self.dropped.append(piece)

        return SimpleNamespace(block_until_ready=lambda: None, delete=delete)


@pytest.fixture
def system(monkeypatch):
    made = System()
    zeros = SimpleNamespace(uint8=np.uint8, zeros=lambda n, dtype: SimpleNamespace(nbytes=n))
    monkeypatch.setattr(taking, "np", zeros)
    monkeypatch.setattr(taking, "jax", SimpleNamespace(device_put=made.device_put))
    monkeypatch.setattr(pool, "total_bytes", lambda: 500 * GIB)
    monkeypatch.setattr(pool, "available_bytes", lambda: 400 * GIB)
    monkeypatch.setattr(pool, "_pools", {})
    monkeypatch.setattr(pool, "_left", [])
    monkeypatch.setattr(pool, "_pinned_bytes_in_use", lambda devices: dict.fromkeys(devices, 0))
    yield made
    made.go.set()


def on_gpus(num_devices=1):
    if num_devices == 1:
        return dataclasses.replace(on_one_device(), platform="gpu")
    mesh = Mesh(jax.devices()[:num_devices], "data")
    return dataclasses.replace(placed_on(mesh), platform="gpu")


@pytest.mark.parametrize("num_devices", [1, 2])
def test_memory_is_taken_meanwhile_and_held_until_it_is_reserved(system, num_devices):
    placement = on_gpus(num_devices)
    ids = [d.id for d in placement.local_devices]
    system.go.clear()
    begun = pool.begin(placement, num_devices * 80 * GIB, GIB)
    assert begun is not None, "the system is still busy, and this goes on"
    system.go.set()
    pieces = [8 * GIB, 16 * GIB, 64 * GIB]
    taking.wait_for(begun._takings)
    assert sorted(system.held) == sorted((d, size) for d in ids for size in pieces)
    assert sorted(system.dropped) == [(d, SPARE) for d in ids], "room for copies is free at once"
    assert all(size > SPARE for size in pieces), "and no piece fits into it"
    pool.reserve(placement, num_devices * 80 * GIB, GIB, lambda *_: None, begun)
    assert not system.held
    asked = len(system.asked)
    pool.reserve(placement, num_devices * 80 * GIB, GIB)
    assert len(system.asked) == asked, "the pools have it"


def test_more_than_was_foreseen_is_taken_while_that_is_held(system):
    placement = on_gpus()
    begun, held = pool.begin(placement, 60 * GIB), []
    assert begun is not None
    put = system.device_put

    def watched(zeros, sharding):
        held.append([size for _, size in system.held])
        return put(zeros, sharding)

    taking.wait_for(begun._takings)
    taking.jax.device_put = watched
    pool.reserve(placement, 70 * GIB, 0, lambda *_: None, begun)
    assert held == [[4 * GIB, 8 * GIB, 16 * GIB, 32 * GIB]]
    assert system.asked[-1][1] == 10 * GIB and not system.held
    pool.reserve(placement, 70 * GIB)
    assert len(system.asked) == 6
    assert pool._pools[placement.local_devices[0]].likely_bytes == 2 * (60 * GIB + SPARE)


def test_more_than_there_is_is_refused(system, monkeypatch):
    placement = on_gpus()
    begun = pool.begin(placement, 60 * GIB)
    monkeypatch.setattr(pool, "available_bytes", lambda: 5 * GIB)
    with pytest.raises(MemoryError, match=r"needs 70\.00 GiB in host memory, 5\.00 GiB avail"):
        pool.reserve(placement, 70 * GIB, 0, lambda *_: None, begun)
    assert not system.held


@pytest.mark.parametrize(
    ("change", "num_gib"),
    [("none", 500), ("none", 0.2), ("used", 60), ("arrays", 60), ("cpu", 60)],
)
def test_nothing_is_begun_where_it_is_better_to_wait(system, monkeypatch, change, num_gib):
    """More than there is, soon over, a pool that has grown, arrays in it, and no GPU."""
    placement = on_one_device() if change == "cpu" else on_gpus()
    if change == "used":
        pool.reserve(placement, 10 * GIB)
    if change == "arrays":
        monkeypatch.setattr(pool, "_pinned_bytes_in_use", lambda ds: dict.fromkeys(ds, 1))
    before = len(system.asked)
    assert pool.begin(placement, int(num_gib * GIB)) is None
    assert len(system.asked) == before


def test_a_limit_that_is_too_low_is_explained_where_memory_is_waited_for(system):
    system.limit = 20 * GIB
    begun = pool.begin(on_gpus(), 60 * GIB)
    with pytest.raises(MemoryError, match="import megatrain_jax before the first JAX"):
        pool.reserve(on_gpus(), 60 * GIB, 0, lambda *_: None, begun)
    assert not system.held


@pytest.mark.parametrize("within", ["compiling", "waiting"])
def test_an_interrupted_start_waits_for_nothing(system, within):
    placement = on_gpus()
    system.go.clear()
    begun = pool.begin(placement, 80 * GIB, GIB)
    assert begun is not None

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), begun:
        assert system.reached.wait(60)
        if within == "compiling":
            interrupted()
        pool.reserve(placement, 80 * GIB, GIB, interrupted, begun)
    assert [size for _, size in system.asked] == [SPARE], "the system hasn't answered"
    (thread,) = pool._left
    assert thread.daemon, "nor does the end of the process wait for it"
    system.go.set()
    thread.join()
    assert [size for _, size in system.asked] == [SPARE], "no further piece is asked for"
    assert not system.held
    # Whoever comes next knows that the pool is no fresh one.
    assert pool.begin(placement, 80 * GIB, GIB) is None
    assert pool._pools[placement.local_devices[0]].likely_bytes == SPARE


def test_files_are_read_ahead_in_their_order_as_far_as_there_is_room(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("b", "a", "lost", "c")]
    for path in (*paths[:2], paths[3]):
        path.write_bytes(bytes(1000))
    opened, plain = [], Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *a, **k: opened.append(self.name) or plain(self, *a, **k)
    )
    for files, limit, read in (
        (paths[:2], 5000, 2000),
        (paths[:2], 1500, 1500),
        (paths, 5000, 2000),
    ):
        with ReadAhead(files, limit) as ahead:
            ahead.wait()
        assert ahead.read_bytes == read
    assert opened == ["b", "a", "b", "a", "b", "a", "lost"], "who needs it says that it is lost"
    for limit in (0, -1):
        with ReadAhead(paths[:2], limit) as ahead:
            ahead.wait()
        assert not ahead.read_bytes
    ended = ReadAhead(paths[:2], 5000)
    ended.__exit__()
    ended.__enter__()
    ended.wait()
    assert not ended.read_bytes, "nothing is read once nobody waits"


def test_arrays_in_files_say_which_to_read_ahead(tmp_path):
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "model.safetensors")
    array = LazyArray((open_folder(tmp_path)["w"],), stacked=False)
    model, batch = {"w": jnp.zeros((4, 4))}, np.ones((2, 4), np.float32)
    adapted, initial = adapt(model, lambda model, x: jnp.mean(x @ model["w"]), batch, 0)
    found = starting_from({"w": array}, initial, adapted, [None])
    assert found.files == (tmp_path / "model.safetensors",)
    np.testing.assert_array_equal(found.leaves([0])[0], np.ones((4, 4)))
    assert starting_from({"w": np.ones((4, 4))}, initial, adapted, [None]).files == ()


@pytest.mark.usefixtures("started_once_in_test")
def test_a_start_pins_while_it_compiles_and_then_fills(system, monkeypatch, capsys):
    """The order of a start on a GPU; what it gives is what a start on a CPU gives."""
    case, events, results = CASES["nnx_tied"], [], {}
    expected = make_trainer(case, OPTIMIZERS["clip_adamw"]).params
    machine = dataclasses.replace(H200, host_bytes=None)
    monkeypatch.setattr("megatrain_jax._src.trainer.this_machine", lambda: machine)
    monkeypatch.setattr(pool, "free_device_bytes", lambda placement: GIB)

    def noted(module, name):
        real = getattr(module, name)

        def call(*args, **options):
            events.append(name)
            guard = "disallow_explicit" if name == "fit_to_device" else "allow"
            with jax.transfer_guard_host_to_device(guard):  # copies go through the pool
                results[name] = real(*args, **options)
            return results[name]

        monkeypatch.setattr(module, name, call)

    for name in ("begin", "reserve"):
        noted(pool, name)
    for name in ("ReadAhead", "foreseen", "fit_to_device", "fill_store"):
        noted(starts, name)
    made = placed_on(Mesh(jax.devices()[:1], "data"))
    on_gpu = dataclasses.replace(made, platform="gpu")
    monkeypatch.setattr("megatrain_jax._src.trainer.placed_on", lambda mesh: on_gpu)
    monkeypatch.setattr(starts, "_SECONDS_TO_EXPLAIN", 0)
    trainer = make_trainer(case, OPTIMIZERS["clip_adamw"])
    said = capsys.readouterr().err
    assert "pinning host memory" in said, "a bar"
    pattern = r"started in [\d.]+ s: tracing .*, compiling .*, pinning .*, initialising [\d.]+ s; "
    assert re.search(pattern + r"\d.* pinned in [\d.]+ s, [\d.]+ GiB/s", said)
    order = ["ReadAhead", "foreseen", "begin", "fit_to_device", "reserve", "fill_store"]
    assert events == order
    assert list(trainer.startup) == ["tracing", "compiling", "pinning", "initialising"]
    assert all(seconds >= 0 for seconds in trainer.startup.values())
    check_same_bits(trainer.params, expected)
    foreseen, fitted = results["foreseen"], results["fit_to_device"]
    assert peak_bytes(foreseen.first) >= peak_bytes(fitted.first) > 0
    # Where functions would have to be in tiles, looking for these would take as long as pinning.
    room = foreseen.first.schedule.smallest_bytes + 2 * trainer.plan.device_other_bytes
    spec = make_spec(case, OPTIMIZERS["clip_adamw"])
    assert starts.foreseen(spec, KernelCache(), room, made) is None
