"""Fits a step to the host's memory: if it needs too much, more of it is recomputed.

In addition to the state at rest, the host stores parts that wait between tasks: gradients of
deferred updates, and parts that don't fit on the device. On long sequences these are the inputs of
all stages, and the costliest residuals. There are two ways to save host memory. Without residuals,
a stage's backward recomputes more. And if some forwards run again in the backward, only every
second, third or further input is stored; see `schedule/order.py`. Dropping an input costs a whole
block's forward, more than dropping residuals of its size. So as few blocks as possible run again,
and the search for a schedule stores residuals of as many remaining blocks as fit.

Example: 28 blocks with outputs of 3.8 GB each, 31 GB of state, and a host of 125 GB:

    span    computed again    residuals wait    bytes that wait            total
    1       none              28                29 x 3.8, residuals 108    249 GB
    1       none              none              29 x 3.8                   141 GB
    2       5 blocks          none              24 x 3.8                   122 GB: chosen
    2       13 blocks         none              16 x 3.8                    92 GB

All candidate blocks of a span run again only if fewer don't free enough. The last block never does,
because its backward follows its forward at once.

With disks, inputs may wait there as well, if that is faster; see `disk.py`.
"""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

from megatrain_jax._src.common.host_memory import available_bytes, resident_bytes
from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.schedule.host_pool import bytes_with_gaps
from megatrain_jax._src.engine.schedule.memory_demand import least_bytes, most_that_fit
from megatrain_jax._src.engine.schedule.schedule import BudgetError
from megatrain_jax._src.engine.schedule.tasks import build_task_lists
from megatrain_jax._src.engine.schedule.transient_host_bytes import least_transient_host_bytes
from megatrain_jax._src.engine.schedule.workload import Workload
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.costs import TYPICAL_DISK, batch_bytes, disk_link
from megatrain_jax._src.engine.spec.disk import state_for_disks
from megatrain_jax._src.engine.spec.rescheduled import (
    with_disks,
    with_recomputed_spans,
    with_state_on_disk,
    workload_with_recomputed_spans,
)
from megatrain_jax._src.engine.spec.run_spec import RunSpec
from megatrain_jax._src.engine.state import pool
from megatrain_jax._src.engine.state.drive import ORDINARY_MEMORY
from megatrain_jax._src.engine.state.hardware import Hardware
from megatrain_jax._src.engine.state.placement import Placement
from megatrain_jax._src.engine.state.pool_limit import beside_bytes

