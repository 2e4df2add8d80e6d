"""The pinned memory of a run: its arrays, and the gaps that XLA's allocator leaves between them."""

import dataclasses
import functools
from weakref import WeakKeyDictionary

from megatrain_jax._src.common.keys import Key, Kind
from megatrain_jax._src.engine.schedule.host_pool import bytes_with_gaps
from megatrain_jax._src.engine.schedule.tasks import build_task_lists
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.host import host_process, peak_bytes
from megatrain_jax._src.engine.spec.run_spec import RunSpec

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
