"""Chooses what rests on disks, where a host's memory can't hold all of it.

Frozen weights come first, because they are never written. Optimizer state is next, and after it
gradients that wait for their update in the next step: both are read and written once per step.
Masters come after these, because forward and backward read them. Activations that wait for the
backward are last: computing blocks again may save their memory, too. Parts of equal shapes share
slots in the host's memory, so as few kinds of parts as possible are taken, the largest first. They
are spread over the groups, so that the disks are busy all the time.

Example: 40 equal blocks have 2 GiB of masters and 4 GiB of optimizer state each, and the host lacks
50 GiB. The optimizer state of 17 blocks goes to the disks: 68 GiB, less 16 GiB for two slots and
two arrays that wait to be written.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping

import jax

from megatrain_jax._src.common.keys import LASTING, Key, Kind
from megatrain_jax._src.engine.schedule.choices import spread_out
from megatrain_jax._src.engine.spec.run_spec import RunSpec

_IN_ORDER = Kind.OPTIMIZER_STATE, Kind.GRADIENT, Kind.MASTERS, Kind.ACTIVATION


def arrays_of(spec: RunSpec, key: Key) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of the arrays of a part that may rest on disks."""
    first = spec.first
    if key.kind is Kind.ACTIVATION:
        return (first.program.values[key.owner],) * first.wave_microbatches
    return spec.layouts[key.owner].avals(key.kind, first.gradient_dtypes.get(key.owner))


def classes_of(spec: RunSpec, again: Collection[int] = ()) -> list[list[Key]]:
    """The parts that may rest on disks, by class, in the order in which they are put there.

    Args:
        spec: The run.
        again: The stages that are computed again, so that their outputs need not wait.
    """
    workload = spec.first.workload
    # Gradients of immediate updates are consumed where they are made.
    kinds = LASTING | {Kind.GRADIENT} if workload.deferred else LASTING
    parts = [Key(kind, group) for group in range(len(spec.layouts)) for kind in kinds]
    dropped = {i for stage in again for i in workload.makes[stage]}
    parts += [Key(Kind.ACTIVATION, i) for i in workload.activations if i not in dropped]
    classes: dict[Hashable, list[Key]] = defaultdict(list)
    for key in filter(workload.size, parts):
        alike = tuple((x.shape, str(x.dtype)) for x in arrays_of(spec, key))
        classes[key.kind, alike, workload.is_only_read(key)].append(key)

    def order(keys: list[Key]) -> tuple[bool, int, int]:
        first = keys[0]
        size = len(keys) * workload.size(first)
        return not workload.is_only_read(first), _IN_ORDER.index(first.kind), -size

    return sorted(classes.values(), key=order)


def state_for_disks(
    spec: RunSpec, num_bytes: int, again: Collection[int] = ()
) -> Mapping[Key, int] | None:
    """The parts to put on disks, each with the number of its class.

    Args:
        spec: The run.
        num_bytes: Bytes per device that the host's memory lacks.
        again: See `classes_of`.

    Returns:
        The parts; None if even all of them free too little.
    """
    workload = spec.first.workload
    found: dict[Key, int] = {}
    lacking = num_bytes
    for number, keys in enumerate(classes_of(spec, again)):
        size, slots = workload.size(keys[0]), workload.slots(keys[0])
        if lacking <= 0:
            break
        if len(keys) <= slots:  # their slots would take as much
            continue
        count = min(len(keys), -(-lacking // size) + slots)
        found |= dict.fromkeys(spread_out(keys)[:count], number)
        lacking -= (count - slots) * size
    return found if lacking <= 0 else None
