"""Lean residuals: which results cost the most for their bytes, and that keeping those is exact."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from inside import on_one_device, spec_of
from megatrain_jax._src.engine.kernels.bound_stage import find_residuals, is_kept
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss.gradients import differentiated
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.spec.measured import by_measured_rates
from megatrain_jax._src.engine.spec.selective import seconds_per_byte, selective_residuals
from megatrain_jax._src.engine.spec.step_kernels import stage_kernel
from optimizers import OPTIMIZERS
from oracle import train_plain
from runs import SLOW, check_close, check_same_bits, make_spec, make_trainer, train
from workloads import all_resident_bytes
from zoo import CASES
from zoo_case import Case

ROWS, DIM, WIDE, LAYERS = 512, 16, 256, 3


def bottleneck():
    """Layers whose second product is as long as the first, and gives a 16th of its bytes."""

    def build():
        rng = np.random.default_rng(0)

        def normal(*shape):
            return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

        return {
            "layers": [{"up": normal(DIM, WIDE), "down": normal(WIDE, DIM)} for _ in range(LAYERS)]
        }

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params["layers"]:
            x = x + jnp.tanh(jnp.tanh(x @ layer["up"]) @ layer["down"])
        return jnp.mean(x**2)

    def batch(seed):
        return {"x": np.random.default_rng(seed).normal(size=(ROWS, DIM)).astype(np.float32)}

    return Case(
        name="bottleneck", build=build, loss_fn=loss_fn, blocks=LAYERS, templates=1, batch=batch
    )


def gradients(stage, values, cotangents, residuals):
    """Outputs and gradients of a stage: by its residuals, or computed as a whole without any."""
    n = len(stage.leaves)
    if residuals is None:
        outputs, pull = differentiated(stage, stage.has_cotangent, values[:n], values[n:])
        return outputs, pull(cotangents)
    outputs, kept = residuals.forward(values)
    assert [(x.shape, x.dtype) for x in kept] == [(a.shape, a.dtype) for a in residuals.avals]
    return outputs, residuals.backward(values, kept, cotangents)


def random_like(avals):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=a.shape), a.dtype)
        if jx.is_float(a)
        else jnp.zeros(a.shape, a.dtype)
        for a in avals
    ]


@pytest.mark.by_default("unet")
@pytest.mark.parametrize("name", ["nnx_tied", "unet", "moe", "linen_scan_remat"])
def test_any_kind_of_result_alone_gives_the_same_gradients(name, monkeypatch):
    tried = 0
    spec = make_spec(CASES[name], OPTIMIZERS["adam"])
    for bound in {b.stage.key: b for b in spec.first.stages}.values():
        stage, every = bound.stage, bound.residuals
        if every is None:
            continue
        avals = [v.aval for v in stage.jaxpr.invars[len(stage.consts) :]]
        values = random_like(avals)
        outputs = zip(stage.jaxpr.outvars, stage.has_cotangent, strict=True)
        cotangents = random_like([v.aval for v, arrives in outputs if arrives])
        expected = jax.jit(lambda v, c, s=stage: gradients(s, v, c, None))(values, cotangents)
        costs = seconds_per_byte(stage, every, SLOW)
        for kind in list(costs)[:2]:
            only = {other: (1.0, other == kind) for other in costs}
            monkeypatch.setattr(
                "megatrain_jax._src.engine.spec.selective.seconds_per_byte",
                lambda *a, only=only: only,
            )
            selective = selective_residuals(stage, every, SLOW)
            if len(costs) == 1:
                assert selective is None  # all of them are no choice
                continue
            assert (
                selective is not None
                and selective.selective
                and 0 < selective.num_bytes < every.num_bytes
            )
            assert 0 < selective.saved.total < every.saved.total
            found = jax.jit(lambda v, c, s=stage, r=selective: gradients(s, v, c, r))(
                values, cotangents
            )
            check_close(found, expected, 2e-6, "gradient")
            tried += 1
    assert tried


def test_the_costliest_results_are_told_by_their_seconds_a_byte():
    (stage, every), *_ = (
        (b.stage, b.residuals)
        for b in make_spec(bottleneck(), OPTIMIZERS["adam"]).first.stages
        if b.residuals is not None
    )
    costs = seconds_per_byte(stage, every, SLOW)
    up, down = ROWS * WIDE * 4, ROWS * DIM * 4
    # All products are in fp32.
    seconds = 2 * ROWS * DIM * WIDE / (SLOW.float32_share * SLOW.flops_per_s)
    assert sorted(costs.values()) == [
        (pytest.approx(seconds / up), False),
        (pytest.approx(seconds / down), True),
    ]
    selective = selective_residuals(stage, every, SLOW)
    assert selective is not None
    assert (every.num_bytes, selective.num_bytes) == (up + down, down)
    assert selective.saved.total * 2 == every.saved.total
    # Products that take as long for their bytes as all do are no costly ones.
    towers = make_spec(CASES["two_towers"], OPTIMIZERS["adam"]).first.stages
    assert all(b.selective is None for b in towers)
    assert find_residuals(stage, lambda *a, **k: False) is None


def test_products_of_many_matrices_are_not_worth_their_bytes():
    x = jnp.ones((4, 8, 8))
    for product, kept in ((lambda x: x @ x[0], True), (lambda x: x @ x, False)):
        eqn = jax.make_jaxpr(product)(x).eqns[-1]
        assert is_kept(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params) is kept


def test_each_of_several_devices_saves_its_part_of_the_seconds():
    one, two = (
        make_spec(
            bottleneck(), OPTIMIZERS["adam"], mesh=Mesh(jax.devices()[:n], "d"), hardware=SLOW
        ).first
        for n in (1, 2)
    )
    for alone, shared in ((one.workload, two.workload), (one.selective, two.selective)):
        assert alone is not None and shared is not None and max(alone.costs.recompute) > 0
        halves = [seconds / 2 for seconds in alone.costs.recompute]
        assert shared.costs.recompute == pytest.approx(halves)


def test_a_schedule_with_the_costliest_results_follows_measured_rates():
    options: Any = {"hardware": SLOW}
    least = make_spec(bottleneck(), OPTIMIZERS["adam"], **options).first.schedule.smallest_bytes
    options |= {"device_budget": round(1.2 * least)}
    spec = make_spec(bottleneck(), OPTIMIZERS["adam"], **options)
    before = spec.first.schedule
    assert before.selective and before.kept
    found = by_measured_rates(spec, 100.0, 1e9, before.transient).first.schedule
    assert found.selective and found.kept == before.kept and found.steady != before.steady
    num_fetches = sum(row.op is Op.FETCH for row in found.steady)
    # Almost all of a step is its copies now.
    assert num_fetches and found.seconds > 10 * before.seconds


@pytest.mark.by_default("2")
@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_lean_runs_agree_with_plain_jax_and_with_each_other(microbatches):
    case, optimizer = bottleneck(), "clip_adamw"
    batches = [case.batch(seed) for seed in range(3)]
    plain = train_plain(case, OPTIMIZERS[optimizer], batches, microbatches=microbatches)
    smallest = make_trainer(case, OPTIMIZERS[optimizer], microbatches=microbatches)
    first = spec_of(smallest).first
    low, high = first.schedule.smallest_bytes, all_resident_bytes(first.workload)
    every = first.workload.residuals[1]
    assert first.selective is not None
    room = sum(first.selective.residuals)  # the second products' results of all stages
    assert room < every
    runs = []
    for budget in (low + room, high + room, high + LAYERS * every):
        trainer = make_trainer(
            case,
            OPTIMIZERS[optimizer],
            microbatches=microbatches,
            budget=budget,
            hardware=dataclasses.replace(SLOW, link_bytes_per_s=1e12, host_bytes_per_s=1e13),
        )
        selective = budget < high + LAYERS * every
        assert trainer.schedule.selective == trainer.plan.keeps_costliest == selective
        assert len(trainer.schedule.kept) == LAYERS - 1  # the last one's forward is its backward's
        assert trainer.plan.num_kept == LAYERS - 1
        assert trainer.schedule.peak_bytes <= budget
        runs.append(train(trainer, batches, gradients=False))
        check_close(runs[-1].params, plain.params, 2e-6, "parameter")
    streamed, resident, _ = runs
    assert streamed.trainer.plan.bytes_in > 0 == resident.trainer.plan.bytes_in
    assert streamed.losses == resident.losses
    check_same_bits(streamed.params, resident.params)
    check_same_bits(streamed.opt_state, resident.opt_state)
    # All residuals are kept by other kernels than the costliest alone, in one cache, too.
    first = (spec_of(run.trainer).first for run in runs)
    backward = [stage_kernel(step, Op.BACKWARD, 1, on_one_device()) for step in first]
    assert len({kernel.name for kernel in backward}) == 2
