"""Plans and runs on a host with too little memory: fitted to it, or refused."""

import bisect
import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import megatrain_jax as mt
from inside import on_one_device, steps_of
from megatrain_jax._src.common.host_memory import resident_bytes
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine import start
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.report.table import UNFIT
from megatrain_jax._src.engine.schedule import transient_host_bytes
from megatrain_jax._src.engine.spec import budget as budget_module
from megatrain_jax._src.engine.spec import host, rescheduled
from megatrain_jax._src.engine.spec.budget import fit_to_machine
from megatrain_jax._src.engine.spec.host import (
    check_host,
    fit_to_host,
    host_process,
    peak_bytes,
    state_bytes,
)
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.tile_search import TileFinder
from megatrain_jax._src.engine.state import pool, pool_limit
from megatrain_jax._src.engine.state.placement import placed_on
from messages import refuses, tells
from quantities import has_row
from runs import SLOW, check_same_bits
from small_layers import BATCH, WIDTH, layers, make_params, wide_layers

# Plans of one test share its traces.
pytestmark = pytest.mark.usefixtures("traced_once")

GIB = 2**30
ADAM = optax.adam(1e-3)


@pytest.fixture(autouse=True)
def batches_take_nothing(monkeypatch):
    """Batches here are as large as their hosts; what they take is in `test_plan_figures.py`."""
    monkeypatch.setattr(host, "batch_bytes", lambda *_: 0)


