"""The rate of the network between hosts, measured by all devices of a run."""

import time

import jax
import jax.numpy as jnp

from megatrain_jax._src.common.activity import doing
from megatrain_jax._src.engine.state.placement import Placement

# Bytes of the array that the devices gather: it grows until that takes long enough.
_FIRST_BYTES, _GROWTH, _MOST_BYTES = 2**20, 8, 2**29
_ENOUGH_SECONDS = 0.1
_ROUNDS = 4


def measured_rate(placement: Placement) -> float:
    """Bytes per second that a host receives while all devices gather an array.

    Rings of devices pass each byte that a device receives into its host once. Every process of the
    run has to call this; all get the same rate.
    """
    count, num_bytes = placement.num_devices, _FIRST_BYTES
    while True:
        size = num_bytes // count * count
        with doing("timing the network between hosts"), placement.outside_meshes():
            seconds = _seconds(placement, size)
        # Every process has to go on, or end, with the others.
        seconds = max(placement.processes.gather("timing the network", seconds))
        if seconds >= _ENOUGH_SECONDS or num_bytes == _MOST_BYTES:
            return size * (count - 1) / count / seconds
        num_bytes *= _GROWTH


def _seconds(placement: Placement, size: int) -> float:
    """Seconds to gather an array of so many bytes, the shortest of some rounds."""
    make = jax.jit(lambda: jnp.zeros(size, jnp.uint8), out_shardings=placement.slabs_on_device)
    gather = jax.jit(lambda x: x, out_shardings=placement.small_on_device)
    array, times = make(), []
    for _ in range(1 + _ROUNDS):  # the first round compiles, and connects the devices
        start = time.perf_counter()
        gather(array).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times[1:])