_SPANS = (1, 2, 3, 4, 6, 8, 12, 16)
_MIB_BITS = 20
# Where nothing fits, a run that needs this fraction more than the lower bound is near enough.
_NEAR = 0.05
# How often more state is put on disks, because a schedule needs more memory than expected, and the
# least part of it that is added.
_MOST_TRIALS, _MORE = 6, 32
# On a CPU, the C library allocates arrays. It returns freed arrays of at least this size to the
# system, and keeps the memory of smaller ones: after some steps on arrays of 1 to 16 MiB, it held
# 1.6 to 1.95 times their bytes.
_RETURNED_BYTES = 2**25
# The compiler's memory on a CPU: 120 MiB for a small model.
_COMPILING = 2**28
# Memory for communication in each process of a run on several GPUs. Measured on two H200s: 0.2 to
# 1.3 GiB where one process has both, and 1.4 and 2.2 GiB where two processes have one each.
COMMUNICATION_BYTES, BETWEEN_PROCESSES_BYTES = 7 * 2**30 // 8, 7 * 2**30 // 4
# Number of batches that a process has in memory: the data's own, and copies on their way to a GPU,
# for which JAX's pools grow by powers of two. A script on an H200 that made four batches of 77 MB
# took as much as 11 of them beside its pool and what any process takes.
_BATCHES = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostProcess:
    """The host memory that one process of a run may take and needs.

    Attributes:
        num_devices: Number of the process's devices.
        total_bytes: The host's memory; None if unknown.
        usable_bytes: Maximum bytes of the process; None if unknown.
        array_bytes: Bytes of the largest array of the store per device.
        list_bytes: See `beside_bytes`.
        unpinned_bytes: Bytes for batches and for communication between the run's devices.
        base_bytes: See `RunSpec`.
        computing_bytes: Bytes of what is on a GPU otherwise, where a CPU computes.
        small_share: Fraction of the state in small arrays, whose memory the C library keeps.
    """

    num_devices: int
    total_bytes: int | None
    usable_bytes: int | None
    array_bytes: int
    list_bytes: int
    unpinned_bytes: int
    base_bytes: int | None
    computing_bytes: int
    small_share: float

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the process without state: interpreter, CUDA, XLA, batches, communication."""
        if self.base_bytes is not None:
            return self.base_bytes
        return beside_bytes(0, self.list_bytes) + self.unpinned_bytes

    @functools.cached_property
    def most_bytes(self) -> int | None:
        """The most bytes of arrays in its pools, to a MiB; None if `usable_bytes` is unknown."""
        if (usable := self.usable_bytes) is None:
            return None

        def fits(mib: int) -> bool:
            return self.needed(mib << _MIB_BITS) <= usable

        return most_that_fit(usable >> _MIB_BITS, fits) << _MIB_BITS

    def needed(self, num_bytes: int) -> int:
        """Bytes of the process if the arrays in its pools, with gaps, take so many bytes."""
        if self.base_bytes is not None:  # a CPU has no pools
            arrays = num_bytes + self.computing_bytes
            return self.base_bytes + round(arrays * (1 + self.small_share))
        what = self.total_bytes, self.num_devices, self.list_bytes
        return pool.process_bytes(num_bytes, self.array_bytes, *what) + self.unpinned_bytes

    def pool_bytes(self, num_bytes: int) -> int:
        """The pinned memory among them."""
        what = self.total_bytes, self.num_devices, self.list_bytes
        return pool.pool_bytes(num_bytes, self.array_bytes, *what)


def host_process(spec: RunSpec, num_processes: int, processes_per_host: int) -> HostProcess:
    """The host memory of each process of a run; see `fit_to_host`."""
    own, options = spec.first.num_devices // num_processes, spec.options
    # The devices of a host share its memory.
    on_cpu, machine = spec.base_bytes is not None, None
    if not on_cpu:
        machine = options.machine and options.machine.times(own * processes_per_host)
    total = machine and machine.assumed_host_bytes
    lists = own * machine.list_bytes if machine else 0
    unpinned = _BATCHES * batch_bytes(spec.first.program, spec.first.microbatches) // num_processes
    if num_processes > 1 or options.state_per_process:
        unpinned += BETWEEN_PROCESSES_BYTES
    elif spec.first.num_devices > 1:
        unpinned += COMMUNICATION_BYTES
    return HostProcess(
        num_devices=own,
        total_bytes=total,
        usable_bytes=pool.usable_bytes(
            options.host_bytes, total, own, processes_per_host, lists, unpinned
        ),
        base_bytes=spec.base_bytes,
        computing_bytes=own * (spec.first.schedule.peak_bytes + (spec.temporary_bytes or 0)),
        small_share=_small_share(spec) if on_cpu else 0.0,
        array_bytes=spec.largest_slab_bytes,
        list_bytes=lists,
        unpinned_bytes=unpinned,
    )


def fit_to_host(spec: RunSpec, num_processes: int = 1, processes_per_host: int = 1) -> RunSpec:
    """The run that fits in the host with the fewest stages computed again, or with disks.

    It has the fastest schedule with these stages. The run is unchanged if it fits already, or if
    the host's memory is unknown. With disks, a part of the state rests there if that is faster, or
    if nothing else helps.

    Args:
        spec: The run, fitted to its device.
        num_processes: Number of processes that share the run.
        processes_per_host: Number of processes on each host.

    Returns:
        The run; if it never fits, the one that lacks the fewest bytes.
    """
    spread = num_processes, processes_per_host
    in_memory = _fit_in_memory(spec, *spread)
    is_unchanged = in_memory.first is spec.first and not in_memory.lacking_host
    if is_unchanged or not spec.options.has_disk:
        return in_memory
    on_disk = fit_with_disk(spec, *spread)
    return min(in_memory, on_disk or in_memory, key=rank)


def rank(spec: RunSpec) -> tuple[tuple[int, int], float]:
    """The order of runs: the one that lacks the fewest bytes is the best, then the fastest."""
    return spec.lacking, spec.first.schedule.seconds


def fit_with_disk(spec: RunSpec, num_processes: int, processes_per_host: int) -> RunSpec | None:
    """The run with as much on disks as the host lacks memory; None if it never fits.

    If state is not enough, activations wait on disks, or blocks are computed again, or both.
    """
    process = host_process(spec, num_processes, processes_per_host)
    if process.usable_bytes is None or (process.most_bytes or 0) <= 0:
        return None
    best = None
    for span in _SPANS:
        found = _on_disk_in_spans(spec, span, process, num_processes, processes_per_host)
        if found is None:
            continue
        best = min(best or found, found, key=rank)
        # Further spans only compute more, unless they save copies of activations.
        if not any(key.kind is Kind.ACTIVATION for key in found.on_disk):
            break
    return best


def _on_disk_in_spans(
    spec: RunSpec, span: int, process: HostProcess, num_processes: int, processes_per_host: int
) -> RunSpec | None:
    """See `fit_with_disk`; of each `span` blocks, all but one are computed again."""
    whole = workload_with_recomputed_spans(spec.first, span)
    room = (process.most_bytes or 0) // process.num_devices
    lacking = max(1, _least_bytes_per_device(spec, whole) - room)
    for _ in range(_MOST_TRIALS):
        on_disk = state_for_disks(spec, lacking, whole.again)
        if on_disk is None:
            return None
        workload = dataclasses.replace(whole, on_disk=on_disk)
        taken = process.num_devices * sum(map(workload.size, on_disk))
        if taken > (spec.options.disk_bytes or math.inf):
            return None
        # Without a search for a schedule, while no schedule could fit.
        short = _least_bytes_per_device(spec, workload) - room
        if short <= 0:
            left = room - workload.resting_bytes
            try:
                what = spec.first, on_disk, whole.again
                first = with_state_on_disk(*what, spec.budget_bytes, left)
            except BudgetError:
                return None
            trial = dataclasses.replace(
                spec, first=first, on_disk=on_disk, host_room=left, lacking_host=0
            )
            own = host_process(trial, num_processes, processes_per_host)
            needed = own.needed(peak_bytes(first) // num_processes)
            short = (needed - (own.usable_bytes or 0)) // process.num_devices
            if short <= 0:
                return trial
        lacking += max(short, lacking // _MORE)
    return None


def _fit_in_memory(spec: RunSpec, num_processes: int, processes_per_host: int) -> RunSpec:
    """See `fit_to_host`, without disks."""
    process = host_process(spec, num_processes, processes_per_host)
    if (usable := process.usable_bytes) is None:
        return spec

    def lacking(peak: int, first: BoundStep = spec.first) -> int:
        own = host_process(
            dataclasses.replace(spec, first=first), num_processes, processes_per_host
        )
        return max(0, own.needed(peak // num_processes) - usable)

    most = process.most_bytes or 0
    room = most // process.num_devices - state_bytes(spec.first) // spec.first.num_devices
    spec = dataclasses.replace(spec, host_room=room, lacking_host=lacking(peak_bytes(spec.first)))
    if not spec.lacking_host:
        return spec

    def least(workload: Workload) -> int:
        peak = spec.first.num_devices * _least_bytes_per_device(spec, workload)
        return lacking(peak)

    def may_fit(workload: Workload) -> bool:
        return not least(workload)

    def found(first: BoundStep) -> RunSpec:
        lacks = lacking(peak_bytes(first), first)
        return dataclasses.replace(spec, first=first, lacking_host=lacks)

    if room > 0 and _may_fit_any(spec, may_fit):
        for run in map(found, _computing_again(spec, may_fit)):
            if not run.lacking_host:
                return run
    # Nothing fits, so what comes nearest is found; a lower bound tells where to stop.
    nearest = spec
    spans = {span: least(workload_with_recomputed_spans(spec.first, span)) for span in _SPANS}
    for span in sorted(spans, key=spans.__getitem__):
        if usable + nearest.lacking_host <= (1 + _NEAR) * (usable + spans[span]):
            break
        with contextlib.suppress(BudgetError):
            first = with_recomputed_spans(spec.first, span, spec.budget_bytes, room)
            nearest = min(nearest, found(first), key=rank)
    return nearest


def _least_bytes_per_device(spec: RunSpec, workload: Workload) -> int:
    """A lower bound of one device's host bytes over all schedules of a workload."""
    lists = build_task_lists(workload, few_waves=True)
    limit = spec.budget_bytes
    limit = least_bytes(lists, frozenset()) if limit is None else limit
    return workload.resting_bytes + least_transient_host_bytes(lists, limit)


