"""The instructions of a schedule, as plain data: what the engine can be asked to do.

From a step of four groups with the least memory, M3 being group 3's masters and O3 its optimizer
state:

    FETCH M3, FETCH O3      their copies to the device are dispatched; nothing waits for them yet
    FORWARD 1               stage 1 computes with M1
    RELEASE M1              the device's copy is dropped, as that of the host is current
    ...
    BACKWARD 3, COMBINE     task 3: stage 3 makes the gradient of group 3, and
    UPDATE 3                M3 and O3 change, the gradient is gone
    OFFLOAD M3, OFFLOAD O3  the copies of the host are stale, so these leave
    ...
    WAIT 3                  task 3 has been computed, so the gradient's memory is free
    LAND M3                 M3 is in the host, so its memory is free, too
"""

import enum
from dataclasses import dataclass

from megatrain_jax._src.common.keys import Key


class Op(enum.Enum):
    """The operation that an instruction asks of the engine."""

    FETCH = "fetch"  # host -> device; both copies are current afterwards
    OFFLOAD = "offload"  # device -> host, then drop the device copy
    RELEASE = "release"  # drop a device copy whose host copy is current
    WAIT = "wait"  # block until a task has been computed
    LAND = "land"  # block until what a task offloaded is in the host
    FORWARD = "forward"
    BACKWARD = "backward"  # adds to the gradients of the stage's groups, creating missing ones
    ZEROS = "zeros"  # create a group's gradient, all zero
    REDUCE = "reduce"  # a group's complete gradient -> scalars, where updates are deferred
    COMBINE = "combine"  # all scalars -> the scalars that updates read
    UPDATE = "update"  # change a group's masters and optimizer state, consume its gradient


WAITS = frozenset({Op.WAIT, Op.LAND})
"""The instructions in which the driver waits for the device."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One thing for the engine to do.

    Attributes:
        op: The operation.
        stage: The stage of a FORWARD or BACKWARD.
        group: The group of a ZEROS, REDUCE or UPDATE.
        key: The part that a FETCH, OFFLOAD or RELEASE moves, or a LAND waits for.
        task: The task of its list this instruction belongs to; for WAIT and LAND the task to wait
            for, where negative numbers count back from the end of the step before (-1 is its
            last).
        wave: The wave whose microbatches a FORWARD or BACKWARD computes.
    """

    op: Op
    stage: int | None = None
    group: int | None = None
    key: Key | None = None
    task: int | None = None
    wave: int = 0
