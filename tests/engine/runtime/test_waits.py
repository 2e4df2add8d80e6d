"""Where the driver waits, what it waits for is there when it goes on: on a device that is slow."""

import dataclasses
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inside import engine_of, on_one_device, spec_of
from late import SlowDevice, are_ready, is_computed
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.kernels import cache
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.runtime.transfers import Transfers
from megatrain_jax._src.engine.schedule.instructions import WAITS, Op
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from optimizers import OPTIMIZERS
from runs import make_trainer
from zoo import CASES
from zoo_case import DIM, VOCAB, Case, cross_entropy

COMPUTING = {Op.FORWARD, Op.BACKWARD, Op.REDUCE, Op.UPDATE}


def build_injected() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    layers = [{"a": normal(DIM, DIM), "b": normal(DIM, DIM)} for _ in range(4)]
    return {"embed": normal(VOCAB, DIM), "layers": layers, "head": normal(DIM, VOCAB)}


def injected_loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    first = x = params["embed"][batch["tokens"][:, :-1]]
    for layer in params["layers"]:
        x = jnp.tanh(first @ layer["a"]) + x @ layer["b"]
    return cross_entropy(x @ params["head"], batch["tokens"][:, 1:])


def beside_loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    x = params["embed"][batch["tokens"][:, :-1]]
    parts = [jnp.tanh(x @ layer["a"]) @ layer["b"] for layer in params["layers"]]
    return cross_entropy(jnp.stack(parts).sum(0) @ params["head"], batch["tokens"][:, 1:])


# All blocks read the embedding, and hand its cotangent to one another, each of which adds its own:
# first beside another cotangent, then as all that they have.
INJECTED, BESIDE = (
    Case(name=loss.__name__, build=build_injected, loss_fn=loss, blocks=4, templates=1)
    for loss in (injected_loss, beside_loss)
)


def leaving(platform: str) -> Transfers:
    """Moves whose device has not made what it offloads."""
    placement = dataclasses.replace(on_one_device(), platform=platform)
    store, late = Store((), placement, jax.random.key(0)), SlowDevice()
    transfers, device = Transfers(store), placement.slabs_on_device
    for _ in range(10):
        late(jnp.zeros(1))  # it has other work to do first
    for n in range(3):
        slab, key = jax.device_put(jnp.full(64, float(n)), device), Key(Kind.MASTERS, n)
        store.on_device[key] = (late(slab),)
        transfers.move(Op.OFFLOAD, key, 5, [])
    return transfers


@pytest.mark.by_default("cpu")
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_lands_or_rests_is_in_the_host(platform):
    transfers = leaving(platform)
    transfers.dispatch()
    key = Key(Kind.MASTERS, 1)
    ((copied,), _) = transfers._leaving[5, key]
    copied = weakref.ref(copied)
    transfers.wait_for_offload(5, key)
    assert are_ready(transfers.store.host[key]) and copied() is None
    transfers = leaving(platform)
    transfers.rest()
    assert are_ready(x for slabs in transfers.store.host.values() for x in slabs)
    slabs = [transfers.store.host[Key(Kind.MASTERS, n)] for n in range(3)]
    assert [float(slab[0]) for (slab,) in slabs] == [0.0, 1.0, 2.0]


def with_a_fetch_gathered():
    """Moves of which a fetch is not dispatched yet; group 1 is on the device."""
    placement = on_one_device()
    store = Store((), placement, jax.random.key(0))
    for group, tier, sharding in (
        (0, store.host, placement.slabs_at_rest),
        (1, store.on_device, placement.slabs_on_device),
    ):
        tier[Key(Kind.MASTERS, group)] = (jax.device_put(jnp.zeros(64), sharding),)
    transfers = Transfers(store)
    transfers.move(Op.FETCH, Key(Kind.MASTERS, 0), 5, [])
    assert transfers.fetching
    return transfers


def test_gathered_copies_are_on_their_way_while_a_checkpoint_is_waited_for():
    transfers, waited = with_a_fetch_gathered(), []
    transfers.store.before_replacing = lambda group: waited.append((group, transfers.fetching))
    transfers.move(Op.OFFLOAD, Key(Kind.MASTERS, 1), 5, [])
    assert waited == [(1, False)] and Key(Kind.MASTERS, 0) in transfers.store.on_device


