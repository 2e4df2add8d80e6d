"""Copies of slabs between host and device, both directions side by side.

XLA's GPU client gives each copy between memory spaces the next of four streams in turn, whatever
its direction (as profiles of JAX 0.11.2 show). A copy to the device whose turn comes behind a long
copy to the host then waits for that, while its own direction of the link is idle. So each direction
keeps to two of the four streams. Where it isn't its turn, the stream gets a copy of one number in
the direction that is its own: one in the other direction would hold it up just as well.
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
        return tuple(self._copy(slab, device(), True) for slab in slabs)

    def to_host(self, slabs: Slabs) -> Slabs:
        """Copies slabs to pinned host memory."""
        return tuple(self._copy(slab, pinned(), False) for slab in slabs)

    def _copy(self, slab: jax.Array, target: jax.sharding.Sharding, inward: bool) -> jax.Array:
        while self._take_turns and _INWARD[self._turn] is not inward:
            jax.device_put(*self._numbers[not inward])
            self._advance()
        self._advance()
        return jax.device_put(slab, target)

    def _advance(self) -> None:
        self._turn = (self._turn + 1) % len(_INWARD)
