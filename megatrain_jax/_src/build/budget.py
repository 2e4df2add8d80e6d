"""A run's device budget: an automatic one is the memory that its compiled functions leave.

Functions are compiled for a schedule, and a schedule is found for a budget, so both are found in
turns: the functions for the least budget, the budget that these leave, the functions it adds.

A worked example, on a device with 100 GiB free, of which 5% stay free:

    1. for the least budget, functions need 6 GiB; other values 1 GiB, the largest slab 2 GiB
    2. budget = 95 - 2 - 1 - 6 = 86 GiB; with it, stages keep residuals: other functions
    3. these need 8 GiB, more than 6: the budget is 84 GiB
"""

import dataclasses

from megatrain_jax._src.build.bound_step import BoundStep
from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.build.step_kernels import compile_ahead, estimate_ahead
from megatrain_jax._src.kernels.cache import KernelCache
from megatrain_jax._src.schedule.search import Schedule, find_schedule
from megatrain_jax._src.state.placement import Placement

# Share of the device's memory that an automatic budget leaves to the allocator's gaps, beside room
# for one more of the largest arrays.
_RESERVED = 0.05


def fit_to_device(
    spec: RunSpec, kernels: KernelCache, device_bytes: int | None, placement: Placement
) -> RunSpec:
    """Finds what a step's functions need and, if the budget is automatic, gives it what they leave.

    Args:
        spec: The run, whose functions' memory is not known yet.
        kernels: Cache that gets the functions.
        device_bytes: Device memory that is free; None if unknown.
        placement: Placement of the run, to compile for; where it has no devices, what functions
            need is estimated.
    """
    estimated = not placement.devices

    def needed_by(step: BoundStep) -> int:
        ahead = estimate_ahead if estimated else compile_ahead
        needed = ahead(kernels, step, spec.layouts, spec.optimizer, placement)
        # Each process compiles by itself, and all have to obey one schedule.
        return max(placement.processes.gather("compiling", needed))

    needed, known = needed_by(spec.first), [spec.first.schedule]
    fitted = with_temporaries(spec, needed, device_bytes, estimated=estimated)
    # Keeping residuals takes other functions. A smaller budget keeps fewer, by functions that are
    # known then, or leaner ones.
    while not any(_has_functions_of(schedule, fitted.first.schedule) for schedule in known):
        known.append(fitted.first.schedule)
        more = needed_by(fitted.first)
        if more <= needed:
            break
        needed = more
        fitted = with_temporaries(spec, needed, device_bytes, estimated=estimated)
    return fitted


def _has_functions_of(schedule: Schedule, other: Schedule) -> bool:
    """Whether what runs one schedule runs another one of the same step, too."""
    return not other.kept or (schedule.lean == other.lean and other.kept <= schedule.kept)


def with_temporaries(
    spec: RunSpec, temporary_bytes: int, device_bytes: int | None, *, estimated: bool
) -> RunSpec:
    """The same run with its functions' memory known; an automatic budget is what they leave.

    Args:
        spec: The run.
        temporary_bytes: Device bytes that compiled functions need for themselves.
        device_bytes: Device memory that is free; None if unknown.
        estimated: Whether the functions' memory is an estimate.
    """
    known = dataclasses.replace(
        spec, temporary_bytes=temporary_bytes, temporary_estimated=estimated
    )
    if spec.options.device_budget is not None or device_bytes is None:
        return known
    taken = other_bytes(spec.first) + temporary_bytes
    left = int(device_bytes * (1 - _RESERVED)) - spec.largest_slab_bytes - taken
    # The least even where less is left: a plan says then by how much, and training is refused.
    budget = max(left, spec.first.schedule.smallest_bytes)
    schedule = find_schedule(spec.first.workload, budget, spec.first.lean)
    first = dataclasses.replace(spec.first, schedule=schedule)
    return dataclasses.replace(known, budget_bytes=budget, first=first)


def other_bytes(step: BoundStep) -> int:
    """Bytes of the activations that live between stages and that the schedule doesn't count."""
    others = step.kept - step.workload.activations.keys()
    times = {i: 1 if i in step.kept_once else step.microbatches for i in others}
    return sum(n * step.program.num_bytes(i, step.num_devices) for i, n in times.items())
