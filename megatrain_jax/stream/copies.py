"""Copies of slabs between host and device, both directions side by side.

XLA's GPU client gives each copy between memory spaces the next of four streams in turn, whatever
its direction (as profiles of JAX 0.11.2 show). A copy to the device whose turn comes behind a long
copy to the host then waits for that, while its own direction of the link is idle. So each direction
keeps to two of the four streams. Where it isn't its turn, the stream gets a copy of one number in
the direction that is its own: one in the other direction would hold it up just as well.

Arrays that go the same way are given to one `device_put`, which copies them in their order: a call
takes far longer in Python than an array in it.
"""

import jax
import jax.numpy as jnp

from megatrain_jax.memory.pool import device, pinned

Slabs = tuple[jax.Array, ...]

_INWARD = (True, True, False, False)


class Copies:
    """Dispatches copies; nothing here waits."""

    def __init__(self, take_turns: bool | None = None):
        """Starts with the first stream.

        Args:
            take_turns: Whether copies take streams in turn; None asks which backend it is.
        """
        self._take_turns = jax.default_backend() == "gpu" if take_turns is None else take_turns
        self._turn = 0
        number = jnp.zeros((), jnp.int32)
        self._numbers = {
            True: (jax.device_put(number, pinned()), device()),
            False: (jax.device_put(number, device()), pinned()),
        }

    def to_device(self, slabs: Slabs) -> Slabs:
        """Copies slabs to the device."""
        return self._copy(slabs, device(), True)

    def to_host(self, slabs: Slabs) -> Slabs:
        """Copies slabs to pinned host memory."""
        return self._copy(slabs, pinned(), False)

    def _copy(self, slabs: Slabs, target: jax.sharding.Sharding, inward: bool) -> Slabs:
        if not self._take_turns:
            return jax.device_put(slabs, target)
        copied: Slabs = ()
        while len(copied) < len(slabs):
            if passed := self._take(not inward, len(_INWARD)):
                number, where = self._numbers[not inward]
                jax.device_put([number] * passed, where)
            start = len(copied)
            taken = self._take(inward, len(slabs) - start)
            copied += jax.device_put(slabs[start : start + taken], target)
        return copied

    def _take(self, inward: bool, most: int) -> int:
        """Takes the turns that come next and are those of a direction, `most` of them at most."""
        taken = 0
        while taken < most and _INWARD[self._turn] is inward:
            self._turn = (self._turn + 1) % len(_INWARD)
            taken += 1
        return taken
