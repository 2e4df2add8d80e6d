"""Chooses the state that rests on disks, where a host's memory can't hold all of it.

Frozen weights come first, because nothing is written; then optimizer state, which is read and
written once per step, and gradients that wait for their update in the next step, which are, too;
then masters, which forward and backward read. Parts of equal shapes share
slots in the host's memory, so as few kinds of parts as possible are taken, the largest first, and
spread over the groups, so that the disks are busy all the time.

Example: 40 equal blocks have 2 GiB of masters and 4 GiB of optimizer state each, and the host lacks
50 GiB. The optimizer state of 17 blocks goes to the disks: 68 GiB, less 16 GiB for two slots and
two arrays that wait to be written.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.engine.schedule.choices import spread_out
from megatrain_jax._src.engine.schedule.workload import SLOTS
from megatrain_jax._src.engine.spec.run_spec import RunSpec

_IN_ORDER = Kind.OPTIMIZER_STATE, Kind.GRADIENT, Kind.MASTERS


def state_for_disks(spec: RunSpec, num_bytes: int) -> Mapping[Key, int] | None:
    """The parts to put on disks, each with the number of its class.

    Args:
        spec: The run.
        num_bytes: Bytes per device that the host's memory lacks.

    Returns:
        The parts; None if even all of them free too little.
    """
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

    found: dict[Key, int] = {}
    lacking = num_bytes
    for number, keys in enumerate(sorted(classes.values(), key=order)):
        size, ways = workload.size(keys[0]), 1 if keys[0].owner in frozen else 2
        if lacking <= 0:
            break
        if len(keys) <= ways * SLOTS:  # their slots would take as much
            continue
        count = min(len(keys), -(-lacking // size) + ways * SLOTS)
        found |= dict.fromkeys(spread_out(keys)[:count], number)
        lacking -= (count - ways * SLOTS) * size
    return found if lacking <= 0 else None
