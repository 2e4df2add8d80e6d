"""Finds small parameters of a block that further blocks read too: they belong to no block.

T5 keeps its table of position biases in the first layer, and every layer adds its biases. As part
of the first layer, the table would cut each later layer in three: before the table is read, the
table, and after it. It is small, so it travels in a group of its own, or stays on the device.

Example: three blocks `tanh(x @ up + table) @ down`, with a table in the first. The reads are

    position  0     1        2       3     4        5       6     7        8
    leaf      up 0  table 0  down 0  up 1  table 0  down 1  up 2  table 0  down 2

Block 0 is visited at 0-2, 4 and 7. The last two visits read only `table`, a small part of it that
is read in several visits: it is shared. If a block is applied several times, all visits read most
of it, so nothing in it is shared.
"""

import dataclasses
import math
from collections import Counter, defaultdict

from megatrain_jax._src.common.model_path import ModelPath
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.loss.partition import Dataflow

_SMALL = 1 / 8  # share of a block


def find_shared(flow: Dataflow) -> frozenset[int]:
    """The numbers of the leaves that belong to no block, though their path is in one."""
    sizes: Counter[ModelPath | None] = Counter()
    for leaf in flow.leaves:
        sizes[leaf.block] += math.prod(leaf.shape)

    def is_small(block: ModelPath, visit: frozenset[int]) -> bool:
        return sum(math.prod(flow.leaves[i].shape) for i in visit) <= _SMALL * sizes[block]

    shared: set[int] = set()
    for block, visits in _visits(flow).items():
        times = Counter(i for visit in visits for i in visit)
        small = [visit for visit in visits if is_small(block, visit)]
        if len(small) < len(visits):  # without a visit of its own there is no block left
            shared.update(i for visit in small for i in visit if times[i] > 1)
    return frozenset(shared)


def without_block(leaf: Leaf) -> Leaf:
    """The same leaf, without a block."""
    return dataclasses.replace(leaf, block=None)


def _visits(flow: Dataflow) -> dict[ModelPath, list[frozenset[int]]]:
    """The leaves read in each visit of a block; a read of only another block ends a visit."""
    visits: dict[ModelPath, list[frozenset[int]]] = defaultdict(list)
    before: frozenset[ModelPath] = frozenset()
    for _, reads in flow.events():
        by_block: dict[ModelPath, set[int]] = defaultdict(set)
        for i in reads:
            if (block := flow.leaves[i].block) is not None:
                by_block[block].add(i)
        if not by_block:
            continue
        for block, own in by_block.items():
            if block in before:
                visits[block][-1] |= own
            else:
                visits[block].append(frozenset(own))
        before = frozenset(by_block)
    return visits
