"""A run's start: the order of its phases, what they say, and files that are read ahead."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import on_one_device, spec_of
from megatrain_jax._src.engine import start as starts
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.checkpoint.given_parameters import with_given_parameters
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.runtime.fill import ReadAhead, fill_store, initial_kernels
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.spec.host import pooled_bytes
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from megatrain_jax._src.engine.state import pool
from megatrain_jax._src.engine.state.hardware import card
from megatrain_jax._src.engine.state.placement import placed_on
from messages import tells
from optimizers import OPTIMIZERS
from runs import check_same_bits, make_spec
from zoo import CASES

GIB = 2**30
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
# A kernel of a schedule that is not taken.
TRIED = Kernel(name="forward", key="tried", build=lambda: jnp.sin)


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


class ArrayInFile:
    """An array of a user's own, which names its file."""

    shape, dtype = (4, 4), np.dtype(np.float32)

    def __init__(self, path):
        self.path, self.source_files = path, (path,)

    def __array__(self, dtype=None, copy=None):
        return np.load(self.path)


def test_arrays_in_files_say_which_to_read_ahead(tmp_path):
    np.save(tmp_path / "w.npy", np.ones((4, 4), np.float32))
    array = ArrayInFile(tmp_path / "w.npy")
    model, batch = {"w": jnp.zeros((4, 4))}, np.ones((2, 4), np.float32)
    adapted, initial = adapt(model, lambda model, x: jnp.mean(x @ model["w"]), batch, 0)
    found = with_given_parameters({"w": array}, initial, adapted, [None])
    assert found.files == (tmp_path / "w.npy",)
    np.testing.assert_array_equal(found.leaves([0])[0], np.ones((4, 4)))
    assert with_given_parameters({"w": np.ones((4, 4))}, initial, adapted, [None]).files == ()


def blocks(params, x):
    for layer in params:
        x = x + jnp.tanh(jnp.tanh(x @ layer["up"]) @ layer["down"])
    return (x**2).mean()


def trainer_of_blocks(**options):
    """A trainer of two blocks of two products each, which may be cut into parts."""
    rng = np.random.default_rng(0)
    shapes = {"up": (16, 64), "down": (64, 16)}
    model = [{k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()} for _ in "12"]
    return mt.Trainer(model, blocks, ADAMW, jnp.ones((8, 16)), precision="float32", **options)


@pytest.mark.usefixtures("started_once_in_test")
def test_a_start_compiles_then_pins_then_fills_and_says_how_long(monkeypatch, capsys):
    """The order of a start on a GPU; what it gives is what a start on a CPU gives."""
    events, pinned = [], []
    expected = trainer_of_blocks().params
    machine = dataclasses.replace(card("H200"), host_bytes=None)
    monkeypatch.setattr("megatrain_jax._src.engine.start.card_here", lambda: machine)
    monkeypatch.setattr(pool, "free_device_bytes", lambda placement: GIB)
    monkeypatch.setattr(pool, "_pools", {})
    monkeypatch.setattr(pool, "total_bytes", lambda: 500 * GIB)
    monkeypatch.setattr(pool, "_pinned_bytes_in_use", lambda devices: dict.fromkeys(devices, 0))
    taken = SimpleNamespace(block_until_ready=lambda: None, delete=lambda: None)
    monkeypatch.setattr(pool, "_maker", lambda *_: lambda: taken)

    def noted(module, name):
        real = getattr(module, name)

        def call(*args, **options):
            events.append(name)
            if name == "reserve":
                pinned.append(args[1])
            guard = "disallow_explicit" if name == "fitted_and_compiled" else "allow"
            with jax.transfer_guard_host_to_device(guard):  # copies go through the pool
                return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    with_gaps = lambda *run: pooled_bytes(*run) + 12  # noqa: E731
    monkeypatch.setattr(starts, "pooled_bytes", with_gaps)
    noted(pool, "reserve")
    for name in ("initial_kernels", "ReadAhead", "fitted_and_compiled", "fill_store"):
        noted(starts, name)
    made = placed_on(Mesh(jax.devices()[:1], "data"))
    on_gpu = dataclasses.replace(made, platform="gpu")
    monkeypatch.setattr("megatrain_jax._src.engine.start.placed_on", lambda mesh, **_: on_gpu)
    monkeypatch.setattr(starts, "_SECONDS_TO_EXPLAIN", 0)
    monkeypatch.setattr(starts, "pins_small_pages", lambda: True)
    monkeypatch.setattr(starts, "advice_on_pages", lambda of: events.append("advice") or "Advice")
    monkeypatch.setattr(starts, "warning_of_little", lambda num_bytes: "little is pinned")
    with pytest.warns(mt.PlanWarning, match="little is pinned"):
        trainer = trainer_of_blocks()
    said = capsys.readouterr().err
    assert tells(said, "4 KiB"), "a bar"
    assert "Advice" in said
    pattern = (
        r"[\d.]+ s: tracing .*, compiling .*, pinning .*, initialising [\d.]+ s; \d.* [\d.]+ s"
    )
    assert re.search(pattern + r", [\d.]+ GiB/s", said)
    order = ["ReadAhead", "fitted_and_compiled", "reserve", "advice", "fill_store"]
    assert events == ["initial_kernels", *order]
    assert list(trainer.startup) == ["tracing", "compiling", "pinning", "initialising"]
    assert all(seconds >= 0 for seconds in trainer.startup.values())
    spec = spec_of(trainer)
    assert pinned == [pooled_bytes(spec, 1, 1) + 12]
    check_same_bits(trainer.params, expected)


