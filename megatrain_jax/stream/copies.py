"""Copies of slabs between host and device, both directions side by side.

XLA's GPU client gives each copy between memory spaces the next of four streams in turn, whatever
its direction (as profiles of JAX 0.11.2 show). A copy to the device whose turn comes behind a long
copy to the host then waits for that, while its own direction of the link is idle. So each direction
keeps to two of the four turns, and a copy of one number passes over a turn of the other's.
"""

import jax
import jax.numpy as jnp

from megatrain_jax.memory.pool import device, pinned

Slabs = tuple[jax.Array, ...]

_TURNS = {"inward": (0, 1), "outward": (2, 3)}
_NUM_STREAMS = 4


class Copies:
    """Dispatches copies; nothing here waits."""

    def __init__(self, num_streams: int | None = None):
        """Starts with the first turn.

        Args:
            num_streams: How many streams take turns; None asks the backend's kind.
        """
        if num_streams is None:
            num_streams = _NUM_STREAMS if jax.default_backend() == "gpu" else 1
        self._num_streams = num_streams
        self._turn = 0
        self._number = jax.device_put(jnp.zeros((), jnp.int32), device())

    def to_device(self, slabs: Slabs) -> Slabs:
        """Copies slabs to the device."""
        return tuple(self._copy(slab, device(), "inward") for slab in slabs)

    def to_host(self, slabs: Slabs) -> Slabs:
        """Copies slabs to pinned host memory."""
        return tuple(self._copy(slab, pinned(), "outward") for slab in slabs)

    def _copy(self, array: jax.Array, target: jax.sharding.Sharding, direction: str) -> jax.Array:
        if self._num_streams > 1:
            while self._turn not in _TURNS[direction]:
                # To the host, since a copy to the device would wait for what is being computed.
                jax.device_put(self._number, pinned())
                self._advance()
        self._advance()
        return jax.device_put(array, target)

    def _advance(self) -> None:
        self._turn = (self._turn + 1) % self._num_streams
