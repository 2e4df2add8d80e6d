"""Starts a run: compiles functions, pins host memory, and fills the store with initial values.

On a GPU, two threads work in parallel:

    main thread                         one thread
    compiles functions                  reads files of parameters
    times them, and schedules by that   reads
    pins host memory, shown in a bar    reads
    times copies, and schedules again   reads
    fills the store                     -

While memory is pinned, only threads that prefault its pages run (see `prefaulting`): the
kernel makes threads that need more memory wait, such as a compiler's.
No large array is sent to a device before the pool is reserved, because its copy goes through the
pool and would make it grow in small steps.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from megatrain_jax._src.common.activity import doing, progressed
from megatrain_jax._src.common.host_memory import available_bytes, return_freed_memory
from megatrain_jax._src.common.progress import Phases, tqdm
from megatrain_jax._src.common.remembering import gc_paused, remembering
from megatrain_jax._src.common.sizes import sized
from megatrain_jax._src.engine.adapt.adapters import AdaptedModel
from megatrain_jax._src.engine.adapt.initial_values import InitialValues
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.steps import scaling_of
from megatrain_jax._src.engine.kernels.tiles import has_triton
from megatrain_jax._src.engine.options.batch_checks import num_rows
from megatrain_jax._src.engine.options.inputs import check_mesh
from megatrain_jax._src.engine.options.machine import check_products
from megatrain_jax._src.engine.options.options import Options
from megatrain_jax._src.engine.report.make_plan import check_device, make_plan
from megatrain_jax._src.engine.report.run_warnings import find_warnings, warn_of
from megatrain_jax._src.engine.runtime.disk import Disk
from megatrain_jax._src.engine.runtime.engine import Engine
from megatrain_jax._src.engine.runtime.evaluation import batch_shapes
from megatrain_jax._src.engine.runtime.fill import ReadAhead, fill_store, initial_kernels
from megatrain_jax._src.engine.runtime.store import Store
from megatrain_jax._src.engine.runtime.transfers import measured_rates
from megatrain_jax._src.engine.spec import measured
from megatrain_jax._src.engine.spec.budget import fitted_and_compiled
from megatrain_jax._src.engine.spec.disk import arrays_of
from megatrain_jax._src.engine.spec.host import (
    agreed_host_budget,
    check_host,
    fit_to_host,
    peak_bytes,
    pooled_bytes,
    process_base_bytes,
    state_bytes,
    within_pinned,
)
from megatrain_jax._src.engine.spec.make_spec import make_run_spec
from megatrain_jax._src.engine.spec.microbatches import (
    chooses_microbatches_or_waves,
    fit_with_microbatches,
)
from megatrain_jax._src.engine.spec.rescheduled import run_with_all_waves
from megatrain_jax._src.engine.spec.run_spec import RunSpec, distinct_facts
from megatrain_jax._src.engine.spec.state_choice import choose_state, copied, shared_because
from megatrain_jax._src.engine.spec.step_kernels import step_kernels
from megatrain_jax._src.engine.spec.tile_search import TileFinder
from megatrain_jax._src.engine.state import pool
from megatrain_jax._src.engine.state.drive import ORDINARY_MEMORY, check_space, drives_of, in_memory
from megatrain_jax._src.engine.state.drive import measured_rates as measured_disk_rates
from megatrain_jax._src.engine.state.hardware import Hardware, card_here, within_pools
from megatrain_jax._src.engine.state.network import measured_rate
from megatrain_jax._src.engine.state.placement import (
    Placement,
    default_mesh,
    device_count_text,
    placed_on,
)
from megatrain_jax._src.engine.state.pool import (
    PinningRefusedError,
    advice_on_pages,
    pins_small_pages,
    warning_of_little,
)
from megatrain_jax._src.engine.state.processes import PeerEndedError, Processes

_IN_MEMORY = (
    "`disk_dir`={!r} lies in the host's memory itself, so that nothing is saved by keeping state "
    "there: give a folder of a drive (`df -T` tells)"
)
_LITTLE_PINNED = (
    "the system pinned {} of host memory and refused more, so the rest of the state rests in "
    "ordinary memory, from where it is copied through pinned memory: that takes "
    "longer. See `disk_dir`"
)
# A shorter start is not explained.
_SECONDS_TO_EXPLAIN = 10.0


def on_this_machine(run: Options) -> tuple[Options, Placement, bool]:
    """Completes a run's options with the mesh, the hardware and the host memory of this machine.

    Returns:
        The options, the placement on the devices of their mesh, and whether there is a GPU.

    Raises:
        ValueError: If this machine can't train on the mesh.
    """
    # Starts JAX's backend; settings that must precede this were made on import.
    machine = card_here()
    check_products(run.dtypes, machine)
    mesh = run.mesh or default_mesh()
    check_mesh(mesh)
    placement = placed_on(mesh)
    hardware = run.machine or machine
    if hardware and machine:  # a named card is in this host, and this GPU computes
        host = hardware.host_bytes or machine.host_bytes
        hardware = replace(hardware, host_bytes=host, has_bfloat16=machine.has_bfloat16)
        number = len(placement.local_devices) * placement.processes.num_here
        hardware = within_pools(hardware, number)
    if hardware:
        count, here = placement.process_counts
        hardware = replace(hardware, hosts=max(1, count // here), copies=1)
        hardware = _with_disks(hardware, run.disk_folders, placement.processes)
    run = replace(run, hardware=hardware, mesh=mesh)
    if machine is not None or run.disk_folders:
        run = replace(run, host_budget=agreed_host_budget(run, placement))
    if placement.processes.count == 1:
        run = replace(run, state_per_process=False)
    elif run.state_per_process is True:
        placement = placed_on(mesh, per_process=True)
        run = run.on_own_devices(_own_mesh(placement), placement.num_copies)
    return run, placement, machine is not None


def _own_mesh(placement: Placement) -> Mesh:
    """The mesh of a process that holds all state on its own devices."""
    return Mesh(placement.devices, ("data",))


def _with_disks(hardware: Hardware, folders: Sequence[Path], processes: Processes) -> Hardware:
    """The hardware with the measured rates of the disks that a run may use, or without disks."""
    if not folders:
        return replace(hardware, disk_read_bytes_per_s=None, disk_write_bytes_per_s=None)
    if hardware.disk_read_bytes_per_s is not None:
        return hardware
    processes.gather("beginning to time disks", None)  # processes of one host share its disks
    rates = processes.gather("timing disks", measured_disk_rates(folders))
    read, written, both = (processes.num_here * min(each) for each in zip(*rates, strict=True))
    return replace(
        hardware,
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=written,
        disk_bytes_per_s=both,
    )


def local_run_spec(
    adapted: AdaptedModel,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    sample_batch: Any,
    run: Options,
    placement: Placement,
    has_gpu: bool,
) -> tuple[RunSpec, Placement]:
    """The run's spec; on a GPU, its numbers of microbatches and waves fit in the GPU's memory.

    Where the plan chooses `state_per_process`, the placement may become that of a copy.

    Args:
        adapted: The model.
        loss_fn: See `Trainer`.
        optimizer: See `Trainer`.
        sample_batch: See `Trainer`.
        run: The options, completed by `on_this_machine`.
        placement: The run's devices.
        has_gpu: Whether this machine has a GPU.

    Raises:
        ValueError: If model, loss, optimizer, batch and options don't fit together, or the
            processes don't agree on them.
    """
    adapted.check_batch(sample_batch)
    processes = placement.processes

    make_for = partial(partial, make_run_spec, adapted, loss_fn, optimizer)
    with gc_paused(), remembering():
        run, placement, choice = _with_chosen_state(run, make_for, sample_batch, placement)
        sample = batch_shapes(sample_batch, placement.num_processes)
        make = make_for(sample)
        spec = make(with_chosen_microbatches(run, make, sample, placement, has_gpu))
        spec = replace(spec, state_choice=choice)
    # Before anything large is made, so an error comes early.
    processes.agree("the beginning of a run", lambda: distinct_facts(spec, sample))
    if processes.is_first:
        warn_of(find_warnings(spec))
    return spec, placement


def _with_chosen_state(
    run: Options,
    make_for: Callable[[Any], Callable[[Options], RunSpec]],
    sample_batch: Any,
    placement: Placement,
) -> tuple[Options, Placement, str]:
    """A run's options and placement with the plan's choice of `state_per_process`, if it is asked.

    Args:
        run: The options, for shared state.
        make_for: Makes, for the shapes of a batch, the function that makes a run's spec.
        sample_batch: See `Trainer`.
        placement: The run's devices, with shared state.

    Returns:
        The options, the placement, and a sentence on the choice; "" if nothing was to choose.
    """
    if run.state_per_process != "auto":
        return run, placement, ""
    assert run.mesh is not None
    shared, processes = replace(run, state_per_process=False), placement.processes
    apart = placed_on(run.mesh, per_process=True)
    own = copied(shared, _own_mesh(apart), apart.num_copies)
    rate, reason = math.inf, own if isinstance(own, str) else ""
    if (machine := shared.machine) is None:
        reason = "rates are known of GPUs, or of `hardware`"
    elif processes.num_here > 1:
        reason = "processes of one host would hold several copies"
    else:
        rate = machine.network_bytes_per_s
    # Hosts may have other numbers of processes.
    rows = processes.gather("asking who can hold all state", [reason, rate])
    reason = next((found for found, _ in rows if found), "")
    if machine is None or isinstance(own, str) or reason:
        return shared, placement, shared_because(reason)
    if (rate := min(given for _, given in rows)) == math.inf:
        rate = measured_rate(placement)

    def fitted(run: Options) -> RunSpec:
        there = apart if run.state_per_process else placement
        sample = batch_shapes(sample_batch, there.num_processes)
        # Nothing but this choice depends on a measured rate.
        hardware = run.machine and replace(run.machine, network_bytes_per_s=rate)
        run = replace(run, hardware=hardware)
        return _fitted(run, make_for(sample), sample, there)

    found = choose_state(shared, own, fitted)
    # Every host needs room for a copy; their memory and rates may differ.
    rows = processes.gather(
        "choosing who holds the state", [bool(found.options.state_per_process), found.state_choice]
    )
    is_copied, why = next((row for row in rows if not row[0]), rows[0])
    return (own, apart, why) if is_copied else (shared, placement, why)


def with_chosen_microbatches(
    run: Options,
    make: Callable[[Options], RunSpec],
    sample: Any,
    placement: Placement,
    has_gpu: bool,
) -> Options:
    """Completes a run's options with the numbers of microbatches and waves.

    Args:
        run: The options.
        make: Makes a run's spec for options with a number of microbatches.
        sample: The shapes of a batch, over all processes.
        placement: The run's devices.
        has_gpu: Whether this machine has a GPU, so that the run has to fit in its memory.
    """
    if not chooses_microbatches_or_waves(run) or not has_gpu:
        return replace(run, microbatches=run.least_microbatches)
    return _fitted(run, make, sample, placement).options


def _fitted(
    run: Options, make: Callable[[Options], RunSpec], sample: Any, placement: Placement
) -> RunSpec:
    """The run fitted to its machine by estimates, so that nothing is compiled for other numbers."""
    planned = placed_on(AbstractMesh((run.num_devices,), ("data",)))
    tiles, rows = TileFinder(KernelCache(platform="gpu"), planned), num_rows(sample) or 1
    return fit_with_microbatches(run, make, rows, tiles, placement.process_counts)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is traced and cut, but has neither compiled functions nor arrays.

    Attributes:
        spec: The run.
        placement: The run's devices.
        initial: The initial values of its state.
        sample_batch: A batch, or its shapes.
        progress: Whether to show progress.
        has_gpu: Whether this machine has a GPU.
        began: The time at which this began, in seconds of `time.perf_counter`.
    """

    spec: RunSpec
    placement: Placement
    initial: InitialValues
    sample_batch: Any
    progress: bool
    has_gpu: bool
    began: float


