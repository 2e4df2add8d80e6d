"""Experts divided into groups where one layer's don't fit: by need only, and as exact as ever."""

import dataclasses
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import spec_of
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.program.flops import count_loops
from megatrain_jax._src.engine.program.loss.block_parts import num_groups
from megatrain_jax._src.engine.program.trace_target import traced_for
from megatrain_jax._src.engine.report.make_plan import make_plan
from megatrain_jax._src.engine.schedule.schedule import BudgetError
from megatrain_jax._src.engine.spec.block_splits import BlockSplit
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.lm.models import expert_blocks
from megatrain_jax._src.lm.models.expert_blocks import mix
from megatrain_jax._src.lm.models.moe import gated
from megatrain_jax.models import Decoder
from messages import refuses
from optimizers import OPTIMIZERS
from oracle import train_plain
from quantities import quantities, title_of
from runs import (
    check_close,
    check_each_continues_the_other,
    check_same_bits,
    make_spec,
    make_trainer,
    train,
)
from small_decoders import EXPERTS, SMALL, batch, packed_loss, plain_loss
from zoo_case import Case


@cache
def decoder(num: int = 8, per_token: int = 2, tokens: int = 12, loss_fn=packed_loss) -> Case:
    """A decoder in which experts are most of a layer."""
    layers = (0, 1)
    experts = dataclasses.replace(
        EXPERTS, num=num, per_token=per_token, intermediate_size=64, layers=layers
    )
    config = dataclasses.replace(SMALL, hidden_size=32, num_layers=2, experts=experts)
    return Case(
        name="experts",
        build=lambda: lambda: Decoder(config, rngs=nnx.Rngs(0)),
        loss_fn=loss_fn,
        blocks=2,
        templates=1,
        batch=lambda seed: batch(seed, tokens, 2),
    )


def only(monkeypatch, *ways: BlockSplit) -> None:
    """Lets runs cut blocks in these ways alone; each way takes seconds to plan."""
    monkeypatch.setattr("megatrain_jax._src.engine.spec.make_spec.BLOCK_SPLITS", ways)


