"""The tier below the host: parts of groups that rest in files, and their way through memory.

Activations that wait for the backward may do so there, too, and count as parts.

A part is read into a *slot*, pinned arrays of its shapes, and copied to the device from there.
Parts of equal shapes form a class and share two slots: one is read while the other is copied. Reads
run ahead in the order in which the schedule fetches. After an update, a part comes to the host in
new arrays, as any part does; threads write them to the drives, and then they are dropped.

Example: the masters of groups 0 to 3 rest on a drive. Over time, what is in each of the two slots::

    reading              M0     M1     M2            M3
    copied to device            M0     M1     M2
    computing                          0      1      2

A read waits until its part has been written, if an earlier instruction of the schedule offloads it.
"""

import functools
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from megatrain_jax._src.common.activity import progressed
from megatrain_jax._src.common.keys import Key
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.workload import SLOTS
from megatrain_jax._src.engine.state.drive import Range, Storage
from megatrain_jax._src.engine.state.host_leaves import Resting, shards_here
from megatrain_jax._src.engine.state.placement import Placement
from megatrain_jax._src.engine.state.pool import unfilled

Slabs = tuple[jax.Array, ...]


@dataclass(kw_only=True, eq=False)
class _Place:
    """Where a part rests.

    Attributes:
        avals: Shapes and dtypes of its arrays.
        ranges: For each of its arrays, the range of each of this process's shards, by number.
        filled: Number of its arrays that have been appended.
        version: Number of times that it was given to be written.
        writing: Its last write.
    """

    avals: tuple[jax.ShapeDtypeStruct, ...]
    ranges: list[dict[int, Range]]
    filled: int = 0
    version: int = 0
    writing: Future | None = None

    @property
    def is_written(self) -> bool:
        """Whether nothing is being written, and nothing has failed."""
        writing = self.writing
        return writing is None or (writing.done() and writing.exception() is None)

    def wait(self) -> None:
        """Waits for its last write, and raises its error."""
        if self.writing is not None:
            self.writing.result()


@dataclass(kw_only=True, eq=False)
class _Read:
    """A version of a part that is read ahead, the arrays of its slot, and the end of the read."""

    key: Key
    version: int
    arrays: Slabs
    end: Future


