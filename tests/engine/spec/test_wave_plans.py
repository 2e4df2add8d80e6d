"""The number of waves and microbatches that a plan or a run chooses."""

import dataclasses
import math
import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

import megatrain_jax as mt
from inside import on_one_device
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.kernels.bound_stage import in_tiles
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.report import plan_table
from megatrain_jax._src.engine.schedule.transient_host_bytes import TransientHostBytes
from megatrain_jax._src.engine.spec import microbatches, wave_search
from megatrain_jax._src.engine.spec.host import state_bytes
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.wave_search import lowest
from megatrain_jax._src.engine.start import with_chosen_microbatches
from messages import refuses
from optimizers import OPTIMIZERS
from poison import Spoiled, batch, loss_fn
from quantities import has_row
from runs import make_trainer
from zoo import CASES

pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.mark.parametrize("waves", [3, 8])
def test_waves_have_equally_many_microbatches(waves):
    with refuses(ValueError, f"`waves`={waves}", "`microbatches`=4"):
        make_trainer(CASES["nnx_scan"], OPTIMIZERS["adam"], microbatches=4, waves=waves)


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


def test_the_plan_chooses_waves_that_save_time():
    chosen, one = planned(microbatches=16), planned(microbatches=16, waves=1)
    assert chosen.waves > one.waves == 1
    assert chosen.num_kept > one.num_kept
    others = [planned(microbatches=16, waves=waves) for waves in (2, 4, 8, 16)]
    fastest = min(plan.seconds_per_step for plan in others)
    assert chosen.seconds_per_step == pytest.approx(fastest, rel=0.03)
    assert chosen.seconds_per_step < 0.95 * one.seconds_per_step
    each = 16 // chosen.waves
    assert has_row(str(chosen), [chosen.waves, each, round(chosen.link_share, 2)])
    assert has_row(str(chosen), [16]) and has_row(str(one), [16]) and "waves" not in str(one)


@pytest.mark.exhaustive
def test_a_plan_says_how_many_microbatches_it_chose():
    """One is a choice, too."""
    for rows in BATCHES:
        plan = planned(rows, microbatches="auto")
        assert has_row(str(plan), [plan.microbatches])
    assert planned(64, microbatches="auto").microbatches == 1


def test_a_table_of_a_plan_counts_microbatches_and_those_of_a_wave():
    def cells(microbatches: int, waves: int) -> Any:
        numbers = {"microbatches": microbatches, "waves": waves, "link_share": None}
        return plan_table._part_cells(SimpleNamespace(**numbers))  # pyright: ignore[reportArgumentType]

    assert cells(1, 1) == [["microbatches", "1", ""]]
    assert cells(16, 8) == [["microbatches", "16", ""], ["waves", "8", "of 2 microbatches each"]]


@pytest.mark.parametrize("depends_on_waves", [True, False])
def test_a_plan_chooses_no_waves_that_change_bits(depends_on_waves):
    class Made(microbatches._Dividing):
        """A search with one spec, that says how it was fitted."""

        def _made(self, run: Any, *, is_free: bool) -> Any:
            return SimpleNamespace(first=SimpleNamespace(depends_on_waves=depends_on_waves))

        def _in_waves(self, spec: Any, device_bytes: int) -> Any:
            return "in waves"

    unused: Any = None
    fit: Any = lambda spec: "in one"  # noqa: E731
    search = Made(Options(microbatches=4), unused, fit, 4, 2**30, unused)
    assert search.to_machine() == ("in one" if depends_on_waves else "in waves")


def test_a_kernel_that_cannot_be_divided_is_built_whole():
    kernel = Kernel(name="one", key=(), build=lambda: lambda: jnp.ones(()))
    assert in_tiles(kernel, 2).build()() == 1


def test_a_single_microbatch_goes_in_one_wave_however_slow_it_is():
    """The bound of its time, without room for residuals, is far above the time of arithmetic."""
    model, _ = adapt(build_mlp, mlp_loss, BATCHES[8192], 0)
    options = Options(hardware=MACHINE)
    spec = make_run_spec(model, mlp_loss, CLIPPED, BATCHES[8192], options)
    found = wave_search.fit_in_waves(spec, lambda run: run, 0.0)
    assert found.first.waves == found.first.microbatches == 1


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


