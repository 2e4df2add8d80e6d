"""Blocks computed again before their backward: the same bits, and fewer bytes in the host."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from inside import compute_again, engine_of, spec_of, store_of
from megatrain_jax._src.common.keys import LASTING, Kind
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.transient_host_bytes import in_flight_bytes
from megatrain_jax._src.engine.spec.activations import counted_activations, recomputed_stages
from megatrain_jax._src.engine.spec.host import peak_bytes
from optimizers import OPTIMIZERS
from runs import SLOW, check_same_bits, make_trainer, train
from small_layers import BATCH, ROWS, WIDTH, layers, make_params, wide_layers
from workloads import chain
from zoo import CASES

# Models whose blocks hand on more than one value, skip blocks, draw, have experts or share groups.
NAMES = ["nnx_tied", "dropout_nnx", "moe", "unet", "shared_block"]

LONG = [pytest.param(name, marks=pytest.mark.long) for name in CASES if name not in NAMES]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*NAMES, *LONG])
def test_no_bit_changes(name):
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(3)]
    microbatches = 2 if case.microbatches else 1
    optimizer = OPTIMIZERS["clip_adamw" if len(name) % 2 else "adam"]
    runs = []
    for span in (1, 2, 3):
        trainer = make_trainer(case, optimizer, microbatches=microbatches)
        compute_again(trainer, span)
        again = spec_of(trainer).first.workload.again
        assert len(again) >= (span > 1) and len(again) < len(trainer.stages) - 1
        runs.append(train(trainer, batches, gradients=False))
    for run in runs[1:]:
        assert run.losses == runs[0].losses and run.metrics == runs[0].metrics
        check_same_bits(run.params, runs[0].params)
        check_same_bits(run.opt_state, runs[0].opt_state)


@pytest.mark.parametrize(("span", "again"), [(1, ()), (2, (1, 3)), (3, (1, 2))])
def test_blocks_whose_inputs_are_still_there_are_not_computed_again(span, again):
    """A last stage's backward follows its forward, and those of the blocks before it come next."""
    pure = jax.make_jaxpr(jnp.sin)(1.0).jaxpr
    stages: Any = [SimpleNamespace(is_block=0 < number < 6, jaxpr=pure) for number in range(7)]
    assert recomputed_stages(chain(7, makes=((),) * 7), stages, span) == set(again)


