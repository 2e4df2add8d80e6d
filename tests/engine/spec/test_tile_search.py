"""Stages in tiles: the numbers of plain JAX, less memory, and only where it is needed."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from inside import divide, engine_of, on_one_device, spec_of, steps_of
from megatrain_jax._src.engine import start
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels import cache
from megatrain_jax._src.engine.kernels.bound_stage import Divisible, Tiling
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.stage_kernels import residual_kernel_names
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.spec.budget import fit_new_shape_to_device
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.step_kernels import stage_kernel, step_kernels
from megatrain_jax._src.engine.spec.tile_search import TileFinder
from megatrain_jax._src.engine.state import pool
from messages import refuses
from optimizers import OPTIMIZERS
from oracle import train_plain
from quantities import quantities
from runs import NUM_STEPS, SLOW, check_close, check_same_bits, make_trainer, recording, train
from workloads import all_resident_bytes
from zoo import CASES

pytestmark = pytest.mark.usefixtures("traced_once")

TOLERANCE = 2e-6
SAMPLE = set(random.Random(0).sample(sorted(CASES), 2)) | {"moe", "dropout_nnx"}
WIDTH, HIDDEN, VOCAB = 16, 512, 64


def tiles_of(trainer):
    return [bound.tiles for bound in trainer.stages]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.long) for n in CASES],
)
def test_training_in_the_smallest_tiles_agrees_with_plain_jax(name):
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(NUM_STEPS)]
    plain = train_plain(case, OPTIMIZERS["sgd_momentum"], batches)
    trainer = make_trainer(case, recording(OPTIMIZERS["sgd_momentum"]))
    divide(trainer, 0)
    run = train(trainer, batches)
    check_close(run.first_grads, plain.first_grads, TOLERANCE, "gradient")
    np.testing.assert_allclose(run.losses, plain.losses, rtol=1e-6)
    check_close(run.params, plain.params, TOLERANCE, "parameter")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["nnx_tied", "dropout_nnx"])
def test_budgets_change_no_bit_in_equal_tiles(name):
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(NUM_STEPS)]
    first = spec_of(make_trainer(case, OPTIMIZERS["clip_adamw"])).first
    runs = []
    # With more memory, stages would save residuals, by functions with other tiles.
    for budget in (first.schedule.smallest_bytes, all_resident_bytes(first.workload)):
        trainer = make_trainer(case, OPTIMIZERS["clip_adamw"], microbatches=2, budget=budget)
        divide(trainer, 0)
        assert any(tiles_of(trainer)) and not trainer.schedule.kept
        runs.append(train(trainer, batches, gradients=False))
    assert runs[0].losses == runs[1].losses
    check_same_bits(runs[0].params, runs[1].params)
    check_same_bits(runs[0].opt_state, runs[1].opt_state)


def test_kept_residuals_are_read_and_written_in_tiles():
    case = CASES["equinox"]
    batches = [case.batch(seed) for seed in range(2)]
    plain = train_plain(case, OPTIMIZERS["adam"], batches)
    trainer = make_trainer(case, OPTIMIZERS["adam"], budget=10**9, hardware=SLOW)
    assert trainer.schedule.kept and not trainer.schedule.selective
    divide(trainer, 0)
    assert "backward of kept" in {k for tiles in tiles_of(trainer) for k in tiles}
    # The plan counts the stages by the kernels that run: with residuals, where these are kept.
    for what, keeping in zip(("forward", "backward"), residual_kernel_names(False), strict=True):
        kept = (keeping if s in trainer.schedule.kept else what for s in range(len(trainer.stages)))
        in_tiles = sum(name in tiles for name, tiles in zip(kept, tiles_of(trainer), strict=True))
        assert in_tiles == sum(row.count for row in trainer.plan.tiles if row.what == what)
    run = train(trainer, batches, gradients=False)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=1e-6)
    check_close(run.params, plain.params, TOLERANCE, "parameter")


def build():
    """MLPs 32 times as wide as the model, so that their backward needs the most memory by far."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    blocks = [{"up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, WIDTH)} for _ in range(3)]
    return {"embed": draw(VOCAB, WIDTH), "blocks": blocks}


