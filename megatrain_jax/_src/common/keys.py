"""Keys of the parts that are placed and moved: the kind of a part, and its owner's number."""

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """The kind of a part: masters, optimizer state, a gradient, an activation or residuals.

    Kinds are compared, hashed and sorted as plain integers, because keys are looked up very often.
    The order breaks ties: if nothing else decides which of several parts moves first, the smallest
    key does.
    """

    ACTIVATION = 0  # a value that one stage passes on, of a wave's microbatches
    GRADIENT = 1  # of a group's masters
    OPTIMIZER_STATE = 2  # of a group
    MASTERS = 3  # a group's parameters as they are stored
    RESIDUALS = 4  # values that a stage's forward saves for its backward, of a wave's microbatches


LASTING = frozenset({Kind.MASTERS, Kind.OPTIMIZER_STATE})
"""Kinds that always exist; training steps make and consume the remaining kinds."""
PASSING = frozenset({Kind.ACTIVATION, Kind.RESIDUALS})
"""Kinds that are made and consumed within one step; a gradient may wait for the next step."""


class Key(NamedTuple):
    """The name of one part: the unit of memory that is placed and transferred as a whole.

    Activations and residuals of a wave's microbatches move together. If they moved one by one, the
    microbatch would be a third field.

    Attributes:
        kind: The kind of the part.
        owner: For masters, optimizer state and gradients, the group's number; for an activation,
            its id; for residuals, the stage's number.
    """

    kind: Kind
    owner: int
