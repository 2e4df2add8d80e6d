"""Copies slabs between host and device, with both directions in parallel.

XLA's GPU client assigns each copy between memory spaces the next of four streams in turn,
regardless of direction (seen in profiles of JAX 0.11.2). A copy to the device that gets a stream
behind a long copy to the host waits for it, while its own direction of the link is idle. So each
direction uses only two of the four streams. If a stream's direction has nothing to copy, the stream
gets a copy of one number in its own direction; one in the opposite direction would delay it just as
well.

Streams 0 and 1 are for copies to the device, 2 and 3 for copies to the host. With stream 1 next, a
slab to fetch (f) and three to offload (a, b, c), the turns are

    stream 1    f       to the device    one call
    stream 2    a       to the host      one call with b
    stream 3    b       to the host
    stream 0    number  to the device    one call with the next, because c may not use these
    stream 1    number  to the device
    stream 2    c       to the host      one call; stream 3 is next

A call of `device_put` costs far more Python time than an additional array in it. So copies are
collected until they are needed; then copies in the same direction with adjacent turns share a call.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.runtime.store import Slabs
from megatrain_jax._src.engine.state.placement import Placement

_Done = Callable[[Slabs], object]
"""A callback that receives the copies of slabs, which may not have arrived yet."""

# For each stream, whether its copies go to the device.
_INWARD = (True, True, False, False)


class Streams:
    """The collected copies of both directions, and the next stream; nothing here waits."""

    def __init__(self, placement: Placement):
        """Starts without copies; the first stream is next.

        Args:
            placement: The placement between whose memories slabs are copied; on a "gpu" streams
                alternate.
        """
        self._take_turns = placement.platform == "gpu"
        self._turn = 0
        self.forget()
        self._move = placement.move
        self._targets = {True: placement.slabs_on_device, False: placement.slabs_at_rest}
        # A number to be copied one way rests on the opposite side; each device has its own.
        number = jnp.zeros(len(placement.devices), jnp.int32)
        self._numbers = {
            way: placement.put(number, self._targets[not way]) for way in (True, False)
        }

    def forget(self) -> None:
        """Forgets the copies that have been collected and not dispatched."""
        self._gathered: dict[bool, list[tuple[Slabs, _Done]]] = {True: [], False: []}

    def to_device(self, slabs: Slabs, done: _Done) -> None:
        """Collects copies to the device."""
        self._gathered[True].append((slabs, done))

    def to_host(self, slabs: Slabs, done: _Done) -> None:
        """Collects copies to pinned host memory."""
        self._gathered[False].append((slabs, done))

    @property
    def fetching(self) -> bool:
        """Whether a copy to the device has been collected and not dispatched."""
        return bool(self._gathered[True])

    def dispatch(self) -> None:
        """Dispatches the collected copies; each direction keeps its order."""
        gathered = self._gathered
        self.forget()
        # Each slab of a part is a separate copy with its own turn.
        slabs = {way: [x for slabs, _ in rows for x in slabs] for way, rows in gathered.items()}
        copied = {way: iter(arrays) for way, arrays in self._copy(slabs).items()}
        for way, rows in gathered.items():
            for originals, done in rows:
                done(tuple(islice(copied[way], len(originals))))

    def _copy(self, slabs: dict[bool, list[jax.Array]]) -> Mapping[bool, Sequence[jax.Array]]:
        if not self._take_turns:
            return {way: self._move(xs, self._targets[way]) for way, xs in slabs.items() if xs}
        copied: dict[bool, list[jax.Array]] = {True: [], False: []}
        while slabs[True] or slabs[False]:
            way = _INWARD[self._turn]
            # Turns left until the opposite direction's streams.
            run = _INWARD.index(way) + _INWARD.count(way) - self._turn
            mine, slabs[way] = slabs[way][:run], slabs[way][run:]
            # Turns need not be used up if the opposite direction has no copies.
            passed = run - len(mine) if slabs[not way] else 0
            arrays = self._move([*mine, *[self._numbers[way]] * passed], self._targets[way])
            copied[way] += arrays[: len(mine)]
            self._turn = (self._turn + len(arrays)) % len(_INWARD)
        return copied
