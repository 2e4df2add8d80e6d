"""The floating-point operations of stages, with attention counted separately.

Attention kernels have their own rate and no parameters: their backward always takes 2.5 times their
forward. The backward of a product takes twice its forward, or less if parameters are frozen.

Example: a stage has 100 operations in products, with half of the parameters trained, and 20 in an
attention kernel::

    forward       100 + 20
    backward      100 + 20 recomputed, (1 + 0.5) * 100 + 2.5 * 20 to differentiate: 250 + 70
    with saved results of products and attention, the backward takes 150 + 50

Loops of short kernels take longer than their operations (`program/flops.py`). The kernels of
a forward's loops, and the bytes they copy, are repeated as often as its operations.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from megatrain_jax._src.engine.kernels.bound_stage import Residuals
from megatrain_jax._src.engine.program.float8 import count_numbers
from megatrain_jax._src.engine.program.flops import count_loops, flops_by_kind
from megatrain_jax._src.engine.program.loss.stages import Stage
from megatrain_jax._src.engine.state.hardware import Hardware

# The forward once more, then five products of queries with keys or values instead of two.
_ATTENTION_BACKWARD = 1 + 2.5
# Time per kernel of a loop, from two measured steps of a mixture of experts on an H200; see
# docs/less_memory.md.
_SECONDS_PER_KERNEL = 6e-6
# Bytes per number of a float8 product's operands and result, in its forward; four times as many in
# a forward and a backward that recomputes it. A bfloat16 number is read for its array's maximum and
# again to be coded, and codes are written along both axes: about ten bytes for each of the three
# arrays. So the speed of products of widths 2,048 to 12,288 on an H100 is estimated to 6%.
_CODED_BYTES = 2.5


class Work(NamedTuple):
    """Numbers of floating-point operations, and of kernels in loops.

    Attributes:
        flops: All operations.
        attention: Operations in attention, included in `flops`.
        looped: Operations in loops, included in `flops`.
        kernels: Kernels that loops start.
        copied: Bytes that loops copy unchanged.
        float8: Operations in float8 products, included in `flops`.
        coded: Bytes read and written to code the operands of these products.
        float32: Operations in float32 products, included in `flops`.
    """

    flops: float
    attention: float
    looped: float = 0.0
    kernels: float = 0.0
    copied: float = 0.0
    float8: float = 0.0
    coded: float = 0.0
    float32: float = 0.0

    def plus(self, other: "Work", factor: float = 1.0) -> "Work":
        """This work plus `factor` times the given work."""
        return Work(*(own + factor * more for own, more in zip(self, other, strict=True)))

    def seconds(self, hardware: Hardware, sustained: float = 1.0, num_devices: int = 1) -> float:
        """Seconds on the devices; operations outside attention reach the share `sustained`."""
        computing = hardware.compute_seconds(
            self.flops, self.attention, sustained, self.float8, self.float32
        )
        coding = self.coded / hardware.memory_bytes_per_s
        return (computing + coding) / num_devices + self.loop_seconds(
            hardware, sustained, num_devices
        )

    def loop_seconds(
        self, hardware: Hardware, sustained: float = 1.0, num_devices: int = 1
    ) -> float:
        """Seconds by which loops take longer than their operations.

        Each device starts all kernels, and copies weights for its own examples. Copies count only
        if they take longer than the wait for kernels.
        """
        computing = hardware.compute_seconds(self.looped, 0, sustained) / num_devices
        copying = 2 * self.copied / hardware.memory_bytes_per_s  # read and written
        return max(_SECONDS_PER_KERNEL * self.kernels - computing, copying)


def forward_work(stages: Sequence[Stage]) -> list[Work]:
    """Operations of each stage's forward; stages of one template are counted once."""
    known: dict[Hashable, Work] = {}
    for stage in stages:
        if stage.key not in known:
            loops, flops = count_loops(stage.jaxpr), flops_by_kind(stage.jaxpr)
            known[stage.key] = Work(
                flops.total,
                flops.attention,
                loops.flops,
                loops.kernels,
                loops.copied,
                float8=flops.float8,
                coded=_CODED_BYTES * count_numbers(stage.jaxpr),
                float32=flops.float32,
            )
    return [known[stage.key] for stage in stages]


def backward_work(stage: Stage, forward: Work) -> Work:
    """Operations of a stage's backward: the recomputed forward and its differentiation.

    A product is differentiated by two factors, and one of them may be frozen.
    """
    attention = _ATTENTION_BACKWARD * forward.attention
    times = 2 + stage.trainable_share
    others = times * (forward.flops - forward.attention)
    # The bytes of codes are scaled like the operations.
    rest = (times * part for part in forward[2:])
    return Work(others + attention, attention, *rest)


def saved_work(residuals: Residuals | None) -> Work:
    """Operations that a stage's backward need not repeat if its forward saves residuals."""
    if residuals is None:
        return Work(flops=0, attention=0)
    saved = residuals.saved
    return Work(saved.total, saved.attention, float8=saved.float8, float32=saved.float32)
