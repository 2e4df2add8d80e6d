"""Blocks cut into parts where one as a whole doesn't fit: by need only, and as exact as ever."""

import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import megatrain_jax as mt
from inside import spec_of
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.options.precision import Precision
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.layers.sliced_values import Range
from megatrain_jax._src.engine.program.loss.block_parts import (
    NUMBERS_OF_PARTS,
    in_groups,
    largest_block,
)
from megatrain_jax._src.engine.report.make_plan import check_device, make_plan
from megatrain_jax._src.engine.report.table import UNFIT
from megatrain_jax._src.engine.schedule.schedule import BudgetError
from megatrain_jax._src.engine.spec.block_splits import BLOCK_SPLITS, BlockSplit, finer_splits
from megatrain_jax._src.engine.spec.budget import (
    _cut_in,
    fit_to_machine,
    fitted_and_compiled,
    least_device_bytes,
)
from megatrain_jax._src.engine.spec.indivisible_arrays import indivisible_arrays
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.tile_search import TileFinder
from megatrain_jax._src.engine.state.hardware import card
from megatrain_jax._src.engine.state.placement import default_mesh, placed_on
from messages import tells
from optimizers import OPTIMIZERS
from oracle import train_plain
from quantities import quantities, title_of
from runs import (
    SLOW,
    check_close,
    check_each_continues_the_other,
    make_spec,
    make_trainer,
    train,
)
from zoo import CASES

pytestmark = pytest.mark.usefixtures("traced_once")


NOWHERE = placed_on(AbstractMesh((1,), ("data",)))
WIDTH = 16


def least_of(spec):
    return spec.first.schedule.smallest_bytes


def blocks(params, batch):
    x = batch["x"]
    for layer in params["layers"]:
        x = x + jnp.tanh(jnp.tanh(x @ layer["up"]) @ layer["down"])
    return (x**2).mean()


def spec_of_blocks(num_blocks, rows=8, **options):
    """A run of blocks of two products, each of which may be a part."""
    layer = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    batch = {"x": jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)}

    def build():
        made = [{name: jnp.zeros(shape) for name, shape in layer.items()}]
        return {"layers": made * num_blocks}

    adapted, _ = adapt(build, blocks, batch, 0)
    asked = Options(precision=Precision(compute=jnp.float32), **options)
    return make_run_spec(adapted, blocks, optax.adam(1e-3), batch, asked)


def fitted(spec, num_bytes):
    return fit_to_machine(spec, TileFinder(KernelCache(), NOWHERE), num_bytes, lambda spec: spec)


@pytest.mark.parametrize(("width", "parts"), [(2**15, 3), (32_000, 2), (25_000, 1)])
def test_a_block_with_more_numbers_than_32_bits_count_is_cut(width, parts):
    def build():
        layer = {name: jnp.zeros((width, width)) for name in "abc"}
        return {"layers": [layer, layer]}

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params["layers"]:
            for name in "abc":
                x = jnp.tanh(x @ layer[name])
        return (x**2).mean()

    batch = {"x": jax.ShapeDtypeStruct((4, width), jnp.float32)}
    hardware = replace(card("H200"), device_bytes=2**40, host_bytes=2**40)
    plan = mt.plan(build, loss_fn, optax.adam(1e-3), batch, hardware=hardware)
    assert plan.fits_device and plan.num_stages == 2 * parts


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "optimizer", "options"),
    [
        ("nnx_tied", "clip_adamw", {}),
        ("moe", "adamw_schedule", {"microbatches": 2}),
        ("linen_scan_remat", "adafactor", {}),
        pytest.param("unet", "adamw_schedule", {}, marks=pytest.mark.long),
        pytest.param("batchnorm_nnx", "muon", {}, marks=pytest.mark.long),
    ],
)
def test_training_in_parts_agrees_with_plain_jax(name, optimizer, options):
    case, make = CASES[name], OPTIMIZERS[optimizer]
    whole = make_spec(case, make, **options)
    trainer = make_trainer(case, make, budget=least_of(whole) - 1, **options)
    spec = spec_of(trainer)
    assert spec.num_parts > 1 and len(spec.first.stages) > len(whole.first.stages)
    batches = [case.batch(seed) for seed in range(3)]
    run, plain = train(trainer, batches, gradients=False), train_plain(case, make, batches)
    check_close(run.params, plain.params, 2e-5, "parameter")
    np.testing.assert_allclose(run.losses, plain.losses, rtol=2e-6)


