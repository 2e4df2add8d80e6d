"""The seconds of a step's computations, as schedules count them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import megatrain_jax as mt
import small
from float8_specs import layers, spec_with
from inside import spec_of
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels.gpu_traffic import Traffic
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program.flops import count_flops, is_float32_product
from megatrain_jax._src.engine.report.make_plan import _optimizer_flops, make_plan
from megatrain_jax._src.engine.schedule.least_time import computing_seconds
from megatrain_jax._src.engine.schedule.workload import Costs
from megatrain_jax._src.engine.spec.costs import (
    batch_seconds,
    extra_traffic_seconds,
    find_costs,
    stage_traffic,
)
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.work import Work
from megatrain_jax._src.engine.state.hardware import card
from messages import tells
from optimizers import OPTIMIZERS
from runs import make_spec
from zoo import CASES

# Specs of equal runs share their traces.
pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.mark.by_default("2")
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_sums_of_gradients_are_read_and_written_by_each_microbatch(microbatches):
    spec = make_spec(CASES["equinox"], OPTIMIZERS["adam"], microbatches=microbatches)
    step, sizes = spec.first, spec.first.workload.sizes
    slow, fast = (
        find_costs(
            step.stages,
            sizes,
            [0] * len(sizes),
            step.collectives,
            microbatches,
            1,
            dataclasses.replace(card("H100"), memory_bytes_per_s=rate),
        )
        for rate in (1.0, 1e30)
    )
    # Besides, kernels move what they read and write.
    others = sum(backward.total for _, backward in stage_traffic(step.stages))
    summed = sum(slow.backward) - sum(fast.backward) - microbatches * others
    # With the padding behind each leaf.
    num_elements = sum(layout.master.size for layout in spec.layouts)
    assert summed == pytest.approx(
        0 if microbatches == 1 else 2 * microbatches * 4 * num_elements, abs=1e-3
    )


@pytest.mark.by_default("2")
@pytest.mark.parametrize("waves", [1, 2, 4])
def test_sums_in_bfloat16_are_rounded_once_per_wave(waves):
    def computing(sums: str) -> float:
        spec = make_spec(
            CASES["equinox"],
            OPTIMIZERS["adam"],
            microbatches=4,
            waves=waves,
            precision=mt.Precision(compute="float32", sums=sums),
            hardware=dataclasses.replace(card("H100"), memory_bytes_per_s=1.0, flops_per_s=1e30),
        )
        return computing_seconds(spec.first.workload, frozenset())

    spec = make_spec(CASES["equinox"], OPTIMIZERS["adam"], microbatches=4)
    num_elements = sum(layout.master.size for layout in spec.layouts)
    # An update and a norm read a gradient of half the bytes.
    expected = (4 * waves - 4) * num_elements
    assert computing("bfloat16") - computing("float32") == pytest.approx(expected)


def test_an_update_s_products_of_matrices_take_time():
    """Muon multiplies matrices: 5 times X Xᵀ, its square, and a product of both with X."""

    def seconds(name: str, share: float) -> float:
        machine = dataclasses.replace(
            card("H100"), flops_per_s=1.0, float32_share=share, memory_bytes_per_s=1e30
        )
        spec = make_spec(CASES["equinox"], OPTIMIZERS[name], hardware=machine)
        return sum(spec.first.workload.costs.update)

    spec = make_spec(CASES["equinox"], OPTIMIZERS["muon"])
    shapes = [shape for layout in spec.layouts for shape in layout.master.shapes]
    sides = [sorted(shape) for shape in shapes if len(shape) == 2]
    expected = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sides)
    assert expected > 0 and seconds("adam", 1.0) == pytest.approx(0, abs=1e-9)
    sustained = expected / card("H100").sustained
    assert seconds("muon", 1.0) == pytest.approx(sustained)
    assert seconds("muon", 0.25) == pytest.approx(4 * sustained)
    plans = [make_plan(make_spec(CASES["equinox"], OPTIMIZERS[n])) for n in ("adam", "muon")]
    adam, muon = (plan.float32_flops_per_step for plan in plans)
    assert muon - adam == expected


@pytest.mark.by_default("nnx_scan-adam-1")
@pytest.mark.parametrize(
    ("case", "optimizer", "num_devices"),
    [
        ("nnx_scan", "adam", 1),
        ("moe", "adam", 1),
        ("equinox", "muon", 1),
        ("equinox", "muon", 2),
        ("nnx_scan", "adam", 2),
    ],
)
def test_the_parts_of_a_gpus_time_add_up_to_its_computations(case, optimizer, num_devices):
    mesh = Mesh(jax.devices()[:num_devices], "data")
    spec = make_spec(CASES[case], OPTIMIZERS[optimizer], hardware=card("H100"), mesh=mesh)
    assert_busy_as_scheduled(spec)


def test_codes_of_float8_products_are_a_part_of_a_gpus_time():
    assert_busy_as_scheduled(spec_with(layers(), "float8", hardware=card("H100")))


def assert_busy_as_scheduled(spec: RunSpec) -> None:
    """The GPU's seconds in a plan, of which `bound` is made, are the schedule's."""
    plan, step = make_plan(spec), spec.first
    workload = dataclasses.replace(step.scheduled, kept=step.schedule.kept)
    assert plan.seconds_memory and plan.seconds_compute and plan.seconds_collectives is not None
    expected = computing_seconds(workload, workload.kept)
    assert plan.busy["device"][1] == pytest.approx(expected)
    shown = plan.seconds_compute + plan.seconds_loops + plan.seconds_memory
    assert shown + plan.seconds_collectives == pytest.approx(expected)


def test_float32_products_have_their_own_rate():
    # Without transfers and passes over memory, a plan's seconds are those of its operations.
    machine = dataclasses.replace(card("H100"), memory_bytes_per_s=1e30, float32_share=0.25)
    plans = {
        dtype: make_plan(
            make_spec(
                CASES["equinox"],
                OPTIMIZERS["adam"],
                precision=mt.Precision(compute=dtype),
                hardware=machine,
            )
        )
        for dtype in ("bfloat16", "float32")
    }
    narrow, wide = plans["bfloat16"], plans["float32"]
    assert narrow.float32_flops_per_step == 0 < wide.float32_flops_per_step
    assert wide.seconds_compute is not None
    others = wide.flops_per_step - wide.float32_flops_per_step
    sustained = machine.sustained * machine.flops_per_s
    expected = (others + 4 * wide.float32_flops_per_step) / sustained
    assert wide.seconds_compute == pytest.approx(expected)
    # The clock has the same rate, at the share that whole steps reach.
    alike = dataclasses.replace(machine, float32_share=1.0)
    schedules = [
        computing_seconds(
            make_spec(
                CASES["equinox"],
                OPTIMIZERS["adam"],
                precision=mt.Precision(compute="float32"),
                hardware=hardware,
            ).first.workload,
            frozenset(),
        )
        for hardware in (machine, alike)
    ]
    more = 3 * wide.float32_flops_per_step / machine.flops_per_s / machine.sustained
    assert schedules[0] - schedules[1] == pytest.approx(more)
    assert tells(str(wide), 194.5, "float32") and not tells(str(narrow), "float32")


@pytest.mark.parametrize(
    ("left", "right", "sums", "is_wide"),
    [
        ("float32", "float32", None, True),
        ("float32", "bfloat16", None, True),
        ("bfloat16", "bfloat16", "float32", False),
        ("float16", "float16", None, False),
        ("float64", "float32", None, False),
    ],
)
def test_a_product_is_in_float32_by_its_operands(left, right, sums, is_wide):
    with jax.enable_x64(True):
        args = jnp.ones((2, 3), left), jnp.ones((3, 2), right)
        product = functools.partial(jnp.matmul, preferred_element_type=sums)
        jaxpr = jax.make_jaxpr(product)(*args)
    counted = [count_flops(jaxpr, is_float32_product), count_flops(jaxpr)]
    assert counted == [24 * is_wide, 24]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_batch_arrives_by_its_bytes(microbatches):
    case = CASES["equinox"]
    spec = make_spec(case, OPTIMIZERS["adam"], microbatches=microbatches)
    size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(case.batch(0)))
    found = batch_seconds(spec.first.program, microbatches, 1)
    assert spec.first.workload.costs.batch == found
    assert found == pytest.approx(size / 3.8e9)
    assert batch_seconds(spec.first.program, microbatches, 2) == found / 2


def test_each_pass_casts_masters_that_products_read():
    def traffic(master: str) -> list[tuple[Traffic, Traffic]]:
        precision = mt.Precision(compute=jnp.bfloat16, master=master)
        spec = make_spec(CASES["equinox"], OPTIMIZERS["adam"], precision=precision)
        return stage_traffic(spec.first.stages)

    for wide, narrow in zip(traffic("float32"), traffic("bfloat16"), strict=True):
        for cast, plain in zip(wide, narrow, strict=True):
            assert cast.outside >= plain.outside
    assert sum(f.total + b.total for f, b in traffic("float32")) > sum(
        f.total + b.total for f, b in traffic("bfloat16")
    )


def test_convolutions_of_few_channels_take_longer_than_their_operations():
    nothing = Work(flops=0, attention=0)
    aligned, slow = Traffic(outside=1e9), Traffic(outside=1e9, unaligned=1e12)
    one = extra_traffic_seconds(nothing, slow, card("H100"), 1) - extra_traffic_seconds(
        nothing, aligned, card("H100"), 1
    )
    # Ten times as long as others, or more.
    assert one > 10 * 1e12 / card("H100").flops_per_s
    padded = slow._replace(padding=card("H100").sustained * card("H100").flops_per_s)
    assert extra_traffic_seconds(nothing, padded, card("H100"), 1) == pytest.approx(
        1 + extra_traffic_seconds(nothing, slow, card("H100"), 1)
    )
    both = extra_traffic_seconds(nothing, slow, card("H100"), 2)
    assert both == pytest.approx(extra_traffic_seconds(nothing, slow, card("H100"), 1) / 2)


def test_depthwise_convolutions_take_longer_than_matrix_products():
    # Only operations take time here.
    machine = dataclasses.replace(card("H100"), memory_bytes_per_s=1e30, float32_share=1.0)
    batch = jnp.ones((2, 64, 128))

    def costs(groups: int) -> Costs:
        def loss_fn(model: list[jax.Array], x: jax.Array) -> jax.Array:
            layout = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": groups}
            for w in model:
                x = jnp.sin(jax.lax.conv_general_dilated(x, w, (1,), "SAME", **layout))
            return (x**2).mean()

        model = [jnp.ones((4, 128 // groups, 128))] * 4
        adapted, _ = adapt(model, loss_fn, batch, 0)
        options = Options(hardware=machine, precision=mt.Precision(compute=jnp.float32))
        spec = make_run_spec(adapted, loss_fn, optax.sgd(0.1), batch, options)
        return spec.first.workload.costs

    dense, depthwise, flops = costs(1), costs(128), 2 * batch.size * 4
    for own, other in zip(depthwise.forward, dense.forward, strict=True):
        # 128 times fewer operations, at less than a thousandth of the rate.
        assert own > flops / (1e-3 * card("H100").flops_per_s) > 5 * other
    # Saved results are not computed again; the last stage has none, since its forward is not alone.
    saved = zip(depthwise.recompute[:-1], depthwise.forward[:-1], strict=True)
    assert all(0.9 * forward <= again <= forward for again, forward in saved)


def test_memory_traffic_takes_its_time_beside_products():
    def computing(rate: float) -> float:
        spec = make_spec(
            CASES["equinox"],
            OPTIMIZERS["adam"],
            hardware=dataclasses.replace(card("H100"), memory_bytes_per_s=rate),
        )
        return computing_seconds(spec.first.workload, frozenset())

    step = make_spec(CASES["equinox"], OPTIMIZERS["adam"]).first
    # The last stage has no forward of its own.
    traffic = stage_traffic(step.stages)
    moved = sum(f.total for f, _ in traffic[:-1]) + sum(b.total for _, b in traffic)
    # Gradients are read twice, the rest is read and written.
    updates = sum(2 * sum(s.values()) for s in step.workload.sizes)
    assert computing(1.0) - computing(1e30) == pytest.approx(moved + updates)


@pytest.mark.parametrize("kind", Traffic._fields)
def test_devices_share_the_traffic_of_a_stage(kind):
    work, traffic = Work(flops=0, attention=0), Traffic(**{kind: 1e12})
    one, four = (extra_traffic_seconds(work, traffic, card("H100"), n) for n in (1, 4))
    assert one == pytest.approx(4 * four) and one > 0


def test_every_device_computes_the_products_of_an_update():
    cut = make_spec(CASES["nnx_tied"], OPTIMIZERS["muon"]).optimizer
    (all_1, wide_1), (all_2, wide_2), (all_3, _) = (_optimizer_flops(cut, n) for n in (1, 2, 3))
    assert 0 < all_2 - all_1 == all_3 - all_2 < all_1 and 0 < 2 * wide_1 == wide_2


def test_the_traffic_of_a_stage_is_its_own_whatever_came_before():
    """The first layer passes no gradient on; equal layers after it share their traffic."""
    layers = [*small.params(), *small.params()]
    batch, precision = small.batch(0), mt.Precision(compute=jnp.float32)
    trainer = mt.Trainer(layers, small.loss_fn, small.OPTIMIZER, batch, precision=precision)
    stages = spec_of(trainer).first.stages
    assert len({bound.stage.key for bound in stages}) < len(stages)
    for order in (stages, stages[::-1]):
        assert stage_traffic(order) == [stage_traffic([bound])[0] for bound in order]
