"""In which order copies are dispatched."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megatrain_jax.memory.pool import device, pinned
from megatrain_jax.stream.copies import Copies


@pytest.mark.parametrize("seed", range(5))
def test_directions_take_different_turns(seed, monkeypatch):
    copies, rng, dispatched = Copies(num_streams=4), random.Random(seed), []
    put = jax.device_put

    def watched(x, sharding):
        dispatched.append((x.size, sharding.memory_kind))
        return put(x, sharding)

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
    turns = {"device": set(), "pinned_host": set()}
    for at, (size, kind) in enumerate(dispatched):
        if size > 1:
            turns[kind].add(at % 4)
    assert turns == {"device": {0, 1}, "pinned_host": {2, 3}}
    # No more turns are passed over than it takes.
    assert sum(size == 1 for size, _ in dispatched) <= 2 * sum(size > 1 for size, _ in dispatched)


def test_one_stream_needs_no_turns(monkeypatch):
    copies, dispatched = Copies(num_streams=1), []
    slab, put = jax.device_put(jnp.arange(8.0), pinned()), jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, s: dispatched.append(x.size) or put(x, s))
    copies.to_host(copies.to_device((slab, slab)))
    assert dispatched == [8] * 4
