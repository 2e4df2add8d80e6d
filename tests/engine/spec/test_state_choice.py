"""`state_per_process="auto"`: the faster way by the clock, if it computes the same in all hosts."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import megatrain_jax as mt
from boards import FakeBoard, processes_of
from megatrain_jax._src.common.progress import phase_lines
from megatrain_jax._src.engine import start, trainer
from megatrain_jax._src.engine.adapt.adapters import adapt
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state import network
from megatrain_jax._src.engine.state.placement import _ACROSS, _AXIS, Placement, placed_on
from messages import tells
from optimizers import OPTIMIZERS
from quantities import quantities
from runs import make_trainer
from zoo import CASES

pytestmark = pytest.mark.usefixtures("traced_once")

WIDTH, DEPTH, ROWS = 4096, 4, 64
ADAM = optax.adam(1e-3)
SLOW, FAST = "1Gb/s", "1000000Gb/s"
SLOW_RATE = 1e9 / 8


def build() -> dict[str, Any]:
    return {"layers": [jnp.zeros((WIDTH, WIDTH)) for _ in range(DEPTH)]}


def loss_fn(model: Any, batch: jax.Array) -> jax.Array:
    for w in model["layers"]:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)


SAMPLE = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)


def plan_of(hosts: int = 2, case: Any = None, **options: Any) -> mt.Plan:
    parts = (build, loss_fn, ADAM, SAMPLE)
    if case is not None:
        rows = jax.eval_shape(
            lambda: jax.tree.map(lambda x: jnp.concatenate([x] * 4), case.batch(0))
        )
        parts = (case.build, case.loss_fn, ADAM, rows)
    return mt.plan(*parts, hardware=mt.card("H100"), hosts=hosts, **options)


@pytest.mark.parametrize(("network", "is_copied"), [(SLOW, True), (FAST, False)])
def test_a_plan_takes_the_faster_way_and_tells_the_seconds_of_both(network, is_copied):
    given: dict[str, Any] = {"num_gpus": 2, "network": network, "microbatches": 4}
    given |= {"device_budget": "minimum"}
    shared = plan_of(**given)
    copied = plan_of(**{**given, "microbatches": 2}, state_per_process=True)
    found = plan_of(**given, state_per_process="auto")
    assert dataclasses.replace(found, state_choice="") == (copied if is_copied else shared)
    assert shared.seconds_per_step is not None and copied.seconds_per_step is not None
    seconds = [shared.seconds_per_step, copied.seconds_per_step]
    assert (seconds[1] < seconds[0]) == is_copied
    told = [x for x in quantities(found.state_choice) if x < 1e6]
    np.testing.assert_allclose(told[:2], sorted(seconds), rtol=6e-3)
    assert found.state_choice in str(found)


def test_microbatches_that_the_plan_chooses_may_be_those_of_a_copy():
    given: dict[str, Any] = {"network": SLOW, "microbatches": "auto"}
    found = plan_of(**given, state_per_process="auto")
    assert found.num_copies == 2
    own = plan_of(**given, state_per_process=True)
    assert dataclasses.replace(found, state_choice="") == own


def test_a_copy_that_saves_little_is_not_worth_its_memory():
    batch: dict[str, Any] = {"network": "158Gb/s", "microbatches": 2, "device_budget": "minimum"}
    found = plan_of(**batch, state_per_process="auto")
    own = plan_of(**{**batch, "microbatches": 1}, state_per_process=True)
    shared = plan_of(**batch)
    assert own.seconds_per_step is not None and shared.seconds_per_step is not None
    assert 0.95 * shared.seconds_per_step < own.seconds_per_step < shared.seconds_per_step
    assert found.num_copies == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["`microbatches`=1", 2]),
        ({"hosts": 4, "microbatches": 2}, ["`microbatches`=2", 4]),
        ({"microbatches": 4, "waves": 4}, ["`microbatches`=4", "`waves`=4"]),
        ({"microbatches": "auto", "case": CASES["batchnorm_nnx"]}, ["norm", "statistics"]),
        ({"microbatches": 2, "host_gib": 5}, ["host memory"]),
        ({"microbatches": 2, "device_budget": 400 * 2**20}, ["device_budget"]),
    ],
)
def test_hosts_share_the_state_where_a_copy_can_not_compute_the_same(given, words):
    found = plan_of(**given, network="8kb/s", state_per_process="auto")
    assert found.num_copies == 1 and found.num_hosts == given.get("hosts", 2)
    assert tells(found.state_choice, *words)


def test_one_host_has_nothing_to_choose():
    found = plan_of(None, microbatches=2, num_gpus=2, state_per_process="auto")  # type: ignore
    assert not found.state_choice and found.num_devices == 2


# ---- a run's start, with two devices of this process in place of two hosts with one each


def chosen(
    monkeypatch: Any, answer: Callable[[dict[str, Any]], dict[str, Any]] = dict, **options: Any
) -> tuple[RunSpec, Placement]:
    """What a run has after its start in one of two processes, of which the other answers so."""
    processes = processes_of(FakeBoard({1: answer}))
    processes.num_here = options.pop("num_here", 1)
    given = {"hardware": "H100", "microbatches": 4, "device_budget": "minimum"}
    given |= {"state_per_process": "auto"} | options

    def placed(mesh: Any, *, per_process: bool = False) -> Placement:
        if isinstance(mesh, Mesh) and mesh.size == 2:
            across = Mesh(mesh.devices.reshape(2, 1), (_ACROSS, _AXIS)) if per_process else None
            mesh = Mesh(mesh.devices[:1], _AXIS) if per_process else mesh
            return dataclasses.replace(placed_on(mesh), processes=processes, across=across)
        return placed_on(mesh)

    monkeypatch.setattr(start, "placed_on", placed)
    run = Options(mesh=Mesh(jax.devices()[:2], "data"), **given)
    run, placement, has_gpu = start.on_this_machine(run)
    sample = jax.ShapeDtypeStruct((ROWS // 2, WIDTH), jnp.bfloat16)
    adapted = adapt(build, loss_fn, sample, 0)[0]
    return start.local_run_spec(adapted, loss_fn, ADAM, sample, run, placement, has_gpu)


@pytest.mark.parametrize(("rate", "is_copied"), [(SLOW_RATE, True), (1e15, False)])
def test_a_run_measures_the_network_and_takes_the_faster_way(rate, is_copied, monkeypatch):
    monkeypatch.setattr(start, "measured_rate", lambda placement: rate)
    spec, placement = chosen(monkeypatch)
    assert (placement.num_copies, spec.options.num_devices) == ((2, 1) if is_copied else (1, 2))
    assert spec.options.state_per_process == is_copied
    assert spec.microbatches == (2 if is_copied else 4)
    machine = spec.options.machine
    assert machine is not None and (machine.hosts, machine.copies) == (
        (1, 2) if is_copied else (2, 1)
    )
    # What is measured decides about nothing else, so that later runs compute the same bits.
    assert machine.network_bytes_per_s == math.inf
    assert tells(spec.state_choice, f"{rate / 1e9:.3g}")


@pytest.mark.parametrize("in_command", [False, True])
def test_the_choice_is_told_once(in_command, monkeypatch, capsys):
    def made(*args: Any) -> tuple[RunSpec, Placement]:
        spec, placement = start.local_run_spec(*args)
        return dataclasses.replace(spec, state_choice="shared, for a reason"), placement

    monkeypatch.setattr(trainer, "local_run_spec", made)
    with phase_lines() if in_command else nullcontext():
        make_trainer(CASES["nnx_tied"], OPTIMIZERS["adam"], progress=not in_command)
    printed = capsys.readouterr()
    told = printed.out if in_command else printed.err
    assert told.count("shared, for a reason") == 1
    make_trainer(CASES["nnx_tied"], OPTIMIZERS["adam"], progress=False)
    assert not any(capsys.readouterr())


def with_value(where: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A peer that answers as we do, except at one point."""
    return lambda ours: ours | ({"value": value} if where in ours["where"] else {})


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("who can hold", ["its host has two processes", math.inf], ["two processes"]),
        ("choosing who", [False, "Its host lacks memory."], ["lacks memory"]),
    ],
)
def test_a_copy_needs_all_hosts(where, value, words, monkeypatch):
    monkeypatch.setattr(start, "measured_rate", lambda placement: SLOW_RATE)
    spec, placement = chosen(monkeypatch, with_value(where, value))
    assert placement.num_copies == 1 and spec.options.state_per_process is False
    assert tells(spec.state_choice, *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"num_here": 2}, ["one host"]), ({"hardware": None}, ["`hardware`"])],
)
def test_a_run_that_can_not_choose_measures_nothing_and_shares(options, words, monkeypatch):
    monkeypatch.setattr(start, "measured_rate", lambda placement: pytest.fail("it measures"))
    spec, placement = chosen(monkeypatch, **options)
    assert placement.num_copies == 1 and spec.options.state_per_process is False
    assert tells(spec.state_choice, *words)


