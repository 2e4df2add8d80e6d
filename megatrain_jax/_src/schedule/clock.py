"""Estimates when each instruction of a schedule happens, from a few rates.

Four things work side by side: the driver, which dispatches; the device, which computes in order;
and the two directions of the link. A copy to the device starts no earlier than what was dispatched
to the device before it, since its memory is allocated in the order of the computations.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from megatrain_jax._src.common.keys import Key
from megatrain_jax._src.schedule.tasks import Costs


@dataclass(kw_only=True)
class Clock:
    """When each of the four is done with what it has been given, in seconds.

    Attributes:
        costs: The rates.
        driver: When the driver can dispatch the next instruction.
        device: When the device has computed everything.
        inward: When everything has arrived on the device.
        outward: When everything has left it.
        arrived: When each part that was fetched is there.
        computed: When each task has been computed.
        landed: When each part that a task offloaded is in the host.
    """

    costs: Costs
    driver: float = 0.0
    device: float = 0.0
    inward: float = 0.0
    outward: float = 0.0
    arrived: dict[Key, float] = field(default_factory=dict)
    computed: dict[int, float] = field(default_factory=dict)
    landed: dict[tuple[int, Key], float] = field(default_factory=dict)

    def fetch(self, key: Key, size: int) -> None:
        """Copies a part to the device."""
        self._dispatch()
        start = max(self.driver, self.inward, self.device)
        self.inward = self.arrived[key] = start + size * self.costs.byte

    def compute(self, touches: tuple[Key, ...], seconds: float, task: int) -> None:
        """Computes on parts."""
        self._dispatch()
        self.device = self.computed[task] = self.over(touches, seconds)
        for key in touches:
            self.arrived.pop(key, None)

    def over(self, touches: Iterable[Key], seconds: float) -> float:
        """When something would be computed if it came next."""
        ready = (self.arrived.get(key, 0.0) for key in touches)
        return max(self.driver, self.device, *ready) + seconds

    def offload(self, key: Key, size: int, task: int) -> None:
        """Copies a part that was computed last to the host."""
        self._dispatch()
        start = max(self.driver, self.outward, self.device)
        self.outward = self.landed[task, key] = start + size * self.costs.byte

    def wait(self, task: int) -> None:
        """Waits until a task has been computed."""
        self.driver = max(self.driver, self.computed.pop(task, 0.0))

    def land(self, task: int, key: Key) -> None:
        """Waits until a part that a task offloaded is in the host."""
        self.driver = max(self.driver, self.landed.pop((task, key), 0.0))

    def next_lap(self, num_tasks: int) -> "Clock":
        """This clock as the lap that follows one of `num_tasks` tasks sees it."""
        return replace(
            self,
            arrived=dict(self.arrived),
            computed={task - num_tasks: at for task, at in self.computed.items()},
            landed={(task - num_tasks, key): at for (task, key), at in self.landed.items()},
        )

    def _dispatch(self) -> None:
        self.driver += self.costs.dispatch
