"""Steps that are skipped because a number is not finite: as if they had never been."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import megatrain_jax as mt
from messages import refuses, tells
from poison import EXAMPLES, WIDTH, batch, loss_fn, poisoned
from runs import check_close, check_same_bits

pytestmark = pytest.mark.usefixtures("started_once")


class Normed(nnx.Module):
    """Blocks with statistics that a NaN would spoil for ever."""

    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x, poison):
        for layer in self.layers[:2]:
            x = x + nnx.relu(layer(x))
        return self.layers[2](poisoned(self.drop(self.norm(x)), poison))


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "schedule": optax.sgd(optax.linear_schedule(1e-2, 0.0, 5), momentum=0.9),
}
GOOD = [batch(seed) for seed in range(4)]
# The loss; activations, and statistics with them; some gradients, where no loss shows it.
BAD = [batch(10, y=np.nan), batch(11, x=np.inf), batch(12, poison=np.inf)]


def make(optimizer, on_nonfinite: Any = "skip"):
    return mt.Trainer(
        lambda: Normed(nnx.Rngs(0)),
        loss_fn,
        optimizer,
        GOOD[0],
        precision=mt.Precision(compute=jnp.float32),
        on_nonfinite=on_nonfinite,
    )


def everything(trainer):
    return [trainer.params, trainer.opt_state, trainer.variables]


@pytest.mark.by_default("schedule")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skipped_steps_leave_everything_as_it_was(optimizer):
    plain, skipping = make(OPTIMIZERS[optimizer]), make(OPTIMIZERS[optimizer])
    expected = [plain.read(plain.step(b))["loss"] for b in GOOD]
    assert plain.num_skipped == 0
    mixed = [BAD[0], GOOD[0], BAD[1], BAD[2], GOOD[1], GOOD[2], BAD[0], GOOD[3], BAD[1]]
    metrics = [skipping.step(b) for b in mixed]
    read = [skipping.read(m) for m in metrics]
    assert [r["skipped"] for r in read] == [float(any(b is bad for bad in BAD)) for b in mixed]
    assert [r["loss"] for r in read if not r["skipped"]] == expected
    assert skipping.num_skipped == 5
    check_same_bits(everything(skipping), everything(plain))
    skipping.read(metrics[0])
    assert skipping.num_skipped == 5  # a step counts once


def test_a_skipping_run_without_bad_steps_is_an_ordinary_one():
    plain, skipping = make(OPTIMIZERS["adamw"], "raise"), make(OPTIMIZERS["adamw"])
    for b in GOOD:
        plain.step(b)
        skipping.step(b)
    check_same_bits(everything(skipping), everything(plain))
    assert plain.plan.update_mode == "immediate"
    assert skipping.plan.update_mode == "deferred"


def test_fit_counts_what_it_skipped_and_resumes_the_count(tmp_path):
    data = [GOOD[0], BAD[0], GOOD[1], BAD[2], GOOD[2], GOOD[3]]

    def run(steps, folder):
        return mt.fit(
            lambda: Normed(nnx.Rngs(0)),
            loss_fn,
            data,
            OPTIMIZERS["adamw"],
            steps=steps,
            precision=mt.Precision(compute=jnp.float32),
            on_nonfinite="skip",
            checkpoint_dir=folder,
            checkpoint_every=2,
            progress=False,
        )

    whole = run(6, tmp_path / "whole")
    assert [r["skipped"] for r in whole.history] == [0, 1, 0, 1, 0, 0]
    assert whole.trainer.num_skipped == 2
    run(4, tmp_path / "parts")
    resumed = run(6, tmp_path / "parts")
    assert resumed.trainer.num_skipped == 2
    check_same_bits(everything(resumed.trainer), everything(whole.trainer))


NAMES = [f"{part}{n}" for n in range(4) for part in ("w", "b")]


def stack_loss(params, batch):
    """The gradient of any one leaf can be spoiled alone: leaf n by the batch's n-th column."""
    leaves = {
        name: poisoned(params[int(name[1])][name[0]], batch["spoil"][:, n])
        for n, name in enumerate(NAMES)
    }
    x = batch["x"]
    for n in range(4):
        x = jnp.tanh(x @ leaves[f"w{n}"] + leaves[f"b{n}"])
    # The last column spoils the loss, and no gradient.
    spoiled = jax.lax.stop_gradient(batch["spoil"][:, -1].mean())
    return jnp.mean((x - batch["y"][:, None]) ** 2) + spoiled


