"""Writes the instructions for a list of tasks, within a limit of device bytes.

This decides when each part (a group's masters, optimizer state or gradient, an activation, or
residuals) is copied, and how long it stays on the device:

- Parts are fetched in the order of their use, ahead of time: as far as the limit allows, and as far
  as it takes to keep the link busy. This distance is the *reach*.
- A part stays on the device if its next use is within reach; otherwise it is evicted. A gradient
  also stays if all parts that are used before it fit beside it.
- If a part that a task needs doesn't fit, the driver waits until earlier tasks have freed memory.
  Parts further ahead are fetched only into memory that is free already.

Example: an evaluation of four stages, each with 6 seconds of computation and masters of 4 bytes,
over a link that carries one byte per second. The column shows the bytes on the device:

    FETCH M0     4   task 0 needs it
    FETCH M1     8   task 1 needs it to begin; it arrives while task 0 computes
    FORWARD 0    8   from 4 to 10 seconds
    RELEASE M0   8   its memory is not free until task 0 has been computed
    FETCH M2    12   from 10 to 14, while task 1 computes until 16
    FETCH M3    16   keeps the link busy until then; one more would only queue up
    FORWARD 1   16
    RELEASE M1  16
    WAIT 0      12   the driver is at most two tasks ahead; now the memory of M0 is free
    FORWARD 2   12
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.engine.schedule.clock import Clock
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op, instruction_of
from megatrain_jax._src.engine.schedule.tasks import Computation, Task, Use
from megatrain_jax._src.engine.schedule.workload import Workload

_At = TypeVar("_At")


@dataclass(kw_only=True)
class Residency:
    """The parts on the device while instructions are written, and their bytes.

    Attributes:
        workload: The sizes of parts.
        limit: Maximum bytes on the device.
        resident: Parts that are never evicted.
        clock: Estimates when instructions happen.
        present: Parts on the device that the engine may use.
        dirty: Parts on the device without a current copy in the host.
        reserved: Expected parts with reserved memory, and their counts: 2 for a gradient that has
            reservations for this step and for the next one.
        reserved_bytes: Bytes of all reservations.
        used: For each task, bytes that become free once it has been computed.
        leaving: For each task and part, in the order of dispatch, bytes that become free once the
            part has arrived in the host.
        num_bytes: Bytes on the device.
        prefetch_distance: Number of uses, from the start of the current list, that are fetched or
            reserved.
        instructions: The instructions written for the current list.
        ledger: Bytes on the device after each instruction.
        wave_over: For each wave of the current list, the time when its last stage was computed.
    """

    workload: Workload
    limit: int
    resident: frozenset[Key]
    clock: Clock
    present: set[Key] = field(default_factory=set)
    dirty: set[Key] = field(default_factory=set)
    reserved: Counter[Key] = field(default_factory=Counter)
    used: dict[int, int] = field(default_factory=dict)
    leaving: dict[tuple[int, Key], int] = field(default_factory=dict)
    reserved_bytes: int = 0
    num_bytes: int = 0
    prefetch_distance: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    ledger: list[int] = field(default_factory=list)
    wave_over: dict[int, float] = field(default_factory=dict)

    def next_step(self, num_tasks: int, prefetch_distance: int) -> "Residency":
        """A copy of this state for the step that follows one of `num_tasks` tasks.

        Args:
            num_tasks: Is subtracted from the numbers of earlier tasks, so that the last one is -1.
            prefetch_distance: Number of uses of the new step that are already fetched or reserved.
        """
        return replace(
            self,
            clock=self.clock.next_step(num_tasks),
            present=set(self.present),
            dirty=set(self.dirty),
            reserved=Counter(self.reserved),
            used={task - num_tasks: size for task, size in self.used.items()},
            leaving={(i - num_tasks, key): size for (i, key), size in self.leaving.items()},
            prefetch_distance=prefetch_distance,
            instructions=[],
            ledger=[],
            wave_over={},
        )

    def joined(self, other: "Residency") -> "Residency":
        """A state that covers this state and a second one: its instructions are valid after both.

        The same parts are present in both states. A part is dirty, or on its way to the host, if it
        is so in either state. The clock is the second state's.
        """
        # Each step ends with the same reach, so it leaves the same parts present. But a part may be
        # clean after a cold step and dirty after a steady one. Offloading a clean part costs a
        # copy; releasing a dirty part would lose an update.
        assert self.present == other.present and self.reserved == other.reserved
        used = _largest(self.used, other.used)
        leaving = _largest(self.leaving, other.leaving)
        held = sum(map(self.workload.size, self.present))
        return replace(
            other,
            dirty=self.dirty | other.dirty,
            used=used,
            leaving=leaving,
            num_bytes=held + sum(used.values()) + sum(leaving.values()),
        )

    def is_covered_by(self, other: "Residency") -> bool:
        """Whether the other state includes all that is dirty or on its way in this state."""
        return (
            self.dirty <= other.dirty
            and all(size <= other.used.get(task, 0) for task, size in self.used.items())
            and all(size <= other.leaving.get(at, 0) for at, size in self.leaving.items())
        )

    @property
    def room(self) -> int:
        """Bytes that are neither occupied nor reserved; may be negative after `joined`."""
        return self.limit - self.num_bytes - self.reserved_bytes

    # ---- instructions

    def wait(self, task: int) -> None:
        """Writes a wait until a task has been computed, which frees the parts it dropped."""
        self.num_bytes -= self.used.pop(task)
        self.clock.wait(task)
        self._emit(instruction_of(Op.WAIT, task))

    def land(self, task: int, key: Key) -> None:
        """Writes a wait until an offloaded part is in the host, which frees its device memory."""
        self.num_bytes -= self.leaving.pop((task, key))
        self.clock.land(task, key)
        self._emit(instruction_of(Op.LAND, task, key))

    def fetch(self, key: Key, task: int) -> None:
        """Writes a copy of a part to the device, before a task computes."""
        size = self.workload.bytes_of[key]
        self.present.add(key)
        self._use_reservation(key)
        self.num_bytes += size
        self.clock.fetch(key, size)
        self._emit(instruction_of(Op.FETCH, task, key))

    def compute(self, computation: Computation, task: int) -> None:
        """Writes one computation of a task."""
        sizes = self.workload.bytes_of
        for key in computation.creates:
            self.present.add(key)
            self._use_reservation(key)
            self.num_bytes += sizes[key]
        assert self.present.issuperset(computation.touches)
        self.dirty.update(computation.dirties)
        for key in computation.kills:
            self.present.discard(key)
            self.dirty.discard(key)
            # Its memory is free once the device has reached this point; only a WAIT ensures that.
            self.used[task] = self.used.get(task, 0) + sizes[key]
        seconds, on_link = computation.seconds, computation.seconds_on_link
        self.clock.compute(computation.touches, seconds, task, on_link)
        if computation.instruction.stage is not None:
            self.wave_over[computation.instruction.wave] = self.clock.device
        self._emit(computation.instruction)

    def evict(self, key: Key, task: int) -> None:
        """Writes the eviction of a part after a task: an offload if the host's copy is stale."""
        size = self.workload.bytes_of[key]
        self.present.discard(key)
        # The bytes still count in both cases. Earlier computations are only dispatched, so a copy
        # starts, and a released array is freed, when these are over.
        if key in self.dirty:
            self.dirty.discard(key)
            self.leaving[task, key] = size
            self.clock.offload(key, size, task)
            self._emit(instruction_of(Op.OFFLOAD, task, key))
        else:
            self.used[task] = self.used.get(task, 0) + size
            self._emit(instruction_of(Op.RELEASE, task, key))

    def reserve(self, key: Key) -> None:
        """Reserves memory for a part that will be fetched or created later."""
        self.reserved[key] += 1
        self.reserved_bytes += self.workload.bytes_of[key]

    def _use_reservation(self, key: Key) -> None:
        if key not in self.reserved:
            return
        self.reserved_bytes -= self.workload.bytes_of[key]
        self.reserved[key] -= 1
        if not self.reserved[key]:
            del self.reserved[key]

    def _emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        # `joined` counts the leftovers of two different steps, which may exceed the limit. Each
        # step alone keeps to it, so the bytes really on the device never exceed it.
        held, limit = self.num_bytes, self.limit
        self.ledger.append(held if held < limit else limit)

    # ---- lists

    def run(self, tasks: Sequence[Task], later: Iterable[Task], boundary: int) -> None:
        """Writes the instructions for tasks, and fetches or reserves the first uses of `later`.

        Args:
            tasks: The tasks of a list.
            later: The tasks that follow.
            boundary: Number of uses in `later` that are within reach at the end, exactly.
        """
        line = [use for task in (*tasks, *later) for use in task.uses]
        starts = [0]
        for task in tasks:
            starts.append(starts[-1] + len(task.uses))
        # Every step has to end with the same reach, independent of the clock. Only then can the
        # list of a steady step be repeated.
        line = line[: starts[-1] + boundary]
        # A use that creates its part needs no earlier copy.
        needs: dict[Key, list[int]] = {}
        for at, use in enumerate(line):
            if not use.creates:
                needs.setdefault(use.key, []).append(at)
        for number, task in enumerate(tasks):
            last = number == len(tasks) - 1
            # Parts that the next task needs at its beginning are fetched while this one computes,
            # at the latest. `least_bytes` counts them, so waiting for earlier tasks always makes
            # enough room.
            early = boundary if last else tasks[number + 1].num_early
            self._prefetch(number, task, line, starts[number + 1] + early)
            if last:  # a first step may not use all resident parts
                absent = self.resident - self.present
                for key in sorted(key for key in absent if key.kind in LASTING):
                    self.fetch(key, number)
            for at, computation in enumerate(task.computations):
                self.compute(computation, number)
                for key in computation.touches:
                    if key in self.resident or task.last_touch[key] != at:
                        continue
                    if key in self.present:
                        at_next = _first_from(needs.get(key, ()), starts[number + 1])
                        if not self._stays(key, line, at_next):
                            self.evict(key, number)

    def run_to_rest(self, tasks: Sequence[Task], spare: int = 0) -> None:
        """Writes the instructions for tasks that leave nothing on the device.

        Args:
            tasks: The tasks.
            spare: Bytes of the limit that none of these tasks needs; parts that are present may
                stay there until their use.
        """
        # No part stays resident, so reservations for the next step are dropped.
        self.resident = frozenset()
        self.reserved.clear()
        self.reserved_bytes = 0
        # The reach ends at the first use of an absent part. Of the parts that are first used beyond
        # it, some stay in the spare bytes; the rest is evicted now and fetched again later.
        uses = [use.key for task in tasks for use in task.uses]
        here = (at for at, key in enumerate(uses) if key not in self.present)
        self.prefetch_distance = next(here, len(uses))
        # Gradients are kept first, because an evicted gradient takes additional memory in the host.
        # Before a task has to wait for memory, earlier tasks have used the parts already fetched.
        leave = self.present.difference(uses[: self.prefetch_distance])
        beyond = [key for key in dict.fromkeys(uses[self.prefetch_distance :]) if key in leave]
        for key in sorted(beyond, key=lambda key: key.kind in LASTING):
            if self.workload.size(key) <= spare:
                spare -= self.workload.size(key)
                leave.remove(key)
        for key in sorted(leave):
            self.evict(key, -1)
        self.run(tasks, (), 0)
        while self.used or self.leaving:
            self._wait_for_oldest()
        assert not self.present and not self.num_bytes

    def _prefetch(self, number: int, task: Task, line: Sequence[Use], must: int) -> None:
        """Fetches the parts for this task and for the start of the next, and keeps the link busy.

        While the driver waits here, the device still has the previous task to compute.
        """
        while self.room < 0:
            self._wait_for_oldest()
        # The driver waits for a task two tasks later, even if its memory isn't needed yet. This
        # limits how far the driver runs ahead of the device.
        for before in sorted([at for at in self.used if at < number - 1]):
            self.wait(before)
        # By the clock, these parts have arrived in the host, so the wait is free. The loop below
        # waits for later ones, one by one, when their memory is needed.
        for at in [at for at in self.leaving if at[0] < number]:
            if self.clock.landed.get(at, 0.0) <= self.clock.driver:
                self.land(*at)
        # The next call's copies start only after this task is computed, so the link needs work
        # until then. Further copies would queue up, and the GPU's copy streams don't keep order: a
        # later copy might run first.
        seconds = sum([computation.seconds for computation in task.computations])
        enough = self.clock.over([use.key for use in task.uses], seconds)
        at, end, present = self.prefetch_distance, len(line), self.present
        sizes, reserved = self.workload.bytes_of, self.reserved
        # Without calls of `_missing` and `room`, because most of a search's time passes here.
        while at < end:
            use = line[at]
            key, creates = use.key, use.creates
            if creates or key not in present:
                size = 0 if key in reserved and not creates else sizes[key]
                while size > self.limit - self.num_bytes - self.reserved_bytes and at < must:
                    self._wait_for_oldest()
                # No use is skipped: a later, smaller part would take the memory that an earlier one
                # waits for.
                if size > self.limit - self.num_bytes - self.reserved_bytes:
                    break
                if creates:
                    self.reserve(key)
                # A reserved part that doesn't outlast a step will be created on the device.
                elif key.kind in LASTING or key not in reserved:
                    if at >= must and self.clock.inward_until(key) > enough:
                        break
                    self.fetch(key, number)
            at += 1
        self.prefetch_distance = at

    def _missing(self, use: Use) -> int:
        """Bytes that must be free for a use."""
        # A created part needs its own memory even if an older one is present, such as the previous
        # step's gradient before its update has been computed.
        known = use.key in self.reserved or use.key in self.present
        return 0 if known and not use.creates else self.workload.bytes_of[use.key]

    def _wait_for_oldest(self) -> None:
        oldest = min((*self.used, *(task for task, _ in self.leaving)), default=None)
        assert oldest is not None, "the limit is below the least that a list needs"
        # A copy to the host follows its task's computations, so it never ends before them.
        if oldest in self.used:
            self.wait(oldest)
        else:
            self.land(*next(at for at in self.leaving if at[0] == oldest))

    def _stays(self, key: Key, line: Sequence[Use], next_use: int | None) -> bool:
        """Whether a part that is no resident stays on the device until its next use.

        Args:
            key: The part.
            line: The uses of a list in their order.
            next_use: The part's next use, by its number in the line; None if there is none.
        """
        if next_use is None:
            return False
        # Parts within reach are kept: their next uses come before all uses beyond the reach.
        if next_use < self.prefetch_distance or key.kind is not Kind.GRADIENT:
            return next_use < self.prefetch_distance
        # An evicted sum of gradients would cost an offload and a fetch. It stays if all parts that
        # are used before it fit beside it, so that it delays none of them.
        room, known = self.room, set[Key]()
        for at in range(self.prefetch_distance, next_use):
            use = line[at]
            if use.creates or use.key not in known:
                room -= self._missing(use)
                known.add(use.key)
            if room < 0:
                return False
        return True


def _first_from(places: Sequence[int], start: int) -> int | None:
    """The first of some ascending numbers that is not below a start."""
    at = bisect_left(places, start)
    return places[at] if at < len(places) else None


def _largest(one: dict[_At, int], other: dict[_At, int]) -> dict[_At, int]:
    return {at: max(one.get(at, 0), other.get(at, 0)) for at in {**one, **other}}
