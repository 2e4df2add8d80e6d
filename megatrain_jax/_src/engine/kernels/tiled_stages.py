"""Tiled kernels: if a stage's temporaries don't fit in memory, it computes its rows in parts.

A kernel is traced whole, and equations that treat all rows alike are divided; see
`program/tiling/tiled.py`. Arguments and results don't change.

Example: the backward of a block with an MLP 4 times as wide as the model, in 16 tiles of a batch of
1 x 524,288 tokens. Its key consists of the whole kernel's key and the number of tiles::

    kernel = backward(bound, program, placement, 1)
    divided = in_tiles(kernel, 16)
    divided.key    # (kernel.key, 16)
    # Divisible(kernel).into(16) gives it, too, and Tiling(num_tiles=16, num_rows=32768)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from megatrain_jax._src.engine.kernels.kernel import Kernel
from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.effects import has_side_effects
from megatrain_jax._src.engine.program.tiling.flow import Flow, flow_of
from megatrain_jax._src.engine.program.tiling.tiled import tile_counts, tiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tiles of a kernel.

    Attributes:
        num_tiles: Number of tiles, computed one after another.
        num_rows: Rows per tile along the divided axis, such as tokens.
    """

    num_tiles: int
    num_rows: int


class Divisible:
    """A kernel, traced once, that can be divided into different numbers of tiles."""

    def __init__(self, kernel: Kernel):
        """Traces a kernel on the shapes that it takes."""
        self._kernel = kernel
        takes = kernel.takes or ()
        self._traced = jx.trace(kernel.build(), *takes)
        shardings = (x.sharding for x in jax.tree.leaves(takes))
        self._num_devices = max((sharding.num_devices for sharding in shardings), default=1)

    @functools.cached_property
    def counts(self) -> Sequence[int]:
        """The numbers of tiles that are worth trying, ascending; empty if it can't be divided."""
        # A callback would get its values in pieces.
        if has_side_effects(self._traced.jaxpr):
            return ()
        return tile_counts(self._jaxpr, num_devices=self._num_devices, flow=self._flow)

    @functools.cached_property
    def _jaxpr(self) -> Any:
        return jx.closed(self._traced.jaxpr)

    @functools.cached_property
    def _flow(self) -> Flow:
        return flow_of(self._jaxpr)

    def into(self, num_tiles: int) -> tuple[Kernel, Tiling] | None:
        """The kernel in `num_tiles` tiles; None if it can't be divided so."""
        found = tiled(self._jaxpr, num_tiles, num_devices=self._num_devices, flow=self._flow)
        if found is None:
            return None
        consts, out_tree = self._traced.consts, self._traced.out_tree

        def divided(*args: Any) -> Any:
            return jax.tree.unflatten(out_tree, found(*consts, *jax.tree.leaves(args)))

        key = self._kernel.key, num_tiles
        kernel = dataclasses.replace(self._kernel, key=key, build=lambda: divided)
        return kernel, Tiling(num_tiles=found.num_tiles, num_rows=found.rows_per_tile)


def in_tiles(kernel: Kernel, num_tiles: int) -> Kernel:
    """A kernel in tiles, or whole if it can't be divided so; it is traced when it is built.

    Kernels of one backward, for different microbatches, have one number of tiles, but perhaps not
    all of them can be divided into it.
    """

    def build() -> Callable[..., Any]:
        found = Divisible(kernel).into(num_tiles)
        return (found[0] if found else kernel).build()

    return dataclasses.replace(kernel, key=(kernel.key, num_tiles), build=build)
