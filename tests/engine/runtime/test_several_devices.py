"""Runs on a mesh of simulated devices give what plain JAX gives on one, and share their state."""

import dataclasses
import math
import random
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, AxisType, Mesh

import megatrain_jax as mt
from device_pairs import ILL_CONDITIONED, PAIRS
from inside import spec_of, store_of
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.options.inputs import check_mesh
from megatrain_jax._src.engine.runtime.evaluation import put_batch
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from megatrain_jax._src.engine.state.host_leaves import read_leaf, read_leaves, write_part
from megatrain_jax._src.engine.state.layout import ALIGNMENT, layout_of
from megatrain_jax._src.engine.state.placement import by_process, default_mesh, placed_on
from messages import refuses, tells
from optimizers import OPTIMIZERS
from oracle import train_exact, train_plain
from runs import (
    check_as_near,
    check_close,
    check_same_bits,
    make_trainer,
    recording,
    train,
    variables_of,
)
from slabs import unpacked
from zoo import CASES

TOLERANCE = 2e-6
NUM_STEPS = 3
# The first batch makes gradients of several cases that nearly cancel.
SEEDS = range(1, 1 + NUM_STEPS)


def mesh_of(num_devices: int) -> Mesh:
    return Mesh(jax.devices()[:num_devices], "data")


SAMPLE = {*random.Random(0).sample(PAIRS, 4), *(pair for pair in PAIRS if "batchnorm" in pair[0])}


@pytest.mark.parametrize("seed", range(20))
def test_a_mesh_is_of_this_process_or_of_equally_many_devices_of_each(seed, monkeypatch):
    rng = random.Random(seed)
    count, index = rng.randint(2, 4), rng.randrange(2)
    numbers = [rng.randint(0, 2) for _ in range(count)] if seed % 3 else [rng.randint(1, 3)] * count
    numbers[index] += not any(numbers)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    devices = [SimpleNamespace(process_index=i) for i, n in enumerate(numbers) for _ in range(n)]
    mesh: Any = SimpleNamespace(devices=np.array(devices), size=len(devices))
    is_right = numbers[index] == sum(numbers) or len({*numbers}) == 1
    with nullcontext() if is_right else refuses(ValueError, "`mesh`", f"{numbers[1]} of process 1"):
        check_mesh(mesh)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_small_values_of_several_processes_are_placed_as_those_of_one(num_devices):
    """All devices are of this process, so that it can read what it has placed."""
    of_one = placed_on(mesh_of(num_devices))
    several: Any = SimpleNamespace(count=2, index=0)
    placement = dataclasses.replace(of_one, processes=several)
    key = jax.random.key(3)
    keys = {"key": key, "keys": jax.random.split(key)}
    tree = keys | {"a": np.arange(6.0), "b": jnp.arange(3), "c": 2}
    for where in (of_one.small_at_rest, of_one.small_on_device):
        found, expected = placement.put(tree, where), of_one.put(tree, where)
        for name, x in found.items():
            assert x.dtype == expected[name].dtype and x.is_fully_replicated
            own, is_key = expected[name], jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            # Wrapping a key is a computation.
            assert x.sharding.memory_kind == "device" if is_key else x.sharding == own.sharding
            x, own = map(jax.random.key_data, (x, own)) if is_key else (x, own)
            np.testing.assert_array_equal(x, own)


@pytest.mark.parametrize("index", [0, 1])
def test_processes_move_and_read_slabs_and_parts_as_one_does(index):
    """All devices are of this process, in an order of the user's."""
    of_one = placed_on(Mesh([jax.devices()[i] for i in (2, 0, 3, 1)], "data"))
    several: Any = SimpleNamespace(count=2, index=index)
    placement = dataclasses.replace(of_one, processes=several)
    rng = np.random.default_rng(0)
    slabs = [rng.normal(size=size).astype(np.float32) for size in (8, 4)]
    at_rest = jax.device_put(slabs, of_one.slabs_at_rest)
    for found, slab in zip(placement.move(at_rest, of_one.slabs_on_device), slabs, strict=True):
        assert found.sharding == of_one.slabs_on_device
        np.testing.assert_array_equal(found, slab)
    shards = [dict(enumerate(np.split(slab, 4))) for slab in slabs]
    for where in (of_one.slabs_at_rest, of_one.slabs_on_device):
        for found, slab in zip(placement.put_shards(shards, where), slabs, strict=True):
            assert found.sharding == where
            np.testing.assert_array_equal(found, slab)
    for x, slab in zip(at_rest, slabs, strict=True):
        np.testing.assert_array_equal(placement.readable(x), slab)
        np.testing.assert_array_equal(placement.part_here(x), slab)
    whole = jax.device_put(slabs[0], of_one.small_on_device)
    np.testing.assert_array_equal(placement.part_here(whole), slabs[0][4 * index : 4 * index + 4])