class _Shard:
    """Some elements of a shard on a drive: read when it is converted to a NumPy array."""

    def __init__(self, drives: Storage, place: _Place, where: Range, dtype: Any, among: range):
        self._drives, self._place, self._where = drives, place, where
        self.dtype, self._among = np.dtype(dtype), among

    @property
    def size(self) -> int:
        """The number of elements."""
        return len(self._among)

    def __getitem__(self, part: slice) -> "_Shard":
        """Some of them, which are not read."""
        return _Shard(self._drives, self._place, self._where, self.dtype, self._among[part])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads them."""
        self._place.wait()
        size, start = self.dtype.itemsize, self._among.start
        found = self._drives.read_part(self._where, start * size, (start + self.size) * size)
        progressed()
        return found.view(self.dtype).astype(dtype or self.dtype, copy=False)


class Disk:
    """Holds parts of groups on drives; see the module.

    Only the driver calls its methods, but any thread may read shards.

    Attributes:
        classes: The parts, each with the number of its class.
    """

    def __init__(
        self,
        drives: Storage,
        parts: Mapping[Key, tuple[jax.ShapeDtypeStruct, ...]],
        classes: Mapping[Key, int],
        placement: Placement,
    ):
        """Takes the space on the drives, and the memory of the slots.

        Args:
            drives: The drives, with nothing placed on them.
            parts: Shapes and dtypes of the arrays of each part.
            classes: The parts, each with the number of its class.
            placement: The run's devices.

        Raises:
            OSError: If a drive has too little space.
        """
        self.classes, self._drives, self._placement = dict(classes), drives, placement
        self._num_shards = placement.num_devices
        self._places: dict[Key, _Place] = {}
        self._free: dict[int, list[Slabs]] = {}
        for key, number in sorted(classes.items()):
            avals = parts[key]
            self._places[key] = _Place(avals=avals, ranges=[*map(self._ranges, avals)])
            if number not in self._free:
                at_rest = placement.slabs_at_rest
                makers = [unfilled(x.shape, at_rest, x.dtype) for x in avals]
                slots = (tuple(make() for make in makers) for _ in range(SLOTS))
                self._free[number] = jax.block_until_ready(list(slots))
        drives.reserve()
        self._changed = threading.Condition(threading.RLock())
        self._order: Mapping[int, deque[tuple[Key, int]]] = defaultdict(deque)
        self._ahead: Mapping[int, deque[_Read]] = defaultdict(deque)
        self._outgoing: Mapping[int, deque[Future]] = defaultdict(deque)
        self._taken: dict[Key, Slabs] = {}
        self._copying: dict[Key, Future] = {}
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="copies from slots")

    def __contains__(self, key: Key) -> bool:
        """Whether a part rests on the drives."""
        return key in self._places

    # ---- at rest

    def append(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        """Adds arrays in pinned memory to a part, in order, and waits until they are written."""
        place = self._places[key]
        first = place.filled
        place.filled, place.version = first + len(arrays), 1
        self._write(place.ranges[first : place.filled], arrays).result()

    def shards(self, key: Key) -> Sequence[Mapping[int, Resting]]:
        """For each array of a part, this process's shards by number.

        They are valid until the part is written again.
        """
        place = self._places[key]
        rows = zip(place.ranges[: place.filled], place.avals, strict=False)
        return [
            {n: _Shard(self._drives, place, x, a.dtype, _elements(x, a)) for n, x in row.items()}
            for row, a in rows
        ]

    def drop(self) -> None:
        """Drops all contents, to be filled anew."""
        self.abandon()
        for place in self._places.values():
            place.filled = place.version = 0

    # ---- during steps

    def follow(self, fetched: Iterable[Key], instructions: Iterable[Instruction]) -> None:
        """Reads ahead in the order of the next instructions.

        Args:
            fetched: The parts that were fetched before and have not been taken.
            instructions: The instructions of its parts that come next.
        """
        version = Counter({key: place.version for key, place in self._places.items()})
        with self._changed:
            self._order = defaultdict(deque)
            for key in fetched:
                self._order[self.classes[key]].append((key, version[key]))
            for row in instructions:
                assert row.key is not None
                if row.op is Op.OFFLOAD:
                    version[row.key] += 1
                elif row.op is Op.FETCH:
                    self._order[self.classes[row.key]].append((row.key, version[row.key]))
            useless = [
                read
                for number, ahead in self._ahead.items()
                for read in _all_but_next(ahead, self._order[number])
            ]
            # At once for a read that has ended, and then further ones begin.
            for read in useless:
                # A future keeps its callbacks, and a cycle would keep the files.
                what = weakref.ref(self), read.key, read.arrays
                read.end.add_done_callback(functools.partial(_give_back, *what))
            for number in self._order:
                self._advance(number)

    def is_ready(self, key: Key) -> bool:
        """Whether the part that is fetched next of its class has been read."""
        with self._changed:
            ahead = self._ahead[self.classes[key]]
            return bool(ahead) and ahead[0].key == key and ahead[0].end.done()

    def take(self, key: Key) -> Slabs:
        """The pinned arrays of a part that is fetched; waits until it has been read."""
        place, number = self._places[key], self.classes[key]
        with self._changed:
            while not (ahead := self._ahead[number]):
                # Its slots are still being copied from, or it is still being written.
                if place.writing is not None and place.writing.done():
                    place.wait()
                self._changed.wait()
            read = ahead.popleft()
        assert read.key == key, f"{read.key} was read ahead, but {key} is fetched"
        self._taken[key] = read.arrays
        read.end.result()
        progressed()
        return read.arrays

    def copied(self, key: Key, arrays: Slabs) -> None:
        """Frees a part's slot as soon as these copies on the device have arrived."""
        slot = self._taken.pop(key)

        def wait() -> None:
            try:
                jax.block_until_ready(arrays)
            finally:
                self._give_back(key, slot)

        self._copying[key] = self._copies.submit(wait)

    def settle(self, key: Key) -> None:
        """Waits until a part has been copied, before its arrays on the device are donated."""
        assert key not in self._taken, f"the copy of {key} has not begun"
        if key in self._copying:
            self._copying.pop(key).exception()  # waits; the device's arrays have its error

    def take_now(self, key: Key) -> Slabs:
        """The pinned arrays of a part that is read between steps; `copied` frees them."""
        self.follow([key], ())
        return self.take(key)

    def give_up(self, key: Key) -> None:
        """Gives up the next part of its class instead of taking it."""
        self.take(key)
        self._give_back(key, self._taken.pop(key))

    def wait_for_room(self, key: Key) -> None:
        """Waits until a further part of its class may wait in memory to be written."""
        outgoing = self._outgoing[self.classes[key]]
        while len(outgoing) >= SLOTS:
            outgoing.popleft().result()
            progressed()

    def write(self, key: Key, arrays: Slabs) -> None:
        """Starts to write new arrays of a part, which may be in flight, and drops them then."""
        place, number = self._places[key], self.classes[key]
        assert place.is_written, f"{key} is written again, but was not read in between"
        with self._changed:
            place.version += 1
            place.writing = end = self._write(place.ranges, arrays)
            self._outgoing[number].append(end)
        own = weakref.ref(self)  # as above
        end.add_done_callback(lambda _: (disk := own()) and disk._advance(number))

    def abandon(self) -> None:
        """Forgets what is read ahead, and waits for all reads, copies and writes."""
        self.follow((), ())
        for end in self._copying.values():
            end.exception()  # waits
        self._copying.clear()
        # An error came before their copies.
        while self._taken:
            self._give_back(*self._taken.popitem())
        for place in self._places.values():
            if place.writing is not None:
                place.writing.exception()  # waits
                place.writing = None
        self._outgoing = defaultdict(deque)

    # ---- inside

    def _ranges(self, aval: jax.ShapeDtypeStruct) -> dict[int, Range]:
        num_bytes = aval.size * aval.dtype.itemsize // self._num_shards
        return {n: self._drives.place(num_bytes) for n in self._placement.shards_here}

    def _advance(self, number: int) -> None:
        """Starts the next reads of a class, as far as slots are free."""
        with self._changed:
            order, free = self._order[number], self._free[number]
            while order and free:
                key, version = order[0]
                place = self._places[key]
                if place.version < version or not place.is_written:
                    break
                order.popleft()
                arrays = free.pop()
                rows = ((x, _memory(shard)) for x, shard in self._shards(place.ranges, arrays))
                end = _joined(self._drives.read(rows))
                read = _Read(key=key, version=version, arrays=arrays, end=end)
                self._ahead[number].append(read)
            self._changed.notify_all()

    def _give_back(self, key: Key, slot: Slabs) -> None:
        with self._changed:
            self._free[self.classes[key]].append(slot)
            self._advance(self.classes[key])

    def _write(self, ranges: Sequence[Mapping[int, Range]], arrays: Sequence[jax.Array]) -> Future:
        rows = self._shards(ranges, arrays)
        return _joined(self._drives.write((x, functools.partial(_memory, y)) for x, y in rows))

    def _shards(
        self, ranges: Sequence[Mapping[int, Range]], arrays: Sequence[jax.Array]
    ) -> Iterator[tuple[Range, jax.Array]]:
        """The ranges of some arrays' shards here, each with its shard."""
        for row, array in zip(ranges, arrays, strict=True):
            for number, shard in shards_here(array, self._num_shards).items():
                yield row[number], shard


