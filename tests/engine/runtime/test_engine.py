"""What a step does to memory, in which order, and how often it compiles."""

import dataclasses
import gc
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from device_values import state_on_device, values_on_device
from inside import engine_of, pinned_arrays, spec_of, steps_of, store_of
from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.engine.runtime.engine import Engine
from megatrain_jax._src.engine.schedule.instructions import Op
from optimizers import OPTIMIZERS
from runs import SLOW, check_same_bits, make_trainer, train
from workloads import all_resident_bytes
from zoo import CASES
from zoo_case import DIM, VOCAB, Case, cross_entropy

pytestmark = pytest.mark.usefixtures("started_once")
CASE = CASES["nnx_tied"]


def tied_unet(params, batch):
    """A loss of layers whose outputs reach later ones; the embedding is also the head."""
    x, skips = params["embed"][batch["tokens"][:, :-1]], []
    for layer in params["early"]:
        x = jnp.tanh(x @ layer["w"])
        skips.append(x)
    for layer in params["late"]:
        x = jnp.tanh(x @ layer["w"] + skips.pop())
    return cross_entropy(x @ params["embed"].T, batch["tokens"][:, 1:])


def build_unet():
    rng = np.random.default_rng(0)
    embed, *layers = (rng.normal(size=(n, DIM)) / 4 for n in (VOCAB, *[DIM] * 4))
    layers = [{"w": w} for w in layers]
    return {"embed": embed, "early": layers[:2], "late": layers[2:]}


# Its functions take a fraction of the time of a decoder's to trace and compile.
UNET = Case(name="tied_unet", build=build_unet, loss_fn=tied_unet, blocks=4, templates=2)
# Each optimizer and each budget once; the other two combinations are long.
AT_ONCE_AND_DEFERRED = [
    ("clip_adamw", None),
    ("adamw_schedule", 10**9),
    pytest.param("adamw_schedule", None, marks=pytest.mark.long),
    pytest.param("clip_adamw", 10**9, marks=pytest.mark.long),
]


