"""Prints and callbacks of a loss fire once for each microbatch, with the values of plain JAX."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import megatrain_jax as mt
from messages import refuses

DIM, DEPTH = 4, 3
FULL = mt.Precision(compute=jnp.float32)
FIRED: list[tuple[str, np.ndarray]] = []


def see(name, value, ordered=False):
    """Records a value when it is computed."""
    jax.debug.callback(lambda v: FIRED.append((name, np.asarray(v))), value, ordered=ordered)


def fired(run):
    """What a function fires, in order."""
    FIRED.clear()
    jax.block_until_ready(run())
    jax.effects_barrier()
    return list(FIRED)


def batch_of(seed):
    return {"x": np.random.default_rng(seed).normal(size=(8, DIM)).astype(np.float32)}


def init_params():
    rng = np.random.default_rng(1)
    blocks = [{"w": rng.normal(size=(DIM, DIM)).astype(np.float32)} for _ in range(DEPTH)]
    stack = rng.normal(size=(2, DIM, DIM)).astype(np.float32)
    return {"blocks": blocks, "stack": stack, "head": rng.normal(size=DIM).astype(np.float32)}


# Where a print can be: each takes its name, x, w and whether it is ordered, and gives the next x.
def bare(name, x, w, ordered):
    y = x + jnp.tanh(x @ w)
    see(name, y.sum(), ordered)
    return y


def within_jit(name, x, w, ordered):
    return jax.jit(lambda x, w: bare(name, x, w, ordered))(x, w)


def within_cond(name, x, w, ordered):
    def yes(x):
        return bare(name + " yes", x, w, ordered)

    return jax.lax.cond(x.sum() > 0, yes, lambda x: bare(name + " no", x, w, ordered), x)


def within_loop(name, x, w, ordered):
    return jax.lax.scan(lambda x, _: (bare(name, x, w, ordered), None), x, length=2)[0]


def within_remat(name, x, w, ordered):
    return jax.checkpoint(lambda x, w: bare(name, x, w, ordered))(x, w)


def within_remat_loop(name, x, w, ordered):
    body = jax.checkpoint(lambda x, _: (bare(name, x, w, ordered), None))
    return jax.lax.scan(body, x, length=2)[0]


def of_parameters(name, x, w, ordered):
    see(name, (w**2).sum(), ordered)
    return x + jnp.tanh(x @ w)


def of_data(name, x, w, ordered):
    see(name, jnp.arange(3.0).sum(), ordered)
    return x + jnp.tanh(x @ w)


def of_cotangents(name, x, w, ordered):
    @jax.custom_vjp
    def same(x):
        return x

    def backward(saved, cotangent):
        see(name + " saved", saved.sum(), ordered)
        see(name + " cotangent", cotangent.sum(), ordered)
        return (cotangent,)

    same.defvjp(lambda x: (x, x), backward)
    return same(bare(name, x, w, ordered))


PLACES = (bare, within_jit, within_cond, within_loop, of_parameters, of_data)
REMATS = (within_remat, within_remat_loop)


def loss_of(places, ordered):
    """A loss with prints in the prologue, in blocks, in a scan over a stack, and in the head."""

    def loss_fn(params, batch):
        x = batch["x"]
        see("start", x.sum(), ordered)
        for i, (place, block) in enumerate(zip(places[1:], params["blocks"], strict=True)):
            x = place(f"block {i}", x, block["w"], ordered)
        x, _ = jax.lax.scan(
            lambda x, w: (places[0]("stack", x, w, ordered), None), x, params["stack"]
        )
        see("batch again", batch["x"].max(), ordered)
        out = x @ params["head"]
        see("end", out.sum(), ordered)
        return (out**2).mean()

    return loss_fn


def check_same(ours, theirs, ordered):
    """The same values fired as often; in the same order, too, where that is promised."""
    if not ordered:
        ours, theirs = (sorted(rows, key=lambda r: (r[0], float(r[1]))) for rows in (ours, theirs))
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


def drawn(seed):
    """Places for the stack and the blocks."""
    rng = np.random.default_rng(seed)
    stacked, *blocks = rng.integers(len(PLACES), size=1 + DEPTH)
    # JAX moves what no layer of a scan changes out of the scan, but only where it differentiates.
    return [PLACES[stacked % PLACES.index(of_data)], *(PLACES[i] for i in blocks)]


def trainer_of(loss_fn, **options):
    return mt.Trainer(
        init_params(), loss_fn, optax.sgd(0.1), batch_of(0),
        precision=FULL, progress=False, **options,
    )  # fmt: skip


@pytest.mark.by_default("3")
@pytest.mark.parametrize("seed", range(4))
def test_effects_fire_as_in_plain_jax(seed):
    ordered = seed % 2 == 0
    loss_fn, batch = loss_of(drawn(seed), ordered), batch_of(seed)
    expected = fired(lambda: jax.jit(jax.value_and_grad(loss_fn))(init_params(), batch))
    FIRED.clear()
    trainer = trainer_of(loss_fn, device_budget="least" if seed < 2 else None)
    jax.effects_barrier()
    assert not FIRED and trainer.plan.num_stages > DEPTH
    evaluated = fired(lambda: trainer.evaluate([batch])["loss"])
    check_same(evaluated, expected, ordered)
    check_same(fired(lambda: trainer.step(batch)), expected, ordered)
    assert len(fired(lambda: trainer.step(batch))) == len(expected)


@pytest.mark.by_default("True-None")
@pytest.mark.parametrize(("ordered", "budget"), [(False, "least"), (True, None)])
def test_what_remat_computes_again_fires_once(budget, ordered):
    places = [*REMATS, *REMATS]
    batch = batch_of(0)
    expected = fired(lambda: jax.jit(loss_of(places, ordered))(init_params(), batch))
    trainer = trainer_of(loss_of(places, ordered), device_budget=budget)
    check_same(fired(lambda: trainer.step(batch)), expected, ordered)


def test_microbatches_fire_each_for_itself():
    loss_fn, batch = loss_of([bare, *PLACES[:DEPTH]], False), batch_of(0)
    plain = jax.jit(jax.value_and_grad(loss_fn))
    parts = [{"x": batch["x"][m : m + 2]} for m in range(0, 8, 2)]
    expected = fired(lambda: [plain(init_params(), part) for part in parts])
    trainer = trainer_of(loss_fn, microbatches=4)
    check_same(fired(lambda: trainer.step(batch)), expected, False)


def test_effects_of_cotangents_fire_in_backward():
    loss_fn, batch = loss_of([of_cotangents] * (1 + DEPTH), False), batch_of(0)
    expected = fired(lambda: jax.jit(jax.value_and_grad(loss_fn))(init_params(), batch))
    rules = {name.split()[-1] for name, _ in expected}
    assert {"saved", "cotangent"} <= rules
    check_same(fired(lambda: trainer_of(loss_fn).step(batch)), expected, False)


def test_prints_of_like_blocks_share_a_template_and_other_texts_do_not(capfd):
    def loss_with(texts):
        def loss_fn(params, batch):
            x = batch["x"]
            for text, block in zip(texts, params["blocks"], strict=True):
                x = x + jnp.tanh(x @ block["w"])
                jax.debug.print(text + " {}", x.sum())
            return ((x @ params["head"]) ** 2).mean()

        return loss_fn

    params = init_params()
    params.pop("stack")
    counts = []
    for texts in (["a"] * DEPTH, ["a", "b", "c"]):
        options = {"precision": FULL, "progress": False}
        loss_fn = loss_with(texts)
        trainer = mt.Trainer(params, loss_fn, optax.sgd(0.1), batch_of(0), **options)
        counts.append(trainer.plan.num_templates)
        capfd.readouterr()
        jax.block_until_ready(trainer.step(batch_of(0)))
        jax.effects_barrier()
        ours = Counter(re.findall(r"^[abc] ", capfd.readouterr().out, re.MULTILINE))
        assert ours == Counter(f"{text} " for text in texts)
    assert counts[0] < counts[1]


def test_results_of_callbacks_are_used_in_the_prologue_and_refused_in_stages():
    calls = []

    def double(x):
        calls.append(1)
        return np.asarray(2 * x)

    def loss_with(detached):
        def loss_fn(params, batch):
            x = io_callback(double, jax.ShapeDtypeStruct((8, DIM), jnp.float32), batch["x"])
            x = x @ params["blocks"][0]["w"]
            if detached:
                shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
                x = x + io_callback(double, shape, jax.lax.stop_gradient(x))
            return ((x @ params["head"]) ** 2).mean()

        return loss_fn

    trainer = trainer_of(loss_with(False))
    calls.clear()
    loss = trainer.read(trainer.step(batch_of(0)))["loss"]
    assert len(calls) == 1
    expected = jax.jit(loss_with(False))(init_params(), batch_of(0))
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    with refuses(ValueError, "callback", "pure_callback"):
        mt.plan(init_params(), loss_with(True), optax.sgd(0.1), batch_of(0))


def test_effects_of_an_optimizer_are_refused():
    def init(params):
        return ()

    def update(updates, state, params=None):
        jax.debug.print("{}", optax.tree.norm(updates))
        return updates, state

    optimizer = optax.chain(optax.GradientTransformation(init, update), optax.sgd(0.1))
    with refuses(ValueError, "optimizer", "print", "callback"):
        mt.plan(init_params(), loss_of([bare] * (1 + DEPTH), False), optimizer, batch_of(0))
