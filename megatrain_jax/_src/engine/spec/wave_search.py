"""Chooses the number of waves in which a step's microbatches go through the stages.

More waves fetch weights more often and sum gradients over waves. Fewer waves hold more activations,
also in the host, and leave less memory for residuals. The estimated time has a single minimum, near
the number with which computing a wave takes as long as transferring its weights and sums. The
search begins there, and moves to neighbouring divisors of the microbatches while they are faster.

Example: 14.8B parameters on an H100 with 125 GiB of host, 64 microbatches of 8 x 1024 tokens,
clipping, compact state::

    waves    a step     host memory    why
    1        114 s      119 GiB        36 stages compute their forward three times
    16       93 s       118 GiB        a wave's residuals fit for fewer stages
    32       92 s       117 GiB        chosen: 23 stages save residuals
    64       99 s       111 GiB        the link carries weights and sums all the time
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.common.sizes import divisors
from megatrain_jax._src.engine.schedule.least_time import least_seconds
from megatrain_jax._src.engine.schedule.schedule import BudgetError
from megatrain_jax._src.engine.schedule.workload import Workload
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.budget import LESS_HOST, WORTH, is_better
from megatrain_jax._src.engine.spec.host import peak_bytes, state_bytes
from megatrain_jax._src.engine.spec.rescheduled import in_waves
from megatrain_jax._src.engine.spec.run_spec import RunSpec

# A step with fewer tokens than so many balanced waves waits for the link in any case.
_FEWEST = 2


def fit_in_waves(spec: RunSpec, fit: Callable[[RunSpec], RunSpec], room_bytes: float) -> RunSpec:
    """The run fitted to its machine in the number of waves with the fastest step.

    It has one wave, unless several are better; see `is_better`.

    Args:
        spec: The run, in any number of waves.
        fit: Fits a run to its machine.
        room_bytes: The most device bytes that state, activations and residuals can have.
    """
    host_room = math.inf  # known once the run has been fitted in any number of waves

    @functools.cache
    def fitted(waves: int) -> RunSpec | None:
        """The run in a number of waves; None if it exceeds a given device budget."""
        nonlocal host_room
        try:
            first = in_waves(spec.first, waves, spec.budget_bytes)
        except BudgetError:
            return None
        found = fit(dataclasses.replace(spec, first=first))
        host_room = min(host_room, found.host_room)
        return found

    @functools.cache
    def seconds(waves: int) -> float:
        found = fitted(waves)
        return math.inf if found is None or any(found.lacking) else found.first.schedule.seconds

    def bound(waves: int) -> float:
        room = min(room_bytes, spec.budget_bytes or math.inf)
        return least_in_waves(spec.first, waves, room, host_room)

    workload = spec.first.workload.in_waves(1)
    balanced, least = _balanced(workload), least_seconds(workload)
    number = spec.first.microbatches
    several = divisors(number)[1:]
    if not several:
        return fit(spec)
    # With the minimum budget, speed is not a goal.
    is_one = spec.options.device_budget == "minimum" or balanced < _FEWEST
    # Several waves have to save time, because small microbatches and two-way traffic cost somewhat
    # more than the clock estimates. Often the bound tells that one wave takes too long.
    may_be_one = is_one or bound(1) * (1 - WORTH) <= least
    if may_be_one and (one := fitted(1)) is not None and not any(one.lacking):
        saves_time = seconds(1) * (1 - WORTH) > least
        saves_host = _may_save_host(one.first) and min(map(bound, several)) <= seconds(1)
        if is_one or not (saves_time or saves_host):
            return one
    best = lowest(several, balanced, seconds, bound)
    found = fitted(best)
    is_best = seconds(best) < (1 - WORTH) * bound(1)
    one = None if is_best else fitted(1)
    if one is None or (found is not None and is_better(found, one)):
        assert found is not None, "a run has been made in one wave or in the most"
        return found
    return one


def _may_save_host(one: BoundStep) -> bool:
    """Whether a step without activations, residuals and gradients in the host takes less of it."""
    return state_bytes(one) <= (1 - LESS_HOST) * peak_bytes(one)


def least_in_waves(step: BoundStep, waves: int, room: float, host_room: float) -> float:
    """A lower bound of a step's seconds in a number of waves; see `least_seconds`."""
    selective = step.selective and step.selective.in_waves(waves)
    return least_seconds(step.workload.in_waves(waves), selective, room, host_room)


def lowest(
    numbers: list[int],
    first: float,
    value: Callable[[int], float],
    bound: Callable[[int], float] = lambda number: -math.inf,
) -> int:
    """The number with the lowest value, searched from a first guess; values have one minimum.

    Args:
        numbers: The numbers, ascending.
        first: The guess.
        value: Returns a number's value, at some cost; small numbers may have infinite values.
        bound: Returns a lower bound of a number's value, at no cost.
    """
    at = min(range(len(numbers)), key=lambda i: abs(math.log(numbers[i] / max(first, 1.0))))
    # The guess doesn't fit; the largest number of waves needs the least memory.
    if math.isinf(value(numbers[at])):
        at = len(numbers) - 1
    while True:
        around = [i for i in (at - 1, at + 1) if 0 <= i < len(numbers)]
        around = [i for i in around if bound(numbers[i]) < value(numbers[at])]
        better = min(around, key=lambda i: value(numbers[i]), default=at)
        if value(numbers[better]) >= value(numbers[at]):
            return numbers[at]
        at = better


def _balanced(workload: Workload) -> float:
    """The number of waves with equal times for computing and for transferring weights and sums."""
    per_byte = workload.costs.link.inward
    masters, sums = (
        per_byte * sum(sizes.get(kind, 0) for sizes in workload.sizes)
        for kind in (Kind.MASTERS, Kind.GRADIENT)
    )
    return least_seconds(workload) / max(2 * masters + sums, 1e-9)
