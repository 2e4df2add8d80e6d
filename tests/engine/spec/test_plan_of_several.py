"""What a plan of several devices says: what each has and moves, what they send each other."""

import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import megatrain_jax as mt
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.liveness import temporary_bytes
from megatrain_jax._src.engine.kernels.sharding_prediction import sharded_axes
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.report.plan import UNUSED_PARTS
from megatrain_jax._src.engine.schedule.clock import Clock
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.workload import Costs, Link
from megatrain_jax._src.engine.spec.costs import find_costs
from megatrain_jax._src.engine.spec.host import (
    BETWEEN_PROCESSES_BYTES,
    COMMUNICATION_BYTES,
    host_process,
)
from megatrain_jax._src.engine.spec.step_kernels import stage_kernel, step_kernels
from megatrain_jax._src.engine.state import pool, pool_limit
from megatrain_jax._src.engine.state.hardware import Hardware
from megatrain_jax._src.engine.state.placement import placed_on
from messages import tells
from optimizers import OPTIMIZERS
from plans import small_plan
from quantities import has_row, quantities, title_of
from runs import make_spec
from zoo import CASES

pytestmark = pytest.mark.usefixtures("traced_once")

NUM_DEVICES = 4
FOUR = AbstractMesh((NUM_DEVICES,), ("data",))
# Four devices divide all its leaves by rows, so that they send each other no padding.
CASE = CASES["nnx_tied"]
MACHINE = Hardware(
    name="Made up",
    host_bytes=10**9,
    device_bytes=10**9,
    link_bytes_per_s=10.0,
    host_bytes_per_s=40.0,
    peer_bytes_per_s=10.0,
    flops_per_s=100.0,
    sustained=1.0,
)


def plan_of(mesh: Any, **options: Any) -> mt.Plan:
    options = {
        "precision": mt.Precision(compute=jnp.float32),
        "hardware": mt.card("H200"),
        **options,
    }
    return mt.plan(CASE.build, CASE.loss_fn, optax.adam(1e-3), CASE.batch(0), mesh=mesh, **options)


@pytest.fixture(scope="module")
def spec():
    """A run of two microbatches on four simulated devices."""
    mesh = Mesh(jax.devices()[:NUM_DEVICES], "data")
    return make_spec(CASE, OPTIMIZERS["adam"], mesh=mesh, microbatches=2)


@pytest.fixture(scope="module")
def programs(spec):
    """Each different kernel of that run, compiled."""
    cache, placement = KernelCache(), placed_on(Mesh(jax.devices()[:NUM_DEVICES], "data"))
    kernels = step_kernels(spec.first, spec.layouts, spec.optimizer, placement)
    different = {(kernel.name, kernel.key): kernel for kernel in kernels}
    return {
        key: (kernel, cache.get(kernel).lower(*kernel.takes or ()).compile())
        for key, kernel in different.items()
    }


def received_bytes(text: str) -> int:
    """Bytes that a device receives in the collectives of a compiled program of four devices."""
    found = 0
    for results in re.findall(r" = (.*) (?:all-gather|all-reduce|reduce-scatter)\(", text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]+)\]", results):  # scalars aside
            size = math.prod(map(int, shape.split(",")))
            found += size * jnp.dtype({"f32": "float32", "s32": "int32"}[dtype]).itemsize
    return found * (NUM_DEVICES - 1) // NUM_DEVICES


def test_collectives_are_those_of_the_compiled_programs(spec, programs):
    step, placement = spec.first, placed_on(Mesh(jax.devices()[:NUM_DEVICES], "data"))
    received = 0
    for instruction in step.schedule.steady:
        if instruction.op in (Op.FORWARD, Op.BACKWARD) and instruction.stage is not None:
            kernel = stage_kernel(step, instruction.op, instruction.stage, placement)
            _, program = programs[kernel.name, kernel.key]
            received += step.microbatches * received_bytes(program.as_text())
    assert make_plan(spec).collective_bytes == received > 0
    in_waves = make_spec(CASE, OPTIMIZERS["adam"], mesh=FOUR, microbatches=2, waves=2)
    assert make_plan(in_waves).collective_bytes == received