@pytest.mark.by_default("True")
@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize("in_parts", [False, True])
def test_functions_for_other_ways_to_cut_blocks_are_dropped(in_parts, monkeypatch):
    least = spec_of(trainer_of_blocks()).first.schedule.smallest_bytes
    machine = dataclasses.replace(card("H200"), device_bytes=GIB, host_bytes=None)
    monkeypatch.setattr(starts, "card_here", lambda: machine)
    monkeypatch.setattr(pool, "free_device_bytes", lambda placement: GIB)
    fit, caches, returned = starts.fit_and_compile, [], []

    def trying(spec, kernels, placement, **given):
        kernels.get(TRIED)
        caches.append(kernels)
        return fit(spec, kernels, placement, **given)

    monkeypatch.setattr(starts, "fit_and_compile", trying)
    monkeypatch.setattr(starts, "return_freed_memory", lambda: returned.append(len(caches[0])))
    trainer = trainer_of_blocks(device_budget=least - in_parts)
    assert (spec_of(trainer).num_parts > 1) == in_parts == bool(returned)
    built = len(caches[0])
    caches[0].get(TRIED)
    assert len(caches[0]) == built + in_parts, "it had been dropped"


@pytest.mark.by_default("nnx_scan-None")
@pytest.mark.parametrize(("name", "given"), [("nnx_tied", jnp.bfloat16), ("nnx_scan", None)])
def test_functions_of_initial_state_are_compiled_beside_the_functions_of_a_step(
    name, given, caplog
):
    case, caplog.handler.level = CASES[name], 0
    precision = mt.Precision(compute=jnp.float32, master=jnp.bfloat16)
    spec = make_spec(case, OPTIMIZERS["adam"], precision=precision)
    adapted, initial = adapt(case.build(), case.loss_fn, case.batch(0), 0)
    if given is not None:
        values = [jnp.zeros(shape.shape, given) for shape in adapted.shapes]
        dtypes = [None] * len(values)
        initial = with_given_parameters(adapted.params_tree(values), initial, adapted, dtypes)
    placement, cache = on_one_device(), KernelCache()
    step = list(step_kernels(spec.first, spec.layouts, spec.optimizer, placement))
    with jax.log_compiles():
        cache.queue_for_compile(initial_kernels(spec, placement, initial))
        assert cache.compile(step) == KernelCache().compile(step)
        assert {"pack", "init_group"} <= functions_compiled(caplog)
        caplog.clear()
        store = Store(spec.layouts, placement, jax.random.key(0))
        fill_store(spec, store, cache, initial, lambda: None)
        assert not {"pack", "init_group"} & functions_compiled(caplog)
    assert cache.has_compiled(step)
    cache.drop({id(cache.get(step[-1]))})
    assert cache.has_compiled(step[:-1]) and not cache.has_compiled(step), "as in a new cache"


def functions_compiled(caplog):
    return set(re.findall(r"Compiling (?:jit\()?(\w+)", caplog.text))
