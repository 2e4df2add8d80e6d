"""`ema_decay`: averages of the parameters, against Optax's own in a plain loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import megatrain_jax as mt
import small
from inside import store_of
from megatrain_jax._src.engine.checkpoint.folder import CheckpointError
from messages import refuses, warns
from optimizers import OPTIMIZERS
from oracle import train_plain
from runs import check_close, check_same_bits, make_trainer, train
from zoo import CASES

pytestmark = pytest.mark.usefixtures("traced_once")

TOLERANCE = 2e-6
DECAY = 0.8


def averaging(
    optimizer: Callable[[Any], optax.GradientTransformation], decay: Any = DECAY
) -> Callable[[Any], optax.GradientTransformation]:
    """An optimizer whose state ends with the averages that a plain loop would keep beside it."""

    decay_of: Any = decay if callable(decay) else lambda count: decay

    def make(params: Any) -> optax.GradientTransformation:
        tx = optax.with_extra_args_support(optimizer(params))

        def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
            count, own, average = state
            updates, own = tx.update(updates, own, params, **more)
            new = optax.apply_updates(params, updates)
            step_size = 1 - decay_of(count)
            return updates, (count + 1, own, optax.incremental_update(new, average, step_size))

        return optax.GradientTransformationExtraArgs(
            lambda params: (jnp.int32(0), tx.init(params), params), update
        )

    return make


def mesh_of(num_devices: int) -> Mesh:
    return Mesh(jax.devices()[:num_devices], "data")


def warmed_up(count):
    """The decay that grows with the number of updates, as is usual."""
    return jnp.minimum(DECAY, (1 + count) / (10 + count))


@pytest.mark.by_default("nnx_tied-clip_adamw-2-1")
@pytest.mark.parametrize(
    ("name", "optimizer", "microbatches", "num_devices"),
    [
        ("nnx_tied", "clip_adamw", 2, 1),
        ("lax_scan_pytree", "adam", 1, 2),
        ("nnx_tied", "adafactor", 1, 1),
        ("nnx_tied", "multi_steps", 1, 1),
        ("lax_scan_pytree", "clip_adamw", 4, 2),
        ("dropout_linen", "muon", 2, 1),
        ("batchnorm_nnx", "multi_transform", 1, 1),
        ("batchnorm_linen", "apply_if_finite", 1, 2),
    ],
)
def test_averages_are_those_of_a_plain_loop(name, optimizer, microbatches, num_devices):
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(1, 5)]
    plain = train_plain(case, averaging(OPTIMIZERS[optimizer]), batches, microbatches=microbatches)
    trainer = make_trainer(
        case,
        OPTIMIZERS[optimizer],
        microbatches=microbatches,
        mesh=mesh_of(num_devices),
        ema_decay=DECAY,
    )
    train(trainer, batches, gradients=False)
    _, state, average = plain.opt_state
    check_close(trainer.ema_params, average, TOLERANCE, "average")
    check_close(trainer.params, plain.params, TOLERANCE, "parameter")
    check_close(trainer.opt_state, state, 2 * TOLERANCE, "optimizer state")


@pytest.mark.by_default("nnx_tied-1")
@pytest.mark.parametrize(
    ("name", "num_devices"), [(name, 1 + number % 2) for number, name in enumerate(CASES)]
)
def test_with_a_decay_of_zero_averages_are_the_parameters_for_any_reader(name, num_devices):
    case = CASES[name]
    trainer = make_trainer(
        case,
        OPTIMIZERS["adam"],
        mesh=mesh_of(num_devices),
        ema_decay=0,
        eval_loss_fn=case.loss_fn,
        budget="minimum",
    )
    train(trainer, [case.batch(1)], gradients=False)
    check_close(trainer.ema_params, trainer.params, TOLERANCE, "average")
    batches = [case.batch(2)]
    found = trainer.evaluate(batches, params="ema")
    assert found == pytest.approx(trainer.evaluate(batches), rel=1e-5, abs=1e-6)


def test_a_schedule_gets_the_number_of_earlier_updates():
    case = CASES["nnx_tied"]
    batches = [case.batch(seed) for seed in range(3)]
    plain = train_plain(case, averaging(OPTIMIZERS["sgd_momentum"], warmed_up), batches)
    trainer = make_trainer(case, OPTIMIZERS["sgd_momentum"], ema_decay=warmed_up)
    train(trainer, batches, gradients=False)
    check_close(trainer.ema_params, plain.opt_state[2], TOLERANCE, "average")


@pytest.mark.parametrize(
    ("error", "returned"),
    [(TypeError, x) for x in ("0.9", None, np.ones(2))]
    + [(ValueError, x) for x in (2.0, 1, -0.5, float("nan"), jnp.float32(1))],
)
def test_a_schedule_that_returns_no_decay_is_refused(error, returned):
    with refuses(error, "`ema_decay`"):
        small.trainer(ema_decay=lambda step: returned)


def test_a_schedule_that_can_t_be_traced_is_refused():
    with refuses(ValueError, "`ema_decay`"):
        small.trainer(ema_decay=lambda step: 0.5 if step > 3 else 0.1)


def averaged_loss(trainer: mt.Trainer, seed: int) -> float:
    return float(small.loss_fn(trainer.ema_params, small.batch(seed)))


def test_evaluations_compute_with_the_averages_in_place_of_the_parameters():
    trainer = small.trainer(ema_decay=DECAY, device_budget="minimum")
    trainer.step(small.batch(0))
    trainer.step(small.batch(1))
    trainer.flush()
    before = {key: list(map(id, arrays)) for key, arrays in store_of(trainer).host.items()}
    found = trainer.evaluate([small.batch(9)], params="ema")["loss"]
    assert found == pytest.approx(averaged_loss(trainer, 9), rel=1e-6)
    assert found != pytest.approx(trainer.evaluate([small.batch(9)])["loss"], rel=1e-3)
    first = trainer.predict([small.batch(9)], lambda p, b: b["x"] @ p[0]["w"], params="ema")
    np.testing.assert_allclose(first, small.batch(9)["x"] @ trainer.ema_params[0]["w"], 1e-5, 1e-5)
    # The averages travel themselves: the store has no new arrays, and the parameters are as before.
    assert before == {k: list(map(id, arrays)) for k, arrays in store_of(trainer).host.items()}
    # Batches may read the trainer while they are drawn, and always get the trained parameters.
    trained = trainer.params[0]["w"]

    def batches():
        for seed in (3, 4):
            np.testing.assert_array_equal(trainer.params[0]["w"], trained)
            yield small.batch(seed)

    trainer.evaluate(batches(), params="ema")


def test_an_evaluation_that_fails_leaves_the_parameters():
    trainer = small.trainer(ema_decay=DECAY)
    trainer.step(small.batch(0))
    expected = trainer.evaluate([small.batch(1)])

    def spoiled(params, batch):
        jax.debug.callback(fail)
        return small.loss_fn(params, batch)

    def fail():
        raise RuntimeError("spoiled")

    with pytest.raises(Exception, match="spoiled"):
        trainer.evaluate([small.batch(1)], spoiled, params="ema")
    assert trainer.evaluate([small.batch(1)]) == expected


def test_frozen_parameters_are_their_own_average(tmp_path):
    optimizer = optax.sgd(0.5, momentum=0.9)
    given = small.params(), small.loss_fn, optimizer, small.batch(0)
    options: Any = {"precision": "float32", "trainable": "^1/", "progress": False}
    trainer = mt.Trainer(*given, ema_decay=DECAY, **options)
    frozen, trained = small.params()
    average, state = trained, optimizer.init(trained)
    for seed in range(3):
        trainer.step(small.batch(seed))
        gradient = jax.grad(lambda own, seed=seed: small.loss_fn([frozen, own], small.batch(seed)))
        updates, state = optimizer.update(gradient(trained), state, trained)
        trained = optax.apply_updates(trained, updates)
        average = optax.incremental_update(trained, average, 1 - DECAY)
    np.testing.assert_array_equal(trainer.ema_params[0]["w"], frozen["w"])
    check_close(trainer.ema_params[1], average, TOLERANCE, "average")
    expected = averaged_loss(trainer, 9)
    found = trainer.evaluate([small.batch(9)], params="ema")["loss"]
    assert found == pytest.approx(expected, rel=1e-6)
    trainer.save(tmp_path / "saved")
    loaded = mt.load(tmp_path / "saved", small.params(), params="ema")
    check_same_bits(loaded, trainer.ema_params)


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), optax.chain(optax.clip(1.0), small.OPTIMIZER)]
)
def test_a_skipped_step_moves_neither_averages_nor_their_count(optimizer):
    def made() -> mt.Trainer:
        return mt.Trainer(
            small.params(),
            small.loss_fn,
            optimizer,
            small.batch(0),
            precision="float32",
            on_nonfinite="skip",
            ema_decay=warmed_up,
            progress=False,
        )

    spoiled = small.batch(5)
    spoiled["x"][0, 0] = np.nan
    one, other = made(), made()
    train(one, [small.batch(0), small.batch(1)], gradients=False)
    train(other, [small.batch(0), spoiled, small.batch(1)], gradients=False)
    check_same_bits(one.ema_params, other.ema_params)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_averages_in_bfloat16_move_by_less_than_the_gap_between_two_numbers(rounding):
    precision = mt.Precision(compute="float32", state="bfloat16", rounding=rounding)

    def loss(params, batch):
        return (params["w"] * batch["x"].mean(0)).sum()

    batch = {"x": -np.ones((1, 4096), np.float32)}
    trainer = mt.Trainer(
        {"w": np.ones(4096, np.float32)},
        loss,
        optax.sgd(1.0),
        batch,
        precision=precision,
        ema_decay=0.999,
        progress=False,
    )
    for _ in range(20):
        trainer.step(batch)
    # From 1, in steps of at most 0.02, with parameters of 2, 3, ..., 21; bfloat16 has 1 and 1.0078.
    average, expected = trainer.ema_params["w"], 1.0
    for step in range(20):
        expected = 0.999 * expected + 0.001 * (2 + step)
    assert average.dtype == jnp.bfloat16
    assert np.unique(average).size > 1
    assert np.mean(average, dtype=np.float64) == pytest.approx(expected, abs=0.002)


def test_compact_averages_are_evaluated_as_they_are_stored():
    trainer = small.trainer(ema_decay=DECAY)
    compact = mt.Trainer(
        small.params(),
        small.loss_fn,
        small.OPTIMIZER,
        small.batch(0),
        precision=mt.Precision.two_bytes(compute="float32"),
        ema_decay=DECAY,
        progress=False,
    )
    for seed in range(3):
        trainer.step(small.batch(seed))
        compact.step(small.batch(seed))
    assert compact.ema_params[0]["w"].dtype == jnp.bfloat16  # of masters in int8
    check_close(compact.ema_params, trainer.ema_params, 0.03, "average")
    compact.evaluate([small.batch(9)])  # with the same loss and shapes, and other layouts
    found = compact.evaluate([small.batch(9)], params="ema")["loss"]
    assert found == pytest.approx(averaged_loss(compact, 9), rel=1e-6)


def test_a_run_goes_on_with_its_averages(tmp_path):
    trainer = small.trainer(ema_decay=warmed_up)
    train(trainer, [small.batch(0), small.batch(1)], gradients=False)
    trainer.save(tmp_path / "two")
    train(trainer, [small.batch(2)], gradients=False)
    resumed = small.trainer(ema_decay=warmed_up, mesh=mesh_of(2))
    resumed.restore(tmp_path / "two")
    train(resumed, [small.batch(2)], gradients=False)
    check_close(resumed.ema_params, trainer.ema_params, TOLERANCE, "average")
    check_close(resumed.opt_state, trainer.opt_state, TOLERANCE, "optimizer state")
    loaded = mt.load(tmp_path / "two", params="ema")
    assert not np.array_equal(loaded["0"]["w"], mt.load(tmp_path / "two")["0"]["w"])
    resumed.restore(tmp_path / "two")
    np.testing.assert_array_equal(loaded["0"]["w"], resumed.ema_params[0]["w"])
    model = mt.load(tmp_path / "two", small.params(), params="ema")
    check_same_bits(model, resumed.ema_params)


def test_averages_begin_with_the_parameters_of_a_checkpoint_without(tmp_path):
    trainer = small.trained()
    trainer.save(tmp_path / "none")
    began = small.trainer(ema_decay=warmed_up)
    train(began, [small.batch(7)] * 3, gradients=False)  # its own count is not that of the new ones
    with warns(UserWarning, "`ema_decay`"):
        began.restore(tmp_path / "none")
    check_same_bits(began.ema_params, trainer.params)
    before = trainer.params
    train(began, [small.batch(2)], gradients=False)
    expected = optax.incremental_update(began.params, before, 1 - float(warmed_up(0)))
    check_close(began.ema_params, expected, TOLERANCE, "average")
    with pytest.raises(CheckpointError, match="no averages"):
        mt.load(tmp_path / "none", params="ema")


def test_averages_of_a_checkpoint_are_not_dropped_silently(tmp_path):
    trainer = small.trainer(ema_decay=DECAY)
    trainer.save(tmp_path / "averages")
    with refuses(CheckpointError, "`ema_decay`"):
        small.trainer().restore(tmp_path / "averages")


def test_a_changed_decay_counts_from_now_on(tmp_path):
    small.fit(tmp_path, 1, ema_decay=0.5)
    with warns(UserWarning, "ema_decay", "0.5", "0.25"):
        resumed = small.fit(tmp_path, 2, ema_decay=0.25).trainer
    assert resumed.num_steps == 2


def test_a_run_without_averages_says_what_is_missing():
    trainer = small.trainer()
    for read in (
        lambda: trainer.ema_params,
        lambda: trainer.ema_model,
        lambda: trainer.compute_copy("ema"),
        lambda: trainer.evaluate([small.batch(0)], params="ema"),
        lambda: trainer.predict([small.batch(0)], lambda p, b: b["x"], params="ema"),
    ):
        with refuses(ValueError, "`ema_decay`"):
            read()
    wrong: Any = "average"
    with refuses(ValueError, "`params`", wrong, '"trained"', '"ema"'):
        trainer.evaluate([small.batch(0)], params=wrong)


def test_a_plan_counts_the_averages():
    options: Any = {"precision": "float32", "hardware": "H100"}
    given = small.params(), small.loss_fn, small.OPTIMIZER, small.batch(0)
    without, plan = mt.plan(*given, **options), mt.plan(*given, ema_decay=DECAY, **options)
    num_bytes = 4 * sum(x.size for x in jax.tree.leaves(small.params()))
    assert plan.host_bytes - without.host_bytes == num_bytes


def test_fit_evaluates_the_averages(tmp_path):
    given: Any = {"eval_data": [small.batch(9)], "ema_decay": DECAY, "eval_params": "ema"}
    result = small.fit(None, 2, **given)
    expected = averaged_loss(result.trainer, 9)
    assert result.history[-1]["eval_loss"] == pytest.approx(expected, rel=1e-6)
    # Nothing is trained in vain if there are no averages.
    with refuses(ValueError, "`ema_decay`"):
        small.fit(tmp_path / "run", 2, **given | {"ema_decay": None})
    assert not list(tmp_path.glob("run/*"))
    with refuses(ValueError, "`eval_params`", "'ema'", "`eval_data`"):
        small.fit(None, 2, ema_decay=DECAY, eval_params="ema")
    without = small.fit(None, 1).trainer
    with refuses(ValueError, "`params`", "'ema'", "`ema_decay`"):
        without.check_eval_batch(small.batch(9), params="ema")
    with refuses(ValueError, "`eval_params`", "'ema'", "`ema_decay`"):
        small.fit(None, 2, eval_data=[small.batch(9)], eval_params="ema")
