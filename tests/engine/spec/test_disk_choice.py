"""Which state rests on disks, and how a run with disks fits in its host."""

import dataclasses
import functools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import megatrain_jax as mt
from disks import ALL, parts_on_disk
from megatrain_jax._src.common.keys import LASTING, PASSING, Kind
from megatrain_jax._src.engine.options.options import MachineOptions, Options
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.schedule.choices import Choice
from megatrain_jax._src.engine.schedule.workload import SLOTS
from megatrain_jax._src.engine.spec import host
from megatrain_jax._src.engine.spec.costs import disk_link
from megatrain_jax._src.engine.spec.disk import state_for_disks
from megatrain_jax._src.engine.spec.host import fit_new_shape_to_host, fit_to_host
from megatrain_jax._src.engine.spec.rescheduled import (
    with_state_on_disk,
    workload_with_recomputed_spans,
)
from messages import refuses
from runs import make_spec
from zoo_case import Case

pytestmark = pytest.mark.usefixtures("traced_once")

DIM, BLOCKS = 512, 24
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
MACHINE = dataclasses.replace(mt.card("RTX 4090"), host_bytes=10 * 2**30)


def _build(dim: int = DIM) -> Any:
    return {"layers": [{"w": jnp.zeros((dim, dim))} for _ in range(BLOCKS)]}


def _loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    return (x**2).mean()


CASE = Case(
    name="row",
    build=_build,
    loss_fn=_loss,
    blocks=BLOCKS,
    templates=1,
    batch=lambda seed: {"x": np.zeros((8, DIM), np.float32)},
)


@functools.cache
def _planned(host_gib: float, rows: int = 64, **options: Any) -> Any:
    """A plan of 1.6B parameters: 18 GiB of state, and 3 of gradients that wait."""
    shape = {"x": jax.ShapeDtypeStruct((rows, 8192), jnp.bfloat16)}
    given: Any = {"disk": "4GB/s read, 2GB/s write", "device_budget": "minimum"} | options
    return mt.plan(
        lambda: _build(8192), _loss, CLIPPED, shape, hardware=MACHINE, host_gib=host_gib, **given
    )


@pytest.fixture(scope="module")
def spec() -> Any:
    return make_spec(CASE, lambda _: CLIPPED)


