"""Threads that take pinned host memory from the system, one for each device's pool.

Pinning finds and locks pages, up to a second for a GiB, in calls that nothing can end. So it
happens in threads that need Python's lock for moments only: a run's functions can be compiled
meanwhile, and who interrupts the main thread doesn't wait for them.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

# How often what was taken is shown, and Ctrl-C heard.
_SECONDS_AT_A_TIME = 0.2


class Taking(threading.Thread):
    """The thread that takes pieces of memory for one device's pool, and holds them until `end`.

    Held pieces make JAX's pool grow by each further one. Once they are dropped, the pool keeps what
    it has taken from the system.

    Attributes:
        device: The device.
        taken_bytes: Bytes that it has taken so far.
        failed: The error that ended it; None without one.
    """

    def __init__(self, device: Any, pieces: Sequence[int], growth: int, spare_bytes: int = 0):
        """Makes the thread; `start` starts it.

        Args:
            device: The device.
            pieces: Bytes of each piece, in the order in which to take them.
            growth: Bytes that the pool grows by for all of them.
            spare_bytes: Bytes to take first and leave free at once, in which arrays that are sent
                to the device meanwhile find room: less than any piece needs. For them the pool
                would grow by as much as its largest piece otherwise.
        """
        # A process may end while it still waits for the system.
        super().__init__(name=f"pinned memory of {device}", daemon=True)
        self.device, self.taken_bytes = device, 0
        self.failed: BaseException | None = None
        self._pieces, self._growth, self._spare_bytes = list(pieces), growth, spare_bytes
        self._held: list[jax.Array] = []
        self._ended = self._is_over = False
        self._lock = threading.Lock()

    @property
    def grown_bytes(self) -> int:
        """Bytes that the pool has grown by, once the thread is over."""
        is_whole = self.taken_bytes == sum(self._pieces) + self._spare_bytes
        growth = self._growth + self._spare_bytes
        return growth if is_whole else min(growth, self.taken_bytes)

    def run(self) -> None:
        """Takes all pieces, or those up to `end`."""
        try:
            if self._spare_bytes:
                self._take(self._spare_bytes).delete()
            for size in self._pieces:
                if self._ended:
                    break
                self._held.append(self._take(size))
        except BaseException as error:  # raised again where it is waited for
            self.failed = error
        with self._lock:
            self._is_over = True
            if self.failed is not None or self._ended:
                self._drop()

    def _take(self, size: int) -> jax.Array:
        target = SingleDeviceSharding(self.device, memory_kind="pinned_host")
        # Pages of zeros that were never written cost no memory of their own.
        piece = jax.device_put(np.zeros(size, np.uint8), target)
        piece.block_until_ready()
        self.taken_bytes += size
        return piece

    def end(self) -> None:
        """Takes no further piece and drops those it has; what the system is asked for still comes.

        Doesn't wait for that: `join` does.
        """
        with self._lock:
            self._ended = True
            if self._is_over:  # or else it drops them itself
                self._drop()

    def _drop(self) -> None:
        while self._held:
            self._held.pop().delete()


def wait_for(takings: Sequence[Taking], shown: Callable[[], object] = lambda: None) -> None:
    """Waits until all pieces are taken.

    Args:
        takings: The threads, which have been started.
        shown: Called now and then.

    Raises:
        Exception: What ended one of them.
    """
    while any(taking.is_alive() for taking in takings):
        for taking in takings:
            taking.join(_SECONDS_AT_A_TIME / len(takings))
        shown()
    for taking in takings:
        if taking.failed is not None:
            raise taking.failed
