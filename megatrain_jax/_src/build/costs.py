"""The costs of a step, used to choose its schedule: seconds of computations and of transfers.

A worked example: four devices whose links carry 50 GB/s each way, a host's memory of 160 GB/s,
250 GB/s into each device from the others, and a stage of 268M parameters, fp32 in the host (1 GiB)
and bf16 where it computes (512 MiB), in one microbatch::

    fetch       each device's 256 MiB take 5.4 ms over its link alone; all four, which fetch at
                once, 4 * 256 MiB / 160 GB/s = 6.7 ms of the host's memory
    gather      of 512 MiB, 384 MiB come from the others: 1.6 ms, in the stage's forward and again
                in its backward
    gradient    of 512 MiB, each device receives 384 MiB to sum up: 1.6 ms of the backward

Where only links connect the devices, these 384 MiB take 20 ms, at min(50, 160 / (2 * 4)) GB/s, in
which nothing else passes over the links. A forward of f operations, at g operations a second on one
device, takes f / 4g + 20 ms then.
"""

from collections.abc import Hashable, Mapping, Sequence

from megatrain_jax._src.build.work import Work, backward_work, forward_work, saved_work
from megatrain_jax._src.common.keys import LASTING, Kind
from megatrain_jax._src.kernels.bound_stage import BoundStage
from megatrain_jax._src.kernels.residuals import Residuals
from megatrain_jax._src.program.loss.gradients import leaves_read
from megatrain_jax._src.schedule.workload import Costs, Link
from megatrain_jax._src.state.hardware import Hardware

# What Python needs for one instruction, measured on the host of an H200.
_SECONDS_PER_RECORD = 1.5e-4
# What an update takes for a number that it decodes and encodes again, measured on an H200 for both
# of Adam's moments in 8 bits: 16 times as long as to read and write its code.
_SECONDS_PER_CODE = 7e-12


def collective_bytes(
    bound: Sequence[BoundStage], microbatches: int, num_devices: int
) -> tuple[tuple[int, int], ...]:
    """Counts what devices send each other for parameters: gathered, and summed as gradients.

    Gradients travel in the dtype of the equations that make them. What XLA adds by itself is not
    counted: for examples that a loss compares, for an optimizer that needs whole leaves, scalars.

    Args:
        bound: The stages.
        microbatches: Number of parts that the batch is split into; each gathers and sums anew.
        num_devices: Number of devices.

    Returns:
        For each stage, bytes that each device receives in its forward and in its backward.
    """
    if num_devices == 1:
        return ((0, 0),) * len(bound)
    # Each of the others sends its share.
    received = microbatches * (num_devices - 1)
    known: dict[Hashable, tuple[bool, ...]] = {}
    found = []
    for b in bound:
        gathered = {positions: b.share_bytes(positions) for positions in b.alike}
        forward, backward = sum(gathered.values()), 0
        if b.mode is not None:
            like = b.stage.key, b.stage.is_trainable, b.stage.active, b.mode
            if like not in known:  # tracing takes long; stages of one template share it
                known[like] = leaves_read(b.stage, b.mode.arriving, b.mode.give_outputs)
            read = known[like]
            backward = sum(n for row, n in gathered.items() if any(read[i] for i in row))
            trained = (i for i, yes in enumerate(b.stage.is_trainable) if yes)
            backward += sum(b.share_bytes((i,)) for i in trained)
        found.append((received * forward, received * backward))
    return tuple(found)


