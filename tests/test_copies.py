"""In which order copies are dispatched."""

import random
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax.memory.pool import device, pinned
from megatrain_jax.stream.copies import Copies


@pytest.mark.parametrize("seed", range(5))
def test_each_direction_has_streams_of_its_own(seed, monkeypatch):
    copies, rng, dispatched, calls = Copies(take_turns=True), random.Random(seed), [], []
    put = jax.device_put

    def watched(xs, sharding):
        calls.append(len(xs))
        dispatched.extend((x.size, sharding.memory_kind) for x in xs)
        return put(xs, sharding)

    slabs = {kind: put(jnp.arange(8.0), kind()) for kind in (pinned, device)}
    monkeypatch.setattr(jax, "device_put", watched)
    for _ in range(30):
        copy, source, target = rng.choice(
            [(copies.to_device, pinned, "device"), (copies.to_host, device, "pinned_host")]
        )
        copied = copy((slabs[source],) * rng.randint(1, 3))
        assert {slab.sharding.memory_kind for slab in copied} == {target}
        for slab in copied:
            np.testing.assert_array_equal(slab, np.arange(8.0))
    # Every fourth copy shares a stream, in which no other direction may hold it up.
    kinds = [{kind for _, kind in dispatched[at::4]} for at in range(4)]
    assert kinds == [{"device"}, {"device"}, {"pinned_host"}, {"pinned_host"}]
    # No more turns are passed over than it takes.
    assert sum(size == 1 for size, _ in dispatched) <= 2 * sum(size > 1 for size, _ in dispatched)
    # Neighbours of one direction share a call.
    changes = sum(a[1] != b[1] for a, b in pairwise(dispatched))
    assert len(calls) - 1 - changes < 30, "only those of different copies are apart"


def test_without_turns_only_slabs_are_copied(monkeypatch):
    copies, dispatched = Copies(take_turns=False), []
    slab, put = jax.device_put(jnp.arange(8.0), pinned()), jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda xs, s: dispatched.append(len(xs)) or put(xs, s))
    copies.to_host(copies.to_device((slab, slab)))
    assert dispatched == [2, 2]