def test_temporaries_are_near_what_compiled_programs_need(spec, programs):
    rows = [(k.beside_bytes, c.memory_analysis()) for k, c in programs.values()]
    needed = max(beside + stats.temp_size_in_bytes for beside, stats in rows)
    kernels = step_kernels(spec.first, spec.layouts, spec.optimizer, placed_on(FOUR))
    estimated = KernelCache().estimate(kernels)
    assert 1.0 <= estimated / needed <= 2.0


def test_axes_that_devices_divide_are_followed():
    placement = placed_on(AbstractMesh((2,), ("data",)))

    def sums(y):
        return jax.lax.scan(lambda carry, row: (carry + row, carry), jnp.zeros(8), y)[0]

    def row_or_sine(carry, row):
        # A branch hands on the row itself, so no operation decides about its axes.
        return carry + row, jax.lax.cond(carry[0, 0] > 0, lambda row: row, jnp.sin, row)

    def function(x, w, slab):
        w = w + placement.whole(slab).reshape(8, 8)
        y = jnp.einsum("btd,df->bft", x, w)
        return (
            y.transpose(2, 0, 1),
            jnp.einsum("btd,bft->df", x, y),
            y.max(axis=1),
            y.sum(axis=0),
            y.reshape(-1, 8, 2, 4),
            placement.spread(w.reshape(-1)),
            jax.lax.scan(row_or_sine, jnp.zeros((8, 8)), y)[1],
            jax.vmap(sums)(y),
            jax.lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, y),
            jnp.zeros((8, 8)).at[jnp.arange(4)].add(y[:, 0]),
            jax.jit(jnp.tanh)(y),
        )

    x, w, slab = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 8, 8), (8, 8), (64,)))
    jaxpr = jax.make_jaxpr(function)(x, w, slab).jaxpr
    axes = sharded_axes(jaxpr, {jaxpr.invars[0]: 0, jaxpr.invars[2]: 0}, 2)
    found = [axes.get(v) for v in jaxpr.outvars]
    assert found == [1, None, 0, None, 0, 0, None, 0, 0, None, 0]


