"""Computing in float16: the scale of the loss, steps that it costs, and cards without bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import settings_of
from megatrain_jax._src.engine.kernels import steps as step_kernels
from messages import refuses, tells, warns
from optimizers import EPS
from runs import check_close, check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")

ROWS, LENGTH, WIDTH, VOCABULARY = 8, 4, 16, 24
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, eps=EPS),
    "clipped": optax.chain(optax.clip_by_global_norm(1.3), optax.sgd(0.1, momentum=0.9)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
}
# Gradients are rounded to 11 bits at other places than in one large program.
TOLERANCE = 2**-9
STEEP = [64.0, 64.0, 1.0, 1.0, 1.0, 1.0, 256.0, 1.0, 1.0, 1.0]
FLOAT16 = mt.Precision(compute=jnp.float16)


def make_params() -> Any:
    """Blocks, and an embedding that two stages read, so that its gradient is a sum."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (0.3 * rng.normal(size=shape)).astype(np.float32)

    layers = [{"w": normal(WIDTH, WIDTH), "b": normal(WIDTH)} for _ in range(3)]
    return {"embed": normal(VOCABULARY, WIDTH), "layers": layers}


def loss_fn(params: Any, batch: Any) -> Any:
    """Cross-entropy with an auxiliary loss; `steep` multiplies the gradients of a whole step."""
    x = params["embed"][batch["tokens"]]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    logits = (x @ params["embed"].T).astype(jnp.float32)
    auxiliary = jnp.mean(jnp.square(x.astype(jnp.float32)))
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
    return batch["steep"].mean() * (entropy + 0.01 * auxiliary), {"auxiliary": auxiliary}


def make_batch(seed: int, steep: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    tokens, labels = rng.integers(0, VOCABULARY, (2, ROWS, LENGTH))
    return {"tokens": tokens, "labels": labels, "steep": np.full(ROWS, steep, np.float32)}


def make_trainer(optimizer: Any, precision: Any = FLOAT16, **options: Any) -> mt.Trainer:
    options = {"progress": False, **options}
    return mt.Trainer(
        make_params(), loss_fn, optimizer, make_batch(0), precision=precision, **options
    )


def everything(trainer: mt.Trainer) -> Any:
    return [trainer.params, trainer.opt_state]


def split(batch: Any, microbatches: int) -> list[Any]:
    parts = jax.tree.map(lambda x: np.split(x, microbatches), batch)
    return [{name: part[m] for name, part in parts.items()} for m in range(microbatches)]


def train_plain(
    optimizer: Any, batches: Any, microbatches: int, scale: float, period: int
) -> tuple[list[dict[str, float]], Any]:
    """Returns each step's metrics and the last parameters, with all of them in one tree."""
    params, good, history = jax.tree.map(jnp.asarray, make_params()), 0, []
    state = optimizer.init(params)

    @jax.jit
    def differentiate(params: Any, batch: Any, seed: Any) -> Any:
        half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
        loss, pull, _ = jax.vjp(lambda p: loss_fn(p, batch), half, has_aux=True)
        return loss, jax.tree.map(lambda g: g.astype(jnp.float32), pull(seed)[0])

    @jax.jit
    def update(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        seed = jnp.float32(scale / microbatches)
        rows = [differentiate(params, part, seed) for part in split(batch, microbatches)]
        sums = jax.tree.map(lambda *g: sum(g), *(row[1] for row in rows))
        gradients = jax.tree.map(lambda g, scale=scale: g / scale, sums)
        finite = all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradients))
        history.append(
            {
                "loss": float(np.mean([row[0] for row in rows])),
                "grad_norm": float(optax.tree.norm(gradients)),
                "loss_scale": scale,
                "skipped": float(not finite),
            }
        )
        if not finite:
            scale, good = scale / 2, 0
            continue
        (params, state), good = update(gradients, state, params), good + 1
        if good == period:
            scale, good = 2 * scale, 0
    return history, params


def test_a_scale_stays_within_its_bounds(monkeypatch):
    for name, value in {"_PERIOD": 2, "_LEAST": 1.0, "_MOST": 16.0}.items():
        monkeypatch.setattr(step_kernels, name, value)
    change = jax.jit(step_kernels.change().build())
    found, expected, seen = (jnp.float32(4), jnp.int32(0)), (4.0, 0), set()
    for ok in [False] * 5 + [True] * 14 + (np.random.default_rng(0).random(60) < 0.7).tolist():
        found, (scale, good) = change(*found, ok), expected
        expected = (scale, good + 1) if ok else (max(scale / 2, 1.0), 0)
        if expected[1] == 2:
            expected = min(2 * scale, 16.0), 0
        assert tuple(map(float, found)) == expected
        seen.add(expected[0])
    assert seen == {1.0, 2.0, 4.0, 8.0, 16.0}


