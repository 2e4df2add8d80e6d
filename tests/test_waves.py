"""Steps in several waves of microbatches: the results of one wave, in less memory."""

import itertools
import math
import re
import signal
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import megatrain_jax as mt
from inside import engine_of, on_one_device, spec_of, steps_of
from megatrain_jax._src.adapt.adapters import adapt
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.kernels.narrow_sums import NarrowSums
from megatrain_jax._src.options.options import Options
from megatrain_jax._src.spec import microbatches, wave_search
from megatrain_jax._src.spec.budget import other_bytes
from megatrain_jax._src.spec.run_spec import RunSpec, make_run_spec
from megatrain_jax._src.spec.step_kernels import step_kernels
from megatrain_jax._src.spec.wave_search import lowest
from megatrain_jax._src.start import with_parts
from megatrain_jax._src.state import offsets
from optimizers import DEFERRED, OPTIMIZERS, SIGN_LIKE
from oracle import train_plain
from poison import EXAMPLES, WIDTH, batch, loss_fn, poisoned
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


class Spoiled(nnx.Module):
    """Blocks whose gradients a batch can spoil, without statistics of it."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))

    def __call__(self, x, poison):
        for layer in self.layers[:2]:
            x = x + nnx.relu(layer(x))
        return self.layers[2](poisoned(x, poison))


def spoiled_trainer(**options: Any) -> mt.Trainer:
    given: dict[str, Any] = {"precision": mt.Precision(compute=jnp.float32), **options}
    return mt.Trainer(
        lambda: Spoiled(nnx.Rngs(0)),
        loss_fn,
        optax.adamw(1e-2),
        batch(0),
        microbatches=EXAMPLES,
        progress=False,
        **given,
    )


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


@pytest.mark.parametrize("waves", [3, 8])
def test_waves_have_equally_many_microbatches(waves):
    words = re.escape(f"`waves`={waves} does not divide `microbatches`=4")
    with pytest.raises(ValueError, match=words):
        make_trainer(CASES["nnx_scan"], OPTIMIZERS["adam"], microbatches=4, waves=waves)


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


# Little memory and a fast link: residuals of one wave fit, those of all microbatches don't.
MACHINE = mt.Hardware(
    name="small",
    device_bytes=128 * 2**20,
    device_share=1.0,
    host_bytes=64 * 2**30,
    link_bytes_per_s=20e9,
    flops_per_s=5e12,
    memory_bytes_per_s=1e12,
)


def mlp_loss(model: Any, batch: jax.Array) -> jax.Array:
    x = batch
    for layer in model["layers"].values():
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return (x.astype(jnp.float32) ** 2).mean()


def tied_loss(model: Any, batch: jax.Array) -> jax.Array:
    first = model["layers"]["0"]
    return mlp_loss(model, jnp.tanh(batch @ first["up"]) @ first["down"])


def build_mlp() -> Any:
    layer = {"up": jnp.ones((512, 1024)), "down": jnp.ones((1024, 512))}
    return {"layers": {str(i): dict(layer) for i in range(8)}}


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
BATCHES = {rows: jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16) for rows in (64, 8192)}


def planned(rows: int = 8192, loss: Any = mlp_loss, **options: Any) -> Any:
    given = {"hardware": MACHINE, **options}
    return mt.plan(build_mlp, loss, CLIPPED, BATCHES[rows], **given)


@pytest.fixture
def traced_once():
    """Has plans share what doesn't depend on their options."""
    with remembering():
        yield


@pytest.mark.usefixtures("traced_once")
def test_the_plan_chooses_waves_that_save_time():
    chosen, one = planned(microbatches=16), planned(microbatches=16, waves=1)
    assert chosen.waves > one.waves == 1
    assert chosen.num_kept > one.num_kept
    others = [planned(microbatches=16, waves=waves) for waves in (2, 4, 8, 16)]
    fastest = min(plan.seconds_per_step for plan in others)
    assert chosen.seconds_per_step == pytest.approx(fastest, rel=0.03)
    assert chosen.seconds_per_step < 0.95 * one.seconds_per_step
    share = f"the link is busy for {chosen.link_share:.0%}"
    assert f"waves of {16 // chosen.waves} microbatch" in str(chosen) and share in str(chosen)
    assert "waves" not in str(one)


@pytest.mark.parametrize("first", [1.0, 9.0, 100.0])
@pytest.mark.parametrize("best", [2, 8, 64])
def test_the_lowest_value_is_found_from_any_guess(best, first):
    numbers, asked = [2, 4, 8, 16, 32, 64], []

    def value(number: int) -> float:
        asked.append(number)
        return math.inf if number < best else number / best

    assert lowest(numbers, first, value) == best
    assert set(asked) <= set(numbers)
    every = set(asked)
    asked.clear()
    # Numbers whose bound is above the lowest value so far are not asked for.
    assert lowest(numbers, first, value, lambda number: number / best) == best
    assert set(asked) <= every
    assert 2 * best not in asked or first != best + 1


