"""Measures the functions of a run's step on its devices, and schedules the step by their times.

A run is planned by estimates; they also choose the functions to compile. Once they are compiled,
each is timed with the run's shapes, and the schedule is made again by these times. It runs the same
functions, so times never change results, and nothing is compiled again.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from megatrain_jax._src.kernels.cache import KernelCache
from megatrain_jax._src.kernels.kernel import Kernel
from megatrain_jax._src.kernels.timing import time_kernels
from megatrain_jax._src.program.effects import has_side_effects
from megatrain_jax._src.schedule.instructions import Op
from megatrain_jax._src.spec.rescheduled import by_measured_seconds
from megatrain_jax._src.spec.run_spec import RunSpec
from megatrain_jax._src.spec.step_kernels import numbered_kernels
from megatrain_jax._src.state.placement import Placement

# In seconds: the functions of a step with a shorter estimate are not timed.
_SHORTEST = 0.05
# In seconds: for a step with a longer estimate, functions are timed at the GPU's sustained clock,
# which takes two seconds more.
_LONG = 1.0


def is_worth_measuring(spec: RunSpec) -> bool:
    """Whether a run's step is long enough to spend seconds on its schedule."""
    return spec.first.schedule.seconds >= _SHORTEST


def by_measured_times(spec: RunSpec, kernels: KernelCache, placement: Placement) -> RunSpec:
    """The run with its step scheduled by the measured seconds of its compiled functions.

    Args:
        spec: The run, fitted to its machine.
        kernels: Cache with its compiled functions.
        placement: Placement of the run.
    """
    step, stages = spec.first, spec.first.stages
    timed: dict[tuple[Op, int], list[Kernel]] = {}
    for op, number, kernel in numbered_kernels(step, spec.layouts, spec.optimizer, placement):
        # A stage that prints, or calls back, must not do so here.
        if op in (Op.REDUCE, Op.UPDATE) or (
            op in (Op.FORWARD, Op.BACKWARD) and not has_side_effects(stages[number].stage.jaxpr)
        ):
            timed.setdefault((op, number), []).append(kernel)

    def agree(seconds: float) -> float:
        # All processes have to follow the same schedule; the slowest device decides.
        every: Sequence[float] = placement.processes.gather("timing functions", seconds)
        return max(every)

    with placement.outside_meshes():
        every = itertools.chain(*timed.values())
        seconds = time_kernels(kernels, every, agree, sustained=step.schedule.seconds >= _LONG)
    found = {
        # The microbatches of a wave may have different kernels.
        place: statistics.fmean(seconds[kernel.name, kernel.key] for kernel in own)
        for place, own in timed.items()
        if all((kernel.name, kernel.key) in seconds for kernel in own)
    }
    machine = spec.options.machine
    # Nothing was copied while functions were timed.
    delay = 0.0 if machine is None else 1 / machine.memory_bytes_per_s
    first = by_measured_seconds(step, found, spec.budget_bytes, spec.host_room, delay)
    return dataclasses.replace(spec, first=first, is_measured=True)