def apply(block, x):
    mixed = jnp.cumsum(x, axis=1) / (1 + jnp.arange(x.shape[1]))[:, None]
    scaled = jax.nn.standardize(x + mixed)
    return x + jax.nn.silu(scaled @ block["up"]) @ block["down"]


def loss_fn(model, batch):
    x = model["embed"][batch["tokens"]]
    for block in model["blocks"]:
        x = apply(block, x)
    logits = x @ model["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def make_batch(length, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (1, length + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def wide_trainer(length=512, **options):
    precision = mt.Precision(compute=jnp.float32)
    optimizer, sample = optax.adam(1e-3), make_batch(length)
    return mt.Trainer(build, loss_fn, optimizer, sample, precision=precision, **options)


def on_a_device_of(monkeypatch, num_bytes):
    """Has trainers believe that they have a GPU with so much memory left."""
    machine = dataclasses.replace(mt.card("H200"), device_bytes=num_bytes, host_bytes=None)
    monkeypatch.setattr(start, "card_here", lambda: machine)
    monkeypatch.setattr(pool, "free_device_bytes", lambda placement: num_bytes)


def needed_by(trainer, cache):
    """Bytes of temporaries that the compiled functions of a trainer's steps need at most."""
    spec = spec_of(trainer)
    kernels = step_kernels(spec.first, spec.layouts, spec.optimizer, on_one_device())
    return cache.compile(kernels)


@pytest.mark.exhaustive
def test_backward_is_divided_on_several_devices_too():
    batches = [
        jax.tree.map(lambda *rows: np.concatenate(rows), make_batch(512, n), make_batch(512, n + 9))
        for n in range(3)
    ]

    def make(mesh):
        precision = mt.Precision(compute=jnp.float32)
        return mt.Trainer(
            build, loss_fn, optax.sgd(0.1), batches[0], precision=precision, mesh=mesh
        )

    def needed(trainer):
        step, placement = spec_of(trainer).first, engine_of(trainer).store.placement
        return KernelCache().compile([stage_kernel(step, Op.BACKWARD, 2, placement)])

    one, two = make(None), make(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))
    whole = needed(two)
    divide(two, 0)
    assert needed(two) < whole / 8
    runs = [train(trainer, batches, gradients=False) for trainer in (one, two)]
    np.testing.assert_allclose(runs[1].losses, runs[0].losses, rtol=1e-6)
    check_close(runs[1].params, runs[0].params, TOLERANCE, "parameter")


def test_stages_get_the_tiles_that_the_device_has_room_for(monkeypatch):
    whole = wide_trainer()
    most = needed_by(whole, engine_of(whole).kernels)  # its steps need not compile them again
    fixed = (
        whole.plan.device_state_bytes
        + whole.plan.device_other_bytes
        + spec_of(whole).largest_slab_bytes
    )
    batches = [make_batch(512, seed) for seed in range(2)]
    expected = [whole.read(whole.step(batch))["loss"] for batch in batches]
    # Estimates for the first shape were too large if it runs: so are those for a similar one.
    tight = dataclasses.replace(spec_of(whole), room_bytes=1)
    what = tight.first, tight, engine_of(whole).kernels, on_one_device()
    alike = fit_new_shape_to_device(*what, training=True)
    assert not any(bound.tiles for bound in alike.stages)

    on_a_device_of(monkeypatch, int((fixed + most / 3) / 0.95))
    trainer = wide_trainer()
    plan = trainer.plan
    assert {(row.name, row.what, row.count) for row in plan.tiles} >= {
        ("blocks.0 … blocks.2", "backward", 3)
    }
    assert all(row.num_tiles * row.num_rows == 512 for row in plan.tiles)
    assert plan.device_temporary_bytes == needed_by(trainer, KernelCache()) <= most / 3
    losses = [trainer.read(trainer.step(batch))["loss"] for batch in batches]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    # An evaluation of longer sequences, too.
    longer = [make_batch(1024)]
    np.testing.assert_allclose(
        trainer.evaluate(longer)["loss"], whole.evaluate(longer)["loss"], rtol=1e-4
    )
    steps = [step for step in steps_of(trainer) if step is not spec_of(trainer).first]
    assert any(bound.tiles for bound in steps[0].stages)
    # The memory of its functions is known, by which they are dispatched.
    monkeypatch.setattr(cache, "_LARGE_TEMPORARIES", 1)
    known = (stage_kernel(steps[0], Op.FORWARD, n, on_one_device()) for n in range(5))
    assert any(map(engine_of(trainer).kernels.has_large_temporaries, known))