def _may_fit_any(spec: RunSpec, may_fit: Callable[[Workload], bool]) -> bool:
    """Whether the host could suffice if no activation ever waited there."""
    if spec.budget_bytes is None:
        return True
    nothing = {"activations": {}, "makes": (), "reads": ()}
    return may_fit(dataclasses.replace(spec.first.workload, **nothing))


def agreed_host_budget(options: Options, placement: Placement) -> int | None:
    """The host memory that each of a run's processes may take now.

    Args:
        options: The run's options; a host budget is an upper limit.
        placement: The run's devices and processes.

    Returns:
        Bytes, the same in all processes; None if unknown.
    """
    processes, num_devices = placement.processes, len(placement.local_devices)
    free = pool.available_process_bytes(processes.num_here, num_devices)
    least = _least(options.host_bytes, free)
    return _least(*processes.gather("asking for available host memory", least))


def _least(*limits: int | None) -> int | None:
    """The least of the known limits; None if none is known."""
    return min((limit for limit in limits if limit is not None), default=None)


def process_base_bytes() -> int:
    """Bytes of this process before a run, and of the compiler; see `RunSpec.base_bytes`."""
    return resident_bytes() + _COMPILING


def within_pinned(spec: RunSpec, num_pinned: int, hardware: Hardware | None) -> RunSpec:
    """The run in a process that can pin only so many bytes; the rest rests in ordinary memory.

    Args:
        spec: The run, of one process.
        num_pinned: Bytes that its pools can have in all.
        hardware: The run's hardware, with the rates of copies within the host's memory as those of
            disks.
    """
    process = host_process(spec, 1, 1)
    arrays = most_that_fit(
        num_pinned >> _MIB_BITS, lambda mib: process.pool_bytes(mib << _MIB_BITS) <= num_pinned
    )
    budget = process.needed(arrays << _MIB_BITS)
    # Both are in the host's memory, so a given `host_budget` limits their sum.
    rest = max(0, min(available_bytes(), spec.options.host_bytes or sys.maxsize) - budget)
    options = dataclasses.replace(
        spec.options,
        host_budget=budget,
        disk_dir=(str(ORDINARY_MEMORY),),
        disk_budget=rest,
        hardware=hardware,
    )
    first = spec.first
    if hardware is not None:
        first = with_disks(first, disk_link(hardware, first.num_devices))
    return dataclasses.replace(spec, options=options, first=first)


