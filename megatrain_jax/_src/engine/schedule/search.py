"""Searches for the fastest schedule of a training step: the order of its copies and computations.

The input is a workload: the tasks of a step, their bytes and their times. The output is an ordered
list of instructions that the engine follows literally. So tests and plans can read a step without
running it.

Two decisions are open: the groups that stay on the device for good, and the stages that save
residuals. The search writes instructions for a few choices and takes the fastest by the clock's
estimate, in which copies take 5% longer than their rates say. If host memory is short, only choices
with room for their waiting gradients, activations and residuals count.

Writing instructions takes long, so a choice is skipped if its computations alone take as long as
the best step so far. Numbers of residents and of stages with residuals are tried in order, only as
long as each is better than the one before. Steps that hardly wait need no other residents.

Example: 18 blocks with 12 bytes of state and 4 of gradients each lie between two ends that are four
times as large. They need at least 84 bytes, and with 332 bytes nothing moves. With a budget of 208:

    groups that stay    seconds    bytes moved
    8                       316            328   chosen: its computations alone take 316
    6                       316            380
    2 (the ends)            316            464
    none                    376            688

Nine groups don't fit, because streaming the remaining groups needs memory as well.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.common.remembering import remembering
from megatrain_jax._src.engine.schedule.choices import Choice, Family, find_families
from megatrain_jax._src.engine.schedule.memory_demand import least_bytes, most_that_fit
from megatrain_jax._src.engine.schedule.schedule import BudgetError, Schedule
from megatrain_jax._src.engine.schedule.tasks import build_task_lists
from megatrain_jax._src.engine.schedule.timed_steps import Steps, at_rest, write_steps
from megatrain_jax._src.engine.schedule.transient_host_bytes import find_waiting
from megatrain_jax._src.engine.schedule.workload import Workload

# The number of resident counts to try at most, of all that fit.
_NUM_CANDIDATES = 8
# Steps are equally fast if their times differ by less than this fraction.
_ALIKE = 0.005


@remembering()
def find_schedule(
    workload: Workload,
    budget: int | None,
    selective: Workload | None = None,
    host_room: float = math.inf,
) -> Schedule:
    """Finds the fastest schedule of a training step within a budget of device memory.

    Args:
        workload: The step; the search itself decides on saved residuals.
        budget: Maximum bytes of parameters, optimizer state, gradients, residuals and activations
            on the device. None gives the smallest schedule.
        selective: The same step with only the costliest residuals of each stage, which may wait
            in the host. It is tried if the device can't hold all residuals of all stages.
        host_room: Host bytes available in addition to the state at rest. If no schedule keeps to
            them, the result is a schedule that takes the fewest.

    Returns:
        The schedule with the smallest cautious estimate of its time. The order of computations
        never depends on the budget.

    Raises:
        BudgetError: The budget is below the smallest schedule's peak.
    """
    nothing_kept = Choice(step=workload)
    smallest = least_bytes(nothing_kept.lists, frozenset())
    room = _Room(device=smallest if budget is None else budget, host=host_room)
    if room.device < smallest:
        raise BudgetError(budget, smallest)
    families = [Family(of=lambda _: nothing_kept, counts=[0])]
    if room.device > smallest:
        families = [*find_families(workload, selective, room.device), *families]
    found = _Search(room)
    found.try_families(families)
    return _finished(found.best, smallest)


@remembering()
def reschedule(
    workload: Workload, schedule: Schedule, budget: int | None, host_room: float = math.inf
) -> Schedule:
    """Finds the fastest schedule with the computations of an existing one, for other costs.

    The same stages save the same residuals, so that results are the same to the bit, and no further
    function has to be compiled. Only the order and the time of copies change.

    Args:
        workload: The workload that the existing schedule was made for, with other costs.
        schedule: The existing schedule.
        budget: See `find_schedule`.
        host_room: See `find_schedule`; the existing schedule's host bytes are available in any
            case.
    """
    room = _Room(
        device=schedule.smallest_bytes if budget is None else budget,
        host=max(host_room, schedule.transient.total),
    )
    residuals = {Key(Kind.RESIDUALS, stage) for stage in schedule.kept}
    num_offloadable = len(residuals - schedule.resident)
    choice = Choice(step=workload, kept=schedule.kept, num_offloadable=num_offloadable)
    found = _Search(room)
    found.note(choice, write_steps(choice.lists, schedule.limit, schedule.resident))
    found.try_choice(choice)
    return _finished(found.best, schedule.smallest_bytes)


@dataclass(frozen=True, kw_only=True)
class _Room:
    """The bytes available on the device, and in the host in addition to the state at rest."""

    device: int
    host: float


class _Search:
    """The best steps of all that were tried."""

    def __init__(self, room: _Room):
        self._room = room
        self._best: tuple[tuple[float, float], Steps, Choice] | None = None

    @property
    def best(self) -> Steps:
        """The fastest steps that the host has room for, or the steps that need the least of it."""
        assert self._best is not None
        return self._best[1]

    def note(self, choice: Choice, steps: Steps) -> tuple[float, float]:
        """Takes steps if they are the best; returns their rank, which is low for good ones."""
        lacking = 0.0 if steps.fits_host(self._room.host) else float(steps.transient.total)
        rank = lacking, steps.cautious_seconds
        if self._best is None or rank < self._best[0]:
            self._best = rank, steps, choice
        return rank

    def try_families(self, families: Iterable[Family]) -> None:
        """Tries the choices of families, of each as long as they become better."""
        for family in families:
            before = math.inf, math.inf
            for choice in map(family.of, family.counts):
                # A choice that computes for longer than the best step takes can't be better.
                if self._computes_for_too_long(choice):
                    continue
                rank = self.try_choice(choice)
                if self._is_done(rank, before):
                    break
                before = rank
            self._try_between(family)

    def _computes_for_too_long(self, choice: Choice) -> bool:
        if self._best is None or self._best[0][0]:
            return False
        return choice.computing >= self._best[0][1]

    def _try_between(self, family: Family) -> None:
        """Tries more stages with residuals than in the best choice, if it is one of a family."""
        if self._best is None or len(self._best[2].kept) not in family.counts:
            return
        kept = len(self._best[2].kept)
        above = min((count for count in family.counts if count > kept), default=kept)
        if family.of(kept).kept != self._best[2].kept:
            return

        def computing(count: int) -> float:
            return family.of(count).computing

        while above > kept + 1 and computing(above) < (1 - _ALIKE) * computing(kept):
            count, before = (kept + above) // 2, self.best
            self.try_choice(family.of(count))
            kept, above = (kept, count) if self.best is before else (count, above)

    def try_choice(self, choice: Choice) -> tuple[float, float]:
        """Tries a choice with numbers of resident parts, from the most on; returns the best rank.

        If the step waits for copies, masters stay first, because this saves more copies per byte;
        keeping whole groups needs the least host memory for arrays in flight. If the host lacks
        memory, activations stay first.
        """
        steps = next(_by_residents(choice, self._room))
        best = self.note(choice, steps)
        if not best[0] and not self._waits(choice, steps):
            return best
        others = [dataclasses.replace(choice, spares_host=True)] if best[0] else []
        if choice.step.waves == 1 and self._waits(choice, steps):
            others.append(dataclasses.replace(choice, masters_first=True))
        for other in others or [choice]:
            before = math.inf, math.inf
            for steps in _by_residents(other, self._room):
                rank = self.note(other, steps)
                best = min(best, rank)
                if self._is_done(rank, before) or not (rank[0] or self._waits(other, steps)):
                    break
                before = rank
        return best

    def _is_done(self, rank: tuple[float, float], before: tuple[float, float]) -> bool:
        """Whether candidates in an order have passed the best one."""
        return rank >= before

    def _waits(self, choice: Choice, steps: Steps) -> bool:
        """Whether other residents could make a step faster."""
        return steps.seconds > (1 + _ALIKE) * choice.computing


def _by_residents(choice: Choice, room: _Room) -> Iterator[Steps]:
    """The steps of a choice, for several numbers of resident parts, from the most on."""
    lists, units, limit = choice.lists, choice.units, room.device
    # With all units resident nothing moves, so a higher limit would not help.
    if limit >= (needed := choice.least_bytes(len(units))):
        yield write_steps(lists, needed, choice.residents(len(units)))
        return
    # The bytes needed grow with the number of units, so `most_that_fit` can use bisection.
    most = most_that_fit(len(units), lambda count: choice.least_bytes(count) <= limit)
    shares = range(_NUM_CANDIDATES, -1, -1)
    # With fewer residents more bytes move, but more of them in advance.
    for count in dict.fromkeys(round(most * share / _NUM_CANDIDATES) for share in shares):
        yield write_steps(lists, limit, choice.residents(count))


def whole_schedule(workload: Workload, schedule: Schedule) -> Schedule:
    """The schedule with the instructions of all waves; a search writes only three waves.

    Args:
        workload: The workload that the schedule was found for.
        schedule: The schedule.
    """
    if not schedule.left_out:
        return schedule
    lists = build_task_lists(dataclasses.replace(workload, kept=schedule.kept))
    steps = write_steps(lists, schedule.limit, schedule.resident)
    return _finished(steps, schedule.smallest_bytes)


def _finished(steps: Steps, smallest: int) -> Schedule:
    """The schedule of the chosen steps, with the instructions of flush and evaluation."""
    lists, flush = steps.lists, steps.flush
    evaluation = at_rest(lists, steps.limit, frozenset())
    evaluation.run_to_rest(lists.evaluation)
    runs = {"cold": steps.cold, "steady": steps.steady, "flush": flush, "evaluation": evaluation}
    return Schedule(
        cold=tuple(steps.cold.instructions),
        steady=tuple(steps.steady.instructions),
        flush=tuple(flush.instructions),
        evaluation=tuple(evaluation.instructions),
        num_tasks=len(lists.steady),
        ledger={name: tuple(run.ledger) for name, run in runs.items()},
        peak_bytes=max((size for run in runs.values() for size in run.ledger), default=0),
        transient=steps.transient,
        evaluation_bytes=find_waiting(
            lists.workload, [(lists.evaluation, evaluation.instructions)]
        ).total,
        resident=steps.resident,
        kept=lists.workload.kept,
        selective=lists.workload.selective,
        seconds=steps.seconds,
        cautious_seconds=steps.cautious_seconds,
        smallest_bytes=smallest,
        limit=steps.limit,
        left_out=lists.left_out,
    )