def _elements(where: Range, aval: jax.ShapeDtypeStruct) -> range:
    return range(where.num_bytes // aval.dtype.itemsize)


def _give_back(own: weakref.ref[Disk], key: Key, slot: Slabs, _: Future) -> None:
    if (disk := own()) is not None:
        disk._give_back(key, slot)


def _all_but_next(ahead: deque[_Read], order: deque[tuple[Key, int]]) -> list[_Read]:
    """Takes from both what was read ahead as ordered; returns, and removes, what was not."""
    kept = []
    while ahead and order and order[0] == (ahead[0].key, ahead[0].version):
        kept.append(ahead.popleft())
        order.popleft()
    useless = list(ahead)
    ahead.clear()
    ahead.extend(kept)
    return useless


class _Bytes:
    """The bytes of an array in pinned memory, for NumPy, whose view of them keeps the array."""

    def __init__(self, array: jax.Array):
        self._array = array
        self.__array_interface__ = {
            "version": 3,
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (array.unsafe_buffer_pointer(), False),
        }


def _memory(array: jax.Array) -> np.ndarray:
    """The bytes of an array in pinned memory, which it keeps; waits until they are there."""
    array.block_until_ready()
    return np.asarray(_Bytes(array)) if array.nbytes else np.empty(0, np.uint8)


def _joined(jobs: Sequence[Future]) -> Future:
    """A future that ends with the last of some, or with an error, when all have."""
    joined: Future = Future()
    left, lock = len(jobs), threading.Lock()

    def done(job: Future) -> None:
        nonlocal left, jobs
        with lock:
            left -= 1
            ends = not left
        # The others may still use memory that an error would give back.
        if ends:
            errors = [error for job in jobs if (error := job.exception()) is not None]
            joined.set_exception(errors[0]) if errors else joined.set_result(None)
            jobs = ()  # which keep this function

    if not jobs:
        joined.set_result(None)
    for job in jobs:
        job.add_done_callback(done)
    return joined