def budgets(bound):
    low, high = bound.schedule.smallest_bytes, all_resident_bytes(bound.workload)
    high = max(low, high)
    return [low, (low + high) // 2, high, 2 * high + sum(bound.workload.residuals)]


def ledger_cases():
    """All combinations; those that are not needed for all pairs of values of two are long."""
    pairs = {"smallest": "000 111", "middling": "011 100", "resident": "001 110"}
    pairs["keeping"] = "010 101"
    options = [(1, 2), ("float32", "bfloat16"), ("adamw_schedule", "clip_adamw")]
    for which, name in enumerate(("smallest", "middling", "resident", "keeping")):
        for bits in itertools.product((0, 1), repeat=3):
            chosen = [values[bit] for values, bit in zip(options, bits, strict=True)]
            is_pair = "".join(map(str, bits)) in pairs[name].split()
            yield pytest.param(
                which,
                *chosen,
                id="-".join(map(str, [name, *chosen])),
                marks=[] if is_pair else [pytest.mark.long],
            )


@pytest.mark.by_default("smallest-1-float32-adamw_schedule")
@pytest.mark.parametrize(("which", "microbatches", "compute", "optimizer"), list(ledger_cases()))
def test_what_is_on_the_device_never_exceeds_the_ledger(
    which, microbatches, compute, optimizer, monkeypatch
):
    hardware = SLOW if which == 3 else None
    options = {"microbatches": microbatches, "compute": compute, "hardware": hardware}
    earlier = pinned_arrays()
    probe = make_trainer(CASE, OPTIMIZERS[optimizer], **options)
    budget = budgets(spec_of(probe).first)[which]
    assert pinned_arrays().keys() - earlier.keys()
    del probe
    assert not pinned_arrays().keys() - earlier.keys()
    trainer = make_trainer(CASE, OPTIMIZERS[optimizer], budget=budget, **options)
    engine, schedule = engine_of(trainer), trainer.schedule
    gc.collect()
    # Arrays of other tests that look alike.
    base = state_on_device(trainer) + values_on_device(trainer, None)
    seen = {"cold": [], "steady": [], "flush": []}
    obey, name, values = engine.obey, "cold", 0

    def watched(instruction, step):
        nonlocal values
        obey(instruction, step)
        value_bytes = values_on_device(trainer, step)
        values = max(values, value_bytes)
        seen[name].append(state_on_device(trainer) + value_bytes - base)

    monkeypatch.setattr(engine, "obey", watched)
    trainer.step(CASE.batch(0))
    name = "steady"
    trainer.step(CASE.batch(1))
    name = "flush"
    trainer.flush()
    for name, rows in seen.items():
        ledger = schedule.ledger[name]
        assert len(rows) == len(ledger)
        assert max(rows, default=0) <= budget
        for k, (actual, allowed) in enumerate(zip(rows, ledger, strict=True)):
            assert actual <= allowed, (name, k, getattr(schedule, name)[k])
    assert max(seen["steady"]) > 0
    assert values >= max(spec_of(trainer).first.workload.activations.values())
    assert state_on_device(trainer) + values_on_device(trainer, None) == base
    assert schedule.kept or which != 3
    moved = {instruction.key for instruction in schedule.steady if instruction.op is Op.OFFLOAD}
    assert moved if which == 0 else which == 1 or not moved


@pytest.mark.parametrize("microbatches", [1, 2])
def test_only_gradients_that_are_sums_are_wider_than_compute(microbatches):
    trainer = make_trainer(
        UNET, OPTIMIZERS["normalize"], microbatches=microbatches, compute=jnp.bfloat16
    )
    trainer.step(UNET.batch(0))
    spec, store = spec_of(trainer), store_of(trainer)
    readers = Counter(g for bound in spec.first.stages for g in bound.groups)
    assert set(readers.values()) == {1, 2}
    for group, number in readers.items():
        key = Key(Kind.GRADIENT, group)
        (gradient,) = store.host.get(key) or store.on_device[key]
        alone = number == 1 and microbatches == 1
        assert gradient.dtype == (jnp.bfloat16 if alone else jnp.float32)
        assert gradient.nbytes == spec.first.workload.size(key)


@pytest.mark.by_default("float64-0.0-1", "float32-1e-10-1")
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("masters", "least"), [("float64", 0.0), ("float32", 1e-10)])
def test_gradients_in_float64_of_masters_in_float64_are_not_rounded(masters, least, microbatches):
    """`first` is read twice, so its gradient is a sum in any case."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))

    def loss(p, batch):
        x = jnp.tanh((batch["x"] * p["first"]) @ p["k"])
        return ((x @ p["first"] - batch["y"]) ** 2).mean()

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {"first": rng.normal(size=8), "k": rng.normal(size=(8, 8))}
        params = jax.tree.map(lambda x: x.astype(np.float32).astype(np.float64), params)
        batch = {"x": rng.normal(size=(4, 8)), "y": rng.normal(size=4)}
        gradients = jax.grad(loss)(params, batch)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        expected = optax.apply_updates(params, updates)
        precision = mt.Precision(master=masters, compute="float64")
        options = {"microbatches": microbatches, "precision": precision, "progress": False}
        trainer = mt.Trainer(params, loss, optimizer, batch, **options)
        trainer.step(batch)
        found = jax.tree.map(np.asarray, trainer.params)
        expected = jax.tree.map(np.asarray, expected)
        size = 8 if masters == "float64" else 4
        assert spec_of(trainer).first.workload.size(Key(Kind.GRADIENT, 0)) == size * 128  # padded
    for name, x in expected.items():
        error = np.abs(found[name].astype(np.float64) - x).max()
        assert least <= error < (1e-14 if masters == "float64" else 1e-5)


@pytest.mark.by_default("adamw_schedule-1000000000")
@pytest.mark.parametrize(("optimizer", "budget"), AT_ONCE_AND_DEFERRED)
def test_at_rest_all_state_is_pinned(optimizer, budget):
    trainer = make_trainer(CASES["dropout_nnx"], OPTIMIZERS[optimizer], budget=budget)
    for seed in range(2):
        trainer.step(CASES["dropout_nnx"].batch(seed))
    trainer.flush()
    store = store_of(trainer)
    small = [*store.variables, *store.globals, store.ok, store.step, store.key]
    slabs = [x for slabs in store.host.values() for x in slabs]
    assert store.variables and store.globals and slabs
    assert {x.sharding.memory_kind for x in (*small, *slabs)} == {"pinned_host"}
    assert not store.on_device
    assert {key.kind for key in store.host} == LASTING


def test_a_resident_step_moves_nothing(monkeypatch):
    trainer = make_trainer(CASE, OPTIMIZERS["clip_adamw"], budget=10**9)
    trainer.step(CASE.batch(0))
    moved = []
    put = jax.device_put
    monkeypatch.setattr(
        "megatrain_jax._src.engine.runtime.engine.jax.device_put",
        lambda x, s=None: moved.append(s) or put(x, s),
    )
    engine_of(trainer).train(
        spec_of(trainer).first, jax.tree.leaves(put(CASE.batch(1), jax.devices()[0]))
    )
    assert not moved


def with_loss_of_its_own():
    """The case with another loss function, for which nothing is compiled yet."""
    return dataclasses.replace(CASE, loss_fn=lambda model, batch: CASE.loss_fn(model, batch))


@pytest.mark.exhaustive
def test_each_batch_shape_compiles_once():
    trainer = make_trainer(with_loss_of_its_own(), OPTIMIZERS["adamw_schedule"])
    short = {"tokens": CASE.batch(0)["tokens"][:4]}
    trainer.step(CASE.batch(0))
    trainer.step(CASE.batch(1))
    count = len(engine_of(trainer).kernels)
    trainer.step(short)
    grown = len(engine_of(trainer).kernels)
    assert grown > count
    for batch in (CASE.batch(2), short, CASE.batch(3), short):
        trainer.step(batch)
    assert len(engine_of(trainer).kernels) == grown
    # Functions of a module are shared with the trainers of other tests and their shapes.
    shared = ("_end_step", "_keep_if_ok", "add")
    for function in engine_of(trainer).kernels._functions.values():
        assert function._cache_size() <= 1 or function.__name__ in shared
    groups = len(spec_of(trainer).grouping.names)
    kinds = [name for name, _ in engine_of(trainer).kernels._functions]
    assert kinds.count("update") < groups, "equal blocks share their update"


def test_a_short_key_has_one_function_in_all_kinds_of_steps(monkeypatch):
    """Functions are found by keys that are faster to make than the functions' own."""
    found, find = {}, Engine._find

    def checked(engine, key, make):
        kernel = make()
        assert found.setdefault(key, kernel) == kernel, key
        return find(engine, key, lambda: kernel)

    monkeypatch.setattr(Engine, "_find", checked)

    def loss_fn(params, batch):
        weight = (batch["tokens"] % 2).sum()
        return tied_unet(params, batch), {"weight": weight}

    case = dataclasses.replace(UNET, loss_fn=loss_fn)
    trainer = make_trainer(case, OPTIMIZERS["clip_adamw"], microbatches=2, waves=2)
    batch = case.batch(0)
    for _ in range(2):
        trainer.read(trainer.step(batch))
        trainer.evaluate([batch])
        list(trainer.predict([batch], lambda params, batch: params["embed"][batch["tokens"]]))
    assert len(found) > 10
    # What one step alone uses can be dropped.
    engine, step = engine_of(trainer), spec_of(trainer).first
    own = {key for key in engine._found if isinstance(key, tuple) and step in key}
    others = {*engine._found} - own
    assert own and any(isinstance(key, tuple) and Op.FORWARD in key for key in others)
    engine.forget([step])
    assert {*engine._found} == others


