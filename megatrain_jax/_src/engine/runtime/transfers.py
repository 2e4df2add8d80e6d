"""Transfers of groups' parts and of activations, with copies in both directions in parallel.

XLA's GPU client assigns each copy between memory spaces the next of four streams in turn,
regardless of direction (seen in profiles of JAX 0.11.2). A copy to the device that gets a stream
behind a long copy to the host waits for it, while its own direction of the link is idle. So each
direction uses only two of the four streams. If a stream's direction has nothing to copy, the stream
gets a copy of one number in its own direction; one in the opposite direction would delay it just as
well. Threads of XLA's take the streams, so turns hold only for most copies: of many that are
dispatched together, some change places.

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

Before a run, the copies of both ways at once are timed.

Rates depend on the link's generation and number of lanes, on the host's memory and on programs
beside this one. Copies to the device and to the host have different rates, and both are slower at
once than alone: an H100 that copies 50 GB/s to the device and 54 back alone copies 37 and 51 at
once. In a round of copies the faster way ends first, so the slower one is alone for the rest.
"""

import statistics
import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

import jax
import jax.numpy as jnp

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.engine.runtime.disk import Disk
from megatrain_jax._src.engine.runtime.store import Slabs, Store
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.state.placement import Placement
from megatrain_jax._src.engine.state.pool import unfilled

_Done = Callable[[Slabs], object]
"""A callback that receives the copies of slabs, which may not have arrived yet."""

_Found = Callable[[], jax.Array | None]

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


