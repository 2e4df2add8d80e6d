"""Sums of gradients that are stored in bfloat16: a backward adds in fp32, and rounds the result.

Example: a wave of three microbatches with the gradients `a`, `b` and `c`. Its backwards leave the
first two in fp32, and the last one reads and writes the stored sum `s`::

    first       a
    second      a + b
    third       round(((a + b) + c) + s)

Rounding to nearest would lose every gradient that is smaller than half of the last bit of `s`, so
sums are rounded up or down at random, unless the user wants otherwise.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatrain_jax._src.engine.kernels.kernel import placed
from megatrain_jax._src.engine.state.codec import (
    derived_draw,
    draw_of,
    random_bits,
    round_stochastically,
)
from megatrain_jax._src.engine.state.layout import Layout
from megatrain_jax._src.engine.state.placement import Placement

# Index of the random draws for sums in a group; masters and optimizer state have 0 and 1.
_SUMS = 2
_STEP = jax.ShapeDtypeStruct((), jnp.int32)
_NUMBER = jax.ShapeDtypeStruct((), jnp.uint32)

Segments = Sequence[jax.Array]
"""The segments of a gradient; see `Layout.gradient_avals`."""


class NarrowSums:
    """The sums of one backward, added to and rounded one after another; for use inside jit."""

    def __init__(self, placement: Placement, made: Sequence[Segments], draws: Sequence[Any]):
        """Starts before the first sum.

        Args:
            placement: Placement of the sums.
            made: For each sum, its gradient in fp32 from the wave's earlier microbatches; empty if
                there are none.
            draws: The run's key, the number of the step, the numbers of the sums' groups, and the
                number of sums that the step has rounded so far. Each number gives other bits.
        """
        self._key, self._step, groups, self._count = draws
        self._placement, self._made, self._groups = placement, iter(made), iter(groups)
        self._complete: list[Segments] = []

    @property
    def results(self) -> tuple[list[Segments], jax.Array]:
        """The wave's gradients in fp32, if there were earlier ones, and the new count."""
        # Returned to reuse the memory of the earlier gradients: products add to them in place.
        return self._complete, self._count

    def add(
        self,
        stored: Segments | None,
        layout: Layout,
        leaves: Sequence[jax.Array | None],
        order: Sequence[int],
        rounding: str,
    ) -> tuple[jax.Array, ...]:
        """The next sum: the stored one and a microbatch's gradients, in bfloat16.

        Args:
            stored: The stored sum; None if there is none.
            layout: Layout of the sum, in fp32.
            leaves: The gradients; None stands for zeros.
            order: Numbers of the leaves in the order of their gradients' computation.
            rounding: "stochastic" or "nearest".
        """
        spread = self._placement.spread
        stored = stored and [x.astype(jnp.float32) for x in stored]
        if (made := next(self._made, None)) is not None:
            total = layout.add(made, leaves, spread)
            self._complete.append(total)
            if stored:
                total = [x + y for x, y in zip(total, stored, strict=True)]
        elif stored:
            total = layout.add(stored, self._apart(leaves), spread)
        else:
            total = layout.pack_segments(leaves, spread, order)
        return self._rounded(total, rounding)

    def _apart(self, leaves: Sequence[jax.Array | None]) -> Sequence[jax.Array | None]:
        """The gradients behind barriers, so that their products are not fused with the sums."""
        # A product that adds to the stored sum needs the sum in memory in fp32 before it, and its
        # result is read again after it. Several devices exchange gradients in between anyway.
        if self._placement.num_devices > 1:
            return leaves
        return [x if x is None else jax.lax.optimization_barrier(x) for x in leaves]

    def _rounded(self, total: Segments, rounding: str) -> tuple[jax.Array, ...]:
        draw = derived_draw(draw_of(self._key, self._step, next(self._groups)), _SUMS)
        draw = derived_draw(draw, self._count)
        self._count += 1
        if rounding == "nearest":
            return tuple(x.astype(jnp.bfloat16) for x in total)
        found, first = [], 0
        for x in total:  # elements are numbered through all segments
            bits = random_bits(draw, jnp.uint32(first) + jnp.arange(x.size, dtype=jnp.uint32))
            found.append(round_stochastically(x, bits))
            first += x.size
        return tuple(found)


def takes(layouts: Sequence[Layout], placement: Placement, *, completes: bool) -> Any:
    """Shapes and shardings of `made` and `draws` of `NarrowSums`.

    Args:
        layouts: Layout of each sum.
        placement: Placement of the sums.
        completes: Whether earlier microbatches of the wave have made gradients.
    """
    avals = [layout.gradient_avals("float32") for layout in layouts if completes]
    key = jax.eval_shape(lambda: jax.random.key(0))
    draws = key, _STEP, [_NUMBER] * len(layouts), _NUMBER
    return placed(avals, placement.slabs_on_device), placed(draws, placement.small_on_device)


def out_shardings(placement: Placement) -> tuple[Any, Any]:
    """Shardings of `NarrowSums.results`."""
    return placement.slabs_on_device, placement.small_on_device
