"""Steps in several waves of microbatches: the results of one wave, in less memory."""

import dataclasses
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import megatrain_jax as mt
import small
import started
from inside import divide, spec_of, steps_of
from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.schedule import Schedule
from megatrain_jax._src.engine.schedule.search import find_schedule
from megatrain_jax._src.engine.schedule.workload import Workload
from megatrain_jax._src.engine.spec.budget import uncounted_activation_bytes
from optimizers import OPTIMIZERS
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
from wave_draws import DIVISIONS, SHARED, Combination, draw, pairs
from workloads import all_resident_bytes
from zoo import CASES
from zoo_case import Case

TOLERANCE = 2e-6

MICROBATCHES = 4


@pytest.fixture
def started_without_residuals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As `started_once_in_test`, without saved residuals in any budget: they change roundings."""

    def schedule(workload: Workload, budget: int | None, _: Workload | None) -> Schedule:
        return find_schedule(dataclasses.replace(workload, residuals=()), budget)

    monkeypatch.setattr(started, "find_schedule", schedule)
    with started.Started().replacing():
        yield


@pytest.fixture(scope="session")
def drawn(request: pytest.FixtureRequest) -> dict[str, Combination]:
    """The combination of each model, by the seed on the command line."""
    return draw(str(request.config.getoption("--draw")))


@pytest.mark.parametrize("seed", range(5))
def test_every_value_is_drawn(seed):
    drawn = draw(str(seed)).values()
    assert {c.model for c in drawn} == {case.name for case in CASES.values() if case.microbatches}
    assert {c.optimizer for c in drawn} == set(OPTIMIZERS)
    assert {(c.devices, c.microbatches) for c in drawn} == set(DIVISIONS)
    assert {waves for c in drawn for waves in c.waves} == {2, 4, 8}
    assert draw(str(seed)) != draw(str(seed + 1))


@pytest.mark.by_default("lax_scan_pytree")
@pytest.mark.usefixtures("started_without_residuals")
@pytest.mark.parametrize("model", [case.name for case in CASES.values() if case.microbatches])
def test_waves_give_the_results_of_one_wave(model, drawn):
    """Every model of the zoo; optimizer, devices, microbatches and a budget are drawn."""
    check_waves(drawn[model])


@pytest.mark.long
@pytest.mark.usefixtures("started_without_residuals")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("model", "optimizer"), pairs())
def test_all_models_and_optimizers_give_the_results_of_one_wave(model, optimizer, devices):
    check_waves(
        Combination(model=model, optimizer=optimizer, devices=devices, microbatches=MICROBATCHES)
    )


def check_waves(values: Combination) -> None:
    """Holds all numbers of waves, in three budgets, against one wave."""
    case, optimizer = CASES[values.model], recording(OPTIMIZERS[values.optimizer])
    batches = [case.batch(seed) for seed in range(3)]
    given: dict[str, Any] = {"microbatches": values.microbatches}
    if values.devices > 1:
        given["mesh"] = Mesh(jax.devices()[: values.devices], "data")
    one = make_trainer(case, optimizer, waves=1, budget="least", **given)
    expected, shared = train(one, batches), spec_of(one).first.workload.has_shared_sums
    assert shared or case.name not in SHARED  # an optimizer may make groups share parameters, too
    variables = variables_of(one.model)
    for waves in values.waves:
        least = make_trainer(case, optimizer, waves=waves, budget="least", **given)
        for budget in (0.0, values.budget, 10.0):
            several = least
            if budget:
                share = within(least, budget)
                several = make_trainer(case, optimizer, waves=waves, budget=share, **given)
            assert spec_of(several).first.waves == waves and not several.schedule.kept
            found = train(several, batches)
            assert found.losses[0] == expected.losses[0]
            if shared:
                np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
                for name in ("first_grads", "params"):
                    ours, theirs = getattr(found, name), getattr(expected, name)
                    check_close(ours, theirs, TOLERANCE, name)
            else:
                # Squares of gradients are summed in the order of their groups, in both.
                assert found.metrics == expected.metrics
                for name in ("first_grads", "params", "opt_state"):
                    check_same_bits(getattr(found, name), getattr(expected, name))
            check_same_bits(variables_of(several.model), variables)


def within(trainer: mt.Trainer, share: float) -> int:
    """A budget between the least and the one with which nothing moves, or above."""
    first = spec_of(trainer).first
    least = first.schedule.smallest_bytes
    return int(least + share * max(0, all_resident_bytes(first.workload) - least))


def bounded_loss(params: Any, batch: dict[str, Any]) -> jax.Array:
    """The small model's loss, of inputs that the batch alone determines and two stages read."""
    x = jnp.tanh(batch["x"])
    return small.loss_fn(params, {"x": x}) + small.loss_fn(params[-1:], {"x": x})


