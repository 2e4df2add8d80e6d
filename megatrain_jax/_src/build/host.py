"""The host memory that a step needs; if it is more than there is, stages are recomputed.

Beside the state at rest, the host holds what waits between tasks: gradients of deferred updates,
and what the device has no room for, which are the inputs of all stages where sequences are long,
and the costliest residuals. Without residuals, stages compute more again; and of their inputs only
every second, third or further one needs to be held if the stages between are computed again in the
backward; see `schedule/order.py`. An input is worth more than residuals of its size: without it a
whole block is computed again. So no more blocks are than have to be, and then the search for a
schedule has the residuals of as many others wait as the host has room for.

A worked example, 28 blocks that hand on 3.8 GB each, 31 GB of state, and a host of 125 GB:

    span    computed again    residuals wait    what waits                 in all
    1       none              28                29 x 3.8, residuals 108    249 GB
    1       none              none              29 x 3.8                   141 GB
    2       5 blocks          none              24 x 3.8                   122 GB: taken
    2       13 blocks         none              16 x 3.8                    92 GB

All of a span's blocks are computed again only where fewer don't free enough; the last block is not,
since its backward follows its forward at once.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from megatrain_jax._src.build.bound_step import BoundStep
from megatrain_jax._src.build.options import Options
from megatrain_jax._src.build.rescheduled import spanning, workload_spanning
from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.schedule.passing import least_passing_bytes
from megatrain_jax._src.schedule.room import least_bytes, most_that_fit
from megatrain_jax._src.schedule.search import BudgetError
from megatrain_jax._src.schedule.tasks import build_task_lists
from megatrain_jax._src.schedule.workload import Workload
from megatrain_jax._src.state import pool
from megatrain_jax._src.state.host_memory import resident_bytes
from megatrain_jax._src.state.placement import Placement
from megatrain_jax._src.state.pool_limit import beside_bytes

_SPANS = (1, 2, 3, 4, 6, 8, 12, 16)
_MIB_BITS = 20
# On a CPU, arrays come from the C library. It returns those of this size to the system when they
# are freed, and keeps the memory of smaller ones for later: after some steps on arrays of 1 to 16
# MiB, 1.6 to 1.95 times their bytes were held.
_RETURNED_BYTES = 2**25
# The compiler's memory there: 120 MiB for a small model.
_COMPILING = 2**28


def fit_to_host(
    spec: RunSpec, num_processes: int = 1, processes_per_host: int = 1
) -> RunSpec | None:
    """The run with the fewest stages computed again for which the host suffices.

    Of these it has the fastest schedule. The run stays as it is if the host suffices anyway or
    isn't known.

    Args:
        spec: The run, fitted to its device.
        num_processes: Number of the processes that share it.
        processes_per_host: How many of them share a host.

    Returns:
        The run; None if the host never suffices.
    """
    own = spec.first.num_devices // num_processes
    total = _machine_bytes(spec.options, own * processes_per_host)
    usable = pool.usable_bytes(spec.options.host_bytes, total, own, processes_per_host)
    if usable is None:
        return spec

    def fits(peak: int) -> bool:
        return pool.process_bytes(peak, spec.largest_slab_bytes, total, own) <= usable

    most = most_that_fit(usable >> _MIB_BITS, lambda mib: fits(mib << _MIB_BITS)) << _MIB_BITS
    room = most // own - state_bytes(spec.first) // spec.first.num_devices
    spec = dataclasses.replace(spec, host_room=room)
    if fits(peak_bytes(spec.first) // num_processes):
        return spec

    def may_fit(workload: Workload) -> bool:
        lists = build_task_lists(workload)
        limit = spec.budget_bytes
        limit = least_bytes(lists, frozenset()) if limit is None else limit
        passing = spec.first.num_devices * least_passing_bytes(lists, limit)
        return fits((state_bytes(spec.first) + passing) // num_processes)

    if room <= 0 or not _may_fit_any(spec, may_fit):
        return None
    for first in _computing_again(spec, may_fit):
        if fits(peak_bytes(first) // num_processes):
            return dataclasses.replace(spec, first=first)
    return None


def _may_fit_any(spec: RunSpec, may_fit: Callable[[Workload], bool]) -> bool:
    """Whether the host may hold what waits and moves though no activation ever waits."""
    if spec.budget_bytes is None:
        return True
    nothing = {"activations": {}, "makes": (), "reads": ()}
    return may_fit(dataclasses.replace(spec.first.workload, **nothing))


def _machine_bytes(options: Options, num_devices: int) -> int | None:
    """The memory of a host with so many of the run's devices; None if unknown."""
    # Devices of a host share its memory: `times` says what all of them are on.
    return options.machine and options.machine.times(num_devices).assumed_host_bytes