# Of x f32[8, 6], divided along its first axis: operations that keep, move and lose the division.
DIVIDED = {
    "accumulated": lambda x: jnp.cumsum(x, 1),
    "accumulated over rows": lambda x: jnp.cumsum(x, 0),
    "chosen": lambda x: x[jnp.arange(8)[::-1]],
    "columns": lambda x: jnp.unstack(x, axis=1)[0],
    "flat": lambda x: x.reshape(-1),
    "halves": lambda x: x.reshape(-1).reshape(2, -1),
    "largest": lambda x: x.argmax(1),
    "lined up": lambda x: jnp.concatenate([x, x], 0),
    "padded": lambda x: jnp.pad(x, ((1, 1), (0, 0))),
    "product": lambda x: x.T @ x,
    "sorted": lambda x: jnp.sort(x, 1),
    "sorted rows": lambda x: jnp.sort(x, 0),
    "stacked": lambda x: jnp.stack([x, 2 * x]),
    "taken along": lambda x: jnp.take_along_axis(x, jnp.zeros((8, 2), int), 1),
    "taken by": lambda x: jnp.ones(4)[(3 * x[:, 0]).astype(int)],
    "transposed": lambda x: x.T,
    "written": lambda x: jax.lax.dynamic_update_slice(jnp.zeros((8, 12)), x, (0, 2)),
    "written at places": lambda x: jnp.zeros((8, 12)).at[:, jnp.array([5, 1, 2, 3, 4, 7])].set(x),
    "written row by row": lambda x: jax.vmap(lambda row: jnp.zeros(9).at[row.astype(int)].set(row))(
        x
    ),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_no_array_is_taken_for_divided_that_xla_leaves_whole(name):
    mesh = Mesh(jax.devices()[:NUM_DEVICES], "data")
    x = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    jaxpr = jax.make_jaxpr(DIVIDED[name])(x).jaxpr
    (result,) = jaxpr.outvars
    axis = sharded_axes(jaxpr, {jaxpr.invars[0]: 0}, NUM_DEVICES).get(result)
    spec = jax.jit(DIVIDED[name]).lower(x).compile().output_shardings.spec
    assert axis is None or spec[axis] == "data"


def test_a_loop_over_chunks_of_the_batch_gathers_it():
    def function(x):
        return jax.lax.map(lambda row: jnp.sort(row), x.reshape(4, 16))

    jaxpr = jax.make_jaxpr(function)(jnp.zeros(64)).jaxpr
    one = temporary_bytes(jaxpr)
    assert temporary_bytes(jaxpr, {jaxpr.invars[0]: 0}, 2) == one + 64 * 4


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"flops_per_s": 10.0}, "arithmetic"),
        ({"link_bytes_per_s": 1.0, "host_bytes_per_s": 1e9}, "link"),
        ({"host_bytes_per_s": 10.0}, "host"),
        ({"peer_bytes_per_s": 1.0}, "collectives"),
        ({"peer_bytes_per_s": None}, "host"),  # the worked example
        ({"peer_bytes_per_s": None, "host_bytes_per_s": 1e9}, "link"),
        ({"host_bytes_per_s": 1e9, "flops_per_s": 50.0, "peer_bytes_per_s": 1e9}, "neither"),
    ],
)
def test_bounds_of_several_devices(changes, bound):
    step = {"bytes_in": 20, "bytes_out": 16, "collective_bytes": 12, "flops_per_step": 400}
    machine = replace(MACHINE, **changes)
    assert small_plan(hardware=machine, num_devices=4, **step).bound == bound
    # What is left of a device's time beside arithmetic names its resource if it is longer.
    fast = dict.fromkeys(("link_bytes_per_s", "host_bytes_per_s", "peer_bytes_per_s"), 1e9)
    device = replace(machine, memory_bytes_per_s=1.0, **fast)
    for name, figure in (("memory", "memory_bytes"), ("loops", "seconds_loops")):
        seconds: Any = {figure: 2 * step["flops_per_step"] / 4 / device.flops_per_s}
        assert small_plan(hardware=device, num_devices=4, **step, **seconds).bound == name
    # Without a connection of their own, collectives are most of what links and memory carry.
    alone = replace(MACHINE, peer_bytes_per_s=None)
    step |= {"collective_bytes": 1000}
    assert small_plan(hardware=alone, num_devices=4, **step).bound == "collectives"


def test_a_link_is_as_busy_as_its_slower_direction():
    slow_out = replace(MACHINE, link_bytes_per_s=10.0, link_out_bytes_per_s=2.0)
    for bytes_in, bytes_out, seconds in ((20, 16, 8.0), (200, 16, 20.0)):
        plan = small_plan(hardware=slow_out, bytes_in=bytes_in, bytes_out=bytes_out)
        assert plan.busy["link"] == ("link", seconds)


