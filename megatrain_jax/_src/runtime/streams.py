"""Copies of slabs between host and device, both directions side by side.

XLA's GPU client gives each copy between memory spaces the next of four streams in turn, whatever
its direction (as profiles of JAX 0.11.2 show). A copy to the device whose turn comes behind a long
copy to the host then waits for that, while its own direction of the link is idle. So each direction
keeps to two of the four streams. Where it isn't its turn and the other direction has nothing to
copy, the stream gets a copy of one number in the direction that is its own: one in the other
direction would hold it up just as well.

Streams 0 and 1 are for copies to the device, 2 and 3 for those to the host. With stream 1 next, a
slab to fetch (f) and three to offload (a, b, c), the turns are

    stream 1    f       to the device    one call
    stream 2    a       to the host      one call with b
    stream 3    b       to the host
    stream 0    number  to the device    one call with the next, as c may not take their turns
    stream 1    number  to the device
    stream 2    c       to the host      one call; stream 3 is next

A call of `device_put` takes far longer in Python than an array in it. So copies are gathered until
something needs them, and then those that go the same way and whose turns are neighbours share one.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import jax
import jax.numpy as jnp

from megatrain_jax._src.runtime.store import Slabs
from megatrain_jax._src.state.placement import Placement

_Done = Callable[[Slabs], object]
"""A callback that is given the copies of slabs, which may not have arrived yet."""

# For each stream, whether its copies go to the device.
_INWARD = (True, True, False, False)


class Streams:
    """The gathered copies of both directions, and the stream whose turn it is; nothing waits."""

    def __init__(self, placement: Placement):
        """Starts without copies, the first stream's turn next.

        Args:
            placement: The placement between whose memories copies go; on a "gpu" they take turns.
        """
        self._take_turns = placement.platform == "gpu"
        self._turn = 0
        self.forget()
        self._move = placement.move
        self._targets = {True: placement.slabs_on_device, False: placement.slabs_at_rest}
        # A number that is to go one way rests on the other side; each device has one of its own.
        number = jnp.zeros(len(placement.devices), jnp.int32)
        self._numbers = {
            way: placement.put(number, self._targets[not way]) for way in (True, False)
        }

    def forget(self) -> None:
        """Forgets the copies that have been gathered and not dispatched."""
        self._gathered: dict[bool, list[tuple[Slabs, _Done]]] = {True: [], False: []}

    def to_device(self, slabs: Slabs, done: _Done) -> None:
        """Gathers copies to the device."""
        self._gathered[True].append((slabs, done))

    def to_host(self, slabs: Slabs, done: _Done) -> None:
        """Gathers copies to pinned host memory."""
        self._gathered[False].append((slabs, done))

    @property
    def fetching(self) -> bool:
        """Whether a copy to the device has been gathered and not dispatched."""
        return bool(self._gathered[True])

    def dispatch(self) -> None:
        """Dispatches the gathered copies; each direction keeps its order."""
        gathered = self._gathered
        self.forget()
        # Several slabs of a part are several copies, each with a turn of its own.
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
            # Turns left until the other direction's streams.
            run = _INWARD.index(way) + _INWARD.count(way) - self._turn
            mine, slabs[way] = slabs[way][:run], slabs[way][run:]
            # Nothing waits behind turns that are left if the other direction has no copies.
            passed = run - len(mine) if slabs[not way] else 0
            arrays = self._move([*mine, *[self._numbers[way]] * passed], self._targets[way])
            copied[way] += arrays[: len(mine)]
            self._turn = (self._turn + len(arrays)) % len(_INWARD)
        return copied
