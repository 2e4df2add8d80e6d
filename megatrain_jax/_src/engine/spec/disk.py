"""Chooses the state that rests on disks, where a host's memory can't hold all of it.

Frozen weights come first, because they are never written. Optimizer state is next, and after it
gradients that wait for their update in the next step: both are read and written once per step.
Masters are last, because forward and backward read them. Parts of equal shapes share slots in the
host's memory, so as few kinds of parts as possible are taken, the largest first. They are spread
over the groups, so that the disks are busy all the time.

Example: 40 equal blocks have 2 GiB of masters and 4 GiB of optimizer state each, and the host lacks
50 GiB. The optimizer state of 17 blocks goes to the disks: 68 GiB, less 16 GiB for two slots and
two arrays that wait to be written.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.engine.schedule.choices import spread_out
from megatrain_jax._src.engine.spec.run_spec import RunSpec

_IN_ORDER = Kind.OPTIMIZER_STATE, Kind.GRADIENT, Kind.MASTERS


def classes_of(spec: RunSpec) -> list[list[Key]]:
    """The parts that may rest on disks, by class, in the order in which they are put there."""
    workload, frozen = spec.first.workload, spec.grouping.frozen
    # Gradients of immediate updates are consumed where they are made.
    kinds = _IN_ORDER if workload.deferred else tuple(k for k in _IN_ORDER if k in LASTING)
    classes: dict[Hashable, list[Key]] = defaultdict(list)
    for group, layout in enumerate(spec.layouts):
        for kind in kinds:
            if workload.size(Key(kind, group)):
                arrays = layout.avals(kind, spec.first.gradient_dtypes.get(group))
                alike = tuple((x.shape, str(x.dtype)) for x in arrays)
                classes[kind, alike, group in frozen].append(Key(kind, group))

    def order(keys: list[Key]) -> tuple[bool, int, int]:
        first = keys[0]
        size = len(keys) * workload.size(first)
        return first.owner not in frozen, _IN_ORDER.index(first.kind), -size

    return sorted(classes.values(), key=order)


def state_for_disks(spec: RunSpec, num_bytes: int) -> Mapping[Key, int] | None:
    """The parts to put on disks, each with the number of its class.

    Args:
        spec: The run.
        num_bytes: Bytes per device that the host's memory lacks.

    Returns:
        The parts; None if even all of them free too little.
    """
    workload = spec.first.workload
    found: dict[Key, int] = {}
    lacking = num_bytes
    for number, keys in enumerate(classes_of(spec)):
        size, slots = workload.size(keys[0]), workload.slots(keys[0])
        if lacking <= 0:
            break
        if len(keys) <= slots:  # their slots would take as much
            continue
        count = min(len(keys), -(-lacking // size) + slots)
        found |= dict.fromkeys(spread_out(keys)[:count], number)
        lacking -= (count - slots) * size
    return found if lacking <= 0 else None
