"""Finds the tiles of a step's stages: for each kernel, the fewest that fit in memory.

The memory of a kernel is estimated from its equations, undivided and for each number of tiles.

Example: 16 GiB for temporaries, and the backward of a block with 524,288 tokens:

    tiles      undivided     2       4       8
    estimate    97 GiB      55      29      15 GiB: chosen

The block's forward needs 12 GiB and stays undivided.
"""

import dataclasses
from collections.abc import Hashable, Iterator

from megatrain_jax._src.engine.kernels.bound_stage import Divisible, Tiling, in_tiles
from megatrain_jax._src.engine.kernels.cache import KernelCache
from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.schedule.instructions import Op
from megatrain_jax._src.engine.spec.bound_step import BoundStep
from megatrain_jax._src.engine.spec.step_kernels import stage_kernels
from megatrain_jax._src.engine.state.placement import Placement

# Every tile reads and writes the sums of gradients once more, so many small tiles are slow.
_MOST_TILES = 64
# If no number of tiles fits, tiles are used if they reduce the memory to less than the first
# fraction. Then the fewest tiles are taken that need at most the least possible memory divided by
# the second fraction.
_WORTH, _NEAR = 0.8, 0.95


class TileFinder:
    """Finds tiles for the steps of runs with equal options, and remembers the estimates.

    Attributes:
        cache: Cache that estimates kernels, or compiles undivided ones.
        placement: Placement of the runs.
    """

    def __init__(self, cache: KernelCache, placement: Placement):
        """Finds tiles for kernels of a placement.

        Args:
            cache: Cache that estimates kernels; it keeps no functions of tiled kernels.
            placement: Placement of the run.
        """
        self.cache, self.placement = cache, placement
        self._divisible: dict[Hashable, Divisible] = {}
        self._divided: dict[Hashable, tuple[Kernel, Tiling] | None] = {}
        self._alike: dict[Hashable, Kernel] = {}  # one kernel of all that are equal

    def most(self, step: BoundStep) -> int:
        """The maximum estimated bytes of a stage's function, in its current tiles."""
        return self.largest(step)[0]

    def largest(self, step: BoundStep) -> tuple[int, int]:
        """The maximum estimated bytes of a stage's function, and the number of the stage."""
        asked: dict[tuple[int, int], tuple[Kernel, Tiling | None, int]] = {}
        for number, kernels in self._kernels(step):
            for kernel in kernels:
                tiling = step.stages[number].tiles.get(kernel.name)
                asked[id(kernel), tiling.num_tiles if tiling else 0] = kernel, tiling, number
        needs = []
        for kernel, tiling, number in asked.values():
            divided = tiling and self._in_tiles(kernel, tiling.num_tiles)
            needs.append((divided[1] if divided else self.cache.estimate([kernel]), number))
        return max(needs)

    def within(self, step: BoundStep, room: float, *, training: bool = True) -> BoundStep:
        """The same step with its stages in the fewest tiles that fit.

        Args:
            step: The step; its stages may be tiled already.
            room: Maximum bytes of a kernel's temporaries. A kernel that fits in no number of tiles
                gets the fewest that need about as few bytes as the most tiles.
            training: Whether it is a training step, not an evaluation.
        """
        # Kernels that this schedule doesn't run keep their tiles, because a later one may run them.
        stages, fewest = list(step.stages), dict[int, Tiling | None]()
        for number, kernels in self._kernels(step, training):
            name = kernels[0].name
            tiles = {k: v for k, v in stages[number].tiles.items() if k != name}
            for kernel in kernels:
                if id(kernel) not in fewest:
                    fewest[id(kernel)] = self._fewest(kernel, room)
            if found := [tiling for k in kernels if (tiling := fewest[id(k)])]:
                tiles[name] = max(found, key=lambda tiling: tiling.num_tiles)
            stages[number] = dataclasses.replace(stages[number], tiles=tiles)
        return dataclasses.replace(step, stages=tuple(stages))

    def _kernels(
        self, step: BoundStep, training: bool = True
    ) -> Iterator[tuple[int, list[Kernel]]]:
        """The undivided kernels of the stages that a step runs, with the stages' numbers.

        Kernels of one computation, for different microbatches, are together. Equal kernels are the
        same object, because comparing their keys takes long.
        """
        # `stage_kernels` applies a stage's tiles, so they are removed first.
        bare = [dataclasses.replace(bound, tiles={}) for bound in step.stages]
        whole, schedule = dataclasses.replace(step, stages=tuple(bare)), step.schedule
        instructions = (*schedule.cold, *schedule.flush) if training else schedule.evaluation
        # Together, these lists have every forward and backward.
        for op, number in dict.fromkeys((i.op, i.stage) for i in instructions):
            if op in (Op.FORWARD, Op.BACKWARD) and number is not None:
                found = stage_kernels(whole, op, number, self.placement)
                # Equal kernels of different steps may run beside different bytes.
                alike = ((k, (k.name, k.key, k.beside_bytes)) for k in found)
                yield number, [self._alike.setdefault(like, k) for k, like in alike]

    def _fewest(self, kernel: Kernel, room: float) -> Tiling | None:
        """The fewest tiles with which a kernel fits; None if it fits whole or is indivisible."""
        whole = self.cache.estimate([kernel])
        if whole <= room:
            return None
        divisible = self._of(kernel)
        counts = [count for count in divisible.counts if count <= _MOST_TILES]
        if not counts:
            return None
        # Estimates differ from expectations by about as much for all numbers of tiles.
        beside = whole - divisible.expected_bytes(None)

        def within(limit: float) -> Tiling | None:
            """The fewest tiles that need at most so many bytes; more never need more than fewer."""
            nonlocal beside
            low, high, best = -1, len(counts), None
            while high - low > 1:
                expected = (divisible.expected_bytes(n) + beside <= limit for n in counts)
                guess = next((at for at, fits in enumerate(expected) if fits), len(counts))
                at = min(max(guess, low + 1), high - 1)
                found = self._in_tiles(kernel, counts[at])
                if found is not None:
                    beside = found[1] - divisible.expected_bytes(counts[at])
                if found is not None and found[1] <= limit:
                    high, best = at, found[0]
                else:
                    low = at
            return best

        if (found := within(room)) is not None:
            return found
        # Comparing with the most tiles, not with those tried before, depends on no tie.
        most = self._in_tiles(kernel, counts[-1])
        least = min(whole, most[1]) if most else whole
        return None if least >= _WORTH * whole else within(least / _NEAR)

    def _of(self, kernel: Kernel) -> Divisible:
        like = kernel.name, kernel.key
        if like not in self._divisible:
            self._divisible[like] = Divisible(kernel, self.cache.traced(kernel))
        return self._divisible[like]

    def _in_tiles(self, kernel: Kernel, count: int) -> tuple[Tiling, int] | None:
        """The kernel's tiles and the bytes it needs in them; None if it can't be divided so."""
        like = kernel.name, kernel.key, count
        if like not in self._divided:
            found = self._of(kernel).into(count)
            if found is not None:
                self.cache.estimate_trial(found[0])
                # Without what was traced for these tiles.
                found = in_tiles(kernel, count), found[1]
            self._divided[like] = found
        if (found := self._divided[like]) is None:
            return None
        # Compiling a kernel corrects the estimates of those like it.
        divided, tiling = found
        return tiling, self.cache.estimate_trial(divided)
