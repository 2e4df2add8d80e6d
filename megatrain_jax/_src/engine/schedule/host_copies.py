"""The copies of parts that host memory holds while a list of instructions runs."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatrain_jax._src.common.keys import Key
from megatrain_jax._src.engine.schedule.instructions import WAITS, Instruction, Op
from megatrain_jax._src.engine.schedule.tasks import Task


class HostChange(NamedTuple):
    """A copy in the host that comes or goes, or, without a key, the end of a task.

    Attributes:
        key: The part that is copied; None if the driver has waited for the task.
        task: The task that offloads the part, makes its copy stale, or has been computed.
        is_new: Whether the host gets a copy, instead of losing it.
    """

    key: Key | None
    task: int
    is_new: bool = False


def host_changes(
    tasks: Sequence[Task], instructions: Sequence[Instruction]
) -> Iterator[HostChange]:
    """The changes of the copies in the host, in the driver's order.

    Args:
        tasks: A list of tasks.
        instructions: Their instructions.
    """
    computations = (c for task in tasks for c in task.computations)
    for instruction in instructions:
        op, key, task = instruction.op, instruction.key, instruction.task or 0
        if op is Op.OFFLOAD:
            yield HostChange(key, task, is_new=True)
        elif op in WAITS:
            yield HostChange(None, task)
        # A fetched part's host copy is dropped when a computation consumes or changes the part.
        elif key is None:
            computation = next(computations)  # all lists have the tasks' order
            for gone in (*computation.kills, *computation.dirties):
                yield HostChange(gone, task)
