"""The floating-point operations of stages, those of attention counted separately.

Kernels of attention run at a rate of their own and have no parameters: their backward takes 2.5
times their forward whatever is trained, that of other operations twice their forward where all is.

A worked example, a stage of 100 operations in products, half of whose parameters are trained, and
20 in a kernel of attention::

    forward       100 + 20
    backward      100 + 20 computed again, (1 + 0.5) * 100 + 2.5 * 20 to differentiate: 250 + 70
    with its products and its attention kept, the backward does 150 + 50

Loops of short kernels take longer than their operations (`program/loop_kernels.py`). The kernels of
a forward's loops, and what they copy, count as often as its operations.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from megatrain_jax._src.kernels.residuals import Residuals
from megatrain_jax._src.program.attention import is_attention
from megatrain_jax._src.program.flops import count_flops
from megatrain_jax._src.program.loop_kernels import count_loops
from megatrain_jax._src.program.loss.stages import Stage
from megatrain_jax._src.state.hardware import Hardware

# Computed once more, and five products of a query and a key or value instead of two.
_ATTENTION_BACKWARD = 1 + 2.5
# Between two kernels of a loop, from two measured steps of a mixture of experts on an H200:
# docs/less_memory.md has them.
_SECONDS_PER_KERNEL = 6e-6


class Work(NamedTuple):
    """Floating-point operations, and kernels of loops.

    Attributes:
        flops: All operations.
        attention: Those of attention among them.
        looped: Those of loops among them.
        kernels: Kernels that loops start.
        copied: Bytes that loops copy as they are.
    """

    flops: float
    attention: float
    looped: float = 0.0
    kernels: float = 0.0
    copied: float = 0.0

    def plus(self, other: "Work", factor: float = 1.0) -> "Work":
        """This work and `factor` times other work."""
        return Work(*(own + factor * more for own, more in zip(self, other, strict=True)))

    def seconds(self, hardware: Hardware, sustained: float = 1.0, num_devices: int = 1) -> float:
        """Seconds that it takes devices; all but attention reach the share `sustained`."""
        computing = hardware.compute_seconds(self.flops, self.attention, sustained) / num_devices
        return computing + self.loop_seconds(hardware, sustained, num_devices)

    def loop_seconds(
        self, hardware: Hardware, sustained: float = 1.0, num_devices: int = 1
    ) -> float:
        """Seconds by which loops take longer than their operations.

        Each device starts them all, and copies weights for its own examples. What it copies takes
        its memory's time, unless it waits for kernels anyway.
        """
        computing = hardware.compute_seconds(self.looped, 0, sustained) / num_devices
        copying = 2 * self.copied / hardware.memory_bytes_per_s  # read and written
        return max(_SECONDS_PER_KERNEL * self.kernels - computing, copying)


def forward_work(stages: Sequence[Stage]) -> list[Work]:
    """Operations of each stage's forward; stages of one template are counted once."""
    known: dict[Hashable, Work] = {}
    for stage in stages:
        if stage.key not in known:
            attention = count_flops(stage.jaxpr, is_attention)
            loops, flops = count_loops(stage.jaxpr), count_flops(stage.jaxpr)
            known[stage.key] = Work(flops, attention, loops.flops, loops.kernels, loops.copied)
    return [known[stage.key] for stage in stages]


def backward_work(stage: Stage, forward: Work) -> Work:
    """Operations of a stage's backward, which computes its forward again and differentiates it.

    A product has two factors to differentiate, of which one may be frozen.
    """
    attention = _ATTENTION_BACKWARD * forward.attention
    times = 2 + stage.trainable_share
    others = times * (forward.flops - forward.attention)
    loops = (times * part for part in (forward.looped, forward.kernels, forward.copied))
    return Work(others + attention, attention, *loops)


def saved_work(residuals: Residuals | None) -> Work:
    """Operations that a stage's backward need not do again if its forward keeps residuals."""
    if residuals is None:
        return Work(flops=0, attention=0)
    return Work(flops=residuals.saved_flops, attention=residuals.saved_attention)