def least_host(gib: float) -> float:
    """The least memory of a host, in GiB, on which a process can have so much in its pool."""
    num_bytes, mib = int(gib * GIB), 2**20

    def is_enough(total: int) -> bool:
        return pool.process_bytes(num_bytes, 0, total) <= pool.most_process_bytes(total)

    return (
        bisect.bisect_left(range(128 * GIB // mib), True, key=lambda n: is_enough(n * mib)) / 1024
    )


def test_activations_stay_on_the_device_where_the_host_has_no_room_for_them():
    """State has its place in the host anyway, so it is the state that moves."""
    width, depth = 8192, 6
    batch = {"x": jax.ShapeDtypeStruct((2**14, width), jnp.float32)}  # 0.5 GiB between layers

    def loss_fn(params, batch):
        x = batch["x"]
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def build():
        return {"layers": [jnp.zeros((width, width)) for _ in range(depth)]}

    def plan(**hosts):
        return mt.plan(
            build,
            loss_fn,
            ADAM,
            batch,
            precision=mt.Precision(compute=jnp.float32),
            hardware=dataclasses.replace(mt.card("H200"), device_bytes=64 * GIB),
            device_budget="5 GiB",
            **hosts,
        )

    roomy, state = plan(host_gib=64), depth * 0.75  # three arrays of 0.25 GiB a layer
    assert roomy.host_peak_bytes / GIB > state + 3
    tight = plan(host_gib=least_host(state + 2.25))
    assert tight.fits_host and tight.num_again == 0
    assert tight.host_peak_bytes / GIB <= state + 2.25
    # A budget of the process is as good as a host of that size.
    asked = plan(host_gib=64, host_budget=tight.host_process_bytes)
    assert asked.fits_host and asked.num_again == 0
    assert asked.host_peak_bytes <= tight.host_peak_bytes
    assert has_row(str(asked), [asked.host_process_bytes, asked.host_budget])
    assert not plan(host_gib=64, host_budget="5 GiB").fits_host


def spec_of_deep_layers(device_gib: int, depth: int = 12) -> RunSpec:
    """A run of layers with 0.5 GiB between them; most of it waits in the host."""
    width = 8192
    batch = {"x": jax.ShapeDtypeStruct((2**14, width), jnp.float32)}

    def loss_fn(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    adapted, _ = adapt(lambda: [jnp.zeros((width, width))] * depth, loss_fn, batch, 0)
    options = Options(
        precision=mt.Precision(compute=jnp.float32),
        hardware="H200",
        device_budget=device_gib * GIB,
    )
    return make_run_spec(adapted, loss_fn, ADAM, batch, options)


def with_host_budget(spec: RunSpec, num_bytes: int) -> RunSpec:
    return dataclasses.replace(
        spec, options=dataclasses.replace(spec.options, host_budget=num_bytes)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("device_gib", [6, pytest.param(7, marks=pytest.mark.long)])
def test_schedules_that_no_host_of_a_size_can_hold_are_not_searched_for(device_gib, monkeypatch):
    """What is known without a search changes no result, and saves the searches."""
    spec = spec_of_deep_layers(device_gib)
    state, peak = state_bytes(spec.first), peak_bytes(spec.first)
    searches, search = [], rescheduled.find_schedule
    monkeypatch.setattr(
        rescheduled, "find_schedule", lambda *given: searches.append(given) or search(*given)
    )
    ends = []
    for share in (0.02, 0.2, 0.5, 0.8, 1.0):
        most = pool.process_bytes(
            int(state + share * (peak - state)), spec.largest_slab_bytes, 256 * GIB
        )
        asked = with_host_budget(spec, most)
        found, numbers = [], []
        for least in (lambda *_: 0, transient_host_bytes.least_transient_host_bytes):
            monkeypatch.setattr(host, "least_transient_host_bytes", least)
            searches.clear()
            fitted = fit_to_host(asked)
            chosen = fitted.first.schedule, fitted.first.workload.again
            found.append(None if fitted.lacking_host else chosen)
            numbers.append(len(searches))
        assert found[0] == found[1] and numbers[1] <= numbers[0]
        ends.append((not fitted.lacking_host, *numbers))
    assert not ends[0][0] and ends[0][1] > 2 >= ends[0][2], "only what comes nearest"
    assert ends[-1][0], ends


def test_the_same_blocks_again_are_searched_for_once():
    spec = dataclasses.replace(spec_of_deep_layers(5, depth=10), host_room=4 * GIB)
    found = [step.workload.again for step in host._computing_again(spec, lambda _: True)]
    assert len(found) > 1 and len(set(found)) == len(found)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_run_that_does_not_fit_is_refused_with_what_would_suffice(on_cpu):
    spec = spec_of_deep_layers(5, depth=10)
    if on_cpu:
        spec = dataclasses.replace(spec, base_bytes=GIB, temporary_bytes=0)
    whole = host_process(spec, 1, 1).needed(peak_bytes(spec.first))

    def needed(num_bytes: int) -> int:
        asked = fit_to_host(with_host_budget(spec, num_bytes))
        with refuses(MemoryError, sized(num_bytes + asked.lacking_host)):
            check_host(asked, 1, 1)
        return num_bytes + asked.lacking_host

    found = needed(GIB)
    assert found < 0.9 * whole, "computing blocks again saves much"
    assert not fit_to_host(with_host_budget(spec, found)).lacking_host
    assert [needed(int(share * found)) for share in (0.5, 0.97)] == [found, found]


@pytest.mark.parametrize("processes", [1, 4])
def test_a_process_is_refused_only_less_than_its_share_needs(processes):
    spec = spec_of_deep_layers(8, depth=4)
    spec = dataclasses.replace(spec, first=dataclasses.replace(spec.first, num_devices=4))
    least = make_plan(spec, processes, 1).host_process_bytes
    assert least is not None
    check_host(with_host_budget(spec, least), processes, 1)
    with pytest.raises(MemoryError):
        check_host(with_host_budget(spec, least - 1), processes, 1)


def test_a_run_that_exceeds_its_host_budget_is_refused_in_words():
    with refuses(MemoryError, "64.00 MiB", "`host_budget`", "Nothing", "larger") as caught:
        mt.Trainer(make_params(), layers, optax.adam(1e-3), BATCH, host_budget="64MiB")
    # JAX alone takes more, whatever the model.
    assert "compact" not in str(caught.value)


def deep(params, batch):
    x = batch["x"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    return jnp.mean(x**2)


def of_deep():
    params = {"layers": [{"w": np.ones((64, 64), np.float32) / 64} for _ in range(6)]}
    return params, deep, optax.sgd(0.1), {"x": np.ones((2**13, 64), np.float32)}


def test_a_plan_and_a_trainer_on_a_cpu_agree_on_a_host_budget(monkeypatch):
    monkeypatch.setattr(host, "resident_bytes", lambda: 2**28)
    fp32: Any = {"precision": "float32"}
    whole = mt.plan(*of_deep(), **fp32)
    assert whole.fits_host is None and whole.host_fixed_bytes == 2**28 + 2**28
    assert whole.host_process_bytes and whole.host_process_bytes > (
        whole.host_fixed_bytes + whole.host_peak_bytes + whole.device_bytes
    )
    assert mt.Trainer(*of_deep(), progress=False, **fp32).plan.host_process_bytes == (
        pytest.approx(whole.host_process_bytes, rel=0.05)
    )
    # Large arrays leave the C library no memory to keep.
    batch = {"x": jax.ShapeDtypeStruct((2**12, 4096), np.float32)}
    wide = mt.plan(
        lambda: {"layers": [{"w": jnp.zeros((4096, 4096))} for _ in range(3)]},
        *(deep, optax.sgd(0.1), batch),
        **fp32,
    )
    assert (temporaries := wide.device_temporary_bytes or 0) > 2**24
    needed = wide.host_peak_bytes + wide.device_state_bytes + temporaries
    assert wide.host_process_bytes == pytest.approx(2**29 + needed, rel=0.001)
    small: Any = {"host_budget": "64MiB", **fp32}
    plan = mt.plan(*of_deep(), **small)
    assert plan.fits_host is False and plan.fits is False
    limit = 64 * 2**20
    assert has_row(str(plan), [plan.host_process_bytes, limit]) and UNFIT in str(plan)
    with refuses(MemoryError, "64.00 MiB"):
        mt.Trainer(*of_deep(), **small)


@pytest.mark.usefixtures("started_once_in_test")
def test_a_host_budget_on_a_cpu_makes_a_run_compute_blocks_again(monkeypatch):
    monkeypatch.setattr(host, "resident_bytes", lambda: 2**28)
    fp32: Any = {"precision": "float32"}
    whole = mt.plan(*of_deep(), **fp32)
    tight: Any = {"host_budget": (whole.host_process_bytes or 0) - 2**22, **fp32}
    plan, trainer = mt.plan(*of_deep(), **tight), mt.Trainer(*of_deep(), progress=False, **tight)
    for found in (plan, trainer.plan):
        assert found.fits_host and found.num_again > 0 == whole.num_again
        assert found.host_activation_bytes < whole.host_activation_bytes
        assert (found.host_process_bytes or 0) <= tight["host_budget"]
    other = mt.Trainer(*of_deep(), progress=False, **fp32)
    batch = of_deep()[-1]
    for _ in range(2):
        losses = [t.read(t.step(batch))["loss"] for t in (trainer, other)]
        assert losses[0] == losses[1]


def test_on_a_cpu_what_is_computed_on_counts_beside_the_state():
    process = host.HostProcess(
        num_devices=1,
        total_bytes=None,
        usable_bytes=None,
        array_bytes=0,
        list_bytes=0,
        unpinned_bytes=0,
        base_bytes=1000,
        computing_bytes=300,
        small_share=0.5,
    )
    # The C library keeps half as much again of what was freed.
    assert process.needed(700) == 1000 + (700 + 300) * 3 // 2


def test_arrays_are_small_by_the_part_of_a_device():
    """The C library keeps the memory of arrays below 32 MiB."""

    def share(*slabs: tuple[int, int]) -> float:
        rows = [SimpleNamespace(num_bytes=mib << 20, num_shards=shards) for mib, shards in slabs]
        spec: Any = SimpleNamespace(layouts=[SimpleNamespace(slabs=rows)])
        return host._small_share(spec)

    assert share((32, 1), (31, 1), (1, 1)) == 0.5
    assert share((64, 2), (60, 2), (4, 2)) == 0.5 == share((128, 4), (124, 4), (4, 1))


def test_fewer_bytes_a_parameter_are_advised_where_they_may_be_enough():
    own = "Precision.compact()"
    for fixed, most in ((1, 2), (2, 2)):
        advice = host._advice(fixed, most)
        assert (own in advice) == (fixed < most) and tells(advice, "larger", "`host_budget`")


def test_a_plan_computes_again_only_what_the_host_has_no_room_for():
    batch = {"x": jax.ShapeDtypeStruct((2**24, WIDTH), jnp.float32)}  # 1 GiB between layers
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_params())

    def build():
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), params)

    def plan(gib):
        hardware = dataclasses.replace(
            mt.card("H200"), host_bytes=int(gib * GIB), device_bytes=32 * GIB
        )
        return mt.plan(
            build,
            layers,
            ADAM,
            batch,
            precision=mt.Precision(compute=jnp.float32),
            hardware=hardware,
            device_budget="least",
        )

    roomy = plan(64)
    # Blocks hand on 1 GiB each; 6 are more than every second one. The state is small.
    needed = 0, 1, 2, 3, 6
    plans = [plan(least_host(roomy.host_peak_bytes / GIB - n + 0.5)) for n in needed]
    assert all(p.fits_host for p in plans)
    counts = [p.num_again for p in plans]
    assert counts == list(needed)
    assert plans[-1].host_peak_bytes < plans[0].host_peak_bytes / 2
    assert plans[-1].flops_per_step > plans[0].flops_per_step
    assert has_row(str(plans[-1]), [counts[-1], 12])
    # Where nothing fits, what comes nearest is planned: a host with room for that suffices.
    nearest = [plan(gib) for gib in (0.001, 0.9 * plans[-1].host_peak_bytes / GIB)]
    assert not any(p.fits_host for p in nearest)
    least = {p.host_peak_bytes / GIB for p in nearest}
    assert len(least) == 1 and plan(least_host(*least)).fits_host


@pytest.mark.exhaustive
def test_a_host_is_too_small_where_blocks_computed_again_need_more_of_the_device():
    width, layers = 8192, [{"up": (1, 4), "down": (4, 1), "q": (1, 1)}] * 6

    def build():
        made = [{k: jnp.zeros((a * width, b * width)) for k, (a, b) in x.items()} for x in layers]
        return {"embed": jnp.zeros((1000, width)), "layers": made}

    def loss_fn(params, batch):
        x = params["embed"][batch["x"]]
        for layer in params["layers"]:
            x = x + jnp.tanh((x @ layer["q"]) @ layer["up"]) @ layer["down"]
        logits = (x @ params["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    rows = jax.ShapeDtypeStruct((256, 2048), jnp.int32)
    made = build, loss_fn, optax.adamw(1e-3), {"x": rows, "y": rows}
    plans = [
        mt.plan(*made, hardware="H100", host_gib=gib, precision=mt.Precision.compact())
        for gib in (16, 32, 128)
    ]
    assert [plan.fits_host for plan in plans] == [False, False, True]


def test_a_plan_has_as_many_residuals_wait_as_the_host_has_room_for():
    batch = {"x": jax.ShapeDtypeStruct((2**24, WIDTH), jnp.float32)}

    def build():
        return {"layers": [{"up": jnp.zeros((WIDTH, 4 * WIDTH))} for _ in range(12)]}

    def plan(gib):
        return mt.plan(
            build,
            wide_layers,
            ADAM,
            batch,
            precision=mt.Precision(compute=jnp.float32),
            hardware=dataclasses.replace(SLOW, host_bytes=int(gib * GIB), device_bytes=256 * GIB),
            device_budget=int(8.8 * GIB),
        )

    whole = plan(64)
    peak = whole.host_peak_bytes / GIB
    plans = [whole, *(plan(least_host((1 - share) * peak)) for share in (0.1, 0.4))]
    assert all(p.fits_host and p.keeps_costliest for p in plans)
    assert [p.num_again for p in plans] == [0] * 3
    kept = [p.num_kept for p in plans]
    assert kept[0] == 11 > kept[1] > kept[2] > 0
    seconds = [p.seconds_per_step or 0 for p in plans]
    assert 0 < seconds[0] < seconds[1] < seconds[2]


@pytest.mark.usefixtures("started_once_in_test")
def test_steps_of_other_shapes_keep_to_the_host(monkeypatch):
    def batch(rows):
        return {"x": np.random.default_rng(rows).normal(size=(rows, WIDTH)).astype(np.float32)}

    optimizer, fp32 = optax.adam(1e-3), mt.Precision(compute=jnp.float32)
    short, long, longer = batch(2**12), batch(2**16), batch(2**16 + 8)
    plan = mt.plan(
        make_params(num_layers=6), layers, optimizer, longer, precision=fp32, device_budget="least"
    )

    def trained():
        options = {
            "precision": fp32,
            "progress": False,
            "device_budget": plan.device_state_bytes * 5 // 4,
        }
        trainer = mt.Trainer(make_params(num_layers=6), layers, optimizer, short, **options)
        losses = [trainer.read(trainer.step(b))["loss"] for b in (short, long, short)]
        return trainer, losses

    whole, expected = trained()
    machine = dataclasses.replace(mt.card("H200"), device_bytes=GIB, host_bytes=GIB)
    monkeypatch.setattr(start, "card_here", lambda: machine)
    monkeypatch.setattr(pool, "free_device_bytes", lambda placement: GIB)
    monkeypatch.setattr(pool, "process_bytes", lambda num_bytes, *_: num_bytes)
    monkeypatch.setattr(pool, "most_process_bytes", lambda *_: plan.host_peak_bytes * 2 // 3)
    narrow, losses = trained()
    assert losses == expected
    first, second = steps_of(narrow)
    assert not first.workload.again and second.workload.again
    # Fitted to a long batch, a run computes nothing again for a short one.
    budget = plan.device_state_bytes * 5 // 4
    options = {"precision": fp32, "progress": False, "device_budget": budget}
    reverse = mt.Trainer(make_params(num_layers=6), layers, optimizer, long, **options)
    reverse.read(reverse.step(short))
    assert [bool(step.workload.again) for step in steps_of(reverse)] == [True, False]
    assert peak_bytes(second) <= plan.host_peak_bytes * 2 // 3 < plan.host_peak_bytes
    # Where nothing helps, it is said before anything is computed.
    monkeypatch.setattr(pool, "most_process_bytes", lambda *_: 2**14)
    with refuses(MemoryError, "batches", "shape"):
        narrow.step(longer)
    assert narrow.num_steps == 3
    check_same_bits(narrow.params, whole.params)


@pytest.mark.by_default("False")
@pytest.mark.parametrize("given", [True, False])
def test_a_batch_that_the_budget_has_no_room_for_is_refused_by_its_shape(given, monkeypatch):
    short, long = ({"x": np.ones((n, WIDTH), np.float32)} for n in (2**12, 2**18))
    made, fp32 = (make_params(), layers, optax.adam(1e-3)), mt.Precision(compute=jnp.float32)
    room = mt.plan(*made, short, precision=fp32, device_budget=GIB).device_bytes * 2
    machine = dataclasses.replace(mt.card("H200"), device_bytes=room, host_bytes=64 * GIB)
    if not given:
        monkeypatch.setattr(start, "card_here", lambda: machine)
        monkeypatch.setattr(pool, "free_device_bytes", lambda placement: room)
    budget = room if given else None
    trainer = mt.Trainer(*made, short, precision=fp32, progress=False, device_budget=budget)
    error, text = (ValueError, "device_budget=") if given else (MemoryError, "first batch")
    for call, what in ((trainer.step, "step"), (lambda x: trainer.evaluate([x]), "evaluation")):
        with pytest.raises(error, match=rf"(?i){what} .*shape .*\d+") as info:
            call(long)
        assert text in str(info.value)
    trainer.read(trainer.step(short))


def test_a_named_card_is_in_this_host(monkeypatch):
    machine = dataclasses.replace(mt.card("H200"), device_bytes=GIB, host_bytes=9 * GIB)
    monkeypatch.setattr(start, "card_here", lambda: machine)
    monkeypatch.setattr(pool, "free_device_bytes", lambda placement: GIB)
    made = make_params(), layers, optax.adam(1e-3), BATCH
    named = (None, "RTX 4090", dataclasses.replace(mt.card("H100"), host_bytes=8 * GIB))
    plans = [mt.Trainer(*made, progress=False, hardware=hardware).plan for hardware in named]
    hosts = [plan.hardware.host_bytes for plan in plans if plan.hardware]
    assert hosts == [9 * GIB, 9 * GIB, 8 * GIB]


def test_a_limit_of_pools_bounds_a_run_on_hardware_that_has_more_memory(monkeypatch):
    machine = dataclasses.replace(mt.card("H200"), device_bytes=GIB, host_bytes=900 * GIB)
    monkeypatch.setattr(start, "card_here", lambda: machine)
    monkeypatch.setattr(pool, "free_device_bytes", lambda placement: GIB)
    monkeypatch.setattr(pool, "available_process_bytes", lambda *of: 800 * GIB)
    monkeypatch.setenv(pool.LIMIT_VARIABLE, "3")
    trainer = mt.Trainer(make_params(), layers, optax.adam(1e-3), BATCH, progress=False)
    assert trainer.plan.host_process_limit == 3 * GIB + 15 * GIB // 8


@pytest.mark.parametrize(
    "hardware", [None, dataclasses.replace(mt.card("H100"), host_bytes=2000 * GIB)]
)
@pytest.mark.parametrize("num_here", [1, 2])
def test_a_limit_of_pools_holds_for_each_process_of_a_host(hardware, num_here, monkeypatch):
    machine = dataclasses.replace(mt.card("H200"), host_bytes=900 * GIB)
    placement = on_one_device()
    monkeypatch.setattr(placement.processes, "num_here", num_here)
    monkeypatch.setattr(start, "card_here", lambda: machine)
    monkeypatch.setattr(start, "placed_on", lambda mesh, **_: placement)
    monkeypatch.setattr(pool, "available_process_bytes", lambda *of: 800 * GIB)
    monkeypatch.setenv(pool.LIMIT_VARIABLE, "3")
    run, _, _ = start.on_this_machine(Options(hardware=hardware))
    assert run.machine is not None
    assert pool_limit.limit_bytes(run.machine.host_bytes, num_here) == num_here * 3 * GIB


@pytest.mark.parametrize(("given", "found"), [(2000 * GIB, 2000 * GIB), (None, 900 * GIB)])
def test_a_named_card_is_in_this_host_unless_it_has_its_own(given, found, monkeypatch):
    machine = dataclasses.replace(mt.card("H200"), host_bytes=900 * GIB)
    monkeypatch.setattr(start, "card_here", lambda: machine)
    monkeypatch.setattr(start, "within_pools", lambda hardware, number: hardware)
    monkeypatch.setattr(pool, "available_process_bytes", lambda *of: 800 * GIB)
    card = dataclasses.replace(mt.card("H100"), host_bytes=given)
    run, _, _ = start.on_this_machine(Options(hardware=card))
    assert run.machine == dataclasses.replace(card, host_bytes=found)


def skipping(params, batch):
    x, skips = batch["x"], []
    half = len(params["layers"]) // 2
    for layer in params["layers"][:half]:
        skips.append(x := jnp.tanh(x @ layer["w"]))
    for layer in params["layers"][half:]:
        x = jnp.tanh((x + skips.pop()) @ layer["w"])
    return (x**2).mean()


@pytest.mark.usefixtures("started_once_in_test")
def test_an_evaluation_that_the_host_has_no_room_for_is_refused(monkeypatch):
    rows, fp32 = [2**12, 2**14, 2**16], mt.Precision(compute=jnp.float32)
    short, middle, long = ({"x": np.ones((n, WIDTH), np.float32)} for n in rows)
    made = make_params(num_layers=8), skipping, optax.adam(1e-3)
    least = mt.plan(*made, long, precision=fp32, device_budget="least").device_state_bytes
    options = {"precision": fp32, "progress": False, "device_budget": 6 * least // 5}
    expected = mt.Trainer(*made, short, **options).evaluate([middle])
    machine = dataclasses.replace(mt.card("H200"), device_bytes=GIB, host_bytes=GIB)
    monkeypatch.setattr(start, "card_here", lambda: machine)
    monkeypatch.setattr(pool, "free_device_bytes", lambda placement: GIB)
    monkeypatch.setattr(pool, "process_bytes", lambda num_bytes, *_: num_bytes)
    monkeypatch.setattr(pool, "most_process_bytes", lambda *_: 3 * 2**20)
    trainer = mt.Trainer(*made, short, **options)
    with pytest.raises(MemoryError, match=r"evaluation .*shape .*\d"):
        trainer.evaluate([long])
    assert trainer.evaluate([middle]) == expected
    trainer.read(trainer.step(short))


def spec_of_wide_layers():
    batch = {"x": jax.ShapeDtypeStruct((2**24, WIDTH), jnp.float32)}
    up = jnp.zeros((WIDTH, 4 * WIDTH))
    adapted, _ = adapt(lambda: {"layers": [{"up": up}] * 4}, wide_layers, batch, 0)
    options = Options(precision=mt.Precision(compute=jnp.float32))
    return make_run_spec(adapted, wide_layers, optax.adam(1e-3), batch, options)


def test_smaller_tiles_are_taken_where_only_theirs_leave_a_step_that_the_host_holds(
    monkeypatch,
):
    spec = spec_of_wide_layers()
    nowhere = placed_on(AbstractMesh((1,), ("data",)))

    def budget(least):
        asked = []

        def to_host(spec):
            asked.append(spec.temporary_bytes)
            return dataclasses.replace(spec, lacking_host=max(0, least - spec.budget_bytes))

        found = fit_to_machine(spec, TileFinder(KernelCache(), nowhere), 24 * GIB, to_host)
        assert len(set(asked)) == len(asked) > 1, "a search for each need"
        return found.budget_bytes or 0

    # The last share gives again what the one before it has given.
    monkeypatch.setattr(budget_module, "_SHARES", (0.5, 0.25, 0.25))
    # What the device holds need not wait in the host.
    usual = budget(0)
    assert budget(usual + 1) > 2 * usual
    assert budget(24 * GIB) > 2 * usual, "refused with what comes nearest"


def test_functions_of_a_schedule_that_the_host_has_room_for_are_known():
    spec = spec_of_wide_layers()
    nowhere = placed_on(AbstractMesh((1,), ("data",)))

    def selective(spec):
        schedule = dataclasses.replace(
            spec.first.schedule, kept=frozenset({1, 2}), selective=True, seconds=0.0
        )
        return dataclasses.replace(spec, first=dataclasses.replace(spec.first, schedule=schedule))

    tiles = TileFinder(KernelCache(), nowhere)
    usual = fit_to_machine(spec, tiles, 16 * GIB, lambda spec: spec)
    found = fit_to_machine(spec, tiles, 16 * GIB, selective)
    assert usual.first.schedule.kept < {1, 2} and usual.first.stages[1].tiles
    assert (found.temporary_bytes or 0) >= TileFinder(KernelCache(), nowhere).most(found.first)
    names = ["forward keeping the costliest", "backward of the costliest"]
    assert set(names) & set(found.first.stages[1].tiles)
    assert found.budget_bytes == usual.budget_bytes


def test_a_process_that_has_yet_to_compile_counts_more_than_it_has():
    assert host.process_base_bytes() - resident_bytes() > 120 * 2**20