SMALL = Case(
    name="small",
    build=lambda: [*small.params(), *small.params()],
    loss_fn=bounded_loss,
    blocks=4,
    templates=1,
    batch=small.batch,
)


@pytest.mark.by_default("small")
@pytest.mark.usefixtures("started_once_in_test")
@pytest.mark.parametrize("name", ["small", "dropout_nnx", "moe"])
def test_residuals_of_a_wave_change_no_more_than_rounding(name):
    case = {**CASES, SMALL.name: SMALL}[name]
    batches = [case.batch(seed) for seed in range(3)]
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "waves": 2, "hardware": SLOW}
    least = make_trainer(case, OPTIMIZERS["clip_adamw"], **given)
    keeping = make_trainer(case, OPTIMIZERS["clip_adamw"], budget=10**9, **given)
    assert keeping.schedule.kept and not least.schedule.kept
    one, other = (train(trainer, batches, gradients=False) for trainer in (least, keeping))
    check_close(other.params, one.params, TOLERANCE, "parameter")


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.by_default("poison-True")
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


@pytest.mark.by_default("2")
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


@pytest.mark.usefixtures("started_once_in_test")
def test_each_wave_has_its_own_rows_activations_and_gradients():
    rows = np.random.default_rng(0).normal(size=(2, 1024, 4)).astype(np.float32)
    one, several = (
        train(narrow_trainer(microbatches=4, waves=waves), list(rows), gradients=False)
        for waves in (1, 4)
    )
    assert several.metrics == one.metrics
    check_same_bits([several.params, several.opt_state], [one.params, one.opt_state])
    moved = spec_of(several.trainer).first.schedule.cold
    assert any(i.op is Op.OFFLOAD and i.key.kind is Kind.ACTIVATION for i in moved)  # type: ignore


@pytest.mark.usefixtures("traced_once")
def test_values_of_the_batch_are_dropped_by_wave():
    """A wave's own are gone when its last stage has read them, not at the step's end."""
    first = make_spec(SMALL, OPTIMIZERS["adam"], microbatches=4, waves=4).first
    prologue = set(first.program.prologue_values) & first.kept - set(first.program.outputs)
    assert prologue
    dropped = Counter(i for ids in first.last_read.values() for i in ids)
    # Of four waves, three are laid down.
    assert {dropped[i] for i in prologue} == {3}


@pytest.mark.usefixtures("traced_once")
def test_values_of_a_wave_are_counted_once_and_those_of_the_step_for_all():
    """Stage inputs exist for one wave; what the batch alone determines, for all microbatches."""
    first, second = (
        make_spec(SMALL, OPTIMIZERS["adam"], microbatches=4, waves=w).first for w in (1, 4)
    )
    assert second.workload.activations
    for i, size in second.workload.activations.items():
        assert first.workload.activations[i] == 4 * size
    prologue = set(first.program.prologue_values) & first.kept
    assert prologue
    of_prologue = sum(4 * first.program.num_bytes(i, 1) for i in prologue)
    assert of_prologue <= uncounted_activation_bytes(second) <= uncounted_activation_bytes(first)
