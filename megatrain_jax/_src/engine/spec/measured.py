"""Schedules a run's step by measured times of its functions and measured rates of its copies.

A run is planned by estimates; they also choose the functions to compile. Once they are compiled,
each is timed with the run's shapes, and the schedule is made again by these times. It runs the same
functions, so times never change results, and nothing is compiled again. Once host memory is pinned,
the rates of copies are measured, too. Then the schedule is made again, if it needs no more memory.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.timing import Timed, integers_of_batch, time_kernels
from megatrain_jax._src.engine.program.effects import has_side_effects
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.schedule.least_time import computing_seconds
from megatrain_jax._src.engine.schedule.transient_host_bytes import TransientHostBytes
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.costs import host_link
from megatrain_jax._src.engine.spec.rescheduled import (
    by_measured_link,
    by_measured_seconds,
    with_all_waves,
)
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.spec.step_kernels import numbered_kernels, stage_kernel
from megatrain_jax._src.engine.state.placement import Placement

# In seconds: the functions of a step with a shorter estimate are not timed.
_SHORTEST = 0.05
# In seconds: for a step with a longer estimate, functions are timed at the GPU's sustained clock,
# which takes two seconds more.
_LONG = 1.0


def is_worth_measuring(spec: RunSpec) -> bool:
    """Whether a run's step is long enough to spend seconds on its schedule."""
    return spec.first.schedule.seconds >= _SHORTEST


def by_measured_times(
    spec: RunSpec, kernels: KernelCache, placement: Placement, sample_batch: Any
) -> RunSpec:
    """The run with its step scheduled by the measured seconds of its compiled functions.

    Args:
        spec: The run, fitted to its machine.
        kernels: Cache with its compiled functions.
        placement: Placement of the run.
        sample_batch: A batch, this process's part of it, or its shapes. Functions are timed with
            its integers.
    """
    step, stages = spec.first, spec.first.stages
    timed: dict[tuple[Op, int], list[Timed]] = {}
    for op, number, kernel in numbered_kernels(step, spec.layouts, spec.optimizer, placement):
        row = Timed(kernel)
        if op in (Op.FORWARD, Op.BACKWARD):
            stage = stages[number].stage
            # A stage that prints, or calls back, must not do so here.
            if has_side_effects(stage.jaxpr):
                continue
            if op is Op.FORWARD:
                row = Timed(kernel, stage.inputs, stage.outputs)
            else:
                keeps = number in step.schedule.kept
                forward = stage_kernel(step, Op.FORWARD, number, placement) if keeps else None
                row = Timed(kernel, stage.inputs, forward=forward)
        timed.setdefault((op, number), []).append(row)

    def agree(seconds: float) -> float:
        # All processes have to follow the same schedule; the slowest device decides.
        every: Sequence[float] = placement.processes.gather("timing functions", seconds)
        return max(every)

    with placement.outside_meshes():
        seconds = time_kernels(
            kernels,
            itertools.chain(*timed.values()),
            agree,
            integers=integers_of_batch(step.program, placement, sample_batch),
            share=_share_of_stages(step),
        )
    found = {
        # The microbatches of a wave may have different kernels.
        place: statistics.fmean(seconds[row.name] for row in own)
        for place, own in timed.items()
        if all(row.name in seconds for row in own)
    }
    machine = spec.options.machine
    # Nothing was copied while functions were timed.
    delay = 0.0 if machine is None else 1 / machine.memory_bytes_per_s
    first = by_measured_seconds(step, found, spec.budget_bytes, spec.host_room, delay)
    return dataclasses.replace(spec, first=first, is_measured=True)


def _share_of_stages(step: BoundStep) -> float | None:
    """The share of a long step in which the device computes stages; None for a short step."""
    if (seconds := step.schedule.seconds) < _LONG:
        return None
    workload = dataclasses.replace(step.scheduled, kept=step.schedule.kept)
    computing = computing_seconds(workload, workload.kept)
    return min(1.0, (computing - sum(workload.costs.update)) / seconds)


def has_copies(spec: RunSpec) -> bool:
    """Whether a run's step copies anything between its devices and their host."""
    return any(row.op in (Op.FETCH, Op.OFFLOAD) for row in spec.first.schedule.steady)


def by_measured_rates(
    spec: RunSpec, to_device: float, to_host: float, reserved: TransientHostBytes
) -> RunSpec:
    """The run with its step scheduled by measured rates of copies, with all waves.

    Args:
        spec: The run.
        to_device: Bytes per second to each device while all devices copy both ways.
        to_host: Bytes per second from each device meanwhile.
        reserved: The host bytes that were pinned beside the state; the new schedule needs no more.
    """
    machine, step = spec.options.machine, spec.first
    assert machine is not None
    own = step.num_devices // machine.hosts
    hardware = dataclasses.replace(
        machine,
        link_bytes_per_s=to_device,
        link_out_bytes_per_s=to_host,
        # The host's memory has served these copies.
        host_bytes_per_s=max(machine.host_bytes_per_s, own * (to_device + to_host)),
        source=f"link measured here, else {machine.source}",
    )
    link = host_link(hardware, own)
    first = with_all_waves(by_measured_link(step, link, spec.budget_bytes))
    schedule = dataclasses.replace(first.schedule, transient=reserved)
    first = dataclasses.replace(first, schedule=schedule)
    return dataclasses.replace(spec, measured_machine=hardware, first=first)
