"""The number of waves that a step's microbatches go through the stages in, chosen by the clock.

More waves fetch weights again and sum gradients over waves; fewer waves hold more activations, in
the host as well, and leave less room for residuals. The estimate has one minimum between, close to
where a wave computes for as long as its weights and sums are on the link: the search begins there
and goes to neighbouring divisors of the number of microbatches while they are faster.

A worked example, 14.8B parameters on an H100 with 125 GiB of host, 64 microbatches of 8 x 1024
tokens, clipping, compact state::

    waves    a step     host memory    why
    1        114 s      119 GiB        36 stages compute their forward three times
    16       93 s       118 GiB        residuals of a wave leave room for fewer stages
    32       91 s       111 GiB        taken: 18 stages keep residuals
    64       99 s       111 GiB        the link carries weights and sums all the time
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from megatrain_jax._src.build.budget import other_bytes
from megatrain_jax._src.build.rescheduled import in_waves
from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.schedule.search import BudgetError
from megatrain_jax._src.schedule.workload import Workload

# Part of a step's estimated seconds that several waves have to save: small microbatches and two-way
# traffic cost somewhat more than the clock knows.
_WORTH = 0.05
# Of fewer tokens than two balanced waves have, the link is what a step waits for.
_FEWEST = 2


def fit_in_waves(spec: RunSpec, fit: Callable[[RunSpec], RunSpec], device_bytes: int) -> RunSpec:
    """The run fitted to its machine in the number of waves with the fastest step.

    One wave, unless several save more than the clock is uncertain about, or one doesn't fit.

    Args:
        spec: The run, in any number of waves.
        fit: Function that fits a run to its machine.
        device_bytes: Device memory that is free.
    """

    @functools.cache
    def fitted(waves: int) -> RunSpec:
        first = in_waves(spec.first, waves, spec.budget_bytes)
        return fit(dataclasses.replace(spec, first=first))

    @functools.cache
    def seconds(waves: int) -> float:
        try:
            found = fitted(waves)
        except BudgetError:
            return math.inf
        fits = found.fits_host and _fits_device(found, device_bytes)
        return found.first.schedule.seconds if fits else math.inf

    one, workload = seconds(1), spec.first.workload.in_waves(1)
    balanced = _balanced(workload)
    # In the least budget nothing is sought but room.
    if not math.isinf(one) and (
        spec.options.device_budget == "least"
        or balanced < _FEWEST
        or one * (1 - _WORTH) <= _least_seconds(workload)
    ):
        return fitted(1)
    number = spec.first.microbatches
    divisors = [waves for waves in range(2, number + 1) if number % waves == 0]
    best = lowest(divisors, balanced, seconds)
    return fitted(best if seconds(best) < (1 - _WORTH) * one else 1)


def lowest(numbers: list[int], first: float, value: Callable[[int], float]) -> int:
    """The number with the lowest value, found from a first guess, where values have one minimum.

    Args:
        numbers: The numbers, ascending.
        first: The guess.
        value: A number's value, which is expensive; infinite up to some number, perhaps.
    """
    at = min(range(len(numbers)), key=lambda i: abs(math.log(numbers[i] / max(first, 1.0))))
    # Nothing fits there: most fits in the largest number of waves.
    if math.isinf(value(numbers[at])):
        at = len(numbers) - 1
    while True:
        around = [i for i in (at - 1, at + 1) if 0 <= i < len(numbers)]
        better = min(around, key=lambda i: value(numbers[i]), default=at)
        if value(numbers[better]) >= value(numbers[at]):
            return numbers[at]
        at = better


def _balanced(workload: Workload) -> float:
    """The number of waves that compute for as long as their weights and sums are on the link."""
    per_byte = workload.costs.link.inward
    masters, sums = (
        per_byte * sum(sizes.get(kind, 0) for sizes in workload.sizes)
        for kind in (Kind.MASTERS, Kind.GRADIENT)
    )
    return _least_seconds(workload) / max(2 * masters + sums, 1e-9)


def _least_seconds(workload: Workload) -> float:
    """Seconds in which a step computes if all stages keep residuals and nothing is waited for."""
    costs = workload.costs
    each = sum(costs.forward) + sum(costs.backward) - sum(costs.recompute)
    return workload.waves * each + sum(costs.update)


def _fits_device(spec: RunSpec, device_bytes: int) -> bool:
    taken = other_bytes(spec.first) + (spec.temporary_bytes or 0)
    return taken + spec.first.schedule.peak_bytes <= device_bytes
