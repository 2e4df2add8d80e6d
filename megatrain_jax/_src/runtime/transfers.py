"""Where the parts of groups and the values between stages are, and what moves them."""

from collections.abc import Callable, Sequence

import jax

from megatrain_jax._src.runtime.streams import Slabs, Streams
from megatrain_jax._src.schedule.tasks import LASTING, Op, PartKey
from megatrain_jax._src.state.placement import Placement

Rows = Sequence[dict[int, jax.Array]]
"""The live values of a step by id, for each microbatch."""


class Transfers:
    """Holds slabs by part and group, and moves them and the values of a step.

    Copies are gathered until `dispatch`: what they give is in `host` or `on_device` after that.

    Attributes:
        host: Slabs in pinned host memory by ("P" | "O" | "G", group), and values by ("A", id).
        on_device: Slabs on the device by the same keys; values are in the rows of their step.
        before_replacing: Called with a group before its state gets new arrays in the host, if
            somebody still reads the old ones.
    """

    def __init__(self, placement: Placement):
        """Starts with nothing anywhere.

        Args:
            placement: Where it moves them.
        """
        self.host: dict[PartKey, Slabs] = {}
        self.on_device: dict[PartKey, Slabs] = {}
        self.before_replacing: Callable[[int], None] | None = None
        self._streams = Streams(placement)
        self._leaving: dict[tuple[int, PartKey], tuple[Slabs, Slabs]] = {}

    def move(self, op: Op, key: PartKey, task: int, rows: Rows) -> None:
        """Obeys a FETCH, OFFLOAD or RELEASE of a task."""
        if op is Op.FETCH:
            self._fetch(key, rows)
            return
        part, number = key
        source = tuple(r.pop(number) for r in rows) if part == "A" else self.on_device.pop(key)
        if op is Op.OFFLOAD:
            self._offload(key, source, task)

    def _fetch(self, key: PartKey, rows: Rows) -> None:
        part, number = key

        def arrive(slabs: Slabs) -> None:
            if part == "A":
                for row, value in zip(rows, slabs, strict=True):
                    row[number] = value
            else:
                self.on_device[key] = slabs

        if key not in self.host:
            self.dispatch()  # it is still to leave
        self._streams.to_device(self.host[key], arrive)

    def _offload(self, key: PartKey, source: Slabs, task: int) -> None:
        if key[0] in LASTING and self.before_replacing is not None:
            self.dispatch()  # it may take long
            self.before_replacing(key[1])

        def land(slabs: Slabs) -> None:
            self.host[key] = slabs
            self._leaving[task, key] = source, slabs

        self._streams.to_host(source, land)

    @property
    def fetching(self) -> bool:
        """Whether something to fetch has been gathered and not dispatched."""
        return self._streams.fetching

    def dispatch(self) -> None:
        """Dispatches the gathered copies."""
        self._streams.dispatch()

    def wait_landed(self, task: int, key: PartKey) -> None:
        """Blocks until what a task offloaded is in the host."""
        if (task, key) not in self._leaving:
            self.dispatch()
        _, landed = self._leaving.pop((task, key), ((), ()))
        jax.block_until_ready(landed)

    def rest(self) -> None:
        """Blocks until all state is in the host."""
        self.dispatch()
        assert not self.on_device
        self._leaving.clear()
        jax.block_until_ready(self.host)

    def abandon(self) -> None:
        """Forgets what a step that was cut off has on the device, on its way and for itself."""
        self._streams.forget()
        self._leaving.clear()
        self.on_device.clear()
        for key in [key for key in self.host if key[0] not in LASTING]:
            del self.host[key]