def test_of_what_no_cut_divides_the_block_is_named():
    arrays = {"embed": (2000, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    paths = {"embed": ("embed",), "up": ("layers", "0", "up"), "down": ("layers", "0", "down")}
    leaves = [
        replace(leaf(name, *shape), path=paths[name], block=paths[name][:2] if n else None)
        for n, (name, shape) in enumerate(arrays.items())
    ]
    sizes = (2000 * WIDTH, 8 * WIDTH**2)
    layouts: Any = [SimpleNamespace(sizes=lambda _, size=size: {0: size}) for size in sizes]
    cut: Any = SimpleNamespace(
        leaves=leaves, grouping=SimpleNamespace(leaves=[(0,), (1, 2)]), has_smaller_parts=False
    )
    said = indivisible_arrays(cut, layouts)
    assert tells(said, "layers/0/up", "layers/0/down") and "embed" not in said
    cut.has_smaller_parts = True
    assert indivisible_arrays(cut, layouts) == ""


def leaf(name, *shape, parameter=0, index=()):
    path = ("layers", "0", *name.split("/"))
    return Leaf(
        path=path, parameter=parameter, index=index, shape=shape, dtype="float32", block=path[:2]
    )


def test_experts_are_divided_where_there_are_some_and_in_more_groups_where_that_helps():
    halves, quarters = (way for way in BLOCK_SPLITS if way.num_groups in (2, 4))
    experts, divided = [leaf("up", 8, 4, 4)], [leaf("up", 4, 4, 4, index=(Range(0, 4),))]
    two, more = BlockSplit(2), [BlockSplit(3), BlockSplit(4)]
    for leaves, smaller, expected in (
        (experts, True, [*more, halves, quarters]),
        (experts, False, [more[0], halves, quarters]),
        ([leaf("up", 8, 4)], True, more),
    ):
        assert [*finer_splits(two, [*more, halves, quarters], leaves, smaller)] == expected
    assert finer_splits(halves, [quarters], divided, True) == (quarters,)
    assert finer_splits(halves, [quarters], divided, False) == ()


def test_biases_of_experts_are_divided_with_them_and_small_matrices_beside_are_not():
    shapes = {"experts/up": (8, 16, 16), "experts/lora": (8, 2, 16), "experts/bias": (8, 16)}
    shapes |= {"router/weight": (8, 16), "experts/scale": (16, 16), "experts/each": (8,)}
    leaves = [leaf(name, *shape, parameter=n) for n, (name, shape) in enumerate(shapes.items())]
    apart: Any = SimpleNamespace(stages=[])  # no equation reads several groups
    found = in_groups(leaves, 2, lambda _: apart)
    sizes = Counter((x.parameter, x.shape[0]) for x in found)
    assert sizes == {(0, 4): 2, (1, 4): 2, (2, 4): 2, (3, 8): 1, (4, 16): 1, (5, 8): 1}


def test_blocks_are_whole_where_they_fit_and_in_the_fewest_parts_where_not():
    case, make = CASES["nnx_tied"], OPTIMIZERS["adamw_schedule"]

    def found(budget):
        plan = make_plan(make_spec(case, make, device_budget=budget))
        assert plan.device_state_bytes <= budget
        assert quantities(title_of(plan))[4:] == [plan.num_parts] * (plan.num_parts > 1)
        return plan.num_parts, plan.num_stages

    whole = make_spec(case, make)
    assert whole.num_parts == 1
    assert found(least_of(whole)) == (1, len(whole.first.stages))
    halves = found(least_of(whole) - 1)
    assert halves == (2, 2 * len(whole.first.stages) - 2)
    with pytest.raises(BudgetError) as refused:
        make_spec(case, make, device_budget=1024)
    least = refused.value.smallest
    assert least < least_of(whole) / 2 and str(least) in str(refused.value)
    # 16 x 48 numbers, with two moments each.
    assert tells(str(refused.value), "blocks/0/attention/qkv/kernel", "9.00 KiB")
    assert found(least)[0] > 2


@pytest.mark.exhaustive
def test_no_more_parts_are_tried_once_the_largest_cannot_be_cut():
    """With more parts, only its neighbours become smaller; each number takes seconds to plan."""
    spec, largest = make_spec(CASES["moe"], OPTIMIZERS["adamw_schedule"]), {}
    while spec is not None and spec.num_groups == 1:  # then experts are divided, too
        largest[spec.num_parts] = largest_block(spec.leaves)
        spec = spec.finer(spec.finer_ways)
    sizes = list(largest.values())
    assert sizes == sorted(sizes, reverse=True) and sizes.count(min(sizes)) == 2
    assert max(largest) < NUMBERS_OF_PARTS[-1]


@pytest.mark.exhaustive
def test_a_checkpoint_is_restored_by_runs_that_cut_otherwise(tmp_path):
    case, make = CASES["linen_scan_remat"], OPTIMIZERS["clip_adamw"]
    least = least_of(make_spec(case, make))
    whole, parts = (make_trainer(case, make, budget=budget) for budget in (least, least - 1))
    assert spec_of(whole).num_parts < spec_of(parts).num_parts
    check_each_continues_the_other(whole, parts, case.batch(0), tmp_path)


@pytest.mark.exhaustive
def test_functions_are_tiled_before_blocks_are_cut_for_a_device_that_has_no_room_for_one():
    spec = make_spec(CASES["nnx_tied"], OPTIMIZERS["adamw_schedule"])
    roomy = make_plan(fitted(spec, 1 << 30))
    assert roomy.device_temporary_bytes is not None
    needed = roomy.device_temporary_bytes + roomy.device_other_bytes + least_of(spec)
    assert roomy.num_parts == 1 and make_plan(fitted(spec, needed)).num_parts == 1
    tiled = make_plan(fitted(spec, needed - 1))
    assert tiled.tiles and tiled.num_parts == 1
    cut = make_plan(fitted(spec, least_of(spec)))
    assert cut.num_parts > 1 and cut.device_bytes < tiled.device_bytes
    # Like parts of all blocks are one row.
    parts = {row.name.rpartition("part ")[2] for row in cut.groups if "part" in row.name}
    assert sum("part" in row.name for row in cut.groups) == len(parts) == cut.num_parts


def test_blocks_are_cut_where_parts_save_residuals_in_the_memory_of_whole_blocks():
    # Computation takes nearly all of a step, and recomputation much of it.
    spec = spec_of_blocks(5, hardware=SLOW)
    needed = least_device_bytes(fitted(spec, 1 << 30))
    # With a budget of the user's own, blocks stay whole where they fit.
    fixed = spec_of_blocks(5, hardware=SLOW, device_budget=least_of(spec))
    whole, cut = make_plan(fitted(fixed, needed)), make_plan(fitted(spec, needed))
    assert (whole.num_parts, whole.num_kept) == (1, 0)
    assert cut.num_parts == 2 and cut.num_kept > 0 and cut.device_bytes <= needed
    assert whole.seconds_per_step and cut.seconds_per_step
    assert cut.seconds_per_step < 0.95 * whole.seconds_per_step


def test_where_no_number_of_parts_fits_the_plan_shows_the_one_that_needs_the_least():
    def planned(num_bytes):
        machine = replace(card("H200"), device_bytes=num_bytes, device_share=1.0)
        return make_plan(fitted(spec_of_blocks(2, hardware=machine), num_bytes))

    spec = spec_of_blocks(2)
    whole, cut, unfit = planned(1 << 30), planned(least_of(spec)), planned(1000)
    assert (whole.num_parts, cut.num_parts) == (1, 2)
    assert whole.device_excess == cut.device_excess == "" and cut.fits_device
    spec, ways = spec_of_blocks(2, hardware=replace(card("H200"), device_bytes=1000)), []
    while spec is not None:
        ways.append(replace(spec, finer_ways=()))
        spec = spec.finer(spec.finer_ways)
    alone = [make_plan(fitted(way, 1000)).device_bytes for way in ways]
    on_host = []
    fit_to_machine(
        replace(ways[0], finer_ways=spec_of_blocks(2).finer_ways),
        TileFinder(KernelCache(), NOWHERE),
        1000,
        lambda run: on_host.append(run) or run,
    )
    assert [make_plan(run).device_bytes for run in on_host] == [min(alone)]
    assert (unfit.fits_device, unfit.device_bytes) == (False, min(alone))
    assert unfit.num_parts > 1 and min(alone) < alone[0]
    assert re.search(rf"{UNFIT} .*1000 B.*\bKiB .*\d parts.*layers\.1\.part 2", str(unfit))
    with pytest.raises(MemoryError, match=r"KiB .*\d parts.*Nothing"):
        check_device(unfit, 1000)
    assert "KiB with" not in str(replace(unfit, hardware=replace(card("H200"), host_bytes=2**40)))


def test_experts_are_divided_as_long_as_that_saves_memory():
    """A plan of many groups takes many seconds."""
    tried = []

    def of_rows(*rows):
        """Runs in 1, 2, 4, ... groups that need as much as so many rows do."""
        spec = None
        for n in reversed(range(len(rows))):

            def finer(ways, then=spec):
                tried.append(ways[0].num_groups)
                return then

            made = spec_of_blocks(2, rows=rows[n])
            ways = (BlockSplit(2 ** (n + 1), 2 ** (n + 1)),) if spec else ()
            spec = replace(made, num_groups=2**n, num_parts=2**n, finer_ways=ways, finer=finer)
        assert spec is not None
        return spec

    most = least_device_bytes(fitted(spec_of_blocks(2, rows=64), 1 << 30))
    for rows, expected, fits in (
        ((320, 288, 256, 64, 32), [2, 4, 8], True),
        # The first groups may need more, because blocks are no longer in parts.
        ((256, 288, 256, 256, 64), [2, 4, 8], False),
    ):
        tried.clear()
        found = fitted(of_rows(*rows), most)
        assert tried == expected
        assert (least_device_bytes(found) <= most) == fits


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # With a function too large in any number of parts, experts are next.
        (320, [(2, 1), (8, 1), (3, 2)]),
        (64, [(2, 1), (8, 1), (3, 1)]),
    ],
)
def test_no_more_parts_are_tried_where_the_most_have_too_large_a_function(rows, expected):
    tried, every = [], [way for way in BLOCK_SPLITS if way.num_parts > 1]

    def finer(ways):
        found = spec_of_blocks(2, rows={2: 240, 8: rows}.get(ways[0].num_parts, 32))
        tried.append(ways[0])
        left = tuple(every[every.index(ways[0]) + 1 :])
        split = {"num_parts": ways[0].num_parts, "num_groups": ways[0].num_groups}
        return replace(found, **split, finer_ways=left, finer=finer)

    most = least_device_bytes(fitted(spec_of_blocks(2, rows=48), 1 << 30))
    whole = replace(spec_of_blocks(2, rows=400), finer_ways=tuple(every), finer=finer)
    assert least_device_bytes(fitted(whole, most)) <= most
    assert tried == expected


