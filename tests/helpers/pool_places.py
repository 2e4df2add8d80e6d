"""Arrays in JAX's pool of pinned memory, against the places that a plan gives them; on a GPU.

A process of its own, because a pool keeps what it has taken.
"""

import random

import jax
from jax.sharding import SingleDeviceSharding

import megatrain_jax as mt
from megatrain_jax._src.engine.schedule.host_pool import _EndlessPool
from megatrain_jax._src.engine.state import pool
from megatrain_jax._src.engine.state.placement import placed_on

assert mt.__version__  # the import sets the pool's limit before JAX starts
MIB = 2**20
device = jax.devices()[0]
target = SingleDeviceSharding(device, memory_kind="pinned_host")
pool.reserve(placed_on(jax.make_mesh((1,), ("data",), devices=[device])), 2**34)
sizes = [4 * MIB + 3, 37 * MIB, 74 * MIB, 128 * MIB, 150 * MIB, 300 * MIB]
makers = {size: pool.unfilled(size, target).lower().compile() for size in sizes}
rng, planned, held, first, differing = random.Random(0), _EndlessPool(), [], None, 0
for _ in range(2000):
    if held and (rng.random() < 0.48 or len(held) > 60):
        array, start = held.pop(rng.randrange(len(held)))
        array.delete()
        planned.free(start)
        continue
    size = rng.choice(sizes)
    array, start = makers[size]().block_until_ready(), planned.allocate(size)
    first = array.unsafe_buffer_pointer() if first is None else first
    differing += array.unsafe_buffer_pointer() - first != start
    held.append((array, start))
assert planned.highest < 2**34
assert not differing, f"{differing} arrays lie elsewhere"