@pytest.mark.parametrize(
    ("seconds", "host_gib", "chosen"),
    [
        ((10.0, 9.4), (100, 100), 4),
        ((10.0, 9.6), (100, 81), 1),
        ((10.0, 9.6), (100, 79), 4),
        ((10.0, 10.0), (100, 79), 4),
        ((10.0, 10.1), (100, 20), 1),
        ((10.0, 9.6), (24, 20), 1),  # nearly all of it is state
        ((math.inf, 12.0), (300, 200), 4),
        ((math.inf, math.inf), (300, 290), 4),
        ((math.inf, math.inf), (290, 300), 1),
    ],
)
def test_several_waves_are_taken_if_they_save_time_or_host_memory_at_no_cost(
    monkeypatch, seconds, host_gib, chosen
):
    """By a table of one wave and of four; 20 GiB are state. With infinite seconds, neither fits."""
    gib = 2**30
    model, _ = adapt(build_mlp, mlp_loss, BATCHES[64], 0)
    run = Options(hardware=MACHINE, microbatches=4)
    spec = make_run_spec(model, mlp_loss, CLIPPED, BATCHES[64], run)
    rows = zip(seconds, host_gib, strict=True)
    table: dict[int, tuple[float, int]] = dict(zip((1, 4), rows, strict=True))

    def fit(run: RunSpec) -> RunSpec:
        first = run.first
        time, host = table.get(first.waves, (math.inf, 1000))
        waiting = TransientHostBytes(
            gradients=0, activations=host * gib - state_bytes(first), residuals=0
        )
        schedule = dataclasses.replace(first.schedule, seconds=time, transient=waiting)
        first = dataclasses.replace(first, schedule=schedule)
        return dataclasses.replace(
            run, first=first, temporary_bytes=0, lacking_host=host if math.isinf(time) else 0
        )

    monkeypatch.setattr(wave_search, "state_bytes", lambda _: 20 * gib)
    monkeypatch.setattr(wave_search, "least_seconds", lambda *_: 9.55)
    monkeypatch.setattr(wave_search, "least_in_waves", lambda *_: 0.0)
    monkeypatch.setattr(wave_search, "_balanced", lambda _: 4.0)
    assert wave_search.fit_in_waves(spec, fit, math.inf).first.waves == chosen


@pytest.mark.exhaustive
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
        monkeypatch.setattr(module, "least_in_waves", lambda *_: -math.inf)
    monkeypatch.setattr(microbatches, "least_seconds", lambda *_: -math.inf)
    assert plans() == found
    assert fewer < len(asked) - fewer


def test_one_wave_stays_one_where_more_change_bits_or_save_nothing():
    assert planned(microbatches=16, loss=tied_loss).waves == 1
    assert planned(microbatches=16, loss=tied_loss, waves=4).waves == 4
    # Few rows: the link is the bound.
    for options in ({"rows": 64, "microbatches": 4}, {"microbatches": 1}):
        assert planned(**options) == planned(**options, waves=1)


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
    # Without one, a plan counts this process's memory, which changes meanwhile.
    own: dict[str, Any] = dict.fromkeys(("host_process_bytes", "host_fixed_bytes"))
    for options in fewer:
        found, one = (planned(**options, microbatches=number) for number in ("auto", 1))
        assert dataclasses.replace(found, **own) == dataclasses.replace(one, **own)


@pytest.mark.exhaustive
def test_backwards_that_cannot_be_divided_as_others_of_their_stage_stay_whole():
    """Backwards of a stage for different microbatches have one number of tiles."""
    little = dataclasses.replace(MACHINE, device_bytes=50 * 2**20)
    precision = mt.Precision.compact(sums="bfloat16")
    plan = planned(hardware=little, precision=precision, microbatches=4, waves=2)
    assert plan.tiles and not plan.fits_device


# Number of microbatches: GiB that a function needs, the best number of waves, seconds of a step. As
# planned for 8.2B parameters on an RTX 4090 with 22.5 GiB, and 14.8B on an H100 with 68 GiB.
_ON_4090 = {8: (6.2, 8, 70.0), 16: (6.0, 16, 65.9), 32: (3.7, 32, 61.9), 64: (3.6, 32, 66.0)}
_ON_H100 = {8: (15.5, 8, 80.0), 16: (7.8, 16, 91.4), 32: (6.9, 32, 88.2), 64: (6.7, 32, 88.5)}
# Then the seconds that copies may take longer: 7.6B on an H100 with 73.6 GiB.
_COPYING = {8: (20.0, 8, 10.3, 0.9), 16: (6.9, 16, 10.34, 0.49), 32: (5.7, 16, 10.35, 0.25)}


class Tabled(microbatches._Dividing):
    """A search whose plans are rows of a table; those in few microbatches may lack memory."""

    def __init__(self, table: Any, gib: float, chosen: int, fits_from: int = 0):
        """Searches from a number of microbatches."""
        unused: Any = None
        run = Options(microbatches="auto")
        super().__init__(run, unused, unused, max(table), int(gib * 2**30), unused)
        self.table, self.chosen, self.fits_from = table, chosen, fits_from
        self.asked: list[int] = []

    def _divided(self, number: int) -> Any:
        _, waves, seconds, *slower = self.table[number]
        schedule = SimpleNamespace(seconds=seconds, cautious_seconds=seconds + sum(slower))
        step = {"microbatches": number, "waves": waves, "workload": None, "selective": None}
        first = SimpleNamespace(schedule=schedule, program=None, **step)
        lacking = 0, max(0, self.fits_from - number)
        return SimpleNamespace(first=first, lacking=lacking, host_room=math.inf, adapted=None)

    def _in_few_microbatches(self) -> Any:
        return self._divided(self.chosen)

    def _in_waves(self, spec: Any, device_bytes: int) -> Any:
        self.asked.append(spec.first.microbatches)
        return spec

    def _needed_by_one(self, spec: Any) -> Any:
        return self.table[spec.first.microbatches][0] * 2**30

    def _least_seconds(self, spec: Any, device_bytes: int, host_room: float) -> float:
        return 0.0