def test_a_device_that_has_no_room_for_blocks_in_parts_either_is_refused(monkeypatch):
    whole = wide_trainer()
    state = whole.plan.device_state_bytes + whole.plan.device_other_bytes
    on_a_device_of(monkeypatch, (state + spec_of(whole).largest_slab_bytes) // 8)
    with refuses(MemoryError, "temporary", "parts"):
        wide_trainer()


def test_tiles_do_not_jump_if_an_estimate_is_slightly_different(monkeypatch):
    """Estimates of 1,048,576 tokens, in GiB: 32 tiles took 0.8 times as much as 16, to 0.05%."""
    batch = make_batch(512)
    adapted, _ = adapt(build, loss_fn, batch, 0)
    options = Options(precision=mt.Precision(compute=jnp.float32))
    step = make_run_spec(adapted, loss_fn, optax.adam(1e-3), batch, options).first
    kernel = stage_kernel(step, Op.BACKWARD, 2, on_one_device())
    needs = {2: 140.2, 4: 81.2, 8: 51.7, 16: 36.95, 32: 29.58, 64: 25.89}
    assert set(needs) <= set(Divisible(kernel).counts)

    finder = TileFinder(KernelCache(), on_one_device())

    def chosen(room, factor=1.0, unit=2**30):
        changed = {n: unit * need * (factor if n == 32 else 1) for n, need in needs.items()}
        tilings = {n: Tiling(num_tiles=n, num_rows=512 // n) for n in needs}
        monkeypatch.setattr(finder, "_in_tiles", lambda _, n: (tilings[n], changed[n]))
        monkeypatch.setattr(KernelCache, "estimate", lambda *_: unit * 243.3)
        found = finder.within(step, unit * room).stages[2].tiles
        return found["backward"].num_tiles

    assert {chosen(21.7, factor) for factor in (0.99, 0.999, 1.0, 1.001, 1.01)} == {64}
    # Whether the first guess is too high, or too low as for bytes.
    for unit in (2**30, 1):
        assert [chosen(room, unit=unit) for room in (26, 30, 40, 90)] == [64, 32, 16, 4]


def test_where_all_fits_nothing_is_in_tiles(monkeypatch):
    on_a_device_of(monkeypatch, 2**30)
    trainer = wide_trainer()
    assert not any(tiles_of(trainer)) and not trainer.plan.tiles


def test_a_plan_says_what_is_in_tiles():
    def plan(gib):
        machine = dataclasses.replace(mt.card("H200"), device_bytes=int(gib * 2**30))
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch(2**17))
        return mt.plan(build, loss_fn, optax.adam(1e-3), batch, hardware=machine)

    roomy, narrow = plan(64), plan(0.5)
    assert not roomy.tiles and (roomy.device_temporary_bytes or 0) > 2**29
    assert narrow.tiles and narrow.fits_device
    row = next(row for row in narrow.tiles if row.what == "backward" and row.count == 3)
    lines = [line for line in str(narrow).splitlines() if "backward of blocks.0 … blocks.2" in line]
    assert quantities(lines[0]) == [row.num_tiles, row.num_rows]


def test_what_a_callback_is_shown_is_never_in_tiles():
    seen = []

    def watched(model, batch):
        x = model["embed"][batch["tokens"]]
        for block in model["blocks"]:
            x = apply(block, x)
            jax.debug.callback(lambda x: seen.append(x.shape), x)
        return (x**2).mean()

    precision = mt.Precision(compute=jnp.float32)
    trainer = mt.Trainer(build, watched, optax.sgd(0.1), make_batch(64), precision=precision)
    divide(trainer, 0)
    trainer.read(trainer.step(make_batch(64)))
    jax.effects_barrier()
    assert set(seen) == {(1, 64, WIDTH)} and len(seen) == 3
