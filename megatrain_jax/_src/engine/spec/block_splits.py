"""The ways to split blocks that don't fit: into parts, then also their experts into groups."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatrain_jax._src.common.keys import Kind
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.layers.sliced_values import range_of
from megatrain_jax._src.engine.program.loss.block_parts import (
    NUMBERS_OF_GROUPS,
    NUMBERS_OF_PARTS,
    has_experts,
)
from megatrain_jax._src.engine.spec.cut_run import Cut
from megatrain_jax._src.engine.state.layout import GroupLayout, Layout


class BlockSplit(NamedTuple):
    """A way to cut blocks.

    Attributes:
        num_parts: Number of parts of each block.
        num_groups: Number of groups of its experts; see `groups_among`.
    """

    num_parts: int
    num_groups: int = 1


BLOCK_SPLITS = (
    *map(BlockSplit, NUMBERS_OF_PARTS),
    *(BlockSplit(num_groups + 1, num_groups) for num_groups in NUMBERS_OF_GROUPS),
)
"""All ways, in the order in which they are tried. A group of experts is a part; the rest of its
block is one more."""


def finer_splits(
    way: BlockSplit, left: Sequence[BlockSplit], leaves: Sequence[Leaf], has_smaller_parts: bool
) -> tuple[BlockSplit, ...]:
    """The ways still to be tried that may need fewer bytes.

    Args:
        way: The way that was tried last.
        left: The ways after it.
        leaves: The leaves, cut in that way.
        has_smaller_parts: See `Cut`.
    """
    parts = [other for other in left if other.num_groups == 1]
    groups = [other for other in left if other.num_groups > 1]
    if not has_smaller_parts:
        # If the largest part can't be cut, more parts only shorten its neighbours, once.
        parts = parts[:1]
        groups = groups if way.num_groups == 1 else []
    if way.num_groups == 1 and not has_experts(leaves):
        groups = []
    return (*parts, *groups)


def ends_blocks_of_codes(cut: Cut, layouts: Sequence[GroupLayout]) -> bool:
    """Whether each group of experts has whole blocks of codes.

    Its codes are then a part of the codes of all experts, as checkpoints have them.
    """

    def ends(layout: Layout, i: int) -> bool:
        return math.prod(layout.shapes[i]) % layout.segment_of(i)[0].codec.block == 0

    for rows, state, layout in zip(cut.grouping.leaves, cut.optimizer.state, layouts, strict=True):
        for position, i in enumerate(rows):
            if range_of(cut.leaves[i].index) and not ends(layout.master, position):
                return False
        for position, leaf in enumerate(state):
            if range_of(leaf.index) and not ends(*layout.leaf(Kind.OPTIMIZER_STATE, position)):
                return False
    return True