def test_equal_blocks_share_their_functions():
    trainer = make_trainer(with_loss_of_its_own(), OPTIMIZERS["adamw_schedule"])
    trainer.step(CASE.batch(0))
    kinds = [name for name, _ in engine_of(trainer).kernels._functions]
    assert kinds.count("forward") == 2  # embedding and block; the head runs in its backward
    assert kinds.count("backward") == 3


def test_one_value_at_two_inputs_of_a_block_gets_both_gradients():
    """The first block takes the embedding twice, where the next ones take two values."""
    rng = np.random.default_rng(0)

    def normal():
        return rng.normal(size=(8, 8)).astype(np.float32)

    def loss_fn(params, batch):
        x = y = batch @ params["embed"]
        for block in params["blocks"]:
            x, y = jnp.tanh(x @ block["a"] + y), jnp.tanh(y @ block["b"])
        return ((x + y) @ params["head"]).mean()

    blocks = [{name: normal() for name in "ab"} for _ in range(3)]
    params, batch = {"embed": normal(), "blocks": blocks, "head": normal()}, normal()
    trainer = mt.Trainer(
        params, loss_fn, optax.sgd(1.0), batch, precision="float32", progress=False
    )
    inputs = [bound.stage.inputs for bound in trainer.stages]
    assert any(len(set(ids)) < len(ids) for ids in inputs)
    trainer.step(batch)
    gradients = jax.grad(loss_fn)(params, batch)
    expected = jax.tree.map(lambda x, gradient: x - gradient, params, gradients)
    for new, right in zip(*map(jax.tree.leaves, (trainer.params, expected)), strict=True):
        np.testing.assert_allclose(new, right, rtol=1e-5, atol=1e-6)


