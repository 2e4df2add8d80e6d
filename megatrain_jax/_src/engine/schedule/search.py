"""Searches for the fastest schedule of a training step: the order of its copies and computations.

The input is a workload: the tasks of a step, their bytes and their times. The output is an ordered
list of instructions that the engine follows literally. So tests and plans can read a step without
running it.

Two decisions are open: the groups that stay on the device for good, and the stages that save
residuals. The search writes instructions for several choices and takes the fastest by the clock's
estimate. Among choices of about the same time, it takes the one that moves the fewest bytes. If
host memory is short, only choices with room for their waiting gradients, activations and residuals
count.

Example: 18 blocks with 12 bytes of state and 4 of gradients each lie between two ends that are four
times as large. They need at least 84 bytes, and with 332 bytes nothing moves. With a budget of 208:

    groups that stay    seconds    bytes moved
    none                    376            688
    2 (the ends)            316            464
    4                       316            420
    6                       316            380
    8                       316            328   chosen: as fast as any, and moves the least

Nine groups don't fit, because streaming the remaining groups needs memory as well.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.schedule.choices import Choice, choice_saving_residuals, find_choices
from megatrain_jax._src.engine.schedule.memory_demand import least_bytes, most_that_fit
from megatrain_jax._src.engine.schedule.schedule import BudgetError, Schedule
from megatrain_jax._src.engine.schedule.tasks import build_task_lists
from megatrain_jax._src.engine.schedule.timed_steps import (
    SLOWER,
    Steps,
    at_rest,
    seconds_if_slower,
    write_steps,
)
from megatrain_jax._src.engine.schedule.transient_host_bytes import (
    find_waiting,
    least_transient_host_bytes,
)
from megatrain_jax._src.engine.schedule.workload import Workload

# The number of resident counts to try at most, of all that fit. Writing a step takes time in
# proportion to its instructions, and each choice of residuals is tried with each choice of
# residents.
_NUM_CANDIDATES = 8
# With fewer residents more bytes move, but more of them in advance. So counts are tried from the
# largest one on, until so many in a row are no faster.
_NO_FASTER = 2
# If a step waits for links, choices that take at most this multiple of the best one's time are
# tried with other residents.
_NEAR = 1.25
# Estimates that differ by less than this fraction can't tell which step is faster, because rates
# are not known that well. docs/performance.md shows the gain from moving fewer bytes.
_UNCERTAINTY = 0.03
# If links are busy for less than the second fraction of the fastest step, their rates hardly
# matter.
_SMALL_UNCERTAINTY, _IDLE = 0.005, 0.05


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
        The schedule with the smallest estimated time; among schedules of about the same time, the
        one that moves the fewest bytes. The order of computations never depends on the budget.

    Raises:
        BudgetError: The budget is below the smallest schedule's peak.
    """
    nothing_kept = choice_saving_residuals(workload, 0)
    lists = nothing_kept.lists
    smallest = least_bytes(lists, frozenset())
    room = _Room(device=smallest if budget is None else budget, host=host_room)
    if room.device < smallest:
        raise BudgetError(budget, smallest)
    choices = [nothing_kept]
    if room.device > smallest:
        choices += find_choices(workload, selective, room.device, functools.partial(_may_fit, room))
    tried = list(_worth_trying(choices, room))
    steps = _best(tried, room)
    computing = min(choice.lists.computing for choice in choices)
    if _waits(steps, computing):
        # Where copies take long, keeping masters first saves some of them, not most.
        seconds = {id(found.lists): found.seconds for found in tried}
        near = [c for c in choices if seconds.get(id(c.lists), math.inf) <= _NEAR * steps.seconds]
        tried += _for_slow_links(near, steps, room)
        steps = _best(tried, room)
    # With several waves, sums of gradients wait in the host unless they stay on the device. The
    # fastest steps may need more host memory for them than there is.
    fastest = min(steps.seconds for steps in tried) if workload.waves > 1 else steps.seconds
    if not steps.fits_host(room.host) or steps.seconds > (1 + _UNCERTAINTY) * fastest:
        choices = [dataclasses.replace(choice, spares_host=True) for choice in choices]
        steps = _best([steps, *_worth_trying(choices, room)], room)
    if workload.waves > 1:
        steps = _with_more_kept(
            steps, selective if selective and steps.workload.selective else workload, choices, room
        )
    return _finished(steps, smallest)


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
    lists = build_task_lists(dataclasses.replace(workload, kept=schedule.kept), few_waves=True)
    room = _Room(
        device=schedule.smallest_bytes if budget is None else budget,
        host=max(host_room, schedule.transient.total),
    )
    now = write_steps(lists, schedule.limit, schedule.resident)
    residuals = {Key(Kind.RESIDUALS, stage) for stage in schedule.kept}
    num_offloadable = len(residuals - schedule.resident)
    choice = Choice(lists=lists, num_offloadable=num_offloadable)
    choices = [choice, dataclasses.replace(choice, spares_host=True)]
    tried = [now, *(_with_residents(choice, room, sure=True) for choice in choices)]
    steps = _best(tried, room, sure=True)
    if _waits(steps, lists.computing):
        tried += _for_slow_links([choice], steps, room, sure=True)
        steps = _best(tried, room, sure=True)
    return _finished(steps, schedule.smallest_bytes)


