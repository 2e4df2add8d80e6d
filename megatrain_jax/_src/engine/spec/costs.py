"""Estimates the costs of a step for its schedule: seconds of computations and transfers.

Example: four devices have links of 50 GB/s each way, a host memory of 160 GB/s, and each receives
250 GB/s from its peers. A stage has 268M parameters, in fp32 in the host (1 GiB) and in bf16 for
computation (512 MiB). With one microbatch::

    fetch       each device's 256 MiB take 5.4 ms over its link; since all four fetch at once, they
                take 4 * 256 MiB / 160 GB/s = 6.7 ms of the host's memory
    gather      of 512 MiB, 384 MiB come from peers: 1.6 ms in the forward, and again in the
                backward
    gradient    of 512 MiB, each device receives 384 MiB to sum: 1.6 ms in the backward

If only links connect the devices, these 384 MiB take 20 ms at min(50, 160 / (2 * 4)) GB/s, and the
links carry nothing else meanwhile. A forward of f operations, at g operations per second on one
device, then takes f / 4g + 20 ms.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence

from megatrain_jax._src.common.keys import LASTING, Kind
from megatrain_jax._src.engine.kernels.bound_stage import BoundStage, Residuals
from megatrain_jax._src.engine.kernels.gpu_traffic import Traffic, count_traffic
from megatrain_jax._src.engine.kernels.updates import is_updated_in_one_pass
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.flops import flops_by_kind, is_product
from megatrain_jax._src.engine.program.loss.gradients import leaves_read, traced_pullback
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.program.optimizer.cut import Fragment, OptimizerCut
from megatrain_jax._src.engine.schedule.workload import Costs, DiskLink, Link
from megatrain_jax._src.engine.spec.work import Work, backward_work, forward_work, saved_work
from megatrain_jax._src.engine.state.hardware import Hardware, summing_bytes
from megatrain_jax._src.engine.state.layout import GroupLayout

# The memory traffic of stages, besides their products. Example: a layer with attention written out,
# 8 rows of 1,024 tokens. Its products take 1.4 ms on an H100, and kernels of scores, norms and
# activations move 2 GB: 0.6 ms more.

# Share of the matrix units' rate that convolutions of few channels reach, measured on an H200: 3
# channels of 32 images, in patches of 14 x 14, take 0.71 ms in forward and gradient of weights.
_OF_FEW_CHANNELS = 0.062
# The same of depthwise convolutions, measured on an H100 in fp32: 8 rows of 1,024 tokens with 4,352
# channels and filters of 4 tokens take 1.36 ms.
_DEPTHWISE = 2.7e-4


def stage_traffic(bound: Sequence[BoundStage]) -> list[tuple[Traffic, Traffic]]:
    """The traffic of each stage's forward and backward of one microbatch, over all devices.

    Both cast the masters that products read. A backward counts with its recomputed forward, as
    traced. Stages of one template are traced once.
    """
    known: dict[Hashable, Traffic] = {}
    found = []
    for b in bound:
        stage, mode, stored = b.stage, b.mode, _stored(b)
        consts = (None,) * len(stage.consts)
        own: Hashable = stage.key, stored
        if own not in known:
            known[own] = count_traffic(stage.jaxpr, (*consts, *stored))
        backward = Traffic()
        if mode is not None:
            like = own, stage.is_trainable, stage.active, mode.arriving, mode.give_outputs
            if like not in known:
                traced = traced_pullback(stage, mode.arriving, mode.give_outputs)
                before = (None,) * (len(traced.consts) + sum(mode.arriving))
                known[like] = count_traffic(traced.jaxpr, (*before, *stored))
            backward = known[like]
        found.append((known[own], backward))
    return found


def _stored(bound: BoundStage) -> tuple[str | None, ...]:
    """The dtype of each leaf's stored numbers or codes; None if it is the one in the equations."""
    rows = zip(bound.binding.slots, bound.stage.leaf_dtypes, strict=True)
    found = []
    for slot, dtype in rows:
        stored = bound.binding.layouts[slot.slab].parts(slot.leaf)[0].dtype
        found.append(None if stored == dtype else str(stored))
    return tuple(found)


