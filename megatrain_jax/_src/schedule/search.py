"""The schedule of a training step, what moves when, and the search for the fastest.

From the tasks of a step, their bytes and a budget this derives an ordered list of instructions that
the engine only has to obey, so tests and plans can read a step unexecuted.

Which groups stay on the device for good, and which stages keep residuals, is tried out:
instructions are laid down for several choices, and the clock says how long each takes. 18 blocks
with 12 bytes of state and 4 of gradients, between two ends that are four times as large, need 84
bytes at least, and with 332 nothing moves. A budget of 208 gives

    groups that stay    seconds    bytes moved
    none                    376            688
    2 (the ends)            316            464
    4                       316            420
    6                       316            380
    8                       316            328   taken: as fast as any, and it moves the least

and 9 don't fit, beside what the others need to come and go. Where the host is short of memory, only
those count whose gradients, activations and residuals find room there while they wait.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatrain_jax._src.common.keys import Key
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.schedule.choices import Choice, find_choices
from megatrain_jax._src.schedule.instructions import Instruction
from megatrain_jax._src.schedule.laid_steps import Steps, at_rest, copies, lay_down
from megatrain_jax._src.schedule.passing import Passing, find_waiting, least_passing_bytes
from megatrain_jax._src.schedule.room import least_bytes, most_that_fit
from megatrain_jax._src.schedule.tasks import build_task_lists
from megatrain_jax._src.schedule.workload import Workload

# To lay a step down takes time with its number of instructions, and each choice of kept residuals
# is tried with each of residents. Of all numbers of residents that fit, these many are tried.
_NUM_CANDIDATES = 8
# Rates aren't known well enough to tell which of two steps is faster if their estimates differ by
# less than this part of them; docs/performance.md has what taking the one that moves less brought.
_UNCERTAINTY = 0.03
# Where links are busy for less of the fastest step than the second part, their rates hardly matter.
_SMALL_UNCERTAINTY, _IDLE = 0.005, 0.05


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule:
    """The instructions of each list that can be run, and the device bytes they need.

    The first step runs `cold`, each later one `steady`. After either, `flush` brings everything
    to rest: pending updates are applied, host copies are current, the device is empty, and the
    next step is cold again. `evaluation` runs at rest and ends at rest.

    Attributes:
        cold: A training step that starts at rest.
        steady: A training step that follows a training step.
        flush: The instructions after a training step that bring all to rest.
        evaluation: Every stage's FORWARD, from rest to rest.
        num_tasks: Tasks of a cold as of a steady step, for resolving negative task numbers.
        ledger: For "cold", "steady", "flush" and "evaluation" the bytes on the device after each
            instruction. A part that is dropped or consumed counts until the WAIT or LAND for its
            task. Steady steps and flushes may hold less, offload parts that are unchanged, and wait
            for tasks that left nothing: their instructions serve after every step.
        peak_bytes: The largest entry of the ledgers.
        passing: Host bytes that training steps take beside the state at rest, by part.
        evaluation_bytes: Host bytes that an evaluation takes beside it.
        resident: Parts that stay on the device between steps, or from when they are made to their
            last use.
        kept: Stages whose residuals are kept from forward to backward.
        lean: Whether these are the costliest results of each stage, instead of all.
        seconds: Estimate of a steady step's time.
        smallest_bytes: The least budget with which computing need not wait for room.
        limit: Bytes that may be on the device.
        left_out: Number of waves that the lists leave out, all of them like the second one: for an
            engine, `whole_schedule` puts them in.
    """

    cold: tuple[Instruction, ...]
    steady: tuple[Instruction, ...]
    flush: tuple[Instruction, ...]
    evaluation: tuple[Instruction, ...]
    num_tasks: int
    ledger: Mapping[str, tuple[int, ...]]
    peak_bytes: int
    passing: Passing
    evaluation_bytes: int
    resident: frozenset[Key]
    kept: frozenset[int]
    lean: bool
    seconds: float
    smallest_bytes: int
    limit: int
    left_out: int = 0

    @property
    def passing_bytes(self) -> int:
        """Host bytes that training steps take beside the state at rest."""
        return self.passing.total

    def __repr__(self) -> str:
        """Returns a line of totals: a deep model's step has thousands of instructions."""
        return (
            f"Schedule(instructions: {len(self.steady)} of a steady step, {len(self.cold)} of a "
            f"cold one, {len(self.flush)} to flush, {len(self.evaluation)} to evaluate; at most "
            f"{sized(self.peak_bytes)} on the device; {self.seconds:.3g} s a step)"
        )


class BudgetError(ValueError):
    """A budget is too small for a step.

    Attributes:
        smallest: Bytes of the smallest budget that works.
    """

    def __init__(self, budget: int | None, smallest: int):
        """Says so in words of a run's options."""
        given = "None" if budget is None else f"{budget} ({sized(budget)})"
        super().__init__(
            f"device_budget={given} is too small for this model, optimizer and precision; the "
            f"smallest that works is {smallest} bytes ({sized(smallest)}). Pass that or more, "
            '"least", or None for what the device has left; smaller or shorter batches, or more '
            "`microbatches`, need less"
        )
        self.smallest = smallest