def check_host(spec: RunSpec, num_processes: int, processes_per_host: int) -> None:
    """Refuses a run that needs more host memory than the process may take, before allocation.

    Args:
        spec: The run, fitted to its host as far as possible.
        num_processes: See `fit_to_host`.
        processes_per_host: See `fit_to_host`.

    Raises:
        MemoryError: If the run needs more.
    """
    process = host_process(spec, num_processes, processes_per_host)
    most, peak = process.usable_bytes, peak_bytes(spec.first) // num_processes
    needed, computing, beside = process.needed(peak), 0, ""
    if spec.base_bytes is not None:
        free = pool.available_process_bytes(processes_per_host, process.num_devices)
        most = _least(most, free)
        computing = process.computing_bytes
        beside = f", {sized(computing)} for computation, which a CPU does there, too"
    if most is None or needed <= most:
        return
    rest = needed - peak - computing
    raise MemoryError(
        f"Training needs {sized(needed)} of host memory: {sized(peak)} for state, waiting "
        f"values and arrays on their way{beside}, {sized(rest)} for the rest of the "
        f"process. It may take {sized(most)} (`host_budget`, or what is available). "
        "Nothing was allocated. "
        f"{_advice(process.fixed_bytes, most)}{_with_disk(spec, num_processes, processes_per_host)}"
    )


def _with_disk(spec: RunSpec, num_processes: int, processes_per_host: int) -> str:
    """A sentence on what a disk, or more of it, would do; empty if a run without would not fit."""
    options = spec.options
    unlimited = dataclasses.replace(spec, options=dataclasses.replace(options, disk_budget=None))
    found = fit_with_disk(unlimited, num_processes, processes_per_host)
    if found is None:
        return (
            " All this is without `disk_dir`, which can't free enough."
            if options.disk_folders
            else ""
        )
    step = found.first
    num_bytes = step.num_devices * sum(map(step.workload.size, found.on_disk))
    if options.disk_bytes is not None:
        return (
            f" Or use a larger `disk_budget` than {sized(options.disk_bytes)}: "
            f"{sized(num_bytes // num_processes)} would rest in `disk_dir`."
        )
    read, written = (rate / 1e9 for rate in TYPICAL_DISK)
    return (
        f" Or give a `disk_dir`: {sized(num_bytes)} would rest there, and on a drive that reads "
        f"{read:g} GB/s and writes {written:g} a step would take about "
        f"{step.schedule.seconds:.3g} s."
    )


