"""The host memory that a step needs, and stages computed again where that is more than there is.

Beside the state at rest, the host holds what waits between tasks: gradients of deferred updates,
and what the device has no room for, which are the inputs of all stages where sequences are long,
and the costliest residuals. Without residuals, stages compute more again; and of their inputs only
every second, third or further one needs to be held if the stages between are computed again in the
backward; see `schedule/order.py`. An input is worth more than residuals of its size: without it a
whole block is computed again. So no more blocks are than have to be, and then the host takes the
residuals of as many others as it has room for, beside those that the device has room for.

A worked example, 28 blocks that hand on 3.8 GB each, 31 GB of state, and a host of 125 GB:

    span    computed again    residuals wait    what waits                 in all
    1       none              28                29 x 3.8, residuals 108    249 GB
    1       none              none              29 x 3.8                   141 GB
    2       13 blocks         none              16 x 3.8                    92 GB
    2       13 blocks         6                 16 x 3.8, residuals 23     115 GB: taken

The last block is not computed again, since its backward follows its forward at once.
"""

import dataclasses
import functools

from megatrain_jax._src.build.bound_step import BoundStep, spanning
from megatrain_jax._src.build.run_spec import RunSpec
from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.schedule.instructions import Op
from megatrain_jax._src.schedule.room import most_that_fit
from megatrain_jax._src.state import pool
from megatrain_jax._src.state.pool_limit import beside_bytes

# The driver waits for a task before it dispatches the second one after it.
_TASKS_IN_FLIGHT = 3
_SPANS = (1, 2, 3, 4, 6, 8, 12, 16)


def fit_to_host(
    spec: RunSpec, num_processes: int = 1, processes_per_host: int = 1
) -> RunSpec | None:
    """The run with the fewest stages computed again for which the host suffices.

    Of these it is the one in which the residuals of the most stages wait in the host. The run stays
    as it is if the host suffices anyway or isn't known.

    Args:
        spec: The run, fitted to its device.
        num_processes: Number of the processes that share it.
        processes_per_host: How many of them share a host.

    Returns:
        The run; None if the host never suffices.
    """
    hardware = spec.options.machine
    own = spec.first.num_devices // num_processes
    # Devices of a host share its memory: `times` says what all of them are on.
    total = hardware and hardware.times(own * processes_per_host).assumed_host_bytes
    if total is None:
        return spec
    usable = pool.most_process_bytes(total, own, processes_per_host)

    def fits(spec: RunSpec | None) -> bool:
        return spec is not None and process_bytes(spec, num_processes, total) <= usable

    @functools.cache
    def tried(span: int, num_travelling: int) -> RunSpec | None:
        try:
            first = spanning(spec.first, span, num_travelling, spec.budget_bytes)
        except ValueError:  # the blocks between need more of the device at once than the budget has
            return None
        return dataclasses.replace(spec, span=span, num_travelling=num_travelling, first=first)

    if fits(spec):
        return spec
    # Whatever waits, the state is there: no search is needed to see that it is too large.
    state = state_bytes(spec.first) // num_processes
    if state + beside_bytes(state) > usable:
        return None
    # Spans in order, so that the first that fits computes the least again. They don't grow one by
    # one: each try is a search for a schedule, and beyond 8 a span more frees next to nothing.
    span = next((span for span in _SPANS if fits(tried(span, 0))), None)
    if span is None:
        return None
    most = min(spec.first.workload.num_travelling, len(spec.first.schedule.kept))
    return tried(span, most_that_fit(most, lambda count: fits(tried(span, count))))


def process_bytes(spec: RunSpec, num_processes: int, total: int | None) -> int:
    """Host memory that a process takes in all for its devices' shares; see `pool.process_bytes`.

    Args:
        spec: The run.
        num_processes: Number of the processes that share it.
        total: The host's memory; None if unknown.
    """
    own = spec.first.num_devices // num_processes
    peak = peak_bytes(spec.first) // num_processes
    return pool.process_bytes(peak, spec.largest_slab_bytes, total, own)


def peak_bytes(step: BoundStep) -> int:
    """Host memory of all devices' state, of what waits there, and of arrays in flight."""
    passing = waiting_bytes(step) + _in_flight_bytes(step)
    return state_bytes(step) + step.num_devices * passing


def state_bytes(step: BoundStep) -> int:
    """Host memory of all devices' masters and optimizer state."""
    state = sum(s[Kind.MASTERS] + s[Kind.OPTIMIZER_STATE] for s in step.workload.sizes)
    return step.num_devices * state


def waiting_bytes(step: BoundStep) -> int:
    """Most bytes of one device's gradients and activations that wait in the host at one time."""
    waiting: dict[Key, int] = {}
    most = 0
    lists = step.schedule
    # A first step may have less room ahead than the others have, and emptying the device takes to
    # the host what that has no room to keep.
    for instruction in (*lists.cold, *lists.steady, *lists.steady, *lists.flush):
        op, key, stage = instruction.op, instruction.key, instruction.stage
        if op is Op.OFFLOAD and key is not None and key.kind not in LASTING:
            waiting[key] = step.scheduled.size(key)
            most = max(most, sum(waiting.values()))
        # A copy that was fetched again is dropped by whoever is the last to read the part.
        elif op is Op.UPDATE and instruction.group is not None:
            waiting.pop(Key(Kind.GRADIENT, instruction.group), None)
        elif stage is not None and instruction.task is not None:
            for i in step.last_read.get(instruction.task, ()):
                waiting.pop(Key(Kind.ACTIVATION, i), None)
            if op is Op.BACKWARD:
                waiting.pop(Key(Kind.RESIDUALS, stage), None)
                for group in step.stages[stage].accumulated:
                    waiting.pop(Key(Kind.GRADIENT, group), None)
    return most


def _in_flight_bytes(step: BoundStep) -> int:
    """Most host bytes of one device that are both old copies being read and new ones written."""
    sizes = step.workload.sizes
    # An update writes new arrays while old ones may still be on their way to the device: for as
    # many groups as tasks are in flight, taken to be the largest, both exist.
    keys = (r.key for r in step.schedule.steady if r.op is Op.OFFLOAD)
    groups = {key.owner for key in keys if key is not None and key.kind in LASTING}
    moving = sorted(
        (sizes[g][Kind.MASTERS] + sizes[g][Kind.OPTIMIZER_STATE] for g in groups), reverse=True
    )
    return sum(moving[:_TASKS_IN_FLIGHT])
