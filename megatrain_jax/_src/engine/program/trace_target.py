"""The target of a trace: the machine that computes a loss, and how a run divides it.

A model may choose its operations by it. This library's attention, experts and losses do.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax


class TraceTarget(NamedTuple):
    """What a loss, and the model that it calls, are traced for.

    Attributes:
        card: Name of the GPU that a plan is made for, on a machine without one. The trace is never
            computed then, so it may contain calls that this machine lacks. None for this machine.
        widest_heads: Maximum width of heads that cuDNN's attention supports on that GPU; see
            `Hardware`.
        num_devices: Number of devices that share the batch. XLA divides the batch's examples over
            them. A loop over parts of a batch should be one loop per device: XLA computes each of
            its steps on all devices, so they would have to exchange their data.
        expert_groups: The least number of groups in which a layer reads its experts. It is above 1
            if a layer's experts don't fit on a device together. A model that reads them group by
            group, `weights[start:stop]`, then needs one group at a time.
    """

    card: str | None = None
    widest_heads: int = 0
    num_devices: int = 1
    expert_groups: int = 1

    def groups_of(self, num_experts: int) -> int:
        """Returns the number of equal groups in which a layer reads so many experts.

        Args:
            num_experts: Number of experts of a layer.

        Examples:
            >>> TraceTarget(expert_groups=8).groups_of(60)
            10
        """
        return groups_among(num_experts, self.expert_groups)


def groups_among(num_experts: int, wanted: int) -> int:
    """The least number of equal groups from `wanted` on."""
    return next((n for n in range(wanted, num_experts) if num_experts % n == 0), num_experts)


# A context of JAX's own, so it is part of the key of JAX's trace caches: no later run gets what was
# traced for another target.
_target = jax.make_user_context(TraceTarget())


def trace_target() -> TraceTarget:
    """Returns what the function that calls it is being traced for.

    For use in a model or a loss function. Elsewhere, the target is one device of this machine.
    """
    return _target.value


def traced_for(**changes: Any) -> AbstractContextManager[None]:
    """Traces the body for another target.

    Args:
        **changes: Attributes of `TraceTarget` that differ from the current target's.
    """
    return _target(_target.value._replace(**changes))