def test_alternating_shapes_train_like_one_shape_at_a_time():
    """A new shape flushes nothing it must not and loses no pending update."""
    batches = [CASE.batch(0), {"tokens": CASE.batch(1)["tokens"][:4]}, CASE.batch(2)]
    together = train(make_trainer(CASE, OPTIMIZERS["clip_adamw"]), batches, gradients=False)
    apart = make_trainer(CASE, OPTIMIZERS["clip_adamw"])
    for batch in batches:
        apart.step(batch)
        apart.flush()
    check_same_bits(together.params, apart.params)


@pytest.mark.by_default("adamw_schedule")
@pytest.mark.parametrize("optimizer", ["adamw_schedule", "clip_adamw"])
def test_a_shape_with_another_schedule_starts_from_rest(optimizer):
    """What stays on the device for one shape, another looks for in the host."""
    apart = make_trainer(UNET, OPTIMIZERS[optimizer])
    low, high = budgets(spec_of(apart).first)[0], budgets(spec_of(apart).first)[2]
    together = make_trainer(UNET, OPTIMIZERS[optimizer], budget=(low + high) // 2)
    rows = [2, 2, 8, 2, 8, 8]
    batches = [{"tokens": UNET.batch(seed)["tokens"][:n]} for seed, n in enumerate(rows)]
    losses = []
    for batch in batches:
        losses.append(apart.read(apart.step(batch))["loss"])
        apart.flush()
    run = train(together, batches, gradients=False)
    stays = [step.schedule.resident for step in steps_of(together)]
    assert len(stays) == 2 and stays[0] != stays[1]
    assert list(run.losses) == losses
    check_same_bits(run.params, apart.params)
    check_same_bits(run.opt_state, apart.opt_state)


def test_host_views_are_snapshots():
    trainer = make_trainer(CASE, OPTIMIZERS["adamw_schedule"])
    before = trainer.params
    copies = jax.tree.map(np.array, before)
    for seed in range(3):
        trainer.step(CASE.batch(seed))
    check_same_bits(before, copies)
    after = jax.tree.leaves(trainer.params)
    assert any((a != b).any() for a, b in zip(after, jax.tree.leaves(copies), strict=True))


def test_a_slab_is_gathered_once_for_all_its_leaves(monkeypatch):
    store, gathered = store_of(make_trainer(CASE, OPTIMIZERS["adam"])), []
    monkeypatch.setattr(type(store.placement), "num_processes", 2)
    monkeypatch.setattr(type(store.placement), "readable", lambda _, x: gathered.append(x) or x)
    parts = [store.at_rest(Key(Kind.MASTERS, group)) for group in (0, 1, 2)]
    for i in (0, 0, 1, 0, 1, 2, 1, 0):
        assert list(store._readable(parts[i])) == list(parts[i])
    # The copies of the last two are kept.
    assert list(map(id, gathered)) == [id(x) for i in (0, 1, 2, 0) for x in parts[i]]


def test_parameters_are_views_of_the_store():
    trainer = make_trainer(CASE, OPTIMIZERS["adamw_schedule"])
    host = store_of(trainer).host
    slabs = [np.asarray(s) for key in host if key.kind is Kind.MASTERS for s in host[key]]
    for leaf in jax.tree.leaves(trainer.params):
        assert any(np.shares_memory(leaf, slab) for slab in slabs)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("optimizer", "budget"), AT_ONCE_AND_DEFERRED)