@pytest.mark.parametrize(("num_devices", "counted"), [(1, {0, 1}), (2, {0})])
def test_what_all_devices_have_is_no_activation_that_moves(num_devices, counted):
    """Value 0 has rows of examples, value 1 has not; value 2 is the loss."""
    both = {number: jax.ShapeDtypeStruct((64, 8), jnp.float32) for number in (0, 1)}
    program: Any = SimpleNamespace(
        stages=[
            SimpleNamespace(inputs=(), outputs=(0, 1)),
            SimpleNamespace(inputs=(0, 1), outputs=(2,)),
        ],
        outputs=(2,),
        values=both,
        examples=SimpleNamespace(values={0}),
        num_bytes=lambda number, devices: 2048 // devices,
    )
    activations, makes, reads = counted_activations(program, 3, num_devices)
    assert activations == dict.fromkeys(counted, 3 * 2048 // num_devices)
    assert makes == (tuple(counted), ()) and reads == ((), tuple(counted))


def waiting_bytes(step):
    return step.schedule.transient_bytes - in_flight_bytes(step.scheduled, step.schedule.steady)


@pytest.mark.by_default("2-adam")
@pytest.mark.parametrize("optimizer", ["adam", "clip"])
@pytest.mark.parametrize("span", [1, 2, 3])
def test_the_host_holds_what_is_counted_and_less_with_a_wider_span(optimizer, span):
    steps = {"adam": optax.adam(1e-3), "clip": optax.chain(optax.clip_by_global_norm(1.0))}
    precision = mt.Precision(compute=jnp.float32)
    trainer = mt.Trainer(make_params(), layers, steps[optimizer], BATCH, precision=precision)
    compute_again(trainer, span)
    engine, store, held = engine_of(trainer), store_of(trainer), []
    obey = engine.obey

    def watched(instruction, live):
        obey(instruction, live)
        waiting = [key for key in store.host if key.kind not in LASTING]
        held.append(sum(spec_of(trainer).first.workload.size(key) for key in waiting))

    engine.obey = watched
    for _ in range(3):
        trainer.read(trainer.step(BATCH))
    counted = waiting_bytes(spec_of(trainer).first)
    # A copy counts from when it is asked for, and is the store's a little later.
    assert 0.8 * counted <= max(held) <= counted
    value = ROWS * WIDTH * 4
    assert counted // value <= 11 // span + 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rows", "share"), [(ROWS, 0.6), (4, 0.3), (4, 0.6)])
def test_the_host_holds_what_is_counted_from_rest_to_rest(rows, share):
    # Gradients stay on the device between a step and the next one, which applies them.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    batch = {"x": BATCH["x"][:rows]}
    made = make_params(40), layers, optimizer, batch
    fp32 = mt.Precision(compute=jnp.float32)
    least, most = (
        mt.plan(*made, precision=fp32, device_budget=budget).device_bytes
        for budget in ("least", 2**40)
    )
    budget = int(least + share * (most - least))
    trainer = mt.Trainer(*made, precision=fp32, device_budget=budget)
    assert any(key.kind is Kind.GRADIENT for key in trainer.schedule.resident)
    engine, store, held = engine_of(trainer), store_of(trainer), []
    obey = engine.obey

    def watched(instruction, live):
        obey(instruction, live)
        held.append(sum(array.nbytes for slabs in store.host.values() for array in slabs))

    engine.obey = watched
    for _ in range(3):
        trainer.read(trainer.step(batch))
    stepping = len(held)
    trainer.flush()
    assert len(held) > stepping
    assert max(held) <= peak_bytes(spec_of(trainer).first)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adam", "clip_adamw"])
def test_residuals_that_wait_in_the_host_change_no_bit(optimizer):
    rng, precision = np.random.default_rng(0), mt.Precision(compute=jnp.float32)
    ups = [rng.normal(size=(WIDTH, 4 * WIDTH)).astype(np.float32) / 8 for _ in range(12)]
    params = {"layers": [{"up": up} for up in ups]}
    # Arithmetic takes so long there that the costliest residuals are kept, wherever they wait.
    options = {"precision": precision, "microbatches": 2, "hardware": SLOW, "progress": False}
    made = params, wide_layers, OPTIMIZERS[optimizer](params), BATCH
    least = mt.Trainer(*made, device_budget="least", **options).schedule.smallest_bytes
    runs = []
    for share, travels in ((7, False), (1.7, True)):
        trainer = mt.Trainer(*made, device_budget=int(share * least), **options)
        fetched = {i.key.kind for i in trainer.schedule.steady if i.op is Op.FETCH and i.key}
        assert trainer.schedule.selective and len(trainer.schedule.kept) == 11
        assert (Kind.RESIDUALS in fetched) == travels
        runs.append(train(trainer, [BATCH] * 3, gradients=False))
    assert runs[0].losses == runs[1].losses
    check_same_bits(runs[0].params, runs[1].params)
    check_same_bits(runs[0].opt_state, runs[1].opt_state)
    # Some wait in a host that is too small for all, and beside them blocks are computed again.
    mixed = mt.Trainer(*made, device_budget=int(1.7 * least), **options)
    compute_again(mixed, 2)
    first = spec_of(mixed).first
    assert first.selective
    compute_again(mixed, 2, first.schedule.transient_bytes + 6 * max(first.selective.residuals))
    first = spec_of(mixed).first
    left = {i.key for i in first.schedule.steady if i.op is Op.OFFLOAD and i.key}
    assert sum(key.kind is Kind.RESIDUALS for key in left) == 4 and first.workload.again
    run = train(mixed, [BATCH] * 3, gradients=False)
    assert run.losses == runs[0].losses
    check_same_bits(run.params, runs[0].params)
    check_same_bits(run.opt_state, runs[0].opt_state)
    # The least that waits in a host that is too small for them.
    step = spec_of(runs[1].trainer).first
    compute_again(runs[1].trainer, 1)
    assert waiting_bytes(spec_of(runs[1].trainer).first) < waiting_bytes(step)
    train(runs[1].trainer, [BATCH], gradients=False)


def test_prints_fire_once():
    seen = []

    def watched(params, batch):
        x = batch["x"]
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"])
            jax.debug.callback(lambda x: seen.append(x), x[0, 0])
        return (x**2).mean()

    precision = mt.Precision(compute=jnp.float32)
    trainer = mt.Trainer(make_params(6), watched, optax.sgd(0.1), BATCH, precision=precision)
    compute_again(trainer, 3)
    trainer.read(trainer.step(BATCH))
    jax.effects_barrier()
    assert len(seen) == 6
