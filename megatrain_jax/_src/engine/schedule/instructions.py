"""The instructions of a schedule as plain data: the operations of the engine.

Example: a part of a step with four groups and minimum memory, where M3 are group 3's masters and O3
its optimizer state:

    FETCH M3, FETCH O3      their copies to the device are dispatched; nothing waits for them yet
    FORWARD 1               stage 1 computes with M1
    RELEASE M1              the device's copy is dropped, because the host's copy is current
    ...
    BACKWARD 3, COMBINE     task 3: stage 3 makes the gradient of group 3, and
    UPDATE 3                M3 and O3 change, the gradient is consumed
    OFFLOAD M3, OFFLOAD O3  the host's copies are stale, so these move to the host
    ...
    WAIT 3                  task 3 has been computed, so the gradient's memory is free
    LAND M3                 M3 is in the host, so its memory is free, too
"""

import enum
import functools
from dataclasses import dataclass

from megatrain_jax._src.common.keys import Key


class Op(enum.Enum):
    """The operation that an instruction asks of the engine."""

    FETCH = "fetch"  # host -> device; both copies are current afterwards
    OFFLOAD = "offload"  # device -> host, then drop the device copy
    RELEASE = "release"  # drop a device copy whose host copy is current
    WAIT = "wait"  # block until a task has been computed
    LAND = "land"  # block until a part that a task offloaded is in the host
    FORWARD = "forward"
    BACKWARD = "backward"  # adds to the gradients of the stage's groups, creating missing ones
    ZEROS = "zeros"  # create a group's gradient, all zero
    REDUCE = "reduce"  # a group's complete gradient -> scalars, if updates are deferred
    COMBINE = "combine"  # all scalars -> the scalars that updates read
    UPDATE = "update"  # change a group's masters and optimizer state, consume its gradient

    # By identity, as members are compared: `Enum` calls a Python function for each hash.
    __hash__ = object.__hash__


WAITS = frozenset({Op.WAIT, Op.LAND})
"""The instructions in which the driver waits for the device."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One operation of the engine, with its operands.

    Attributes:
        op: The operation.
        stage: The stage of a FORWARD or BACKWARD.
        group: The group of a ZEROS, REDUCE or UPDATE.
        key: The part that a FETCH, OFFLOAD or RELEASE moves, or a LAND waits for.
        task: The number of its task in the list; for WAIT and LAND, the task to wait for. Negative
            numbers count back from the end of the previous step (-1 is its last task).
        wave: The wave of a FORWARD or BACKWARD.
    """

    op: Op
    stage: int | None = None
    group: int | None = None
    key: Key | None = None
    task: int | None = None
    wave: int = 0


@functools.lru_cache(maxsize=2**15)
def instruction_of(op: Op, task: int, key: Key | None = None) -> Instruction:
    """A task's instruction to copy, drop or await a part; the same object for equal arguments.

    A search writes some million instructions, and most of them are equal.
    """
    return Instruction(op=op, key=key, task=task)