def agreed_host_budget(options: Options, placement: Placement) -> int | None:
    """The host memory that each of a run's processes may take on this machine, now.

    Args:
        options: The run's options: a budget of theirs is the most that it may be.
        placement: The run's devices and processes.

    Returns:
        Bytes, the same in all processes; None if the system doesn't tell.
    """
    processes = placement.processes
    limits = [] if options.host_bytes is None else [options.host_bytes]
    if (here := pool.available_process_bytes(processes.num_here)) is not None:
        limits.append(here)
    found = processes.gather("asking for available host memory", min(limits, default=None))
    return min((limit for limit in found if limit is not None), default=None)


def check_host(
    spec: RunSpec,
    num_processes: int,
    processes_per_host: int,
    temporary_bytes: int | None,
) -> None:
    """Refuses what takes more host memory than the process may have, before any is taken.

    Args:
        spec: The run, fitted to its host as far as that goes.
        num_processes: See `fit_to_host`.
        processes_per_host: See `fit_to_host`.
        temporary_bytes: On a CPU, whose arrays and functions are all in the host's memory, the
            bytes that a function needs; None where arrays rest in a pool of pinned memory, as on a
            GPU.

    Raises:
        MemoryError: If it takes more.
    """
    own = spec.first.num_devices // num_processes
    total = _machine_bytes(spec.options, own * processes_per_host)
    most = pool.usable_bytes(spec.options.host_bytes, total, own, processes_per_host)
    peak = peak_bytes(spec.first) // num_processes
    if temporary_bytes is None:
        needed = pool.process_bytes(peak, spec.largest_slab_bytes, total, own)
        beside, fixed = "", beside_bytes(0)
    else:
        here = pool.available_process_bytes(processes_per_host)
        most = min((limit for limit in (most, here) if limit is not None), default=None)
        computing = own * (spec.first.schedule.peak_bytes + temporary_bytes)
        arrays = round((peak + computing) * (1 + _small_share(spec)))
        fixed = resident_bytes() + _COMPILING
        needed = fixed + arrays
        beside = f", {sized(computing)} for what is computed on, which a CPU has there, too"
        peak += computing
    if most is None or needed <= most:
        return
    state = peak_bytes(spec.first) // num_processes
    raise MemoryError(
        f"Training needs {sized(needed)} of host memory: {sized(state)} for state, what waits and "
        f"what is on its way{beside}, {sized(needed - peak)} for the rest of the process. It may "
        f"take {sized(most)} (`host_budget`, or what is available). Nothing was allocated. "
        f"{_advice(fixed, most)}"
    )


def _advice(fixed: int, most: int) -> str:
    """Sentences on what to change where a process may take less than training needs.

    Args:
        fixed: Bytes that the process needs beside what it trains.
        most: Bytes that the process may take.
    """
    allowed = "give this process or container more memory, end other programs"
    if fixed >= most:
        return (
            "That is too little for the rest of the process alone, so a smaller model or fewer "
            f"bytes per parameter would not help. Use a larger `host_budget`, {allowed}, or drop "
            "earlier trainers."
        )
    return (
        f"Use a larger `host_budget`, {allowed}, drop earlier trainers, cut a large batch by "
        '`microbatches="auto"`, or store fewer bytes a parameter (Precision.compact(), an '
        "optimizer with less state such as adafactor or lion)."
    )