@pytest.mark.usefixtures("traced_once")
def test_a_lower_bound_saves_searches_and_changes_no_plan(monkeypatch):
    asked: list[int] = []
    in_waves = wave_search.in_waves

    def counted(step: Any, waves: int, budget: int | None) -> Any:
        asked.append(waves)
        return in_waves(step, waves, budget)

    monkeypatch.setattr(wave_search, "in_waves", counted)

    def plans() -> list[mt.Plan]:
        given: tuple[dict[str, Any], ...] = (
            {"microbatches": 16},
            {"microbatches": "auto"},
            {"microbatches": 16, "host_budget": "1GiB"},
            {"microbatches": 4, "rows": 64},
        )
        return [planned(**options) for options in given]

    found, fewer = plans(), len(asked)
    for module in (wave_search, microbatches):
        monkeypatch.setattr(module, "least_seconds", lambda *_: -math.inf)
    assert plans() == found
    assert fewer < len(asked) - fewer


@pytest.mark.usefixtures("traced_once")
def test_one_wave_stays_one_where_more_change_bits_or_save_nothing():
    assert planned(microbatches=16, loss=tied_loss).waves == 1
    assert planned(microbatches=16, loss=tied_loss, waves=4).waves == 4
    # Few rows: the link is the bound.
    for options in ({"rows": 64, "microbatches": 4}, {"microbatches": 1}):
        assert planned(**options) == planned(**options, waves=1)


@pytest.mark.usefixtures("traced_once")
def test_the_plan_chooses_microbatches_whose_functions_leave_room():
    whole, auto = planned(microbatches=1), planned(microbatches="auto")
    assert auto.microbatches > 1 and 8192 % auto.microbatches == 0
    assert auto.device_temporary_bytes < whole.device_temporary_bytes
    assert auto.seconds_per_step < whole.seconds_per_step
    same = planned(microbatches=auto.microbatches, waves=auto.waves)
    assert (same.seconds_per_step, same.host_peak_bytes) == (
        auto.seconds_per_step, auto.host_peak_bytes
    )  # fmt: skip
    # Few rows are left whole; without a machine nothing tells how many fit.
    fewer: tuple[dict[str, Any], ...] = ({"rows": 64}, {"hardware": None})
    for options in fewer:
        assert planned(**options, microbatches="auto") == planned(**options, microbatches=1)


# Number of microbatches: GiB that a function needs, the best number of waves, seconds of a step. As
# planned for 8.2B parameters on an RTX 4090 with 22.5 GiB, and 14.8B on an H100 with 68 GiB.
_ON_4090 = {8: (6.2, 8, 70.0), 16: (6.0, 16, 65.9), 32: (3.7, 32, 61.9), 64: (3.6, 32, 66.0)}
_ON_H100 = {8: (15.5, 8, 80.0), 16: (7.8, 16, 91.4), 32: (6.9, 32, 88.2), 64: (6.7, 32, 88.5)}


@pytest.mark.parametrize(
    "table, gib, chosen, tried",
    [(_ON_4090, 22.5, 64, [64, 32]), (_ON_H100, 68, 16, [16, 32, 64])],
    ids=["larger", "smaller"],
)
def test_larger_and_smaller_microbatches_than_by_memory_are_tried(
    monkeypatch, table, gib, chosen, tried
):
    asked = []

    class Tabled(microbatches._Dividing):
        """A search whose plans are a table."""

        def _divided(self, number):
            _, waves, seconds = table[number]
            step = {"microbatches": number, "waves": waves, "workload": None, "lean": None}
            first = SimpleNamespace(schedule=SimpleNamespace(seconds=seconds), **step)
            return SimpleNamespace(first=first, fits_host=True, host_room=math.inf)

        def _in_few_microbatches(self):
            return self._divided(chosen)

        def _in_waves(self, spec, device_bytes):
            asked.append(spec.first.microbatches)
            return spec

        def _needed_by_one(self, spec):
            return table[spec.first.microbatches][0] * 2**30

        def _least_seconds(self, spec, device_bytes, host_room):
            return 0.0

    monkeypatch.setattr(microbatches, "fits_device", lambda spec, device_bytes: True)
    monkeypatch.setattr(microbatches, "least_seconds", lambda *_: 0.0)
    unused: Any = None
    run = Options(microbatches="auto")
    search = Tabled(run, unused, unused, 64, int(gib * 2**30), unused)
    assert search.to_machine().first.microbatches == 32
    assert asked == tried


