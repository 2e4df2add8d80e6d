"""Experts in groups: arrays of a block's experts as several leaves, one for each group.

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
import math
from collections import Counter
from collections.abc import Callable, Sequence

from megatrain_jax._src.common.model_path import ModelPath
from megatrain_jax._src.engine.program.layers.blocks import Leaf
from megatrain_jax._src.engine.program.layers.index import Range, range_of
from megatrain_jax._src.engine.program.loss.block_parts import reads_of
from megatrain_jax._src.engine.program.loss.stages import Program
from megatrain_jax._src.engine.program.trace_target import groups_among

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
        together = _read_together(divided, program_of(divided))
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
    large = [
        leaf
        for leaf in own
        if len(leaf.shape) > 2
        and leaf.shape[0] > 1
        and math.prod(leaf.shape) >= _LARGE * sizes[leaf.block]
    ]
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


def _read_together(leaves: Sequence[Leaf], program: Program) -> set[int]:
    """The parameters with several leaves that one equation reads."""
    found: set[int] = set()
    for stage in program.stages:
        for _, read in reads_of(stage)[1]:
            counts = Counter(leaves[stage.leaves[at]].parameter for at in read)
            found.update(p for p, count in counts.items() if count > 1)
    return found