def test_devices_are_those_of_each_process_in_order():
    numbers = [1, 0, 1, 2, 0, 2]
    devices = [SimpleNamespace(process_index=i, id=n) for n, i in enumerate(numbers)]
    found = [[device.id for device in row] for row in by_process(devices, 3)]
    assert found == [[1, 4], [0, 2], [3, 5]]


@pytest.mark.parametrize(("microbatches", "divided"), [(1, True), (2, True), (4, False)])
def test_a_batch_is_divided_if_its_microbatches_can_be(microbatches, divided):
    step: Any = SimpleNamespace(microbatches=microbatches)
    (found,) = put_batch({"x": np.zeros((8, 3))}, step, placed_on(mesh_of(4)))
    assert found.is_fully_replicated != divided


def test_pairs_cover_every_optimizer():
    assert {optimizer for _, optimizer in PAIRS} == set(OPTIMIZERS)


@pytest.mark.by_default("batchnorm_linen-adaptive_grad_clip")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [pair if pair in SAMPLE else pytest.param(*pair, marks=pytest.mark.long) for pair in PAIRS],
)
def test_four_devices_agree_with_plain_jax(name, optimizer):
    case = CASES[name]
    batches = [case.batch(seed) for seed in SEEDS]
    plain = train_plain(case, OPTIMIZERS[optimizer], batches)
    trainer = make_trainer(case, recording(OPTIMIZERS[optimizer]), mesh=mesh_of(4))
    run = train(trainer, batches)
    check_close(run.first_grads, plain.first_grads, TOLERANCE, "gradient")
    np.testing.assert_allclose(run.losses, plain.losses, rtol=1e-6)
    check_close(run.params, plain.params, TOLERANCE, "parameter")
    check_close(run.opt_state[1], plain.opt_state, 2 * TOLERANCE, "optimizer state")
    check_close(variables_of(trainer.model), plain.variables, TOLERANCE, "variable")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        name if number % 2 else pytest.param(name, marks=pytest.mark.long)
        for number, name in enumerate(ILL_CONDITIONED)
    ],
)
def test_four_devices_are_as_near_to_float64_as_plain_jax(name):
    case, batches = CASES[name], [CASES[name].batch(2)]
    plain, exact = (f(case, OPTIMIZERS["adam"], batches) for f in (train_plain, train_exact))
    trainer = make_trainer(case, recording(OPTIMIZERS["adam"]), mesh=mesh_of(4))
    run = train(trainer, batches)
    check_as_near(run.first_grads, plain.first_grads, exact.first_grads, TOLERANCE, "gradient")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize(("optimizer", "microbatches"), [("clip_adamw", 2), ("muon", 1)])
def test_budgets_do_not_change_a_bit(optimizer, microbatches):
    case = CASES["nnx_tied"]
    batches = [case.batch(seed) for seed in SEEDS]
    options: dict[str, Any] = {"microbatches": microbatches, "mesh": mesh_of(2)}
    first, *others = (
        make_trainer(case, OPTIMIZERS[optimizer], budget=budget, **options)
        for budget in ("least", 2**17, 2**40)
    )
    expected = train(first, batches, gradients=False)
    assert first.schedule.peak_bytes < others[-1].schedule.peak_bytes
    for other in others:
        check_same_bits(train(other, batches, gradients=False).params, expected.params)