def least_of(spec):
    return spec.first.schedule.smallest_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_training_by_groups_agrees_with_plain_jax(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    num, per_token, tokens = (int(rng.integers(*ends)) for ends in ((3, 6), (1, 4), (9, 30)))
    # Microbatches with equally many labels that count.
    case = decoder(2 * num, per_token, tokens, plain_loss)
    name = str(rng.choice(["clip_adamw", "adamw_schedule", "adafactor"]))
    only(monkeypatch, BlockSplit(1), BlockSplit(*[(3, 2), (5, 4)][int(rng.integers(2))]))
    options: dict[str, Any] = {"microbatches": int(rng.choice([1, 2]))}
    make = OPTIMIZERS[name]
    # Refused with all experts at once.
    budget = least_of(make_spec(case, make, **options)) - 1
    trainer = make_trainer(case, make, budget=budget, **options)
    assert num_groups(spec_of(trainer).leaves) > 1
    batches = [case.batch(seed) for seed in range(3)]
    run, plain = train(trainer, batches, gradients=False), train_plain(case, make, batches)
    check_close(run.params, plain.params, 2e-5, "parameter")
    np.testing.assert_allclose(run.losses, plain.losses, rtol=2e-6)


def foreign(takes_all: bool) -> Case:
    """A tree of arrays with experts as an axis of each product, or in one ragged product."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

    def block():
        return {
            "proj": normal(16, 16),
            "experts": {"up": normal(4, 16, 64), "bias": normal(4, 64), "down": normal(4, 64, 16)},
            "router": normal(16, 4),
        }

    model = {
        "embed": normal(40, 16),
        "blocks": [block() for _ in range(2)],
        "head": normal(16, 40),
    }

    def mixed(p, x):
        shares = jax.nn.softmax(x @ p["router"])
        up, bias, down = (p["experts"][name] for name in ("up", "bias", "down"))
        if takes_all:
            rows = jnp.tile(x, (4, 1))
            sizes = jnp.full(4, len(x), jnp.int32)
            hidden = jax.lax.ragged_dot(rows, up, sizes) + jnp.repeat(bias, len(x), 0)
            out = jax.lax.ragged_dot(jnp.tanh(hidden), down, sizes).reshape(4, *x.shape)
        else:
            hidden = jnp.einsum("td,edf->etf", x, up) + bias[:, None]
            out = jnp.einsum("etf,efd->etd", jnp.tanh(hidden), down)
        return jnp.einsum("te,etd->td", shares, out)

    def loss_fn(params, batch):
        x = params["embed"][batch["inputs"]].reshape(-1, 16)
        for p in params["blocks"]:
            x = x + jnp.tanh(x @ p["proj"])
            x = x + mixed(p, x)
        logits = x @ params["head"]
        labels = batch["targets"].reshape(-1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return Case(
        name="foreign",
        build=lambda: model,
        loss_fn=loss_fn,
        blocks=2,
        templates=1,
        batch=lambda seed: {k: v for k, v in batch(seed, 6, 2).items() if k != "segments"},
    )


@pytest.mark.exhaustive
def test_products_with_the_experts_as_an_axis_are_divided_in_any_model(monkeypatch):
    case, make = foreign(False), OPTIMIZERS["clip_adamw"]
    only(monkeypatch, BlockSplit(1), BlockSplit(8), BlockSplit(3, 2))
    with pytest.raises(BudgetError) as refused:
        make_spec(case, make, device_budget=1024)
    trainer = make_trainer(case, make, budget=refused.value.smallest)
    assert num_groups(spec_of(trainer).leaves) == 2
    batches = [case.batch(seed) for seed in range(2)]
    run, plain = train(trainer, batches, gradients=False), train_plain(case, make, batches)
    check_close(run.params, plain.params, 2e-5, "parameter")


def test_experts_that_one_operation_takes_stay_together(monkeypatch):
    only(monkeypatch, BlockSplit(1), BlockSplit(8), BlockSplit(3, 2))
    with pytest.raises(BudgetError) as refused:
        make_spec(foreign(True), OPTIMIZERS["clip_adamw"], device_budget=1024)
    assert re.search(r"blocks/0/experts/\w+\b.* 48.00 KiB", str(refused.value)), refused.value


@pytest.mark.exhaustive
def test_experts_are_divided_only_where_no_parts_fit(monkeypatch):
    only(monkeypatch, BlockSplit(1), BlockSplit(3), BlockSplit(3, 2))
    case, made, sample = decoder(), OPTIMIZERS["clip_adamw"](None), decoder().batch(0)
    adapted, _ = adapt(case.build(), case.loss_fn, sample, 0)
    precision = mt.Precision(compute=jnp.float32)

    # The same objects, so that blocks are cut once in each way.
    def spec_in(budget):
        options = Options(precision=precision, device_budget=budget)
        return make_run_spec(adapted, case.loss_fn, made, sample, options)

    spec, specs = spec_in(None), []
    while spec is not None:
        specs.append(spec)
        spec = spec.finer(spec.finer_ways)
    ways = [(spec.num_parts, num_groups(spec.leaves)) for spec in specs]
    assert ways == [(1, 1), (3, 1), (3, 2)]
    least = [least_of(spec) for spec in specs]
    assert least == sorted(least, reverse=True) and least[2] < 0.9 * least[1]
    for (parts, groups), budget in zip(ways, least, strict=True):
        plan = make_plan(spec_in(budget))
        assert (plan.num_parts, plan.num_expert_groups) == (parts, groups)
        assert plan.device_state_bytes <= budget
        title = title_of(plan)
        assert (quantities(title)[-2:] == [parts, groups]) == (groups > 1)
    with refuses(BudgetError, least[2]):
        spec_in(least[2] - 1)


@pytest.mark.exhaustive
def test_a_group_is_estimated_by_its_own_share(monkeypatch):
    case, loops = decoder(), {}
    for way in (BlockSplit(3), BlockSplit(5, 4)):
        only(monkeypatch, way)
        spec = make_spec(case, OPTIMIZERS["adamw_schedule"])
        stages = spec.first.program.stages
        loops[way] = [n for n in (count_loops(s.jaxpr) for s in stages) if n.flops]
    (whole, _), groups = loops[BlockSplit(3)], loops[BlockSplit(5, 4)]
    assert len(groups) == 8
    for group in groups:
        # Turns of a quarter of the bytes, so blocks that only fill a turn up are fewer.
        assert 0.2 * whole.flops < group.flops <= 0.25 * whole.flops
        assert 0.2 * whole.copied < group.copied < 0.35 * whole.copied


@pytest.mark.by_default("6-None")
@pytest.mark.parametrize(("num", "at_once"), [(3, None), (6, None), (6, 3)])
def test_groups_of_a_mixture_give_the_bits_of_all_experts(num, at_once, monkeypatch):
    """Routing leaves an expert without tokens, and gives another one most of them."""
    rng = np.random.default_rng(num)
    tokens, width, inside = 70, 16, 24
    if at_once is not None:  # of all experts; a group's turns have one block
        monkeypatch.setattr(expert_blocks, "_TURN_BYTES", at_once * 4 * 3 * width * inside)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / 4, jnp.bfloat16)

    weights = normal(num, inside, width), normal(num, inside, width), normal(num, width, inside)
    x, cotangent = normal(tokens, width), normal(tokens, width)
    others = rng.integers(0, num - 2, (tokens, 1))
    chosen = jnp.asarray(np.where(rng.random((tokens, 1)) < 0.6, num - 1, others), jnp.int32)
    shares = jnp.asarray(rng.random((tokens, 1)), jnp.float32)

    @partial(jax.jit, static_argnames="wanted")
    def gradients(x, shares, weights, wanted):
        with traced_for(expert_groups=wanted):
            out, transposed = jax.vjp(
                lambda x, shares, weights: mix(x, chosen, shares, weights, gated(jax.nn.silu)),
                x, shares, weights,
            )  # fmt: skip
            return out, transposed(cotangent)

    whole = gradients(x, shares, weights, 1)
    found = gradients(x, shares, weights, 3)
    if at_once is None:
        check_same_bits(found, whole)
    else:  # products of other sizes, and terms of gradients in another order
        check_close(found, whole, 0.01, "result")
    assert all(np.any(np.asarray(a) != 0) for a in jax.tree.leaves(whole))


def test_all_groups_share_their_traces():
    calls = []

    def act(x):
        calls.append(x)
        return jax.nn.silu(x)

    def num_calls(function, *args):
        calls.clear()
        jax.make_jaxpr(jax.grad(function))(*args)
        return len(calls)

    x, weights = jnp.ones((6, 8)), (jnp.ones((4, 8, 8)),) * 3

    def mixed(x, wanted):
        expert = gated(lambda x: act(x))
        with traced_for(expert_groups=wanted):
            return mix(x, jnp.zeros((6, 1), jnp.int32), jnp.ones((6, 1)), weights, expert).sum()

    assert num_calls(partial(mixed, wanted=2), x) == num_calls(partial(mixed, wanted=4), x)

    # A cut loss calls the rule itself: its jit is opened.
    def of_groups(rows, count):
        given = rows, rows[..., 0], weights, jnp.zeros((1, 1), jnp.int32)
        expert = gated(lambda x: act(x))
        return sum(jnp.sum(expert_blocks._of_group(expert, 2, *given)) for _ in range(count))

    rows = jnp.ones((1, 1, 6, 8))
    assert num_calls(partial(of_groups, count=1), rows) == num_calls(
        partial(of_groups, count=3), rows
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("compact", [False, True])
def test_a_checkpoint_is_restored_by_runs_that_divide_experts_otherwise(
    compact, tmp_path, monkeypatch
):
    case, make = decoder(), OPTIMIZERS["adamw_schedule"]
    precision = mt.Precision.compact() if compact else mt.Precision(compute=jnp.float32)
    trainers = []
    for way in (BlockSplit(1), BlockSplit(3, 2)):
        only(monkeypatch, way)
        built, sample = case.build(), case.batch(0)
        trainers.append(mt.Trainer(built, case.loss_fn, make(None), sample, precision=precision))
    whole, groups = trainers
    assert num_groups(spec_of(groups).leaves) == 2
    check_each_continues_the_other(whole, groups, case.batch(0), tmp_path)


@pytest.mark.exhaustive
def test_devices_share_groups_of_experts(monkeypatch):
    only(monkeypatch, BlockSplit(3, 2))
    case, make = decoder(), OPTIMIZERS["clip_adamw"]
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    batches = [case.batch(seed) for seed in range(2)]
    run = train(make_trainer(case, make, mesh=mesh), batches, gradients=False)
    assert num_groups(spec_of(run.trainer).leaves) == 2
    check_close(run.params, train_plain(case, make, batches).params, 2e-5, "parameter")
