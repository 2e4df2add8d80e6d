"""Transfers of groups' parts, and of activations between stages, inside a step."""

from collections.abc import Sequence

import jax

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.runtime.store import Slabs, Store
from megatrain_jax._src.runtime.streams import Streams
from megatrain_jax._src.schedule.instructions import Op

Rows = Sequence[dict[int, jax.Array]]
"""The live values of a step by id, for each microbatch."""


class Transfers:
    """Moves the parts of groups, and the activations of a step, between a store's tiers.

    Copies are gathered until `dispatch`, and only then does the store have what they give. Between
    two computations, with group 4 to come for the next one and group 2 done with:

        move(FETCH, Key(MASTERS, 4), ...)       gathered
        move(OFFLOAD, Key(MASTERS, 2), ...)     gathered; gone from store.on_device
        dispatch()                              store.on_device[...4], store.host[...2] on their way
        wait_landed(task, Key(MASTERS, 2))      it is there, and the device's copy is gone
    """

    def __init__(self, store: Store):
        """Starts with nothing on its way.

        Args:
            store: The store whose parts move between its tiers.
        """
        self.store = store
        self._streams = Streams(store.placement)
        # Offloads not waited for, by task: slabs that stay on the device until then, and copies.
        self._leaving: dict[tuple[int, Key], tuple[Slabs, Slabs]] = {}

    def move(self, op: Op, key: Key, task: int, rows: Rows) -> None:
        """Obeys a FETCH, OFFLOAD or RELEASE of a task."""
        if op is Op.FETCH:
            self._fetch(key, rows)
            return
        if key.kind is Kind.ACTIVATION:
            source = tuple(row.pop(key.owner) for row in rows)
        else:
            source = self.store.on_device.pop(key)
        # A RELEASE is over with that: nobody holds the arrays any more.
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
            self.dispatch()  # its offload was gathered: only a dispatch puts it in the host
        self._streams.to_device(self.store.host[key], arrive)

    def _offload(self, key: Key, source: Slabs, task: int) -> None:
        # Checkpoints read masters and optimizer state alone; copies that others need go first.
        if key.kind in LASTING and self.store.before_replacing is not None:
            self.dispatch()  # waiting for a checkpoint may take long
            self.store.before_replacing(key.owner)

        # The source is held until the wait: the schedule counts its bytes until then.
        def land(slabs: Slabs) -> None:
            self.store.host[key] = slabs
            self._leaving[task, key] = source, slabs

        self._streams.to_host(source, land)

    @property
    def fetching(self) -> bool:
        """Whether a fetch has been gathered and not dispatched."""
        return self._streams.fetching

    def dispatch(self) -> None:
        """Dispatches the gathered copies."""
        self._streams.dispatch()

    def wait_landed(self, task: int, key: Key) -> None:
        """Blocks until a part that a task offloaded is in the host; then the device's goes."""
        if (task, key) not in self._leaving:
            self.dispatch()  # it was only gathered so far
        # Nothing to wait for is no mistake: a steady step also waits for what only some step before
        # it has offloaded.
        _, landed = self._leaving.pop((task, key), ((), ()))
        jax.block_until_ready(landed)

    def rest(self) -> None:
        """Blocks until all state is in the host."""
        self.dispatch()
        assert not self.store.on_device
        self._leaving.clear()
        jax.block_until_ready(self.store.host)

    def abandon(self) -> None:
        """Forgets the transfers on their way, gathered or dispatched."""
        self._streams.forget()
        self._leaving.clear()