@pytest.mark.exhaustive
def test_the_order_of_a_mesh_and_its_axes_change_nothing():
    case = CASES["moe"]
    batches = [case.batch(seed) for seed in SEEDS]
    square = np.array(jax.devices()[:4][::-1]).reshape(2, 2)
    runs = [
        train(make_trainer(case, OPTIMIZERS["clip_adamw"], mesh=mesh), batches, gradients=False)
        for mesh in (mesh_of(4), Mesh(square, ("a", "b")))
    ]
    check_same_bits(runs[0].params, runs[1].params)


def contrastive(params, batch):
    """Each row's own column is the right one: every example needs all others."""
    x, y = (jnp.tanh(batch[side] @ w) for side, w in params["towers"].items())
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ y.T, jnp.arange(len(x)))
    return losses.mean(), {"hardest": losses.max()}


def test_a_loss_that_couples_examples_stays_the_whole_batch_s():
    rng = np.random.default_rng(0)
    params = {"towers": {k: rng.normal(size=(6, 5)).astype(np.float32) for k in ("x", "y")}}
    batch = {k: rng.normal(size=(8, 6)).astype(np.float32) for k in ("x", "y")}
    precision = mt.Precision(compute=jnp.float32)
    trainer = mt.Trainer(
        params, contrastive, optax.sgd(1.0), batch, mesh=mesh_of(4), precision=precision
    )
    metrics = trainer.read(trainer.step(batch))
    (loss, aux), grads = jax.value_and_grad(contrastive, has_aux=True)(params, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["hardest"], aux["hardest"], rtol=1e-6)
    expected = jax.tree.map(lambda p, g: np.asarray(p - g), params, grads)
    check_close(trainer.params, expected, TOLERANCE, "parameter")


@dataclass(frozen=True)
class Device:
    platform: str
    id: int


@pytest.mark.parametrize(("platform", "expected"), [("gpu", 4), ("cpu", 1)])
def test_all_gpus_that_jax_sees_are_the_default(monkeypatch, platform, expected):
    monkeypatch.setattr(jax, "devices", lambda: [Device(platform, i) for i in range(4)])
    assert [device.id for device in default_mesh().devices.flat] == list(range(expected))


def test_each_device_holds_an_equal_share_and_nothing_twice():
    trainer = make_trainer(CASES["nnx_tied"], OPTIMIZERS["adam"], mesh=mesh_of(4))
    trainer.step(CASES["nnx_tied"].batch(0))
    trainer.flush()
    held = dict.fromkeys(jax.devices()[:4], 0)
    for slabs in store_of(trainer).host.values():
        for slab in slabs:
            assert slab.sharding.memory_kind == "pinned_host"
            for shard in slab.addressable_shards:
                held[shard.device] += shard.data.nbytes
    assert len(set(held.values())) == 1
    assert sum(held.values()) == trainer.plan.host_bytes


def test_a_kernel_gathers_once_and_sums_once():
    trainer = make_trainer(CASES["nnx_tied"], OPTIMIZERS["clip_adamw"], mesh=mesh_of(4))
    spec, store, cache = spec_of(trainer), store_of(trainer), KernelCache()
    most = {"forward": (1, 0), "backward": (1, 1), "update": (0, 0), "reduce": (0, 1)}
    seen = set()
    # CPUs sum and slice where GPUs scatter sums.
    for kernel in step_kernels(spec.first, spec.layouts, spec.optimizer, store.placement):
        takes: Any = kernel.takes
        text = cache.get(kernel).lower(*takes).compile().as_text()
        gathers, sums = (text.count(f" {op}(") for op in ("all-gather", "all-reduce"))
        slabs = len(takes[0]) if kernel.name in ("forward", "backward") else 1
        most_gathers, most_sums = most[kernel.name]
        assert gathers <= slabs * most_gathers and sums <= most_sums, kernel.name
        assert "all-to-all" not in text and "collective-permute" not in text, kernel.name
        seen.add(kernel.name)
    assert seen == set(most)