@pytest.mark.usefixtures("traced_once")
def test_waves_are_taken_where_one_has_no_room_in_the_budget():
    smallest = planned(microbatches=16, waves=16, device_budget="least").device_state_bytes
    budget = smallest * 11 // 10
    with pytest.raises(ValueError, match="is too small for this model"):
        planned(microbatches=16, waves=1, device_budget=budget)
    found = planned(microbatches=16, device_budget=budget)
    assert found.waves > 1 and found.device_state_bytes <= budget
    with pytest.raises(ValueError, match="is too small for this model"):
        planned(microbatches=16, device_budget=smallest // 2)


@pytest.mark.usefixtures("traced_once")
def test_a_run_on_a_gpu_takes_the_parts_of_its_plan():
    plan, adapted = planned(microbatches="auto"), adapt(build_mlp, mlp_loss, BATCHES[8192], 0)[0]

    def make(run: Options) -> RunSpec:
        return make_run_spec(adapted, mlp_loss, CLIPPED, BATCHES[8192], run)

    def parts(*, has_gpu: bool, **given: Any) -> tuple[Any, Any]:
        run, placement = Options(hardware=MACHINE, **given), on_one_device()
        found = with_parts(run, make, BATCHES[8192], placement, has_gpu=has_gpu)
        return found.microbatches, found.waves

    assert parts(has_gpu=True, microbatches="auto") == (plan.microbatches, plan.waves)
    given = {"microbatches": plan.microbatches}
    assert parts(has_gpu=True, **given) == (plan.microbatches, plan.waves)
    assert parts(has_gpu=True, **given, waves=2) == (plan.microbatches, 2)
    # Where nothing tells how much memory there is, a batch is left whole.
    assert parts(has_gpu=False, microbatches="auto") == (1, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": "auto", "waves": 2}, "`waves`=2 needs a number of `microbatches`"),
        ({"waves": 2}, "`waves`=2 does not divide `microbatches`=1"),
    ],
)
def test_parts_that_make_no_sense_are_named(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        planned(**options)


def test_a_run_that_resumes_keeps_the_parts_of_its_checkpoint(tmp_path):
    """Where the plan has chosen them: on another machine it would choose other ones."""
    data, optimizer = [batch(seed) for seed in range(4)], optax.adam(1e-2)

    def fit(steps: int, **options: Any) -> mt.FitResult:
        given = {"precision": mt.Precision(compute=jnp.float32), "progress": False, **options}
        model = Spoiled(nnx.Rngs(0))
        return mt.fit(
            model, loss_fn, data, optimizer, checkpoint_dir=tmp_path, steps=steps, **given
        )

    fit(2, microbatches=4, waves=2)
    resumed = fit(4, microbatches="auto")
    assert resumed.trainer.num_steps == 4
    assert resumed.trainer.plan.microbatches == 4 and resumed.trainer.plan.waves == 2


@pytest.mark.parametrize("sums", ["float32", "bfloat16"])
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_leaves_with_their_own_arrays_get_the_same_bits_in_every_budget(sums, master, monkeypatch):
    """Those of one slab are rounded by the same random bits, but fused in other functions."""
    dtypes: dict[str, Any] = {"compute": "float32", "master": master, "sums": sums}
    given: dict[str, Any] = {"waves": 2, "precision": mt.Precision(**dtypes)}
    whole = spoiled_trainer(**given)
    monkeypatch.setattr(offsets, "LEAST_APART", WIDTH * WIDTH)
    apart = [spoiled_trainer(device_budget=size, **given) for size in ("least", 10**9)]
    batches = [batch(seed) for seed in range(3)]
    for trainer in (whole, *apart):
        arrays = engine_of(trainer).store.host[Key(Kind.MASTERS, 0)]
        assert [x.ndim for x in arrays] == [1] * (1 if trainer is whole else 2)
    expected, *found = ([t.read(t.step(b))["loss"] for b in batches] for t in (whole, *apart))
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    first, second = ([t.params, t.opt_state] for t in apart)
    check_same_bits(first, second)
    check_close(first, [whole.params, whole.opt_state], 1e-5, "state")


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
    case = CASES["nnx_tied"]
    batches = [case.batch(seed) for seed in range(2)]
    wide, narrow = (
        mt.Trainer(
            case.build(), case.loss_fn, optax.adam(1e-3), case.batch(0), progress=False,
            precision=mt.Precision(compute=jnp.float32, sums=sums),
        )
        for sums in ("float32", "bfloat16")
    )  # fmt: skip
    dtypes = set(spec_of(narrow).first.gradient_dtypes.values())
    assert dtypes == {"float32", "bfloat16"}
    expected, found = ([t.read(t.step(b))["loss"] for b in batches] for t in (wide, narrow))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("given", ["int8", "float16", None, "wide"])
def test_sums_have_the_range_of_fp32(given):
    with pytest.raises(ValueError, match=r"Precision\(sums="):
        mt.Precision(sums=given)
