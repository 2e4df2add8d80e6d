"""What a loss is traced for: the machine that will compute it, and the run's number of devices.

A model may choose its operations by these, as this library's attention, experts and losses do.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax


class TraceTarget(NamedTuple):
    """What a loss, and the model that it calls, are traced for.

    Attributes:
        card: Name of the GPU, if this is a plan for another machine. Such a trace is never
            computed, so it may contain operations that this machine lacks. None for this machine.
        widest_heads: Maximum width of heads that cuDNN's attention supports on that GPU; see
            `Hardware`.
        num_devices: Number of devices that share the batch. XLA divides the batch's examples over
            them. Each device should loop over parts of its own examples: in one loop over all
            examples, XLA computes each iteration on all devices, which exchange data for it.
        expert_groups: Minimum number of groups of a layer's experts; above 1 if these don't fit on
            a device together. A model that reads `weights[start:stop]`, one group after another,
            needs one group at a time on the device.
    """

    card: str | None = None
    widest_heads: int = 0
    num_devices: int = 1
    expert_groups: int = 1

    def groups_of(self, num_experts: int) -> int:
        """Returns the number of equal groups of a layer's experts, at least `expert_groups`.

        Args:
            num_experts: Number of experts of a layer.

        Examples:
            >>> TraceTarget(expert_groups=8).groups_of(60)
            10
        """
        return groups_among(num_experts, self.expert_groups)


def groups_among(num_experts: int, wanted: int) -> int:
    """The smallest divisor of `num_experts` that is at least `wanted`."""
    return next((n for n in range(wanted, num_experts) if num_experts % n == 0), num_experts)


# JAX's trace caches distinguish values of a user context, so no run gets a trace that was made for
# another target.
_target = jax.make_user_context(TraceTarget())


def trace_target() -> TraceTarget:
    """Returns the target of the current trace, for use in a model or a loss function.

    Outside of a run's traces, it is one device of this machine.
    """
    return _target.value


def traced_for(**changes: Any) -> AbstractContextManager[None]:
    """Traces the body for another target.

    Args:
        **changes: Attributes of `TraceTarget` that differ from the current target's.
    """
    return _target(_target.value._replace(**changes))