@pytest.mark.parametrize("seed", range(6))
def test_shards_hold_shares_of_every_leaf(seed):
    rng = random.Random(seed)
    shards = rng.randint(2, 6)
    shapes = [tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3))) for _ in range(7)]
    layout = layout_of(shapes, "float32", shards)
    leaves = [np.asarray(np.random.default_rng(seed).normal(size=s), np.float32) for s in shapes]
    slab = np.asarray(jax.jit(layout.pack)(leaves))
    assert slab.size == layout.size and not layout.size % (shards * ALIGNMENT)
    filled = np.zeros_like(slab)
    for i, leaf in enumerate(leaves):
        write_part(layout, [filled], i, 0, [(0, leaf.reshape(-1))])
    np.testing.assert_array_equal(filled, slab)
    order = rng.sample(range(len(shapes)), 4)
    gather = jax.jit(lambda slab: layout.unpack_whole([slab], order, "float32", lambda x: x))
    unpack = jax.jit(lambda slab: [unpacked(layout, slab, i) for i in order])
    read = read_leaves(layout, [slab])
    for i, gathered, own in zip(order, gather(slab), unpack(slab), strict=True):
        for found in (gathered, own, read[i], read_leaf(layout, [slab], i)):
            np.testing.assert_array_equal(found, leaves[i])
    for shape, share in zip(shapes, layout.shares, strict=True):
        assert math.prod(shape) <= share * shards
        if shape and not shape[0] % shards:
            assert share == math.prod(shape) // shards, "whole rows of the first axis"


@pytest.mark.exhaustive
def test_checkpoints_go_from_any_number_of_devices_to_any_other(tmp_path):
    case = CASES["nnx_tied"]
    batches = [case.batch(seed) for seed in range(4)]
    trainers = {n: make_trainer(case, OPTIMIZERS["clip_adamw"], mesh=mesh_of(n)) for n in (4, 1)}
    for batch in batches[:2]:
        trainers[4].read(trainers[4].step(batch))
    trainers[4].save(tmp_path / "four")
    trainers[1].restore(tmp_path / "four")
    check_same_bits(trainers[1].params, trainers[4].params)
    check_same_bits(trainers[1].opt_state, trainers[4].opt_state)
    trainers[1].save(tmp_path / "one")
    trainers[4].restore(tmp_path / "one")
    check_same_bits(trainers[4].params, trainers[1].params)
    for batch in batches[2:]:
        losses = [t.read(t.step(batch))["loss"] for t in trainers.values()]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


@pytest.mark.exhaustive
def test_an_evaluation_takes_batches_that_do_not_divide():
    case = CASES["nnx_tied"]
    batches = [case.batch(0), jax.tree.map(lambda x: x[:3], case.batch(1))]
    found = [
        make_trainer(case, OPTIMIZERS["adam"], mesh=mesh_of(n)).evaluate(batches) for n in (1, 4)
    ]
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        np.testing.assert_allclose(found[1][key], value, rtol=1e-6)


def test_a_batch_that_devices_cannot_share_is_named():
    case = CASES["nnx_tied"]
    with refuses(ValueError, 3, 8, "devices"):
        make_trainer(case, OPTIMIZERS["adam"], mesh=mesh_of(3))
    with refuses(ValueError, "`microbatches`=4", 16):
        make_trainer(case, OPTIMIZERS["adam"], mesh=mesh_of(4), microbatches=4)
    with refuses(ValueError, 5, "batch['x']") as caught:
        params, odd = {"w": np.ones((3, 3), np.float32)}, [{"x": np.ones((5, 3), np.float32)}]
        mt.fit(params, lambda params, batch: 0.0, odd, optax.sgd(0.1), mesh=mesh_of(2))
    (note,) = caught.value.__notes__
    assert tells(note, "`data`", 1)
    with refuses(ValueError, "`plan`", "AbstractMesh"):
        make_trainer(case, OPTIMIZERS["adam"], mesh=AbstractMesh((2,), ("data",)))


