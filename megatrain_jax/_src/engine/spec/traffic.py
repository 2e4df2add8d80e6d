"""The memory traffic of stages' forwards and backwards, besides their products.

Example: a layer with attention written out, 8 rows of 1,024 tokens. Its products take 1.4 ms on an
H100, and kernels of scores, norms and activations move 2 GB: 0.6 ms more.
"""

from collections.abc import Hashable, Sequence

from megatrain_jax._src.engine.kernels.bound_stage import BoundStage
from megatrain_jax._src.engine.kernels.gpu_traffic import Traffic, count_traffic
from megatrain_jax._src.engine.program.loss.gradients import traced_pullback
from megatrain_jax._src.engine.spec.work import Work
from megatrain_jax._src.engine.state.hardware import Hardware

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
