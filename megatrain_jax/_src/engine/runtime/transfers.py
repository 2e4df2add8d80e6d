"""Transfers of groups' parts and of activations during a step."""

from collections.abc import Sequence

import jax

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.engine.runtime.store import Slabs, Store
from megatrain_jax._src.engine.runtime.streams import Streams
from megatrain_jax._src.engine.schedule.instructions import Op

Rows = Sequence[dict[int, jax.Array]]
"""The live values of a step by id, for each microbatch."""


class Transfers:
    """Moves the parts of groups, and the activations of a step, between a store's tiers.

    Copies are collected until `dispatch`; only then does the store have their results. Example:
    between two computations, group 4 is needed next and group 2 is done:

        move(FETCH, Key(MASTERS, 4), ...)       collected
        move(OFFLOAD, Key(MASTERS, 2), ...)     collected; gone from store.on_device
        dispatch()                              store.on_device[...4], store.host[...2] in flight
        wait_landed(task, Key(MASTERS, 2))      it is there, and the device's copy is freed
    """

    def __init__(self, store: Store):
        """Starts with nothing in flight.

        Args:
            store: The store whose parts move between its tiers.
        """
        self.store = store
        self._streams = Streams(store.placement)
        # Offloads not waited for, by task: slabs that stay on the device until then, and their
        # copies.
        self._leaving: dict[tuple[int, Key], tuple[Slabs, Slabs]] = {}

    def move(self, op: Op, key: Key, task: int, rows: Rows) -> None:
        """Carries out a FETCH, OFFLOAD or RELEASE of a task."""
        if op is Op.FETCH:
            self._fetch(key, rows)
            return
        if key.kind is Kind.ACTIVATION:
            source = tuple(row.pop(key.owner) for row in rows)
        else:
            source = self.store.on_device.pop(key)
        # A RELEASE needs no copy: dropping the last reference frees the arrays.
        if op is Op.OFFLOAD:
            self._offload(key, source, task)

    def _fetch(self, key: Key, rows: Rows) -> None:
        def arrive(slabs: Slabs) -> None:
            if key.kind is Kind.ACTIVATION:
                for row, value in zip(rows, slabs, strict=True):
                    row[key.owner] = value
            else:
                self.store.on_device[key] = slabs

        if key not in self.store.host:
            self.dispatch()  # its offload is only collected; dispatching puts it in the host
        self._streams.to_device(self.store.host[key], arrive)

    def _offload(self, key: Key, source: Slabs, task: int) -> None:
        # Checkpoints read only masters and optimizer state; pending copies are dispatched first.
        if key.kind in LASTING and self.store.before_replacing is not None:
            self.dispatch()  # waiting for a checkpoint may take long
            self.store.before_replacing(key.owner)

        # The schedule counts the source's bytes until `wait_for_offload`.
        def land(slabs: Slabs) -> None:
            self.store.host[key] = slabs
            self._leaving[task, key] = source, slabs

        self._streams.to_host(source, land)

    @property
    def fetching(self) -> bool:
        """Whether a fetch has been collected and not dispatched."""
        return self._streams.fetching

    def dispatch(self) -> None:
        """Dispatches the collected copies."""
        self._streams.dispatch()

    def wait_for_offload(self, task: int, key: Key) -> None:
        """Blocks until a part offloaded by a task is in the host; then frees the device's copy."""
        if (task, key) not in self._leaving:
            self.dispatch()  # it was only collected so far
        # Nothing to wait for is not an error: a steady step's waits include offloads that only some
        # preceding steps make.
        _, landed = self._leaving.pop((task, key), ((), ()))
        jax.block_until_ready(landed)

    def rest(self) -> None:
        """Blocks until all state is in the host."""
        self.dispatch()
        assert not self.store.on_device
        self._leaving.clear()
        jax.block_until_ready(self.store.host)

    def abandon(self) -> None:
        """Forgets all transfers, collected or dispatched."""
        self._streams.forget()
        self._leaving.clear()
