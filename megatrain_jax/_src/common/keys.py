"""The names of what is placed and moved: kinds of parts, and keys that say whose part it is."""

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """The kind of a part: masters, optimizer state, a gradient, an activation or residuals.

    Kinds are compared, hashed and sorted as the integers they are, since they are in keys that are
    looked up all the time. The order matters: where nothing else says which of several parts moves
    first, the smaller key does.
    """

    ACTIVATION = 0  # what one stage hands to others, of all microbatches of a wave
    GRADIENT = 1  # of a group's masters
    OPTIMIZER_STATE = 2  # of a group
    MASTERS = 3  # a group's parameters as they are stored
    RESIDUALS = 4  # what a stage's forward keeps for its backward, of a wave's microbatches


LASTING = frozenset({Kind.MASTERS, Kind.OPTIMIZER_STATE})
"""Kinds that always exist; the others are made and consumed by training steps."""
PASSING = frozenset({Kind.ACTIVATION, Kind.RESIDUALS})
"""Kinds that are made and consumed within one step; a gradient may wait for the next one."""


class Key(NamedTuple):
    """Names one part: the unit that has a size, a place, and moves.

    The microbatches of a wave move together. Were they to move one by one, the microbatch would be
    a third field.

    Attributes:
        kind: The kind of the part.
        owner: The number of the group of masters, optimizer state or a gradient; the id of an
            activation; the number of the stage of residuals.
    """

    kind: Kind
    owner: int