def depthwise_seconds(flops: float, hardware: Hardware) -> float:
    """Seconds of operations in depthwise convolutions on one device."""
    return flops / (_DEPTHWISE * hardware.flops_per_s)


def extra_traffic_seconds(
    work: Work, traffic: Traffic, hardware: Hardware, num_devices: int
) -> float:
    """Seconds of memory traffic that the estimate of a stage's operations doesn't contain.

    It includes the excess time of convolutions of few channels, of depthwise convolutions, and of
    padded tiles of products.

    Args:
        work: Operations of the stage; its estimate contains copies in loops and float8 codes.
        traffic: Bytes of the stage.
        hardware: The rates.
        num_devices: Number of devices that share the bytes.
    """
    per_second = hardware.memory_bytes_per_s * num_devices
    found = max(0.0, traffic.outside - work.coded) / per_second
    looping = work.loop_seconds(hardware, hardware.sustained, num_devices)
    found += max(0.0, traffic.in_loops / per_second - looping)
    flops_per_second = hardware.flops_per_s * num_devices
    found += traffic.unaligned / (_OF_FEW_CHANNELS * flops_per_second)
    found += depthwise_seconds(traffic.depthwise, hardware) / num_devices
    return found + traffic.padding / (hardware.sustained * flops_per_second)


# Python's time per instruction, measured on the host of an H200.
_SECONDS_PER_RECORD = 1.5e-4
# An update's time per coded number in one pass over memory, besides reading and writing the code.
# On an H100 such an update takes 6.4 ps per parameter with AdamW and both of its moments in 8 bits;
# 12 bytes take 4.3 ps of it.
_SECONDS_PER_CODE = 1.1e-12
# An update by leaf decodes numbers into memory and encodes them from there, on an H100 in 2 and
# 7.4 ps per number, of which 0.7 ps are for the code itself.
_SECONDS_PER_CODE_BY_LEAF = 9e-12

# Rate of a batch from NumPy's memory to a GPU: one thread copies it to pinned memory first.
# Measured on the host of an H200: 77 MB in 20 ms.
_BATCH_BYTES_PER_S = 3.8e9

TYPICAL_DISK = 3.5e9, 2e9
"""Bytes per second that an NVMe drive of PCIe 3 reads, and that it goes on writing."""


def batch_bytes(program: Program, microbatches: int) -> int:
    """Bytes of a whole batch."""
    # The prologue takes constants, variables, the arrays of a microbatch and a key.
    first = len(program.prologue_consts) + len(program.state.of_batch)
    return microbatches * sum(jx.num_bytes(v.aval) for v in program.prologue.invars[first:-1])


def batch_seconds(program: Program, microbatches: int, num_devices: int) -> float:
    """Seconds in which a batch arrives on its devices, each by a thread of its own."""
    return batch_bytes(program, microbatches) / num_devices / _BATCH_BYTES_PER_S


def collective_bytes(
    bound: Sequence[BoundStage], microbatches: int, num_devices: int
) -> tuple[tuple[int, int], ...]:
    """Counts the bytes of collectives for parameters: gathered leaves and summed gradients.

    Gradients are sent in the dtype of the equations that make them. Further collectives of XLA are
    not counted: for a loss that compares examples, for an optimizer that needs whole leaves, and
    for scalars.

    Args:
        bound: The stages.
        microbatches: Number of parts of the batch; each part gathers and sums again.
        num_devices: Number of devices.

    Returns:
        For each stage, bytes that each device receives in its forward and in its backward.
    """
    if num_devices == 1:
        return ((0, 0),) * len(bound)
    # Each peer sends its share.
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