def stack_params():
    rng = np.random.default_rng(0)
    shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}
    return [
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(4)
    ]


def stack_trainer(optimizer, loss_fn=stack_loss, **options):
    params = stack_params()
    precision = mt.Precision(compute=jnp.float32)
    sample = spoiling(0, None)
    return mt.Trainer(
        params, loss_fn, optimizer, sample, precision=precision, progress=False, **options
    )


def spoiling(seed, leaf, value=np.nan):
    spoil = np.ones((EXAMPLES, len(NAMES) + 1), np.float32)
    if leaf is not None:
        spoil[-1, leaf] = value
    rows = {name: x for name, x in batch(seed).items() if name != "poison"}
    return rows | {"spoil": spoil}


@pytest.mark.parametrize(("name", "microbatches"), [("adamw", 2), ("clipped", 1)])
def test_one_leaf_whose_gradient_is_not_finite_skips_the_step(name, microbatches):
    options = {"on_nonfinite": "skip", "microbatches": microbatches}
    trainer = stack_trainer(OPTIMIZERS[name], **options)
    trainer.step(spoiling(0, None))
    for leaf in range(len(NAMES) + 1):
        before = everything(trainer)
        for value in (np.nan, np.inf):
            read = trainer.read(trainer.step(spoiling(1, leaf, value)))
            assert np.isfinite(read["loss"]) == (leaf < len(NAMES)) and read["skipped"], leaf
        check_same_bits(everything(trainer), before)
        assert not trainer.read(trainer.step(spoiling(2, None)))["skipped"]


@pytest.mark.by_default("adamw")
@pytest.mark.parametrize("name", ["adamw", "clipped"])
def test_one_leaf_whose_gradient_is_not_finite_is_reported_and_trains_no_other(name):
    trainer = stack_trainer(OPTIMIZERS[name])
    trainer.step(spoiling(0, None))
    for leaf in range(len(NAMES)):
        with refuses(FloatingPointError, "gradient", "finite"):
            trainer.read(trainer.step(spoiling(1, leaf)))
        for array in jax.tree.leaves([trainer.params, trainer.opt_state]):
            assert np.isfinite(array).all(), NAMES[leaf]
        trainer.read(trainer.step(spoiling(2, None)))


STEEP = {
    "adamw": OPTIMIZERS["adamw"],
    "clipped": OPTIMIZERS["clipped"],
    "lion": optax.lion(1e-3),
    "sgd": optax.sgd(1e-26),
}


@pytest.mark.by_default("lion-raise-1-1")
@pytest.mark.parametrize(
    ("name", "on_nonfinite", "microbatches", "num_devices"),
    [
        ("lion", "raise", 1, 1),
        ("sgd", "raise", 2, 2),
        ("sgd", "skip", 1, 4),
        ("adamw", "skip", 2, 1),
        ("clipped", "raise", 1, 1),
    ],
)
def test_finite_gradients_whose_squares_overflow_train_as_in_plain_optax(
    name, on_nonfinite, microbatches, num_devices
):
    trainer = stack_trainer(
        STEEP[name],
        on_nonfinite=on_nonfinite,
        microbatches=microbatches,
        mesh=Mesh(jax.devices()[:num_devices], "data"),
    )
    deferred = name == "clipped" or on_nonfinite == "skip"
    assert trainer.plan.update_mode == ("deferred" if deferred else "immediate")
    params: Any = stack_params()
    state = STEEP[name].init(params)
    for leaf in (2, 5):
        steep = spoiling(leaf, None)
        steep["spoil"][:, leaf] = 1e25
        gradient = jax.grad(stack_loss)(params, steep)
        largest = max(np.abs(x).max() for x in jax.tree.leaves(gradient))
        assert 1e20 < largest < np.inf
        updates, state = STEEP[name].update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        metrics = trainer.read(trainer.step(steep))
        # Optax's own norm of such a gradient is infinite, too.
        assert metrics["grad_norm"] == optax.tree.norm(gradient) == np.inf
    assert trainer.num_steps == 2 and trainer.num_skipped == 0
    check_close(trainer.params, params, 1e-6, "parameter")
    # A number that is not finite beside such a leaf, in its group, is seen.
    steep["spoil"][-1, 4] = np.nan
    if on_nonfinite == "skip":
        assert trainer.read(trainer.step(steep))["skipped"]
    else:
        with refuses(FloatingPointError, "gradient", "finite"):
            trainer.read(trainer.step(steep))


