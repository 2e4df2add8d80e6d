"""The floating-point operations of stages, attention's told from all others.

Kernels of attention run at a rate of their own and have no parameters: their backward takes 2.5
times their forward whatever is trained, that of other operations twice their forward where all is.

A worked example, a stage of 100 operations in products, half of whose parameters are trained, and
20 in a kernel of attention::

    forward       100 + 20
    backward      100 + 20 computed again, (1 + 0.5) * 100 + 2.5 * 20 to differentiate: 250 + 70
    with its products and its attention kept, the backward does 150 + 50
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from megatrain_jax._src.kernels.residuals import Residuals
from megatrain_jax._src.program.attention import is_attention
from megatrain_jax._src.program.flops import count_flops
from megatrain_jax._src.program.loss.stages import Stage
from megatrain_jax._src.state.hardware import Hardware

# Computed once more, and five products of a query and a key or value instead of two.
_ATTENTION_BACKWARD = 1 + 2.5


class Work(NamedTuple):
    """Floating-point operations.

    Attributes:
        flops: All of them.
        attention: Those of attention among them.
    """

    flops: float
    attention: float

    def plus(self, other: "Work", factor: float = 1.0) -> "Work":
        """These operations and `factor` times others."""
        return Work(
            flops=self.flops + factor * other.flops,
            attention=self.attention + factor * other.attention,
        )

    def seconds(self, hardware: Hardware, sustained: float = 1.0) -> float:
        """Seconds that they take one device; all but attention reach the share `sustained`."""
        return hardware.compute_seconds(self.flops, self.attention, sustained)


def forward_work(stages: Sequence[Stage]) -> list[Work]:
    """Operations of each stage's forward; stages of one template are counted once."""
    known: dict[Hashable, Work] = {}
    for stage in stages:
        if stage.key not in known:
            attention = count_flops(stage.jaxpr, is_attention)
            known[stage.key] = Work(flops=count_flops(stage.jaxpr), attention=attention)
    return [known[stage.key] for stage in stages]


def backward_work(stage: Stage, forward: Work) -> Work:
    """Operations of a stage's backward, which computes its forward again and differentiates it.

    A product has two factors to differentiate, of which one may be frozen.
    """
    attention = _ATTENTION_BACKWARD * forward.attention
    others = (2 + stage.trainable_share) * (forward.flops - forward.attention)
    return Work(flops=others + attention, attention=attention)


def saved_work(residuals: Residuals | None) -> Work:
    """Operations that a stage's backward need not do again if its forward keeps residuals."""
    if residuals is None:
        return Work(flops=0, attention=0)
    return Work(flops=residuals.saved_flops, attention=residuals.saved_attention)
