"""The tiles of a step's stages: for each kernel the fewest whose temporaries fit in memory.

How much a kernel needs is estimated from its equations, whole and in each number of tiles.

A worked example, a room of 16 GiB for temporaries, and the backward of a block of 524,288 tokens:

    tiles        whole       2       4       8
    estimate    97 GiB      55      29      15 GiB: taken

and the block's forward, which needs 12 GiB, is left whole.
"""

import dataclasses
from collections.abc import Hashable, Iterator

from megatrain_jax._src.build.bound_step import BoundStep
from megatrain_jax._src.build.step_kernels import stage_kernel
from megatrain_jax._src.kernels.cache import KernelCache
from megatrain_jax._src.kernels.kernel import Kernel
from megatrain_jax._src.kernels.tiles import Divisible, Tiling
from megatrain_jax._src.schedule.instructions import Op
from megatrain_jax._src.state.placement import Placement

# Every tile reads and writes the sums of the parameters' gradients once more, and many small ones
# take longer than what they are made of.
_MOST_TILES = 64
# Where nothing fits, more tiles have to bring the need to less than this share of what it was.
_WORTH = 0.8


class TileFinder:
    """Finds tiles for steps of one run, and remembers what kernels need."""

    def __init__(self, cache: KernelCache, placement: Placement):
        """Finds tiles for kernels of a placement.

        Args:
            cache: Cache that estimates kernels; it keeps no functions of those in tiles.
            placement: Placement of the run.
        """
        self._cache, self._placement = cache, placement
        self._divisible: dict[Hashable, Divisible] = {}
        self._divided: dict[Hashable, tuple[Tiling, int] | None] = {}

    def most(self, step: BoundStep) -> int:
        """The most bytes that a stage's function is estimated to need, in the tiles that it has."""
        needs = []
        for number, kernel in self._kernels(step):
            tiling = step.stages[number].tiles.get(kernel.name)
            divided = tiling and self._in_tiles(kernel, tiling.num_tiles)
            needs.append(divided[1] if divided else self._cache.estimate([kernel]))
        return max(needs)

    def within(self, step: BoundStep, room: float, *, training: bool = True) -> BoundStep:
        """The same step with its stages in the fewest tiles that fit.

        Args:
            step: The step, whose stages may be in tiles already.
            room: Bytes that a kernel may need for itself. A kernel that fits in no number of tiles
                gets the number with which it needs least.
            training: Whether it is a training step, not an evaluation.
        """
        # Kernels that this schedule doesn't run stay as they are: another one may.
        stages = list(step.stages)
        for number, kernel in self._kernels(step, training):
            tiles = {k: v for k, v in stages[number].tiles.items() if k != kernel.name}
            if found := self._fewest(kernel, room):
                tiles[kernel.name] = found
            stages[number] = dataclasses.replace(stages[number], tiles=tiles)
        return dataclasses.replace(step, stages=tuple(stages))

    def _kernels(self, step: BoundStep, training: bool = True) -> Iterator[tuple[int, Kernel]]:
        """The kernels, undivided, of the stages that a step runs, with the stages' numbers."""
        # `stage_kernel` gives a kernel in the tiles of its stage: without them it is the whole one.
        bare = [dataclasses.replace(bound, tiles={}) for bound in step.stages]
        whole, schedule = dataclasses.replace(step, stages=tuple(bare)), step.schedule
        instructions = (*schedule.cold, *schedule.flush) if training else schedule.evaluation
        # Between them, these have every forward and backward.
        for op, number in dict.fromkeys((i.op, i.stage) for i in instructions):
            if op in (Op.FORWARD, Op.BACKWARD) and number is not None:
                yield number, stage_kernel(whole, op, number, self._placement)

    def _fewest(self, kernel: Kernel, room: float) -> Tiling | None:
        """The fewest tiles with which a kernel fits; None if it does whole, or can't be divided."""
        least, best = self._cache.estimate([kernel]), None
        if least <= room:
            return None
        counts = [count for count in self._of(kernel).counts if count <= _MOST_TILES]
        for count in counts:
            found = self._in_tiles(kernel, count)
            # The first number that fits is taken; until then each has to need far less than the
            # best so far.
            if found is not None and (found[1] <= room or found[1] < _WORTH * least):
                best, least = found
                if least <= room:
                    break
            # More tiles need no more: what the most of them need, which is of what isn't divided,
            # tells whether numbers between are worth estimating.
            smallest = self._in_tiles(kernel, counts[-1])
            if smallest is not None and smallest[1] > room and smallest[1] >= _WORTH * least:
                break
        return best

    def _of(self, kernel: Kernel) -> Divisible:
        like = kernel.name, kernel.key
        if like not in self._divisible:
            self._divisible[like] = Divisible(kernel)
        return self._divisible[like]

    def _in_tiles(self, kernel: Kernel, count: int) -> tuple[Tiling, int] | None:
        like = kernel.name, kernel.key, count
        if like not in self._divided:
            found = self._of(kernel).into(count)
            self._divided[like] = found and (found[1], self._cache.estimate_trial(found[0]))
        return self._divided[like]