@pytest.mark.parametrize("together", [1, 2])
def test_a_process_s_host_has_its_devices_shares(spec, together):
    """Two processes with two devices each, on a host or on two."""
    spec = replace(spec, options=replace(spec.options, hardware=MACHINE), base_bytes=None)
    alone, shared = make_plan(spec), make_plan(spec, 2, together)
    assert (shared.num_devices, shared.devices_per_host) == (4, 2 * together)
    assert shared.host_bytes == alone.host_bytes == 4 * shared.host_share_bytes
    assert shared.host_peak_bytes == alone.host_peak_bytes
    array, half = spec.largest_slab_bytes, alone.host_peak_bytes // 2
    # Beside pools, a process has memory for communication, and its share of six batches.
    batches = 6 * sum(np.asarray(x).nbytes for x in jax.tree.leaves(CASE.batch(0)))
    own = pool.process_bytes(half, array, 10**9, 2)
    beside = BETWEEN_PROCESSES_BYTES + batches // 2
    assert shared.host_process_bytes == own + beside > own
    assert shared.host_fixed_bytes == pool_limit.beside_bytes(0) + beside
    # Both have pools, whose last parts may be unused.
    pools = 2 * pool.pool_bytes(half, array, 10**9, 2)
    assert shared.host_parts[UNUSED_PARTS] == pools - shared.host_peak_bytes > pools // 2
    quarter = make_plan(spec, 4, 1), pool.process_bytes(alone.host_peak_bytes // 4, array, 10**9)
    assert quarter[0].host_process_bytes == quarter[1] + BETWEEN_PROCESSES_BYTES + batches // 4
    both = pool.process_bytes(alone.host_peak_bytes, array, 10**9, 4)
    assert alone.host_process_bytes == both + COMMUNICATION_BYTES + batches
    moved = shared.bytes_in + shared.bytes_out
    assert shared.bytes_through_host == 2 * together * moved
    assert shared.seconds_in == pytest.approx(shared.bytes_in / min(10, 40 / (2 * together)))
    # Without links between GPUs, what each sends to the others passes its own host, in and out.
    unlinked = replace(shared, hardware=replace(MACHINE, peer_bytes_per_s=None))
    each = min(10, 40 / (2 * 2 * together))
    assert unlinked.seconds_collectives == pytest.approx(shared.collective_bytes / each)
    least = shared.host_process_bytes or 0
    roomy = replace(MACHINE, host_bytes=2**40)
    fits = (replace(shared, hardware=roomy, host_budget=n).fits_host for n in (least - 1, least))
    assert list(fits) == [False, True]
    # What the system needs comes on top of what all processes of a host take.
    assert not replace(shared, hardware=replace(MACHINE, host_bytes=together * least)).fits_host
    host = replace(MACHINE, host_bytes=together * (least + 2**31))
    assert replace(shared, hardware=host).fits_host
    at_rest = [shared.host_bytes, shared.host_share_bytes]
    at_rest += [shared.devices_per_host * shared.host_share_bytes] * (together == 1)
    assert has_row(str(shared), at_rest)
    rows = [quantities(line) for line in str(shared).splitlines()]
    (taken,) = (row for row in rows if row[:2] == pytest.approx([least, 2], rel=6e-3))
    assert (1 in taken[2:]) == (together == 2), "another process on this host"


def test_seconds_of_several_devices():
    plan = plan_of(FOUR, hardware=replace(MACHINE, host_bytes_per_s=20.0))
    # The links could carry 10 bytes a second each, but of the host's memory each has 5.
    assert plan.seconds_in == pytest.approx(plan.bytes_in / 5)
    assert plan.seconds_out == pytest.approx(plan.bytes_out / 5)
    assert plan.seconds_host == pytest.approx(4 * (plan.bytes_in + plan.bytes_out) / 20)
    assert plan.seconds_collectives == pytest.approx(plan.collective_bytes / 10)
    alone = replace(plan, hardware=replace(MACHINE, peer_bytes_per_s=None))
    assert alone.seconds_collectives == pytest.approx(plan.collective_bytes / min(10, 40 / 8))
    # A ring passes through the network between hosts, once for all GPUs of one.
    several = replace(MACHINE, hosts=2, network_bytes_per_s=3.0)
    assert (several.collective_bytes_per_s(4), MACHINE.collective_bytes_per_s(4)) == (3, 10)
    through = 4 * (plan.bytes_in + plan.bytes_out + 2 * plan.collective_bytes)
    assert alone.bytes_through_host == through


@pytest.mark.parametrize("link", ["apart", "shared"])
def test_the_clock_shares_the_host_s_memory(link):
    shared = {"apart": 0.0, "shared": 1.5}[link]
    costs = Costs(
        forward=(),
        backward=(),
        update=(),
        link=Link(inward=1, outward=1, shared=shared),
    )
    clock = Clock(costs=costs)
    first, second = Key(Kind.MASTERS, 0), Key(Kind.MASTERS, 1)
    clock.fetch(first, 4)
    clock.fetch(second, 4)
    clock.compute((first,), 6.0, 0)
    clock.offload(first, 4, 0)
    times = clock.arrived[second], clock.device, clock.landed[0, first]
    assert times == {"apart": (8, 10, 14), "shared": (12, 12, 18)}[link]


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_the_driver_waits_for_computations_and_copies(delay):
    """The worked example of the clock."""
    link = Link(inward=1, outward=1)
    clock = Clock(costs=Costs(forward=(), backward=(), update=(), delay=delay, link=link))
    first, second, third = (Key(Kind.MASTERS, group) for group in range(3))
    clock.fetch(first, 4)
    clock.fetch(second, 4)
    clock.compute((first,), 6.0, 0)
    clock.offload(first, 4, 0)
    clock.compute((second,), 6.0, 1)
    if delay:  # the copy of `first` takes memory traffic from the second computation
        assert clock.device == pytest.approx(16.4)
        return
    clock.fetch(third, 4)
    assert (clock.device, clock.landed[0, first], clock.arrived[third]) == (16, 14, 20)
    driver = []
    for wait in (lambda: clock.wait(0), lambda: clock.land(0, first), lambda: clock.wait(1)):
        wait()
        driver.append(clock.driver)
    assert driver == [10, 14, 16]
    clock.offload(second, 9, 1)
    clock.land(1, second)
    clock.compute((), 2.0, 2)
    assert (clock.driver, clock.device) == (25, 27), "the device waits for the driver"


def test_collectives_over_the_link_hold_it():
    link = Link(inward=1, outward=1)
    clock = Clock(costs=Costs(forward=(), backward=(), update=(), link=link))
    clock.fetch(Key(Kind.MASTERS, 0), 4)
    clock.compute((), 10.0, 0, on_link=3.0)
    clock.fetch(Key(Kind.MASTERS, 1), 4)
    assert clock.arrived[Key(Kind.MASTERS, 1)] == 14  # when the device is done, not later
    assert clock.inward == 14 and clock.outward == 3


@pytest.mark.parametrize("peers", [10.0, None])
def test_stages_take_the_time_of_their_collectives(spec, peers):
    step = spec.first
    machine = replace(MACHINE, peer_bytes_per_s=peers)
    what = step.stages, step.workload.sizes, [0] * len(step.workload.sizes)
    with_any, with_none = (
        find_costs(*what, collectives, 2, NUM_DEVICES, machine)
        for collectives in (step.collectives, [(0, 0)] * len(step.stages))
    )
    rate = peers or 40 / 8
    for at, (forward, backward) in enumerate(step.collectives):
        assert with_any.forward[at] - with_none.forward[at] == pytest.approx(forward / rate)
        assert with_any.backward[at] - with_none.backward[at] == pytest.approx(backward / rate)
    assert with_any.forward_on_link == (
        () if peers else tuple(pytest.approx(forward / rate) for forward, _ in step.collectives)
    )
    assert with_any.link.shared == 4 / 40
    assert find_costs(*what, step.collectives, 2, 1, machine).link.shared == 0


def test_the_table_says_what_devices_share():
    four = plan_of(FOUR, device_budget="least")
    text, one = str(four), str(plan_of(None))
    through, shared = four.bytes_through_host, four.collective_bytes
    for figures in (
        [four.host_bytes, four.host_share_bytes],
        [shared, four.seconds_collectives],
        [through, four.seconds_host],
        [4, 47e9, 167.5, 264.1, 730e12, 365],
    ):
        assert has_row(text, figures) and not has_row(one, figures)
    shown: Any = four
    assert quantities(title_of(text))[-1] == 4
    assert tells(shown._repr_html_(), f"{four.host_share_bytes / 2**10:.2f} KiB") and "×" not in one


@pytest.mark.exhaustive
def test_progress_bars_name_several_devices(capfd):
    case = CASES["nnx_tied"]
    for num_devices in (1, 2):
        mesh = Mesh(jax.devices()[:num_devices], "data")
        batches = [case.batch(seed) for seed in range(2)]
        result = mt.fit(case.build(), case.loss_fn, batches, optax.sgd(0.1), mesh=mesh)
        assert result.trainer.devices == tuple(mesh.devices.flat)
        shown = capfd.readouterr().err
        share = sized(result.trainer.plan.host_bytes // num_devices)
        assert tells(shown, "training", "2 CPUs", share) == (num_devices > 1)
        assert ("2 CPUs" in shown) == (num_devices > 1)


def test_a_process_may_take_the_memory_of_its_host_whatever_its_devices(spec):
    roomy = replace(MACHINE, host_bytes=2**40)
    spec = replace(spec, options=replace(spec.options, hardware=roomy), base_bytes=None)
    found = [host_process(spec, *processes).usable_bytes or 0 for processes in ((1, 1), (2, 2))]
    assert found[0] > 0.8 * 2**40 and found[1] < 0.55 * 2**40