def start(run: Prepared) -> tuple[RunSpec, Engine, Mapping[str, float]]:
    """Makes a run's engine on this machine, and fills its store.

    Returns:
        The run with its device budget known, the engine before the first step, and the seconds of
        each phase of the start.

    Raises:
        MemoryError: If host memory or device memory is too small.
        PeerEndedError: If another process of the run could not start.
    """
    # On a CPU, functions are compiled by the first step, and nothing is pinned.
    told = ("compiling", "timing", "pinning", "initialising") if run.has_gpu else ("initialising",)
    phases = Phases(run.began, told, run.progress)
    machine, processes = run.spec.options.machine, run.placement.processes
    if run.progress and not run.has_gpu and machine is not None:
        tqdm.write(
            f"`hardware`={machine.name} sets the rates of schedule and plan; JAX sees no GPU, so "
            "this run computes on the CPU",
            file=sys.stderr,
        )
    try:
        with doing("starting a run"):
            spec, engine = _started_with_what_is_pinned(run, phases)
    except PeerEndedError:
        raise
    except BaseException as error:
        with contextlib.suppress(PeerEndedError):
            # The peers would wait forever at their next synchronisation.
            processes.leave(f"{type(error).__name__}: {error}")
        raise
    if run.progress and sum(phases.seconds.values()) >= _SECONDS_TO_EXPLAIN:
        tqdm.write(str(phases), file=sys.stderr)
    return spec, engine, phases.seconds


