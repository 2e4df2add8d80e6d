"""Processes that each hold all state: the plan of one, and its part of a batch's microbatches."""

import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import megatrain_jax as mt
import small
from boards import FakeBoard, present, processes_of
from inside import engine_of, num_parts_of, spec_of, store_of
from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.common.object_paths import UNFINISHED
from megatrain_jax._src.engine import start
from megatrain_jax._src.engine.checkpoint import folder, save
from megatrain_jax._src.engine.checkpoint.contents import entries_of
from megatrain_jax._src.engine.kernels import steps
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.spec.host import BETWEEN_PROCESSES_BYTES, COMMUNICATION_BYTES
from megatrain_jax._src.engine.spec.step_kernels import begin_kernel
from megatrain_jax._src.engine.state.placement import _ACROSS, _AXIS, Placement, placed_on
from megatrain_jax._src.engine.state.processes import PeerEndedError, Processes
from megatrain_jax._src.engine.train import run
from megatrain_jax._src.engine.train.series import RunCheckpoints
from messages import refuses
from optimizers import OPTIMIZERS
from runs import make_trainer
from zoo import CASES

pytestmark = pytest.mark.usefixtures("traced_once")

CASE = CASES["nnx_tied"]
ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


def plan_of(rows: int, *, optimizer: Any = ADAM, case: Any = CASE, **options: Any) -> mt.Plan:
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), case.batch(0)
    )
    precision = mt.Precision(compute=jnp.float32)
    hardware = mt.card("H100")
    return mt.plan(
        case.build,
        case.loss_fn,
        optimizer,
        batch,
        precision=precision,
        hardware=hardware,
        **options,
    )


@pytest.mark.parametrize("optimizer", [ADAM, CLIPPED], ids=["immediate", "deferred"])
def test_a_plan_is_that_of_one_host_and_the_sums_over_the_network(optimizer):
    one = plan_of(16, optimizer=optimizer, num_gpus=2)
    of_three = {"num_gpus": 2, "hosts": 3, "state_per_process": True}
    free, slow = (
        plan_of(48, optimizer=optimizer, **of_three, **network)
        for network in ({}, {"network": "8kb/s"})
    )
    same = {"hardware": one.hardware, "batch_size": one.batch_size, "workload": one.workload}
    differing = {"num_copies": 1, "summed_bytes": 0, "schedule": one.schedule}
    assert one.host_process_bytes is not None and free.host_process_bytes is not None
    more = BETWEEN_PROCESSES_BYTES - COMMUNICATION_BYTES
    assert free.host_process_bytes - one.host_process_bytes == more
    same |= {name: getattr(one, name) for name in ("host_process_bytes", "host_fixed_bytes")}
    assert dataclasses.replace(free, **same, **differing) == one
    assert (free.num_copies, free.batch_size) == (3, 3 * one.batch_size)
    # Of each byte of a gradient, a ring of three receives two thirds, to sum and again to copy.
    assert slow.workload is not None
    gradients = sum(slow.workload.sizes[g][Kind.GRADIENT] for g in slow.workload.trained_groups)
    assert slow.network_bytes == slow.summed_bytes == 2 * gradients * 2 * 2 // 3
    assert slow.seconds_per_step is not None and free.seconds_per_step is not None
    more = slow.seconds_per_step - free.seconds_per_step
    np.testing.assert_allclose(more, slow.network_bytes / 1000, rtol=1e-3)
    assert slow.bound == "collectives"


def test_sums_are_counted_without_a_known_card():
    trainer = make_trainer(CASE, OPTIMIZERS["adam"], progress=False)
    plan = make_plan(spec_of(trainer), num_copies=2)
    assert plan.hardware is None and plan.workload is not None
    gradients = sum(plan.workload.sizes[g][Kind.GRADIENT] for g in plan.workload.trained_groups)
    assert plan.network_bytes == gradients > 0


