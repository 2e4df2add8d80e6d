"""Lays down the instructions of a list of tasks within a byte limit.

Parts are fetched in the order of their use, as far ahead as the limit allows and the link needs to
be busy, and stay as long as their next use lies within that reach. Parts that a task has to have
get their room by waiting; parts further ahead are fetched into room that is free already.

An evaluation of four stages, each of which computes for 6 seconds with masters of 4 bytes, over a
link that takes a second for a byte; to the right are the bytes on the device:

    FETCH M0     4   task 0 needs it,
    FETCH M1     8   and task 1 needs this when it begins: what one task computes hides no more
    FORWARD 0    8   from 4 to 10 seconds
    RELEASE M0   8   its room is not free before task 0 has been computed
    FETCH M2    12   from 10 to 14, while task 1 computes until 16;
    FETCH M3    16   one more keeps the link busy until then, and a further one would wait in line
    FORWARD 1   16
    RELEASE M1  16
    WAIT 0      12   the driver is never more than two tasks ahead, and M0's room is free now
    FORWARD 2   12
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from megatrain_jax._src.common.keys import LASTING, Key
from megatrain_jax._src.schedule.clock import Clock
from megatrain_jax._src.schedule.instructions import Instruction, Op
from megatrain_jax._src.schedule.tasks import Computation, Task, Use
from megatrain_jax._src.schedule.workload import Workload

_At = TypeVar("_At")


@dataclass(kw_only=True)
class Residency:
    """The parts on the device while instructions are laid down, and how many bytes they take.

    Attributes:
        workload: The sizes.
        limit: Bytes that may be on the device.
        resident: Parts that stay.
        clock: The estimate of when instructions happen.
        present: Parts on the device that the engine may use.
        dirty: Parts on the device whose host copy is not current.
        reserved: Parts to come that have their room, and how many of each: two of a gradient whose
            room for this step and for the next one is promised.
        reserved_bytes: Bytes of that room.
        used: By task, bytes that are free once it has been computed.
        leaving: By task and part, in the order of their dispatch, bytes that are free once the
            part has landed in the host.
        num_bytes: Bytes on the device.
        reach: The number of uses, from the start of the list at hand, that have been fetched or
            have their room.
        instructions: The instructions laid down since the start of the list at hand.
        ledger: Bytes on the device after each instruction.
        wave_over: By wave of the list at hand, when its last stage so far has been computed.
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
    reach: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    ledger: list[int] = field(default_factory=list)
    wave_over: dict[int, float] = field(default_factory=dict)

    def next_step(self, num_tasks: int, reach: int) -> "Residency":
        """A copy of this state for the step that follows one of `num_tasks` tasks.

        Args:
            num_tasks: By how much the numbers of earlier tasks go down, so that -1 is the last.
            reach: The number of uses of the new step that have been fetched or have their room.
        """
        return replace(
            self,
            clock=self.clock.next_step(num_tasks),
            present=set(self.present),
            dirty=set(self.dirty),
            reserved=Counter(self.reserved),
            used={task - num_tasks: size for task, size in self.used.items()},
            leaving={(i - num_tasks, key): size for (i, key), size in self.leaving.items()},
            reach=reach,
            instructions=[],
            ledger=[],
            wave_over={},
        )

    def joined(self, other: "Residency") -> "Residency":
        """A state from which instructions serve after this one and after another one.

        The same parts are present in both. A part that is dirty or on its way to the host in one of
        them counts as such, and the clock is the other one's.
        """
        # Each step ends with the same uses reached, so it leaves the same parts present. But one
        # may be clean after a cold step and dirty after a steady one: to offload it in either case
        # costs a copy at most, to release it would lose an update.
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

    def holds_no_more_than(self, other: "Residency") -> bool:
        """Whether nothing is dirty or on its way here that isn't in the other state."""
        return (
            self.dirty <= other.dirty
            and all(size <= other.used.get(task, 0) for task, size in self.used.items())
            and all(size <= other.leaving.get(at, 0) for at, size in self.leaving.items())
        )

    @property
    def room(self) -> int:
        """Bytes that nothing occupies or has been promised; below zero after some `joined`."""
        return self.limit - self.num_bytes - self.reserved_bytes

    # ---- instructions

    def wait(self, task: int) -> None:
        """Lays down a wait until a task has been computed, which frees what it dropped."""
        self.num_bytes -= self.used.pop(task)
        self.clock.wait(task)
        self._emit(Instruction(op=Op.WAIT, task=task))

    def land(self, task: int, key: Key) -> None:
        """Lays down a wait until a part that a task offloaded is in the host, which frees it."""
        self.num_bytes -= self.leaving.pop((task, key))
        self.clock.land(task, key)
        self._emit(Instruction(op=Op.LAND, key=key, task=task))

    def fetch(self, key: Key, task: int) -> None:
        """Lays down a copy of a part to the device, before a task computes."""
        self.present.add(key)
        self._use_reservation(key)
        self.num_bytes += self.workload.size(key)
        self.clock.fetch(key, self.workload.size(key))
        self._emit(Instruction(op=Op.FETCH, key=key, task=task))

    def compute(self, computation: Computation, task: int) -> None:
        """Lays down one computation of a task."""
        for key in computation.creates:
            self.present.add(key)
            self._use_reservation(key)
            self.num_bytes += self.workload.size(key)
        assert self.present.issuperset(computation.touches)
        self.dirty.update(computation.dirties)
        for key in computation.kills:
            self.present.discard(key)
            self.dirty.discard(key)
            # Its memory is free once the device has got there, which only a WAIT tells.
            self.used[task] = self.used.get(task, 0) + self.workload.size(key)
        seconds, on_link = computation.seconds, computation.seconds_on_link
        self.clock.compute(computation.touches, seconds, task, on_link)
        if computation.instruction.stage is not None:
            self.wave_over[computation.instruction.wave] = self.clock.device
        self._emit(computation.instruction)

    def evict(self, key: Key, task: int) -> None:
        """Drops a part after its last use in a task, to the host if that has no current copy."""
        size = self.workload.size(key)
        self.present.discard(key)
        # Either way the bytes still count: the computations before are only dispatched, so a copy
        # leaves once they are over, and not even a dropped array is free before.
        if key in self.dirty:
            self.dirty.discard(key)
            self.leaving[task, key] = size
            self.clock.offload(key, size, task)
            self._emit(Instruction(op=Op.OFFLOAD, key=key, task=task))
        else:
            self.used[task] = self.used.get(task, 0) + size
            self._emit(Instruction(op=Op.RELEASE, key=key, task=task))

    def reserve(self, key: Key) -> None:
        """Promises room to a part that is to come."""
        self.reserved[key] += 1
        self.reserved_bytes += self.workload.size(key)

    def _use_reservation(self, key: Key) -> None:
        if key not in self.reserved:
            return
        self.reserved_bytes -= self.workload.size(key)
        self.reserved[key] -= 1
        if not self.reserved[key]:
            del self.reserved[key]

    def _emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        # `joined` counts all that either of two steps may have left, which can be more than the
        # limit; each step alone kept to it, so what is really there never exceeds it.
        self.ledger.append(min(self.num_bytes, self.limit))

    # ---- lists

    def run(self, tasks: Sequence[Task], later: Iterable[Task], boundary: int) -> None:
        """Lays down what tasks need; on return, `boundary` uses of `later` have their room.

        Args:
            tasks: The tasks of a list.
            later: The tasks that follow.
            boundary: The number of uses in `later` that are reached at the end, and no more.
        """
        line = [use for task in (*tasks, *later) for use in task.uses]
        starts = [0]
        for task in tasks:
            starts.append(starts[-1] + len(task.uses))
        # Every step has to end with the same uses reached, whatever the clock says: only then does
        # the list of a steady step serve after itself.
        line = line[: starts[-1] + boundary]
        # A use that creates its part needs no earlier copy, so nothing is kept for it.
        needs: dict[Key, list[int]] = {}
        for at, use in enumerate(line):
            if not use.creates:
                needs.setdefault(use.key, []).append(at)
        for number, task in enumerate(tasks):
            last = number == len(tasks) - 1
            # The parts that the next task needs to begin come while this one computes, at the
            # latest. `least_bytes` counts their room: to wait for earlier tasks is always enough.
            early = boundary if last else tasks[number + 1].num_early
            self._make_ready(number, task, line, starts[number + 1] + early)
            if last:  # a first step may not use all that stays
                absent = self.resident - self.present
                for key in sorted(key for key in absent if key.kind in LASTING):
                    self.fetch(key, number)
            for at, computation in enumerate(task.computations):
                self.compute(computation, number)
                for key in computation.touches:
                    if task.last_touch[key] == at and key in self.present:
                        if not self._is_needed(needs, key, starts[number + 1]):
                            self.evict(key, number)

    def run_to_rest(self, tasks: Sequence[Task], spare: int = 0) -> None:
        """Lays down the instructions of tasks after which nothing is on the device.

        Args:
            tasks: The tasks.
            spare: Bytes of the limit that no task of them needs for itself: parts that are here
                wait for their use in that room.
        """
        # Nothing stays any more, so rooms promised to the next step's parts are given up.
        self.resident = frozenset()
        self.reserved.clear()
        self.reserved_bytes = 0
        # Uses count as reached up to the first whose part isn't here. Of the parts that are first
        # used beyond it some stay as well; the others leave now, and come again.
        uses = [use.key for task in tasks for use in task.uses]
        here = (at for at, key in enumerate(uses) if key not in self.present)
        self.reach = next(here, len(uses))
        # Gradients come first: each that leaves takes room in the host that no state at rest has.
        # The reached ones are gone by the time that a task has to wait for room.
        leave = self.present.difference(uses[: self.reach])
        beyond = [key for key in dict.fromkeys(uses[self.reach :]) if key in leave]
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

    def _make_ready(self, number: int, task: Task, line: Sequence[Use], must: int) -> None:
        """Fetches what the task and the start of the next one use, and what keeps the link busy.

        The device always has the task before this one to compute while the driver waits here.
        """
        while self.room < 0:
            self._wait_for_oldest()
        # Memory that a task left is asked for two tasks later, not as late as it is needed: this
        # also bounds how far the driver runs ahead of the device.
        for before in sorted(at for at in self.used if at < number - 1):
            self.wait(before)
        # By the clock these have landed, so the wait costs nothing and gives room; the others are
        # waited for below, one by one, where their room is needed.
        for at in [at for at in self.leaving if at[0] < number]:
            if self.clock.landed.get(at, 0.0) <= self.clock.driver:
                self.land(*at)
        # Parts that the next call fetches can't come before this task is computed, so the link
        # needs work until then. More would only wait in line, where copy streams overtake one
        # another: the GPU may take a late copy first.
        seconds = sum(computation.seconds for computation in task.computations)
        enough = self.clock.over((use.key for use in task.uses), seconds)
        while self.reach < len(line):
            use = line[self.reach]
            size = self._missing(use)
            while size > self.room and self.reach < must:
                self._wait_for_oldest()
            ahead = self.reach >= must and self._has_to_come(use)
            # Uses are reached in their order and none is passed over: a later, smaller part would
            # take the room that a nearer one waits for.
            if size > self.room or (ahead and self.clock.inward_until(use.key) > enough):
                break
            if use.creates:
                self.reserve(use.key)
            elif self._has_to_come(use):
                self.fetch(use.key, number)
            self.reach += 1

    def _missing(self, use: Use) -> int:
        """Bytes that have to become free for a use."""
        # A part that is created needs room of its own even if an older one is present, as the
        # gradient of the step before is until its update has been computed.
        known = use.key in self.reserved or use.key in self.present
        return 0 if known and not use.creates else self.workload.size(use.key)

    def _has_to_come(self, use: Use) -> bool:
        """Whether a use needs a copy; what has its room and doesn't last is still to be made."""
        to_be_made = use.key in self.reserved and use.key.kind not in LASTING
        return not use.creates and use.key not in self.present and not to_be_made

    def _wait_for_oldest(self) -> None:
        oldest = min((*self.used, *(task for task, _ in self.leaving)), default=None)
        assert oldest is not None, "the limit is below the least that a list needs"
        # A copy to the host follows its task's computations, so it is never over before them.
        if oldest in self.used:
            self.wait(oldest)
        else:
            self.land(*next(at for at in self.leaving if at[0] == oldest))

    def _is_needed(self, needs: dict[Key, list[int]], key: Key, start: int) -> bool:
        if key in self.resident:
            return True
        # Kept is what is used soonest: all uses within reach are nearer than those beyond it.
        places = needs.get(key, [])
        at = bisect_left(places, start)
        return at < len(places) and places[at] < self.reach


def _largest(one: dict[_At, int], other: dict[_At, int]) -> dict[_At, int]:
    return {at: max(one.get(at, 0), other.get(at, 0)) for at in {**one, **other}}
