"""Blocks in parts, and experts in groups, for devices without room for a block.

A block that does not fit on the device as a whole is cut inside.

A part is a run of the block's leaves, such as attention's or the MLP's, in the order of their first
reads. A cut lies between two leaves, with all reads of earlier leaves before all reads of later
ones. The best cut minimises the bytes of the largest part and the values handed on beside it. Parts
are blocks of their own from then on.

A worked example, a block of 100 MiB that hands on values of 8 MiB, and of 32 MiB within its MLP::

    leaf     norm   qkv   out   norm   up   down
    MiB         0    24     8      0   34     34
    handed on       8    24     8     8    32          in MiB, at a cut behind the leaf

    2 parts    norm qkv out | norm up down       the largest takes 68 + 8 MiB; with `up` in the
                                                 first part it would be 66 + 32

Arrays of a block's experts may be stored as several leaves, one for each group of experts.

Where a block doesn't fit in any number of parts, its experts are divided: an array with an expert
at each position of its first axis becomes leaves with some experts each, in different parts. The
loss must read each of these leaves separately. The library's own mixtures of experts do, if they
are traced for groups (`trace_target.py`). A product with the experts as an axis, as in
`einsum("td,edf->etf", x, w)`, is divided by its rule (`slicewise.py`). If one operation reads
several groups, as `jax.lax.ragged_dot` does, the array stays whole.

Example, for 8 experts of 16 x 32 in 2 groups::

    before    experts/up [8, 16, 32]
    after     experts/up[0:4] [4, 16, 32]    experts/up[4:8] [4, 16, 32]
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from megatrain_jax._src.common.trees import ModelPath
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.layers.sliced_values import Range, range_of
from megatrain_jax._src.engine.program.loss.stages import Program, Stage
from megatrain_jax._src.engine.program.trace_target import groups_among

NUMBERS_OF_PARTS = (1, 2, 3, 4, 6, 8)
"""Numbers of parts per block, tried in this order if a whole block doesn't fit."""
# Begins the last word in the path of a block's part.
_PART = "part "


def in_parts(
    leaves: Sequence[Leaf], program: Program, num_parts: int, weight: int = 1
) -> tuple[Leaf, ...]:
    """The leaves, with each block cut into so many parts, or as many as it can be cut into.

    Args:
        leaves: The leaves, with the blocks that the program was cut by.
        program: The program, with each `remat` opened, because a block inside a `remat` has no
            place to be cut.
        num_parts: Number of parts of a block.
        weight: Bytes on the device for each byte of a leaf, with its state and gradient, relative
            to a byte of a value that is passed on.
    """
    block_of: dict[int, ModelPath] = {}
    cut: set[ModelPath] = set()
    done: set[ModelPath | None] = {None}
    for stage in program.stages:
        blocks = {leaves[i].block for i in stage.leaves} - {None}
        if len(blocks) != 1 or not done.isdisjoint(blocks):
            continue  # blocks that can't be separated, or one that is applied again
        (block,) = blocks
        done.add(block)
        assert block is not None
        own = [at for at, i in enumerate(stage.leaves) if leaves[i].block == block]
        parts = _parts(*_cuts(stage, own, weight), num_parts)
        if len(parts) > 1:
            cut.add(block)
            for number, part in enumerate(parts, 1):
                block_of.update((stage.leaves[at], (*block, f"{_PART}{number}")) for at in part)
    # A leaf that its stage does not read stays in the first part.
    firsts: dict[ModelPath | None, ModelPath] = {block: (*block, f"{_PART}1") for block in cut}
    return tuple(
        dataclasses.replace(leaf, block=block_of.get(i) or firsts.get(leaf.block, leaf.block))
        for i, leaf in enumerate(leaves)
    )


def largest_block(leaves: Sequence[Leaf]) -> int:
    """The number of elements of the largest block, or of the largest part of one."""
    sizes: Counter[ModelPath] = Counter()
    for leaf in leaves:
        if leaf.block is not None:
            sizes[leaf.block] += math.prod(leaf.shape)
    return max(sizes.values(), default=0)


def whole_block(block: ModelPath) -> ModelPath:
    """The block that a part belongs to; a whole block is returned unchanged."""
    return block[:-1] if str(block[-1]).startswith(_PART) else block


def _cuts(
    stage: Stage, own: Sequence[int], weight: int
) -> tuple[list[int], list[int], list[int | None]]:
    """The places to cut a stage between leaves of its own.

    Returns:
        Its leaves in the order of their reads, as positions among the stage's; the bytes of each,
        weighted; and the bytes that a cut before each leaf passes on, and one behind the last leaf:
        0 at the stage's own borders, None where there can be no cut.
    """
    jaxpr, first = stage.jaxpr, len(stage.consts)
    variables = jaxpr.invars[first : first + len(stage.leaves)]
    reads, reading = reads_of(stage)
    events: dict[int, list[int]] = {at: [] for at in own}
    for p, found in reading:
        for at in found & events.keys():
            events[at].append(p)
    order = sorted((at for at in own if events[at]), key=lambda at: (events[at][0], at))
    # Equations of leaves alone don't count: each part repeats its own.
    alive = jx.bytes_alive(jaxpr.eqns, (), lambda v: v not in reads)
    handed: list[int | None] = [0]
    for n in range(1, len(order)):
        last = max(events[at][-1] for at in order[:n])
        places = range(last + 1, events[order[n]][0] + 1)
        handed.append(min((alive[p] for p in places), default=None))
    sizes = [weight * jx.num_bytes(variables[at].aval) for at in order]
    return order, sizes, [*handed, 0]


