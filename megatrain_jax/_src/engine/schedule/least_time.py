"""A lower bound of a step's time, from its computations and from the memory for their results.

When a wave turns from forward to backward, the device and the host together hold the activations
and the residuals that its backward will read. A stage without a stored input computes a forward
once more, and a stage without residuals computes its results once more. So bytes save seconds: the
bound assumes that the available bytes are filled with the parts that save the most per byte.

Example: four stages of 2 seconds forward and 6 backward, which residuals of 10 bytes shorten by 2;
inputs have 2 bytes, the device has 20 and the host 0::

    nothing is stored                    4 x (2 + 2 + 6)    40
    4 inputs (8 bytes) are stored        -4 x 2             32
    2 stages' residuals fit              -2 x 2             28: no step takes less
"""

import math
from collections.abc import Iterable

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.schedule.workload import Workload


def least_seconds(
    workload: Workload,
    selective: Workload | None = None,
    device_bytes: float = math.inf,
    host_room: float = math.inf,
) -> float:
    """A lower bound of a training step's estimated seconds, in the waves of its workload.

    Args:
        workload: See `find_schedule`.
        selective: See `find_schedule`.
        device_bytes: Maximum bytes on the device.
        host_room: See `find_schedule`.
    """
    costs, stages = workload.costs, range(len(workload.stages))
    read = {i for s in stages if workload.reads and workload.backward[s] for i in workload.reads[s]}
    inputs = [
        (costs.forward[s], sum(workload.activations[i] for i in made if i in read))
        for s, made in zip(stages, workload.makes or [()] * len(stages), strict=True)
    ]
    # What isn't stored is computed again.
    again = frozenset(s for s, (_, num_bytes) in enumerate(inputs) if num_bytes)
    rooms = [
        (of, device_bytes + (host_room if of.may_offload_residuals else 0))
        for of in (workload, selective)
        if of is not None
    ]

    # From the second wave on, the sums of all gradients exist, too. All waves store the same parts.
    used = set(workload.trained_groups).difference(workload.unused_groups)
    sums = sum(workload.sizes[g].get(Kind.GRADIENT, 0) for g in used) if workload.waves > 1 else 0
    left = device_bytes + host_room - sums
    saved = max(
        min(
            _most_saved([*inputs, *_residuals(of)], left),
            _most_saved(inputs, left) + _most_saved(_residuals(of), room),
        )
        for of, room in rooms
    )
    return computing_seconds(workload, frozenset(), again) - workload.waves * saved


def computing_seconds(
    workload: Workload, kept: frozenset[int], again: frozenset[int] | None = None
) -> float:
    """Seconds of computation in a steady step, a lower bound of its time.

    Args:
        workload: The step.
        kept: The stages that save residuals.
        again: The stages that compute their forward again; None for those of the workload.
    """
    costs, stages = workload.costs, range(len(workload.stages))
    # A fused last stage has no forward.
    wave = sum(costs.forward[: len(stages) - workload.fused_last])
    wave += sum(costs.forward[s] for s in (workload.again if again is None else again))
    wave += sum(costs.backward[s] for s in stages if workload.backward[s])
    wave += sum(costs.rounding) - sum(costs.recompute[s] for s in kept)
    once = (
        costs.update[g]
        + (costs.reduce[g] if costs.reduce else 0.0)
        + (costs.summing[g] if costs.summing else 0.0)
        for g in workload.trained_groups
    )
    return workload.waves * wave + sum(once)


def _residuals(workload: Workload) -> list[tuple[float, int]]:
    """Seconds that residuals save, and their bytes, of each stage with residuals."""
    return list(zip(workload.costs.recompute, workload.residuals, strict=False))


def _most_saved(parts: Iterable[tuple[float, int]], room: float) -> float:
    """The most seconds that parts within `room` bytes save, if parts could be stored in part."""
    saved, room = 0.0, max(room, 0.0)
    sized = [(seconds, num_bytes) for seconds, num_bytes in parts if num_bytes and seconds > 0]
    for seconds, num_bytes in sorted(sized, key=lambda part: -part[0] / part[1]):
        share = min(1.0, room / num_bytes)
        saved, room = saved + share * seconds, room - share * num_bytes
    return saved