def _waits(steps: Steps, computing: float) -> bool:
    """Whether a step of one wave takes longer than the shortest computation of all choices."""
    return steps.workload.waves == 1 and steps.seconds > (1 + _SMALL_UNCERTAINTY) * computing


def _for_slow_links(
    choices: Sequence[Choice], steps: Steps, room: "_Room", *, sure: bool = False
) -> Iterator[Steps]:
    """Candidates for a step that waits for copies: they keep masters on the device first.

    Keeping whole groups needs the least host memory for arrays in flight. Keeping only masters
    saves more copies per byte.
    """
    fastest = steps.seconds
    for choice in sorted(choices, key=lambda choice: choice.lists.computing):
        for spread in (False, True):
            if choice.lists.computing < fastest:
                other = dataclasses.replace(choice, masters_first=True, spread=spread)
                yield (found := _with_residents(other, room, sure=sure))
                if found.fits_host(room.host):
                    fastest = min(fastest, found.seconds)


def _with_more_kept(
    steps: Steps, workload: Workload, choices: Sequence[Choice], room: "_Room"
) -> Steps:
    """The given steps, or faster steps in which more stages save residuals.

    In a step of many waves, computation takes most of the time, so each stage counts.

    Args:
        steps: The best steps of all choices.
        workload: The workload that they are for, without saved residuals.
        choices: The choices that were tried.
        room: Bytes available.
    """
    kept = len(steps.workload.kept)
    alike = [choice for choice in choices if choice.lists.workload.selective == workload.selective]
    above = min((c for c in alike if c.num_kept > kept), key=lambda c: c.num_kept, default=None)
    while above is not None and above.num_kept > kept + 1:
        count = (kept + above.num_kept) // 2
        choice = choice_saving_residuals(workload, count)
        choice = dataclasses.replace(choice, spares_host=above.spares_host)
        # All these residuals stay on the device; the choice above may have offloaded some.
        fits = choice.least_bytes(0) <= room.device
        found = _best([steps, _with_residents(choice, room)], room) if fits else steps
        if found is steps:
            above = choice
        else:
            steps, kept = found, count
    return steps


@dataclass(frozen=True, kw_only=True)
class _Room:
    """The bytes available on the device, and in the host in addition to the state at rest."""

    device: int
    host: float