def reads_of(stage: Stage) -> tuple[dict[Any, frozenset[int]], list[tuple[int, frozenset[int]]]]:
    """Finds the equations of a stage that read its leaves.

    Casts and transposes of leaves alone are no reads: each part repeats its own.

    Returns:
        The leaves behind each variable made from leaves alone; the position of each equation that
        reads leaves, with these leaves. Leaves are positions among the stage's.
    """
    jaxpr, first = stage.jaxpr, len(stage.consts)
    reads: dict[Any, frozenset[int]] = {v: frozenset() for v in jaxpr.invars[:first]}
    own = jaxpr.invars[first : first + len(stage.leaves)]
    reads |= {v: frozenset((at,)) for at, v in enumerate(own)}
    events: list[tuple[int, frozenset[int]]] = []
    for p, eqn in enumerate(jaxpr.eqns):
        ins = jx.variables(eqn.invars)
        found = jx.union(reads, ins)
        if all(v in reads for v in ins):
            reads.update(dict.fromkeys(eqn.outvars, found))
        elif found:
            events.append((p, found))
    return reads, events


def _parts(
    leaves: list[int], sizes: list[int], handed: list[int | None], num_parts: int
) -> list[list[int]]:
    """The leaves in at most so many parts, so that the largest takes the fewest bytes."""
    passed = {n: num_bytes for n, num_bytes in enumerate(handed) if num_bytes is not None}
    # For each number of parts and each place the best way to get there: the bytes of the largest
    # part, and the places of the cuts.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for _ in range(min(num_parts, len(passed) - 1)):
        further: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end in passed:
            ways = [
                (max(largest, sum(sizes[start:end]) + passed[start] + passed[end]), (*way, end))
                for start, (largest, way) in best.items()
                if start < end
            ]
            if ways:
                further[end] = min(ways)
        best = further
    _, way = best.get(len(leaves), (0, (0, len(leaves))))
    return [leaves[start:end] for start, end in itertools.pairwise(way)]


NUMBERS_OF_GROUPS = (2, 4, 8, 16, 32)
"""Numbers of groups of each layer's experts, tried in this order if no number of parts fits."""
# Fraction of its block's elements from which on an array is worth dividing.
_LARGE = 0.1


class ExpertsIndivisibleError(Exception):
    """Raised if no experts can be divided into more groups."""


def has_experts(leaves: Sequence[Leaf]) -> bool:
    """Whether some arrays of blocks look like stacked experts."""
    return bool(_candidates(leaves))


def in_groups(
    leaves: Sequence[Leaf], wanted: int, program_of: Callable[[Sequence[Leaf]], Program]
) -> tuple[Leaf, ...]:
    """The leaves, with the experts of each block in about so many groups.

    Args:
        leaves: The leaves.
        wanted: Number of groups; see `groups_among`.
        program_of: Cuts the loss for some leaves, with each `remat` opened.

    Raises:
        ExpertsIndivisibleError: No experts are read group by group.
    """
    parameters = _candidates(leaves)
    while parameters:
        divided = _divided(leaves, parameters, wanted)
        # The parameters with several leaves that one equation reads.
        together: set[int] = set()
        for stage in program_of(divided).stages:
            for _, read in reads_of(stage)[1]:
                counts = Counter(divided[stage.leaves[at]].parameter for at in read)
                together.update(p for p, count in counts.items() if count > 1)
        if together.isdisjoint(parameters):
            return divided
        parameters -= together
        # Biases alone are not worth it.
        if not any(len(leaf.shape) > 2 for leaf in leaves if leaf.parameter in parameters):
            break
    raise ExpertsIndivisibleError


def are_divisible(leaves: Sequence[Leaf], wanted: int) -> bool:
    """Whether a larger number of groups than the wanted one makes smaller groups."""
    is_last = wanted >= NUMBERS_OF_GROUPS[-1]
    return not is_last and any(leaf.shape[0] > 1 for leaf in leaves if range_of(leaf.index))


def num_groups(leaves: Sequence[Leaf]) -> int:
    """The largest number of groups of one layer's experts; 1 if they are not divided."""
    counts = Counter(leaf.parameter for leaf in leaves if range_of(leaf.index))
    return max(counts.values(), default=1)


def _candidates(leaves: Sequence[Leaf]) -> set[int]:
    """The large arrays of blocks with three axes or more, and biases beside them."""
    sizes: Counter[ModelPath | None] = Counter()
    for leaf in leaves:
        sizes[leaf.block] += math.prod(leaf.shape)
    own = [leaf for leaf in leaves if leaf.block is not None and leaf.index == ()]
    several = [leaf for leaf in own if len(leaf.shape) > 2 and leaf.shape[0] > 1]
    large = [leaf for leaf in several if math.prod(leaf.shape) >= _LARGE * sizes[leaf.block]]
    counts = {(leaf.block, leaf.shape[0]) for leaf in large}
    modules = {leaf.modules[:-1] for leaf in large}

    def goes_along(leaf: Leaf) -> bool:
        # Adapters' matrices are as small as biases.
        has_count = len(leaf.shape) > 1 and (leaf.block, leaf.shape[0]) in counts
        return has_count and (len(leaf.shape) > 2 or leaf.modules[:-1] in modules)

    return {leaf.parameter for leaf in own if goes_along(leaf)}


def _divided(leaves: Sequence[Leaf], parameters: set[int], wanted: int) -> tuple[Leaf, ...]:
    found: list[Leaf] = []
    for leaf in leaves:
        if leaf.parameter not in parameters:
            found.append(leaf)
            continue
        num = leaf.shape[0]
        size = num // groups_among(num, wanted)
        shape = (size, *leaf.shape[1:])
        ranges = (Range(start, start + size) for start in range(0, num, size))
        found += [dataclasses.replace(leaf, index=(part,), shape=shape) for part in ranges]
    return tuple(found)
