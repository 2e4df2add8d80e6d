"""Where the driver waits, what it waits for is there when it goes on: on a device that is slow."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from late import SlowDevice, are_ready, is_computed
from megatrain_jax._src.kernels.cache import Templates
from megatrain_jax._src.runtime.transfers import Transfers
from megatrain_jax._src.schedule.tasks import WAITS, Op
from megatrain_jax._src.state.placement import default_device, on_one_device
from optimizers import OPTIMIZERS
from runs import make_trainer
from zoo import CASES

COMPUTING = {Op.FORWARD, Op.BACKWARD, Op.REDUCE, Op.UPDATE}


def leaving(platform: str) -> Transfers:
    """Moves whose device has not made what it offloads."""
    placement = dataclasses.replace(on_one_device(default_device()), platform=platform)
    transfers, late, device = Transfers(placement), SlowDevice(), placement.slabs_on_device
    for _ in range(10):
        late(jnp.zeros(1))  # it has other work to do first
    for n in range(3):
        transfers.on_device["P", n] = (late(jax.device_put(jnp.full(64, float(n)), device)),)
        transfers.move(Op.OFFLOAD, ("P", n), 5, [])
    return transfers


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_lands_or_rests_is_in_the_host(platform):
    transfers = leaving(platform)
    transfers.dispatch()
    transfers.wait_landed(5, ("P", 1))
    assert are_ready(transfers.host["P", 1])
    transfers = leaving(platform)
    transfers.rest()
    assert are_ready(x for slabs in transfers.host.values() for x in slabs)
    assert [float(transfers.host["P", n][0][0]) for n in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("optimizer", ["adamw_schedule", "clip_adamw"])
def test_a_step_goes_on_when_what_it_waits_for_is_there(optimizer, monkeypatch):
    case = CASES["nnx_tied"]
    trainer = make_trainer(case, OPTIMIZERS[optimizer], budget="least")
    trainer.step(case.batch(0))
    trainer.flush()
    late, engine, get, obey = SlowDevice(), trainer._engine, Templates.get, trainer._engine.obey
    made: dict[int, list[jax.Array]] = {}  # by task, what it computed last
    now, num_late = -1, {op: 0 for op in WAITS}

    def slow(self, key, *args, **options):
        function = get(self, key, *args, **options)

        def run(*args):
            out = late(function(*args))
            made[now] = jax.tree.leaves(out)
            return out

        return run if key[0] in ("forward", "backward", "reduce", "update") else function

    def watched(instruction, step):
        nonlocal now
        task = engine._begun + (instruction.task or 0)
        now = task if instruction.op in COMPUTING else now
        key = instruction.part, instruction.group
        waits_for, is_there = made.get(task, []), is_computed
        if instruction.op is Op.LAND:
            waits_for, is_there = engine.host.get(key, ()), are_ready
        was_late = not is_there(waits_for)
        obey(instruction, step)
        if instruction.op in WAITS:
            num_late[instruction.op] += was_late
            assert is_there(waits_for), instruction

    engine._found.clear()
    monkeypatch.setattr(Templates, "get", slow)
    monkeypatch.setattr(engine, "obey", watched)
    for seed in range(2):
        trainer.step(case.batch(seed))
    trainer.flush()
    assert all(num_late.values()), "a device that isn't slow shows nothing"