def find_costs(
    bound: Sequence[BoundStage],
    sizes: Sequence[Mapping[Kind, int]],
    coded: Sequence[int],
    collectives: Sequence[tuple[int, int]],
    microbatches: int,
    num_devices: int,
    hardware: Hardware,
) -> Costs:
    """Estimates the seconds that stages, updates and transfers take.

    Stages by their floating-point operations, for all microbatches, those of attention's kernels at
    a rate of their own, by the kernels of their loops, by the sums that gradients are added to, and
    by what devices send each other within; updates by the bytes that they read and write in the
    device's memory, and by the numbers that they decode and encode.

    Args:
        bound: The stages.
        sizes: For each group, bytes of its parts on one device.
        coded: For each group, numbers of these that are held in codes.
        collectives: See `collective_bytes`.
        microbatches: Number of parts that the batch is split into.
        num_devices: Number of devices that share the step.
        hardware: The rates.
    """
    work = forward_work([b.stage for b in bound])
    each = microbatches / num_devices

    def seconds(work: Work) -> float:
        return microbatches * work.seconds(hardware, hardware.sustained, num_devices)

    forward = [seconds(w) for w in work]
    backward = [
        seconds(backward_work(b.stage, w))
        + microbatches * _adding_seconds(b, num_devices, hardware)
        for b, w in zip(bound, work, strict=True)
    ]
    per_second = hardware.collective_bytes_per_s(num_devices)
    exchanged = [[size / per_second for size in row] for row in zip(*collectives, strict=True)]
    over_links = num_devices > 1 and hardware.peer_bytes_per_s is None
    on_link = exchanged if over_links else [(), ()]
    # An update reads and writes masters and optimizer state, and reads the gradient.
    moved = [2 * sum(s[kind] for kind in LASTING) + s[Kind.GRADIENT] for s in sizes]
    updates = zip(moved, coded, strict=True)
    return Costs(
        forward=_sums(forward, exchanged[0]),
        backward=_sums(backward, exchanged[1]),
        update=tuple(
            num_bytes / hardware.memory_bytes_per_s + _SECONDS_PER_CODE * num_coded
            for num_bytes, num_coded in updates
        ),
        recompute=seconds_saved([b.residuals for b in bound], each, hardware),
        forward_on_link=tuple(on_link[0]),
        backward_on_link=tuple(on_link[1]),
        link=_link(hardware, num_devices),
        dispatch=_SECONDS_PER_RECORD,
    )


def _adding_seconds(bound: BoundStage, num_devices: int, hardware: Hardware) -> float:
    """Seconds to add the gradients of one microbatch to sums, which are read and written.

    For 14.8B parameters in fp32 that is 0.04 s on an H100: 0.6 s of a step of 16 microbatches,
    which took 0.8 s longer than an estimate without it.
    """
    if bound.mode is None:
        return 0.0
    mode = bound.mode
    rows = zip(bound.binding.layouts, mode.gradients, mode.accumulate, strict=True)
    sums = [layout.gradient_aval(dtype) for layout, dtype, adds in rows if adds and dtype]
    num_bytes = sum(aval.size * aval.dtype.itemsize for aval in sums)
    return 2 * num_bytes / num_devices / hardware.memory_bytes_per_s


def _link(hardware: Hardware, num_devices: int) -> Link:
    """One device's link to the host, with its part of the host's memory if that is too slow."""
    own = 1 / hardware.link_bytes_per_s
    of_host = num_devices / hardware.host_bytes_per_s
    # All links, both ways: where the host's memory carries these, no byte waits for it.
    return Link(name="host", inward=own, outward=own, shared=of_host if 2 * of_host > own else 0.0)


def _sums(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, ...]:
    return tuple(x + y for x, y in zip(xs, ys, strict=True))


def seconds_saved(
    kept: Sequence[Residuals | None], factor: float, hardware: Hardware
) -> tuple[float, ...]:
    """The seconds that each stage's backward saves where its forward keeps residuals.

    Args:
        kept: The residuals of each stage.
        factor: Number of microbatches over that of devices.
        hardware: The rates.
    """

    def saved(residuals: Residuals | None) -> float:
        if residuals is None:
            return 0.0
        # Products run near the device's rate, and what they give is written and read once more.
        moved = 2 * residuals.num_bytes / hardware.memory_bytes_per_s
        return max(0.0, saved_work(residuals).seconds(hardware) - moved)

    return tuple(factor * saved(residuals) for residuals in kept)