def test_a_given_rate_is_not_measured(monkeypatch):
    monkeypatch.setattr(start, "measured_rate", lambda placement: pytest.fail("it measures"))
    hardware = dataclasses.replace(mt.card("H100"), network_bytes_per_s=SLOW_RATE)
    _, placement = chosen(monkeypatch, hardware=hardware)
    assert placement.num_copies == 2


def over_two_devices(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Placement:
    processes = processes_of(FakeBoard({1: answer}))
    return dataclasses.replace(placed_on(Mesh(jax.devices()[:2], "data")), processes=processes)


@pytest.mark.parametrize("slower", [1, 4])
def test_the_network_is_timed_with_more_bytes_until_that_takes_long(slower, monkeypatch):
    asked: list[int] = []

    def seconds(placement: Placement, size: int) -> float:
        asked.append(size)
        return 1e-5 + size / 5e9

    monkeypatch.setattr(network, "_seconds", seconds)
    placement = over_two_devices(lambda ours: ours | {"value": slower * ours["value"]})
    rate = network.measured_rate(placement)
    # Each device receives half of the array, and the slowest process counts.
    np.testing.assert_allclose(rate, 2.5e9 / slower, rtol=0.02)
    assert asked == [2**20 * 8**n for n in range(len(asked))]
    last, before = (slower * seconds(placement, size) for size in asked[:-3:-1])
    assert before < 0.1 <= last


def test_a_network_that_takes_no_time_is_measured_in_a_few_rounds(monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(network, "_seconds", lambda placement, size: asked.append(size) or 1e-9)
    assert network.measured_rate(over_two_devices(dict)) > 1e17
    assert asked[-1] == 2**29


def test_devices_gather_an_array_to_time_the_network(monkeypatch):
    monkeypatch.setattr(network, "_ENOUGH_SECONDS", 0.0)
    assert 0 < network.measured_rate(over_two_devices(dict)) < math.inf