@pytest.mark.parametrize(("name", "made"), [("adamw", "step"), ("clipped", "dispatch")])
def test_a_step_that_was_not_read_and_not_finite_is_not_saved_unnoticed(tmp_path, name, made):
    trainer = stack_trainer(OPTIMIZERS[name])
    getattr(trainer, made)(spoiling(0, None))
    getattr(trainer, made)(spoiling(1, 0))
    with refuses(FloatingPointError, "gradient", "finite"):
        trainer.save(tmp_path / "1")
    assert not any(tmp_path.iterdir())
    # What is left is saved by a second call. Immediate updates have done the step in part.
    trainer.save(tmp_path / "1")
    resumed = stack_trainer(OPTIMIZERS[name])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        resumed.restore(tmp_path / "1")
    said = [w for w in warned if tells(str(w.message), "step 2", "part")]
    assert len(said) == (name == "adamw")
    check_same_bits(everything(resumed), everything(trainer))


READERS = {
    "flush": lambda trainer, path: trainer.flush(),
    "params": lambda trainer, path: trainer.params,
    "opt_state": lambda trainer, path: trainer.opt_state,
    "model": lambda trainer, path: trainer.model,
    "variables": lambda trainer, path: trainer.variables,
    "evaluate": lambda trainer, path: trainer.evaluate([spoiling(3, None)]),
    "save": lambda trainer, path: trainer.save(path / "1"),
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_the_state_first_tells_of_a_step_that_was_not_finite(tmp_path, reader):
    trainer = stack_trainer(OPTIMIZERS["clipped"])
    trainer.step(spoiling(0, None))
    before = everything(trainer)
    trainer.step(spoiling(1, 0))
    with refuses(FloatingPointError, "gradient", "step 2", "finite"):
        READERS[reader](trainer, tmp_path)
    # Once: then it is the state that the error describes.
    READERS[reader](trainer, tmp_path)
    check_same_bits(everything(trainer), before)
    assert trainer.num_steps == 1


def test_a_checkpoint_counts_skipped_steps_that_were_not_read(tmp_path):
    trainer = stack_trainer(OPTIMIZERS["adamw"], on_nonfinite="skip")
    trainer.step(spoiling(0, 0))
    trainer.save(tmp_path / "1")
    resumed = stack_trainer(OPTIMIZERS["adamw"], on_nonfinite="skip")
    resumed.restore(tmp_path / "1")
    assert (resumed.num_steps, resumed.num_skipped) == (1, 1)


def drawing_loss(params, batch, rng):
    """With a number that tells which random numbers a step has."""
    return stack_loss(params, batch), {"drawn": jax.random.uniform(rng)}


def drawn(trainer, *batches):
    return [trainer.read(trainer.step(b))["drawn"] for b in batches]


@pytest.mark.parametrize("name", ["adamw", "clipped"])
def test_after_a_step_that_raised_the_next_one_has_the_random_numbers_of_its_own(name):
    good, lost, spoiled = spoiling(0, None), spoiling(1, len(NAMES)), spoiling(1, 0)
    expected = drawn(stack_trainer(OPTIMIZERS[name], drawing_loss), *[good] * 6)
    assert len(set(expected)) == 6
    trainer = stack_trainer(OPTIMIZERS[name], drawing_loss)
    found = drawn(trainer, good)
    # Nothing was updated, also where a further step was dispatched behind it: neither counts.
    for behind in ([], [good]):
        metrics = [trainer.step(b) for b in (lost, *behind)]
        with refuses(FloatingPointError, "loss", "step", "nothing"):
            trainer.read(metrics[-1])
        found += drawn(trainer, good)
    # Blocks behind the spoiled one were updated at once, so that the step counts; clipping waits.
    with pytest.raises(FloatingPointError):
        trainer.read(trainer.step(spoiled))
    counted = name == "adamw"
    found += [expected[3]] * counted + drawn(trainer, good, good)
    assert found == expected[: 5 + counted] and trainer.num_steps == 5 + counted


def test_the_option_is_checked():
    with refuses(ValueError, "`on_nonfinite`", '"raise"', '"skip"', "'ignore'"):
        make(OPTIMIZERS["adamw"], "ignore")