def test_weights_cross_the_network_only_if_hosts_share_the_state():
    options = {"num_gpus": 2, "hosts": 2, "network": "1Gb/s", "microbatches": 4}
    shared, own = (plan_of(16, state_per_process=own, **options) for own in (False, True))
    assert own.num_devices == shared.num_devices // 2
    assert shared.host_bytes / 2 < own.host_bytes <= shared.host_bytes  # four devices pad more
    assert own.network_bytes < shared.network_bytes / 4


def test_statistics_of_a_part_of_the_batch_are_refused():
    case = CASES["batchnorm_nnx"]
    with refuses(ValueError, "state_per_process=True", "state_per_process=False"):
        plan_of(16, case=case, hosts=2, state_per_process=True)
    plan_of(16, case=case, state_per_process=True)  # in a single process


@pytest.mark.by_default("dropout_linen")
@pytest.mark.parametrize("name", ["dropout_nnx", "dropout_linen"])
def test_each_process_has_its_microbatches_of_those_of_all(name):
    case = CASES[name]
    trainer = make_trainer(case, OPTIMIZERS["adam"], microbatches=4, progress=False)
    first, variables = spec_of(trainer).first, engine_of(trainer).store.variables
    batch, key = jax.tree.leaves(case.batch(1)), jax.random.key(3)

    def begun(microbatches: int, leaves: Any, placement: Placement) -> Any:
        step = dataclasses.replace(first, microbatches=microbatches)
        begin = KernelCache().get(begin_kernel(step, placement))
        return begin(variables, leaves, key, jnp.int32(5))

    mesh = Mesh(jax.devices()[:1], "data")
    whole = begun(4, batch, placed_on(mesh))
    for copy in range(2):
        part = [x[len(x) // 2 * copy : len(x) // 2 * (copy + 1)] for x in batch]
        own = dataclasses.replace(placed_on(mesh), processes=Processes(2, copy), across=mesh)
        rows, loss_seed, new = begun(2, part, own)
        expected = whole[0][2 * copy : 2 * copy + 2], whole[1], whole[2]
        jax.tree.map(assert_equal, (rows, loss_seed, new), expected)


def test_sums_and_means_are_those_over_the_processes():
    """Two processes with two devices each, all of them devices of this one."""
    devices, rng = np.array(jax.devices()[:4]).reshape(2, 2), np.random.default_rng(0)
    across = Mesh(devices, (_ACROSS, _AXIS))
    processes = Processes(2, 0)
    own = dataclasses.replace(
        placed_on(Mesh(devices[0], _AXIS)), processes=processes, across=across
    )
    divided = NamedSharding(across, PartitionSpec((_ACROSS, _AXIS)))
    gradients = [rng.normal(size=(2, 8)).astype(dtype) for dtype in ("float32", jnp.bfloat16)]
    joined = jax.device_put([x.reshape(-1) for x in gradients], divided)
    for found, x in zip(KernelCache().get(steps.summed(own))(joined), gradients, strict=True):
        assert found.sharding == own.over_copies(divided=True)
        assert_equal(found, x[0] + x[1])
    for at, shard in ((own.slabs_on_device, (4,)), (own.small_on_device, (8,))):
        x = jax.device_put(np.zeros(8), at)
        assert own._joined_sharding(x).shard_shape((16,)) == shard
    rows = {"loss": np.array([1, 3], "float32"), "weight": np.array([5, 6], "float32")}
    rows = jax.device_put(rows, NamedSharding(across, PartitionSpec(_ACROSS)))
    assert KernelCache().get(steps.row_means(own))(rows) == {"loss": 2, "weight": 11}


def test_a_run_over_a_single_copy_of_the_state_is_one_without_copies(monkeypatch):
    """Its gradients and means are summed over processes, of which there is one."""
    mesh = Mesh(jax.devices()[:2], "data")

    def over_copies(mesh, **options):
        found = placed_on(mesh)
        return dataclasses.replace(found, across=Mesh([found.devices], (_ACROSS, _AXIS)))

    def found():
        trainer = small.trainer(mesh=mesh, microbatches=2)
        records = [trainer.read(trainer.step(small.batch(seed))) for seed in range(2)]
        means = trainer.evaluate([small.batch(3)])
        return small.state(trainer), [row["loss"] for row in records], means["loss"]

    expected = found()
    monkeypatch.setattr(start, "placed_on", over_copies)
    jax.tree.map(np.testing.assert_array_equal, found(), expected)


def test_the_first_of_processes_that_each_hold_all_state_writes_it():
    trainer = small.trainer()
    entries, store = entries_of(spec_of(trainer)), store_of(trainer)
    for copies in (False, True):
        for index in range(2):
            processes = Processes(2, index)
            across: Any = Mesh(jax.devices()[:1], "data") if copies else None
            own = dataclasses.replace(store.placement, processes=processes, across=across)
            with mock.patch.object(store, "placement", own):
                parts = save._parts(spec_of(trainer), store, entries)
                assert num_parts_of(trainer) == (2 if copies else 1)
            groups = [g for groups, _ in parts for g in groups]
            assert sorted(groups) == ([] if copies and index else [0, 1])
            assert any(not groups for groups, _ in parts) == (index == 0)


def echoes(message: Any) -> Any:
    """The message of a peer, which finds what this process does; the first one found a folder."""
    found = {
        "the look at `checkpoint_dir`": ([], None),
        "the claim of megatrain-unfinished": [None] * 2,
    }
    return {**message, "value": found.get(message["where"], message["value"])}


@pytest.mark.parametrize("case", ["first", "other", "other, whose first is there", "shared"])
def test_the_last_step_is_saved_without_lost_peers_by_one_that_holds_all_state(case, tmp_path):
    index = 0 if case == "first" else 1
    processes = processes_of(FakeBoard({1 - index: echoes}), 2, index)
    trainer = small.trained()
    state, store, across = small.state(trainer), store_of(trainer), None
    if case != "shared":
        across = Mesh(jax.devices()[:1], "data")
    own = dataclasses.replace(store.placement, processes=processes, across=across)
    (tmp_path / UNFINISHED).mkdir()
    (tmp_path / UNFINISHED / "lock").touch()
    loop: Any = SimpleNamespace(trainer=trainer, finish=trainer.flush)
    error = PeerEndedError("process is lost")
    with ExitStack() as stack, mock.patch.object(store, "placement", own):
        series = stack.enter_context(RunCheckpoints(tmp_path, None, 2, processes))
        if "is there" in case:
            stack.enter_context(RunCheckpoints(tmp_path, None, 2, Processes()))
        (tmp_path / UNFINISHED / "checkpoint").mkdir()
        (tmp_path / UNFINISHED / "checkpoint/of-both").touch()
        present(processes).has_lost_service = True
        processes.give_up("it is lost")
        found = run._completed_alone(loop, series, error, processes)
        saves = case in ("first", "other")
        assert found is error and processes.is_alone == saves
        assert any("in use" in note for note in getattr(error, "__notes__", ())) == ("is" in case)
        if saves:
            series.save(trainer, {"batches": 2})
            series.finish()
    assert folder.steps(tmp_path) == [2] * saves
    if saves:
        again = small.trainer()
        again.restore(tmp_path / "2")
        jax.tree.map(np.testing.assert_array_equal, small.state(again), state)
        assert num_parts_of(again) == 1 and not (tmp_path / "2/of-both").exists()


def test_a_plan_counts_the_processes_that_share_the_state():
    processes, mesh = Processes(6, 4), Mesh(jax.devices()[:1], "data")
    processes.num_here = 2
    shared = dataclasses.replace(placed_on(mesh), processes=processes)
    assert (shared.process_counts, shared.num_copies, shared.copy) == ((6, 2), 1, 0)
    own = dataclasses.replace(shared, across=mesh)
    assert (own.process_counts, own.num_copies, own.copy) == ((1, 1), 6, 4)


def assert_equal(a: Any, b: Any) -> None:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_array_equal(a, b)