def _started_with_what_is_pinned(run: Prepared, phases: Phases) -> tuple[RunSpec, Engine]:
    """The started run; if the system refuses to pin all of its state, without pinning the rest."""
    try:
        return _started(run, run.spec, phases)
    except PinningRefusedError as error:
        processes = run.placement.processes
        if run.spec.options.disk_folders or processes.count > 1:
            raise
        warn_of([_LITTLE_PINNED.format(sized(error.num_pinned))])
        num_bytes = error.num_pinned * len(run.placement.local_devices)
        machine = run.spec.options.machine
        hardware = machine and _with_disks(machine, [ORDINARY_MEMORY], processes)
        return _started(run, within_pinned(run.spec, num_bytes, hardware), phases)


def _started(run: Prepared, spec: RunSpec, phases: Phases) -> tuple[RunSpec, Engine]:
    """See `start`."""
    placement, initial = run.placement, run.initial
    progress, has_gpu = run.progress, run.has_gpu
    kernels, processes = empty_kernel_cache(spec, placement), placement.processes
    # Files read ahead have to fit in the host beside the run's state; otherwise they are read
    # twice.
    left = available_bytes() - peak_bytes(spec.first) // placement.num_processes
    if has_gpu:
        kernels.queue_for_compile(initial_kernels(spec, placement, initial))
    with ReadAhead(initial.files if has_gpu else (), left):
        text = warning_of_little(state_bytes(spec.first) // placement.num_processes)
        if has_gpu and processes.is_first and text:
            warn_of([text])
        with phases.phase("compiling"), group_bar("compiling", spec, placement, progress):
            spec, free = fit_and_compile(spec, kernels, placement, has_gpu=has_gpu)
            whole = run_with_all_waves(spec)
            _check(whole, kernels, placement, free, has_gpu=has_gpu)
        measures = has_gpu and measured.is_worth_measuring(spec)
        if measures:
            with phases.phase("timing"):
                spec = measured.by_measured_times(spec, kernels, placement, run.sample_batch)
                whole = run_with_all_waves(spec)
        if has_gpu and spec.num_parts > 1:  # functions were compiled for other ways to cut, too
            step = step_kernels(spec.first, spec.layouts, spec.optimizer, placement)
            kernels.keep_only((*step, *initial_kernels(spec, placement, initial)))
            return_freed_memory()
        # After compiling: only then is it known what waits in the host, and so how much to pin.
        with phases.phase("pinning"), _pinning_bar(placement, progress, phases) as show:
            least = num_bytes = peak_bytes(whole.first) // placement.num_processes
            if has_gpu:
                num_bytes = pooled_bytes(whole, *placement.process_counts)
            pool.reserve(placement, num_bytes, spec.largest_slab_bytes, show, least)
        if measures and measured.has_copies(spec):
            with phases.phase("timing copies"):
                schedule = whole.first.schedule
                room = min(num_bytes // len(placement.local_devices), schedule.peak_bytes)
                rates = measured_rates(placement, room, spec.largest_slab_bytes)
                found = measured.by_measured_rates(spec, *rates, schedule.transient)
                # Copies in another order may leave larger gaps. The pools have room for one more
                # array.
                spare = len(placement.local_devices) * spec.largest_slab_bytes
                if pooled_bytes(found, *placement.process_counts) <= num_bytes + spare:
                    whole = found
        spec = whole
    with (
        phases.phase("initialising"),
        group_bar("initialising", spec, placement, progress) as bar,
    ):
        scaling = scaling_of(None) if spec.optimizer.is_scaled else None
        disk = None
        if spec.on_disk:
            folders = spec.options.disk_folders
            found = [x for x in folders if x != ORDINARY_MEMORY and in_memory(x)]
            if processes.is_first and found:
                warn_of([_IN_MEMORY.format(str(found[0]))])
            parts = {key: arrays_of(spec, key) for key in spec.on_disk}
            disk = Disk(drives_of(folders), parts, spec.on_disk, placement)
        key = jax.random.key(spec.options.seed)
        store = Store(spec.layouts, placement, key, scaling, disk)
        fill_store(spec, store, kernels, initial, bar.update)
    return spec, Engine(store, spec.optimizer, kernels)


def empty_kernel_cache(spec: RunSpec, placement: Placement) -> KernelCache:
    """An empty cache for a run's kernels, with XLA's options for them."""
    with_triton = placement.platform == "gpu" and has_triton(placement.devices)
    in_float8 = spec.precision.products is not None
    # XLA does not divide these kernels over devices.
    code_passes = in_float8 and placement.num_devices == 1 and with_triton
    return KernelCache(
        placement.compiler_options,
        placement.platform,
        code_passes=code_passes,
        with_triton=with_triton,
        device=next(iter(placement.local_devices), None),
        agree=lambda own: [
            max(row) for row in zip(*placement.processes.gather("compiling", own), strict=True)
        ],
    )


def fit_and_compile(
    spec: RunSpec, kernels: KernelCache, placement: Placement, *, has_gpu: bool
) -> tuple[RunSpec, int | None]:
    """Fits a run to its device and its host; on a GPU, compiles its functions.

    Returns:
        The run, and the free bytes of the fullest device; None without a GPU.
    """
    processes = placement.processes
    free = pool.free_device_bytes(placement) if has_gpu else None
    if free is not None:
        free = min(processes.gather("asking for free device memory", free))
    if has_gpu:
        tiles = TileFinder(kernels, placement)
        with gc_paused(), remembering():
            spec = fitted_and_compiled(
                spec, tiles, free, lambda run: fit_to_host(run, *placement.process_counts)
            )
    elif spec.options.machine is None:  # otherwise its plan is that of the named hardware
        spec = fit_to_host(_on_cpu(spec, kernels, placement), *placement.process_counts)
    return spec, free


def _on_cpu(spec: RunSpec, kernels: KernelCache, placement: Placement) -> RunSpec:
    """The run with the host memory of computation on a CPU, where nothing is compiled ahead."""
    ahead = spec.first, spec.layouts, spec.optimizer, placement
    base = spec.base_bytes
    if base is None:  # all processes have to make the same schedule
        base = max(placement.processes.gather("asking for host memory", process_base_bytes()))
    return replace(
        spec,
        base_bytes=base,
        temporary_bytes=kernels.estimate(step_kernels(*ahead)),
        temporary_estimated=True,
    )


def _check(
    spec: RunSpec, kernels: KernelCache, placement: Placement, free: int | None, *, has_gpu: bool
) -> None:
    """Refuses a run that needs too much memory of its host or device, or space on its disks."""
    # The last check before minutes of pinning.
    count, here = placement.process_counts
    check_host(spec if has_gpu else _on_cpu(spec, kernels, placement), count, here)
    plan = make_plan(spec, count, here)
    check_device(plan, free, spec.first.program.values)
    if spec.on_disk:
        num_bytes = spec.first.num_devices * sum(map(spec.first.workload.size, spec.on_disk))
        check_space(spec.options.disk_folders, num_bytes * here // count)


@contextlib.contextmanager
def _pinning_bar(
    placement: Placement, progress: bool, phases: Phases
) -> Iterator[Callable[[int, int], None]]:
    """Shows the pinned host memory, its rate and the time left, when it is updated.

    Before the wait it advises to enable huge pages if that would shorten it.
    """
    began = time.perf_counter()
    pages = "pages of 4 KiB" if pins_small_pages() else "pages"
    with tqdm(
        desc=f"pinning host memory{device_count_text(placement.devices)}, the kernel finds {pages}",
        unit="iB",
        unit_scale=True,
        unit_divisor=1024,
        disable=not progress or placement.platform == "cpu",
        leave=False,
    ) as bar:

        def show(taken: int, of: int) -> None:
            if progress and not taken and (advice := advice_on_pages(of)):
                tqdm.write(advice, file=sys.stderr)
            progressed()
            bar.total = of
            bar.update(taken - bar.n)
            phases.pinned_bytes, phases.pinned_in = taken, time.perf_counter() - began

        yield show


def group_bar(what: str, spec: RunSpec, placement: Placement, progress: bool) -> tqdm:
    """A progress bar over a run's groups, shown if `progress`."""
    desc, num_groups = f"{what}{device_count_text(placement.devices)}", len(spec.layouts)
    return tqdm(desc=desc, total=num_groups, unit="group", disable=not progress, leave=False)
