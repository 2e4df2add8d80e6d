"""Sums of gradients over microbatches, in bfloat16 and in arrays of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import megatrain_jax as mt
from inside import engine_of, on_one_device, spec_of
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.kernels.stage_kernels import NarrowSums
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from megatrain_jax._src.engine.state import layout
from poison import WIDTH, batch, spoiled_trainer
from runs import check_close, check_same_bits
from started import Started

MICROBATCHES = 4
WEIGHTS = np.random.default_rng(0).normal(size=(4, WIDTH, WIDTH)).astype(np.float32)
SGD = optax.sgd(1e-2, momentum=0.9)


def tied_loss(params, batch):
    """A loss of layers with biases, between a matrix and its transpose, which is behind a scale."""
    x = batch["x"] @ params["tied"]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return (((x * params["scale"]) @ params["tied"].T) ** 2).mean()


def tied_trainer(**options: Any) -> mt.Trainer:
    layers = [{"w": w, "b": np.zeros(WIDTH, np.float32)} for w in WEIGHTS[1:]]
    params = {"tied": WEIGHTS[0], "layers": layers, "scale": np.ones(WIDTH, np.float32)}
    return mt.Trainer(params, tied_loss, SGD, batch(0), progress=False, **options)


def test_sums_of_a_block_may_have_more_elements_than_numbers_of_32_bits():
    def rounded(*total: jax.Array) -> Any:
        zero = jnp.uint32(0)
        sums = NarrowSums(on_one_device(), [], (jax.random.key(0), zero, [zero], zero))
        return sums._rounded(total, "stochastic")

    sizes = 3 * 2**30, 3 * 2**30, 5  # a mixture's experts
    found = jax.eval_shape(rounded, *(jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes))
    assert [(x.size, x.dtype) for x in found] == [(n, jnp.bfloat16) for n in sizes]


@pytest.mark.by_default("float32-bfloat16")
@pytest.mark.parametrize("sums", ["float32", "bfloat16"])
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_leaves_with_their_own_arrays_get_the_same_bits_in_every_budget(sums, master, monkeypatch):
    """Those of one slab are rounded by the same random bits, but fused in other functions."""
    dtypes: dict[str, Any] = {"compute": "float32", "master": master, "sums": sums}
    precision = mt.Precision(**dtypes)
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "waves": 2, "precision": precision}
    whole = tied_trainer(**given)
    monkeypatch.setattr(layout, "LEAST_APART", WIDTH * WIDTH)
    with Started().replacing():
        apart = [tied_trainer(device_budget=size, **given) for size in ("least", 10**9)]
    batches = [batch(seed) for seed in range(2)]
    for trainer in (whole, *apart):
        arrays = engine_of(trainer).store.host[Key(Kind.MASTERS, 1)]
        assert [x.ndim for x in arrays] == [1] * (1 if trainer is whole else 2)
    expected, *found = ([t.read(t.step(b))["loss"] for b in batches] for t in (whole, *apart))
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    first, second = ([t.params, t.opt_state] for t in apart)
    check_same_bits(first, second)
    check_close(first, [whole.params, whole.opt_state], 1e-5, "state")


@pytest.mark.by_default("nearest")
@pytest.mark.usefixtures("started_once")
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_sums_in_bfloat16_take_half_and_are_the_same_in_every_budget(rounding):
    narrow = mt.Precision(compute=jnp.float32, sums="bfloat16", rounding=rounding)
    wide = spoiled_trainer(waves=2, on_nonfinite="skip")
    given: dict[str, Any] = {"waves": 2, "precision": narrow, "on_nonfinite": "skip"}
    several = [spoiled_trainer(device_budget=size, **given) for size in ("least", 10**9)]
    sizes, halves = (
        [row[Kind.GRADIENT] for row in spec_of(t).first.workload.sizes] for t in (wide, several[0])
    )
    assert sizes == [2 * size for size in halves]
    batches = [batch(seed) for seed in range(4)]
    expected, *found = ([t.read(t.step(b))["loss"] for b in batches] for t in (wide, *several))
    assert found[0] == found[1] != expected
    np.testing.assert_allclose(found[0], expected, rtol=1e-2)
    check_same_bits(several[0].params, several[1].params)


def test_a_sum_is_rounded_to_its_mean_with_other_bits_each_time():
    store = engine_of(spoiled_trainer()).store
    layout, leaves = store.layouts[0].master, [None] * len(store.layouts[0].master.shapes)

    @jax.jit
    def run(total, count):
        draws = store.key, store.step, [jnp.uint32(0)], count
        sums = NarrowSums(store.placement, [total], draws)
        return sums.add(None, layout, leaves, (), "stochastic"), sums.results[1]

    count, rows = jnp.uint32(0), []
    for number in range(400):
        (row,), count = run((jnp.full(layout.size, 1 + 2**-10, jnp.float32),), count)
        rows.append(np.asarray(row, np.float32))
        assert int(count) == number + 1
    assert not np.array_equal(rows[0], rows[1])
    # An eighth of the way to the next number of bfloat16: up in one of eight cases.
    assert np.mean(rows) == pytest.approx(1 + 2**-10, abs=1e-4)


@pytest.mark.by_default("least-2", "1000000000-4")
@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize("budget", ["least", 10**9])
def test_sums_in_bfloat16_are_rounded_once_per_wave(waves, budget):
    rows = np.random.default_rng(0).integers(0, 1000, (MICROBATCHES, 3, 64)).astype(np.float32)
    trainer = mt.Trainer(
        {"layers": [{"w": jnp.ones(64)} for _ in range(3)]},
        lambda params, x: sum((p["w"] * x[:, i]).sum() for i, p in enumerate(params["layers"])),
        optax.chain(optax.trace(0.0), optax.sgd(0.1)),
        rows,
        precision=mt.Precision(compute=jnp.float32, sums="bfloat16", rounding="nearest"),
        microbatches=MICROBATCHES,
        waves=waves,
        device_budget=budget,
        progress=False,
    )  # fmt: skip
    trainer.step(rows)
    expected = np.zeros(rows.shape[1:], jnp.bfloat16)
    for wave in np.split(rows / MICROBATCHES, waves):  # sums of these are exact in fp32
        expected = (expected.astype(np.float32) + wave.sum(0)).astype(jnp.bfloat16)
    layers = trainer.opt_state[0].trace["layers"]
    np.testing.assert_array_equal([layer["w"] for layer in layers], expected.astype(np.float32))
    # Only a wave's last backward reads the sums: one kernel, or two, or three.
    spec = spec_of(trainer)
    every = step_kernels(spec.first, spec.layouts, spec.optimizer, on_one_device())
    takes = {k.key: k.takes for k in every if k.name == "backward" and k.takes}.values()
    taken = [[x.dtype.name for x in jax.tree.leaves(own[3])] for own in takes]
    assert sum("bfloat16" in row for row in taken) == len(taken) / min(MICROBATCHES // waves, 3)


def test_sums_of_a_shared_parameter_are_narrow_between_its_stages():
    batches = [batch(seed) for seed in range(2)]
    wide, narrow = (
        tied_trainer(precision=mt.Precision(compute=jnp.float32, sums=sums))
        for sums in ("float32", "bfloat16")
    )
    step = spec_of(narrow).first
    assert set(step.gradient_dtypes.values()) == {"float32", "bfloat16"}
    # What is no sum is not rounded, also beside one.
    rounded = {group for bound in step.stages for group in bound.rounded}
    assert rounded == {g for g, dtype in step.gradient_dtypes.items() if dtype == "bfloat16"}
    expected, found = ([t.read(t.step(b))["loss"] for b in batches] for t in (wide, narrow))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("given", ["int8", "float16", None, "wide"])
def test_sums_have_the_range_of_fp32(given):
    with pytest.raises(ValueError, match=r"Precision\(sums="):
        mt.Precision(sums=given)