@pytest.mark.parametrize(
    "table, gib, chosen, tried",
    [
        (_ON_4090, 22.5, 64, [64, 32]),
        (_ON_H100, 68, 16, [16, 32, 64]),
        (_COPYING, 73.6, 32, [32, 16]),
        (_COPYING, 73.6, 16, [16, 32]),
    ],
    ids=["larger", "smaller", "no more copies", "fewer copies"],
)
def test_larger_and_smaller_microbatches_than_by_memory_are_tried(
    monkeypatch, table, gib, chosen, tried
):
    monkeypatch.setattr(microbatches, "least_seconds", lambda *_: 0.0)
    search = Tabled(table, gib, chosen)
    assert search.to_machine().first.microbatches == 32
    assert search.asked == tried


def test_microbatches_become_larger_or_smaller_while_that_lacks_no_memory_and_saves_time(
    monkeypatch,
):
    monkeypatch.setattr(microbatches, "least_seconds", lambda *_: 0.0)
    rng, numbers = random.Random(0), [2**i for i in range(6)]
    for _ in range(300):
        table = {
            n: (rng.choice([1, 1, 50]), rng.choice([1, n, n]), rng.randint(9, 12)) for n in numbers
        }
        chosen, fits_from = rng.choice(numbers[1:]), rng.choice(numbers)

        def rank(number: int, less: float = 1, table=table, fits_from=fits_from) -> Any:
            lacks = max(0, fits_from - number)
            return (lacks, less * table[number][2]) if number in table else (math.inf, 0)

        best = chosen
        while fits_from <= best > 1 and table[best // 2][0] < 20 and rank(best // 2) <= rank(best):
            best //= 2
        while best >= chosen and table[best][1] == best and rank(2 * best) <= rank(best, 0.98):
            best *= 2
        search = Tabled(table, 100, chosen, fits_from)
        assert search.to_machine().first.microbatches == best
        assert len(search.asked) == len({*search.asked})


@pytest.mark.parametrize(
    ("whole", "halves", "chosen"),
    [(120, 92, 2), (120, 120, 1), (90, 70, 1), (90, 60, 2)],
    ids=["only halves fit", "no less", "little less", "less"],
)
def test_microbatches_whose_need_hardly_depends_on_rows_are_smaller_only_to_fit(
    whole: int, halves: int, chosen: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(microbatches, "reason_against_microbatches", lambda *_: "")
    search = Tabled({1: (whole, 1, 1.0), 2: (halves, 1, 1.0)}, 100, 1)
    monkeypatch.setattr(search, "_sized", search._divided)
    monkeypatch.setattr(Tabled, "_in_few_microbatches", microbatches._Dividing._in_few_microbatches)
    assert search._in_few_microbatches().first.microbatches == chosen


def test_waves_are_taken_where_one_has_no_room_in_the_budget():
    smallest = planned(microbatches=16, waves=16, device_budget="least").device_state_bytes
    budget = smallest * 11 // 10
    with refuses(ValueError, f"device_budget={budget}", "small"):
        planned(microbatches=16, waves=1, device_budget=budget)
    found = planned(microbatches=16, device_budget=budget)
    assert found.waves > 1 and found.device_state_bytes <= budget
    with refuses(ValueError, f"device_budget={smallest // 2}", "small"):
        planned(microbatches=16, device_budget=smallest // 2)


@pytest.mark.exhaustive
def test_a_run_on_a_gpu_takes_the_parts_of_its_plan():
    plan, adapted = planned(microbatches="auto"), adapt(build_mlp, mlp_loss, BATCHES[8192], 0)[0]

    def make(run: Options) -> RunSpec:
        return make_run_spec(adapted, mlp_loss, CLIPPED, BATCHES[8192], run)

    def parts(*, has_gpu: bool, **given: Any) -> tuple[Any, Any]:
        run, placement = Options(hardware=MACHINE, **given), on_one_device()
        found = with_chosen_microbatches(run, make, BATCHES[8192], placement, has_gpu=has_gpu)
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
        ({"microbatches": "auto", "waves": 2}, ["`waves`=2", "`microbatches`", "number"]),
        ({"waves": 2}, ["`waves`=2", "`microbatches`=1"]),
    ],
)
def test_parts_that_make_no_sense_are_named(options, words):
    with refuses(ValueError, *words):
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


def test_microbatches_to_choose_from_divide_the_rows_of_each_device():
    run = Options(microbatches="auto", mesh=AbstractMesh((4,), ("data",)))
    unused: Any = None
    for rows, numbers in ((24, [1, 2, 3, 6]), (10, [])):
        found = microbatches._Dividing(run, unused, unused, rows, None, unused)
        assert sorted(found._numbers) == numbers