def test_a_plan_that_fits_in_no_number_of_parts_does_not_say_that_it_was_cut_to_fit():
    case, make = CASES["nnx_tied"], OPTIMIZERS["adamw_schedule"]
    plan = make_plan(make_spec(case, make, device_budget=least_of(make_spec(case, make)) - 1))
    title = title_of(plan)
    assert quantities(title)[4:] == [2]
    for share, as_before in ((1, True), (2, False)):
        machine = replace(card("H200"), device_bytes=plan.device_bytes // share, device_share=1.0)
        assert (title_of(replace(plan, hardware=machine)) == title) == as_before


# The kernels of a step of `spec_of_blocks`: the last block's backward is its own.
CHOSEN = ["backward", "backward", "forward", "update"]


class Compiler(KernelCache):
    """A compiler whose functions need a share of the bytes that are estimated for them."""

    def __init__(self, share, **options):
        super().__init__(**options)
        self.share, self.compiled = share, []

    def _compiled(self, kernels):
        self.compiled += [kernel.name for kernel in kernels]
        return [round(self.share * self._estimates[k.name, k.key]) for k in kernels]


def chosen_with(kernels, num_bytes, *, seconds=0.1, **options):
    """The run of small blocks that is chosen and compiled for a device of `num_bytes`."""
    spec = spec_of_blocks(2, rows=64, **options)
    costs = spec.first.workload.costs
    slow = replace(costs, backward=(seconds,) * len(costs.backward))
    first = replace(spec.first, workload=replace(spec.first.workload, costs=slow))
    tiles = TileFinder(kernels, placed_on(default_mesh()))
    spec = replace(spec, first=first)
    return make_plan(fitted_and_compiled(spec, tiles, num_bytes, lambda spec: spec))


@pytest.mark.parametrize(
    ("share", "seconds", "tiled"), [(0.7, 0.1, 0), (0.9, 0.1, 1), (0.7, 2, 1), (1.0, 0.1, 1)]
)
def test_functions_are_whole_where_the_compiler_needs_less_than_estimated(share, seconds, tiled):
    budget = least_of(spec_of_blocks(2, rows=64))
    roomy = chosen_with(whole := Compiler(share), 1 << 30, device_budget=budget)
    assert roomy.device_temporary_bytes is not None and not roomy.device_temporary_estimated
    assert not roomy.tiles and sorted(whole.compiled) == CHOSEN
    room = round(0.8 * roomy.device_temporary_bytes / share) + roomy.device_other_bytes + budget
    found = chosen_with(Compiler(share), room, seconds=seconds, device_budget=budget)
    assert found.num_parts == 1 and bool(found.tiles) == bool(tiled)
    assert found.device_bytes <= room


def test_only_chosen_functions_are_compiled():
    """Neither whole functions nor tiles that are too large by their estimates are compiled."""
    budget = least_of(spec_of_blocks(2, rows=64))
    roomy = chosen_with(Compiler(1.0), 1 << 30, device_budget=budget)
    assert roomy.device_temporary_bytes is not None
    room = round(0.4 * roomy.device_temporary_bytes) + roomy.device_other_bytes + budget
    found = chosen_with(kernels := Compiler(1.0), room, device_budget=budget)
    assert found.tiles and found.device_bytes <= room
    assert sorted(kernels.compiled) == CHOSEN


def test_functions_that_need_more_than_estimated_get_smaller_tiles():
    budget = least_of(spec_of_blocks(2, rows=64))
    roomy = chosen_with(Compiler(1.0), 1 << 30, device_budget=budget)
    assert roomy.device_temporary_bytes is not None
    room = round(0.9 * roomy.device_temporary_bytes) + roomy.device_other_bytes + budget
    by_estimate = chosen_with(Compiler(1.0), room, device_budget=budget)
    found = chosen_with(kernels := Compiler(1.5), room, device_budget=budget)
    tiles = [max(row.num_tiles for row in plan.tiles) for plan in (by_estimate, found)]
    assert tiles[0] < tiles[1] and found.device_bytes <= room
    # The functions that didn't fit, and those that do.
    assert len(CHOSEN) < len(kernels.compiled) <= 2 * len(CHOSEN)


def test_functions_that_were_dropped_are_compiled_again():
    chosen_with(kernels := Compiler(1.0), 1 << 30)
    once = sorted(kernels.compiled)
    chosen_with(kernels, 1 << 30)
    assert sorted(kernels.compiled) == once
    kernels.keep_only(())
    chosen_with(kernels, 1 << 30)
    assert sorted(kernels.compiled) == sorted(2 * once)


def test_processes_choose_by_the_figures_that_they_agree_on():
    own, agreed = Compiler(1.0), Compiler(0.5, agree=lambda found: [2 * x for x in found])
    here, there = (chosen_with(kernels, 1 << 30) for kernels in (own, agreed))
    assert here.device_temporary_bytes and here == there


def test_a_value_is_handed_on_until_its_last_reader():
    def two_products(x, w):
        a = jnp.tanh(x)
        return a @ w + a

    traced = jax.make_jaxpr(two_products)(jnp.ones((2, 4)), jnp.ones((4, 4)))
    x, w = 32, 64
    # Before tanh, before the product, before the sum, which reads two values, and at the end.
    alive = jx.bytes_alive(traced.jaxpr.eqns, (), lambda v: True)
    assert alive[:4] == [x + w, x + w, 2 * x, 0]


@pytest.mark.parametrize("has_room", [False, True])
def test_a_way_to_cut_without_room_is_none(has_room):
    def finer(ways):
        if not has_room:
            raise BudgetError(1, 2)
        return ways[0]

    spec: Any = SimpleNamespace(finer=finer)
    assert _cut_in(spec, [BlockSplit(2)]) == (BlockSplit(2) if has_room else None)
    assert _cut_in(spec, []) is None
