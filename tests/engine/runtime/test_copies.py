"""In which order copies are dispatched."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inside import on_one_device
from megatrain_jax._src.engine.runtime.transfers import Streams
from megatrain_jax._src.engine.state.placement import Placement
from optimizers import OPTIMIZERS
from runs import check_same_bits, make_trainer, train
from zoo import CASES


def placed(platform: str) -> Placement:
    """On the device that is here, whose copies behave like that platform's."""
    return dataclasses.replace(on_one_device(), platform=platform)


@pytest.mark.parametrize("seed", range(5))
def test_each_direction_has_streams_of_its_own(seed, monkeypatch):
    placement, rng, put = placed("gpu"), random.Random(seed), jax.device_put
    copies, pinned, device = Streams(placement), placement.slabs_at_rest, placement.slabs_on_device
    dispatched, calls, arrived = [], [], {"device": [], "pinned_host": []}

    def watched(xs, sharding):
        calls.append(len(xs))
        assert len(calls) < 10_000, "a direction is never given its turn"
        dispatched.extend((x.size, sharding.memory_kind) for x in xs)
        return put(xs, sharding)

    def take(slabs):
        for slab in slabs:
            arrived[slab.sharding.memory_kind].append(np.asarray(slab))

    gathered, batches = {"device": [], "pinned_host": []}, 40
    for _ in range(batches):
        for _ in range(rng.randint(0, 4)):
            copy, source, target = rng.choice(
                [(copies.to_device, pinned, "device"), (copies.to_host, device, "pinned_host")]
            )
            rows = [np.arange(8.0) + rng.random() for _ in range(rng.randint(1, 3))]
            gathered[target] += rows
            copy(tuple(put(row, source) for row in rows), take)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_put", watched)
            copies.dispatch()
    # Each direction keeps its order.
    for target, rows in gathered.items():
        np.testing.assert_array_equal(arrived[target], np.array(rows, np.float32))
    # Every fourth copy shares a stream, in which no other direction may hold it up.
    kinds = [{kind for _, kind in dispatched[at::4]} for at in range(4)]
    assert kinds == [{"device"}, {"device"}, {"pinned_host"}, {"pinned_host"}]
    # No more turns are passed over than the busier direction of each batch takes.
    slabs = sum(size > 1 for size, _ in dispatched)
    assert slabs == sum(map(len, gathered.values())) and len(dispatched) <= 2 * slabs + 4 * batches
    # Two neighbouring turns share a call, unless a batch ends between them.
    assert len(calls) <= len(dispatched) / 2 + batches


def test_both_directions_share_turns(monkeypatch):
    placement, put, calls = placed("gpu"), jax.device_put, []
    copies, kinds = Streams(placement), (placement.slabs_at_rest, placement.slabs_on_device)
    there, here = (put(jnp.arange(8.0), kind) for kind in kinds)
    monkeypatch.setattr(jax, "device_put", lambda xs, s: calls.append(len(xs)) or put(xs, s))
    copies.to_host((here,), list)
    copies.to_device((there,) * 2, list)
    copies.to_host((here,) * 2, list)
    copies.to_device((there,) * 2, list)
    assert copies.fetching and not calls
    copies.dispatch()
    assert calls == [2, 2, 2, 1], "in and out by turns, and nothing beside them"
    copies.dispatch()
    assert calls == [2, 2, 2, 1] and not copies.fetching
    copies.to_device((there,), list)
    copies.dispatch()
    assert calls == [2, 2, 2, 1, 1, 1], "a turn is passed over"


def test_without_turns_only_slabs_are_copied(monkeypatch):
    placement, dispatched, put = placed("cpu"), [], jax.device_put
    copies, slab = Streams(placement), put(jnp.arange(8.0), placement.slabs_at_rest)
    monkeypatch.setattr(jax, "device_put", lambda xs, s: dispatched.append(len(xs)) or put(xs, s))
    copies.to_device((slab, slab), lambda slabs: copies.to_host(slabs, list))
    copies.dispatch()
    copies.dispatch()
    assert dispatched == [2, 2]


@pytest.mark.usefixtures("started_once_in_test")
def test_steps_whose_copies_take_turns_give_the_same_bits(monkeypatch):
    """What a GPU does, on a CPU: streams are the same to it, but what arrives where is not."""
    case, options = CASES["nnx_tied"], {"microbatches": 2, "budget": "least"}
    batches = [case.batch(seed) for seed in range(3)]
    plain = make_trainer(case, OPTIMIZERS["clip_adamw"], **options)
    expected = train(plain, batches, gradients=False)
    with monkeypatch.context() as patch:
        patch.setattr("megatrain_jax._src.engine.start.placed_on", lambda mesh, **_: placed("gpu"))
        patch.setattr("megatrain_jax._src.engine.state.pool.reserve", lambda *need: None)
        trainer = make_trainer(case, OPTIMIZERS["clip_adamw"], **options)
    passed, put = [], jax.device_put

    def watched(xs, target):
        passed.extend(x for x in (xs if isinstance(xs, list) else ()) if x.size == 1)
        return put(xs, target)

    monkeypatch.setattr(jax, "device_put", watched)
    run = train(trainer, batches, gradients=False)
    assert passed, "some turns are passed over"
    assert run.losses == expected.losses
    check_same_bits(run.params, expected.params)
    check_same_bits(run.opt_state, expected.opt_state)