def test_steps_leave_nothing_behind(optimizer, budget):
    trainer = make_trainer(CASE, OPTIMIZERS[optimizer], budget=budget)
    alive = []
    for seed in range(7):
        metrics = trainer.step(CASE.batch(seed))
        gc.collect()
        alive.append(len(jax.live_arrays()))
    trainer.read(metrics)
    assert alive[-1] == alive[-2] == alive[-3]


@pytest.mark.by_default("2-unet", "2-equinox")
@pytest.mark.parametrize("case", [UNET, CASES["equinox"]], ids=["unet", "equinox"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_values_that_no_schedule_counts_are_those_of_the_plan(microbatches, case, monkeypatch):
    trainer = make_trainer(case, OPTIMIZERS["adam"], microbatches=microbatches)
    seen, obey = {}, Engine.obey

    def seeing(engine, instruction, live):
        obey(engine, instruction, live)
        if live is not None:
            counted = live.step.workload.activations
            for number, row in enumerate(live.rows):
                seen.update({(number, i): x.nbytes for i, x in row.items() if i not in counted})

    monkeypatch.setattr(Engine, "obey", seeing)
    trainer.read(trainer.step(case.batch(0)))
    assert trainer.plan.device_other_bytes == sum(seen.values()) > 0


def test_an_evaluation_that_fails_leaves_nothing_behind(monkeypatch):
    """Wherever it is cut off, also while activations of it wait in the host."""
    case = UNET
    trainer = make_trainer(case, OPTIMIZERS["adam"], budget="least")
    trainer.read(trainer.step(case.batch(0)))
    expected = trainer.evaluate([case.batch(1)])
    store, obey = store_of(trainer), Engine.obey
    instructions = spec_of(trainer).first.schedule.evaluation
    waiting = 0
    for number in range(1, len(instructions), len(instructions) // 6):
        left = itertools.count(-number)

        def failing(engine, instruction, live, left=left):
            nonlocal waiting
            if next(left) == 0:
                waiting += any(key.kind not in LASTING for key in store.host)
                raise RuntimeError("cut off")
            obey(engine, instruction, live)

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "obey", failing)
            with pytest.raises(RuntimeError, match="cut off"):
                trainer.evaluate([case.batch(1)])
        assert not store.on_device and {key.kind for key in store.host} == set(LASTING)
    assert waiting and trainer.evaluate([case.batch(1)]) == expected


def test_an_error_in_the_last_updates_of_a_step_loses_the_state_until_one_is_restored(
    monkeypatch, tmp_path
):
    trainer = make_trainer(CASE, OPTIMIZERS["clip_adamw"])
    trainer.save(tmp_path / "before")
    trainer.step(CASE.batch(0))
    update = Engine._update
    monkeypatch.setattr(Engine, "_update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.flush()
    monkeypatch.setattr(Engine, "_update", update)
    for act in (trainer.flush, lambda: trainer.params, lambda: trainer.step(CASE.batch(1))):
        with pytest.raises(RuntimeError, match="lost.* step 1 "):
            act()
    trainer.restore(tmp_path / "before")
    assert trainer.read(trainer.step(CASE.batch(0)))["loss"] > 0