def _advice(fixed: int, most: int) -> str:
    """Sentences on what to change where a process may take less than training needs.

    Args:
        fixed: Bytes that the process needs besides the arrays of the run.
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
        f"Use a larger `host_budget`, {allowed}, drop earlier trainers, cut a large batch into "
        "more `microbatches`, or store fewer bytes a parameter (Precision.compact(), an optimizer "
        "with less state such as adafactor or lion)."
    )


def _small_share(spec: RunSpec) -> float:
    """The fraction of the state in small arrays, since the C library keeps their memory."""
    slabs = [slab for layout in spec.layouts for slab in layout.slabs]
    small = sum(s.num_bytes for s in slabs if s.num_bytes // s.num_shards < _RETURNED_BYTES)
    return small / sum(slab.num_bytes for slab in slabs)


def _computing_again(spec: RunSpec, may_fit: Callable[[Workload], bool]) -> Iterator[BoundStep]:
    """The run's steps with more and more blocks computed again, starting with none.

    Args:
        spec: The run.
        may_fit: A quick test whether any schedule of a workload could fit in the host; if not, the
            slow search for a schedule is skipped.
    """
    inputs = sum(spec.first.workload.activations.values())
    lacking = 0.0  # missing host bytes with nothing computed again
    tried: set[frozenset[int]] = set()
    # Spans skip numbers, because each needs a search for a schedule, and beyond 8 one more frees
    # almost nothing. The first one is always searched, because it gives the missing bytes.
    for span in _SPANS:
        # A span frees at most the inputs of all but one of its blocks.
        if lacking > inputs * (1 - 1 / span):
            continue
        # First only as many blocks as seem to be enough, then all.
        for num_bytes in (lacking, math.inf) if lacking > 0 else (math.inf,):
            workload = workload_with_recomputed_spans(spec.first, span, num_bytes)
            if lacking > 0 and (workload.again in tried or not may_fit(workload)):
                continue
            tried.add(workload.again)
            try:
                first = with_recomputed_spans(
                    spec.first, span, spec.budget_bytes, spec.host_room, num_bytes
                )
            # The blocks of a span need more device memory at once than the budget.
            except BudgetError:
                break
            yield first
            lacking = lacking or first.schedule.transient_bytes - spec.host_room


def fit_new_shape_to_host(
    step: BoundStep, spec: RunSpec, num_processes: int, processes_per_host: int, *, training: bool
) -> BoundStep:
    """A step of a new batch shape, with as many stages computed again as it needs.

    `spec` is the run, fitted to its host; see `fit_to_host` for the numbers of processes.

    Raises:
        MemoryError: If the host never suffices.
    """
    if math.isinf(spec.host_room):
        return step
    if training:
        asked = dataclasses.replace(spec, first=step)
        # What rests on disks stays there: the drives have space for nothing else.
        found = _fit_in_memory(asked, num_processes, processes_per_host)
        if not found.lacking_host:
            return found.first
        what, passing = "A step", step.schedule.transient_bytes
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


def peak_bytes(step: BoundStep) -> int:
    """Host memory of all devices' state, waiting parts, and arrays in flight."""
    return state_bytes(step) + step.num_devices * step.schedule.transient_bytes


def state_bytes(step: BoundStep) -> int:
    """Host memory of all devices' masters and optimizer state, and of slots for parts on disks."""
    return step.num_devices * step.workload.resting_bytes


# For steps of many waves a simulation takes a second, and plans are asked for often.
_found: WeakKeyDictionary[BoundStep, int] = WeakKeyDictionary()


def pooled_bytes(spec: RunSpec, num_processes: int, processes_per_host: int) -> int:
    """The bytes that one process's pools of pinned memory need so that they hardly ever grow.

    A pool that grows takes at least as much memory again as its largest piece. Gaps are an
    estimate, so a run isn't refused because of them: they count as far as the process may take
    them.

    Args:
        spec: The run, fitted to its host, with all waves.
        num_processes: Number of processes that share the run.
        processes_per_host: Number of processes on each host.
    """
    process, step = host_process(spec, num_processes, processes_per_host), spec.first
    if step not in _found:
        _found[step] = _bytes_with_gaps(spec)
    with_gaps, most = process.num_devices * _found[step], process.most_bytes
    peak = peak_bytes(step) // num_processes
    return max(peak, with_gaps if most is None else min(with_gaps, most))


def _bytes_with_gaps(spec: RunSpec) -> int:
    """The bytes of one device's pool, with gaps, by simulation."""
    step, program = spec.first, spec.first.program
    workload = dataclasses.replace(step.scheduled, kept=step.schedule.kept)

    @functools.cache
    def arrays(key: Key) -> list[int]:
        number = step.wave_microbatches
        if key.kind is Kind.ACTIVATION:
            return [workload.size(key) // number] * number
        if key.kind is Kind.RESIDUALS:
            residuals = step.keeping[key.owner].residuals
            assert residuals is not None
            each = [program.examples.num_bytes([x], step.num_devices) for x in residuals.avals]
            return each * number
        return spec.layouts[key.owner].arrays(step.gradient_dtypes[key.owner])[key.kind]

    return bytes_with_gaps(build_task_lists(workload), step.schedule, arrays)