@pytest.mark.parametrize("seed", range(20))
def test_the_memory_that_is_missing_is_freed(spec: Any, seed: int):
    workload, rng = spec.first.workload, random.Random(seed)
    everything = sum(size for row in workload.sizes for size in row.values())
    lacking = rng.randrange(1, everything // 2)
    on_disk = state_for_disks(spec, lacking)
    assert on_disk is not None
    resting = dataclasses.replace(workload, on_disk=on_disk).resting_bytes
    waiting = sum(workload.size(key) for key in on_disk if key.kind not in LASTING)
    assert workload.resting_bytes + waiting - resting >= lacking
    # No more than that, but for one part of each class.
    classes = {number: workload.size(key) for key, number in on_disk.items()}
    assert workload.resting_bytes + waiting - resting < lacking + sum(classes.values())


def test_optimizer_state_comes_first_and_is_spread_over_the_groups(spec: Any):
    workload = spec.first.workload
    size = next(s for s in (row[Kind.OPTIMIZER_STATE] for row in workload.sizes))
    on_disk = state_for_disks(spec, 4 * size) or {}
    assert {key.kind for key in on_disk} == {Kind.OPTIMIZER_STATE}
    groups = sorted(key.owner for key in on_disk)
    assert len(groups) == 4 + 2 * SLOTS
    assert max(b - a for a, b in zip(groups, groups[1:], strict=False)) <= 4


def test_the_largest_kind_of_parts_comes_first():
    wide = {"a": jnp.zeros((DIM, 2 * DIM)), "b": jnp.zeros((2 * DIM, DIM))}
    layers = [{"w": jnp.zeros((DIM, DIM))}, wide] * 8

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in params["layers"]:
            for name in layer:
                x = x @ layer[name]
        return (x**2).mean()

    case = dataclasses.replace(
        CASE, name="two kinds", build=lambda: {"layers": layers}, loss_fn=loss, blocks=16
    )
    spec = make_spec(case, lambda _: CLIPPED)
    workload = spec.first.workload
    on_disk = state_for_disks(spec, 1) or {}
    largest = max(row[Kind.OPTIMIZER_STATE] for row in workload.sizes)
    assert {workload.size(key) for key in on_disk} == {largest}


def test_more_than_all_state_can_t_be_freed(spec: Any):
    workload = spec.first.workload
    everything = sum(size for row in workload.sizes for size in row.values())
    assert state_for_disks(spec, everything) is None


def test_frozen_weights_come_first_and_are_only_read():
    spec = make_spec(CASE, lambda _: CLIPPED, trainable="layers/(0|1|2|3|4|5)/")
    on_disk = state_for_disks(spec, 2**20) or {}
    assert on_disk and {key.owner for key in on_disk} <= spec.grouping.frozen
    workload = dataclasses.replace(spec.first.workload, on_disk=on_disk)
    size = workload.size(next(iter(on_disk)))
    freed = spec.first.workload.resting_bytes - workload.resting_bytes
    assert freed == (len(on_disk) - SLOTS) * size


@pytest.mark.by_default("16")
@pytest.mark.parametrize("host_gib", [12, 16, 20])
def test_a_run_fits_with_a_disk_where_it_does_not_without(host_gib: float):
    plan = _planned(host_gib)
    assert plan.fits and plan.disk_bytes > 0
    assert plan.host_bytes + plan.disk_bytes == 12 * plan.num_parameters
    assert plan.host_process_bytes <= host_gib * 2**30
    assert _planned(host_gib, disk=None).fits_host is False
    read, written = plan.seconds_disk
    assert read == pytest.approx(plan.disk_read_bytes / 4e9)
    assert written == pytest.approx(plan.disk_written_bytes / 2e9)
    assert plan.seconds_per_step >= 0.999 * max(read, written)
    # All that is written was read, and the rest of the host's memory is used.
    assert plan.disk_written_bytes <= plan.disk_read_bytes
    assert plan.host_process_bytes > plan.host_process_limit - 2**31


def test_less_memory_and_a_slower_disk_take_longer():
    seconds = [_planned(gib).seconds_per_step for gib in (12, 16, 20)]
    assert seconds == sorted(seconds, reverse=True)
    slow = _planned(16, disk="1GB/s").seconds_per_step
    assert slow > 1.5 * seconds[1]


def test_blocks_are_computed_again_where_disks_are_not_enough():
    plan = _planned(18, rows=2**15)  # 12 GiB of inputs
    assert plan.fits and plan.disk_bytes > 0 and plan.num_again > 0
    assert _planned(24, rows=2**15).num_again == 0


def test_activations_wait_on_fast_disks():
    plan = _planned(18, rows=2**15, disk="40GB/s")
    assert plan.fits and plan.num_again == 0 and plan.host_process_bytes <= 18 * 2**30
    waiting = {key for key in plan.workload.on_disk if key.kind is Kind.ACTIVATION}
    num_bytes = sum(map(plan.workload.size, waiting))
    assert num_bytes > 6 * 2**30 and plan.host_activation_bytes > 0, "memory stays full"
    assert plan.disk_written_bytes > plan.disk_bytes + num_bytes / 2
    # On disks that are too slow for them, computing blocks again is faster.
    slow = _planned(18, rows=2**15)
    assert not any(key.kind is Kind.ACTIVATION for key in slow.workload.on_disk)


def test_state_goes_to_disks_before_activations(spec: Any):
    workload = spec.first.workload
    everything = sum(size for row in workload.sizes for size in row.values())
    kinds = [{k.kind for k in state_for_disks(spec, n) or {}} for n in (1, everything // 2)]
    assert all(Kind.ACTIVATION not in found for found in kinds)


def test_what_is_computed_again_does_not_wait_on_disks(spec: Any):
    again = workload_with_recomputed_spans(spec.first, 2).again
    dropped = {i for stage in again for i in spec.first.workload.makes[stage]}
    waiting = {key.owner for key in parts_on_disk(spec, ALL, again) if key.kind in PASSING}
    assert waiting and waiting == spec.first.workload.activations.keys() - dropped


def test_what_may_stay_on_the_device_does_not_depend_on_activations_on_disks(spec: Any):
    workload = spec.first.workload
    waiting = {key: n for key, n in parts_on_disk(spec, ALL).items() if key.kind in PASSING}
    units = Choice(step=dataclasses.replace(workload, on_disk=waiting)).units
    assert waiting and units == Choice(step=workload).units


def test_an_activation_with_the_number_of_a_frozen_group_is_written():
    spec = make_spec(CASE, lambda _: CLIPPED, trainable="layers/(0|1|2|3|4|5)/")
    keys = [key for key in parts_on_disk(spec, ALL) if key.kind is Kind.ACTIVATION]
    assert {key.owner for key in keys} & spec.grouping.frozen
    assert {spec.first.workload.slots(key) for key in keys} == {2 * SLOTS}


def test_a_host_that_suffices_needs_no_disk():
    with_disk, without = _planned(64), _planned(64, disk=None)
    assert with_disk.disk_bytes == 0
    assert with_disk.seconds_per_step == without.seconds_per_step


@pytest.mark.parametrize(
    ("given", "named"),
    [({}, "GB/s"), ({"disk_dir": ("/tmp",), "disk_budget": 2**20}, "`disk_budget`")],
    ids=["none", "little"],
)
def test_a_refusal_says_what_a_disk_would_do(
    given: Any, named: str, monkeypatch: pytest.MonkeyPatch
):
    spec = make_spec(CASE, lambda _: CLIPPED, hardware=MACHINE)
    small = dataclasses.replace(spec.options, host_budget=2**32 + 2**20, **given)
    monkeypatch.setattr(host.HostProcess, "needed", lambda self, n: n + 2**32 - 2**25)
    with refuses(MemoryError, "`disk_dir`", named):
        host.check_host(dataclasses.replace(spec, options=small), 1, 1)


@pytest.mark.parametrize(
    ("given", "read", "written"),
    [
        ("7GB/s read, 2GB/s write", 7e9, 2e9),
        ("2GB/s write, 7GB/s read", 7e9, 2e9),
        ("16Gb/s", 2e9, 2e9),
        (3e9, 3e9, 3e9),
    ],
)
def test_rates_of_a_disk_are_read(given: Any, read: float, written: float):
    run = MachineOptions(disk=given).applied(Options(hardware="H100"))
    assert run.machine is not None
    rates = run.machine.disk_read_bytes_per_s, run.machine.disk_write_bytes_per_s
    assert rates == (read, written) and run.has_disk


@pytest.mark.parametrize("given", [(None, 2e9), ("2GB/s", None), (None, None)])
def test_a_disk_has_both_rates_or_is_none(given: Any):
    with refuses(TypeError, "`disk`"):
        MachineOptions(disk=given)


@pytest.mark.parametrize(("given", "fits"), [(None, True), (2**35, True), (2**30, False)])
def test_no_more_goes_to_disks_than_the_budget_allows(given: int | None, fits: bool, tmp_path: Any):
    plan = _planned(16, disk_dir=str(tmp_path), disk_budget=given)
    assert plan.fits_host is fits
    assert not fits or given is None or plan.disk_bytes <= given


def test_what_can_t_be_pinned_rests_in_a_folder_in_memory(monkeypatch: pytest.MonkeyPatch):
    free, machine = 40 * 2**30, dataclasses.replace(MACHINE, host_bytes=64 * 2**30)
    spec = make_spec(CASE, lambda _: CLIPPED, hardware=machine)
    monkeypatch.setattr(host, "available_bytes", lambda: free)
    whole = fit_to_host(spec)
    assert whole is not None and not whole.on_disk
    needed = host.host_process(whole, 1, 1).pool_bytes(host.peak_bytes(whole.first))
    slow, fast = (
        dataclasses.replace(
            machine, disk_read_bytes_per_s=x, disk_write_bytes_per_s=x, disk_bytes_per_s=x
        )
        for x in (1e6, 1e11)
    )
    limited = host.within_pinned(spec, needed // 2, fast)
    found = fit_to_host(limited)
    assert found is not None and found.on_disk
    process, peak = host.host_process(found, 1, 1), host.peak_bytes(found.first)
    assert process.pool_bytes(peak) <= needed // 2
    plan = make_plan(found)
    on_drive = dataclasses.replace(found.options, disk_dir="/tmp")
    on_drive = make_plan(dataclasses.replace(found, options=on_drive)).host_process_bytes
    assert on_drive and plan.host_process_bytes == on_drive + plan.unpinned_bytes
    assert plan.unpinned_bytes >= plan.disk_bytes > 0
    assert sum(plan.host_parts.values()) == plan.host_process_bytes
    assert plan.fits_host and plan.host_budget == free and "disk," not in str(plan)
    slower = fit_to_host(host.within_pinned(spec, needed // 2, slow))
    assert found.first.schedule.seconds < slower.first.schedule.seconds / 2
    assert limited.options.host_bytes is not None and limited.options.disk_bytes is not None
    assert limited.options.host_bytes + limited.options.disk_bytes == free
    options = dataclasses.replace(spec.options, host_budget=free // 4)
    limited = host.within_pinned(dataclasses.replace(spec, options=options), needed // 2, machine)
    assert limited.options.host_bytes is not None and limited.options.disk_bytes is not None
    assert limited.options.host_bytes + limited.options.disk_bytes == free // 4


def test_the_budget_of_disks_is_that_of_all_devices_of_a_process():
    spec = make_spec(
        CASE, lambda _: CLIPPED, device_budget=14 * 2**20, mesh=AbstractMesh((2,), ("data",))
    )

    def bytes_on_disks(disk_budget: int | None) -> int:
        given: Any = {"host_budget": 100 * 2**20, "disk_dir": ("/tmp",), "disk_budget": disk_budget}
        options = dataclasses.replace(spec.options, **given)
        run = fit_to_host(dataclasses.replace(spec, base_bytes=0, options=options))
        return 0 if run is None else 2 * sum(map(run.first.workload.size, run.on_disk))

    num_bytes = bytes_on_disks(None)
    assert bytes_on_disks(num_bytes * 2 // 3) <= num_bytes * 2 // 3


@pytest.mark.by_default("256")
@pytest.mark.parametrize("rows", [8, 256])
def test_batches_of_another_shape_move_no_state(rows: int):
    spec = make_spec(CASE, lambda _: CLIPPED, device_budget=14 * 2**20)
    options = dataclasses.replace(spec.options, host_budget=78 * 2**20, disk_dir=("/tmp",))
    fitted = fit_to_host(dataclasses.replace(spec, base_bytes=0, options=options))
    assert fitted is not None and fitted.on_disk
    batch = {"x": jax.ShapeDtypeStruct((rows, DIM), jnp.float32)}
    step = fitted.bound_step(batch, train=True, loss_fn=fitted.loss_fn)
    if rows == 256:  # what waits of these takes more memory than state leaves
        with refuses(MemoryError, "shape"):
            fit_new_shape_to_host(step, fitted, 1, 1, training=True)
    else:
        step = fit_new_shape_to_host(step, fitted, 1, 1, training=True)
    assert step.workload.on_disk == fitted.on_disk


def test_gradients_on_disks_take_no_memory_beside_their_slots(spec: Any):
    on_disk = parts_on_disk(spec, ALL)
    first = with_state_on_disk(spec.first, on_disk, frozenset(), spec.budget_bytes, math.inf)
    assert spec.first.schedule.transient.gradients > 0 == first.schedule.transient.gradients


def test_the_clock_has_each_device_s_share_of_its_host_s_disks():
    rates: Any = {"disk_read_bytes_per_s": 4e9, "disk_write_bytes_per_s": 2e9}
    link = disk_link(dataclasses.replace(MACHINE, disk_bytes_per_s=5e9, **rates), 4)
    assert (link.read, link.written, link.shared) == (1e-9, 2e-9, 0.8e-9)
