"""A run's start: its functions compiled, its host memory reserved, its store filled."""

from contextlib import suppress

import jax
from tqdm.auto import tqdm

from megatrain_jax._src.adapt.initial_values import InitialValues
from megatrain_jax._src.build.budget import fit_to_device
from megatrain_jax._src.build.host import fit_to_host
from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.kernels.cache import KernelCache
from megatrain_jax._src.report.check_device import check_device
from megatrain_jax._src.report.make_plan import make_plan
from megatrain_jax._src.runtime.engine import Engine
from megatrain_jax._src.runtime.fill import fill_store
from megatrain_jax._src.runtime.store import Store
from megatrain_jax._src.state import pool
from megatrain_jax._src.state.placement import Placement, on_several
from megatrain_jax._src.state.processes import PeerEndedError


def start(
    spec: RunSpec, placement: Placement, initial: InitialValues, progress: bool, *, has_gpu: bool
) -> tuple[RunSpec, Engine]:
    """Makes the engine of a run on this machine, and the store that it runs on.

    Args:
        spec: The run.
        placement: Its devices.
        initial: The values of its parameters and of the model's other state.
        progress: Whether to show a progress bar.
        has_gpu: Whether this machine has one, whose memory the run has to fit.

    Returns:
        The run with its device budget known, and the engine before the first step.

    Raises:
        MemoryError: If host memory or the device's is too small.
        PeerEndedError: If another process of the run could not start.
    """
    try:
        return _started(spec, placement, initial, progress, has_gpu)
    except PeerEndedError:
        raise
    except BaseException as error:
        with suppress(PeerEndedError):
            placement.processes.leave(f"{type(error).__name__}: {error}")
        raise


def _started(
    spec: RunSpec, placement: Placement, initial: InitialValues, progress: bool, has_gpu: bool
) -> tuple[RunSpec, Engine]:
    """See `start`."""
    kernels, processes = KernelCache(placement.compiler_options), placement.processes
    with group_bar("compiling", spec, placement, progress):
        free = pool.free_device_bytes(placement) if has_gpu else None
        if free is not None:
            free = min(processes.gather("asking for free device memory", free))
        if has_gpu:
            spec = fit_to_host(fit_to_device(spec, kernels, free, placement), *processes.spread)
        plan = make_plan(spec, *processes.spread)
        check_device(plan, free)
    _reserve(spec, plan.host_peak_bytes // processes.count, placement, progress)
    with group_bar("initialising", spec, placement, progress) as bar:
        store = Store(spec.layouts, placement, jax.random.key(spec.options.seed))
        fill_store(spec, store, kernels, initial, bar.update)
    return spec, Engine(store, spec.optimizer, kernels)


def _reserve(spec: RunSpec, num_bytes: int, placement: Placement, progress: bool) -> None:
    """Pins host memory, and shows how much is pinned, how fast, and how long to go."""
    with tqdm(
        desc=f"pinning host memory{on_several(placement.devices)}",
        unit="iB",
        unit_scale=True,
        unit_divisor=1024,
        disable=not progress or placement.platform == "cpu",
        leave=False,
    ) as bar:

        def show(taken: int, of: int) -> None:
            bar.total = of
            bar.update(taken - bar.n)

        pool.reserve(placement, num_bytes, spec.largest_slab_bytes, show)


def group_bar(what: str, spec: RunSpec, placement: Placement, progress: bool) -> tqdm:
    """A progress bar over a run's groups, if one is to be shown."""
    desc, num_groups = f"{what}{on_several(placement.devices)}", len(spec.layouts)
    return tqdm(desc=desc, total=num_groups, unit="group", disable=not progress, leave=False)