def test_a_plan_divides_what_the_devices_share():
    def build():
        return {"layers": [{"w": jnp.zeros((256, 1024))} for _ in range(8)]}

    def loss_fn(params, batch):
        x = batch
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"]) @ layer["w"].T
        return (x**2).mean()

    batch = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    run, mesh = (build, loss_fn, optax.adamw(1e-3), batch), AbstractMesh((4,), ("data",))
    one, four = (mt.plan(*run, hardware="H200", mesh=mesh) for mesh in (None, mesh))
    waves = mt.plan(*run, hardware="H200", mesh=mesh, microbatches=2, waves=2)
    assert four.num_devices == 4 and four.host_bytes == one.host_bytes
    assert four.flops_per_step == one.flops_per_step
    assert one.seconds_compute is not None and four.seconds_compute is not None
    assert one.seconds_compute == pytest.approx(4 * four.seconds_compute)
    assert (four.bytes_in, four.bytes_out) == (one.bytes_in // 4, one.bytes_out // 4)
    assert one.host_share_bytes == one.host_bytes == 4 * four.host_share_bytes
    # Seven forwards and eight backwards gather a layer in bf16, which gives eight gradients.
    assert four.collective_bytes == (7 + 8 + 8) * 3 * (256 * 1024 * 2) // 4
    assert one.collective_bytes == 0 and waves.collective_bytes == 2 * four.collective_bytes
    assert one.hardware == mt.card("H200")
    assert four.hardware == mt.card("H200").times(4)
    assert "4 × NVIDIA H200" in str(four) and "×" not in str(one)


def test_a_loss_in_a_mesh_of_its_own_is_refused():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])

    def loss_fn(params, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return ((batch @ params["w"]) ** 2).mean()

    params, batch = {"w": np.ones((3, 3), np.float32)}, np.ones((4, 3), np.float32)
    with refuses(ValueError, "mesh", 1, "d"):
        mt.Trainer(params, loss_fn, optax.sgd(0.1), batch, mesh=mesh_of(2))


ORDERED = {
    "jax.debug.print('x {}')": lambda x: jax.debug.print("x {}", x, ordered=True),
    "jax.debug.callback": lambda x: jax.debug.callback(see, x, ordered=True),
    "io_callback(see)": lambda x: io_callback(see, None, x, ordered=True),
}


def see(value):
    """Takes a value from the device."""


@pytest.mark.parametrize("within", [lambda f: f, jax.jit], ids=["bare", "jit"])
@pytest.mark.parametrize("name", ORDERED)
def test_ordered_callbacks_are_refused_by_name(name, within):
    def loss_fn(params, batch):
        def run(x):
            ORDERED[name](x.sum())
            return x @ params["w"]

        return (within(run)(batch) ** 2).mean()

    params, batch = {"w": np.ones((3, 3), np.float32)}, np.ones((4, 3), np.float32)
    several = AbstractMesh((2,), ("data",))
    with refuses(ValueError, "loss_fn", name, "ordered=True"):
        mt.plan(params, loss_fn, optax.sgd(0.1), batch, mesh=several)
    assert mt.plan(params, loss_fn, optax.sgd(0.1), batch).num_stages == 1
    trainer = mt.Trainer(params, lambda p, b: (p["w"] @ b.T).mean(), optax.sgd(0.1), batch,
        mesh=mesh_of(2), progress=False)  # fmt: skip
    with refuses(ValueError, "`ordered`"):
        trainer.evaluate([batch], loss_fn)


def test_a_process_of_several_reads_parameters_onto_a_device_of_its_own(monkeypatch):
    """Arrays of all processes' devices could only be used by all of them together."""
    trainer = mt.Trainer(
        {"w": np.arange(6, dtype=np.float32).reshape(3, 2)},
        lambda model, batch: (batch["x"] @ model["w"]).mean(),
        optax.sgd(0.1),
        {"x": np.ones((4, 3), np.float32)},
        mesh=mesh_of(2),
        progress=False,
    )
    copy = trainer.compute_copy()
    unread = [x for x in jax.tree.leaves(copy.model) if hasattr(x, "number")]
    whole = copy.read(unread)
    monkeypatch.setattr(trainer.processes, "count", 2)
    own = copy.read(unread)
    assert unread and all(x.devices() == {copy.device} for x in own)
    for x, y in zip(whole, own, strict=True):
        assert len(x.devices()) == 2
        np.testing.assert_array_equal(x, y)
