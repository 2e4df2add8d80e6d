"""Estimates when each instruction of a schedule happens, from a few rates.

Several units work in parallel: the driver dispatches, the device computes in order, and the link to
the host copies in two lanes, inward and outward. A copy to the device starts after all computations
that were dispatched before it, because its memory is allocated in their order. A copy to the host
starts after the last computation. Both lanes share the host's memory, and it serves copies in the
order of their dispatch.

Example: parts of 4 bytes, one second per byte, 6 seconds per forward, and no time for dispatch:

    instruction   inward    device    outward   driver
    FETCH M0       0 –  4
    FETCH M1       4 –  8
    FORWARD 0                4 – 10                        M0 has arrived at 4
    OFFLOAD M0                        10 – 14              after the last computation
    FORWARD 1               10 – 16
    FETCH M2      16 – 20                                  the device has work until 16
    WAIT 0                                      10         task 0 has been computed
    LAND M0                                     14         its copy has arrived

If each copied byte delayed computations by 0.1 seconds, the offload of M0 would delay the second
forward by 0.4. If the host's memory took 1.5 seconds per byte, M0 would arrive at 6 and M1 at 12.
The offload of M0 would then start at 12 and take 4 seconds of its lane, but 6 of the memory: until
18.

The path of a part that rests on a disk has one more lane each way. Reads run ahead in the order of
the fetches, without the driver; a part is read once it has been written and a slot of its class is
free. The driver waits at an offload until another part may wait in memory to be written. If M0 to
M2 are on a disk that reads a byte in 2 seconds, M0 is read from 0 to 8, M1 until 16, and M2, whose
slot is free when M0 is on the device, until 24. Drives may also have a rate for both ways together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from megatrain_jax._src.common.keys import Key
from megatrain_jax._src.engine.schedule.workload import SLOTS, Costs

_NONE = (0.0,) * SLOTS


@dataclass(kw_only=True)
class Clock:
    """The times, in seconds, when driver, device and lanes have finished their work so far.

    Attributes:
        costs: The rates.
        on_disk: The parts that rest on disks, with their class; see `Workload`.
        driver: When the driver can dispatch the next instruction.
        device: When the device has finished all computations.
        inward: When the lane to the device has finished all copies.
        outward: When the lane to the host has finished all copies.
        shared: When the host's memory has finished all copies.
        read: When the disks have finished all reads.
        written: When the disks have finished all writes.
        both_ways: When the disks can have done all of it, by their rate for both ways together.
        brought: When all parts from disks have been copied to the device.
        slots: For each class, when its slots become free.
        outgoing: For each class, when its last parts have been written.
        current: When the last version of each part has been written.
        arrived: When each fetched part arrives on the device.
        computed: When each task has been computed.
        landed: When each offloaded part, by task and part, arrives in the host.
    """

    costs: Costs
    on_disk: Mapping[Key, int] = field(default_factory=dict)
    driver: float = 0.0
    device: float = 0.0
    inward: float = 0.0
    outward: float = 0.0
    shared: float = 0.0
    read: float = 0.0
    written: float = 0.0
    both_ways: float = 0.0
    brought: float = 0.0
    slots: dict[int, tuple[float, ...]] = field(default_factory=dict)
    outgoing: dict[int, tuple[float, ...]] = field(default_factory=dict)
    current: dict[Key, float] = field(default_factory=dict)
    arrived: dict[Key, float] = field(default_factory=dict)
    computed: dict[int, float] = field(default_factory=dict)
    landed: dict[tuple[int, Key], float] = field(default_factory=dict)

    def fetch(self, key: Key, size: int) -> None:
        """Copies a part to the device."""
        self._dispatch()
        seconds = size * self.costs.link.inward
        read = self._read(key, size) if key in self.on_disk else 0.0
        self.inward = self.arrived[key] = self._carry(self.inward, seconds, size)
        if key in self.on_disk:
            # Copies from memory that are dispatched later need not wait for a read.
            self.brought = max(self.inward, max(read, self.brought) + seconds)
            self.arrived[key], number = self.brought, self.on_disk[key]
            self.slots[number] = (*self.slots.get(number, _NONE)[1:], self.brought)

    def inward_until(self, key: Key) -> float:
        """The time when the lanes of a part's path to the device become idle."""
        return max(self.inward, self.read) if key in self.on_disk else self.inward

    def compute(
        self, touches: tuple[Key, ...], seconds: float, task: int, on_link: float = 0.0
    ) -> None:
        """Computes with parts; for `on_link` seconds, collectives occupy the host link."""
        self._dispatch()
        self.device = self.computed[task] = over = self.over(touches, seconds)
        if on_link:
            # Collectives through the host occupy both lanes and the memory, so copies wait.
            start = over - seconds
            self.inward = max(self.inward, start) + on_link
            self.outward = max(self.outward, start) + on_link
            self.shared = max(self.shared, start) + on_link
        # A part that a computation has used is present, so its arrival time is no longer needed.
        for key in touches:
            self.arrived.pop(key, None)

    def over(self, touches: Iterable[Key], seconds: float) -> float:
        """The time when a computation would end if it came next."""
        # A loop, because this is called very often.
        ready, arrived = max(self.driver, self.device), self.arrived
        for key in touches:
            if arrived.get(key, 0.0) > ready:
                ready = arrived[key]
        return ready + seconds

    def offload(self, key: Key, size: int, task: int) -> None:
        """Copies a part from the device, after the last computation."""
        self._dispatch()
        if key in self.on_disk:
            outgoing = self.outgoing.get(self.on_disk[key], _NONE)
            self.driver = max(self.driver, outgoing[0])
        self.outward = self._carry(self.outward, size * self.costs.link.outward, size)
        self.landed[task, key] = self.outward
        if key in self.on_disk:
            assert self.costs.disk is not None
            over = max(self.written, self.outward) + size * self.costs.disk.written
            self.written = max(over, self._both_ways_over(size))
            self.outgoing[self.on_disk[key]] = (*outgoing[1:], self.written)
            self.current[key] = self.written

    def wait(self, task: int) -> None:
        """Makes the driver wait until a task has been computed."""
        self.driver = max(self.driver, self.computed.pop(task, 0.0))

    def land(self, task: int, key: Key) -> None:
        """Makes the driver wait until a part that a task offloaded is in the host."""
        self.driver = max(self.driver, self.landed.pop((task, key), 0.0))

    def next_step(self, num_tasks: int) -> "Clock":
        """A copy of this clock for the step that follows one of `num_tasks` tasks.

        Tasks are numbered from the start of their step; the last task of the previous step is -1.
        The device waits for the new step's batch.
        """
        return replace(
            self,
            device=max(self.device, self.driver + self.costs.batch),
            slots=dict(self.slots),
            outgoing=dict(self.outgoing),
            current=dict(self.current),
            arrived=dict(self.arrived),
            computed={task - num_tasks: at for task, at in self.computed.items()},
            landed={(task - num_tasks, key): at for (task, key), at in self.landed.items()},
        )

    def _read(self, key: Key, size: int) -> float:
        """Reads a part from the disks; returns the time when that is done."""
        assert self.costs.disk is not None
        free = self.slots.get(self.on_disk[key], _NONE)[0]
        start = max(self.read, free, self.current.get(key, 0.0))
        self.read = max(start + size * self.costs.disk.read, self._both_ways_over(size))
        return self.read

    def _both_ways_over(self, size: int) -> float:
        """The earliest end of a transfer by what the disks move both ways together."""
        assert self.costs.disk is not None
        # Neither lane begins anything before this; reads may run ahead of writes dispatched before.
        begin = max(self.both_ways, min(self.read, self.written))
        self.both_ways = begin + size * self.costs.disk.shared
        return self.both_ways

    def _carry(self, lane: float, seconds: float, size: int) -> float:
        """Copies a part over one lane of the link; returns the time when the copy is done."""
        ready = max(self.driver, self.device)
        # The copy is done when both its lane and the shared memory have carried it. The slower of
        # the two occupies the lane.
        self.shared = max(ready, self.shared) + size * self.costs.link.shared
        self.device += size * self.costs.delay
        return max(ready + seconds, lane + seconds, self.shared)

    def _dispatch(self) -> None:
        self.driver += self.costs.dispatch