# ---- transfers

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

    Attributes:
        store: The store whose parts move between its tiers.
        on_disk: The parts of the current step that rest on disks.
    """

    def __init__(self, store: Store):
        """Starts with nothing in flight.

        Args:
            store: The store whose parts move between its tiers.
        """
        self.store = store
        self.on_disk: Container[Key] = ()
        self._streams = Streams(store.placement)
        # Offloads not waited for, by task: slabs that stay on the device until then, and their
        # copies, which are found unless they have been written to a disk.
        self._leaving: dict[tuple[int, Key], tuple[Slabs, Sequence[_Found]]] = {}
        # Fetched parts that are still being read from disks, in order, with the rows of a FETCH.
        self._awaited: dict[Key, Rows] = {}

    def move(self, op: Op, key: Key, task: int, rows: Rows) -> None:
        """Carries out a FETCH, OFFLOAD or RELEASE of a task."""
        if op is Op.FETCH:
            self._fetch(key, rows)
            return
        if key in self._awaited:
            if op is Op.RELEASE:
                self._bring_until(key, give_up=True)
                return
            self.bring([key])
        if key.kind is Kind.ACTIVATION:
            source = tuple(row.pop(key.owner) for row in rows)
        else:
            source = self.store.on_device.pop(key)
        # A RELEASE needs no copy: dropping the last reference frees the arrays.
        if op is Op.OFFLOAD:
            self._offload(key, source, task)

    def follow(self, *lists: Sequence[Instruction]) -> None:
        """Reads ahead from disks in the order of the instructions that come next."""
        if self.store.disk is not None:
            rows = chain.from_iterable(lists)
            of_disk = (x for x in rows if x.key is not None and x.key in self.on_disk)
            self.store.disk.follow(self._awaited, of_disk)

    def bring(self, keys: Iterable[Key]) -> None:
        """Waits for those of some parts that are being read from disks, and copies them."""
        for key in keys:
            if key in self._awaited:
                self.dispatch()  # a read may have to wait for an offload that is only collected
                self._bring_until(key)
        self.dispatch()

    def settle(self, key: Key) -> None:
        """Waits until a part from disks is on the device, before its memory there is reused."""
        if self.store.disk is not None:
            self.store.disk.settle(key)

    def _bring_until(self, last: Key, *, give_up: bool = False) -> None:
        """Waits for parts from disks up to one of them, which may be given up instead."""
        assert self.store.disk is not None
        classes = self.store.disk.classes
        # Parts of one class are read in the order of their fetches.
        for key in [key for key in self._awaited if classes[key] == classes[last]]:
            if not self.store.disk.is_ready(key):  # a slot may be waiting for its copy
                self._streams.dispatch()
            if key == last and give_up:
                self.store.disk.give_up(key)
                del self._awaited[key]
            else:
                self._bring(key)
            if key == last:
                return

    def _bring(self, key: Key) -> None:
        """Collects the copies of a part from disks to the device; waits until it has been read."""
        disk, rows = self.store.disk, self._awaited.pop(key)
        assert disk is not None

        def arrive(slabs: Slabs) -> None:
            self._arrive(key, slabs, rows)
            disk.copied(key, slabs)

        self._streams.to_device(disk.take(key), arrive)

    def _fetch(self, key: Key, rows: Rows) -> None:
        if self._disk_of(key) is not None:
            self._awaited[key] = rows
            return
        if key not in self.store.host:
            self.dispatch()  # its offload is only collected; dispatching puts it in the host
        self._streams.to_device(self.store.host[key], lambda slabs: self._arrive(key, slabs, rows))

    def _arrive(self, key: Key, slabs: Slabs, rows: Rows) -> None:
        """Notes a part's arrays on the device, which may be in flight."""
        if key.kind is Kind.ACTIVATION:
            for row, value in zip(rows, slabs, strict=True):
                row[key.owner] = value
        else:
            self.store.on_device[key] = slabs

    def _disk_of(self, key: Key) -> Disk | None:
        """The disks, if a part of the current step rests on them; None otherwise."""
        return self.store.disk if key in self.on_disk else None

    def _offload(self, key: Key, source: Slabs, task: int) -> None:
        # Checkpoints read only masters and optimizer state; pending copies are dispatched first.
        if key.kind in LASTING and self.store.before_replacing is not None:
            self.dispatch()  # waiting for a checkpoint may take long
            self.store.before_replacing(key.owner)

        if (disk := self._disk_of(key)) is not None:
            self.dispatch()  # what was only collected takes room, too
            disk.wait_for_room(key)

        # The schedule counts the source's bytes until `wait_for_offload`.
        def land(slabs: Slabs) -> None:
            if disk is not None:
                disk.write(key, slabs)
                # Its memory is free as soon as it is written.
                self._leaving[task, key] = source, [*map(weakref.ref, slabs)]
            else:
                self.store.host[key] = slabs
                self._leaving[task, key] = source, [lambda x=x: x for x in slabs]

        self._streams.to_host(source, land)

    @property
    def fetching(self) -> bool:
        """Whether a fetch has been collected and not dispatched."""
        return self._streams.fetching or bool(self._awaited)

    def dispatch(self) -> None:
        """Dispatches the collected copies, and those from disks that have been read."""
        for key in list(self._awaited):
            if self.store.disk is not None and self.store.disk.is_ready(key):
                self._bring(key)
        self._streams.dispatch()

    def wait_for_offload(self, task: int, key: Key) -> None:
        """Blocks until a part offloaded by a task is in the host; then frees the device's copy."""
        if (task, key) not in self._leaving:
            self.dispatch()  # it was only collected so far
        # Nothing to wait for is not an error: a steady step's waits include offloads that only some
        # preceding steps make.
        _, landed = self._leaving.pop((task, key), ((), ()))
        jax.block_until_ready([x for found in landed if (x := found()) is not None])

    def rest(self) -> None:
        """Blocks until all state is in the host."""
        self.dispatch()
        assert not self.store.on_device and not self._awaited
        self._leaving.clear()
        jax.block_until_ready(self.store.host)

    def abandon(self) -> None:
        """Forgets all transfers, collected or dispatched."""
        self._streams.forget()
        self._leaving.clear()
        self._awaited.clear()
        if self.store.disk is not None:
            self.store.disk.abandon()


# ---- copy rates

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