def _small_share(spec: RunSpec) -> float:
    """The share of the state in arrays so small that a CPU's C library keeps their memory."""
    slabs = [slab for layout in spec.layouts for slab in layout.slabs]
    small = sum(s.num_bytes for s in slabs if s.num_bytes // s.num_shards < _RETURNED_BYTES)
    return small / sum(slab.num_bytes for slab in slabs)


def _computing_again(spec: RunSpec, may_fit: Callable[[Workload], bool]) -> Iterator[BoundStep]:
    """The run's steps with residuals that wait, and with more and more blocks computed again.

    Args:
        spec: The run.
        may_fit: Whether the host may hold any schedule of a workload: where not, which is known in
            no time, none is searched for.
    """
    inputs = sum(spec.first.workload.activations.values())
    lacking = 0.0  # bytes with nothing computed again
    # Spans don't grow one by one: each is a search for a schedule, and beyond 8 a span more frees
    # next to nothing. The first one is always searched for, as it tells what is lacking.
    for span in _SPANS:
        # No span frees more than the inputs of all but one of so many blocks.
        if lacking > inputs * (1 - 1 / span):
            continue
        try:
            if lacking > 0 and may_fit(workload_spanning(spec.first, span, lacking)):
                yield spanning(spec.first, span, spec.budget_bytes, spec.host_room, lacking)
            if lacking > 0 and not may_fit(workload_spanning(spec.first, span)):
                continue
            first = spanning(spec.first, span, spec.budget_bytes, spec.host_room)
        # The blocks between need more of the device at once than the budget has.
        except BudgetError:
            continue
        yield first
        lacking = lacking or first.schedule.passing_bytes - spec.host_room


def on_same_host(
    step: BoundStep,
    spec: RunSpec,
    num_processes: int,
    processes_per_host: int,
    *,
    training: bool,
) -> BoundStep:
    """A step of another batch shape, with the stages computed again that it takes.

    Args:
        step: The step.
        spec: The run, fitted to its host.
        num_processes: See `fit_to_host`.
        processes_per_host: See `fit_to_host`.
        training: Whether it is a training step, not an evaluation.

    Raises:
        MemoryError: If the host never suffices.
    """
    if math.isinf(spec.host_room):
        return step
    if training:
        asked = dataclasses.replace(spec, first=step)
        if found := fit_to_host(asked, num_processes, processes_per_host):
            return found.first
        what, passing = "A step", step.schedule.passing_bytes
        tried = ", and too much even if blocks are computed again"
    else:
        what, passing, tried = "An evaluation", step.schedule.evaluation_bytes, ""
        if passing <= spec.host_room:
            return step
    own = step.num_devices // num_processes
    state = state_bytes(step) // num_processes
    raise MemoryError(
        f"{what} on batches of this shape takes {sized(own * passing)} in host memory beside "
        f"{sized(state)} of state{tried}, where a process can take "
        f"{sized(state + int(own * spec.host_room))} in all. Nothing was computed. Use smaller or "
        "shorter batches."
    )


def pool_bytes(spec: RunSpec, num_processes: int, total: int | None) -> int:
    """Pinned host memory that a process takes for its devices' shares.

    Args:
        spec: The run.
        num_processes: Number of the processes that share it.
        total: The host's memory; None if unknown.
    """
    own, peak = spec.first.num_devices // num_processes, peak_bytes(spec.first) // num_processes
    return pool.pool_bytes(peak, spec.largest_slab_bytes, total, own)


def peak_bytes(step: BoundStep) -> int:
    """Host memory of all devices' state, of what waits there, and of arrays in flight."""
    return state_bytes(step) + step.num_devices * step.schedule.passing_bytes


def state_bytes(step: BoundStep) -> int:
    """Host memory of all devices' masters and optimizer state."""
    state = sum(s[Kind.MASTERS] + s[Kind.OPTIMIZER_STATE] for s in step.workload.sizes)
    return step.num_devices * state