def _worth_trying(choices: Sequence[Choice], room: _Room) -> Iterator[Steps]:
    """The fastest steps of each choice, without choices that compute for too long."""
    fastest = math.inf
    # Choices with the least computation come first, so that most later ones need no instructions.
    for choice in sorted(choices, key=lambda choice: choice.lists.computing):
        if choice.lists.computing <= (1 + _UNCERTAINTY) * fastest:
            steps = _with_residents(choice, room)
            if steps.fits_host(room.host):
                fastest = min(fastest, steps.seconds)
            yield steps


def _with_residents(choice: Choice, room: _Room, *, sure: bool = False) -> Steps:
    """The fastest steps of a choice, over several numbers of resident parts."""
    tried: list[Steps] = []
    fastest, no_faster = math.inf, 0
    for steps in _steps_by_residents(choice, room):
        tried.append(steps)
        if steps.fits_host(room.host):
            no_faster = 0 if steps.seconds < fastest else no_faster + 1
            fastest = min(fastest, steps.seconds)
        if no_faster == _NO_FASTER:
            break
    return _best(tried, room, sure=sure)


def _may_fit(room: _Room, choice: Choice) -> bool:
    """Whether the host has memory for at least one variant of a choice."""
    if math.isinf(room.host):
        return True
    if least_transient_host_bytes(choice.lists, room.device) > room.host:
        return False
    return any(steps.fits_host(room.host) for steps in _steps_by_residents(choice, room))


def _steps_by_residents(choice: Choice, room: _Room) -> Iterator[Steps]:
    """The steps of a choice, for several numbers of resident parts, from the most on."""
    lists, units = choice.lists, choice.units
    # With all units resident nothing moves, so a higher limit would not help.
    if room.device >= (needed := choice.least_bytes(len(units))):
        yield write_steps(lists, needed, choice.residents(len(units)))
        return
    # The bytes needed grow with the number of units, so `most_that_fit` can use bisection.
    most = most_that_fit(len(units), lambda count: choice.least_bytes(count) <= room.device)
    counts = {round(most * share / _NUM_CANDIDATES) for share in range(_NUM_CANDIDATES + 1)}
    for count in sorted(counts, reverse=True):
        yield write_steps(lists, room.device, choice.residents(count))


def _best(candidates: Sequence[Steps], room: _Room, *, sure: bool = False) -> Steps:
    """The fastest steps; among steps of about the same time, the ones with the fewest copies.

    With `sure`, they must be about as fast even if copies take somewhat longer.
    """
    fitting = [steps for steps in candidates if steps.fits_host(room.host)]
    if not fitting:
        return min(candidates, key=lambda steps: steps.transient.total)
    fastest = min(fitting, key=lambda steps: steps.seconds)
    _, seconds = fastest.copied
    uncertainty = _UNCERTAINTY if seconds > _IDLE * fastest.seconds else _SMALL_UNCERTAINTY
    good = [s for s in fitting if s.seconds - fastest.seconds <= uncertainty * fastest.seconds]
    good.sort(key=lambda steps: (steps.copied[0], steps.seconds, len(steps.workload.kept)))

    most = functools.cache(lambda: (1 + _SMALL_UNCERTAINTY) * seconds_if_slower(fastest))

    # Fewer copies save time only if links are slower than estimated. More computation, because
    # fewer stages save residuals, costs time in any case.
    def pays(steps: Steps) -> bool:
        if steps.workload.waves > 1:  # writing steps of waves again would take long
            gained = SLOWER * (seconds - steps.copied[1])
            is_alike = steps.lists.computing <= (1 + _SMALL_UNCERTAINTY) * fastest.lists.computing
            return is_alike or steps.seconds - fastest.seconds <= gained
        if steps.workload.accumulate:
            return True  # if such a step is slow, several waves are tried instead
        is_alike = steps.lists.computing <= fastest.lists.computing and not sure
        return is_alike or seconds_if_slower(steps) <= most()

    return next(steps for steps in good if pays(steps))


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
        cautious_seconds=steps.seconds + SLOWER * steps.copied[1],
        smallest_bytes=smallest,
        limit=steps.limit,
        left_out=lists.left_out,
    )