def test_copies_of_a_step_that_was_cut_off_are_never_made():
    transfers = with_a_fetch_gathered()
    transfers.abandon()
    transfers.dispatch()
    assert not transfers.fetching and Key(Kind.MASTERS, 0) not in transfers.store.on_device


@pytest.mark.by_default("immediate", "frozen-beside")
@pytest.mark.parametrize(
    ("case", "optimizer", "trainable"),
    [
        (INJECTED, "adamw_schedule", None),
        (CASES["nnx_tied"], "clip_adamw", None),
        # Where blocks are frozen, only the cotangents that they give tell that they are computed.
        (INJECTED, "adamw_schedule", "embed"),
        (BESIDE, "adamw_schedule", "embed"),
    ],
    ids=["immediate", "deferred", "frozen", "frozen-beside"],
)
def test_a_step_goes_on_when_what_it_waits_for_is_there(case, optimizer, trainable, monkeypatch):
    trainer = make_trainer(case, OPTIMIZERS[optimizer], budget="least", trainable=trainable)
    trainer.step(case.batch(0))
    trainer.flush()
    late, engine, obey = SlowDevice(), engine_of(trainer), engine_of(trainer).obey
    get = KernelCache.get
    made: dict[int, list[jax.Array]] = {}  # by task, what it computed last
    now, num_late = -1, {op: 0 for op in WAITS}

    def slow(self, kernel):
        function = get(self, kernel)

        def run(*args):
            out = late(function(*args))
            made[now] = [*jax.tree.leaves(out), late.last]
            return out

        return run if kernel.name in ("forward", "backward", "reduce", "update") else function

    def watched(instruction, step):
        nonlocal now
        task = engine._task_offset + (instruction.task or 0)
        now = task if instruction.op in COMPUTING else now
        # Each result of the device is made from the one before: a later one tells of this, too.
        waits_for, is_there = [x for t in made if t >= task for x in made[t]], is_computed
        if instruction.op is Op.LAND:
            # A part can be in the host while its task still computes with it.
            own, landed = list(waits_for), engine.store.host.get(instruction.key, ())
            waits_for, is_there = landed, lambda arrays: are_ready(arrays) and is_computed(own)
        was_late = not is_there(waits_for)
        obey(instruction, step)
        if instruction.op in WAITS:
            num_late[instruction.op] += was_late
            assert is_there(waits_for), instruction

    engine._found.clear()
    monkeypatch.setattr(KernelCache, "get", slow)
    monkeypatch.setattr(engine, "obey", watched)
    for seed in range(50):
        trainer.step(case.batch(seed))
        # How often the device is behind depends on what else the machine does.
        if seed and all(num_late.values()):
            break
    trainer.flush()
    assert all(num_late.values()), "a device that isn't slow shows nothing"


@pytest.mark.by_default("2")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_device_is_through_with_the_stage_before_large_temporaries(microbatches, monkeypatch):
    case, stages = INJECTED, ("forward", "backward")
    trainer = make_trainer(case, OPTIMIZERS["clip_adamw"], microbatches=microbatches)
    step, engine = spec_of(trainer).first, engine_of(trainer)
    late, get = SlowDevice(), KernelCache.get
    is_over: dict[str, list[bool]] = {"stage": [], "all": [], "before others": []}
    of_stage: list[jax.Array] = []  # what the last stage gives

    def slow(self, kernel):
        function, is_large = get(self, kernel), self.has_large_temporaries(kernel)

        def run(*args):
            if is_large:
                is_over["stage"].append(is_computed(of_stage))
            is_over["all" if is_large else "before others"].append(are_ready([late.last]))
            results = late(function(*args))
            if kernel.name in stages:
                of_stage[:] = jax.tree.leaves(results)
            return results

        return run if kernel.name in (*stages, "reduce", "update") else function

    # As on a GPU, where the temporaries of all are known; here those of one byte are large.
    kernels = step_kernels(step, engine.store.layouts, engine.optimizer, on_one_device())
    engine.kernels.compile(kernel for kernel in kernels if kernel.name in stages)
    monkeypatch.setattr(cache, "_LARGE_TEMPORARIES", 1)
    monkeypatch.setattr(KernelCache, "get", slow)
    for seed in range(3):
        trainer.step(case.batch(seed))
    trainer.flush()
    assert is_over["stage"] and all(is_over["stage"])
    # What follows a stage hides the way of the next one to the device.
    assert not all(is_over["all"])
    assert not all(is_over["before others"]), "a device that isn't slow shows nothing"
