"""Writes the instructions of steps for one choice of residents and residuals, and times them.

This writes a first step, and further steps until one of them leaves no more on the device than it
started with. The instructions of that step are valid after every step. Of a step with many waves,
only three are written: the first, a middle one, and the last. They give the time of all waves::

    wave      ends, of 3 waves    ends, of 8 waves
    first     10 s                10 s
    middle    16 s                46 s: six middle waves, 6 s each
    last      23 s                53 s
"""

import functools
import math
from dataclasses import dataclass, replace

from megatrain_jax._src.common.keys import LASTING, Key
from megatrain_jax._src.common.remembering import IdentityKey, remembered
from megatrain_jax._src.engine.schedule.clock import Clock
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.memory_demand import least_of, next_uses_that_fit
from megatrain_jax._src.engine.schedule.residency import Residency
from megatrain_jax._src.engine.schedule.tasks import TaskLists
from megatrain_jax._src.engine.schedule.timeline import replay
from megatrain_jax._src.engine.schedule.transient_host_bytes import (
    TransientHostBytes,
    find_waiting,
    in_flight_bytes,
)
from megatrain_jax._src.engine.schedule.workload import Workload

# The minimum number of steps until the clock's times repeat; with waves, one step has this effect.
_MIN_STEPS = 2
# Relative difference up to which two steps count as equally long.
_SETTLED = 1e-3
# Maximum number of repetitions of a step until two in a row are equally long.
_MOST_REPEATED = 6
# Copies may take longer than estimated by this fraction.
SLOWER = 0.03
# Number of written steps that a search keeps for reuse.
_MOST_REMEMBERED = 256


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A cold and a steady step with their instructions, for one choice, and their time.

    Attributes:
        lists: The tasks.
        limit: Maximum bytes on the device.
        resident: Parts that are never evicted.
        cold: The state after a step that started at rest, with its instructions.
        steady: The state after a step that followed a step, with its instructions.
        end: A state that covers both; instructions that start from it are valid after either step.
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
        """The state after bringing everything to rest, with the instructions for it."""
        flush = self.end.next_step(0, self.end.prefetch_distance)
        flush.run_to_rest(self.lists.flush, self.limit - least_of(self.workload, self.lists.flush))
        return flush

    @functools.cached_property
    def transient(self) -> TransientHostBytes:
        """Host bytes in addition to the state at rest, by part."""
        lists = self.lists
        cold = lists.cold, self.cold.instructions
        steady = lists.steady, self.steady.instructions
        flush = lists.flush, self.flush.instructions
        # A first step may prefetch less than later steps, and a flush offloads parts to the host.
        # So the lists include a flush after a first step, and one after later steps.
        waiting = find_waiting(self.workload, (cold, flush, cold, steady, steady, flush))
        in_flight = in_flight_bytes(self.workload, self.steady.instructions)
        return replace(waiting, in_flight=in_flight)

    @functools.cached_property
    def copied(self) -> tuple[int, float]:
        """Bytes that a steady step copies, in both directions, and the copies' seconds in all."""
        num_bytes, seconds, link = 0, 0.0, self.workload.costs.link
        for instruction in self.steady.instructions:
            key, task = instruction.key, instruction.task
            if instruction.op in (Op.FETCH, Op.OFFLOAD) and key is not None and task is not None:
                # Evictions before the first task have the task number -1.
                size = self.lists.times(max(0, task)) * self.workload.size(key)
                num_bytes += size
                seconds += size * max(link.inward, link.outward, link.shared)
        return num_bytes, seconds

    @functools.cached_property
    def cautious_seconds(self) -> float:
        """Seconds of a step if copies take somewhat longer, or delay computations."""
        return self.seconds + SLOWER * self.copied[1]

    def fits_host(self, room: float) -> bool:
        """Whether `room` host bytes suffice in addition to the state at rest."""
        return math.isinf(room) or self.transient.total <= room

    @property
    def workload(self) -> Workload:
        """The workload of the tasks."""
        return self.lists.workload


def write_steps(lists: TaskLists, limit: int, resident: frozenset[Key]) -> Steps:
    """The steps of one limit and one set of resident parts."""

    def key() -> tuple[IdentityKey, int, frozenset[Key]]:
        return IdentityKey(lists), limit, resident

    return remembered("steps", key, lambda: _write_steps(lists, limit, resident), _MOST_REMEMBERED)


def _write_steps(lists: TaskLists, limit: int, resident: frozenset[Key]) -> Steps:
    num_tasks = len(lists.steady)
    boundary = next_uses_that_fit(lists, limit, resident)
    cold = at_rest(lists, limit, resident)
    cold.run(lists.cold, lists.steady, boundary)
    # The parts that a step leaves dirty or on their way may depend on the previous step, but the
    # instructions must be valid after any step. So each step starts from the union of all earlier
    # leftovers, until one leaves no more than that. This ends, because the union only grows and the
    # number of parts is finite.
    begin, covered, num_steps, seconds = cold.next_step(num_tasks, boundary), False, 0, math.nan
    least = _MIN_STEPS if lists.workload.waves == 1 else 1
    while not covered or num_steps < least:
        steady = begin.next_step(0, boundary)
        steady.run(lists.steady, lists.steady, boundary)
        end = steady.next_step(num_tasks, boundary)
        # The wait for a step's batch is part of the step before it.
        before, seconds = seconds, end.clock.device - begin.clock.device + _left_out(lists, steady)
        most = begin.joined(end)
        covered, num_steps = most.is_covered_by(begin), num_steps + 1
        begin = most
    if num_steps > 1 and not math.isclose(before, seconds, rel_tol=_SETTLED):
        # Written steps may alternate between two lists of instructions, because a list depends on
        # the times at which the step before it ended. A run repeats the last list.
        seconds = _repeated_seconds(lists, steady, begin.clock) + _left_out(lists, steady)
    return Steps(
        lists=lists,
        limit=limit,
        resident=resident,
        cold=cold,
        steady=steady,
        end=begin,
        seconds=seconds,
    )


def _repeated_seconds(lists: TaskLists, steady: Residency, clock: Clock) -> float:
    """Seconds of a steady step if the steps before it have the same instructions."""
    clock, seconds = clock.next_step(0), math.nan  # a copy, since the caller's clock goes on
    for _ in range(_MOST_REPEATED):
        start = clock.device
        replay(clock, lists.workload, steady.instructions, lists.steady)
        clock = clock.next_step(len(lists.steady))
        before, seconds = seconds, clock.device - start
        if math.isclose(before, seconds, rel_tol=_SETTLED):
            break
    return seconds


def _left_out(lists: TaskLists, steady: Residency) -> float:
    """Seconds of the waves that the lists omit, which are equal to the second one."""
    if not lists.left_out:
        return 0.0
    return lists.left_out * (steady.wave_over[1] - steady.wave_over[0])


def at_rest(lists: TaskLists, limit: int, resident: frozenset[Key]) -> Residency:
    """The state of an empty device."""
    clock = Clock(costs=lists.workload.costs, on_disk=lists.workload.on_disk)
    device = Residency(workload=lists.workload, limit=limit, resident=resident, clock=clock)
    # Resident state has its memory reserved from the start, and is fetched at its first use.
    # Passing residents get their memory when they are created.
    for key in resident:
        if key.kind in LASTING:
            device.reserve(key)
    return device
