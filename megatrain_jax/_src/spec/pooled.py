"""The pinned memory of a run: its arrays, and the gaps that XLA's allocator leaves between them."""

from megatrain_jax._src.common.keys import PASSING, Key, Kind
from megatrain_jax._src.schedule.host_copies import bytes_with_gaps
from megatrain_jax._src.schedule.tasks import build_task_lists
from megatrain_jax._src.spec.host import host_process, peak_bytes
from megatrain_jax._src.spec.run_spec import RunSpec


def pooled_bytes(spec: RunSpec, num_processes: int, processes_per_host: int) -> int:
    """The bytes that one process's pools of pinned memory need so that they never grow in training.

    A pool that grows takes as much memory as its largest piece at once. Gaps are a guess, so a run
    isn't refused because of them: if the process may not take so much, they are left out.

    Args:
        spec: The run, fitted to its host.
        num_processes: Number of processes that share the run.
        processes_per_host: Number of processes on each host.
    """
    process = host_process(spec, num_processes, processes_per_host)
    peak = peak_bytes(spec.first) // num_processes
    with_gaps = max(peak, process.num_devices * _bytes_with_gaps(spec))
    usable = process.usable_bytes
    return with_gaps if usable is None or process.needed(with_gaps) <= usable else peak


def _bytes_with_gaps(spec: RunSpec) -> int:
    """The bytes of one device's pool."""
    step = spec.first
    workload, schedule, layouts = step.scheduled, step.schedule, spec.layouts
    lists, number = build_task_lists(workload), step.microbatches // step.waves

    def arrays(key: Key) -> list[int]:
        sizes = [workload.size(key)]
        if key.kind is Kind.OPTIMIZER_STATE:
            slabs = layouts[key.owner].state.layouts
            sizes = [slab.num_bytes // slab.num_shards for slab in slabs]
        elif key.kind in PASSING:
            sizes = [sizes[0] // number] * number
        return [size for size in sizes if size]

    cold, steady = (lists.cold, schedule.cold), (lists.steady, schedule.steady)
    return bytes_with_gaps(workload, cold, steady, arrays)
