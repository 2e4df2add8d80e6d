"""The steps of a choice of residents and residuals, laid down to see how long they take.

A first step, and as many further ones as it takes until one ends with no more on the device than
it has started from: the instructions of that one serve after every step. Of a step of many waves,
three are laid down, the first one, one between and the last one, which tell how long all take::

    waves laid down   over at   of 8 waves
    0                 10 s      10 s
    1                 16 s      46 s: six of them between, 6 s each
    2                 23 s      53 s
"""

import functools
import math
from dataclasses import dataclass, replace

from megatrain_jax._src.common.keys import LASTING, Key
from megatrain_jax._src.schedule.clock import Clock
from megatrain_jax._src.schedule.instructions import Op
from megatrain_jax._src.schedule.passing import Passing, find_waiting, in_flight_bytes
from megatrain_jax._src.schedule.residency import Residency
from megatrain_jax._src.schedule.room import least_of, next_uses_that_fit
from megatrain_jax._src.schedule.tasks import TaskLists
from megatrain_jax._src.schedule.workload import Workload

# The first lists only bring the clock into its rhythm, as the first waves of a step do.
_MIN_STEPS = 3
_MIN_STEPS_OF_WAVES = 1


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of a choice of residents and residuals, laid down to see how long they take.

    Attributes:
        lists: The tasks.
        limit: Bytes that may be on the device.
        resident: Parts that stay.
        cold: The state after a step that started at rest, with its instructions.
        steady: The same after a step that followed another one.
        end: A state from which instructions serve after either.
        seconds: Estimate of a steady step's time.
    """

    lists: TaskLists
    limit: int
    resident: frozenset[Key]
    cold: Residency
    steady: Residency
    end: Residency
    seconds: float

    @functools.cached_property
    def flush(self) -> Residency:
        """The state after all was brought to rest, with the instructions."""
        flush = self.end.next_step(0, self.end.reach)
        flush.run_to_rest(self.lists.flush, self.limit - least_of(self.workload, self.lists.flush))
        return flush

    @functools.cached_property
    def passing(self) -> Passing:
        """Host bytes beside the state at rest, by part."""
        lists = self.lists
        cold = lists.cold, self.cold.instructions
        steady = lists.steady, self.steady.instructions
        flush = lists.flush, self.flush.instructions
        # A first step may have less room ahead than the others have, and emptying the device takes
        # to the host what that has no room to keep: after a first step, or after others.
        waiting = find_waiting(self.workload, (cold, flush, cold, steady, steady, flush))
        in_flight = in_flight_bytes(self.workload, self.steady.instructions)
        return replace(waiting, in_flight=in_flight)

    def fits_host(self, room: float) -> bool:
        """Whether the host has so much room beside the state at rest."""
        return math.isinf(room) or self.passing.total <= room

    @property
    def workload(self) -> Workload:
        """The workload of the tasks."""
        return self.lists.workload


def lay_down(lists: TaskLists, limit: int, resident: frozenset[Key]) -> Steps:
    """The steps of one limit and one set of resident parts."""
    num_tasks = len(lists.steady)
    boundary = next_uses_that_fit(lists, limit, resident)
    cold = at_rest(lists, limit, resident)
    cold.run(lists.cold, lists.steady, boundary)
    # The parts that a step leaves dirty or on their way may depend on the step before. The
    # instructions have to serve after any, so steps are repeated until one that starts from the
    # most that any left ends with no more. Their starts only grow, within all parts there are.
    begin, covered, num_steps = cold.next_step(num_tasks, boundary), False, 0
    least = _MIN_STEPS if lists.workload.waves == 1 else _MIN_STEPS_OF_WAVES
    while not covered or num_steps < least:
        steady = begin.next_step(0, boundary)
        steady.run(lists.steady, lists.steady, boundary)
        end = steady.next_step(num_tasks, boundary)
        seconds = steady.clock.device - begin.clock.device + _left_out(lists, steady)
        most = begin.joined(end)
        covered, num_steps = most.holds_no_more_than(begin), num_steps + 1
        begin = most
    return Steps(
        lists=lists,
        limit=limit,
        resident=resident,
        cold=cold,
        steady=steady,
        end=begin,
        seconds=seconds,
    )


def _left_out(lists: TaskLists, steady: Residency) -> float:
    """Seconds of the waves that lists leave out, which are like the second one."""
    if not lists.left_out:
        return 0.0
    return lists.left_out * (steady.wave_over[1] - steady.wave_over[0])


def at_rest(lists: TaskLists, limit: int, resident: frozenset[Key]) -> Residency:
    """The state of a device that has nothing yet."""
    clock = Clock(costs=lists.workload.costs)
    device = Residency(workload=lists.workload, limit=limit, resident=resident, clock=clock)
    # Their room is theirs from the start, though they come when they are first used; the other
    # residents are made, and get theirs then.
    for key in resident:
        if key.kind in LASTING:
            device.reserve(key)
    return device


def copies(steps: Steps) -> tuple[int, float]:
    """Bytes that a steady step copies, both ways, and the seconds of one copy after the other."""
    num_bytes, seconds = 0, 0.0
    for instruction in steps.steady.instructions:
        key, task = instruction.key, instruction.task
        if instruction.op in (Op.FETCH, Op.OFFLOAD) and key is not None and task is not None:
            # What comes to rest before the first task has the number -1.
            size = steps.lists.times(max(0, task)) * steps.workload.size(key)
            link = steps.workload.costs.link_of(key)
            num_bytes += size
            seconds += size * max(link.inward, link.outward, link.shared)
    return num_bytes, seconds