def coding_seconds(optimizer: OptimizerCut, layouts: Sequence[GroupLayout]) -> tuple[float, ...]:
    """Seconds that the update of each group needs to decode and encode its numbers.

    Args:
        optimizer: The optimizer, cut by group.
        layouts: Layout of each group.
    """
    return tuple(
        layout.num_coded * _seconds_per_code(_Update(fragment), layout)
        for fragment, layout in zip(optimizer.apply, layouts, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class _Update:
    """A group's update; two updates are equal if their keys are."""

    fragment: Fragment

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Update) and other.fragment.key == self.fragment.key

    def __hash__(self) -> int:
        return hash(self.fragment.key)


@functools.lru_cache(maxsize=64)
def _seconds_per_code(update: _Update, layout: GroupLayout) -> float:
    if not layout.num_coded:
        return 0.0
    in_one_pass = is_updated_in_one_pass(update.fragment, layout)
    return _SECONDS_PER_CODE if in_one_pass else _SECONDS_PER_CODE_BY_LEAF


def update_seconds(
    optimizer: OptimizerCut, layouts: Sequence[GroupLayout], hardware: Hardware
) -> tuple[float, ...]:
    """Seconds of each group's update, besides reading and writing its parts.

    Numbers are decoded and encoded, and some optimizers multiply matrices: Muon's update of a
    matrix of 5120 x 13824 takes as many operations as 20,000 tokens through it.

    Args:
        optimizer: The optimizer, cut by group.
        layouts: Layout of each group.
        hardware: The rates. Devices that share a step all compute the products of whole matrices.
    """
    products = [
        _work_of_products(_Update(fragment)).seconds(hardware, hardware.sustained)
        for fragment in optimizer.apply
    ]
    return _sums(coding_seconds(optimizer, layouts), products)


@functools.lru_cache(maxsize=64)
def _work_of_products(update: _Update) -> Work:
    found = flops_by_kind(update.fragment.jaxpr, is_product)
    return Work(flops=found.total, attention=0, float32=found.float32)


def find_costs(
    bound: Sequence[BoundStage],
    sizes: Sequence[Mapping[Kind, int]],
    updating: Sequence[float],
    collectives: Sequence[tuple[int, int]],
    microbatches: int,
    num_devices: int,
    hardware: Hardware,
) -> Costs:
    """Estimates the seconds that stages, updates and transfers take.

    The time of a stage comes from its floating-point operations in all microbatches, with a
    separate rate for attention kernels, from the bytes that its other kernels read and write, from
    the kernels of its loops, from the sums that its gradients are added to, and from its
    collectives. The time of an update comes from the bytes that it reads and writes in device
    memory, and from `updating`.

    Args:
        bound: The stages.
        sizes: For each group, bytes of its parts on one device.
        updating: For each group, further seconds of its update; see `update_seconds`.
        collectives: See `collective_bytes`.
        microbatches: Number of parts that the batch is split into.
        num_devices: Number of devices that share the step.
        hardware: The rates.
    """
    work = forward_work([b.stage for b in bound])
    each = microbatches / num_devices

    def seconds(work: Work, traffic: Traffic) -> float:
        computing = work.seconds(hardware, hardware.sustained, num_devices)
        return microbatches * (
            computing + extra_traffic_seconds(work, traffic, hardware, num_devices)
        )

    traffic = stage_traffic(bound)
    forward = [seconds(w, t) for w, (t, _) in zip(work, traffic, strict=True)]
    backward = [
        seconds(backward_work(b.stage, w), t)
        + microbatches * _adding_seconds(b, num_devices, hardware)
        for b, w, (_, t) in zip(bound, work, traffic, strict=True)
    ]
    own = num_devices // hardware.hosts
    per_second = hardware.collective_bytes_per_s(own)
    exchanged = [[size / per_second for size in row] for row in zip(*collectives, strict=True)]
    over_links = num_devices > 1 and hardware.peer_bytes_per_s is None
    on_link = exchanged if over_links else [(), ()]
    # An update reads and writes masters and optimizer state, and reads the gradient. Before it, all
    # of the gradient is read for its norm, and to find numbers that are not finite.
    moved = [2 * (sum(s[kind] for kind in LASTING) + s[Kind.GRADIENT]) for s in sizes]
    updates = zip(moved, updating, strict=True)
    return Costs(
        forward=_sums(forward, exchanged[0]),
        backward=_sums(backward, exchanged[1]),
        update=tuple(
            num_bytes / hardware.memory_bytes_per_s + seconds for num_bytes, seconds in updates
        ),
        recompute=seconds_saved([b.residuals for b in bound], each, hardware),
        summing=_summing_seconds(sizes, own, hardware),
        forward_on_link=tuple(on_link[0]),
        backward_on_link=tuple(on_link[1]),
        link=host_link(hardware, own),
        disk=disk_link(hardware, own),
        dispatch=_SECONDS_PER_RECORD,
    )


def _summing_seconds(
    sizes: Sequence[Mapping[Kind, int]], num_devices: int, hardware: Hardware
) -> tuple[float, ...]:
    """Seconds to sum the gradient of each group over machines that each hold all state."""
    if hardware.copies == 1:
        return ()
    of_machine = (summing_bytes(num_devices * s[Kind.GRADIENT], hardware.copies) for s in sizes)
    return tuple(num_bytes / hardware.network_bytes_per_s for num_bytes in of_machine)


def rounding_seconds(
    bound: Sequence[BoundStage], num_devices: int, hardware: Hardware
) -> tuple[float, ...]:
    """Seconds per wave, by stage, to add gradients to sums in bfloat16 and to round them again.

    Per sum, the first microbatch writes 4 bytes, the next ones read and write 8, and the last one
    writes 4, then reads them with the 4 of the earlier ones and the 2 of the sum, and writes 2.
    A single microbatch moves 12 bytes. So these are 4 bytes more than 8 per microbatch.
    """
    return tuple(0.5 * _adding_seconds(b, num_devices, hardware) for b in bound)


def _adding_seconds(bound: BoundStage, num_devices: int, hardware: Hardware) -> float:
    """Seconds to add the gradients of one microbatch to sums, by reading and writing them.

    The product that computes a gradient adds it to the sum, so the gradient itself is not written.
    For 14.8B parameters in fp32 that is 0.04 s on an H100: 0.6 s of a step of 16 microbatches.
    """
    if bound.mode is None:
        return 0.0
    mode = bound.mode
    rows = zip(bound.binding.layouts, mode.gradients, mode.accumulate, strict=True)
    sums = [layout.gradient_avals(dtype) for layout, dtype, adds in rows if adds and dtype]
    num_bytes = sum(aval.size * aval.dtype.itemsize for avals in sums for aval in avals)
    return 2 * num_bytes / num_devices / hardware.memory_bytes_per_s


def host_link(hardware: Hardware, num_devices: int) -> Link:
    """One device's link to its host; it includes the host's memory if that can limit it.

    Args:
        hardware: The rates.
        num_devices: Number of devices of each host.
    """
    inward, outward = hardware.link_rates
    of_host = num_devices / hardware.host_bytes_per_s
    # If the host's memory can serve all links in both directions, it never limits a transfer.
    is_enough = num_devices * (inward + outward) <= hardware.host_bytes_per_s
    return Link(
        inward=1 / inward,
        outward=1 / outward,
        shared=0.0 if is_enough else of_host,
    )


def disk_link(hardware: Hardware, num_devices: int) -> DiskLink:
    """One device's share of its host's disks, with the rates of an ordinary drive if unknown.

    Args:
        hardware: The rates.
        num_devices: Number of devices of each host.
    """
    rates = hardware.disk_read_bytes_per_s, hardware.disk_write_bytes_per_s
    read, written = (num_devices / (r or d) for r, d in zip(rates, TYPICAL_DISK, strict=True))
    return DiskLink(read=read, written=written, shared=num_devices / hardware.disk_bytes_per_s)


def _sums(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, ...]:
    return tuple(x + y for x, y in zip(xs, ys, strict=True))


def seconds_saved(
    kept: Sequence[Residuals | None], factor: float, hardware: Hardware
) -> tuple[float, ...]:
    """The seconds that each stage's backward saves if its forward saves residuals.

    Args:
        kept: The residuals of each stage.
        factor: Number of microbatches divided by number of devices.
        hardware: The rates.
    """

    def saved(residuals: Residuals | None) -> float:
        if residuals is None:
            return 0.0
        # Products run near the device's rate; saved results are written and read once more.
        moved = 2 * residuals.num_bytes / hardware.memory_bytes_per_s
        computed = saved_work(residuals).seconds(hardware)
        computed += depthwise_seconds(residuals.saved.depthwise, hardware)
        return max(0.0, computed - moved)

    return tuple(factor * saved(residuals) for residuals in kept)
