"""Measures how fast a run's devices and their hosts copy, both ways at once.

Rates depend on the link's generation and number of lanes, on the host's memory and on programs
beside this one. Copies to the device and to the host have different rates, and both are slower at
once than alone: an H100 that copies 50 GB/s to the device and 54 back alone copies 37 and 51 at
once. In a round of copies the faster way ends first, so the slower one is alone for the rest.
"""

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from megatrain_jax._src.engine.runtime.streams import Streams
from megatrain_jax._src.engine.state.placement import Placement
from megatrain_jax._src.engine.state.pool import unfilled

# The fewest and most arrays copied each way; the fewest are one for each stream of a direction.
_FEWEST_ARRAYS, _MOST_ARRAYS = 2, 64
# The most bytes of an array, and the bytes each way for which several smaller ones are copied.
# Longer copies give the same rates.
_MOST_BYTES, _ENOUGH_BYTES = 2**29, 2**28
# The mean of many rounds counts, because a step meets slow spells too: on an H100's host that
# others used, a tenth of the time was slower by 30%. Means over 1 s differed by up to 9% from that
# of 12 s, means over 3 s by up to 3%.
_LEAST_SECONDS, _LEAST_ROUNDS = 3.0, 5


def measured_rates(placement: Placement, num_bytes: int, array_bytes: int) -> tuple[float, float]:
    """Bytes per second to each device, and from it, if all devices copy both ways at once.

    The pool has to be reserved.

    Args:
        placement: The run's devices; the slowest one counts.
        num_bytes: Bytes that may be taken on each device and, for it, in the host.
        array_bytes: Bytes of the largest array that the run copies to a device. Rates
            depend on it.
    """
    # Both sides hold arrays to be copied, and copies of the opposite side's arrays.
    room = num_bytes // 2
    each = max(1, min(_MOST_BYTES, array_bytes, room // _FEWEST_ARRAYS))
    number = max(_FEWEST_ARRAYS, min(_MOST_ARRAYS, _ENOUGH_BYTES // each, room // each))
    size = placement.num_devices * each
    make = unfilled(size, placement.slabs_on_device)
    on_device = [make() for _ in range(number)]
    at_rest = jax.block_until_ready(placement.move(on_device, placement.slabs_at_rest))
    streams, gather = Streams(placement), placement.processes.gather
    _seconds(streams, at_rest, on_device)  # not timed, because it allocates memory
    rounds: list[tuple[float, float]] = []
    start = time.perf_counter()

    def enough() -> bool:
        """Whether copies were timed for long enough, in the process that began last.

        All processes begin a round together, because those of one host share its memory.
        """
        elapsed = gather("beginning to time copies", time.perf_counter() - start)
        return len(rounds) >= _LEAST_ROUNDS and min(elapsed) >= _LEAST_SECONDS

    while not enough():
        rounds.append(_seconds(streams, at_rest, on_device))
    means = [statistics.fmean(seconds) for seconds in zip(*rounds, strict=True)]
    slowest = (max(seconds) for seconds in zip(*gather("timing copies", means), strict=True))
    inward, outward = (number * each / x for x in slowest)
    return inward, outward


def _seconds(
    streams: Streams, inward: Sequence[jax.Array], outward: Sequence[jax.Array]
) -> tuple[float, float]:
    """Seconds until all arrays are on the device, and until all are in the host."""
    arriving: list[jax.Array] = []
    landing: list[jax.Array] = []
    start = time.perf_counter()

    def seconds(copies: list[jax.Array]) -> float:
        jax.block_until_ready(copies)
        return time.perf_counter() - start

    with ThreadPoolExecutor(2) as threads:
        streams.to_device(tuple(inward), arriving.extend)
        streams.to_host(tuple(outward), landing.extend)
        streams.dispatch()
        first, second = threads.map(seconds, (arriving, landing))
    return first, second
