"""Steps in several waves of microbatches: the results of one wave, in less memory."""

import itertools
import signal
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import divide, spec_of, steps_of
from megatrain_jax._src.spec.budget import other_bytes
from optimizers import DEFERRED, OPTIMIZERS, SIGN_LIKE
from oracle import train_plain
from poison import EXAMPLES, Spoiled, batch, loss_fn, spoiled_trainer
from runs import (
    SLOW,
    check_close,
    check_same_bits,
    make_spec,
    make_trainer,
    recording,
    train,
    variables_of,
)
from workloads import all_resident_bytes
from zoo import CASES

TOLERANCE = 2e-6

MICROBATCHES = 4

# Budgets: the least, one between it and that with which nothing moves, and a very large one.
BUDGETS = (0.0, 0.5, 10.0)


def covering():
    """Every model with the next optimizer, number of waves and budget in line."""
    immediate = itertools.cycle(sorted(OPTIMIZERS.keys() - DEFERRED - SIGN_LIKE))
    deferred = itertools.cycle(sorted(DEFERRED))
    waves, budgets = itertools.cycle((2, 4, 4)), itertools.cycle(BUDGETS)
    for number, case in enumerate(case for case in CASES.values() if case.microbatches):
        optimizer = next(deferred if number % 2 else immediate)
        row = case.name, optimizer, next(waves), next(budgets)
        # Models with shared groups, other state, randomness, unused groups and experts.
        often = case.name in (
            "nnx_tied", "shared_block", "dropout_linen", "dropout_nnx", "unused", "moe", "metrics",
            "unet",
        )  # fmt: skip
        yield pytest.param(*row, marks=() if often else pytest.mark.long)


def within(trainer, share: float) -> int:
    """A budget between the least and the one with which nothing moves, or above."""
    first = spec_of(trainer).first
    least = first.schedule.smallest_bytes
    return int(least + share * max(0, all_resident_bytes(first.workload) - least))


@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize(("name", "optimizer", "waves", "budget"), list(covering()))
def test_results_are_those_of_one_wave_and_of_plain_jax(name, optimizer, waves, budget):
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(3)]
    given: dict[str, Any] = {"microbatches": MICROBATCHES}
    one = make_trainer(case, recording(OPTIMIZERS[optimizer]), **given)
    least = make_trainer(case, recording(OPTIMIZERS[optimizer]), waves=waves, **given)
    several = make_trainer(
        case, recording(OPTIMIZERS[optimizer]), waves=waves, budget=within(least, budget), **given
    )
    assert spec_of(several).first.waves == waves
    expected, found = train(one, batches), train(several, batches)
    assert found.losses[0] == expected.losses[0]
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    if not spec_of(one).first.workload.has_shared_sums and not several.schedule.kept:
        assert found.losses == expected.losses
        for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
            # Squares of gradients are summed in the order of their groups, in both.
            assert ours == theirs
        check_same_bits(found.params, expected.params)
        check_same_bits(found.opt_state, expected.opt_state)
    plain = train_plain(case, OPTIMIZERS[optimizer], batches, microbatches=MICROBATCHES)
    check_close(found.first_grads, plain.first_grads, TOLERANCE, "gradient")
    check_close(found.params, plain.params, TOLERANCE, "parameter")
    check_close(variables_of(several.model), plain.variables, TOLERANCE, "variable")


@pytest.mark.parametrize("optimizer", ["clip_adamw", "adamw_schedule"])
def test_several_devices_share_waves(optimizer):
    case, mesh = CASES["nnx_scan"], Mesh(jax.devices()[:2], "data")
    batches = [case.batch(seed) for seed in range(1, 3)]
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "mesh": mesh}
    one, several = (
        train(make_trainer(case, OPTIMIZERS[optimizer], waves=w, **given), batches, gradients=False)
        for w in (1, 2)
    )
    assert several.losses == one.losses
    check_same_bits([several.params, several.opt_state], [one.params, one.opt_state])


@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize("name", ["dropout_nnx", "moe"])
def test_residuals_of_a_wave_change_no_more_than_rounding(name):
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(3)]
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "waves": 2, "hardware": SLOW}
    least = make_trainer(case, OPTIMIZERS["clip_adamw"], **given)
    keeping = make_trainer(case, OPTIMIZERS["clip_adamw"], budget=10**9, **given)
    assert keeping.schedule.kept and not least.schedule.kept
    one, other = (train(trainer, batches, gradients=False) for trainer in (least, keeping))
    check_close(other.params, one.params, TOLERANCE, "parameter")


@pytest.mark.parametrize("clip", [True, False])
def test_a_part_that_is_trained_gets_the_bits_of_one_wave(clip):
    """As with adapters: the others have neither gradients nor updates."""
    case, optimizer = CASES["linen_numbered"], OPTIMIZERS["clip_adamw" if clip else "adam"]
    batches = [case.batch(seed) for seed in range(3)]
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "trainable": r"1/|head"}
    one, several = (
        train(make_trainer(case, optimizer, waves=waves, **given), batches, gradients=False)
        for waves in (1, 4)
    )
    check_same_bits([several.params, several.opt_state], [one.params, one.opt_state])


COMBINED: dict[str, tuple[str, dict[str, Any]]] = {
    "tiles": ("dropout_nnx", {}),
    "float8": ("equinox", {"products": {"*": "float8"}}),
    "nf4": ("linen_numbered", {"trainable": r"1/|head", "frozen": "nf4"}),
    "devices": ("moe", {"mesh": Mesh(jax.devices()[:2], "data")}),
}


