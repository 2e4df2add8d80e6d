"""Functions timed at a run's start, and schedules by their times, which never change results."""

import dataclasses
import gc
import logging
import math
import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh

import megatrain_jax as mt
import small
from inside import spec_of
from megatrain_jax._src.engine.kernels import timing
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.kernels.timing import RepeatedCall
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.search import find_schedule, reschedule, whole_schedule
from megatrain_jax._src.engine.schedule.tasks import build_task_lists
from megatrain_jax._src.engine.schedule.workload import Costs
from megatrain_jax._src.engine.spec import measured
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.step_kernels import numbered_kernels
from megatrain_jax._src.engine.state.placement import default_mesh, placed_on
from messages import refuses
from optimizers import OPTIMIZERS
from runs import SLOW, check_same_bits, make_spec, make_trainer
from schedule_machine import run_everything
from workloads import BLOCK, chain, computing, random_workload
from zoo import CASES
from zoo_case import Case

# A step of these is compiled in a fraction of the time that a decoder takes.
LAYERS = Case(
    name="layers",
    build=lambda: small.params() + small.params(),
    loss_fn=small.loss_fn,
    blocks=4,
    templates=1,
    batch=small.batch,
)


def other_costs(costs: Costs, rng: random.Random) -> Costs:
    """Costs with every computation's time multiplied by a number of its own."""

    def times(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(x * rng.choice((0.01, 0.5, 1, 2, 100)) for x in seconds)

    return dataclasses.replace(
        costs,
        forward=times(costs.forward),
        backward=times(costs.backward),
        update=times(costs.update),
    )


@pytest.mark.by_default("1", "4", "6", "7")
@pytest.mark.parametrize(
    "seed",
    [seed if seed < 15 else pytest.param(seed, marks=pytest.mark.long) for seed in range(200)],
)
def test_a_schedule_by_other_times_computes_the_same_within_the_same_memory(seed):
    plain, rng = random_workload(seed), random.Random(seed)
    waves = rng.choice((1, 1, 2, 5))
    if waves > 1:
        plain = dataclasses.replace(plain, accumulate=True, waves=waves)
    smallest = find_schedule(plain, None).smallest_bytes
    budget = smallest + rng.randrange(2 * sum(sum(row.values()) for row in plain.sizes))
    room = rng.choice((math.inf, rng.random() * find_schedule(plain, budget).transient_bytes))
    before = find_schedule(plain, budget, None, room)
    timed = dataclasses.replace(plain, costs=other_costs(plain.costs, rng))
    after = reschedule(timed, before, budget, room)
    assert after.peak_bytes <= budget
    assert after.transient_bytes <= max(room, before.transient_bytes)
    pinned = reschedule(timed, before, budget, 0.0)
    reserved = whole_schedule(plain, before).transient_bytes
    assert whole_schedule(timed, pinned).transient_bytes <= reserved
    assert (after.kept, after.selective) == (before.kept, before.selective)
    whole, old = whole_schedule(timed, after), whole_schedule(timed, before)
    for name in ("cold", "steady", "flush", "evaluation"):
        assert computing(getattr(whole, name)) == computing(getattr(old, name))
    run_everything(timed, whole)
    # With the times that it was made for, nothing is slower than it was.
    assert reschedule(plain, before, budget, room).seconds <= 1.03 * before.seconds


def test_a_schedule_by_other_times_keeps_to_the_memory_of_the_host():
    """A decoder with updates that wait for a norm, and less host memory than the fastest takes."""
    passed, budget = [(i,) for i in range(7)], 200
    large = {kind: 4 * size for kind, size in BLOCK.items()}
    workload = chain(
        8,
        sizes=(large, *(BLOCK,) * 6, large),
        deferred=True,
        activations=dict.fromkeys(range(7), 6),
        makes=(*passed, ()),
        reads=((), *passed),
    )
    before = find_schedule(workload, budget, None, 0)
    room = before.transient_bytes
    costs = other_costs(workload.costs, random.Random(0))
    timed = dataclasses.replace(workload, costs=costs)
    assert reschedule(timed, before, budget, math.inf).transient_bytes > room
    after = reschedule(timed, before, budget, room)
    assert after.transient_bytes <= room and after.steady != before.steady
    run_everything(timed, after)
    # What a schedule takes is there, whatever room is beside it.
    wide = find_schedule(workload, budget)
    assert wide.transient_bytes > room
    own = reschedule(timed, wide, budget, wide.transient_bytes)
    assert own.transient_bytes > room and reschedule(timed, wide, budget, 0) == own


class RandomTimer:
    """A timer of random seconds, from a microsecond to a second."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def __call__(self, call: RepeatedCall, agree: Any, pause: float = 0.0) -> float:
        call.run(1)
        return agree(10.0 ** self.rng.uniform(-6, 0))

    def rates(self, *_: Any) -> tuple[float, float]:
        """Rates of copies, from 10 kB to 1 GB per second."""
        return 10.0 ** self.rng.uniform(4, 9), 10.0 ** self.rng.uniform(4, 9)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "optimizer", "options"),
    [
        ("nnx_tied", "clip_adamw", {"microbatches": 2}),
        ("dropout_nnx", "adam", {"microbatches": 2, "waves": 2}),
    ],
)
@pytest.mark.usefixtures("pretending_gpu")
def test_results_are_the_same_to_the_bit_under_any_times(
    name, optimizer, options, monkeypatch, started_once_in_test, tmp_path
):
    """Also if a run goes on from the checkpoint of a run under other times."""
    case = CASES[name]
    least = make_spec(case, OPTIMIZERS[optimizer], **options).first.schedule.smallest_bytes
    options["budget"] = round(1.3 * least)
    monkeypatch.setattr(measured, "_SHORTEST", math.inf)
    expected = make_trainer(case, OPTIMIZERS[optimizer], **options)
    losses = [expected.read(expected.step(case.batch(seed)))["loss"] for seed in range(3)]
    monkeypatch.setattr(measured, "_SHORTEST", 0.0)

    def use(timer: RandomTimer) -> None:
        monkeypatch.setattr(timing, "measured_seconds", timer)
        monkeypatch.setattr("megatrain_jax._src.engine.start.measured_rates", timer.rates)

    use(RandomTimer(1))
    timed = make_trainer(case, OPTIMIZERS[optimizer], **options)
    assert timed.plan.is_measured and not expected.plan.is_measured
    schedules = [spec_of(trainer).first.schedule for trainer in (timed, expected)]
    assert schedules[0].steady != schedules[1].steady, "these times change the schedule"
    assert [timed.read(timed.step(case.batch(n)))["loss"] for n in range(2)] == losses[:2]
    timed.save(tmp_path / "saved")
    use(RandomTimer(2))
    resumed = make_trainer(case, OPTIMIZERS[optimizer], **options)
    resumed.restore(tmp_path / "saved")
    assert resumed.read(resumed.step(case.batch(2)))["loss"] == losses[2]
    check_same_bits(resumed.params, expected.params)
    check_same_bits(resumed.opt_state, expected.opt_state)


@pytest.mark.by_default("1")
@pytest.mark.usefixtures("pretending_gpu")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_functions_are_timed_as_they_run_in_training(num_devices, monkeypatch, caplog):
    """With arguments of one function at a time, and without compiling it again."""
    held, beside = [], []

    def timer(call: RepeatedCall, agree: Any, pause: float = 0.0) -> float:
        caplog.clear()
        call.run(3)
        assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
        held.append(sum(x.nbytes for x in jax.live_arrays()))
        return agree(1e-3)

    def call(function: Any, kernel: Kernel, arguments: tuple[Any, ...]) -> RepeatedCall:
        own = sum(x.nbytes for x in jax.tree.leaves(arguments))
        beside.append(sum(x.nbytes for x in jax.live_arrays()) - own)
        return RepeatedCall(function, kernel, arguments)

    monkeypatch.setattr(timing, "measured_seconds", timer)
    monkeypatch.setattr(timing, "RepeatedCall", call)
    case, mesh = LAYERS, Mesh(jax.devices()[:num_devices], "data")
    real = measured.by_measured_times

    def noted(spec, kernels, placement, batch):
        what = spec.first, spec.layouts, spec.optimizer, placement
        rows = [kernel for _, _, kernel in numbered_kernels(*what)]
        gc.collect()
        before = sum(x.nbytes for x in jax.live_arrays())
        found = real(spec, kernels, placement, batch)
        largest = max(sum(x.size * x.dtype.itemsize for x in _sized(k)) for k in rows)
        # Results and new arguments take no more than the arguments did.
        assert before < max(held) <= before + 3 * largest
        assert max(beside) <= before + 4096, "nothing of the function before"
        assert sum(x.nbytes for x in jax.live_arrays()) <= before + 4096
        return found

    monkeypatch.setattr(measured, "by_measured_times", noted)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        trainer = make_trainer(case, OPTIMIZERS["clip_adamw"], microbatches=2, waves=1, mesh=mesh)
    assert list(trainer.startup)[1:3] == ["compiling", "timing"]
    step = spec_of(trainer).first
    costs, each = step.workload.costs, step.wave_microbatches
    assert step.schedule.kept and each == 2
    assert set(costs.update) == set(costs.reduce) == {1e-3}
    assert costs.delay == 1 / SLOW.memory_bytes_per_s
    assert set(costs.forward[:-1]) == {each * 1e-3}
    assert {round(c.seconds, 9) for c in _stages(step)} == {each * 1e-3}
    assert {c.seconds for c in _computations(step) if c.instruction.op is Op.REDUCE} == {1e-3}
    assert len(str(trainer.plan)) > len(str(dataclasses.replace(trainer.plan, is_measured=False)))


@pytest.mark.by_default("2")
@pytest.mark.usefixtures("pretending_gpu")
@pytest.mark.parametrize("in_wave", [1, 2, 4])
def test_backwards_that_round_sums_are_timed_together(in_wave, monkeypatch, caplog):
    """The microbatches of a wave have different backwards, timed with what they take in a step."""
    numbers = iter(range(1, 100))

    def timer(call: RepeatedCall, agree: Any, pause: float = 0.0) -> float:
        call.run(3)
        return agree(next(numbers) * 1e-3)

    monkeypatch.setattr(timing, "measured_seconds", timer)
    batch = {"x": np.ones((8, 64), np.float32)}
    trainer = mt.Trainer(
        LAYERS.build(), LAYERS.loss_fn, optax.sgd(0.1), batch,
        microbatches=2 * in_wave, waves=2,
        precision=mt.Precision(compute="float32", sums="bfloat16"),
    )  # fmt: skip
    assert trainer.plan.is_measured
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        trainer.step(batch)
        trainer.flush()
    compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
    assert compiled and not any("backward_stage" in text for text in compiled)


def _sized(kernel: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(kernel.takes) if x.dtype != timing._key_dtype()]


def _computations(step: BoundStep) -> list[Any]:
    lists = build_task_lists(dataclasses.replace(step.scheduled, kept=step.schedule.kept))
    return [c for task in lists.steady for c in task.computations]


def _stages(step: BoundStep) -> list[Any]:
    return [c for c in _computations(step) if c.instruction.op in (Op.FORWARD, Op.BACKWARD)]


class FakeCall:
    """A call that takes some seconds on a clock of its own; waiting for its end takes more."""

    def __init__(self, seconds: float, wait: float = 1e-4):
        self.seconds, self.wait, self.now, self.runs = seconds, wait, 0.0, []

    def run(self, times: int) -> None:
        self.runs.append(times)
        self.now += times * self.seconds + self.wait


@pytest.mark.parametrize("seconds", [1e-6, 1e-4, 3e-3, 0.015, 0.06, 0.5, 5.0])
def test_a_call_is_timed_without_the_wait_for_its_end(seconds, monkeypatch):
    call = FakeCall(seconds)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: call.now))
    agreed: list[float] = []
    found = timing.measured_seconds(call, lambda s: agreed.append(s) or s)  # type: ignore
    assert found == pytest.approx(seconds + call.wait / call.runs[-1])
    assert found <= 1.01 * max(seconds, 2e-4)
    assert call.runs[:2] == [1, 1][: len(call.runs)] and len(set(call.runs[2:])) <= 1
    assert len(agreed) == min(3, len(call.runs)), "the number of calls, and the time"
    *batches, _ = call.runs[2:] or [1]
    assert len(batches) < 2 or sum(batches) * seconds < 0.1, "no more batches than it takes"
    assert call.now <= 0.3 or len(call.runs) == (1 if seconds >= 2 else 2), "a long call runs once"


class HotCall(FakeCall):
    """A call that takes the longer, the more the device has computed in the last half second."""

    def __init__(self, seconds: float, device: "HotDevice"):
        super().__init__(seconds, wait=9e-5)
        self.device = device

    def run(self, times: int) -> None:
        seconds = times * self.seconds * (1 + 0.1 * round(self.device.busy(), 2))
        self.device.computed.append((self.device.now, seconds))
        self.device.now += seconds + self.wait
        self.runs.append(times)


class HotDevice:
    """A device with a clock of its own, and the calls that it has computed."""

    def __init__(self):
        self.now, self.computed = 0.0, []

    def busy(self) -> float:
        """The share of the last half second in which it computed."""
        since = self.now - 0.5
        return sum(max(0.0, at + s - max(at, since)) for at, s in self.computed) / 0.5

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("share", [1.0, 0.9, 0.6, 0.2, None])
def test_stages_of_a_long_step_are_timed_at_the_clock_of_a_hot_device(share, monkeypatch):
    """A device that is as busy as in the step; it is no hotter than that."""
    seconds = {"forward": 5e-3, "backward": 1e-2, "small": 1e-5, "update": 4e-3, "long": 30.0}
    device, calls = HotDevice(), {}

    def call_of(function: Any, kernel: Kernel, arguments: Any) -> HotCall:
        device.now += 1.0  # it cools while arguments are made
        return calls.setdefault(kernel.name, HotCall(seconds[kernel.name], device))

    clock = SimpleNamespace(perf_counter=lambda: device.now, sleep=device.sleep)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing, "RepeatedCall", call_of)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    takes = (jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding),)
    kernels = [Kernel(name=n, build=lambda: lambda x: x, takes=takes) for n in seconds]
    found = timing.time_kernels(KernelCache(), map(timing.Timed, kernels), share=share)
    for name, least in seconds.items():
        if name in ("forward", "backward") and share is not None:
            # A smaller share is taken for a half.
            assert found[name, ()] / least - 1 == pytest.approx(0.1 * max(share, 0.5), abs=0.015)
        else:
            assert found[name, ()] == pytest.approx(least, rel=0.03, abs=2e-6)
    assert calls["long"].runs == [1]


@pytest.mark.by_default("2.0")
@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_stages_of_a_long_step_are_as_busy_as_in_the_step(seconds, monkeypatch, pretending_gpu):
    """What updates and waits take of a step of `seconds`, its stages don't."""
    shares = []
    monkeypatch.setattr(
        measured, "time_kernels", lambda *_, share, **__: shares.append(share) or {}
    )
    spec = make_spec(LAYERS, OPTIMIZERS["adam"])
    first, half = spec.first, seconds / 2
    costs = first.workload.costs
    costs = dataclasses.replace(
        costs,
        forward=(half / 2 / len(costs.forward),) * len(costs.forward),
        backward=(half / 2 / len(costs.backward),) * len(costs.backward),
        update=(half / 4 / len(costs.update),) * len(costs.update),
        recompute=(),
        rounding=(),
    )
    fused = first.workload.fused_last * half / 2 / len(costs.forward)
    workload = dataclasses.replace(first.workload, costs=costs)
    schedule = dataclasses.replace(first.schedule, seconds=seconds, kept=frozenset())
    first = dataclasses.replace(first, workload=workload, selective=None, schedule=schedule)
    spec = dataclasses.replace(spec, first=first)
    measured.by_measured_times(spec, KernelCache(), placed_on(default_mesh()), LAYERS.batch(0))
    assert shares == [pytest.approx((half - fused) / seconds) if seconds >= 1 else None]


def printing(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    jax.debug.print("sum of {}", x.sum())
    return (x**2).mean()


@pytest.mark.by_default("True")
@pytest.mark.usefixtures("pretending_gpu")
@pytest.mark.parametrize("is_long", [True, False])
def test_short_steps_and_stages_that_print_are_not_timed(is_long, monkeypatch, capsys):
    timed = []

    def timer(call: RepeatedCall, agree: Any) -> float:
        call.run(1)
        timed.append(call)
        return 1e-3

    monkeypatch.setattr(timing, "measured_seconds", timer)
    monkeypatch.setattr(measured, "_SHORTEST", 0.0 if is_long else math.inf)
    params = {"layers": [{"w": np.ones((8, 8), np.float32)} for _ in range(3)]}
    trainer = mt.Trainer(
        params, printing, optax.sgd(0.1), {"x": np.ones((2, 8), np.float32)}, progress=False
    )
    assert ("timing" in trainer.startup) == trainer.plan.is_measured == is_long
    assert bool(timed) == is_long
    stages = {c.instruction: round(c.seconds, 9) for c in _stages(spec_of(trainer).first)}
    assert {i.stage for i, s in stages.items() if s == 1e-3} == ({0, 1} if is_long else set())
    assert "sum of" not in capsys.readouterr().out


@pytest.mark.usefixtures("pretending_gpu")
def test_a_plan_measures_where_it_is_asked_to(monkeypatch):
    monkeypatch.setattr(timing, "measured_seconds", lambda call, agree: call.run(1) or agree(0.25))
    params = {"layers": [{"w": np.ones((8, 8), np.float32)} for _ in range(3)]}
    made = params, printing, optax.sgd(0.1), {"x": np.ones((2, 8), np.float32)}
    plan = mt.plan(*made, measure=True, microbatches=2)
    trainer = mt.Trainer(*made, progress=False, microbatches=2)
    # Two forwards and backwards of two microbatches, and three updates; one backward prints.
    assert plan.is_measured and plan.seconds_per_step == trainer.plan.seconds_per_step
    assert plan.seconds_per_step == pytest.approx(2 * 2 * 2 * 0.25 + 3 * 0.25, rel=0.01)
    assert plan.schedule == trainer.plan.schedule
    with refuses(ValueError, "`measure`=True", "`num_gpus`"):
        mt.plan(*made, measure=True, hardware="H100", num_gpus=2)
    with refuses(ValueError, "`measure`=True", "`host_gib`"):
        mt.plan(*made, measure=True, hardware="H100", host_gib=8)


@jax.custom_vjp
def doubled(x):
    """A kernel of somebody else, whose operations and bytes nothing counts."""

    def kernel(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, cotangent: (doubled(cotangent),))


@pytest.mark.usefixtures("pretending_gpu")
def test_a_plan_measures_stages_with_foreign_kernels(monkeypatch):
    monkeypatch.setattr(
        timing, "measured_seconds", lambda call, agree, pause=0.0: (call.run(1), 0.25)[1]
    )
    params = {"layers": [{"w": np.ones((8, 8), np.float32)} for _ in range(3)]}

    def loss_fn(params, batch):
        x = batch
        for layer in params["layers"]:
            x = jnp.tanh(doubled(x @ layer["w"]))
        return (x**2).mean()

    made = params, loss_fn, optax.sgd(0.1), np.ones((2, 8), np.float32)
    assert "pallas_call" in str(jax.make_jaxpr(loss_fn)(params, made[-1]))
    plan = mt.plan(*made, measure=True)
    # Two forwards, three backwards and three updates.
    assert plan.is_measured
    assert plan.seconds_per_step == pytest.approx((2 + 3 + 3) * 0.25, rel=0.01)
    assert (mt.plan(*made, hardware="H100").seconds_per_step or math.inf) < 0.1


def test_a_plan_measures_only_on_a_gpu():
    params = {"w": np.ones((8, 8), np.float32)}
    with refuses(ValueError, "`measure`=True", "JAX"):
        mt.plan(
            params, lambda p, x: (x @ p["w"]).mean(), optax.sgd(0.1), np.ones((2, 8)), measure=True
        )
