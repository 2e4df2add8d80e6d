"""Estimates when each instruction of a schedule happens, from a few rates.

Several units work in parallel: the driver dispatches, the device computes in order, and each link
copies in two lanes, inward and outward. A copy to the device starts after all computations that
were dispatched before it, because its memory is allocated in their order. A copy to the host starts
after the last computation. Both lanes share the host's memory, and it serves copies in the order of
their dispatch.

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
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from megatrain_jax._src.common.keys import Key
from megatrain_jax._src.engine.schedule.workload import Costs, Link


@dataclass(kw_only=True)
class Clock:
    """The times, in seconds, when driver, device and lanes have finished their work so far.

    Attributes:
        costs: The rates.
        driver: When the driver can dispatch the next instruction.
        device: When the device has finished all computations.
        inward: When the inward lane of each link, by name, has finished all copies.
        outward: When the outward lane of each link, by name, has finished all copies.
        shared: When the shared memory of each link, by name, has finished all copies.
        arrived: When each fetched part arrives on the device.
        computed: When each task has been computed.
        landed: When each offloaded part, by task and part, arrives in the host.
    """

    costs: Costs
    driver: float = 0.0
    device: float = 0.0
    inward: dict[str, float] = field(default_factory=dict)
    outward: dict[str, float] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)
    arrived: dict[Key, float] = field(default_factory=dict)
    computed: dict[int, float] = field(default_factory=dict)
    landed: dict[tuple[int, Key], float] = field(default_factory=dict)

    def fetch(self, key: Key, size: int) -> None:
        """Copies a part to the device."""
        self._dispatch()
        link = self.costs.link_of(key)
        self.arrived[key] = self._carry(link, self.inward, size * link.inward, size)

    def inward_until(self, key: Key) -> float:
        """The time when the inward lane of a part's link becomes idle."""
        return self.inward.get(self.costs.link_of(key).name, 0.0)

    def compute(
        self, touches: tuple[Key, ...], seconds: float, task: int, on_link: float = 0.0
    ) -> None:
        """Computes with parts; for `on_link` seconds, collectives occupy the host link."""
        self._dispatch()
        self.device = self.computed[task] = over = self.over(touches, seconds)
        if on_link:
            # Collectives through the host occupy both lanes and the memory, so copies wait.
            for lane in (self.inward, self.outward, self.shared):
                name = self.costs.link.name
                lane[name] = max(lane.get(name, 0.0), over - seconds) + on_link
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
        link = self.costs.link_of(key)
        self.landed[task, key] = self._carry(link, self.outward, size * link.outward, size)

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
            inward=dict(self.inward),
            outward=dict(self.outward),
            shared=dict(self.shared),
            arrived=dict(self.arrived),
            computed={task - num_tasks: at for task, at in self.computed.items()},
            landed={(task - num_tasks, key): at for (task, key), at in self.landed.items()},
        )

    def _carry(self, link: Link, lane: dict[str, float], seconds: float, size: int) -> float:
        """Copies a part over one lane of a link; returns the time when the copy is done."""
        ready = max(self.driver, self.device)
        # The copy is done when both its lane and the shared memory have carried it. The slower of
        # the two occupies the lane.
        self.shared[link.name] = max(ready, self.shared.get(link.name, 0.0)) + size * link.shared
        own = max(ready, lane.get(link.name, 0.0)) + seconds
        lane[link.name] = max(own, self.shared[link.name])
        self.device += size * self.costs.delay
        return lane[link.name]

    def _dispatch(self) -> None:
        self.driver += self.costs.dispatch
