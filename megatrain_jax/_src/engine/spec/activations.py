"""The activations passed between stages: counting, dropping and recomputing them.

Example: an embedding, four blocks and a head pass values 0 to 4 from one to the next. With a span
of 2, blocks 1 and 3 would be computed again, but the last block never is::

    computed_again    {1}: value 1 is dropped after block 2 has read it, and made again for the
                      backward of block 2; value 3 is still present after the head's backward
    last reads        by task: FORWARD 2 reads value 1 for the last time before it is made again
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.program.effects import has_side_effects
from megatrain_jax._src.engine.program.loss.stages import Program, Stage
from megatrain_jax._src.engine.schedule.instructions import Instruction, Op
from megatrain_jax._src.engine.schedule.tasks import last_reads
from megatrain_jax._src.engine.schedule.workload import Workload

# Smallest activation in bytes that is worth a transfer; smaller ones stay and are not counted.
_SMALL = 256


def counted_activations(
    program: Program, microbatches: int, num_devices: int
) -> tuple[dict[int, int], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """The activations that a schedule counts: large values passed between stages.

    Values that are replicated on all devices are not counted, because the host would have to store
    a copy for each.

    Returns:
        Bytes per device by id, for all microbatches; and, for each stage, the ids that it makes and
        the ids that it reads.
    """
    read = {i for stage in program.stages for i in stage.inputs}
    made = {i for stage in program.stages for i in stage.outputs}
    activations = {}
    for i in sorted(read & made - set(program.outputs)):
        if num_devices > 1 and i not in program.examples.values:
            continue
        num_bytes = microbatches * program.num_bytes(i, num_devices)
        if num_bytes >= _SMALL and not jnp.issubdtype(program.values[i].dtype, jax.dtypes.extended):
            activations[i] = num_bytes

    def counted(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(i for i in dict.fromkeys(ids) if i in activations)

    makes = tuple(counted(stage.outputs) for stage in program.stages)
    return activations, makes, tuple(counted(stage.inputs) for stage in program.stages)


def recomputed_stages(
    workload: Workload, stages: Sequence[Stage], span: int, num_bytes: float = math.inf
) -> frozenset[int]:
    """The stages with a forward that is computed again before their backward.

    A stage with prints or callbacks is excluded, because these would fire twice.

    Args:
        workload: The step's workload.
        stages: Its stages.
        span: Of each `span` blocks, all but one are computed again.
        num_bytes: Bytes of activations to save; only as many blocks as needed are computed again,
            starting from the first.
    """
    pure = [
        s
        for s, stage in enumerate(stages)
        if stage.is_block and workload.backward[s] and not has_side_effects(stage.jaxpr)
    ]
    # Every `span`-th block stores its output; the blocks between pass theirs on and drop it. With a
    # span of 1, all outputs are stored.
    again = {s for position, s in enumerate(pure) if (position + 1) % span}
    # The last stage's backward follows its forward at once, so its inputs are still present.
    at = max((s for s, backward in enumerate(workload.backward) if backward), default=0)
    again.discard(at)
    while at - 1 in again:
        at -= 1
        again.discard(at)
    found: set[int] = set()
    for s in sorted(again):
        if num_bytes <= 0:
            break
        found.add(s)
        num_bytes -= sum(workload.activations[i] for i in workload.makes[s])
    return frozenset(found)


def last_read_by_task(
    instructions: Sequence[Instruction], stages: Sequence[Stage], program: Program
) -> dict[int, tuple[int, ...]]:
    """Ids of the values that each stage's task reads for the last time within its wave, by task."""
    waves: dict[int, list[tuple[int, Op, Stage]]] = {}
    for i in instructions:
        if i.op in (Op.FORWARD, Op.BACKWARD) and i.stage is not None and i.task is not None:
            waves.setdefault(i.wave, []).append((i.task, i.op, stages[i.stage]))
    # The step's end reads the outputs (loss and new variables), so no stage drops them.
    passing = {i for stage in stages for i in stage.inputs}.difference(program.outputs)
    found = {}
    # Each wave has its own microbatches, with their own values from the prologue.
    for computing in waves.values():
        done = last_reads(
            [stage.inputs for _, _, stage in computing],
            [stage.outputs if op is Op.FORWARD else () for _, op, stage in computing],
        )
        for (task, *_), ids in zip(computing, done, strict=True):
            found[task] = tuple(i for i in ids if i in passing)
    return found
