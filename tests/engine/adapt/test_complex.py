"""Complex numbers within a model: Fourier layers, state spaces and complex convolutions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from megatrain_jax._src.engine.options.options import DeviceBudget
from optimizers import OPTIMIZERS
from oracle import PlainRun, train_exact, train_plain
from runs import SLOW, check_as_near, make_trainer, recording, train
from zoo_case import Case

pytestmark = pytest.mark.usefixtures("started_once")
DIM, TIME, MODES = 8, 16, 4


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(4, TIME, DIM)).astype(np.float32)}


def init(**shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(DIM)).astype(np.float32)

    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(3)]
    return {"embed": normal(DIM, DIM), "layers": layers, "head": normal(DIM, DIM)}


def weight(layer: dict[str, jax.Array], name: str) -> jax.Array:
    return lax.complex(layer[name + "_re"], layer[name + "_im"])


def with_imaginary(x: jax.Array) -> jax.Array:
    return lax.complex(x, jnp.zeros_like(x))


def fourier(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A layer of a Fourier neural operator: a product for each of the lowest frequencies."""
    modes = jnp.fft.rfft(x, axis=1)[:, :MODES]
    modes = jnp.einsum("bmi,mio->bmo", modes, weight(layer, "w"))
    modes = jnp.pad(modes, ((0, 0), (0, TIME // 2 + 1 - MODES), (0, 0)))
    return jax.nn.gelu(jnp.fft.irfft(modes, n=TIME, axis=1) + x @ layer["skip"])


def state_space(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A layer of an S5: a diagonal linear recurrence on complex numbers."""
    decay = jnp.exp(-jnp.exp(layer["decay"]) + 1j * layer["angle"])
    entered = with_imaginary(x) @ weight(layer, "b")

    def after(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    decays = jnp.broadcast_to(decay, entered.shape)
    _, states = lax.associative_scan(after, (decays, entered), axis=1)
    return x + jax.nn.gelu((states @ weight(layer, "c")).real)


def convolution(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A layer that hands complex numbers on."""
    x = x if jnp.iscomplexobj(x) else with_imaginary(x)
    y = lax.conv_general_dilated(
        x, weight(layer, "w"), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return x + y / (1 + jnp.abs(y))


# The last one has room for all that a stage may keep.
BUDGETS: list[tuple[DeviceBudget, int]] = [("least", 2), (None, 1), (10**9, 1)]
SQUARE, PER_MODE, KERNEL = (DIM, DIM), (MODES, DIM, DIM), (3, DIM, DIM)
LAYERS = {
    "Fourier": (fourier, {"w_re": PER_MODE, "w_im": PER_MODE, "skip": SQUARE}),
    "state space": (
        state_space,
        dict.fromkeys(("decay", "angle"), (DIM,))
        | dict.fromkeys(("b_re", "b_im", "c_re", "c_im"), SQUARE),
    ),
    "convolution": (convolution, {"w_re": KERNEL, "w_im": KERNEL}),
}


@functools.cache
def case_of(name: str) -> Case:
    apply, shapes = LAYERS[name]

    def loss_fn(model, batch):
        x = batch["x"] @ model["embed"]
        for layer in model["layers"]:
            x = apply(layer, x)
        return jnp.mean((x.real @ model["head"] - batch["x"]) ** 2)

    return Case(
        name=name,
        build=lambda: init(**shapes),
        loss_fn=loss_fn,
        blocks=3,
        templates=1,
        batch=batch,
    )


BATCHES = [batch(seed) for seed in range(2)]


@functools.cache
def expected_of(name: str) -> tuple[PlainRun, PlainRun]:
    """Runs of plain JAX, in fp32 and in float64."""
    given = case_of(name), OPTIMIZERS["adam"], BATCHES
    return train_plain(*given), train_exact(*given)


@pytest.mark.by_default("convolution-ample")
@pytest.mark.parametrize(("budget", "microbatches"), BUDGETS, ids=["least", "no", "ample"])
@pytest.mark.parametrize("name", LAYERS)
def test_training_agrees_with_plain_jax(name, budget, microbatches):
    case, optimizer = case_of(name), recording(OPTIMIZERS["adam"])
    trainer = make_trainer(case, optimizer, budget=budget, microbatches=microbatches, hardware=SLOW)
    assert not any("wider" in text for text in trainer.plan.warnings)
    blocks = {s.stage.key for s in trainer.stages if s.stage.is_block}
    assert len(blocks) == case.templates
    run, (plain, exact) = train(trainer, BATCHES), expected_of(name)
    for ours, theirs, true, what in (
        (run.first_grads, plain.first_grads, exact.first_grads, "gradient"),
        (run.params, plain.params, exact.params, "parameter"),
    ):
        check_as_near(ours, theirs, true, 2e-6, what)
    if budget == 10**9:
        # A real product beside complex ones is kept.
        assert bool(trainer.schedule.kept) == (name == "Fourier")