def find_schedule(
    workload: Workload,
    budget: int | None,
    lean: Workload | None = None,
    host_room: float = math.inf,
) -> Schedule:
    """Orders a training step so that what it keeps never exceeds a budget on the device.

    Args:
        workload: The step to compute, on which bytes; which residuals are kept is decided here.
        budget: Bytes that parameters, optimizer state, gradients, residuals and activations may
            occupy on the device. None asks for the smallest schedule.
        lean: The same step with the costliest residuals of each stage alone, which is tried if
            there is no room for all residuals of all stages; these may wait in the host.
        host_room: Bytes that the host has beside the state at rest. If no step keeps to them, it is
            one of those that take the least.

    Returns:
        The schedule: of several with more or fewer residents and residuals the one estimated to be
        the fastest, or of those that are about as fast the one that moves least. The order of
        computing instructions never depends on the budget.

    Raises:
        BudgetError: The budget is below the smallest schedule's peak.
    """
    lists = build_task_lists(workload, few_waves=True)
    smallest = least_bytes(lists, frozenset())
    room = _Room(device=smallest if budget is None else budget, host=host_room)
    if room.device < smallest:
        raise BudgetError(budget, smallest)
    choices = [Choice(lists=lists)]
    if room.device > smallest:
        choices += find_choices(workload, lean, room.device, functools.partial(_may_fit, room))
    tried = list(_worth_trying(choices, room))
    steps = _best(tried, room)
    # Of several waves, sums of gradients wait in the host all the time unless they stay on the
    # device: the host may have no room for those of the fastest steps.
    fastest = min(steps.seconds for steps in tried) if workload.waves > 1 else steps.seconds
    if not steps.fits_host(room.host) or steps.seconds > (1 + _UNCERTAINTY) * fastest:
        sparing = [dataclasses.replace(choice, spares_host=True) for choice in choices]
        steps = _best([steps, *_worth_trying(sparing, room)], room)
    return _finished(steps, smallest)


@dataclass(frozen=True, kw_only=True)
class _Room:
    """The bytes that steps may take on the device, and in the host beside the state at rest."""

    device: int
    host: float


def _worth_trying(choices: Sequence[Choice], room: _Room) -> Iterator[Steps]:
    """The fastest steps of each choice, but of those that compute for too long to be taken."""
    fastest = math.inf
    # Choices that compute least come first, so that most of the others need not be laid down.
    for choice in sorted(choices, key=lambda choice: choice.computing):
        if choice.computing <= (1 + _UNCERTAINTY) * fastest:
            steps = _with_residents(choice, room)
            if steps.fits_host(room.host):
                fastest = min(fastest, steps.seconds)
            yield steps


def _with_residents(choice: Choice, room: _Room) -> Steps:
    """The fastest steps of some with more or fewer parts that stay on the device."""
    return _best(list(_laid_down(choice, room)), room)


def _may_fit(room: _Room, choice: Choice) -> bool:
    """Whether the host has room for some steps of a choice."""
    if math.isinf(room.host):
        return True
    if least_passing_bytes(choice.lists, room.device) > room.host:
        return False
    return any(steps.fits_host(room.host) for steps in _laid_down(choice, room))


def _laid_down(choice: Choice, room: _Room) -> Iterator[Steps]:
    """The steps of a choice with more or fewer parts that stay on the device."""
    lists, units = choice.lists, choice.units
    # Nothing moves then, so that more room would be of no use.
    if room.device >= (needed := choice.least_bytes(len(units))):
        yield lay_down(lists, needed, choice.residents(len(units)))
        return
    # The sets grow with the count, and with them the least that they need, which is what lets
    # `most_that_fit` halve its way to the largest.
    most = most_that_fit(len(units), lambda count: choice.least_bytes(count) <= room.device)
    counts = {round(most * share / _NUM_CANDIDATES) for share in range(_NUM_CANDIDATES + 1)}
    for count in sorted(counts):
        yield lay_down(lists, room.device, choice.residents(count))


def _best(candidates: Sequence[Steps], room: _Room) -> Steps:
    """The fastest; of steps that are as fast by all that can be foretold, those that move least."""
    fitting = [steps for steps in candidates if steps.fits_host(room.host)]
    if not fitting:
        return min(candidates, key=lambda steps: steps.passing.total)
    fastest = min(fitting, key=lambda steps: steps.seconds)
    _, seconds = copies(fastest)
    uncertainty = _UNCERTAINTY if seconds > _IDLE * fastest.seconds else _SMALL_UNCERTAINTY
    good = [s for s in fitting if s.seconds <= (1 + uncertainty) * fastest.seconds]

    def order(steps: Steps) -> tuple[int, float, int]:
        return copies(steps)[0], steps.seconds, len(steps.workload.kept)

    return min(good, key=order)


def whole_schedule(workload: Workload, schedule: Schedule) -> Schedule:
    """The schedule with the instructions of all waves, of which a search lays down three.

    Args:
        workload: The workload that the schedule was found for.
        schedule: The schedule.
    """
    if not schedule.left_out:
        return schedule
    lists = build_task_lists(dataclasses.replace(workload, kept=schedule.kept))
    steps = lay_down(lists, schedule.limit, schedule.resident)
    return _finished(steps, schedule.smallest_bytes)


def _finished(steps: Steps, smallest: int) -> Schedule:
    """The schedule of the steps that were chosen, with what comes after them."""
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
        passing=steps.passing,
        evaluation_bytes=find_waiting(
            lists.workload, [(lists.evaluation, evaluation.instructions)]
        ).total,
        resident=steps.resident,
        kept=lists.workload.kept,
        lean=lists.workload.lean,
        seconds=steps.seconds,
        smallest_bytes=smallest,
        limit=steps.limit,
        left_out=lists.left_out,
    )