@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long if n in ("nf4", "devices") else ()) for n in COMBINED],
)
def test_other_options_and_waves_give_the_bits_of_one_wave(name):
    case, given = CASES[COMBINED[name][0]], COMBINED[name][1]
    batches = [case.batch(seed) for seed in range(2)]
    runs = []
    for waves in (1, 2):
        trainer = make_trainer(
            case, OPTIMIZERS["clip_adamw"], microbatches=MICROBATCHES, waves=waves, **given
        )
        if name == "tiles":
            divide(trainer, 0)
            assert any(stage.tiles for stage in trainer.stages)
        run = train(trainer, batches, gradients=False)
        runs.append((run.metrics, trainer.evaluate(batches), run.params, run.opt_state))
    assert runs[0][:2] == runs[1][:2]
    check_same_bits(runs[0][2:], runs[1][2:])


@pytest.mark.usefixtures("started_once")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("change", ["x", "poison"])
def test_a_wave_that_is_not_finite_leaves_everything_as_it_was(change, last):
    """Also if it is the last one, when most gradients of the others are summed."""
    bad = batch(10, **{change: np.inf})
    bad = {name: rows[::-1] for name, rows in bad.items()} if last else bad
    expected, skipping = spoiled_trainer(), spoiled_trainer(waves=2, on_nonfinite="skip")
    good = [batch(seed) for seed in range(3)]
    losses = [expected.read(expected.step(b))["loss"] for b in good]
    found = [skipping.read(skipping.step(b)) for b in (good[0], bad, good[1], bad, good[2])]
    assert [row["skipped"] for row in found] == [0, 1, 0, 1, 0]
    assert [row["loss"] for row in found if not row["skipped"]] == losses
    check_same_bits([skipping.params, skipping.opt_state], [expected.params, expected.opt_state])


@pytest.mark.usefixtures("started_once")
@pytest.mark.parametrize("waves", [2, 4])
def test_an_interrupted_run_goes_on_with_any_number_of_waves(waves, tmp_path):
    optimizer, data = (
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
        [*map(batch, range(5))],
    )

    def fit(folder: str, waves: int, **options: Any) -> mt.FitResult:
        given = {"precision": mt.Precision(compute=jnp.float32), "progress": False, **options}
        return mt.fit(
            Spoiled(nnx.Rngs(0)), loss_fn, data, optimizer,
            microbatches=EXAMPLES, waves=waves, checkpoint_dir=tmp_path / folder, **given,
        )  # fmt: skip

    def interrupt(trainer: mt.Trainer, record: dict[str, Any]) -> None:
        if record["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    whole = fit("whole", 1)
    begun = fit("cut", 2, callbacks=[interrupt])
    assert 2 <= begun.trainer.num_steps < len(data)
    ended = fit("cut", waves)
    assert [r["loss"] for r in ended.history] == [r["loss"] for r in whole.history]
    for name in ("params", "opt_state"):
        check_same_bits(getattr(ended.trainer, name), getattr(whole.trainer, name))


def wide_batch_loss(model: Any, batch: jax.Array) -> jax.Array:
    x = batch
    for layer in model["layers"].values():
        x = jnp.tanh(x @ layer["w"])
    return (x**2).mean()


def narrow_trainer(**options: Any) -> mt.Trainer:
    """A trainer whose activations take more than its state."""
    layers = {str(i): {"w": jnp.eye(4) * 0.9} for i in range(4)}
    rows = jax.ShapeDtypeStruct((1024, 4), jnp.float32)
    return mt.Trainer(
        {"layers": layers}, wide_batch_loss, optax.adam(1e-2), rows, progress=False,
        precision=mt.Precision(compute=jnp.float32), device_budget="least", **options,
    )  # fmt: skip


def test_evaluations_go_in_waves_where_one_has_no_room():
    rows = np.random.default_rng(0).normal(size=(2, 1024, 4)).astype(np.float32)
    one, several = (narrow_trainer(microbatches=4, waves=waves) for waves in (1, 4))
    assert one.evaluate(list(rows)) == several.evaluate(list(rows))
    (_, whole), (_, divided) = map(steps_of, (one, several))
    assert whole.waves == 1 and divided.waves == 4
    # A smaller batch has room in one wave, also one that microbatches don't divide.
    for few in (rows[0, :16], rows[0, :7]):
        assert one.evaluate([few]) == several.evaluate([few])
        assert steps_of(several)[-1].waves == 1


def test_values_of_the_batch_are_dropped_by_wave():
    """A wave's own are gone when its last stage has read them, not at the step's end."""
    first = make_spec(CASES["nnx_tied"], OPTIMIZERS["adam"], microbatches=4, waves=4).first
    prologue = set(first.program.prologue_values) & first.kept - set(first.program.outputs)
    assert prologue
    dropped = Counter(i for ids in first.last_read.values() for i in ids)
    # Of four waves, three are laid down.
    assert {dropped[i] for i in prologue} == {3}


def test_values_of_a_wave_are_counted_once_and_those_of_the_step_for_all():
    """Stage inputs exist for one wave; what the batch alone determines, for all microbatches."""
    case = CASES["nnx_tied"]
    first, second = (
        make_spec(case, OPTIMIZERS["adam"], microbatches=4, waves=w).first for w in (1, 4)
    )
    assert second.workload.activations
    for i, size in second.workload.activations.items():
        assert first.workload.activations[i] == 4 * size
    prologue = set(first.program.prologue_values) & first.kept
    assert prologue
    of_prologue = sum(4 * first.program.num_bytes(i, 1) for i in prologue)
    assert of_prologue <= other_bytes(second) <= other_bytes(first)