@pytest.mark.by_default("adamw-options0")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {}),
        ("clipped", {"microbatches": 4, "waves": 2, "device_budget": "least"}),
        ("adafactor", {"device_budget": "least", "devices": 2}),
        ("clipped", {"microbatches": 2, "devices": 2}),
    ],
)
def test_steps_equal_plain_jax_and_optax(monkeypatch, name, options):
    """The scale overflows, grows after three good steps, and overflows again: it counts anew."""
    monkeypatch.setattr(step_kernels, "_PERIOD", 3)
    num_devices = options.pop("devices", 1)
    mesh = Mesh(jax.devices()[:num_devices], "data")
    trainer = make_trainer(OPTIMIZERS[name], mesh=mesh, **options)
    assert trainer.plan.update_mode == "deferred"
    batches = [make_batch(seed, x) for seed, x in enumerate(STEEP)]
    parts = options.get("microbatches", 1)
    expected, params = train_plain(OPTIMIZERS[name], batches, parts, 2.0**15, 3)
    found = [trainer.read(metrics) for metrics in map(trainer.step, batches)]
    for ours, theirs in zip(found, expected, strict=True):
        for metric in ("loss_scale", "skipped"):
            assert ours[metric] == theirs[metric]
        for metric in ("loss", "grad_norm"):
            np.testing.assert_allclose(ours[metric], theirs[metric], rtol=TOLERANCE)
    assert [row["skipped"] for row in found] == [1, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    assert [row["loss_scale"] for row in found[5:]] == [2.0**n for n in (14, 14, 13, 13, 13)]
    check_close(trainer.params, params, TOLERANCE, "parameter")


SCALED = {
    "adamw": (OPTIMIZERS["adamw"], {}),
    "clipped in waves": (OPTIMIZERS["clipped"], {"microbatches": 4, "waves": 2}),
    "devices": (OPTIMIZERS["adafactor"], {"devices": 2, "microbatches": 2}),
    "compact": (
        OPTIMIZERS["clipped"],
        {"precision": mt.Precision.compact(compute="float16", sums="bfloat16"), "microbatches": 2},
    ),
    "frozen": (OPTIMIZERS["adamw"], {"trainable": "layers/.*/w", "precision": "float16"}),
    "by leaf": (optax.contrib.muon(1e-2), {}),
}


@pytest.mark.by_default("adamw", "clipped in waves")
@pytest.mark.parametrize("name", SCALED)
def test_no_bit_depends_on_the_scale_while_nothing_overflows(monkeypatch, name):
    """Powers of two change only exponents, so every group has to be divided by the same one."""
    optimizer, options = SCALED[name]
    options = dict(options)
    mesh = Mesh(jax.devices()[: options.pop("devices", 1)], "data")
    found = []
    for first in (2.0**9, 2.0**12):
        monkeypatch.setattr(step_kernels, "_FIRST", first)
        trainer = make_trainer(optimizer, mesh=mesh, **options)
        read = [trainer.read(trainer.step(make_batch(seed, 4.0))) for seed in range(3)]
        assert {(row.pop("loss_scale"), row.pop("skipped")) for row in read} == {(first, 0)}
        found.append((read, everything(trainer)))
    (ours, trained), (theirs, expected) = found
    assert ours == theirs
    check_same_bits(trained, expected)


def test_streamed_steps_equal_resident_ones_and_an_evaluation_has_no_scale():
    streamed, resident = (
        make_trainer(OPTIMIZERS["clipped"], device_budget=budget) for budget in ("least", None)
    )
    batches = [make_batch(seed, x) for seed, x in enumerate(STEEP)]
    rows = [[t.read(m) for m in map(t.step, batches)] for t in (streamed, resident)]
    assert str(rows[0]) == str(rows[1])  # norms of skipped steps are NaN
    check_same_bits(everything(streamed), everything(resident))
    before = streamed.evaluate(batches[:1])["loss"]
    assert before == resident.read(resident.step(batches[0]))["loss"]


@pytest.mark.by_default("adamw")
@pytest.mark.parametrize("optimizer", ["adamw", "clipped"])
def test_a_resumed_run_has_the_scale_and_its_count(monkeypatch, tmp_path, optimizer):
    monkeypatch.setattr(step_kernels, "_PERIOD", 3)
    batches = [make_batch(seed, x) for seed, x in enumerate(STEEP)]

    def run(steps: int, folder: str) -> mt.FitResult:
        return mt.fit(
            make_params(),
            loss_fn,
            batches,
            OPTIMIZERS[optimizer],
            steps=steps,
            precision="float16",
            checkpoint_dir=tmp_path / folder,
            checkpoint_every=2,
            progress=False,
        )

    whole = run(8, "whole")
    for steps in (1, 4, 8):  # at a scale that was just halved, in the middle of a count
        parts = run(steps, "parts")
    names = ("loss", "grad_norm", "loss_scale", "skipped")
    shown = [[str([row[name] for name in names]) for row in r.history] for r in (whole, parts)]
    assert shown[0] == shown[1] and len(shown[0]) == 8
    assert parts.trainer.num_skipped == whole.trainer.num_skipped == 3
    check_same_bits(everything(parts.trainer), everything(whole.trainer))


@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_in_another_dtype(tmp_path):
    plain, scaled = (make_trainer(OPTIMIZERS["adamw"], dtype) for dtype in ("float32", "float16"))
    for seed, x in enumerate(STEEP[:3]):
        assert "loss_scale" not in plain.read(plain.step(make_batch(seed, x)))
        scaled.read(scaled.step(make_batch(seed, x)))
    plain.save(tmp_path / "plain")
    scaled.save(tmp_path / "scaled")
    expected = [plain.params, scaled.params]
    scaled.restore(tmp_path / "plain")
    plain.restore(tmp_path / "scaled")
    check_same_bits([scaled.params, plain.params], expected)
    # Nothing is known of a scale, so it begins anew.
    assert scaled.read(scaled.step(make_batch(3)))["loss_scale"] == 2.0**15
    assert np.isfinite(plain.read(plain.step(make_batch(3)))["loss"])


def test_a_scale_that_is_still_halved_ends_no_run():
    trainer = make_trainer(OPTIMIZERS["clipped"], max_skipped=3)
    # All gradients overflow at any scale, but the loss does not: first the scale comes down to 1.
    found = [trainer.step(make_batch(0, 1e30)) for _ in range(15)]
    assert [trainer.read(m)["loss_scale"] for m in found] == [2.0**n for n in range(15, 0, -1)]
    last = trainer.step(make_batch(0, 1e30))
    with refuses(FloatingPointError, 14, 16, "finite"):
        trainer.read(last)
    # A loss that is not finite is not due to the scale.
    trainer = make_trainer(OPTIMIZERS["clipped"], max_skipped=3)
    found = [trainer.step(make_batch(0, np.inf)) for _ in range(3)]
    with refuses(FloatingPointError, 1, 3, "finite"):
        trainer.read(found[-1])


@pytest.mark.parametrize(
    ("card", "dtype"),
    [
        (mt.card("T4"), "float16"),
        (mt.card("V100"), "float16"),
        (mt.card("H100"), "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_the_dtype_that_nobody_chose_is_one_that_the_gpu_has(card, dtype):
    for precision in (mt.Precision(), mt.Precision.compact()):
        assert precision.on(card).compute == jnp.dtype(dtype)
    told = mt.Precision(compute=jnp.float32)
    assert told.on(card) == told


@pytest.mark.exhaustive
def test_a_gpu_without_bfloat16_computes_in_float16_unless_told_otherwise():
    optimizer, sample = OPTIMIZERS["adamw"], make_batch(0)

    def plan(hardware: Any, **options: Any) -> mt.Plan:
        return mt.plan(make_params(), loss_fn, optimizer, sample, hardware=hardware, **options)

    def computes_in_float16(told: str) -> bool:
        return tells(told, "bfloat16", "float16", "scaling")

    for card in ("T4", "V100"):
        warnings = plan(card).warnings
        assert len(warnings) == 1 and warnings == plan(card, precision="compact").warnings
        assert computes_in_float16(warnings[0])
        assert plan(card).update_mode == "deferred"
        assert computes_in_float16(str(plan(card)))
    for told in (plan("T4", precision="float32"), plan("A100")):
        assert told.warnings == () and told.update_mode == "immediate"
    (slow,) = plan("T4", precision="bfloat16").warnings
    assert tells(slow, "bfloat16") and not computes_in_float16(slow)
    assert plan("T4", precision="float16").warnings == ()
    with warns(mt.PlanWarning, "bfloat16", "float16", "scaling"):
        trainer = make_trainer(optimizer, mt.Precision(), hardware="T4")
    assert trainer.read(trainer.step(sample))["loss_scale"] == 2.0**15
    assert settings_of(trainer)["call"]["precision.compute"] == "float16"
