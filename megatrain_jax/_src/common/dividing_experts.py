"""The number of groups into which a trace divides the experts of each layer.

If the experts of one layer don't fit on a device together, a run traces its loss for several groups
of experts. The model then reads its experts group by group, `weights[start:stop]`, and each group
becomes a stage.
"""

from contextlib import AbstractContextManager

import jax

# A context of JAX's own, so it is part of the key of JAX's trace caches.
_num_groups = jax.make_user_context(1)


def experts_in_groups(num_groups: int) -> AbstractContextManager[None]:
    """Traces the body for experts in about this many groups; see `groups_among`."""
    return _num_groups(num_groups)


def num_groups_of(num_experts: int) -> int:
    """The number of groups of a layer with so many experts, in the function being traced."""
    return groups_among(num_experts, _num_groups.value)


def groups_among(num_experts: int, wanted: int) -> int:
    """The least number of equal groups from `wanted` on: 10 for 60 experts and 8 wanted groups."""
    return next((n for n in range(wanted, num_experts) if num_experts % n == 0), num_experts)
